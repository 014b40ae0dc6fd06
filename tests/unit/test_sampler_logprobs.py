"""Log-probabilities and ranks against log_softmax."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.unit.sampler_cases import ids, sample, sampler_for
from tp_engine.plan import RowSampling
from tp_engine.sampling.logprobs import logprobs_of
from tp_engine.worker.readback import Readback


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
