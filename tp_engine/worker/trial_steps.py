"""Steps that run before there are requests: first steps for one-time work, largest steps to measure memory.

In the first steps kernels are compiled and loaded, and libraries choose their algorithms and allocate their workspaces.
They are plans as rank 0 would send them; all tokens of their rows lie in block 0, so a cache of one block is enough.
Rows have two tokens, except those of the longer prompts::

    prompts      the beginning of one, a whole one; parts of several sizes, because products choose their kernels by
                 the number of rows, and attention its plan by that of a long prompt's tokens
    mixed        a decode beside a prompt
    sampling     decodes of every kind that a kernel or the general sampler treats differently
    decodes      of 1, 2, 4, ... rows up to the limit: attention splits the keys by the number of rows
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TypeAlias

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata, Backends, prepare_groups
from tp_engine.config import MEASURED_LOGPROBS, EngineConfig
from tp_engine.distributed.collectives import Communicator
from tp_engine.errors import MemoryBudgetError
from tp_engine.layers.attention import forward_context
from tp_engine.layers.lora import adapting, group_step
from tp_engine.models.draft_head import DraftHead
from tp_engine.models.language_model import LanguageModel
from tp_engine.models.vision_tower import VisionTower
from tp_engine.plan import FIRST_STEP_ID, MASK_TOKENS, Admission, IntArray, RowSampling, StepPlan
from tp_engine.sampling.device_sampler import MAX_RANKED
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import SamplingState
from tp_engine.system.units import ceil_div
from tp_engine.worker.device import Device
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.memory.live_bytes import largest_image_bytes
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.results.prompt_scores import empty_scores, positions_at_once, score_largest

Variation: TypeAlias = Callable[[StepPlan], StepPlan]
"""Makes of a trial step another kind of step."""

LENGTH = 2
# Between any two of these, products of experts and with quantised weights change their tiles at most once.
_PART_SIZES = (32, 64, 128, 256, 1024, 4096)
GREEDY = RowSampling()
_PENALISED = RowSampling(temperature=1.0, presence_penalty=0.5)
_MIN_P = RowSampling(temperature=1.0, min_p=0.1)
_RANKED = RowSampling(temperature=0.8, top_k=20, top_p=0.9)
_NUCLEUS = RowSampling(temperature=1.0, top_p=0.9)
_LARGE_TOP_K = RowSampling(temperature=1.0, top_k=MAX_RANKED + 1)
_SCORED = RowSampling(temperature=1.0, top_p=0.9, logprobs=1)
_KINDS = (
    (_PENALISED,), (_MIN_P,), (_PENALISED, _MIN_P), (_RANKED,), (_NUCLEUS,), (_LARGE_TOP_K,), (_SCORED,),
    (GREEDY, _RANKED),
)  # fmt: skip


def warms_up(device_type: str) -> bool:
    """Return whether the first steps on such a device are slow; a CPU's kernels are compiled before they are loaded."""
    return device_type == "cuda"


def as_it_is(plan: StepPlan) -> StepPlan:
    """Return the plan: the variation that all steps have."""
    return plan


def warm_up(runner: ModelRunner, config: EngineConfig, vary: Variation = as_it_is) -> None:
    """Run the first steps, as ``vary`` makes them, on ``runner``, which has no rows and gets arbitrary ones; a
    collective."""
    for plan in _steps_of_every_kind(config, runner.num_groups):
        runner.run(vary(plan)).result()
    run_largest_decodes(runner, config, vary)


def run_largest_decodes(runner: ModelRunner, config: EngineConfig, vary: Variation = as_it_is) -> None:
    """Run decodes of 1, 2, 4, ... rows: one of them needs the most memory for attention's partial results."""
    for num_rows in sizes_up_to(config.max_num_seqs):
        runner.run(vary(trial_plan(config, runner.num_groups, [GREEDY] * num_rows))).result()


def _steps_of_every_kind(config: EngineConfig, num_groups: int) -> Iterator[StepPlan]:
    """The plans that the limits on rows and tokens allow."""
    steps: list[tuple[Sequence[RowSampling], Sequence[int]]] = [((), (1,)), ((), (LENGTH,)), ((GREEDY,), (LENGTH,))]
    longest = min(config.max_num_batched_tokens, config.max_model_len or LENGTH)
    steps += [((), (size,)) for size in _PART_SIZES if size <= longest]
    steps += [(samplings, ()) for samplings in _KINDS]
    steps.append(([GREEDY] * (config.max_num_seqs - 1), (LENGTH,)))  # launches differ from those of decodes alone
    for decodes, chunks in steps:
        num_tokens, num_rows = len(decodes) + sum(chunks), len(decodes) + len(chunks)
        if num_tokens <= config.max_num_batched_tokens and num_rows <= config.max_num_seqs:
            yield trial_plan(config, num_groups, decodes, chunks)


def sizes_up_to(most_rows: int) -> list[int]:
    """Return 1, 2, 4, ... and ``most_rows``."""
    powers = [1 << exponent for exponent in range((most_rows - 1).bit_length())]
    return [*powers, most_rows]


def trial_plan(
    config: EngineConfig, num_groups: int, decodes: Sequence[RowSampling], chunks: Sequence[int] = ()
) -> StepPlan:
    """Return a step with rows that decode with ``decodes``, then greedy prompts of which ``chunks`` tokens are computed
    in this step."""
    samplings = [*decodes, *[GREEDY] * len(chunks)]
    computed = [LENGTH - 1] * len(decodes) + [0] * len(chunks)
    lengths = [LENGTH] * len(decodes) + [max(chunk, LENGTH) for chunk in chunks]
    rows = np.arange(len(samplings), dtype=np.int32)
    return StepPlan(
        step_id=FIRST_STEP_ID,
        released=np.arange(config.max_num_seqs, dtype=np.int32),
        admitted=tuple(
            Admission(
                row=row,
                token_ids=np.zeros(lengths[row], dtype=np.int32),
                num_prompt_tokens=1,
                num_computed_tokens=computed[row],
                block_ids=np.zeros(num_groups * ceil_div(lengths[row], config.block_size), dtype=np.int32),
                sampling=sampling,
            )
            for row, sampling in enumerate(samplings)
        ),
        decode_rows=rows[: len(decodes)],
        prefill_rows=rows[len(decodes) :],
        prefill_tokens=np.array(chunks, dtype=np.int32),
        prefill_samples=np.array([chunk == LENGTH for chunk in chunks], dtype=np.bool_),
    )


@torch.inference_mode()
def run_largest_step(
    model: LanguageModel,
    backends: Backends,
    effective: EffectiveConfig,
    device: torch.device,
    communicator: Communicator,
    head: DraftHead | None = None,
) -> None:
    """Run the largest step that the limits allow, to find the peak of memory with a cache of one block; a collective.

    It has ``max_num_batched_tokens`` tokens of new prompts and samples ``max_step_decodes`` rows, with
    log-probabilities.
    Prompts are scored too: rank 0 gathers the logits that are made at once, while the results of two whole steps are
    held, as when one is on its way to the host and the next is being made.  A draft ``head`` takes all
    tokens in, if it keeps K/V.

    ``backends`` store nothing, and attend to the first block only.

    On CPUs one layer of each kind runs: equal layers take the same memory, and each frees it before the next begins.
    Running all would take seconds.
    """
    config = effective.config
    num_tokens = config.max_num_batched_tokens
    input_ids = torch.arange(num_tokens, device=device, dtype=torch.int64) % effective.model.vocab_size
    metadata = _fresh_prompts(num_tokens, effective.max_model_len, config.block_size, device)
    groups = [metadata] * len(backends)
    positions = torch.cat(
        [torch.arange(length, device=device, dtype=torch.int64) for length in metadata.host_query_lens.tolist()]
    )
    prepare_groups(backends, groups)
    part = model.shortened() if device.type == "cpu" else nullcontext()
    of_tokens: IntArray = np.zeros(num_tokens, dtype=np.int32)
    adapters = None if effective.adapters is None else group_step(of_tokens, None, device)
    states = None if head is None else head.new_states(num_tokens)
    with part, forward_context(groups), adapting(adapters):
        hidden = model(input_ids, positions, None, states)
        if head is not None and states is not None and head.keeps_kv:
            head(input_ids, head.combine(states), positions, input_ids[: config.max_step_decodes])
    state = SamplingState(
        max_num_seqs=config.max_step_decodes,
        vocab_size=effective.model.vocab_size,
        device=device,
        info=communicator.info,
        scores_processed=config.scores_processed,
    )
    num_logprobs = config.max_logprobs if config.max_logprobs >= 0 else MEASURED_LOGPROBS
    held = [empty_scores(num_tokens, state.vocab_size, num_logprobs, device) for _ in range(2)]
    num_positions = positions_at_once(config.max_step_decodes)
    logits = model.compute_local_logits(hidden[:num_positions])
    _sample_all(logits[: config.max_step_decodes], state, communicator, num_logprobs)
    score_largest(model, logits, input_ids[: len(logits)], num_logprobs)
    del held


@torch.inference_mode()
def encode_largest_image(tower: VisionTower, num_rows: int, device: Device) -> None:
    """Encode an image of the largest size while there are ``num_rows`` new rows, to find the peak of memory.

    On CPUs, where that may take minutes, ``largest_image_bytes`` are taken instead.  Raises ``MemoryBudgetError`` if
    there is not enough memory.
    """
    height, width = tower.spec.largest
    try:
        if device.type == "cpu":
            num_bytes = largest_image_bytes(tower)
            device.empty_cache()  # what earlier steps have freed is used again
            held = torch.ones(
                num_bytes + num_rows * tower.width * tower.dtype.itemsize, dtype=torch.uint8, device="cpu"
            )
        else:
            held = torch.empty((num_rows, tower.width), dtype=tower.dtype, device=device.torch_device)
            tower(torch.zeros((height, width, 3), dtype=torch.uint8, device=device.torch_device))
        del held
    except torch.OutOfMemoryError as error:
        raise MemoryBudgetError(
            f"there is no memory to encode an image of {width} x {height} pixels, the largest one: lower "
            "--mm-processor-kwargs '{\"max_pixels\": ...}' or --max-model-len, or serve text alone with "
            f"--limit-mm-per-prompt '{{\"image\": 0}}' ({error})"
        ) from error


def _fresh_prompts(num_tokens: int, max_model_len: int, block_size: int, device: torch.device) -> AttentionMetadata:
    """Prompts of the greatest length, until all tokens are used; nothing is stored."""
    lengths: IntArray = np.full(-(-num_tokens // max_model_len), max_model_len, dtype=np.int32)
    lengths[-1] -= lengths.sum() - num_tokens
    num_blocks = ceil_div(int(lengths.max()), block_size)
    starts = np.concatenate((np.zeros(1, dtype=np.int32), np.cumsum(lengths, dtype=np.int32)))
    return AttentionMetadata(
        num_decodes=0,
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        block_table=torch.zeros((len(lengths), num_blocks), dtype=torch.int32, device=device),
        seq_lens=torch.from_numpy(lengths).to(device),
        query_start=torch.from_numpy(starts).to(device),
        host_query_lens=lengths,
        host_seq_lens=lengths,
        prefill_rows=np.full(len(lengths), -1, dtype=np.int32),
    )


def _sample_all(logits: torch.Tensor, state: SamplingState, communicator: Communicator, num_logprobs: int) -> None:
    """Sample every row of ``logits`` (n, width) in the most expensive way."""
    rows = np.arange(len(logits), dtype=np.int32)
    prompt = np.zeros(1, dtype=np.int32)
    for row in rows.tolist():
        state.admit(row, RowSampling(temperature=1.0, top_p=0.9, logprobs=num_logprobs), prompt, 1)
    state.masks.set(rows, np.full((len(rows), ceil_div(state.vocab_size, MASK_TOKENS)), -1, dtype=np.int32))
    Sampler(state, communicator).sample(logits, rows, np.ones(len(rows), dtype=np.int32))
