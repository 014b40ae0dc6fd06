"""Building blocks of the sampler's tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tp_engine.distributed.collectives import SingleRank
from tp_engine.plan import RowSampling
from tp_engine.sampling.logprobs import LogprobTensors
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import SamplingState

CPU = torch.device("cpu")


def ids(*values: int) -> np.ndarray:
    """An int32 array."""
    return np.array(values, dtype=np.int32)


def sampler_for(
    samplings: Sequence[RowSampling],
    vocab_size: int,
    tokens: Sequence[np.ndarray] | None = None,
    *,
    scores_processed: bool = False,
) -> Sampler:
    """A sampler of ``state_for`` the same rows."""
    return Sampler(state_for(samplings, vocab_size, tokens, scores_processed=scores_processed), SingleRank())


def state_for(
    samplings: Sequence[RowSampling],
    vocab_size: int,
    tokens: Sequence[np.ndarray] | None = None,
    *,
    scores_processed: bool = False,
) -> SamplingState:
    """A state whose row i has ``samplings[i]`` and has seen ``tokens[i]``; the first two are the prompt."""
    state = SamplingState(
        max_num_seqs=len(samplings), vocab_size=vocab_size, device=CPU, scores_processed=scores_processed
    )
    for row, sampling in enumerate(samplings):
        known = ids(0, 1) if tokens is None else tokens[row]
        state.admit(row, sampling, known, 2)
    return state


def sample(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[int], position: int = 2
) -> tuple[list[int], LogprobTensors | None]:
    """Sample ``rows`` at one position."""
    tokens, logprobs = sampler.sample(logits, ids(*rows), np.full(len(rows), position, dtype=np.int32))
    assert tokens.dtype is torch.int32
    return tokens.tolist(), logprobs


def mixed_samplings(count: int) -> list[RowSampling]:
    """Rows of every kind, each with its own seed."""
    kinds: list[dict[str, object]] = [
        {},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 1.0, "bias_token_ids": ids(3, 9), "bias_values": np.array([4.0, -4.0], np.float32)},
        {"temperature": 1.0, "allowed_token_ids": ids(5, 6, 7, 100)},
        {"temperature": 1.0, "min_tokens": 3, "stop_token_ids": ids(2, 4)},
        {"temperature": 1.1, "top_k": 1500},
        {"logprobs": 3, "repetition_penalty": 1.2},
    ]
    return [RowSampling(seed=1000 + i, **kinds[i % len(kinds)]) for i in range(count)]  # type: ignore[arg-type]
