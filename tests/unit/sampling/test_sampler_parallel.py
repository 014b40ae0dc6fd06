"""Sampling from slices of the vocabulary gives every rank the tokens and log-probabilities of the gathered logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from tests.simulated_ranks import NotingCommunicator, run_ranks
from tests.unit.sampling.sampler_cases import CPU, ids, mixed_samplings
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.layers.embedding import VocabSlice
from tp_engine.model_config import padded_vocab_size
from tp_engine.plan import RowSampling, TokenLogprobs
from tp_engine.sampling import vocab_parallel
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import SamplingState
from tp_engine.worker.results.readback import Readback

STEPS = 3
Answers = list[tuple[list[int], TokenLogprobs | None]]


def admit_all(state: SamplingState, samplings: Sequence[RowSampling]) -> None:
    for row, sampling in enumerate(samplings):
        known = np.arange(row, row + 9, dtype=np.int32) * 7 % state.vocab_size
        state.admit(row, sampling, known, 4)


def run_steps(sampler: Sampler, make_logits: Callable[[int], torch.Tensor], count: int) -> Answers:
    """Some steps of all rows; penalty counts grow by the sampled tokens."""
    answers: Answers = []
    rows = np.arange(count, dtype=np.int32)
    for step in range(STEPS):
        tokens, scores = sampler.sample(make_logits(step), rows, np.full(count, 9 + step, np.int32))
        assert tokens.dtype is torch.int32
        answers.append((tokens.tolist(), None if scores is None else scores.to_host(Readback(1, CPU).fetch)()))
    return answers


def compare(samplings: Sequence[RowSampling], logits: torch.Tensor, world_size: int) -> list[NotingCommunicator]:
    """Oracle: a single rank on the whole ``logits`` (steps, n, vocab).  Returns the ranks' communicators."""
    _, count, vocab = logits.shape
    state = SamplingState(max_num_seqs=count, vocab_size=vocab, device=CPU)
    admit_all(state, samplings)
    expected = run_steps(Sampler(state, SingleRank()), lambda step: logits[step], count)
    padding = padded_vocab_size(vocab, world_size) - vocab
    padded = torch.nn.functional.pad(logits, (0, padding))

    def body(communicator: Communicator) -> tuple[Answers, NotingCommunicator]:
        counting = NotingCommunicator(communicator)
        info = communicator.info
        own = VocabSlice.of_rank(vocab, info)
        state = SamplingState(max_num_seqs=count, vocab_size=vocab, device=CPU, info=info)
        admit_all(state, samplings)
        part = slice(info.rank * own.width, (info.rank + 1) * own.width)
        sampler = Sampler(state, counting)
        return run_steps(sampler, lambda step: padded[step, :, part].contiguous(), count), counting

    results = run_ranks(world_size, body)
    for rank, (found, _) in enumerate(results):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], f"rank {rank}"
    for (_, ours), (_, theirs) in zip(results[0][0], expected, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            for name in ("token_ids", "logprobs", "ranks"):
                assert np.array_equal(getattr(ours, name), getattr(theirs, name), equal_nan=name == "logprobs")
    return [counting for _, counting in results]


def random_logits(count: int, vocab: int, *, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(STEPS, count, vocab, generator=torch.Generator().manual_seed(seed)) * scale


WORLD_SIZES = [2, 3, 4]
WIDE_KINDS: list[RowSampling] = [
    *mixed_samplings(12),
    RowSampling(temperature=1.0, top_p=0.9, seed=1, logprobs=2),
    RowSampling(temperature=1.5, top_p=0.95, min_p=0.02, seed=2, presence_penalty=1.0, frequency_penalty=0.5),
    RowSampling(temperature=0.8, min_p=0.2, seed=3, repetition_penalty=1.5),
    RowSampling(temperature=1.0, top_k=1, seed=4),
    RowSampling(temperature=1.0, top_k=700, top_p=0.99, seed=5, bias_token_ids=ids(900), bias_values=np.ones(1, "f4")),
    RowSampling(temperature=0.9, top_p=0.7, allowed_token_ids=ids(*range(0, 1000, 3)), seed=6),
    RowSampling(min_tokens=7, stop_token_ids=ids(0, 999, 500), logprobs=0),
    RowSampling(frequency_penalty=2.0, presence_penalty=-2.0),
]


@pytest.fixture(autouse=True, params=[0, vocab_parallel.SHORT_WAY_FROM], ids=["short", "usual"])
def short_way_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The size of vocabulary from which the sampler looks for a nucleus among candidates: any, or the usual one."""
    monkeypatch.setattr(vocab_parallel, "SHORT_WAY_FROM", request.param)
    return int(request.param)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(("vocab", "dtype"), [(1000, torch.float32), (1003, torch.bfloat16), (130, torch.float32)])
def test_every_kind_of_row_in_one_batch(vocab: int, dtype: torch.dtype, world_size: int) -> None:
    """Oracle: a single rank on the whole logits."""
    kinds = [kind for kind in WIDE_KINDS if vocab > 900 or kind.seed != 5]
    kinds = [kind for kind in kinds if vocab > 900 or not (len(kind.allowed_token_ids) or len(kind.stop_token_ids))]
    compare(kinds, random_logits(len(kinds), vocab).to(dtype), world_size)


@pytest.mark.parametrize("kind", range(len(WIDE_KINDS)))
def test_each_kind_of_row_alone(kind: int) -> None:
    """Oracle: a single rank on the whole logits, sharp, usual and flat ones."""
    for scale in (20.0, 2.0, 0.01):
        compare([WIDE_KINDS[kind]] * 3, random_logits(3, 1001, scale=scale, seed=kind), 3)


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_that_hold_padding_alone(world_size: int) -> None:
    """Oracle: ``Sampler``, with 17 tokens in slices of 16."""
    kinds = [RowSampling(), RowSampling(temperature=1.0, seed=1), RowSampling(temperature=1.0, top_k=9, seed=2)]
    kinds += [RowSampling(temperature=2.0, top_p=0.9, seed=3), RowSampling(temperature=1.0, min_p=0.1, seed=4)]
    kinds += [RowSampling(logprobs=20), RowSampling(presence_penalty=1.0), RowSampling(temperature=3.0, top_k=16)]
    for chosen in (kinds, kinds[:1]):
        compare(chosen, random_logits(len(chosen), 17), world_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_go_to_the_lowest_id(dtype: torch.dtype) -> None:
    """Oracle: ``Sampler``, on rounded logits with many equal maxima, and zeros of both signs, in several slices."""
    kinds = [
        RowSampling(),
        RowSampling(temperature=1.0, top_k=5, seed=1),
        RowSampling(temperature=1.0, top_p=0.5, seed=2),
    ]
    logits = (random_logits(3, 600) / 3).round()
    compare(kinds, logits.to(dtype), 3)
    zeros = torch.where(torch.arange(600) % 7 == 3, 0.0, -0.0).expand(STEPS, 3, 600)
    compare(kinds, zeros.to(dtype), 3)


@pytest.mark.parametrize("value", [-torch.inf, torch.inf, torch.nan, -torch.nan])
def test_broken_logits(value: float) -> None:
    """Oracle: ``Sampler``, with infinities or NaN in a whole row, in one slice, in parts of two, in the last token."""
    kinds = [kind for kind in WIDE_KINDS if kind.logprobs < 0]
    for broken in (slice(None), slice(0, 300), slice(250, 500), slice(999, None)):
        logits = random_logits(len(kinds), 1000)
        logits[:, :, broken] = value
        compare(kinds, logits, 4)


@pytest.mark.parametrize(
    ("sampling", "collectives", "bytes_per_row"),
    [
        (RowSampling(), 1, 8),
        (RowSampling(temperature=1.0), 1, 8),
        (RowSampling(presence_penalty=1.0), 1, 8),
        (RowSampling(allowed_token_ids=ids(5, 600), temperature=1.0), 1, 8),
        (RowSampling(temperature=0.6, top_k=20, top_p=0.95), 1, 8 * 20),
        (RowSampling(temperature=0.6, min_p=0.05), 2, 8 + 8),
        (RowSampling(logprobs=3), 1, 8 + 4 * 1008),
    ],
)
def test_what_a_step_costs(sampling: RowSampling, collectives: int, bytes_per_row: int) -> None:
    """Oracle: the table in ``vocab_parallel``, counted over the steps."""
    count, vocab = 4, 2016
    for counting in compare([sampling] * count, random_logits(count, vocab, scale=5.0), 2):
        assert len(counting.gathered) == collectives * STEPS
        assert sum(counting.gathered) == bytes_per_row * count * STEPS


@pytest.mark.parametrize(
    ("scale", "collectives", "bytes_per_row"), [(5.0, 2, 8 + 8 * 257), (0.01, 3, 8 + 8 * 257 + 4 * 1008)]
)
def test_what_a_nucleus_costs(scale: float, collectives: int, bytes_per_row: int, short_way_from: int) -> None:
    """Oracle: the table in ``vocab_parallel``: a nucleus of sharp logits is among the candidates, one of flat logits is
    not."""
    count, vocab = 4, 2016
    if short_way_from > vocab:
        collectives, bytes_per_row = 1, 4 * 1008
    sampling = RowSampling(temperature=0.6, top_p=0.9)
    for counting in compare([sampling] * count, random_logits(count, vocab, scale=scale), 2):
        assert len(counting.gathered) == collectives * STEPS
        assert sum(counting.gathered) == bytes_per_row * count * STEPS
