"""Sampling kernels against ``Sampler``: interpreted and on CUDA (``CASES``), and the engine's launches
(``launch_all``).

Tokens are equal.  The interpreter's logarithm may differ from the twin's in the last bits.  That changes a token only
where two scores are as close, which the cases avoid.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import triton.language as tl

from tests.simulated_ranks import NotingCommunicator, run_ranks
from tests.unit.kernels.kernel_cases_decode_inputs import make_tables
from tp_engine.distributed.collectives import Communicator, SingleRank
from tp_engine.kernels.jit import jit
from tp_engine.kernels.sampling import (
    best_triton,
    candidates_triton,
    filter_triton,
    nucleus_ranks_triton,
    nucleus_triton,
    ranked_ranks_triton,
)
from tp_engine.kernels.sampling.scores_triton import gumbel_noise, hash_tokens, noise_key
from tp_engine.kernels.sampling.tables import CountTables, SamplingTables
from tp_engine.kernels.steps.decode_inputs import DecodeInputs, RowTables, advance_decodes, prepare_decodes
from tp_engine.layers.embedding import VocabSlice
from tp_engine.model_config import padded_vocab_size
from tp_engine.plan import RowSampling
from tp_engine.sampling import noise
from tp_engine.sampling.device_sampler import SHARE_BYTES, DeviceSampler, Filters, SamplerVariant
from tp_engine.sampling.filters import draw_filtered, draw_ranked
from tp_engine.sampling.groups import group_rows
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import SamplingState

ONE_AT_A_TIME = threading.Lock()
STEPS = 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PENALISED = [
    RowSampling(repetition_penalty=1.3),
    RowSampling(temperature=1.0, frequency_penalty=0.4, presence_penalty=0.7, seed=5),
    RowSampling(temperature=0.7, presence_penalty=-1.0, seed=-6),
]
PLAIN = [RowSampling(), RowSampling(temperature=1.0, seed=1), RowSampling(temperature=0.6, seed=-(2**63))]
MIN_P = [RowSampling(temperature=1.2, min_p=0.1, seed=2), RowSampling(temperature=0.8, min_p=1.0, seed=3)]
RANKED = [
    RowSampling(temperature=0.6, top_k=20, top_p=0.95, seed=7),
    RowSampling(temperature=1.0, top_k=1, seed=8),
    RowSampling(temperature=2.0, top_k=64, min_p=0.02, seed=9),
    RowSampling(temperature=1.0, top_k=50, top_p=0.3, seed=10),
]
FILTERED = [
    RowSampling(temperature=0.7, top_p=0.9, seed=11),
    RowSampling(temperature=1.5, top_p=0.999, min_p=0.001, seed=12),
    RowSampling(temperature=1.0, top_k=200, top_p=0.8, seed=13),
]


def make_state(samplings: Sequence[RowSampling], vocab_size: int, device: str, **options: object) -> SamplingState:
    """Row 2 i + 1 has ``samplings[i]`` and has seen some tokens."""
    rows = 2 * len(samplings) + 1
    state = SamplingState(max_num_seqs=rows, vocab_size=vocab_size, device=torch.device(device), **options)  # type: ignore[arg-type]
    for i, sampling in enumerate(samplings):
        state.admit(2 * i + 1, sampling, np.arange(i, i + 40, 3, dtype=np.int32), 6)
    return state


def one_at_a_time(sampler: DeviceSampler) -> DeviceSampler:
    """The sampler, with a lock around its kernels: the interpreter supports one thread at a time."""
    names = ("_best_tokens", "_top_keys", "_draw_nucleus", "_draw_ranked")
    for name in (*names, "_front_share", "_weigh_fronts", "_choose_of_fronts", "_draw_of_shares"):
        kernel = getattr(sampler, name)

        def launch(*args: Any, kernel: Callable[..., Any] = kernel, **kwargs: Any) -> Any:
            with ONE_AT_A_TIME:
                return kernel(*args, **kwargs)

        setattr(sampler, name, launch)
    return sampler


def check_tokens(
    device: str, samplings: Sequence[RowSampling], kind: SamplerVariant, world_size: int, logits: torch.Tensor
) -> None:
    """``logits`` (steps, n, vocab); the device's sampler gets its rows out of order, with padding among them."""
    _, count, vocab_size = logits.shape
    rows = 2 * np.random.default_rng(0).permutation(count).astype(np.int32) + 1
    twin = Sampler(make_state(samplings, vocab_size, device, has_tables=False), SingleRank())
    padding = padded_vocab_size(vocab_size, world_size) - vocab_size if world_size > 1 else 0
    wide = torch.nn.functional.pad(logits, (0, padding)).to(device)
    positions = [np.full(count, 14 + step, np.int32) for step in range(STEPS)]
    expected = [twin.sample(logits[i].to(device), rows, positions[i])[0].tolist() for i in range(STEPS)]

    def body(communicator: Communicator) -> list[list[int]]:
        state = make_state(samplings, vocab_size, device, has_tables=True, info=communicator.info)
        noting = NotingCommunicator(communicator) if world_size > 1 else None
        sampler = one_at_a_time(DeviceSampler(state, noting or communicator))
        own = VocabSlice.of_rank(vocab_size, communicator.info)
        first = communicator.info.rank * own.width
        found = []
        for step in range(STEPS):
            assert sampler.kind_of(rows, positions[step]) == kind
            slices = wide[step, :, first : first + own.width]
            padded_rows = torch.from_numpy(np.append(rows, [-1])).to(device, torch.int32)
            padded_positions = torch.from_numpy(np.append(positions[step] - 1, [0])).to(device, torch.int64)
            padded_slices = torch.cat((slices, slices[:1]))
            tokens = sampler.sample(kind, padded_slices, padded_rows, padded_positions)
            assert tokens.dtype is torch.int32 and 0 <= int(tokens[-1]) < vocab_size
            found.append(tokens[:-1].tolist())
            assert state.tables is not None and not state.tables.arrivals.any(), "a later launch would end too early"
        if noting is not None and kind in sampler.kinds:
            assert set(noting.gathered) <= {(count + 1) * size for size in SHARE_BYTES}, noting.gathered
        return found

    results = [body(SingleRank())] if world_size == 1 else run_ranks(world_size, body)
    for found in results:
        assert found == expected, f"{found} instead of {expected}"


def check_choice(device: str) -> None:
    """Steps with kernels and steps with log-probabilities, in turn, count penalties of the same rows."""
    samplings = [*PENALISED, RowSampling(logprobs=2, presence_penalty=0.5)]
    logits = random_logits(4, 300, torch.float32, 1.0).to(device)
    mixed = Sampler(make_state(samplings, 300, device, has_tables=True), SingleRank())
    twin = Sampler(make_state(samplings, 300, device, has_tables=False), SingleRank())
    assert mixed.device is not None and twin.device is None
    for step, count in enumerate((4, 3, 4, 3)):
        rows, positions = 2 * np.arange(count, dtype=np.int32) + 1, np.full(count, 14 + step, np.int32)
        found, expected = (sampler.sample(logits[step % STEPS, :count], rows, positions) for sampler in (mixed, twin))
        assert torch.equal(found[0], expected[0])
        assert (found[1] is None) == (count == 3) and (expected[1] is None) == (count == 3)


def check_groups(device: str) -> None:
    """Steps with other needs, such as a bias: the kernel gives the tokens that ranking gives."""
    samplings = [*RANKED, *FILTERED]
    state = make_state(samplings, 300, device, has_tables=False)
    rows = 2 * np.arange(len(samplings), dtype=np.int32) + 1
    logits = random_logits(len(samplings), 300, torch.float32, 1.0)[0].to(device)
    keys = torch.from_numpy(noise.noise_keys(state.seed[rows], rows)).to(device)
    for group in group_rows(state, rows, np.zeros(len(rows), np.bool_)).groups:
        own, own_keys = group.logits_of(logits, None), keys[group.members]
        expected = draw_ranked(own.clone(), group, own_keys, 300)
        assert torch.equal(draw_filtered(own, group, own_keys), expected)


def check_nuclei(device: str, world_size: int) -> None:
    """Many rows with top_p, some with min_p, from peaked to flat, with ties and masked tokens: the twin's tokens.

    With a small top_p many rows need more than two rounds.
    """
    generator, vocab_size, count = np.random.default_rng(7), 500, 12 // world_size
    for trial in range(6 if world_size == 1 else 3):
        top_ps = generator.choice([0.02, 0.1, 0.5, 0.9, 0.95, 0.999], count)
        min_ps = generator.choice([0.0, 0.0, 0.05, 0.5], count)
        samplings = [
            RowSampling(
                temperature=float(generator.choice([0.3, 1.0, 2.5])), top_p=float(top_p), min_p=float(min_p),
                seed=int(generator.integers(2**40)),
            )
            for top_p, min_p in zip(top_ps, min_ps, strict=True)
        ]  # fmt: skip
        logits = torch.from_numpy(generator.normal(size=(STEPS, count, vocab_size)).astype(np.float32))
        logits *= (0.01, 1.0, 4.0)[trial % 3]
        if trial >= 3 or (trial and world_size > 1):
            logits = (logits * 2).round() / 2
            logits[:, ::3, 40:] = -torch.inf
        check_tokens(device, samplings, SamplerVariant(Filters.NUCLEUS), world_size, logits)


def check_long_front(device: str) -> None:
    """A front of more tokens than an exchange holds, which takes logits made from the noise: all ranks draw the same
    token, and one that top_p keeps.  Oracle: the likeliest tokens, in numpy."""
    vocab_size, world_size = 600, 2
    sampling = RowSampling(temperature=1.0, top_p=0.8, seed=21)
    key = torch.from_numpy(noise.noise_keys(np.array([21], np.uint64), np.array([14], np.int32)))
    logits = noise.gumbel_noise(torch.arange(vocab_size, dtype=torch.int32), key) * -0.9
    order = logits[0].double().numpy().argsort()[::-1]
    weights = np.exp(logits[0].double().numpy()[order])
    kept = order[weights.cumsum() - weights < 0.8 * weights.sum()].tolist()

    def body(communicator: Communicator) -> int:
        state = make_state([sampling], vocab_size, device, has_tables=True, info=communicator.info)
        part = VocabSlice.of_rank(vocab_size, communicator.info)
        own = logits[:, part.first : part.first + part.num_ids].contiguous().to(device)
        rows, positions = torch.tensor([1], dtype=torch.int32), torch.tensor([13])
        sampler = one_at_a_time(DeviceSampler(state, communicator))
        return int(sampler.sample(SamplerVariant(Filters.NUCLEUS), own, rows.to(device), positions.to(device)))

    found = run_ranks(world_size, body)
    assert found[0] == found[1] and found[0] in kept, (found, kept)


def check_padding(device: str) -> None:
    """A padding row is greedy, whatever row 0 asks for: it would cost what row 0 costs, in every padded step."""
    for sampling in (FILTERED[0], FILTERED[2], RANKED[1]):
        state = SamplingState(max_num_seqs=3, vocab_size=700, device=torch.device(device), has_tables=True)
        state.admit(0, sampling, np.arange(5, dtype=np.int32), 5)
        logits = random_logits(2, 700, torch.float32, 0.1)[0].to(device)
        rows = torch.tensor([-1, -1], dtype=torch.int32, device=device)
        positions = torch.tensor([3, 4], device=device)
        found = DeviceSampler(state, SingleRank()).sample(SamplerVariant(Filters.RANKED), logits, rows, positions)
        assert found.tolist() == logits.argmax(-1).tolist()


def check_advance(device: str) -> None:
    """A launch that ends the step, too.  Oracle: the same launch without, then the twin of ``advance_decodes``."""
    state = make_state(PLAIN, 1003, device, has_tables=True)
    tables, expected = (make_tables(2 * len(PLAIN) + 1, 40, 16, 1, device) for _ in range(2))
    sampler = DeviceSampler(state, SingleRank())
    for rows, logits in zip(([5, -1, 3, 1], [-1, -1, 3, -1]), random_logits(4, 1003, torch.bfloat16), strict=True):
        inputs = DecodeInputs.allocate(4, expected)
        inputs.rows.copy_(torch.tensor(rows, dtype=torch.int32))
        prepare_decodes(expected, inputs)
        step = (SamplerVariant(), logits.to(device), inputs.rows, inputs.positions)
        tokens = sampler.sample(*step)
        advance_decodes(expected, inputs, tokens)
        assert torch.equal(sampler.sample(*step, advanced=tables), tokens)
        assert torch.equal(tables.token_ids, expected.token_ids)
        assert torch.equal(tables.num_computed, expected.num_computed)
        assert state.tables is not None and not state.tables.arrivals.any()


def random_logits(count: int, vocab_size: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return (torch.randn(STEPS, count, vocab_size, generator=generator) * scale).to(dtype)


def masked(logits: torch.Tensor) -> torch.Tensor:
    """-inf except for a few tokens per row; the first four rows have one token, in the last rank's slice."""
    allowed = torch.rand(logits.shape, generator=torch.Generator().manual_seed(3)) < 0.02
    allowed[:, :4] = False
    allowed[:, :, -3] = True
    return logits.masked_fill(~allowed, -torch.inf)


def check_noise(device: str) -> None:
    """Keys and hashes equal bit by bit, from int64 seeds on the device; the noise within rounding (on CUDA:
    exactly)."""
    seeds = torch.tensor([0, 1, -1, 123456789, -(2**63)], device=device)
    positions = torch.tensor([0, 5, 100_000, 2**31 - 1, 7], device=device)
    keys = noise.noise_keys(seeds.cpu().numpy().view(np.uint64), positions.cpu().numpy().astype(np.int32))
    assert np.array_equal(noise.device_noise_keys(seeds, positions).cpu().numpy(), keys)
    token_ids = torch.cat((torch.arange(300), torch.tensor([151_935, 2**31 - 1]))).to(device, torch.int32)
    hashed = torch.empty((5, len(token_ids)), dtype=torch.int32, device=device)
    noisy = torch.empty((5, len(token_ids)), dtype=torch.float32, device=device)
    noise_probe[(5,)](token_ids, seeds, positions, hashed, noisy, len(token_ids), 512, enable_fp_fusion=False)
    on_device = torch.from_numpy(keys).to(device)
    assert torch.equal(hashed, noise.hash_tokens(token_ids, on_device))
    expected = noise.gumbel_noise(token_ids, on_device)
    tolerance = 0.0 if device == "cuda" else 1e-6
    torch.testing.assert_close(noisy, expected, rtol=tolerance, atol=tolerance)


@jit
def noise_probe(token_ids, seeds, positions, hashed, noisy, num_ids, BLOCK: tl.constexpr):
    """One program: the hashes and the noise of all ids for one row."""
    row = tl.program_id(0)
    word_1, word_2 = noise_key(tl.load(seeds + row), tl.load(positions + row))
    column = tl.arange(0, BLOCK)
    inside = column < num_ids
    ids = tl.load(token_ids + column, mask=inside, other=0)
    tl.store(hashed + row * num_ids + column, hash_tokens(ids, word_1, word_2), mask=inside)
    tl.store(noisy + row * num_ids + column, gumbel_noise(ids, word_1, word_2), mask=inside)


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device."""
    cases: dict[str, Callable[[str], None]] = {"noise": check_noise}

    def add(
        name: str, samplings: Sequence[RowSampling], kind: SamplerVariant, world_size: int, logits: torch.Tensor
    ) -> None:
        cases[f"{name}-{world_size}"] = lambda device: check_tokens(device, samplings, kind, world_size, logits)

    for world_size in (1, 3):
        for dtype in DTYPES:
            add(f"plain-{dtype}", PLAIN, SamplerVariant(), world_size, random_logits(3, 1003, dtype))
        min_p, ranked = [*PLAIN, *MIN_P], [*PLAIN, *RANKED]
        add("min_p", min_p, SamplerVariant(min_p=True), world_size, random_logits(5, 700, torch.float32, 1.0))
        penalised = [*PLAIN, *PENALISED]
        add(
            "penalties",
            penalised,
            SamplerVariant(penalised=True),
            world_size,
            random_logits(6, 700, torch.float32, 1.0),
        )
        add("ranked", ranked, SamplerVariant(Filters.RANKED), world_size, random_logits(7, 700, torch.bfloat16))
        everything = [*PENALISED, *MIN_P, *RANKED]
        kind = SamplerVariant(Filters.RANKED, penalised=True, min_p=True)
        add("everything", everything, kind, world_size, random_logits(9, 500, torch.float32))
        # Of equal logits the lowest ids come first, also where a threshold falls among them.
        tied = (random_logits(7, 400, torch.float32) / 2).round()
        add("ties", ranked, SamplerVariant(Filters.RANKED), world_size, tied)
        add("masked", everything, kind, world_size, masked(random_logits(9, 301, torch.float32, 1.0)))
    cases["choice"], cases["groups"] = check_choice, check_groups
    cases["padding"], cases["advance"], cases["long front"] = check_padding, check_advance, check_long_front
    nucleus = [*PLAIN, *FILTERED[:2]]
    for world_size in (1, 2, 4):
        cases[f"nuclei-{world_size}"] = partial(check_nuclei, world_size=world_size)
        kind = SamplerVariant(Filters.NUCLEUS)
        add("nucleus", nucleus, kind, world_size, random_logits(5, 700, torch.bfloat16, 1.0))
        add("equal logits", nucleus, kind, world_size, torch.zeros(STEPS, 5, 700))
        few = [*PLAIN, FILTERED[0]]
        add("nucleus of few", few, kind, world_size, random_logits(4, 17, torch.float32))  # ranks with padding alone
    add("filtered", FILTERED, SamplerVariant(Filters.RANKED), 1, random_logits(3, 700, torch.float32, 1.0))
    add("filtered", FILTERED, SamplerVariant(Filters.GATHERED), 2, random_logits(3, 700, torch.float32, 1.0))
    mixed = SamplerVariant(Filters.BOTH)
    add("nucleus and ranked", [*nucleus, *RANKED], mixed, 3, random_logits(9, 700, torch.float32))
    everything = [*PENALISED, *MIN_P, *RANKED, *FILTERED[:2]]
    mixed = SamplerVariant(Filters.BOTH, penalised=True, min_p=True)
    add("everything and a nucleus", everything, mixed, 2, masked(random_logits(11, 301, torch.float32, 1.0)))
    gathered = SamplerVariant(Filters.GATHERED, penalised=True, min_p=True)
    everything = [PENALISED[1], MIN_P[0], RANKED[2], *FILTERED[1:]]
    add("everything and a large top_k", everything, gathered, 3, random_logits(5, 301, torch.float32, 1.0))
    # Several chunks of candidates, on a GPU too.
    peaked = random_logits(4, 4500, torch.bfloat16, 6.0)
    add("peaked", [RANKED[0], RANKED[3], FILTERED[0], FILTERED[2]], SamplerVariant(Filters.RANKED), 1, peaked)
    add(
        "filtered ties", FILTERED, SamplerVariant(Filters.RANKED), 1, (random_logits(3, 700, torch.float32) / 2).round()
    )
    add("padding alone", [*PLAIN, RANKED[1]], SamplerVariant(Filters.RANKED), 2, random_logits(4, 16, torch.float32))
    return cases


CASES = make_cases()


def launch_all() -> None:
    """The launches of a single rank and of one of eight, for Qwen3's vocabulary."""

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, positions = empty(64, dtype=torch.int32), empty(64, dtype=torch.int64)
    tables = SamplingTables.empty(256, torch.device("meta"))
    counts = CountTables(
        output_counts=empty(256, 18992, dtype=torch.int32), in_prompt=empty(256, 18992, dtype=torch.bool)
    )
    maxima = empty(64, dtype=torch.float32)
    whole, part = empty(64, 151936, dtype=torch.bfloat16), empty(64, 18992, dtype=torch.bfloat16)
    best = best_triton.best_tokens_triton
    best(whole, rows, positions, tables, first_id=0)
    ids, lengths, blocks = (empty(*shape, dtype=torch.int32) for shape in ((256, 4097), (256,), (1, 256, 256)))
    row_tables = RowTables(token_ids=ids, num_computed=lengths, block_table=blocks, block_size=16)
    best(whole, rows, positions, tables, first_id=0, advanced=row_tables)
    best(part, rows, positions, tables, first_id=18992, counts=counts, maxima=maxima)
    for dtype in DTYPES:
        other = empty(64, 18992, dtype=dtype)
        best(other, rows, positions, tables, first_id=18992)
        filter_triton.top_keys_triton(other, rows, tables, first_id=18992, width=64)
        ranks: dict[str, Any] = {"first_id": 18992, "vocab_size": 151936}
        step, share = (other, rows, positions, tables), empty(64, 64, dtype=torch.int64)
        nucleus_ranks_triton.front_share_triton(share, *step, **ranks)
        front, _ = nucleus_ranks_triton.weigh_fronts_triton(empty(8, 64, 64, dtype=torch.int64), *step, **ranks)
        gathered, drawn = empty(8, 64, 65, dtype=torch.int64), empty(64, dtype=torch.int32)
        nucleus_ranks_triton.choose_of_fronts_triton(drawn, front, gathered, rows, tables, vocab_size=151936)
        shares = empty(8, 64, 64, dtype=torch.int64)
        ranked_ranks_triton.draw_of_shares_triton(drawn, shares, rows, positions, tables, vocab_size=151936)
    wide, keys = empty(64, 151936, dtype=torch.float32), empty(64, 2, dtype=torch.int32)
    for logits, own_positions, noise_keys in ((whole, positions, None), (wide, None, keys)):
        found = best(
            logits, rows, own_positions, tables, first_id=0, ranked_below=151936, finds_maxima=True,
            noise_keys=noise_keys,
        )  # fmt: skip
        draws = (logits, rows, own_positions, tables)
        nucleus_triton.draw_nucleus_triton(*draws, found, noise_keys=noise_keys)
        candidates_triton.draw_ranked_triton(*draws, found.token_ids, noise_keys=noise_keys)


def check_compiled(kernel: Any, capability: int) -> None:
    """No multiplication is fused with an addition except inside libdevice."""
    assert not kernel.metadata.enable_fp_fusion
