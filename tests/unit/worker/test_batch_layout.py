"""Which of a step's tokens are read later.  Oracle: the picture in the module's docstring, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tp_engine.plan import StepPlan
from tp_engine.worker.batch.step_inputs import make_layout


@pytest.mark.parametrize(
    ("decodes", "chunks", "sampled", "wanted"),
    [
        ([7, 2], {}, [], None),  # all, in order
        ([7, 2], {5: 3, 1: 2}, [True, False], [0, 1, 4]),
        ([], {5: 3, 1: 2}, [False, True], [4]),
        ([], {5: 3}, [False], [0]),  # no token is read, and an empty batch is not run
    ],
)
def test_wanted_tokens(
    decodes: list[int], chunks: dict[int, int], sampled: list[bool], wanted: list[int] | None
) -> None:
    """Decodes and the last tokens of the prompts that end in this step."""
    plan = StepPlan(
        step_id=1,
        decode_rows=np.array(decodes, dtype=np.int32),
        prefill_rows=np.array(list(chunks), dtype=np.int32),
        prefill_tokens=np.array(list(chunks.values()), dtype=np.int32),
        prefill_samples=np.array(sampled, dtype=np.bool_),
    )
    found = make_layout(plan, torch.device("cpu")).wanted
    assert wanted is None if found is None else found.tolist() == wanted
