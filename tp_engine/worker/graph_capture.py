"""Whether decode steps are recorded, for which batch sizes, and how much memory the recordings take."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.attention.base import AttentionBackend
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.kernels.native.library import native_library
from tp_engine.kernels.ops import has_triton
from tp_engine.log import get_logger
from tp_engine.models.causal_lm import CausalLM
from tp_engine.ranks.collectives import Communicator
from tp_engine.worker.captured_decodes import CudaRecorder, Recorder
from tp_engine.worker.device import Device
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.tape_recorder import TapeRecorder

logger = get_logger(__name__)

# With more rows, a tape saves only a small part of a step.
_MAX_TAPE_ROWS = 64
# The usual batch sizes of CUDA graphs.
_SMALLEST = (1, 2, 4)
_FINE_STEP, _FINE_UP_TO, _COARSE_STEP = 8, 256, 16
_LARGEST = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphPlan:
    """Record decode steps of ``sizes`` rows with a recorder from ``make_recorder``."""

    sizes: tuple[int, ...]
    make_recorder: Callable[[], Recorder] = CudaRecorder


def graph_plan(
    config: EngineConfig, backend: AttentionBackend, communicator: Communicator, model: CausalLM
) -> GraphPlan | None:
    """What to record, the same on every rank; None if steps are launched one kernel after another.

    On CUDA the reason is logged.
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
    """One tape for each number of rows, if a step consists of compiled code only."""
    library = native_library()
    if library is None or config.check_inputs or not model.is_recordable:
        return None
    if not (backend.can_capture_decodes and communicator.can_capture):
        return None
    sizes = range(1, min(config.max_num_seqs, _MAX_TAPE_ROWS) + 1)
    return GraphPlan(sizes=tuple(sizes), make_recorder=lambda: TapeRecorder(library, communicator))


def measure_graph_bytes(plan: GraphPlan, device: Device, runner: ModelRunner) -> int:
    """Bytes that all recordings of ``plan`` will take, from those of its two largest sizes.

    All share one pool, in which the smaller ones reuse the largest's memory: each further one adds only its own.
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


def capture_sizes(asked: str | None, max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes of recorded steps in rising order; a step runs the next larger one, padded.

    ``asked`` is a comma-separated list; None takes 1, 2, 4, then every 8 up to 256 and every 16 up to 512, as far as
    ``max_num_seqs`` goes, which is always the last unless it is larger: padding then costs at most an eighth or 16
    rows.  Raises ``ConfigError`` unless ``asked`` is a list of numbers from 1 to ``max_num_seqs``.
    """
    if asked is not None:
        return _parse(asked, max_num_seqs)
    fine = range(_FINE_STEP, _FINE_UP_TO + 1, _FINE_STEP)
    coarse = range(_FINE_UP_TO + _COARSE_STEP, _LARGEST + 1, _COARSE_STEP)
    largest = min(max_num_seqs, _LARGEST)
    return (*(size for size in (*_SMALLEST, *fine, *coarse) if size < largest), largest)


def _parse(asked: str, max_num_seqs: int) -> tuple[int, ...]:
    try:
        sizes = sorted({int(part) for part in asked.split(",")})
    except ValueError as error:
        raise ConfigError(
            f"cuda_graph_sizes is {asked!r}; it must be batch sizes separated by commas, such as 1,2,4,8"
        ) from error
    if sizes[0] < 1 or sizes[-1] > max_num_seqs:
        wrong = sizes[0] if sizes[0] < 1 else sizes[-1]
        raise ConfigError(
            f"cuda_graph_sizes contains {wrong}; sizes go from 1 to max_num_seqs, which is {max_num_seqs}: leave it "
            "out, or raise max_num_seqs"
        )
    return tuple(sizes)
