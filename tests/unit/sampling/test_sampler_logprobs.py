"""Log-probabilities and ranks against log_softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.sampling.sampler_cases import ids, sample, sampler_for
from tp_engine.plan import RowSampling
from tp_engine.sampling.logprobs import logprobs_of
from tp_engine.sampling.ranking import row_chunks
from tp_engine.worker.results.readback import Readback


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 5, 60])
def test_logprobs_of_matches_log_softmax(dtype: torch.dtype, k: int) -> None:
    """Oracle: log_softmax, sorted, over a vocabulary of 50 (a larger k is cut to it)."""
    logits = (torch.randn(13, 50) * 3).to(dtype)
    following = torch.randint(0, 50, (13,), dtype=torch.int32)
    scored = logprobs_of(logits, following, k).to_host(Readback(1, logits.device).fetch)()
    wanted = logits.float().log_softmax(-1)
    order = wanted.sort(dim=-1, descending=True, stable=True)
    assert scored.token_ids.dtype == np.int32
    assert scored.logprobs.shape == scored.token_ids.shape == (13, 1 + min(k, 50))
    assert scored.token_ids[:, 0].tolist() == following.tolist()
    own = wanted.gather(1, following[:, None].long())
    assert np.allclose(scored.logprobs[:, :1], own.numpy(), atol=1e-5)
    assert np.allclose(scored.logprobs[:, 1:], order.values[:, :k].numpy(), atol=1e-5)
    assert scored.token_ids[:, 1:].tolist() == order.indices[:, :k].tolist()
    assert scored.ranks.tolist() == ((logits > logits.gather(1, following[:, None].long())).sum(-1) + 1).tolist()


def test_no_positions() -> None:
    """Oracle: an empty chunk keeps its shape."""
    scored = logprobs_of(torch.zeros(0, 9), torch.zeros(0, dtype=torch.int32), 2)
    assert scored.token_ids.shape == (0, 3)
    assert scored.ranks.shape == (0,)


def test_sampled_logprobs_come_from_raw_logits_for_rows_that_ask() -> None:
    """Oracle: log_softmax of the raw logits, although penalties, bias and temperature changed the choice."""
    samplings = [
        RowSampling(logprobs=2, bias_token_ids=ids(7), bias_values=np.array([100.0], np.float32)),
        RowSampling(temperature=2.0, seed=3),
        RowSampling(temperature=0.7, seed=4, logprobs=4, repetition_penalty=1.5),
        RowSampling(logprobs=0),
    ]
    logits = torch.randn(4, 30)
    tokens, scored = sample(sampler_for(samplings, 30), logits, range(4))
    assert scored is not None
    assert tokens[0] == 7
    wanted = logits.log_softmax(-1)
    assert scored.token_ids.shape == (4, 5)
    for row in (0, 2, 3):
        assert scored.token_ids[row, 0] == tokens[row]
        torch.testing.assert_close(scored.logprobs[row, 0], wanted[row, tokens[row]])
        torch.testing.assert_close(scored.logprobs[row, 1:], wanted[row].topk(4).values)
    assert scored.ranks[3] == 1


def test_greedy_fast_path_scores_too_and_nobody_asking_costs_nothing() -> None:
    """Oracle: log_softmax, first with all rows asking, then with none."""
    logits = torch.randn(2, 30)
    _, scored = sample(sampler_for([RowSampling(logprobs=1)] * 2, 30), logits, range(2))
    assert scored is not None and torch.equal(scored.token_ids[:, 0], scored.token_ids[:, 1])
    assert sample(sampler_for([RowSampling()] * 2, 30), logits, range(2))[1] is None


def processed(logits: torch.Tensor, sampling: RowSampling, seen: list[int]) -> torch.Tensor:
    """The distribution that a row is drawn from, by the definitions of its parameters, in float64."""
    scores = logits.double().clone()
    if len(sampling.allowed_token_ids):
        allowed = torch.from_numpy(sampling.allowed_token_ids).long()
        scores = torch.full_like(scores, -torch.inf).index_copy(0, allowed, scores[allowed])
    for token, bias in zip(sampling.bias_token_ids.tolist(), sampling.bias_values.tolist(), strict=True):
        scores[token] += bias
    for token in set(seen):
        repeated = scores[token] / sampling.repetition_penalty
        scores[token] = repeated if scores[token] > 0 else scores[token] * sampling.repetition_penalty
    if sampling.temperature == 0.0:
        return scores.log_softmax(-1)
    scores /= sampling.temperature
    if sampling.top_k:
        scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
    order = scores.softmax(-1).sort(descending=True)
    before = order.values.cumsum(-1) - order.values
    scores[order.indices[before >= sampling.top_p]] = -torch.inf
    probabilities = scores.softmax(-1)
    scores[probabilities < sampling.min_p * probabilities.max()] = -torch.inf
    return scores.log_softmax(-1)


def test_processed_logprobs_are_those_of_the_draw() -> None:
    """Oracle: the definitions, in float64, for rows of every kind; rows that did not ask are zeros; filtered tokens are
    minus infinity.  Drawn tokens are those of the other mode."""
    samplings = [
        RowSampling(logprobs=30, repetition_penalty=1.5),
        RowSampling(temperature=2.0, seed=1),
        RowSampling(temperature=0.7, seed=2, logprobs=30),
        RowSampling(temperature=0.7, seed=3, logprobs=30, top_k=4),
        RowSampling(temperature=1.3, seed=4, logprobs=30, top_p=0.7, repetition_penalty=1.2),
        RowSampling(temperature=0.9, seed=5, logprobs=30, min_p=0.2),
        RowSampling(temperature=0.9, seed=6, logprobs=30, top_k=9, top_p=0.8, min_p=0.05),
        RowSampling(temperature=1.0, seed=7, logprobs=30, allowed_token_ids=ids(3, 9, 11)),
        RowSampling(logprobs=30, bias_token_ids=ids(7), bias_values=np.array([3.0], np.float32), top_k=2, top_p=0.1),
    ]
    logits = torch.randn(len(samplings), 30) * 2
    rows = range(len(samplings))
    usual, _ = sample(sampler_for(samplings, 30), logits, rows)
    tokens, scored = sample(sampler_for(samplings, 30, scores_processed=True), logits, rows)
    assert tokens == usual and scored is not None and not scored.logprobs[1].any()
    for row, sampling in enumerate(samplings):
        if sampling.logprobs < 0:
            continue
        expected = processed(logits[row], sampling, [0, 1])
        torch.testing.assert_close(scored.logprobs[row, 0].double(), expected[tokens[row]], atol=1e-5, rtol=1e-5)
        found = torch.empty(30, dtype=torch.float64)
        found[scored.token_ids[row, 1:].long()] = scored.logprobs[row, 1:].double()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        assert scored.ranks[row] == 1 + int((expected > expected[tokens[row]]).sum())


def test_processed_logprobs_of_plain_greedy_rows_are_raw() -> None:
    """Oracle: log_softmax; one row of two asks."""
    logits = torch.randn(2, 30)
    sampler = sampler_for([RowSampling(), RowSampling(logprobs=2)], 30, scores_processed=True)
    _, scored = sample(sampler, logits, range(2))
    assert scored is not None and not scored.logprobs[0].any()
    torch.testing.assert_close(scored.logprobs[1, 1:], logits.log_softmax(-1)[1].topk(2).values)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 249, 256, 300, 374, 1000, 5000])
def test_parts_of_many_rows_are_even(num_rows: int) -> None:
    """Oracle: all rows once, in order; on CPUs no part has fewer than half as many as another (256 rows of 263 were 249
    and 7), on devices none is above the bound of memory."""
    for device, most in (("cpu", 1 << 16), ("cuda", 1 << 23)):
        for width in (3, 263, 50_000, 1 << 24):
            parts = list(row_chunks(num_rows, width, torch.device(device)))
            assert [row for start, stop in parts for row in range(start, stop)] == list(range(num_rows))
            sizes = [stop - start for start, stop in parts]
            assert all(size == 1 or size * width <= most * (1.5 if device == "cpu" else 1) for size in sizes)
            assert device == "cuda" or not sizes or min(sizes) * 2 >= max(sizes)
