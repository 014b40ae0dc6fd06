"""A rank's half of speculation: draft rows, a draft head, the times of steps; and what rank 0's engine takes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from tp_engine.config import EngineConfig
from tp_engine.engine.feature import EngineFeature
from tp_engine.features.registry import find_half
from tp_engine.features.speculation.feature import (
    BASE_ROWS,
    DRAFT_TOKENS,
    KEPT_ROWS,
    KEPT_TOKENS,
    SpeculationLimits,
    draft_rows,
)
from tp_engine.features.speculation.head_drafter import HeadDrafter
from tp_engine.features.speculation.head_passes import HeadPasses, SharedKvPasses, head_bytes
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.features.speculation.trial_steps import time_decodes, warm_up
from tp_engine.ipc.job_board import JobBoard
from tp_engine.models.draft_head import DraftHead
from tp_engine.plan import IntArray, StepPlan
from tp_engine.sampling.state import SamplingState
from tp_engine.system.units import ceil_div
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.feature import RunnerFeature, RunnerHooks
from tp_engine.worker.features import RankFeature, RankParts, RunnerParts, TrialRunner
from tp_engine.worker.image_encoder import ImageEncoder
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.trial_steps import Variation
from tp_engine.worker.worker import StartedRank


def make(parts: RankParts) -> Iterator[SpeculationOfRank]:
    """Make a rank's half if tokens are drafted."""
    config = parts.effective.config.speculative_config
    if config is not None:
        yield SpeculationOfRank(config, parts)


class SpeculationOfRank(RankFeature):
    """What decode steps take on this rank, in seconds by their number of rows, and one more draft for each row with a
    draft head; empty where the configuration says how many rows may have draft tokens."""

    def __init__(self, config: SpeculativeConfig, parts: RankParts) -> None:
        self._config, effective = config, parts.effective
        num_columns = ceil_div(effective.max_model_len, effective.config.block_size)
        most = effective.config.max_step_decodes
        self._head_bytes = 0 if parts.head is None else head_bytes(parts.head, most, num_columns)
        self.decode_seconds: dict[int, float] = {}
        self.draft_seconds: dict[int, float] = {}

    def reserved(self) -> Counter[str]:
        return Counter(tables=self._head_bytes)

    def runner(self, parts: RunnerParts) -> Iterator[RunnerFeature]:
        yield DraftRows(parts.batch, parts.sampling)
        head = parts.rank.head
        if head is not None:
            images = find_half(parts.features, ImageEncoder)
            is_first = parts.rank.groups.info.is_first
            yield HeadDrafter(_passes(head, parts), parts.batch, is_first=is_first, images=images)

    def warm_up(self, parts: RankParts, runner: ModelRunner, vary: Variation) -> None:
        warm_up(runner, parts.effective.config, self._config.num_speculative_tokens, vary)

    def measure(self, parts: RankParts, trial: TrialRunner) -> None:
        if self._config.max_step_rows is None:
            parts.start_up.run("timing decodes", lambda: self._time(parts, trial))

    def _time(self, parts: RankParts, trial: TrialRunner) -> None:
        """Time decode steps, with the draft rows that a model with recurrent states has, and a head's drafts."""
        effective, num_drafts = parts.effective, self._config.num_speculative_tokens
        config, most_rows = effective.config, effective.most_drafting_rows
        with trial(most_rows) as runner:
            decodes = time_decodes(runner, config, most_rows)
            if self._config.has_head:
                drafting = time_decodes(runner, config, most_rows, num_drafts=num_drafts)
                self.draft_seconds = {
                    rows: max(0.0, seconds - decodes[rows]) / num_drafts for rows, seconds in drafting.items()
                }
            if effective.kv_layout.states is not None:
                decodes = time_decodes(runner, config, most_rows, run_length=1 + num_drafts)
        self.decode_seconds = decodes


def _passes(head: DraftHead, parts: RunnerParts) -> HeadPasses:
    effective = parts.rank.effective
    return (HeadPasses if head.keeps_kv else SharedKvPasses)(
        head,
        parts.rank.backends,
        (effective.draft_group,) if head.keeps_kv else head.groups,
        parts.batch,
        parts.sampling,
        parts.rank.groups.communicator,
        effective.most_drafting_rows,
    )


class DraftRows(RunnerFeature):
    """Enters draft tokens, and those that were right, into the rows of ``batch`` and their ``sampling``."""

    def __init__(self, batch: InputBatch, sampling: SamplingState) -> None:
        self._batch, self._sampling = batch, sampling
        self._others: Sequence[Callable[[IntArray, IntArray], None]] = ()

    def attach(self, hooks: RunnerHooks) -> None:
        hooks.before_rows.append(self.before_rows)
        hooks.apply.append(self.apply)
        self._others = hooks.mirror_rows

    def before_rows(self, plan: StepPlan) -> None:
        """Let the rows keep the tokens that earlier draft rows have read."""
        rows = KEPT_ROWS.of(plan)
        if len(rows):
            tokens = KEPT_TOKENS.of(plan)
            self._batch.keep(rows, tokens)
            self._sampling.keep(rows, tokens)

    def apply(self, plan: StepPlan) -> None:
        """Let the step's draft rows stand for theirs."""
        rows = BASE_ROWS.of(plan)
        if len(rows):
            drafting, tokens = draft_rows(plan), DRAFT_TOKENS.of(plan)
            self._batch.stand_for(drafting, rows, tokens)
            self._sampling.mirror(drafting, rows, tokens)
            for mirror_rows in self._others:
                mirror_rows(drafting, rows)


def open_speculation(config: EngineConfig) -> SpeculationOfEngine | None:
    """Make the engine's half if tokens are drafted."""
    return None if config.speculative_config is None else SpeculationOfEngine(config.speculative_config)


class SpeculationOfEngine(EngineFeature):
    """Tells the scheduler how tokens are drafted, and what they take on rank 0."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._limits = SpeculationLimits(config=config)

    @property
    def given(self) -> None:
        """The scheduler makes its proposers itself."""

    def start(self, rank: StartedRank, board: JobBoard) -> None:
        own = rank.features["speculation"]
        assert isinstance(own, SpeculationOfRank)
        self._limits = SpeculationLimits(
            config=self._limits.config,
            decode_seconds=tuple(own.decode_seconds.items()),
            draft_seconds=tuple(own.draft_seconds.items()),
        )

    def limits(self) -> SpeculationLimits:
        return self._limits

    def close(self) -> None:
        """Nothing is open."""
