"""The choice of keys of DeepSeek sparse attention in C; ``test_selection`` has the twin's own tests."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.unit.kernels.kernel_cases_layer_ops import assert_close_enough
from tp_engine.cpu.library import native_library
from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.attention.index_keys import ChosenKeys, KeyNorm
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, LayerKv, dequantise, quantise, states_at
from tp_engine.kernels.ops import implementation

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INT8, FP8 = LARGEST_VALUE
BLOCK_SIZE = 16


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("top_k", [1, 16, 300])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, INT8), (torch.float32, FP8)], ids=str
)
def test_the_chosen_keys_are_those_of_the_twin(
    dtype: torch.dtype, cache_dtype: torch.dtype, top_k: int, threads: int
) -> None:
    """Oracle: the twin.  Whole numbers, with scales that are powers of two, so many scores are equal, some negative, in
    any order of sums; a row of padding, rows with fewer keys, as many and more; a row alone and in a batch."""
    torch.set_num_threads(threads)
    seq_lens = torch.tensor([0, 1, 16, 17, 299, 300, 301, 1000], dtype=torch.int32)
    tables = torch.randperm(8 * 63).view(8, 63).int()
    scales = 2.0 ** torch.randint(-1, 2, (1, 8 * 63, 1, BLOCK_SIZE)) if cache_dtype in LARGEST_VALUE else None
    kv = LayerKv(torch.randint(-2, 3, (1, 8 * 63, BLOCK_SIZE, 1, 20)).to(cache_dtype), scales)
    queries, weights = torch.randint(-2, 3, (8, 11, 20)).to(dtype), torch.randint(-2, 3, (8, 11)).float()
    choose, twin = (implementation("choose_keys", kind) for kind in ("native", "twin"))

    def found(function: Any, rows: slice) -> ChosenKeys:
        given = function(queries[rows], weights[rows], 0.25, kv, tables[rows], seq_lens[rows], top_k)
        return ChosenKeys(*given)

    chosen, expected = found(choose, slice(8)), found(twin, slice(8))
    assert torch.equal(chosen.counts, expected.counts) and chosen.counts.tolist() == seq_lens.clamp(max=top_k).tolist()
    for row, count in enumerate(chosen.counts.tolist()):
        places = chosen.positions[row, :count]
        assert torch.equal(places, expected.positions[row, :count])
        assert torch.equal(places, found(choose, slice(row, row + 1)).positions[0, :count])


def test_threads_that_choose_at_once_do_not_meet() -> None:
    """Oracle: one thread alone.  Engines of one process have threads of their own; C runs without the GIL."""
    torch.set_num_threads(1)
    queries, weights = torch.randn(40, 4, 32), torch.randn(40, 4)
    kv, table = LayerKv(torch.randn(1, 128, BLOCK_SIZE, 1, 32)), torch.arange(128).int().expand(40, 128)
    parts = [(slice(0, 20), 2000 - torch.arange(20).int()), (slice(20, 40), 1000 + torch.arange(20).int())]

    def found(part: tuple[slice, torch.Tensor]) -> torch.Tensor:
        rows, seq_lens = part
        choose = implementation("choose_keys", "native")
        chosen: ChosenKeys = choose(queries[rows], weights[rows], 0.25, kv, table[rows], seq_lens, 64)
        return chosen.positions

    expected = [found(part) for part in parts]
    with ThreadPoolExecutor(2) as pool:
        for index, positions in enumerate(pool.map(found, parts * 20)):
            assert torch.equal(positions, expected[index % 2])


def test_scores_of_any_size_are_ordered() -> None:
    """Oracle: sorting; numbers of both signs and of all sizes, zeros of both signs."""
    values = torch.cat((torch.randn(500) * 10.0 ** torch.randint(-30, 30, (500,)), torch.tensor([0.0, -0.0] * 9)))
    values[[3, 77]] = 3e38
    kv = LayerKv(torch.cat((values, torch.zeros(10))).view(1, 33, BLOCK_SIZE, 1, 1).repeat(1, 1, 1, 1, 2).contiguous())
    kv.cache[..., 1] *= -1  # one head for the positive ones, one for the negative ones
    queries, weights = torch.eye(2).unsqueeze(0), torch.tensor([[1.0, -1.0]])
    table, length = torch.arange(33).int().view(1, 33), torch.tensor([518], dtype=torch.int32)
    for top_k in (1, 2, 100, 250, 517):
        chosen = implementation("choose_keys", "native")(queries, weights, 1.0, kv, table, length, top_k)
        best = sorted(range(518), key=lambda place: (-float(values[place]), place))[:top_k]
        assert chosen.positions[0].tolist() == sorted(best)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_queries_and_keys_are_prepared(dtype: torch.dtype, is_interleaved: bool) -> None:
    """Oracle: the twin in float64, and its error in the same type.  Keys go to their slots, padding nowhere; a
    quantised cache gets the codes and scales of the twin that quantises."""
    given = [torch.randn(*size).to(dtype) for size in ((5, 3, 20), (5, 20), (20,), (20,), (30, 8))]
    positions, slots = torch.randint(30, (5,)), torch.tensor([40, -1, 3, 17, 0])
    kv = LayerKv(torch.full((1, 4, BLOCK_SIZE, 1, 20), 7.0, dtype=dtype))

    def run(kind: Any, given: list[torch.Tensor], kv: LayerKv | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        queries, keys, weight, bias, table = (one.clone() for one in given)
        rotation = Rotation(table, positions)
        queries, keys = implementation("prepare_index", kind)(
            queries, keys, KeyNorm(weight, bias, 1e-6), rotation, is_interleaved, kv, slots
        )
        return queries, keys

    exact = run("twin", [one.double() for one in given], None)
    plain, found = (run(kind, given, None) for kind in ("twin", "native"))
    for one, other, wanted in zip(found, plain, exact, strict=True):
        assert one is not None and other is not None and wanted is not None
        assert_close_enough(one, other, wanted, granted=wanted.abs().max().item())
    queries, stored = run("native", given, kv)
    assert stored is None and torch.equal(queries, found[0]) and found[1] is not None
    kept = slots >= 0
    assert torch.equal(states_at(kv, 0, slots[kept]).squeeze(1), found[1][kept])
    assert int((kv.cache != 7.0).any(-1).sum()) == int(kept.sum())
    for codes in LARGEST_VALUE:
        kv = LayerKv(torch.zeros(1, 4, BLOCK_SIZE, 1, 20).to(codes), torch.zeros(1, 4, 1, BLOCK_SIZE))
        run("native", given, kv)
        expected = dequantise(*quantise(found[1][kept], codes))
        assert torch.equal(states_at(kv, 0, slots[kept]).squeeze(1), expected)
        assert int((states_at(kv, 0, torch.arange(64)) != 0).any(-1).sum()) == int(kept.sum())
