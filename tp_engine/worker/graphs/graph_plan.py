"""Which steps are recorded, for which sizes, and how much memory the recordings take.

Steps of decodes are recorded where the attention backend and the ranks' collectives can be, which in symmetric memory
depends on their sizes.  Steps with prompts are recorded on GPUs, if ``cudagraph_prefill_capture_sizes`` asks for it,
where besides no layer makes a plan of its prompts on the host.  The runner launches kernel by kernel the steps that are
in no recording (``padded_batch.StepSizes.size_for``) and those of which more is read than sampled tokens.
"""

import gc
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from tp_engine.attention.base import AttentionBackend
from tp_engine.config import EngineConfig
from tp_engine.cpu import native_library
from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.reduce_plan import RecordedSizes
from tp_engine.errors import ConfigError
from tp_engine.kernels.ops import has_triton
from tp_engine.layers.embedding import VocabParallelEmbedding
from tp_engine.layers.norm import QKNorm
from tp_engine.layers.recurrent import RecurrentMixer
from tp_engine.models.draft_head import DraftHead
from tp_engine.models.language_model import LanguageModel
from tp_engine.sampling.device_sampler import SHARE_BYTES
from tp_engine.system.log import get_logger
from tp_engine.worker.batch.padded_batch import MAX_CHUNKS, StepSizes
from tp_engine.worker.device import Device
from tp_engine.worker.graphs.recorder import CudaRecorder
from tp_engine.worker.graphs.step_runner import GraphPlan, StepRunner
from tp_engine.worker.graphs.tape_recorder import TapeRecorder
from tp_engine.worker.results.readback import Check, never_fails

logger = get_logger(__name__)

Size = TypeVar("Size")

# With more rows, a tape saves only a small part of a step.
_MAX_TAPE_ROWS = 64
# The usual batch sizes of CUDA graphs.
_SMALLEST = (1, 2, 4)
_FINE_STEP, _FINE_UP_TO, _COARSE_STEP = 8, 256, 16
_LARGEST = 512
_NUM_SAMPLES = 6
# Padding costs little up to a few hundred tokens, and every size costs time at the start and memory.
_PROMPT_DECODES = (0, 8, 32, 64, 128, 256)
_PROMPT_TOKENS = (32, 64, 128, 256, 512, 1024)


def graph_plan(
    config: EngineConfig,
    backend: AttentionBackend,
    communicator: Communicator,
    model: LanguageModel,
    check: Check = never_fails,
    head: DraftHead | None = None,
) -> GraphPlan | None:
    """Return what to record of the model and of a draft ``head``, the same on every rank; None if steps are launched
    one kernel after another.

    On CUDA the reason is logged.  ``check`` raises if another rank has ended, while a recording waits for the device.
    """
    if config.enforce_eager:
        return None
    if config.device != "cuda":
        return _tape_plan(config, backend, communicator, model)
    sizes = capture_sizes(config.cudagraph_capture_sizes, config.max_step_decodes)
    obstacle = _obstacle(config, backend, model)
    if obstacle is None:
        obstacle = communicator.why_not_capture(sizes_of(model, sizes, tp_invariant=config.tp_invariant, head=head))
    if obstacle is not None:
        logger.warning("no CUDA graphs, so decode steps are slower: %s", obstacle)
        return None
    prompts = _prompt_sizes(config, backend, communicator, model)
    return GraphPlan(sizes=sizes, prompts=prompts, make_recorder=partial(CudaRecorder, check))


def _obstacle(config: EngineConfig, backend: AttentionBackend, model: LanguageModel) -> str | None:
    if config.debug_compare_rank_inputs:
        return "debug_compare_rank_inputs reads every step's inputs"
    if not backend.can_capture_decodes:
        return f"the attention backend {backend.name} cannot be captured"
    if model.why_not_capture is not None:
        return model.why_not_capture
    if not has_triton():
        return "the triton package is not installed"
    if config.speculative_config is not None and not all(layer.can_record_drafts for layer in model.state_layers):
        return "the host orders the draft tokens of a recurrent layer that has no kernel: leave out speculative_config"
    return None


def _prompt_sizes(
    config: EngineConfig, backend: AttentionBackend, communicator: Communicator, model: LanguageModel
) -> StepSizes | None:
    """The recorded sizes of steps with prompts; None if they are launched, with the reason in the log if some are
    asked."""
    tokens = prefill_sizes(config.cudagraph_prefill_capture_sizes, config.max_num_batched_tokens)
    if not tokens:
        return None
    most = next((size for size in _PROMPT_DECODES if size >= config.max_step_decodes), _PROMPT_DECODES[-1])
    sizes = StepSizes(decodes=tuple(size for size in _PROMPT_DECODES if size <= most), tokens=tokens)
    if not backend.can_capture_prompts:
        obstacle: str | None = f"the attention backend {backend.name} plans prompts on the host"
    elif (speculation := config.speculative_config) is not None and speculation.has_head:
        obstacle = "a draft head reads what layers make of prompts"
    elif model.state_layers:
        obstacle = "some layers have recurrent states, whose prompts are planned on the host"
    else:
        rows = {count for size in sizes.largest_first for count in (size.num_tokens, size.num_requests)}
        obstacle = communicator.why_not_capture(sizes_of(model, rows, tp_invariant=config.tp_invariant))
    if obstacle is None:
        return sizes
    logger.warning("no CUDA graphs of steps with prompts: %s", obstacle)
    return None


def sizes_of(
    model: LanguageModel, row_counts: Iterable[int], *, tp_invariant: bool, head: DraftHead | None = None
) -> RecordedSizes:
    """Return the collectives of steps in which ``row_counts`` rows are computed or sampled, or drafted by ``head``."""
    reduced = {model.hidden_size * model.dtype.itemsize}
    summing = (
        module for module in model.modules() if isinstance(module, QKNorm | RecurrentMixer | VocabParallelEmbedding)
    )
    reduced |= {module.reduced_bytes for module in summing} - {0}
    if head is not None:
        reduced |= {size * model.dtype.itemsize for size in (head.out_size, head.fed_size)}
    gathered = {*SHARE_BYTES}
    if tp_invariant:  # sums over ranks are all-gathers of float32
        gathered.add(model.hidden_size * torch.float32.itemsize)
    rows = tuple(row_counts)
    return RecordedSizes(
        all_reduces=frozenset(count * size for count in rows for size in reduced),
        all_gathers=frozenset(count * size for count in rows for size in gathered),
    )


def _tape_plan(
    config: EngineConfig, backend: AttentionBackend, communicator: Communicator, model: LanguageModel
) -> GraphPlan | None:
    """One tape for each number of rows, if a step consists of compiled code only."""
    library = native_library()
    if library is None or config.debug_compare_rank_inputs or not model.is_recordable:
        return None
    if not (backend.can_capture_decodes and communicator.can_capture):
        return None
    sizes = range(1, min(config.max_step_decodes, _MAX_TAPE_ROWS) + 1)
    return GraphPlan(sizes=tuple(sizes), make_recorder=lambda: TapeRecorder(library, communicator))


def measure_graph_bytes(plan: GraphPlan, device: Device, graphs: StepRunner, most_drafting_rows: int = 0) -> int:
    """Bytes that all recordings of ``plan`` will take, from those of some sizes of each kind of step.

    All share one pool, in which the smaller ones reuse the largest's memory: each further one adds only its own.
    ``graphs`` may be of a runner with a KV cache of any size, and keep no recording.  With up to ``most_drafting_rows``
    a head's drafts are recorded too, so their largest size counts.  A collective.
    """
    recorder, behind, num_bytes = plan.make_recorder(), plan.make_recorder(), 0
    if plan.prompts is not None:
        record_prompts = partial(graphs.capture_prompts, plan.prompts, recorder)
        num_bytes += _grown_bytes(device, record_prompts, plan.prompts.largest_first)
    record = partial(graphs.capture_decodes, plan.sizes, recorder, behind=behind)
    sampled = _evenly_spaced(plan.sizes[::-1])
    num_bytes += _grown_bytes(device, record, plan.sizes[::-1])
    if drafting := [size for size in plan.sizes if size <= most_drafting_rows and size not in sampled]:
        num_bytes += _grown_bytes(device, record, drafting[-1:])
    graphs.forget()
    del recorder, behind
    gc.collect()
    device.empty_cache()
    return num_bytes


def _grown_bytes(device: Device, record: Callable[[list[Size]], object], sizes: Sequence[Size]) -> int:
    """Bytes that the recordings of ``sizes``, largest first, take: the first one's, and of the others as many times
    those of a sample as there are more of them.

    The second alone would mislead: it brings what happens once, and the allocator takes memory in portions of up to
    20 MiB, which fifty recordings share.
    """
    used = [_held_bytes(device)]
    sampled = _evenly_spaced(sizes)
    for part in ([sampled[0]], sampled[1:]):
        for size in part:
            record([size])
        used.append(_held_bytes(device))
    first, others = used[1] - used[0], used[2] - used[1]
    return max(first, 0) + max(others, 0) * (len(sizes) - 1) // max(len(sampled) - 1, 1)


def _evenly_spaced(sizes: Sequence[Size]) -> list[Size]:
    """The first of ``sizes``, and up to ``_NUM_SAMPLES`` of the others, the last one among them."""
    count = min(len(sizes) - 1, _NUM_SAMPLES)
    return [sizes[round(place * (len(sizes) - 1) / max(count, 1))] for place in range(count + 1)]


def _held_bytes(device: Device) -> int:
    snapshot = device.snapshot()
    return snapshot.torch_reserved + snapshot.non_torch


def capture_sizes(asked: str | None, max_decodes: int) -> tuple[int, ...]:
    """Batch sizes of recorded steps in rising order; a step runs the next larger one, padded.

    ``asked`` is a comma-separated list; None takes 1, 2, 4, then every 8 up to 256 and every 16 up to 512, as far as
    ``max_decodes`` goes, which is always the last unless it is larger: padding then costs at most an eighth or 16
    rows.  Raises ``ConfigError`` unless ``asked`` is a list of numbers from 1 to ``max_decodes``, which is
    ``max_num_seqs`` unless draft tokens have more rows.
    """
    if asked is not None:
        return _parse("cudagraph_capture_sizes", asked, 1, "max_num_seqs", max_decodes, "batch sizes", "1,2,4,8")
    fine = range(_FINE_STEP, _FINE_UP_TO + 1, _FINE_STEP)
    coarse = range(_FINE_UP_TO + _COARSE_STEP, _LARGEST + 1, _COARSE_STEP)
    largest = min(max_decodes, _LARGEST)
    return (*(size for size in (*_SMALLEST, *fine, *coarse) if size < largest), largest)


def prefill_sizes(asked: str, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Numbers of prompt tokens of recorded steps in rising order; a step runs the next larger one, padded.

    ``asked`` is ``none``, a comma-separated list, or ``auto``: 32 to 1,024, as far as ``max_num_batched_tokens`` goes.
    Raises ``ConfigError`` for anything else, and for sizes that are out of range.
    """
    if asked == "none":
        return ()
    least = MAX_CHUNKS + 1  # so that a step's tokens are never as many as those that can be sampled
    if asked == "auto":
        largest = min(max_num_batched_tokens, _PROMPT_TOKENS[-1])
        return tuple(size for size in (*(size for size in _PROMPT_TOKENS if size < largest), largest) if size >= least)
    name = "cudagraph_prefill_capture_sizes"
    what, limit = "none, auto, or numbers of prompt tokens", "max_num_batched_tokens"
    return _parse(name, asked, least, limit, max_num_batched_tokens, what, "32,64,128")


def _parse(name: str, asked: str, least: int, limit: str, most: int, what: str, example: str) -> tuple[int, ...]:
    """The option ``name``, a list of sizes from ``least`` to ``most``, which is the option ``limit``."""
    try:
        sizes = sorted({int(part) for part in asked.split(",")})
    except ValueError as error:
        raise ConfigError(f"{name} is {asked!r}; it must be {what} separated by commas, such as {example}") from error
    if sizes[0] < least or sizes[-1] > most:
        wrong = sizes[0] if sizes[0] < least else sizes[-1]
        raise ConfigError(
            f"{name} contains {wrong}; sizes go from {least} to {limit}, which is {most}: leave it out, or raise "
            f"{limit}"
        )
    return tuple(sizes)
