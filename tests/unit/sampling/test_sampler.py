"""The sampler as a whole: processors against a per-row reference, batch independence, edge cases."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tests.unit.sampling.sampler_cases import CPU, ids, mixed_samplings, sample, sampler_for, state_for
from tp_engine.distributed.collectives import SingleRank
from tp_engine.plan import RowSampling
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import SamplingState

VOCAB = 2000


def reference_logits(logits: torch.Tensor, sampling: RowSampling, tokens: list[int], num_prompt: int) -> torch.Tensor:
    """One row's processed logits, one token at a time in plain Python."""
    scores = [float(x) for x in logits.float()]
    output, seen = Counter(tokens[num_prompt:]), set(tokens)
    allowed = set(sampling.allowed_token_ids.tolist())
    bias = dict(zip(sampling.bias_token_ids.tolist(), sampling.bias_values.tolist(), strict=True))
    for token in range(len(scores)):
        if allowed and token not in allowed:
            scores[token] = -float("inf")
        scores[token] += bias.get(token, 0.0)
        if len(tokens) - num_prompt < sampling.min_tokens and token in sampling.stop_token_ids:
            scores[token] = -float("inf")
        if token in seen:
            factor = sampling.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        scores[token] -= output[token] * sampling.frequency_penalty + (output[token] > 0) * sampling.presence_penalty
    return torch.tensor(scores)


def random_processors(generator: np.random.Generator, vocab: int) -> RowSampling:
    """A greedy row with a random selection of processors."""

    def maybe() -> bool:
        return bool(generator.random() < 0.5)

    biased = generator.choice(vocab, 4, replace=False).astype(np.int32) if maybe() else ids()
    return RowSampling(
        presence_penalty=generator.uniform(-2, 2) if maybe() else 0.0,
        frequency_penalty=generator.uniform(-2, 2) if maybe() else 0.0,
        repetition_penalty=generator.uniform(0.5, 2) if maybe() else 1.0,
        min_tokens=4 if maybe() else 0,
        stop_token_ids=generator.choice(vocab, 3).astype(np.int32),
        bias_token_ids=biased,
        bias_values=generator.uniform(-5, 5, len(biased)).astype(np.float32),
        allowed_token_ids=generator.choice(vocab, 30).astype(np.int32) if maybe() else ids(),
    )


@pytest.mark.parametrize("seed", range(8))
def test_processors_match_a_per_row_reference(seed: int) -> None:
    """Oracle: ``reference_logits``; ten greedy steps, counts that grow by the sampled tokens, one resumed row."""
    generator = np.random.default_rng(seed)
    vocab, count = 50, 9
    samplings = [random_processors(generator, vocab) for _ in range(count)]
    known = [generator.integers(0, vocab, 2 + i % 4).astype(np.int32) for i in range(count)]
    sampler = sampler_for(samplings, vocab, known)
    sequences = [tokens.tolist() for tokens in known]
    for _ in range(10):
        logits = torch.from_numpy(generator.normal(size=(count, vocab)).astype(np.float32) * 2)
        untouched = logits.clone()
        positions = np.array([len(tokens) for tokens in sequences], dtype=np.int32)
        tokens, _ = sampler.sample(logits, np.arange(count, dtype=np.int32), positions)
        assert torch.equal(logits, untouched)
        for row, token in enumerate(tokens.tolist()):
            scores = reference_logits(logits[row], samplings[row], sequences[row], 2)
            assert scores[token] >= scores.max() - 1e-4
            sequences[row].append(token)


def test_sample_does_not_depend_on_the_batch() -> None:
    """Oracle: each row sampled alone.  Bit-exact for the whole batch, for shuffles and for subsets of it."""
    count = 36
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(1)) * 3
    samplings = mixed_samplings(count)
    alone = [sample(sampler_for(samplings, VOCAB), logits[row : row + 1], [row])[0][0] for row in range(count)]
    assert sample(sampler_for(samplings, VOCAB), logits, range(count))[0] == alone
    generator = np.random.default_rng(0)
    for size in (2, 7, 20, count):
        rows = generator.permutation(count)[:size].tolist()
        tokens, _ = sample(sampler_for(samplings, VOCAB), logits[rows], rows)
        assert tokens == [alone[row] for row in rows]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """Oracle: each row sampled alone, on coarse logits whose top_k border falls among many equal values."""
    logits = (torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(2)) * 2).round().to(dtype)
    samplings = [RowSampling(temperature=1.0, top_k=3 + 11 * i, top_p=0.7, seed=i) for i in range(24)]
    alone = [sample(sampler_for(samplings, VOCAB), logits[row : row + 1], [row])[0][0] for row in range(24)]
    assert sample(sampler_for(samplings, VOCAB), logits, range(24))[0] == alone


def test_a_seed_gives_other_tokens_at_other_positions_and_seeds() -> None:
    """Oracle: over flat logits, 64 positions of two seeds give almost as many tokens as draws."""
    logits = torch.zeros(2, VOCAB)
    sampler = sampler_for([RowSampling(temperature=1.0, seed=s) for s in (7, -7)], VOCAB)
    drawn = [token for position in range(64) for token in sample(sampler, logits, [0, 1], position)[0]]
    assert len(set(drawn)) > 110


def test_mixed_steps_reuse_the_plan_until_something_changes() -> None:
    """Oracle: a row admitted anew samples by its new parameters, and min_tokens ends when it is reached."""
    state = state_for([RowSampling(), RowSampling(min_tokens=2, stop_token_ids=ids(3))], 8)
    sampler, logits = Sampler(state, SingleRank()), torch.tensor([[0.0, 0, 0, 9, 1, 0, 0, 0]] * 2)
    assert [sample(sampler, logits, [0, 1], position)[0] for position in (2, 3, 4)] == [[3, 4], [3, 4], [3, 3]]
    state.release(ids(0))
    state.admit(0, RowSampling(allowed_token_ids=ids(5, 6)), ids(1), 1)
    assert sample(sampler, logits, [0, 1], 4)[0] == [5, 3]
    state.release(ids(0, 1))
    assert sample(sampler, logits, [0, 1], 4)[0] == [3, 3]


def test_a_readmitted_row_forgets_the_counts_of_the_one_before() -> None:
    """Oracle: a strong frequency penalty makes greedy change tokens, and starts afresh with the row's next request."""
    strong = RowSampling(frequency_penalty=2.0)
    state = state_for([strong], 4)
    sampler, logits = Sampler(state, SingleRank()), torch.tensor([[3.0, 2.5, 2.0, 1.5]])
    assert [sample(sampler, logits, [0], position)[0][0] for position in (2, 3, 4, 5)] == [0, 1, 2, 3]
    state.release(ids(0))
    state.admit(0, strong, ids(0, 0, 0), 3)
    assert sample(sampler, logits, [0], 3)[0] == [0]
    state.admit(0, strong, ids(2, 2, 0, 0), 2)
    assert sample(sampler, logits, [0], 4)[0] == [1]


def test_draft_rows_sample_as_rows_that_have_generated_their_draft_tokens() -> None:
    """Oracle: rows admitted with the draft tokens, for a row with a list of ids and two with penalties, step after
    step; so is a row whose draft tokens were kept."""
    samplings = [
        RowSampling(temperature=0.8, seed=1, allowed_token_ids=ids(2, 3, 4)),
        RowSampling(temperature=0.8, seed=2, repetition_penalty=1.8, presence_penalty=0.7),
        RowSampling(frequency_penalty=0.9, repetition_penalty=1.3),
    ]
    generator = np.random.default_rng(4)
    known = [generator.integers(0, 9, 6).astype(np.int32) for _ in samplings]
    state = SamplingState(max_num_seqs=8, vocab_size=9, device=CPU)
    for row, sampling in enumerate(samplings):
        state.admit(row, sampling, known[row], 2)
    draft_rows, owners = ids(3, 4, 5, 6), ids(1, 1, 2, 0)
    for step in range(4):
        draft_tokens = ids(*generator.integers(0, 9, 4).tolist())
        state.mirror(draft_rows, owners, draft_tokens)
        behind = [(1, draft_tokens[:1]), (1, draft_tokens[:2]), (2, draft_tokens[2:3]), (0, draft_tokens[3:])]
        logits = torch.from_numpy(generator.normal(size=(4, 9)).astype(np.float32))
        found, _ = sample(Sampler(state, SingleRank()), logits, draft_rows.tolist(), 9)
        oracle = sampler_for(
            [samplings[row] for row, _ in behind], 9, [np.concatenate((known[row], own)) for row, own in behind]
        )
        assert found == sample(oracle, logits, range(4), 9)[0]
        if step == 1:
            kept = ids(5, 5, 3)
            state.keep(ids(1, 1, 2), kept)
            known[1], known[2] = np.concatenate((known[1], kept[:2])), np.concatenate((known[2], kept[2:]))


def test_counts_are_allocated_only_for_penalties() -> None:
    """Oracle: the (rows, vocab) tables appear with the first penalised request."""
    state = SamplingState(max_num_seqs=4, vocab_size=10, device=CPU)
    state.admit(0, RowSampling(temperature=1.0), ids(1), 1)
    assert state.penalties.output_counts is None
    state.admit(1, RowSampling(presence_penalty=0.1), ids(1), 1)
    assert state.penalties.output_counts is not None
    assert state.penalties.num_bytes == 4 * 10 * 5


def test_tiny_temperature_is_greedy() -> None:
    """Oracle: argmax."""
    logits = torch.randn(3, 100)
    sampler = sampler_for([RowSampling(temperature=t, seed=1) for t in (0.0, 1e-6, 9e-6)], 100)
    assert sample(sampler, logits, range(3))[0] == logits.argmax(-1).tolist()


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan])
def test_broken_logits_still_give_legal_ids(value: float) -> None:
    """Oracle: rows of -inf, inf or NaN, whole or in part, never raise and always give an id of the vocabulary."""
    samplings = mixed_samplings(24)
    for fill in (slice(None), slice(0, 2), slice(1999, None)):
        logits = torch.randn(24, VOCAB)
        logits[:, fill] = value
        tokens, _ = sample(sampler_for(samplings, VOCAB), logits, range(24))
        assert all(0 <= token < VOCAB for token in tokens)


def test_masked_tokens_are_never_drawn() -> None:
    """Oracle: tokens at -inf, here all but one, are never drawn in any way of drawing."""
    logits = torch.full((12, VOCAB), -torch.inf)
    logits[:, 6] = 1.0
    assert sample(sampler_for(mixed_samplings(12), VOCAB), logits, range(12))[0] == [6] * 12


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 255, 300, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_argmax_is_argmax(vocab: int, dtype: torch.dtype) -> None:
    """Oracle: torch.argmax, with ties, infinities, NaN and the maximum in the tail."""
    logits = torch.randn(64, vocab).to(dtype)
    logits[1] = 0.0
    logits[2] = -torch.inf
    logits[3, -1] = 99.0
    logits[4] = logits[4].round()
    logits[5, vocab // 2 :] = torch.nan
    logits[6, -1] = -torch.nan
    logits[7, :: max(1, vocab // 3)] = torch.inf
    sampler = sampler_for([RowSampling()] * 64, vocab)
    assert sample(sampler, logits, range(64))[0] == logits.argmax(-1).tolist()
