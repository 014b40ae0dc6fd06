"""One rank's worker: start in phases, then run plans."""

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.attention.registry import select_backend
from tp_engine.distributed import all_reduce
from tp_engine.distributed.groups import RankGroups
from tp_engine.features.registry import named_halves
from tp_engine.job.progress import RankPhase, RankProgress
from tp_engine.job.tier_progress import TierProgress
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.ops import has_triton
from tp_engine.model_config.kv_layout import KvCapacity, KvLayout
from tp_engine.models.causal_lm import CausalLM
from tp_engine.models.draft_head import DraftHead
from tp_engine.models.weight_sizes import layer_parameters
from tp_engine.plan import StepPlan
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.device import Device, check_devices, make_device
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.feature import RunnerFeature
from tp_engine.worker.features import RankFeature, RankParts, RunnerParts, count_bytes, make_features
from tp_engine.worker.graphs.graph_plan import graph_plan, measure_graph_bytes
from tp_engine.worker.graphs.step_runner import GraphPlan
from tp_engine.worker.input_digests import NoteInputs
from tp_engine.worker.memory.kv_cache import KvBlocks, KvCacheShape
from tp_engine.worker.memory.ledger import MemoryLedger, memory_lines
from tp_engine.worker.memory.meter import MemoryMeter, MemoryMonitor, choose_blocks, log_memory, settle_blocks
from tp_engine.worker.model_loading import load_head, load_model, log_weights
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.orders import Outcome, Prepare, Prepared, StartUp, execute_command
from tp_engine.worker.profiling import make_step_profiler, names_for
from tp_engine.worker.results.layer_watch import watch_layers
from tp_engine.worker.results.readback import PendingStep
from tp_engine.worker.sleep import sleep, wake_up
from tp_engine.worker.trial_steps import (
    as_it_is,
    encode_largest_image,
    run_largest_decodes,
    run_largest_step,
    warm_up,
    warms_up,
)
from tp_engine.worker.weight_update import update_weights


class Worker:
    """One rank's weights, KV cache and persistent batch on its device.

    ``start`` follows the order of the ledger: snapshot, weights, on a GPU the first steps, snapshot, largest steps,
    snapshot, agreement on the number of blocks, allocation.  After it, ``memory`` has the ledger's lines in bytes, and
    ``features`` are the rank's halves of optional features, by name.
    """

    def __init__(
        self,
        effective: EffectiveConfig,
        groups: RankGroups,
        channels: Mapping[str, TierProgress],
        *,
        owns_process: bool,
        note_inputs: NoteInputs | None = None,
    ) -> None:
        """``channels``: where this rank says what of the tiers' work has ended, by name.  ``owns_process``: nothing
        else runs in this process, so its garbage collector may be changed."""
        self._owns_process = owns_process
        self.effective, self.groups = effective, groups
        self._channels, self._note_inputs = channels, note_inputs
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
        self._device: Device
        self._parts: RankParts
        self._monitor: MemoryMonitor
        self._runner: ModelRunner | None = None
        self._closing = ExitStack()
        self.memory: dict[str, int] = {}
        self.features: dict[str, RankFeature] = {}
        self._profiler = make_step_profiler(config, groups.info.rank)
        if self._profiler is not None:
            self._closing.callback(self._profiler.close)

    def start(self) -> int:
        """Load, measure, agree, allocate.  Returns the number of KV blocks, the same on every rank."""
        with kernels_compiled_once(self.effective.config.device, self.groups.progress.done):
            return self._start()

    def _start(self) -> int:
        effective, info, start_up = self.effective, self.groups.info, self._start_up
        device = self._device = start_up.run_agreed_phase("opening the device", self._open_device)
        check_devices(self.groups.host, device.torch_device, may_share=effective.device_map.is_shared)
        meter = start_up.run_agreed_phase(
            "first snapshot", lambda: MemoryMeter(device, utilization=effective.gpu_memory_utilization)
        )
        if self._owns_process:
            gc.freeze()  # garbage collections skip the libraries' objects from now on
        of_sums = all_reduce.ReduceDevice(
            torch_device=device.torch_device, largest_bytes=effective.largest_sum_bytes, wait=device.synchronize
        )
        all_reduce.set_up(effective.config, self.groups, start_up.run, of_sums, num_hosts=effective.num_hosts)
        model, head = start_up.run_agreed_phase("loading weights", lambda: self._load(device))
        start_up.run_agreed_phase("packing weights", model.finish_loading)
        if head is not None:
            start_up.run_agreed_phase("packing the draft head", head.finish_loading)
        self._parts = self._make_parts(device, model, head)
        self.features = dict(named_halves("rank", self._parts))
        groups = self.groups
        graphs = graph_plan(effective.config, self._backends[0], groups.communicator, model, groups.check, head)
        graph_bytes = self._try_steps(graphs) if warms_up(device.type) else 0
        meter.weights_loaded()
        ledger = start_up.run("profiling memory", lambda: self._measure_memory(meter, graph_bytes))
        num_blocks = self._settle(ledger)
        for feature in self.features.values():
            feature.settle(self._parts, num_blocks)
        for feature in self.features.values():
            feature.measure(self._parts, partial(self._recording_runner, graphs))
        runner = self._runner = start_up.run_agreed_phase(
            "allocating the KV cache",
            lambda: self._make_runner(num_blocks, self.groups.progress),
        )
        self._closing.callback(runner.close)
        for feature in self.features.values():
            self._closing.callback(feature.close)
            feature.open(self._parts, runner)
        start_up.run("recording steps", lambda: runner.record(graphs))
        self._monitor = MemoryMonitor(device, *runner.kv_memory)
        self.memory = memory_lines(
            ledger,
            kv_cache_bytes=num_blocks * self._kv_shape.block_bytes,
            kv_host_bytes=sum(feature.host_bytes for feature in self.features.values()),
        )
        names = names_for(effective.config.device)
        runner.named = names if self._profiler is None else self._profiler.named(names)
        log_memory(ledger, self._kv_shape, self._capacity, info, num_blocks=num_blocks)
        self._keep_out_of_garbage_collection()
        return num_blocks

    def execute(self, plan: StepPlan) -> PendingStep:
        """Launch one step."""
        self.groups.progress.reach(RankPhase.STEP_BEGIN)
        runner = self._runner
        assert runner is not None, "start() comes first"
        if self._profiler is None:
            return runner.run(plan)
        with self._profiler.step(plan.step_id):
            return runner.run(plan)

    def execute_command(self, order: bytes) -> Outcome:
        """Follow a plan's order, together with all other ranks."""
        return execute_command(order, self._orders, self.groups)

    def tower_work(self) -> tuple[int, float, float]:
        """Return the number of the tower's layers, and what one of them takes for each row of an image and for each
        pair of rows, in tokens of a prompt."""
        tower = self._parts.model.vision
        assert tower is not None, "only a model that sees has a tower"
        of_token = layer_parameters(self.effective.model, self.groups.info.world_size)
        of_row, of_pair = tower.layer_work()
        return len(tower.stack), of_row / of_token, of_pair / of_token

    def _build_model(self, effective: EffectiveConfig, source: Path | Sequence[Path]) -> CausalLM:
        """Return a model of the same kind (``effective``) with the weights of ``source``, ready; nothing else
        changes."""
        model = load_model(
            effective, self.groups, self._backends, self._device, source=source, note_read=self.groups.progress.done
        )
        model.finish_loading()
        return model

    def _take_model(self, model: CausalLM, effective: EffectiveConfig) -> None:
        """Run ``model`` from the next step on, and free the one before; on a GPU a collective."""
        running = self.runner.model
        for counts, known in zip(model.expert_token_counts, running.expert_token_counts, strict=True):
            counts.copy_(known)
        model.take_adapters(running)
        del running
        self.runner.take_model(model)
        self.effective, self._parts = effective, dataclasses.replace(self._parts, effective=effective, model=model)
        self._release_to_garbage_collection()
        self._keep_out_of_garbage_collection()
        self._device.empty_cache()

    def enter_thread(self) -> None:
        """Prepare the calling thread, which need not be the one that called before."""
        self._device.enter_thread()

    @property
    def runner(self) -> ModelRunner:
        """What runs the plans, between ``start`` and ``close``."""
        assert self._runner is not None, "start() comes first"
        return self._runner

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
        """Return the tokens that went to each expert, (experts,) for each layer with experts.  Waits for the device."""
        return [] if self._runner is None else [one.cpu().numpy() for one in self._runner.model.expert_token_counts]

    def report(self) -> dict[str, Any]:
        """Return what the engine's report has of this rank's features, by field of ``EngineReport``."""
        return {} if self._runner is None else self._runner.report()

    def memory_growth_bytes(self) -> int:
        """Bytes of this rank's own memory beyond those at the end of ``start``; see ``MemoryMonitor``."""
        return self._monitor.growth()

    def close(self) -> None:
        """Free the device's memory; write a trace that has not ended.

        Call it before the process groups are destroyed, because recorded steps hold collectives.
        """
        self._release_to_garbage_collection()
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
        for feature in self.features.values():
            orders |= feature.orders(self.runner)
        if (profiler := self._profiler) is not None:
            orders["start_profile"] = lambda _arguments: Prepared(profiler.start)
            orders["stop_profile"] = lambda _arguments: Prepared(profiler.stop)
        return orders

    def _keep_out_of_garbage_collection(self) -> None:
        """Exclude all present objects, which live as long as the engine: collections would interrupt steps."""
        if self._owns_process:
            gc.collect()
            gc.freeze()

    def _release_to_garbage_collection(self) -> None:
        if self._owns_process:
            gc.unfreeze()

    def _open_device(self) -> Device:
        info = self.groups.info
        device = make_device(
            self.effective.config.device,
            self.effective.device_map,
            local_rank=info.local_rank,
            local_world_size=info.local_world_size,
            check=self.groups.check,
        )
        self._closing.callback(torch.set_num_threads, torch.get_num_threads())
        device.set_current()
        self.groups.device = device.torch_device
        self.groups.note_device(device.description)
        return device

    def _load(self, device: Device) -> tuple[CausalLM, DraftHead | None]:
        self.groups.progress.reach(RankPhase.LOAD)
        model = load_model(self.effective, self.groups, self._backends, device)
        log_weights(self.effective, model, self.groups.info)
        return model, load_head(self.effective, self.groups, self._backends, device, model)

    def _make_parts(self, device: Device, model: CausalLM, head: DraftHead | None) -> RankParts:
        return RankParts(
            effective=self.effective,
            groups=self.groups,
            start_up=self._start_up,
            model=model,
            head=head,
            layout=self._layout,
            kv_shape=self._kv_shape,
            capacity=self._capacity,
            backends=self._backends,
            device=device.torch_device,
            channels=self._channels,
            note_inputs=self._note_inputs,
        )

    def _make_runner(self, num_blocks: int, progress: RankProgress, *, is_trial: bool = False) -> ModelRunner:
        """A runner with a KV cache of its own, to which the model's layers are bound from now on."""
        device = self._device.torch_device
        blocks = KvBlocks.allocate(self._kv_shape, num_blocks, device)
        blocks.bind(self._parts.attention_layers)
        batch = make_batch(self.effective, self._layout, device)
        sampling = make_sampling(self.effective, self.groups.info, device)
        features: list[RunnerFeature] = []
        parts = RunnerParts(
            rank=self._parts,
            batch=batch,
            sampling=sampling,
            pool=blocks.raw,
            progress=progress,
            features=features,
            is_trial=is_trial,
        )
        features += make_features(parts, self.features.values())
        return ModelRunner(
            model=self._parts.model,
            backends=self._backends,
            batch=batch,
            blocks=blocks,
            communicator=self.groups.communicator,
            sampling=sampling,
            progress=progress,
            features=features,
            check=self.groups.check,
        )

    @contextmanager
    def _trial_runner(self) -> Iterator[ModelRunner]:
        """A runner with a cache of one block that reports no steps; afterwards the layers have no cache."""
        try:
            yield self._make_runner(1, RankProgress(), is_trial=True)
        finally:
            for layer in self._parts.attention_layers:
                layer.unbind_kv_cache()
            for state_layer in self._parts.model.state_layers:
                state_layer.bind_states(None)

    def _try_steps(self, graphs: GraphPlan | None) -> int:
        """Run one-time set-up, then measure the bytes that recorded steps take."""
        with self._trial_runner() as runner:
            self._start_up.run("warming up", lambda: self._warm_up(runner))
            if graphs is None:
                return 0
            most_drafting_rows = 0 if self._parts.head is None else self.effective.most_drafting_rows
            return self._start_up.run(
                "measuring CUDA graphs",
                lambda: measure_graph_bytes(graphs, self._device, runner.graphs, most_drafting_rows),
            )

    def _warm_up(self, runner: ModelRunner) -> None:
        variations = [one for feature in self.features.values() for one in feature.variations()]
        for vary in (as_it_is, *variations):
            warm_up(runner, self.effective.config, vary)
            for feature in self.features.values():
                feature.warm_up(self._parts, runner, vary)

    @contextmanager
    def _recording_runner(self, graphs: GraphPlan | None, most_rows: int) -> Iterator[ModelRunner]:
        """A trial runner that has recorded decodes of up to so many rows, if steps are to be recorded; a collective."""
        with self._trial_runner() as runner:
            if graphs is not None:
                runner.graphs.capture(graphs, most_rows)
            try:
                yield runner
            finally:
                runner.graphs.forget()

    def _measure_memory(self, meter: MemoryMeter, cuda_graph_bytes: int) -> MemoryLedger:
        self.groups.progress.reach(RankPhase.PROFILE)
        parts, device = self._parts, self._device
        reserved = count_bytes(parts, self.features.values())
        reserved["cuda_graphs"] = cuda_graph_bytes
        reserved["tables"] += table_bytes(self.effective, self._layout, self.groups.info, device.type)
        with self._trial_runner() as runner:
            meter.steps_begin()
            run_largest_step(
                parts.model, self._backends, self.effective, device.torch_device, self.groups.communicator, parts.head
            )
            if parts.model.vision is not None:
                encode_largest_image(parts.model.vision, self.effective.image_rows, device)
            if warms_up(device.type):
                run_largest_decodes(runner, self.effective.config)
                for feature in self.features.values():
                    feature.warm_up(parts, runner, as_it_is)
            return meter.finish(**reserved)

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


def kernels_compiled_once(device_type: str, note: Callable[[], None]) -> AbstractContextManager[None]:
    """Within, one rank of a host compiles each of Triton's kernels; ``note`` is called when one is ready."""
    if device_type != "cuda" or not has_triton():
        return nullcontext()
    from tp_engine.kernels.compile_once_triton import compiling_once

    return compiling_once(note)


def make_batch(effective: EffectiveConfig, layout: KvLayout, device: torch.device) -> InputBatch:
    """Return the persistent batch of a rank, without rows."""
    config = effective.config
    return InputBatch(
        max_num_seqs=config.max_num_seqs,
        max_model_len=effective.max_model_len,
        block_size=config.block_size,
        num_groups=len(layout.groups),
        device=device,
        num_spare_rows=effective.num_spare_rows,
        has_states=layout.states is not None,
        turns_by_place=effective.model.turns_by_place,
    )


def make_sampling(effective: EffectiveConfig, info: RankInfo, device: torch.device, **options: bool) -> SamplingState:
    """Return the sampling parameters of a rank's rows; ``options`` are further ones of ``SamplingState``."""
    return SamplingState(
        max_num_seqs=effective.config.max_num_seqs + effective.num_spare_rows,
        vocab_size=effective.model.vocab_size,
        device=device,
        info=info,
        scores_processed=effective.config.scores_processed,
        **options,
    )


def table_bytes(effective: EffectiveConfig, layout: KvLayout, info: RankInfo, device_type: str) -> int:
    """Return the bytes on the device of both; nothing is allocated."""
    nowhere = torch.device("meta")
    sampling = make_sampling(effective, info, nowhere, has_tables=device_type == "cuda" and has_triton())
    return make_batch(effective, layout, nowhere).num_bytes + sampling.num_bytes
