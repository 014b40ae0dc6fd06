"""A rank's start, in the order of the ledger.

::

    device      choice of kernels, first snapshot, ways to all-reduce
    RankParts   the model with its weights, a draft head, the form of the cache
    features    the rank's halves, made of the parts;  RunnerMaker: runners, made of both
    ledger      first steps on a GPU, second snapshot, largest steps, third snapshot
    blocks      as many as the ledgers of all ranks allow;  features settle their sizes, and measure
    runner      cache allocated, features opened, steps recorded
    StartedRank what the worker runs plans with

Each line needs those above it and no other, so nothing is called that is half made.  All ranks take the phases
together: where one fails, all fail.
"""

import dataclasses
import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext

import torch

from tp_engine.attention.base import Backends
from tp_engine.attention.registry import select_backend
from tp_engine.distributed import all_reduce
from tp_engine.distributed.groups import RankGroups
from tp_engine.features.registry import named_halves
from tp_engine.job.progress import RankPhase
from tp_engine.job.tier_progress import TierProgress
from tp_engine.kernels.ops import has_triton
from tp_engine.models.draft_head import DraftHead
from tp_engine.models.language_model import LanguageModel
from tp_engine.system.log import get_logger
from tp_engine.worker.device import Device, check_devices, make_device
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.features import RankParts, count_bytes
from tp_engine.worker.graphs.graph_plan import graph_plan, measure_graph_bytes
from tp_engine.worker.input_digests import NoteInputs
from tp_engine.worker.memory.ledger import MemoryLedger, memory_lines
from tp_engine.worker.memory.meter import MemoryMeter, MemoryMonitor, choose_blocks, log_memory, settle_blocks
from tp_engine.worker.model_loading import load_head, load_model, log_weights
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.orders import StartUp
from tp_engine.worker.profiling import make_step_profiler, names_for
from tp_engine.worker.runner_maker import RunnerMaker, table_bytes
from tp_engine.worker.trial_steps import (
    as_it_is,
    encode_largest_image,
    run_largest_decodes,
    run_largest_step,
    warm_up,
    warms_up,
)
from tp_engine.worker.tuning.fused_norm import try_fused_norm
from tp_engine.worker.tuning.start import choose_kernels
from tp_engine.worker.worker import StartedRank

logger = get_logger(__name__)


def start_rank(
    effective: EffectiveConfig,
    groups: RankGroups,
    channels: Mapping[str, TierProgress],
    closing: ExitStack,
    *,
    owns_process: bool,
    note_inputs: NoteInputs | None = None,
) -> StartedRank:
    """Load, measure, agree, allocate; a collective.

    ``closing`` closes what has been opened, also after a start that fails.  ``channels``: where this rank says what of
    the tiers' work has ended, by name.  ``owns_process``: nothing else runs in this process, so its garbage collector
    may be changed.  ``note_inputs`` gets digests of the inputs.
    """
    config, start_up = effective.config, StartUp(groups.host, groups.progress)
    profiler = make_step_profiler(config, groups.info.rank)
    if profiler is not None:
        closing.callback(profiler.close)
    with _kernels_compiled_once(config.device, groups.progress.done):
        device = _open_device(effective, groups, start_up, closing)
        run_phase = start_up.run_agreed_phase
        choices = choose_kernels(effective, groups.host, device.torch_device, run_phase)
        effective = dataclasses.replace(effective, choices=choices)
        backends = tuple(
            select_backend(config.attention_backend, effective.attention_needs, choices)
            for _ in effective.kv_layout.groups
        )
        utilization = effective.gpu_memory_utilization
        meter = start_up.run_agreed_phase("first snapshot", lambda: MemoryMeter(device, utilization=utilization))
        if owns_process:
            closing.callback(gc.unfreeze)
            gc.freeze()  # garbage collections skip the libraries' objects from now on
        of_sums = all_reduce.ReduceDevice(
            torch_device=device.torch_device, largest_bytes=effective.largest_sum_bytes, wait=device.synchronize
        )
        all_reduce.set_up(config, groups, start_up.run, of_sums, num_hosts=effective.num_hosts)
        choices = try_fused_norm(effective, groups, device.torch_device, device.synchronize)
        effective = dataclasses.replace(effective, choices=choices)
        groups.note_device(f"{device.description}, choices {choices.digest}")
        model, head = _load(effective, groups, start_up, backends, device)
        parts = RankParts(
            effective=effective,
            groups=groups,
            start_up=start_up,
            model=model,
            head=head,
            backends=backends,
            device=device.torch_device,
            channels=channels,
            note_inputs=note_inputs,
        )
        graphs = graph_plan(config, backends[0], groups.communicator, model, groups.check, head)
        maker = RunnerMaker(parts, dict(named_halves("rank", parts)), graphs)
        ledger = _measure(maker, device, meter)
        num_blocks = _settle(maker, ledger)
        runner = _allocate(maker, num_blocks, closing)
    monitor = MemoryMonitor(device, *runner.kv_memory)
    names = names_for(config.device)
    runner.named = names if profiler is None else profiler.named(names)
    log_memory(ledger, effective.kv_shape, effective.kv_capacity, groups.info, num_blocks=num_blocks)
    if groups.info.is_first:
        start_up.tell()
    return StartedRank(
        effective=effective,
        groups=groups,
        device=device,
        backends=backends,
        features=maker.features,
        runner=runner,
        num_blocks=num_blocks,
        memory=memory_lines(
            ledger,
            kv_cache_bytes=num_blocks * effective.kv_shape.block_bytes,
            kv_host_bytes=sum(feature.host_bytes for feature in maker.features.values()),
        ),
        monitor=monitor,
        seconds=start_up.seconds,
        profiler=profiler,
        owns_process=owns_process,
        closing=closing,
    )


def _kernels_compiled_once(device_type: str, note: Callable[[], None]) -> AbstractContextManager[None]:
    """Within, one rank of a host compiles each of Triton's kernels; ``note`` is called when one is ready."""
    if device_type != "cuda" or not has_triton():
        return nullcontext()
    from tp_engine.kernels.compile_once_triton import compiling_once

    return compiling_once(note)


def _open_device(effective: EffectiveConfig, groups: RankGroups, start_up: StartUp, closing: ExitStack) -> Device:
    """The rank's device, of the same kind as those of the others."""
    info = groups.info

    def open_own() -> Device:
        device = make_device(
            effective.config.device,
            effective.device_map,
            local_rank=info.local_rank,
            local_world_size=info.local_world_size,
            check=groups.check,
        )
        closing.callback(torch.set_num_threads, torch.get_num_threads())
        device.set_current()
        closing.enter_context(device.shared_cores())
        groups.device = device.torch_device
        groups.note_device(device.description)
        if info.is_first:
            others, attention = info.world_size - 1, effective.config.attention_backend
            more = f" and {others} like it" if others else ""
            logger.info("computing on %s%s, attention by %s", device.description, more, attention)
        return device

    device = start_up.run_agreed_phase("opening the device", open_own)
    check_devices(groups.host, device.torch_device, may_share=effective.device_map.is_shared)
    return device


def _load(
    effective: EffectiveConfig, groups: RankGroups, start_up: StartUp, backends: Backends, device: Device
) -> tuple[LanguageModel, DraftHead | None]:
    """The model and a draft head with their weights, ready to run."""

    def load() -> tuple[LanguageModel, DraftHead | None]:
        groups.progress.reach(RankPhase.LOAD)
        model = load_model(effective, groups, backends, device)
        log_weights(effective, model, groups.info)
        return model, load_head(effective, groups, backends, device, model)

    model, head = start_up.run_agreed_phase("loading weights", load)
    start_up.run_agreed_phase("packing weights", model.finish_loading)
    if head is not None:
        start_up.run_agreed_phase("packing the draft head", head.finish_loading)
    return model, head


def _measure(maker: RunnerMaker, device: Device, meter: MemoryMeter) -> MemoryLedger:
    """The rank's memory, once first steps and largest steps have run."""
    start_up = maker.parts.start_up
    graph_bytes = _try_steps(maker, device) if warms_up(device.type) else 0
    meter.weights_loaded()
    return start_up.run("profiling memory", lambda: _run_largest(maker, device, meter, graph_bytes))


def _try_steps(maker: RunnerMaker, device: Device) -> int:
    """Run one-time set-up, then measure the bytes that recorded steps take."""
    parts, graphs = maker.parts, maker.graphs
    with maker.trial() as runner:
        parts.start_up.run("warming up", lambda: _warm_up(maker, runner))
        if graphs is None:
            return 0
        most_drafting_rows = 0 if parts.head is None else parts.effective.most_drafting_rows
        return parts.start_up.run(
            "measuring CUDA graphs", lambda: measure_graph_bytes(graphs, device, runner.graphs, most_drafting_rows)
        )


def _warm_up(maker: RunnerMaker, runner: ModelRunner) -> None:
    variations = [one for feature in maker.features.values() for one in feature.variations()]
    for vary in (as_it_is, *variations):
        warm_up(runner, maker.parts.effective.config, vary)
        for feature in maker.features.values():
            feature.warm_up(maker.parts, runner, vary)


def _run_largest(maker: RunnerMaker, device: Device, meter: MemoryMeter, graph_bytes: int) -> MemoryLedger:
    parts, effective, groups = maker.parts, maker.parts.effective, maker.parts.groups
    groups.progress.reach(RankPhase.PROFILE)
    reserved = count_bytes(parts, maker.features.values())
    reserved["cuda_graphs"] = graph_bytes
    reserved["tables"] += table_bytes(effective, groups.info, device.type)
    with maker.trial() as runner:
        meter.steps_begin()
        run_largest_step(parts.model, parts.backends, effective, device.torch_device, groups.communicator, parts.head)
        if parts.model.vision is not None:
            encode_largest_image(parts.model.vision, effective.image_rows, device)
        if warms_up(device.type):
            run_largest_decodes(runner, effective.config)
            for feature in maker.features.values():
                feature.warm_up(parts, runner, as_it_is)
        return meter.finish(**reserved)


def _settle(maker: RunnerMaker, ledger: MemoryLedger) -> int:
    """The number of blocks, and the sizes that features take of it, equal on all ranks."""
    parts, effective, progress = maker.parts, maker.parts.effective, maker.parts.groups.progress
    config = effective.config

    def choose() -> int:
        progress.reach(RankPhase.AGREE)
        num_blocks = choose_blocks(
            ledger,
            effective.kv_shape,
            num_blocks_override=config.num_gpu_blocks_override,
            cache_bytes_override=config.kv_cache_memory_bytes,
        )
        progress.done()
        return num_blocks

    num_blocks = settle_blocks(
        choose,
        parts.groups.host,
        effective.kv_shape,
        effective.kv_capacity,
        is_override=config.num_gpu_blocks_override is not None,
    )
    for feature in maker.features.values():
        feature.settle(parts, num_blocks)
    for feature in maker.features.values():
        feature.measure(parts, maker.recording)
    return num_blocks


def _allocate(maker: RunnerMaker, num_blocks: int, closing: ExitStack) -> ModelRunner:
    """The runner that serves, with its cache, its features opened and its steps recorded."""
    parts = maker.parts
    runner = parts.start_up.run_agreed_phase(
        "allocating the KV cache", lambda: maker.make(num_blocks, parts.groups.progress)
    )
    closing.callback(runner.close)
    for feature in maker.features.values():
        closing.callback(feature.close)
        feature.open(parts, runner)
    parts.start_up.run("recording steps", lambda: runner.record(maker.graphs))
    return runner
