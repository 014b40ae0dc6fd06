"""A rank's half of speculation, the times of its steps, and what rank 0's engine takes from there."""

from __future__ import annotations

from collections.abc import Iterator

from tp_engine.config import EngineConfig
from tp_engine.engine.feature import EngineFeature
from tp_engine.features.speculation.feature import SpeculationLimits
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.ipc.job_board import JobBoard
from tp_engine.worker.features import RankFeature, RankParts, TrialRunner
from tp_engine.worker.trial_steps import time_decodes
from tp_engine.worker.worker import Worker


def make(parts: RankParts) -> Iterator[SpeculationOfRank]:
    """Make a rank's half if tokens are drafted."""
    config = parts.effective.config.speculative_config
    if config is not None:
        yield SpeculationOfRank(config)


class SpeculationOfRank(RankFeature):
    """What decode steps take on this rank, in seconds by their number of rows, and one more draft for each row with a
    draft head; empty where the configuration says how many rows may have draft tokens."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self.decode_seconds: dict[int, float] = {}
        self.draft_seconds: dict[int, float] = {}

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
            if parts.layout.states is not None:
                decodes = time_decodes(runner, config, most_rows, run_length=1 + num_drafts)
        self.decode_seconds = decodes


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

    def start(self, worker: Worker, board: JobBoard) -> None:
        own = worker.features["speculation"]
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
