"""Whether decode steps are recorded, for which sizes, and what the recordings will cost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.attention.base import AttentionBackend
from tp_engine.config import EngineConfig
from tp_engine.kernels.native.library import native_library
from tp_engine.kernels.ops import has_triton
from tp_engine.log import get_logger
from tp_engine.models.causal_lm import CausalLM
from tp_engine.ranks.collectives import Communicator
from tp_engine.worker.capture_sizes import capture_sizes
from tp_engine.worker.device import Device
from tp_engine.worker.graph_recorder import CudaRecorder, Recorder
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.tape_recorder import TapeRecorder

logger = get_logger(__name__)

# With more rows, what a tape saves is a small part of a step.
_MAX_TAPE_ROWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Record decode steps of ``sizes`` rows with a recorder from ``make_recorder``."""

    sizes: tuple[int, ...]
    make_recorder: Callable[[], Recorder] = CudaRecorder


def graph_plan(
    config: EngineConfig, backend: AttentionBackend, communicator: Communicator, model: CausalLM
) -> GraphPlan | None:
    """What to record, the same on every rank; None where steps are launched one kernel after another.

    The reason is logged where CUDA graphs could have been expected.
    """
    if config.enforce_eager:
        return None
    if config.device != "cuda":
        return _tape_plan(config, backend, communicator, model)
    obstacle = _obstacle(config, backend, communicator)
    if obstacle is not None:
        logger.warning("no CUDA graphs, so decode steps are slower: %s", obstacle)
        return None
    return GraphPlan(sizes=capture_sizes(config.cuda_graph_sizes, config.max_num_seqs))


def _obstacle(config: EngineConfig, backend: AttentionBackend, communicator: Communicator) -> str | None:
    if config.check_inputs:
        return "check_inputs reads every step's inputs"
    if not backend.can_capture_decodes:
        return f"the attention backend {backend.name} can not be captured"
    if not communicator.can_capture:
        return "the ranks' collectives can not be captured; they can with NCCL, one GPU per rank"
    if not has_triton():
        return "the triton package is not installed"
    return None


def _tape_plan(
    config: EngineConfig, backend: AttentionBackend, communicator: Communicator, model: CausalLM
) -> GraphPlan | None:
    """Tapes, one for each number of rows, where all of a step is compiled code."""
    library = native_library()
    if library is None or config.check_inputs or not model.is_recordable:
        return None
    if not (backend.can_capture_decodes and communicator.can_capture):
        return None
    sizes = range(1, min(config.max_num_seqs, _MAX_TAPE_ROWS) + 1)
    return GraphPlan(sizes=tuple(sizes), make_recorder=lambda: TapeRecorder(library, communicator))


def measure_graph_bytes(plan: GraphPlan, device: Device, runner: ModelRunner) -> int:
    """Bytes that all recordings of ``plan`` will take, from those of its two largest sizes.

    All share one pool, in which the largest leaves room for the others: each further one adds what is its own.
    ``runner`` may have a KV cache of any size, and keeps no recording.  A collective.
    """
    recorder, kept = plan.make_recorder(), []
    used = [_held_bytes(device)]
    for size in plan.sizes[:-3:-1]:
        kept.append(runner.capture((size,), recorder))
        used.append(_held_bytes(device))
    runner.forget_captured()
    del recorder, kept
    gc.collect()
    device.empty_cache()
    first, further = used[1] - used[0], used[-1] - used[1] if len(used) > 2 else 0
    return max(first, 0) + max(further, 0) * max(len(plan.sizes) - 1, 0)


def _held_bytes(device: Device) -> int:
    snapshot = device.snapshot()
    return snapshot.torch_reserved + snapshot.non_torch
