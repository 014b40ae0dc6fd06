"""The largest step that the limits allow, run once to find the peak of memory, before there is the real KV cache."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata, Backends, prepare_groups
from tp_engine.layers.attention import forward_context
from tp_engine.models.causal_lm import CausalLM
from tp_engine.plan import MASK_TOKENS, IntArray, RowSampling
from tp_engine.ranks.collectives import Communicator
from tp_engine.sampling.sampler import make_sampler
from tp_engine.sampling.state import SamplingState
from tp_engine.units import ceil_div
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.prompt_scores import empty_scores, positions_at_once, score_largest


@torch.inference_mode()
def run_largest_step(
    model: CausalLM,
    backends: Backends,
    effective: EffectiveConfig,
    device: torch.device,
    communicator: Communicator,
) -> None:
    """``max_num_batched_tokens`` tokens of new prompts; ``max_num_seqs`` rows sampled, with log-probabilities.

    Scoring prompts is measured too: the logits that it makes at once are gathered on rank 0, while the results of two
    whole steps are held, one on its way to the host, the other in the making.

    Where the model's layers have a KV cache, ``backends`` attend to its first block, again and again; it may be of one
    block alone.  A collective: every rank calls it.

    On CPUs only layers of each kind run: the others are equal to them, and each frees what it took before the next
    begins.  There are no kernels to load in them and no allocator whose state depends on them, and all of them would
    take seconds.
    """
    config = effective.config
    num_tokens = config.max_num_batched_tokens
    input_ids = torch.arange(num_tokens, device=device) % effective.model.vocab_size
    metadata = _fresh_prompts(num_tokens, effective.max_model_len, config.block_size, device)
    groups = [metadata] * len(backends)
    positions = torch.cat([torch.arange(length, device=device) for length in metadata.host_query_lens.tolist()])
    prepare_groups(backends, groups)
    part = model.shortened() if device.type == "cpu" else nullcontext()
    with part, forward_context(groups):
        hidden = model(input_ids, positions)
    state = SamplingState(
        max_num_seqs=config.max_num_seqs,
        vocab_size=effective.model.vocab_size,
        device=device,
        info=communicator.info,
    )
    held = [empty_scores(num_tokens, state.vocab_size, config.max_logprobs, device) for _ in range(2)]
    num_positions = positions_at_once(config.max_num_seqs)
    logits = model.compute_local_logits(hidden[:num_positions])
    _sample_all(logits[: config.max_num_seqs], state, communicator, config.max_logprobs)
    score_largest(model, logits, input_ids[: len(logits)], config.max_logprobs)
    del held


def _fresh_prompts(num_tokens: int, max_model_len: int, block_size: int, device: torch.device) -> AttentionMetadata:
    """Prompts as long as they may be, until all tokens are spent; nothing is stored."""
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
    )


def _sample_all(logits: torch.Tensor, state: SamplingState, communicator: Communicator, num_logprobs: int) -> None:
    """Sample every row of ``logits`` (n, width) the most expensive way."""
    rows = np.arange(len(logits), dtype=np.int32)
    prompt = np.zeros(1, dtype=np.int32)
    for row in rows.tolist():
        state.admit(row, RowSampling(temperature=1.0, top_p=0.9, logprobs=num_logprobs), prompt, 1)
    state.masks.set(rows, np.full((len(rows), ceil_div(state.vocab_size, MASK_TOKENS)), -1, dtype=np.int32))
    make_sampler(state, communicator).sample(logits, rows, np.ones(len(rows), dtype=np.int32))
