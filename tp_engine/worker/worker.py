"""One rank at work: the plans, the orders and the reports of a rank that has started."""

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tp_engine.attention.base import Backends
from tp_engine.distributed.groups import RankGroups
from tp_engine.job.progress import RankPhase
from tp_engine.models.language_model import LanguageModel
from tp_engine.plan import StepPlan
from tp_engine.worker.device import Device
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.features import RankFeature
from tp_engine.worker.memory.meter import MemoryMonitor
from tp_engine.worker.model_loading import load_model
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.orders import Outcome, Prepare, Prepared, execute_command
from tp_engine.worker.profiling import StepProfiler
from tp_engine.worker.results.layer_watch import watch_layers
from tp_engine.worker.results.readback import PendingStep
from tp_engine.worker.sleep import sleep, wake_up
from tp_engine.worker.weight_update import update_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedRank:
    """What ``start_rank`` has made: a rank's weights, KV cache and persistent batch, which its ``runner`` has.

    ``features`` are the rank's halves of optional features, by name.  ``memory`` has the ledger's lines in bytes, and
    ``seconds`` the time of each phase, by its name in the log.  ``closing`` closes all of it.
    """

    effective: EffectiveConfig
    groups: RankGroups
    device: Device
    backends: Backends
    features: Mapping[str, RankFeature]
    runner: ModelRunner
    num_blocks: int
    memory: dict[str, int]
    monitor: MemoryMonitor
    seconds: dict[str, float]
    profiler: StepProfiler | None
    owns_process: bool
    closing: ExitStack


class Worker:
    """Runs the plans and follows the orders of a ``rank`` that has started."""

    def __init__(self, rank: StartedRank) -> None:
        self.effective, self.groups = rank.effective, rank.groups
        self._device, self._backends, self._features = rank.device, rank.backends, rank.features
        self._runner: ModelRunner | None = rank.runner
        self._monitor, self._profiler = rank.monitor, rank.profiler
        self._owns_process, self._closing = rank.owns_process, rank.closing
        self._keep_out_of_garbage_collection()

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch one step."""
        self.groups.progress.reach(RankPhase.STEP_BEGIN)
        runner = self._runner
        assert runner is not None, "the worker is closed"
        if self._profiler is None:
            return runner.run(plan)
        with self._profiler.step(plan.step_id):
            return runner.run(plan)

    def execute_command(self, order: bytes) -> Outcome:
        """Follow a plan's order, together with all other ranks."""
        return execute_command(order, self._orders, self.groups)

    def enter_thread(self) -> None:
        """Prepare the calling thread, which need not be the one that called before."""
        self._device.enter_thread()

    @property
    def runner(self) -> ModelRunner:
        """What runs the plans, until ``close``."""
        assert self._runner is not None, "the worker is closed"
        return self._runner

    @property
    def configuration(self) -> dict[str, Any]:
        """The effective configuration, by field."""
        return dataclasses.asdict(self.effective.config)

    @property
    def runs_by_itself(self) -> bool:
        """Whether ``execute`` returns before the step has run, so that the next step can be launched after it."""
        return self.effective.config.device == "cuda"

    def expert_token_counts(self) -> list[npt.NDArray[np.int64]]:
        """Return the tokens that went to each expert, (experts,) for each layer with experts.  Waits for the device."""
        return [] if self._runner is None else [one.cpu().numpy() for one in self._runner.model.expert_token_counts]

    def report(self) -> dict[str, Any]:
        """Return what the engine's report has of this rank's features, by field of ``EngineReport``."""
        return {} if self._runner is None else self._runner.report()

    def memory_growth_bytes(self) -> int:
        """Bytes of this rank's own memory beyond those at the end of the start; see ``MemoryMonitor``."""
        return self._monitor.growth()

    def close(self) -> None:
        """Free the device's memory; write a trace that has not ended.

        Call it before the process groups are destroyed, because recorded steps hold collectives.
        """
        self._closing.close()
        self._runner = None

    @property
    def _orders(self) -> dict[str, Prepare]:
        """What each order needs of this rank."""
        orders: dict[str, Prepare] = {
            "sleep": lambda _arguments: sleep(self.runner, self._device.empty_cache),
            "update_weights": lambda arguments: update_weights(
                self.effective, self._device.free_bytes(), self._build_model, self._take_model, arguments
            ),
            "wake_up": lambda _arguments: wake_up(self.runner),
            "watch_layers": lambda arguments: watch_layers(self.runner, self.groups.info.rank, arguments),
        }
        for feature in self._features.values():
            orders |= feature.orders(self.runner)
        if (profiler := self._profiler) is not None:
            orders["start_profile"] = lambda _arguments: Prepared(profiler.start)
            orders["stop_profile"] = lambda _arguments: Prepared(profiler.stop)
        return orders

    def _build_model(self, effective: EffectiveConfig, source: Path | Sequence[Path]) -> LanguageModel:
        """A model of the same kind (``effective``) with the weights of ``source``, ready; nothing else changes."""
        model = load_model(
            effective, self.groups, self._backends, self._device, source=source, note_read=self.groups.progress.done
        )
        model.finish_loading()
        return model

    def _take_model(self, model: LanguageModel, effective: EffectiveConfig) -> None:
        """Run ``model`` from the next step on, and free the one before; on a GPU a collective."""
        running = self.runner.model
        for counts, known in zip(model.expert_token_counts, running.expert_token_counts, strict=True):
            counts.copy_(known)
        model.take_adapters(running)
        del running
        self.runner.take_model(model)
        self.effective = effective
        if self._owns_process:
            gc.unfreeze()
        self._keep_out_of_garbage_collection()
        self._device.empty_cache()

    def _keep_out_of_garbage_collection(self) -> None:
        """Exclude all present objects, which live as long as the engine: collections would interrupt steps."""
        if self._owns_process:
            gc.collect()
            gc.freeze()
