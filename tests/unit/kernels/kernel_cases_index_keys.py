"""DeepSeek sparse attention by Triton: index keys, the choice of keys, attention to the chosen ones.

Interpreted beside the PyTorch twins and on CUDA (``CASES``), and launches of real models (``launch_all``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from tests.paged_batches import among_layers
from tests.unit.kernels.kernel_cases_layer_ops import Case, assert_close_enough, both, random
from tp_engine.attention.selection import attend_chosen
from tp_engine.kernels.attention import index_keys_triton
from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.attention.index_keys import ChosenKeys, KeyNorm
from tp_engine.kernels.attention.paged_decode_triton import MAX_ARRIVALS
from tp_engine.kernels.attention.paged_mla_triton import latent_sizes, mla_decode_triton
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, SCALE_DTYPE, KeyValue, LayerKv, states_at, store_kv

INT8, FP8 = LARGEST_VALUE
BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
NOWHERE = 1 << 30  # a position that nothing may read


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One specialisation of the choice; ``lengths`` are around ``top_k``, and around the borders of blocks, tiles and
    chunks of 64 scores."""

    heads: int
    dim: int = 20
    top_k: int = 17
    block_size: int = 16
    dtype: torch.dtype = FLOAT32
    cache_dtype: torch.dtype | None = None
    lengths: tuple[int, ...] = (0, 1, 16, 17, 18, 64, 129)


CHOICES = (
    Choice(heads=8, block_size=4),
    Choice(heads=11, top_k=1, lengths=(1, 2, 65)),
    Choice(heads=64, dim=128, block_size=64, dtype=BFLOAT16, top_k=64, lengths=(0, 64, 65, 192)),
    Choice(heads=32, dim=16, block_size=256, dtype=FLOAT16, lengths=(18, 300)),
    Choice(heads=8, dtype=BFLOAT16, cache_dtype=INT8, lengths=(0, 17, 70)),
    Choice(heads=8, dtype=BFLOAT16, cache_dtype=FP8, lengths=(0, 17, 70)),
)


def index_cache(case: Choice, tables: torch.Tensor, device: str) -> LayerKv:
    """Keys of small whole numbers; of a quantised cache with scales that are powers of two; NaN after each row's end.
    Sums are exact in any order, so equal scores are equal."""
    generator = torch.Generator().manual_seed(1)
    shape = 1, tables.numel(), case.block_size, 1, case.dim
    keys = torch.randint(-2, 3, shape, generator=generator).float()
    scales = 2.0 ** torch.randint(-1, 2, (1, tables.numel(), 1, case.block_size), generator=generator)
    for row, length in enumerate(case.lengths):
        position = torch.arange(tables.shape[1] * case.block_size)[length:]
        place = tables[row, position // case.block_size].long(), position % case.block_size
        scales[0, place[0], 0, place[1]] = float("nan")
        if case.cache_dtype is None:
            keys[0, place[0], place[1]] = float("nan")
    if case.cache_dtype is None:
        return LayerKv(among_layers(keys.to(case.dtype).to(device)))
    return LayerKv(among_layers(keys.to(case.cache_dtype).to(device)), among_layers(scales.to(SCALE_DTYPE).to(device)))


def check_choice(device: str, case: Choice) -> None:
    """Oracle: the twin; many scores are equal, some are negative.  All rows at once, and two at a time."""
    choose, twin = both("choose_keys")
    generator, count = torch.Generator().manual_seed(0), len(case.lengths)
    num_blocks = -(-max(case.lengths) // case.block_size)
    tables = torch.randperm(count * num_blocks, generator=generator).view(count, num_blocks).int()
    kv = index_cache(case, tables, device)
    queries = torch.randint(-2, 3, (count, case.heads, case.dim), generator=generator).to(case.dtype).to(device)
    weights = torch.randint(-2, 3, (count, case.heads), generator=generator).float().to(device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    given = queries, weights, 0.25, kv, tables.to(device), lengths, case.top_k
    expected = twin(*given)
    for most in (1 << 25, 2 * num_blocks * case.block_size):
        if most < 1 << 25 and case.heads != 8:
            continue
        with patch.object(index_keys_triton, "_CHUNK", 64), patch.object(index_keys_triton, "_MAX_SCORES", most):
            found = choose(*given)
        assert found.counts.tolist() == [min(length, case.top_k) for length in case.lengths]
        for row, kept in enumerate(found.counts.tolist()):
            assert torch.equal(found.positions[row, :kept], expected.positions[row, :kept]), (row, most)


def check_order(device: str) -> None:
    """Oracle: sorting; scores of both signs and of all sizes, zeros of both signs."""
    values = torch.cat((random((90,), FLOAT32, "cpu") * 10.0 ** torch.arange(-30, 30, 60 / 90), torch.zeros(6)))
    values[[3, 77]], values[91:94] = 3e38, -0.0
    kv = LayerKv(torch.stack((values, -values), -1).view(1, 6, 16, 1, 2).to(device))
    # One head for the positive ones, one for the negative ones.
    queries, weights = torch.eye(2, device=device).unsqueeze(0), torch.tensor([[1.0, -1.0]], device=device)
    table, length = (
        torch.arange(6, device=device).int().view(1, 6),
        torch.tensor([96], dtype=torch.int32, device=device),
    )
    for top_k in (1, 48, 95):
        with patch.object(index_keys_triton, "_CHUNK", 32):
            found = both("choose_keys")[0](queries, weights, 1.0, kv, table, length, top_k)
        best = sorted(range(96), key=lambda place: (-float(values[place]), place))[:top_k]
        assert found.positions[0].tolist() == sorted(best)


def check_scores(device: str) -> None:
    """Oracle: scores in float64; what is chosen scores as well as the best, but for the rounding of a score."""
    queries, keys = random((2, 64, 128), BFLOAT16, device), random((1, 3, 64, 1, 128), BFLOAT16, device, 1)
    weights, lengths = random((2, 64), FLOAT32, device, 2), torch.tensor([150, 192], dtype=torch.int32, device=device)
    table = torch.tensor([[2, 0, 1], [1, 2, 0]], dtype=torch.int32, device=device)
    found = both("choose_keys")[0](queries, weights, 0.1, LayerKv(keys), table, lengths, 50)
    for row, length in enumerate(lengths.tolist()):
        own = keys[0, table[row].long()].flatten(0, 1)[:length, 0].double()
        scores = (torch.relu(queries[row].double() @ own.T) * weights[row].double().unsqueeze(1)).sum(0) * 0.1
        best, chosen = scores.topk(50).values, scores[found.positions[row].long()]
        assert len(found.positions[row].unique()) == 50 and bool((found.positions[row].diff() > 0).all())
        torch.testing.assert_close(chosen.sort(descending=True).values, best, rtol=0, atol=1e-4)


@dataclass(frozen=True, kw_only=True)
class Attended:
    """One specialisation of attention to ``counts`` chosen keys of each row."""

    heads: int
    rank: int = 24
    rope: int = 8
    block_size: int = 16
    dtype: torch.dtype = FLOAT32
    cache_dtype: torch.dtype | None = None
    splits: int = 4
    counts: tuple[int, ...] = (40, 0, 1, 33, 16)


ATTENDED = (
    Attended(heads=3, block_size=4),
    Attended(heads=20, splits=1),
    Attended(heads=40, dtype=BFLOAT16, cache_dtype=INT8),
    Attended(heads=16, rank=512, rope=64, dtype=BFLOAT16, block_size=64, counts=(70, 0)),
    Attended(heads=4, dtype=FLOAT16, cache_dtype=FP8),
)


def check_attention(device: str, case: Attended) -> None:
    """Oracle: the twin in float64, and its error in the same type.  Rows that are not chosen are NaN, and positions
    after a row's count are nowhere."""
    width, count, num_blocks = case.rank + case.rope, len(case.counts), -(-200 // case.block_size)
    generator = torch.Generator().manual_seed(2)
    tables = torch.randperm(count * num_blocks, generator=generator).view(count, num_blocks).int().to(device)
    positions = torch.full((count, max(case.counts) + 3), NOWHERE, dtype=torch.int32)
    for row, kept in enumerate(case.counts):
        positions[row, :kept] = torch.randperm(200, generator=generator)[:kept].sort().values
    positions = positions.to(device)
    chosen = ChosenKeys(positions, torch.tensor(case.counts, dtype=torch.int32, device=device))
    shape = 1, count * num_blocks, case.block_size, 1, width
    cache = torch.full(shape, float("nan"), dtype=case.dtype, device=device)
    kv, slots = LayerKv(cache), []
    if case.cache_dtype is not None:
        scales = torch.full((1, shape[1], 1, case.block_size), float("nan"), dtype=SCALE_DTYPE, device=device)
        kv = LayerKv(torch.zeros(shape, dtype=case.cache_dtype, device=device), scales)
    for row, kept in enumerate(case.counts):
        own = positions[row, :kept].long()
        slots.append(tables[row].long()[own // case.block_size] * case.block_size + own % case.block_size)
        states = random((kept, 1, width), case.dtype, device, 10 + row)
        store_kv(KeyValue(states, states), kv, slots[-1])
    query = random((count, case.heads, width), case.dtype, device, 3)
    sizes = replace(latent_sizes(1, case.heads, case.dtype.itemsize, 132), usual_splits=case.splits, num_splits=4)
    arrivals, out = (
        torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=device),
        query.new_full((count, case.heads, case.rank), 7.0),
    )
    mla_decode_triton(
        query, LayerKv(among_layers(kv.cache), None if kv.scales is None else among_layers(kv.scales)), tables,
        chosen.counts, out, scale=0.3, sizes=sizes, arrivals=arrivals, chosen=chosen,
    )  # fmt: skip
    assert not arrivals.any(), "a later launch would join too early"
    for row, kept in enumerate(case.counts):
        if not kept:
            assert not out[row].any()
            continue
        rows, places = states_at(kv, 0, slots[row]).squeeze(1), torch.arange(kept, device=device).view(1, kept)

        def attend(own: torch.Tensor, rows: torch.Tensor = rows, places: torch.Tensor = places) -> torch.Tensor:
            return attend_chosen(own, places, partial(rows.to(own.dtype).index_select, 0), rank=case.rank, scale=0.3)

        own = query[row : row + 1]
        assert_close_enough(
            out[row : row + 1], attend(own), attend(own.double()), 16 if case.dtype == FLOAT32 else 1e-2
        )


def check_prepared(
    device: str, sizes: tuple[int, ...], dtype: torch.dtype, is_interleaved: bool, cache_dtype: torch.dtype | None
) -> None:
    """Oracle: the twin in float64, and its error in the same type.  Keys at their slots, padding nowhere; and without a
    cache.  Both are slices of wider rows.  ``sizes``: heads, elements of one, and those that turn."""
    prepare, twin = both("prepare_index")
    heads, dim, rope = sizes
    shapes = (5, heads, dim), (5, dim), (dim,), (dim,), (30, rope)
    given = [random(shape, dtype, device, seed) for seed, shape in enumerate(shapes)]
    positions, slots = torch.tensor([0, 29, 7, 7, 3], device=device), torch.tensor([3, -1, 19, 0, 7], device=device)

    def run(operation: Any, wide: bool, kv: LayerKv | None) -> Any:
        queries, keys, weight, bias, table = (one.double() if wide else one.clone() for one in given)
        norm, rotation = KeyNorm(weight, bias, 1e-6), Rotation(table, positions)
        wider = torch.cat((queries.flatten(1), keys + 1, keys), 1)
        queries, keys = wider[:, : heads * dim].view(5, heads, dim), wider[:, heads * dim : -dim]
        return operation(queries, keys, norm, rotation, is_interleaved, kv, slots)

    exact, plain, found = run(twin, True, None), run(twin, False, None), run(prepare, False, None)
    for one, other, wanted in zip(found, plain, exact, strict=True):
        assert_close_enough(one, other, wanted, granted=wanted.abs().max().item())
    caches = []
    for rows in (found[1].unsqueeze(1), None):
        stored = torch.zeros(1, 5, 4, 1, dim, dtype=cache_dtype or dtype, device=device)
        scales = None if cache_dtype is None else among_layers(torch.zeros(1, 5, 1, 4, device=device))
        kv = LayerKv(among_layers(stored), scales)
        if rows is None:
            queries, nothing = run(prepare, False, kv)
            assert nothing is None and torch.equal(queries, found[0])
        else:
            store_kv(KeyValue(rows, rows), kv, slots)
        caches.append(kv)
    for name in ("cache", "scales"):
        one, other = (getattr(kv, name) for kv in caches)
        if one is not None:
            # A value between two steps of 8 bits may round to either.
            relative, absolute = {INT8: (0.0, 1.0), FP8: (0.13, 0.01)}.get(one.dtype, (0.0, 0.0))
            torch.testing.assert_close(other.float(), one.float(), rtol=relative, atol=absolute)
            assert (one.float() != other.float()).float().mean().item() <= (0.01 if absolute else 0)


PREPARED = (
    ((11, 20, 8), FLOAT32, False, None),
    ((3, 22, 22), FLOAT32, True, FP8),
    ((40, 128, 64), BFLOAT16, False, None),
    ((8, 128, 64), BFLOAT16, True, INT8),
    ((8, 24, 6), FLOAT16, True, None),
)
CASES: dict[str, Case] = {
    **{f"choose-{case}": partial(check_choice, case=case) for case in CHOICES},
    "order": check_order,
    "scores": check_scores,
    **{f"attend-{case}": partial(check_attention, case=case) for case in ATTENDED},
    **{
        f"prepare-{sizes}-{dtype}-{is_interleaved}-{cache_dtype}": partial(
            check_prepared, sizes=sizes, dtype=dtype, is_interleaved=is_interleaved, cache_dtype=cache_dtype
        )
        for sizes, dtype, is_interleaved, cache_dtype in PREPARED
    },
}
# Index heads, heads of this rank, whether neighbours turn, and the types: V3.2 on one rank, GLM-5 on 8, and the tests'.
MODELS = (
    (64, 128, False, BFLOAT16, None),
    (32, 8, True, BFLOAT16, INT8),
    (32, 64, True, FLOAT16, FP8),
    (64, 16, False, FLOAT32, None),
)
MODELS_OF = {80: (0, 1), 90: range(len(MODELS)), 100: (0, 2), 120: (0, 1, 2)}  # 8-bit floats need 8.9


def launch_model(number: int, num_rows: int, width: int = 100) -> None:
    """One layer's launches of ``num_rows`` decodes, or tokens of a prompt, of ``MODELS[number]``; block tables of
    ``width`` columns."""
    index_heads, heads, is_interleaved, dtype, cache_dtype = MODELS[number]

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def cache_of(dim: int) -> LayerKv:
        cache = empty(100, 3, 1, 16, 1, dim, dtype=cache_dtype or dtype)[:, 1].transpose(0, 1)
        scales = None if cache_dtype is None else empty(100, 3, 1, 1, 16, dtype=SCALE_DTYPE)[:, 1].transpose(0, 1)
        return LayerKv(cache, scales)

    prepare, choose = (both(name)[0] for name in ("prepare_index", "choose_keys"))
    rotation = Rotation(empty(4096, 64), empty(num_rows, dtype=torch.int64))
    norm, slots = KeyNorm(empty(128), empty(128), 1e-6), empty(num_rows, dtype=torch.int64)
    queries, keys, kv = empty(num_rows, index_heads, 128), empty(num_rows, 128), cache_of(128)
    prepare(queries, keys, norm, rotation, is_interleaved, kv, slots)
    table, seq_lens = empty(num_rows, width, dtype=torch.int32), empty(num_rows, dtype=torch.int32)
    weights = empty(num_rows, index_heads, dtype=FLOAT32)
    chosen = choose(queries, weights, 0.01, kv, table, seq_lens, 2048)
    mla_decode_triton(
        empty(num_rows, heads, 576), cache_of(576), table, chosen.counts, empty(num_rows, heads, 512), scale=0.1,
        sizes=latent_sizes(num_rows, heads, dtype.itemsize, 132), arrivals=empty(MAX_ARRIVALS, dtype=torch.int32),
        chosen=chosen,
    )  # fmt: skip


def launch_all(capability: int) -> None:
    """A step of two decodes of each model."""
    for number in MODELS_OF[capability]:
        launch_model(number, 2)
