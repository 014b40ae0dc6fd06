"""Steps with draft rows that run before there are requests: first steps, and those that are timed."""

import time

import numpy as np

from tp_engine.config import EngineConfig
from tp_engine.features.speculation.feature import BASE_ROWS, DRAFT_TOKENS, NUM_DRAFTS
from tp_engine.plan import FIRST_STEP_ID, StepPlan
from tp_engine.system.units import ceil_div
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.trial_steps import GREEDY, LENGTH, Variation, sizes_up_to, trial_plan


def warm_up(runner: ModelRunner, config: EngineConfig, num_drafts: int, vary: Variation) -> None:
    """Run a step after which a head drafts, and the decodes with more rows than there are sequences, as ``vary`` makes
    them, on ``runner``, which has no rows and gets arbitrary ones; a collective."""
    plan = trial_plan(config, runner.num_groups, [GREEDY])
    runner.run(vary(plan).extended({NUM_DRAFTS.name: num_drafts})).result()
    for num_rows, (first, again) in decodes_with_drafts(config, runner.num_groups, config.max_step_decodes).items():
        if num_rows > config.max_num_seqs:
            runner.run(vary(first)).result()
            runner.run(again).result()  # the rows still have what ``vary`` gave them


def time_decodes(
    runner: ModelRunner, config: EngineConfig, most_rows: int, *, num_drafts: int = 0, run_length: int = 1
) -> dict[int, float]:
    """Seconds of a greedy decode step of 1, 2, 4, ... and ``most_rows`` rows, with so many drafts of a head after
    each; a collective.

    Of every ``run_length`` rows one is a request's and the others are its draft rows, as where draft tokens are
    verified: layers with a recurrent state compute these one after the other.

    The first two steps of a size may be recorded and compared (``CapturedSteps``); the fastest of
    three later ones counts.
    """
    found: dict[int, float] = {}
    for num_rows, (first, again) in decodes_with_drafts(config, runner.num_groups, most_rows, run_length).items():
        if num_drafts:
            again = again.extended({NUM_DRAFTS.name: num_drafts})
        times: list[float] = []
        for _ in range(4):
            runner.run(first).result()
            began_s = time.perf_counter()
            runner.run(again).result()
            times.append(time.perf_counter() - began_s)
        found[num_rows] = min(times[1:])
    return found


def decodes_with_drafts(
    config: EngineConfig, num_groups: int, most_rows: int, run_length: int = 1
) -> dict[int, tuple[StepPlan, StepPlan]]:
    """Return greedy decodes of 1, 2, 4, ... and ``most_rows`` rows, as far as the context goes: a step that admits the
    sequences, and one of all rows.

    Of every ``run_length`` rows, or more where there are more rows than sequences, one is a sequence's and the others
    are its draft rows.
    """
    longest = max(1, config.max_model_len - LENGTH) if config.max_model_len else most_rows
    found = {}
    for num_rows in sizes_up_to(min(most_rows, config.max_num_seqs * longest)):
        length = min(longest, max(run_length, ceil_div(num_rows, config.max_num_seqs)))
        num_own = ceil_div(num_rows, length)
        first = trial_plan(config, num_groups, [GREEDY] * num_own)
        again = StepPlan(step_id=FIRST_STEP_ID, decode_rows=first.decode_rows)
        if num_rows > num_own:
            draft_rows = config.max_num_seqs + np.arange(num_rows - num_own, dtype=np.int32)
            again = StepPlan(
                step_id=FIRST_STEP_ID,
                decode_rows=np.concatenate((first.decode_rows, draft_rows)),
                extensions={
                    BASE_ROWS.name: first.decode_rows.repeat(length - 1)[: len(draft_rows)],
                    DRAFT_TOKENS.name: np.zeros(len(draft_rows), dtype=np.int32),
                },
            )
        found[num_rows] = first, again
    return found
