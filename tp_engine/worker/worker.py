"""One rank's worker: start in phases, then run plans."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tp_engine.attention.registry import key_lanes, select_backend
from tp_engine.kv_codec import is_lossy, may_refuse
from tp_engine.kv_layout import DiskCounters, KvCapacity, MoveCounters
from tp_engine.log import get_logger
from tp_engine.models.causal_lm import CausalLM
from tp_engine.models.draft_head import DraftHead
from tp_engine.plan import StepPlan
from tp_engine.progress import RankPhase
from tp_engine.ranks.groups import RankGroups
from tp_engine.tier_progress import TierProgress
from tp_engine.units import format_gib
from tp_engine.worker.adapters import RankAdapters
from tp_engine.worker.all_reduce import share_memory
from tp_engine.worker.codecs import make_codec
from tp_engine.worker.device import Device, check_devices, make_device
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.memory.host_memory import host_memory
from tp_engine.worker.memory.kv_cache import KvCacheShape
from tp_engine.worker.memory.ledger import MemoryLedger, memory_lines
from tp_engine.worker.memory.meter import (
    MemoryMeter,
    MemoryMonitor,
    choose_blocks,
    log_memory,
    settle_blocks,
    settle_slots,
)
from tp_engine.worker.model_loading import load_head, load_model, log_weights
from tp_engine.worker.model_runner import ModelRunner, NoteInputs
from tp_engine.worker.orders import Outcome, obey
from tp_engine.worker.profiling import make_step_profiler, names_for
from tp_engine.worker.recorded.graph_capture import (
    GraphPlan,
    graph_plan,
    measure_graph_bytes,
    record_decodes,
    record_steps,
)
from tp_engine.worker.results.readback import PendingStep
from tp_engine.worker.runner_parts import RunnerParts
from tp_engine.worker.tiers.disk_start import DiskStart, open_disk_tier
from tp_engine.worker.tiers.host_tier import choose_slots
from tp_engine.worker.together import StartUp
from tp_engine.worker.trial_steps import run_largest_decodes, run_largest_step, time_decodes, warm_up, warms_up

logger = get_logger(__name__)


class Worker:
    """One rank's weights, KV cache and persistent batch on its device.

    ``start`` follows the order of the ledger: snapshot, weights, on a GPU the first steps, snapshot, largest steps,
    snapshot, agreement on the number of blocks, allocation.  After it, ``memory`` has the ledger's lines in bytes, and
    ``num_host_slots`` is the number of blocks in the host tier, the same on every rank.
    """

    def __init__(
        self,
        effective: EffectiveConfig,
        groups: RankGroups,
        channels: Mapping[str, TierProgress],
        *,
        note_inputs: NoteInputs | None = None,
    ) -> None:
        """``channels``: where this rank says what of the tiers' work has ended, by name."""
        self.effective = effective
        self._channels = channels
        self._note_inputs = note_inputs
        self.groups = groups
        self._start_up = StartUp(groups.host, groups.progress)
        config, model = effective.config, effective.model
        self._layout = model.kv_layout_on(config.tensor_parallel_size)
        self._backends = tuple(
            select_backend(config.attention_backend, effective.attention_needs) for _ in self._layout.groups
        )
        self._capacity = KvCapacity(
            layout=self._layout,
            block_size=config.block_size,
            max_model_len=effective.max_model_len,
            chunk_tokens=config.max_num_batched_tokens,
        )
        self._kv_shape = KvCacheShape(layout=self._layout, block_size=config.block_size, dtype=effective.kv_cache_dtype)
        lanes = key_lanes(self._backends[0], config.block_size)
        self._codec = (
            make_codec(config.kv_offloading_codec, self._kv_shape, lanes) if config.kv_offloading_size else None
        )
        self._device: Device
        self.runner: ModelRunner | None = None
        self.is_asleep = False  # there is no KV cache (``sleep``)
        self._monitor: MemoryMonitor | None = None
        self.memory: dict[str, int] = {}
        self.num_host_slots = 0
        self.decode_seconds: dict[int, float] = {}  # by the number of rows, with speculation
        self.disk: DiskStart | None = None
        self.profiler = make_step_profiler(config, groups.info.rank)

    def start(self) -> int:
        """Load, measure, agree, allocate.  Returns the number of KV blocks, the same on every rank."""
        effective, info = self.effective, self.groups.info
        device = self._device = self._start_up.run_together("opening the device", self._open_device)
        check_devices(self.groups.host, device.torch_device, may_share=effective.device_map.is_shared)
        meter = self._start_up.run_together("first snapshot", lambda: self._make_meter(device))
        gc.freeze()  # garbage collections skip the libraries' objects from now on
        share_memory(effective, self.groups, self._start_up.run, device)
        model, head = self._start_up.run_together("loading weights", lambda: self._load(device))
        self._start_up.run_together("packing weights", model.finish_loading)
        if head is not None:
            self._start_up.run_together("packing the draft head", head.finish_loading)
        parts = RunnerParts(
            effective=effective,
            groups=self.groups,
            model=model,
            head=head,
            layout=self._layout,
            backends=self._backends,
            kv_shape=self._kv_shape,
            codec=self._codec,
            stores=self._channels["stores"] if may_refuse(effective.config.kv_offloading_codec) else None,
            device=device,
            note_inputs=self._note_inputs,
        )
        graphs = graph_plan(effective.config, self._backends[0], self.groups.communicator, model, self.groups.check)
        graph_bytes = self._try_steps(parts, graphs) if warms_up(device.type) else 0
        meter.weights_loaded()
        ledger = self._start_up.run("profiling memory", lambda: self._measure_memory(parts, meter, graph_bytes))
        num_blocks = self._settle(ledger)
        num_slots = self.num_host_slots = self._settle_host_tier(num_blocks, device)
        if effective.speculation is not None and effective.speculation.max_step_rows is None:
            self.decode_seconds = self._start_up.run("timing decodes", lambda: self._time_decodes(parts, graphs))
        runner = self.runner = self._start_up.run_together(
            "allocating the KV cache", lambda: parts.make_runner(num_blocks, num_slots)
        )
        if runner.tier is not None and effective.config.kv_disk_path is not None:
            together = self._start_up.run_together
            self.disk = open_disk_tier(effective, self.groups, together, parts, runner.tier, self._channels)
        if graphs is not None:
            self._start_up.run("recording steps", lambda: record_steps(graphs, runner))
        self._monitor = MemoryMonitor(device, *runner.kv_memory)
        self.memory = memory_lines(
            ledger,
            kv_cache_bytes=num_blocks * self._kv_shape.block_bytes,
            kv_host_bytes=0 if self._codec is None else num_slots * self._codec.blob_bytes,
        )
        names = names_for(effective.config.device)
        runner.named = names if self.profiler is None else self.profiler.named(names)
        log_memory(ledger, self._kv_shape, self._capacity, info, num_blocks=num_blocks)
        self._keep_out_of_garbage_collection()
        return num_blocks

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch one step."""
        assert self.runner is not None, "start() comes first"
        self.groups.progress.reach(RankPhase.STEP_BEGIN)
        if self.profiler is None:
            return self.runner.run(plan)
        with self.profiler.step(plan.step_id):
            return self.runner.run(plan)

    def prepare_model(self, effective: EffectiveConfig, source: Path | Sequence[Path]) -> CausalLM:
        """A model of the same kind (``effective``) with the weights of ``source``, ready; nothing else changes."""
        model = load_model(
            effective, self.groups, self._backends, self._device, source=source, note_read=self.groups.progress.done
        )
        model.finish_loading()
        return model

    def take_model(self, model: CausalLM, effective: EffectiveConfig) -> None:
        """Run ``model`` from the next step on, and free the one before; on a GPU a collective."""
        assert self.runner is not None, "start() comes first"
        for counts, known in zip(model.expert_token_counts, self.runner.model.expert_token_counts, strict=True):
            counts.copy_(known)
        model.take_adapters(self.runner.model)
        self.runner.take_model(model)
        self.effective = effective
        if not self.is_asleep:
            self.record()
        gc.unfreeze()
        self._keep_out_of_garbage_collection()
        self.empty_cache()

    def record(self) -> None:
        """Record steps of the runner, which has no recordings; on a GPU a collective."""
        assert self.runner is not None, "start() comes first"
        config, groups = self.effective.config, self.groups
        graphs = graph_plan(config, self._backends[0], groups.communicator, self.runner.model, groups.check)
        if graphs is not None:
            record_steps(graphs, self.runner)

    def empty_cache(self) -> None:
        """Give memory that is free in this process back to the device."""
        self._device.empty_cache()

    def free_bytes(self) -> int:
        """Memory of the device that this rank may still take."""
        now = self._device.snapshot()
        return now.free + now.torch_reserved - now.torch_allocated

    def enter_thread(self) -> None:
        """Prepare the calling thread, which need not be the one that called before."""
        self._device.enter_thread()

    def obey(self, order: bytes) -> Outcome:
        """Follow a plan's order, together with all other ranks."""
        return obey(self, order)

    @property
    def adapters(self) -> RankAdapters:
        """The adapters of this rank, which takes some."""
        assert self.runner is not None and self.runner.adapters is not None
        return self.runner.adapters

    @property
    def block_bytes(self) -> int:
        """Bytes of a KV block on this rank."""
        return self._kv_shape.block_bytes

    @property
    def startup_s(self) -> dict[str, float]:
        """Seconds of each phase of ``start``, by its name in the log."""
        return dict(self._start_up.seconds)

    @property
    def configuration(self) -> dict[str, Any]:
        """The effective configuration, by field."""
        return dataclasses.asdict(self.effective.config)

    @property
    def runs_by_itself(self) -> bool:
        """Whether ``execute`` returns before the step has run, so that the next step can be launched behind it."""
        return self.effective.config.device == "cuda"

    def expert_token_counts(self) -> list[npt.NDArray[np.int64]]:
        """For each layer with experts (experts,): the tokens that went to each expert.  Waits for the device."""
        return [] if self.runner is None else [one.cpu().numpy() for one in self.runner.model.expert_token_counts]

    def moves(self) -> MoveCounters | None:
        """What this rank has moved to and from its host tier; None without one."""
        tier = None if self.runner is None else self.runner.tier
        return None if tier is None else tier.counters

    def disk_moves(self) -> DiskCounters | None:
        """What this rank has read from and written to disk; None without a disk tier."""
        return None if self.disk is None else self.disk.tier.counters

    def memory_growth_bytes(self) -> int:
        """Bytes of this rank's own memory beyond those at the end of ``start``; see ``MemoryMonitor``."""
        assert self._monitor is not None, "start() comes first"
        return self._monitor.growth()

    def close(self) -> None:
        """Free the device's memory; write a trace that has not ended.

        Call it before the process groups are destroyed, because recorded steps hold collectives.
        """
        if self.profiler is not None:
            self.profiler.close()
        gc.unfreeze()
        if self.runner is not None:
            self.runner.forget_captured()
            if self.disk is not None:
                self.disk.close()
            if self.runner.tier is not None:
                self.runner.tier.close()
        self.runner = None
        self._monitor = None

    @staticmethod
    def _keep_out_of_garbage_collection() -> None:
        """Exclude all present objects, which live as long as the engine: collections would interrupt steps."""
        gc.collect()
        gc.freeze()

    def _open_device(self) -> Device:
        info = self.groups.info
        device = make_device(
            self.effective.config.device,
            self.effective.device_map,
            local_rank=info.local_rank,
            local_world_size=info.local_world_size,
            check=self.groups.check,
        )
        device.set_current()
        return device

    def _make_meter(self, device: Device) -> MemoryMeter:
        return MemoryMeter(device, utilization=self.effective.gpu_memory_utilization)

    def _load(self, device: Device) -> tuple[CausalLM, DraftHead | None]:
        self.groups.progress.reach(RankPhase.LOAD)
        model = load_model(self.effective, self.groups, self._backends, device)
        log_weights(self.effective, self.groups.info)
        return model, load_head(self.effective, self.groups, self._backends, device, model)

    def _try_steps(self, parts: RunnerParts, graphs: GraphPlan | None) -> int:
        """Run one-time set-up, then measure the bytes that recorded steps take."""
        with parts.trial_runner() as runner:
            self._start_up.run("warming up", lambda: warm_up(runner, self.effective.config))
            if graphs is None:
                return 0
            return self._start_up.run(
                "measuring CUDA graphs", lambda: measure_graph_bytes(graphs, parts.device, runner)
            )

    def _time_decodes(self, parts: RunnerParts, graphs: GraphPlan | None) -> dict[int, float]:
        """How much longer steps with guesses take; a collective."""
        most_rows = self.effective.most_guessing_rows
        with parts.trial_runner() as runner:
            if graphs is not None:
                record_decodes(graphs, runner, most_rows)
            try:
                return time_decodes(runner, self.effective.config, most_rows)
            finally:
                runner.forget_captured()

    def _measure_memory(self, parts: RunnerParts, meter: MemoryMeter, cuda_graph_bytes: int) -> MemoryLedger:
        self.groups.progress.reach(RankPhase.PROFILE)
        device, table_bytes = parts.device, parts.table_bytes
        with parts.trial_runner() if warms_up(device.type) else nullcontext() as runner:
            if runner is not None:
                meter.steps_begin()
            run_largest_step(
                parts.model,
                self._backends,
                self.effective,
                device.torch_device,
                self.groups.communicator,
                parts.head,
            )
            if runner is not None:
                run_largest_decodes(runner, self.effective.config)
            return meter.finish(
                table_bytes=table_bytes,
                cuda_graph_bytes=cuda_graph_bytes,
                state_bytes=parts.state_bytes,
                adapter_bytes=parts.adapter_bytes,
            )

    def _settle(self, ledger: MemoryLedger) -> int:
        config = self.effective.config

        def choose() -> int:
            self.groups.progress.reach(RankPhase.AGREE)
            num_blocks = choose_blocks(
                ledger,
                self._kv_shape,
                num_blocks_override=config.num_gpu_blocks_override,
                cache_bytes_override=config.kv_cache_memory_bytes,
            )
            self.groups.progress.done()
            return num_blocks

        return settle_blocks(
            choose,
            self.groups.host,
            self._kv_shape,
            self._capacity,
            is_override=config.num_gpu_blocks_override is not None,
        )

    def _settle_host_tier(self, num_blocks: int, device: Device) -> int:
        """The number of slots in every rank's host tier; 0, without a word among the ranks, if none is wanted."""
        config, codec, info = self.effective.config, self._codec, self.groups.info
        if codec is None:
            return 0
        block_bytes = self._kv_shape.block_bytes
        num_slots = settle_slots(
            lambda: choose_slots(
                config.kv_offloading_size,
                codec.blob_bytes,
                world_size=info.world_size,
                local_world_size=info.local_world_size,
                promised_bytes=num_blocks * block_bytes if device.type == "cpu" else 0,
                memory=host_memory(),
            ),
            self.groups.host,
        )
        if info.is_first:
            num_bytes, num_tokens = num_slots * codec.blob_bytes, self._capacity.num_tokens(num_slots)
            logger.info(
                "Host KV cache: %s a rank, %s tokens; %d slots of %d bytes for blocks of %d bytes, codec %s",
                *(format_gib(num_bytes), f"{num_tokens:,}", num_slots, codec.blob_bytes, block_bytes),
                config.kv_offloading_codec,
            )
            if is_lossy(config.kv_offloading_codec):
                logger.info("the codec is lossy: K/V that come back differ a little, and so may answers")
        return num_slots
