"""The first steps, run before there are requests: what happens only once happens here.

Kernels are compiled and loaded, libraries choose their algorithms and allocate their workspaces.  The steps are plans
as rank 0 would send them, of rows of two tokens that all lie in block 0, so a cache of one block is enough::

    prompts      the beginning of one, a whole one
    mixed        a decode beside a prompt
    sampling     decodes of every kind that a kernel or the general sampler treats in its own way
    decodes      of 1, 2, 4, ... rows up to the most: attention divides the keys by the number of rows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tp_engine.config import EngineConfig
from tp_engine.plan import FIRST_STEP_ID, Admission, RowSampling, StepPlan
from tp_engine.units import ceil_div
from tp_engine.worker.model_runner import ModelRunner

_LENGTH = 2
_GREEDY = RowSampling()
_PENALISED = RowSampling(temperature=1.0, presence_penalty=0.5)
_MIN_P = RowSampling(temperature=1.0, min_p=0.1)
_RANKED = RowSampling(temperature=0.8, top_k=20, top_p=0.9)
_NUCLEUS = RowSampling(temperature=1.0, top_p=0.9)
_SCORED = RowSampling(temperature=1.0, top_p=0.9, logprobs=1)
_KINDS = ((_PENALISED,), (_MIN_P,), (_PENALISED, _MIN_P), (_RANKED,), (_NUCLEUS,), (_SCORED,), (_GREEDY, _RANKED))


def warms_up(device_type: str) -> bool:
    """Whether the first steps of such a device would be slow: a CPU's kernels are compiled before they are loaded."""
    return device_type == "cuda"


def warm_up(runner: ModelRunner, config: EngineConfig) -> None:
    """Run the first steps on ``runner``, which has no rows; a collective.  Its rows mean nothing afterwards."""
    for plan in _steps_of_every_kind(config, runner.num_groups):
        runner.run(plan).result()
    run_largest_decodes(runner, config)


def run_largest_decodes(runner: ModelRunner, config: EngineConfig) -> None:
    """Decodes of 1, 2, 4, ... rows: attention needs the most memory for parts of its keys anywhere among them."""
    for num_rows in _decode_sizes(config.max_num_seqs):
        runner.run(_plan(config, runner.num_groups, [_GREEDY] * num_rows)).result()


def _steps_of_every_kind(config: EngineConfig, num_groups: int) -> Iterator[StepPlan]:
    """As far as the limits on rows and tokens go."""
    steps: list[tuple[Sequence[RowSampling], Sequence[int]]] = [((), (1,)), ((), (_LENGTH,)), ((_GREEDY,), (_LENGTH,))]
    steps += [(samplings, ()) for samplings in _KINDS]
    for decodes, chunks in steps:
        num_tokens, num_rows = len(decodes) + sum(chunks), len(decodes) + len(chunks)
        if num_tokens <= config.max_num_batched_tokens and num_rows <= config.max_num_seqs:
            yield _plan(config, num_groups, decodes, chunks)


def _decode_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, ... and ``max_num_seqs``."""
    powers = [1 << exponent for exponent in range((max_num_seqs - 1).bit_length())]
    return [*powers, max_num_seqs]


def _plan(
    config: EngineConfig, num_groups: int, decodes: Sequence[RowSampling], chunks: Sequence[int] = ()
) -> StepPlan:
    """Rows that decode with ``decodes``, then greedy prompts of which ``chunks`` tokens are computed in this step."""
    samplings = [*decodes, *[_GREEDY] * len(chunks)]
    computed = [_LENGTH - 1] * len(decodes) + [0] * len(chunks)
    rows = np.arange(len(samplings), dtype=np.int32)
    return StepPlan(
        step_id=FIRST_STEP_ID,
        released=np.arange(config.max_num_seqs, dtype=np.int32),
        admitted=tuple(
            Admission(
                row=row,
                token_ids=np.zeros(_LENGTH, dtype=np.int32),
                num_prompt_tokens=1,
                num_computed_tokens=computed[row],
                block_ids=np.zeros(num_groups * ceil_div(_LENGTH, config.block_size), dtype=np.int32),
                sampling=sampling,
            )
            for row, sampling in enumerate(samplings)
        ),
        decode_rows=rows[: len(decodes)],
        prefill_rows=rows[len(decodes) :],
        prefill_tokens=np.array(chunks, dtype=np.int32),
        prefill_samples=np.array([chunk == _LENGTH for chunk in chunks], dtype=np.bool_),
    )
