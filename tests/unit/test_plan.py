"""A plan as a person reads it, in a debugger or in a failing test."""

from __future__ import annotations

import numpy as np

from tp_engine.plan import Admission, Control, RowSampling, StepPlan


def ints(*values: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


def test_what_a_step_does() -> None:
    """Oracle: by hand."""
    admitted = Admission(
        row=5,
        token_ids=np.arange(40, dtype=np.int32),
        num_prompt_tokens=40,
        num_computed_tokens=16,
        block_ids=ints(1, 2, 3),
        sampling=RowSampling(),
    )
    plan = StepPlan(
        step_id=12,
        rows_epoch=3,
        released=ints(2),
        admitted=(admitted,),
        block_rows=ints(0, 0),
        block_ids=ints(7, 8),
        copies=np.array([[1, 2]], dtype=np.int32),
        decode_rows=ints(0, 1),
        prefill_rows=ints(5, 6),
        prefill_tokens=ints(24, 100),
        prefill_samples=np.array([True, False]),
        extensions={"speculation.drafts": ints(1), "lora.slots": ints(0)},
    )
    assert repr(plan) == (
        "<StepPlan step 12; decodes 2 rows (0, 1); prompt tokens of 2 rows (5: 24, 6: 100...); admits 1 row (5); "
        "releases 1 row (2); 2 new blocks; 1 copies; sections 2 (speculation.drafts, lora.slots)>"
    )
    assert repr(StepPlan(step_id=1)) == "<StepPlan step 1>"
    assert repr(StepPlan(step_id=9, control=Control.STOP)) == "<StepPlan step 9; STOP>"


def test_the_largest_plan_is_a_few_lines() -> None:
    """Oracle: below 600 letters, whatever the sizes: 4,096 rows of each kind, and an order of a megabyte."""
    rows = np.arange(4096, dtype=np.int32)
    plan = StepPlan(
        step_id=2**40,
        released=rows,
        block_rows=rows,
        block_ids=rows,
        copies=np.stack((rows, rows), axis=1),
        state_copies=np.stack((rows, rows), axis=1),
        decode_rows=rows,
        prefill_rows=rows,
        prefill_tokens=rows,
        prefill_samples=np.ones(4096, dtype=bool),
        order=b"x" * (1 << 20),
        extensions={f"feature{number}.section": rows for number in range(50)},
    )
    text = repr(plan)
    assert len(text) < 600 and "\n" not in text
    assert "decodes 4096 rows (0, 1, 2, 3, 4, 5, 6, 7, ...)" in text
