"""top_k, top_p, min_p and the noise: masks against transformers, draws against the softmax."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.unit.sampling.sampler_cases import CPU, ids, sampler_for
from tp_engine.plan import RowSampling
from tp_engine.sampling.filters import keep_mask
from tp_engine.sampling.groups import group_rows
from tp_engine.sampling.noise import gumbel_noise, hash_tokens, noise_keys
from tp_engine.sampling.ranking import rank_candidates
from tp_engine.sampling.state import SamplingState

SETTINGS = [
    RowSampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.5, 1.0, 1.7)
    for top_k in (1, 7, 50, 1300)
    for top_p in (0.3, 0.9, 1.0)
    for min_p in (0.0, 0.1, 1.0)
]


def warped(logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """``logits`` (n, vocab) after transformers' warpers; removed tokens have -inf."""
    warpers = [TemperatureLogitsWarper(sampling.temperature), TopKLogitsWarper(sampling.top_k)]
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0.0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    for warper in warpers:
        logits = warper(ids(0), logits)
    return logits


@pytest.mark.parametrize("sampling", SETTINGS, ids=lambda s: f"t{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}")
def test_filters_keep_what_transformers_keeps(sampling: RowSampling) -> None:
    """Oracle: transformers' warpers on tie-free logits."""
    vocab, count = 1500, 4
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(3)) * 2
    state = SamplingState(max_num_seqs=count, vocab_size=vocab, device=CPU)
    for row in range(count):
        state.admit(row, sampling, ids(0), 1)
    (group,) = group_rows(state, np.arange(count, dtype=np.int32), np.zeros(count, np.bool_)).groups
    values, token_ids = rank_candidates(logits, max(sampling.top_k, 60))
    scaled = values / group.temperature
    ours = torch.full_like(logits, -torch.inf)
    kept = scaled.masked_fill(~keep_mask(scaled, group), -torch.inf)
    ours.scatter_(1, token_ids.long(), kept)
    assert torch.equal(ours, warped(logits, sampling))


@pytest.mark.parametrize(
    "sampling",
    [
        RowSampling(temperature=1.0),
        RowSampling(temperature=0.5),
        RowSampling(temperature=1.0, top_k=5),
        RowSampling(temperature=1.2, top_p=0.8),
        RowSampling(temperature=1.0, min_p=0.1),
        RowSampling(temperature=1.0, top_k=12, top_p=0.9, min_p=0.02),
    ],
)
def test_draws_follow_the_distribution(sampling: RowSampling) -> None:
    """Oracle: the softmax of transformers' result; chi-square of 40,000 seeded draws below its 0.999 quantile."""
    vocab, draws, batch = 20, 40_000, 2_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(4))
    keep_all = RowSampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k or vocab,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
    expected = warped(logits[None], keep_all)[0].softmax(-1).double().numpy() * draws
    sampler = sampler_for([msgspec.structs.replace(sampling, seed=seed) for seed in range(batch)], vocab)
    rows, wide = np.arange(batch, dtype=np.int32), logits.repeat(batch, 1)
    drawn = [sampler.sample(wide, rows, np.full(batch, 2 + i, np.int32))[0].numpy() for i in range(draws // batch)]
    observed = np.bincount(np.concatenate(drawn), minlength=vocab)
    possible = expected > 0
    assert observed[~possible].sum() == 0
    chi_square = ((observed - expected)[possible] ** 2 / expected[possible]).sum()
    freedom = possible.sum() - 1
    assert chi_square < freedom + 3.1 * np.sqrt(2 * freedom) + 6


@pytest.mark.parametrize("spread", [0.05, 6.0])
def test_top_p_over_a_large_vocabulary_is_the_same_ranked_or_sorted(spread: float) -> None:
    """Oracle: the full sort.  A narrow nucleus takes the short way on CPU; a wide one cannot."""
    vocab = 30_000
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(5)) * spread
    rows, positions = np.arange(6, dtype=np.int32), np.full(6, 2, np.int32)
    for seed in range(5):
        nucleus = [RowSampling(temperature=1.0, top_p=0.9, seed=seed + row) for row in range(6)]
        by_sort = [RowSampling(temperature=1.0, top_p=0.9, top_k=vocab - 1, seed=seed + row) for row in range(6)]
        short, _ = sampler_for(nucleus, vocab).sample(logits, rows, positions)
        full, _ = sampler_for(by_sort, vocab).sample(logits, rows, positions)
        assert torch.equal(short, full)


def test_unfiltered_draw_is_the_same_over_vocabulary_and_candidates() -> None:
    """Oracle: a top_k of all but one token draws the unfiltered row's tokens, through ranked candidates."""
    vocab, count = 900, 64
    logits = torch.randn(count, vocab, generator=torch.Generator().manual_seed(6)) * 3
    rows, positions = np.arange(count, dtype=np.int32), np.full(count, 2, np.int32)
    free = sampler_for([RowSampling(temperature=1.0, seed=s) for s in range(count)], vocab)
    ranked = sampler_for([RowSampling(temperature=1.0, top_k=vocab - 1, seed=s) for s in range(count)], vocab)
    assert torch.equal(free.sample(logits, rows, positions)[0], ranked.sample(logits, rows, positions)[0])


@pytest.mark.parametrize("count", [1, 10, 64])
def test_rank_candidates_orders_by_value_then_id(count: int) -> None:
    """Oracle: a stable descending sort, over ties, zeros and infinities."""
    logits = torch.randn(5, 64).mul(2).round().abs_() - 2.0
    logits[0, 3], logits[0, 7] = torch.inf, -torch.inf
    order = logits.sort(dim=-1, descending=True, stable=True)
    values, token_ids = rank_candidates(logits, count)
    assert torch.equal(token_ids.long(), order.indices[:, :count])
    assert torch.equal(values, order.values[:, :count])


def reference_hash(token: int, seed: int, position: int) -> int:
    """The documented hash in plain Python integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    gamma = 0x9E3779B97F4A7C15
    key = mix((mix((seed + gamma) & mask) + gamma * (position + 1)) & mask)
    k1, k2, low = key & 0x7FFFFFFF, key >> 32 & 0x7FFFFFFF, 0x7FFFFFFF
    x = token ^ k1
    x = ((x ^ x >> 16) * 0x7FEB352D + k2) & low
    x = ((x ^ x >> 15) * 0x846CA68B) & low
    return x ^ x >> 16


def test_hash_is_the_documented_one_for_any_subset() -> None:
    """Oracle: plain Python.  Golden: a change between versions would change the samples of every seed."""
    seeds = np.array([0, 1, 2**64 - 1, 123456789], dtype=np.uint64)
    positions = ids(0, 5, 100_000, 2**31 - 1)
    keys = torch.from_numpy(noise_keys(seeds, positions))
    tokens = torch.tensor([0, 1, 7, 151_935], dtype=torch.int32)
    hashed = hash_tokens(tokens, keys).tolist()
    wanted = [
        [reference_hash(t, int(s), int(p)) for t in tokens.tolist()] for s, p in zip(seeds, positions, strict=True)
    ]
    assert hashed == wanted
    everything = gumbel_noise(torch.arange(5000, dtype=torch.int32), keys)
    some = torch.randperm(5000)[:333].to(torch.int32)
    assert torch.equal(gumbel_noise(some, keys), everything[:, some.long()])
    assert torch.equal(gumbel_noise(some, keys[2:3]), everything[2:3, some.long()])


def test_noise_is_gumbel_and_uncorrelated() -> None:
    """Oracle: the Gumbel distribution's mean, variance and quantiles; neighbours in token, position and seed."""
    positions = np.arange(200, dtype=np.int32)
    ids_32 = torch.arange(5000, dtype=torch.int32)
    by_position = gumbel_noise(ids_32, torch.from_numpy(noise_keys(np.full(200, 3, np.uint64), positions))).double()
    by_seed = gumbel_noise(
        ids_32, torch.from_numpy(noise_keys(np.arange(200, dtype=np.uint64), positions * 0))
    ).double()
    for noise in (by_position, by_seed):
        assert torch.isfinite(noise).all()
        assert abs(noise.mean().item() - 0.5772157) < 0.006
        assert abs(noise.var().item() - np.pi**2 / 6) < 0.02
        uniform = (-(-noise).exp()).exp()
        shares = torch.histc(uniform, bins=100, min=0, max=1) / uniform.numel()
        assert (shares * 100 - 1).abs().max() < 0.05
        centred = (uniform - 0.5) * np.sqrt(12)
        for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(64, 1), centred.flip(1)):
            assert abs((centred * other).mean().item()) < 0.005
        worst_rows = (centred @ centred.T / 5000).fill_diagonal_(0).abs().max().item()
        assert worst_rows < 6 / np.sqrt(5000)
