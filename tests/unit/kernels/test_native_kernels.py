"""The kernels in C against their PyTorch twins and float64 (rows B9, B10); skipped where they cannot be built."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.paged_batches import make_batch
from tests.tiers import slow_but
from tests.unit.kernels.kernel_cases_layer_ops import allowed_error, error_of
from tp_engine.attention.base import AttentionShape
from tp_engine.attention.native_backend import NativeBackend
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.cpu import ops as native_ops
from tp_engine.cpu import self_check
from tp_engine.cpu.library import native_library
from tp_engine.cpu.prototypes import prototypes
from tp_engine.kernels import layer_ops
from tp_engine.kernels.attention.heads import HeadNorm, Heads, Rotation, qk_norm_rope_store
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, LayerKv, store_kv
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import OPS, implementation
from tp_engine.model_config.mlp import SILU

pytestmark = pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SUMS = 4e-6  # float32's own share of an attention's error, with some hundred keys and values around 1
MIXED = [(1, 40), (1, 3), (1, 300), (1, 0), (5, 5), (7, 270), (40, 55), (2, 17), (60, 600), (100, 130)]


@pytest.fixture
def ops() -> SimpleNamespace:
    """The operations in C, by name."""
    return SimpleNamespace(**{name: implementation(name, "native") for name, entry in OPS.items() if entry.native})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [2, 8, 12, 32, 64, 80, 128, 256])
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads(ops: SimpleNamespace, dtype: torch.dtype, head_dim: int, has_norm: bool) -> None:
    """Oracle: the twin in float64; the error is at most twice that of PyTorch in the same precision."""
    num_heads, num_kv_heads = 6, 2
    heads = torch.randn(40, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    table, positions = torch.randn(50, head_dim).to(dtype), torch.randint(50, (40,))
    weights = torch.randn(2, head_dim).to(dtype)

    def turned(turn: Callable[..., Heads], kind: torch.dtype) -> torch.Tensor:
        q_weight, k_weight = weights.to(kind)
        repeated = torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)))
        head_norm = HeadNorm(q_weight=q_weight, k_weight=k_weight, weights=repeated, eps=1e-6) if has_norm else None
        rotation = Rotation(table.to(kind), positions)
        parts = turn(heads.to(kind, copy=True), num_kv_heads, head_norm, rotation, None, torch.arange(40))
        return torch.cat([part for part in parts if part is not None], 1)

    exact = turned(qk_norm_rope_store, torch.float64)
    plain = error_of(turned(qk_norm_rope_store, dtype), exact)
    assert error_of(turned(ops.qk_norm_rope_store, dtype), exact) <= allowed_error(plain, exact)


def test_what_the_kernels_do_not_take_is_their_twins(ops: SimpleNamespace) -> None:
    """Oracle: the twins: other types, and rows that are not contiguous."""
    wide, rule = torch.randn(5, 16).double(), NormRule(torch.randn(8).double(), 1e-5)
    assert torch.equal(ops.gate(wide, SILU), layer_ops.gate(wide, SILU))
    assert torch.equal(ops.norm(wide[:, :8], rule), layer_ops.norm(wide[:, :8], rule))
    strided = torch.randn(5, 16)[:, ::2]
    torch.testing.assert_close(ops.gate(strided, SILU), layer_ops.gate(strided, SILU))


def shape_of(
    num_heads: int, num_kv_heads: int, head_dim: int, window: int | None = None, *, has_rule: bool = False
) -> AttentionShape:
    """``has_rule``: with a softcap and sinks."""
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        sliding_window=window,
        softcap=1.5 if has_rule else None,
        sinks=torch.linspace(-3, 4, num_heads) if has_rule else None,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 12, 16, 64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 8, 20])
@pytest.mark.parametrize("window", [None, 37])
def test_attention(dtype: torch.dtype, head_dim: int, group: int, window: int | None) -> None:
    """Oracle: PyTorch in float32 on the same rounded inputs; the error is at most twice that of PyTorch in ``dtype``.

    Ranges of keys, tiles of rows, padding, and NaN in all memory outside the requests.
    """
    shape = shape_of(group * 2, 2, head_dim, window)
    batch = make_batch(MIXED, shape, dtype=dtype, padding_tokens=3, block_size=8)
    wide = make_batch(MIXED, shape, dtype=torch.float32, padding_tokens=3, block_size=8)
    wide.query, wide.kv_cache = batch.query.float(), batch.kv_cache.float()
    wide.key, wide.value = batch.key.float(), batch.value.float()
    exact = wide.attend(TorchBackend()).double()
    plain, found = batch.attend(TorchBackend()), batch.attend(NativeBackend())
    assert found.dtype == dtype and not found.isnan().any()
    assert error_of(found, exact) <= allowed_error(error_of(plain, exact), exact) + SUMS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [12, 80, 256])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("window", [None, 37])
def test_attention_with_a_softcap_and_sinks(dtype: torch.dtype, head_dim: int, group: int, window: int | None) -> None:
    """Oracle: the formula in float64 on the same rounded inputs; the error is at most twice PyTorch's in ``dtype``."""
    shape = shape_of(group * 2, 2, head_dim, window, has_rule=True)
    batch = make_batch(MIXED, shape, dtype=dtype, padding_tokens=3, block_size=8)
    wide = make_batch(MIXED, shape, dtype=torch.float64, padding_tokens=3, block_size=8)
    wide.query, wide.kv_cache = batch.query.double(), batch.kv_cache.double()
    wide.key, wide.value = batch.key.double(), batch.value.double()
    exact = wide.attend(TorchBackend())
    plain, found = batch.attend(TorchBackend()), batch.attend(NativeBackend())
    assert found.dtype == dtype and not found.isnan().any()
    assert error_of(found, exact) <= allowed_error(error_of(plain, exact), exact) + SUMS


@pytest.mark.parametrize("cache_dtype", LARGEST_VALUE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "group"), [(8, 1), (12, 8), (64, 20), (80, 3), (128, 2), (256, 1)])
@pytest.mark.parametrize(("window", "has_rule"), [(None, False), (37, True)])
def test_attention_to_codes(
    cache_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, group: int, window: int | None, has_rule: bool
) -> None:
    """Oracle: PyTorch in float32 on the same codes; a result has no other error than its own rounding.

    Blocks have no more tokens than a vector.  Memory outside the requests has scales that are NaN.
    """
    shape = shape_of(group * 2, 2, head_dim, window, has_rule=has_rule)
    batch, wide = (
        make_batch(MIXED, shape, dtype=kind, cache_dtype=cache_dtype, padding_tokens=3, block_size=8)
        for kind in (dtype, torch.float32)
    )
    wide.query, wide.key, wide.value = batch.query.float(), batch.key.float(), batch.value.float()
    wide.kv_cache, wide.kv_scales = batch.kv_cache, batch.kv_scales
    found, exact = batch.attend(NativeBackend()), wide.attend(TorchBackend())
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), exact, rtol=torch.finfo(dtype).eps, atol=4e-6)


def comparable(kv: LayerKv) -> list[torch.Tensor]:
    """What the cache has, as tensors of which equal ones are ``torch.equal``."""
    if kv.scales is not None:
        return [kv.cache.view(torch.uint8), kv.scales.nan_to_num(-7.0)]
    return [kv.cache.nan_to_num(-7.0)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", [*DTYPES, *LARGEST_VALUE], ids=str)
def test_keys_and_values_are_stored(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Oracle: the twin that stores by slot, bit by bit; without keys, no slot changes and the result is the same."""
    batch = make_batch(MIXED, shape_of(4, 2, 20), dtype=dtype, cache_dtype=cache_dtype, padding_tokens=3)
    batch.key[3] = batch.value[4] = 0
    backend = NativeBackend()
    found = batch.kv_for(backend)
    store_kv(batch.new, LayerKv(batch.kv_cache, batch.kv_scales), batch.metadata.slot_mapping)
    expected = comparable(batch.kv_for(backend))
    backend.prepare(batch.metadata)
    first = backend.forward(batch.query, batch.new, found, batch.metadata, batch.shape)
    assert all(map(torch.equal, comparable(found), expected))
    second = backend.forward(batch.query, None, found, batch.metadata, batch.shape)
    assert all(map(torch.equal, comparable(found), expected))
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("num_queries", "has_rule", "cache_dtype"),
    [
        (40, False, torch.bfloat16),
        (40, True, torch.bfloat16),
        (300, False, torch.bfloat16),
        (40, True, torch.int8),
        (300, False, torch.float8_e4m3fn),
    ],
)
def test_a_request_s_result_depends_on_nothing_else(num_queries: int, has_rule: bool, cache_dtype: torch.dtype) -> None:
    """Oracle: its own result: alone, in a batch, in chunks, with one thread or more, equal bit by bit.

    Of 300 queries, a thread computes all ranges of its rows.
    """
    shape = shape_of(6, 2, 64, has_rule=has_rule)
    batch = make_batch([(num_queries, 660 + num_queries)], shape, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    whole = batch.attend(NativeBackend())
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(batch.attend(NativeBackend()), whole)
    backend = NativeBackend()
    store_kv(batch.new, LayerKv(batch.kv_cache, batch.kv_scales), batch.metadata.slot_mapping)
    kv = batch.kv_for(backend)
    for position in (0, 17, num_queries - 1):
        one = make_batch([(1, 660 + position + 1)] * 9, shape, dtype=torch.bfloat16)
        one.metadata.block_table = batch.metadata.block_table.expand(9, -1)
        backend.prepare(one.metadata)
        query = batch.query[position].expand(9, -1, -1)
        out = backend.forward(query, None, kv, one.metadata, shape)
        assert torch.equal(out, whole[position].expand(9, -1, -1))


# Per case: the block size; each decode's length; the keys that requests of one letter share.
SHARING = {
    "one range, partly": (16, [90, 120, 101, 80], {"aaaa": 64}),
    "two prefixes, interleaved": (16, [300, 270, 400, 290, 310, 700], {"abab-b": 256}),
    "several ranges": (8, [650, 600, 900], {"aaa": 584}),
    "more rows than a task has": (16, [200] * 40, {"a" * 40: 160}),
    "one diverges early": (16, [500, 520, 540, 510], {"aaaa": 96, "aa-a": 448}),
    "too few keys": (16, [60, 70], {"aa": 48}),
    "blocks larger than a tile": (64, [200, 210, 130], {"aaa": 128}),
    "to the last full block": (16, [257, 257, 258], {"aaa": 256}),
}


@pytest.mark.parametrize("case", SHARING)
@pytest.mark.parametrize("group", slow_but([3], [1, 3, 20]))
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "has_rule"),
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.bfloat16, False),
        (torch.float32, torch.float32, True),
        (torch.float32, torch.int8, False),
    ],
)
def test_decodes_that_share_blocks(
    case: str, group: int, window: int | None, dtype: torch.dtype, cache_dtype: torch.dtype, has_rule: bool
) -> None:
    """Oracle: each request alone, bit by bit, with one thread and with more; prompts stand beside them."""
    block_size, lengths, sharing = SHARING[case]
    shape = shape_of(2 * group, 2, 32, window, has_rule=has_rule)
    requests = [(1, length) for length in lengths] + [(9, 300)]
    batch = make_batch(requests, shape, dtype=dtype, cache_dtype=cache_dtype, block_size=block_size)
    metadata, table = batch.metadata, batch.metadata.block_table
    for letters, num_keys in sharing.items():
        for row, letter in enumerate(letters):
            table[row, : num_keys // block_size] = table[letters.index(letter), : num_keys // block_size]
    if batch.kv_scales is None:
        batch.kv_cache = torch.where(batch.kv_cache.isnan(), 0.5, batch.kv_cache)
    else:
        batch.kv_scales = torch.where(batch.kv_scales.isnan(), 0.5, batch.kv_scales)
    for threads in (1, 4):
        torch.set_num_threads(threads)
        together = batch.attend(NativeBackend())
        for row, length in enumerate(lengths):
            one = make_batch([(1, length)], shape, dtype=dtype, block_size=block_size)
            one.metadata.block_table = table[row : row + 1]
            one.kv_cache, one.kv_scales = batch.kv_cache, batch.kv_scales
            one.metadata.slot_mapping = metadata.slot_mapping[row : row + 1]
            one.query, one.key, one.value = (part[row : row + 1] for part in (batch.query, batch.key, batch.value))
            assert torch.equal(one.attend(NativeBackend()), together[row : row + 1])


# What the self-check does not call, with the reason.
UNCHECKED = {
    "max_words": "a question",
    "prepare_row": "a part of quantised products",
    "run_quantised_task": "a part of quantised products",
    "run_tape": "a tape holds functions that are checked",
    "shared_all_gather": "it waits for other ranks",
    "shared_all_reduce": "it waits for other ranks",
}


def test_the_self_check_calls_every_function() -> None:
    """Oracle: the prototypes in the C sources: a function that only models call could be wrong where it is compiled."""
    called: set[str] = set()

    class Library:
        def __getattr__(self, name: str) -> Any:
            called.add(name)
            return getattr(native_library(), name)

    assert self_check.disagreement(cast(ctypes.CDLL, Library())) is None
    assert {one.name for one in prototypes()} - called == set(UNCHECKED)


def test_the_self_check_sees_wrong_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the unchanged kernels agree; the check names a kernel that has a wrong factor."""
    library = native_library()
    assert library is not None and self_check.disagreement(library) is None
    right = native_ops.norm
    monkeypatch.setattr(native_ops, "norm", lambda library, x, rule: right(library, x, rule) * 1.01)
    assert self_check.disagreement(library) == "norm in torch.float32 differs from PyTorch"
