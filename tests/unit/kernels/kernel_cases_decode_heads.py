"""Decode attention that prepares heads itself: interpreted against its PyTorch twins (``main``), and the launches of
real models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from tests.paged_batches import PagedBatch, make_batch
from tests.unit.kernels.kernel_cases_paged_attention import rule_of
from tests.unit.kernels.kernel_harness import AGREEMENT
from tp_engine.attention.base import AttentionShape
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.kernels.attention.decode_heads_triton import can_prepare
from tp_engine.kernels.attention.heads import HeadNorm, Rotation, UnpreparedHeads, prepare_heads
from tp_engine.kernels.attention.paged_decode_triton import MAX_ARRIVALS, decode_sizes, paged_decode_triton
from tp_engine.kernels.attention.plain_attention import paged_attention
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv, store_kv

# The new token is the only one, the last and the first of a block of 16, of a tile of 64, and of a later part; padding.
LENGTHS = (1, 16, 17, 0, 64, 65, 300, 257)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One small specialisation; ``splits`` and ``long_keys`` as in ``kernel_cases_paged_attention``."""

    head_dim: int = 64
    group: int = 4
    num_kv_heads: int = 2
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    splits: int = 4
    long_keys: int = 512
    norm_offset: float | None = 0.0
    turns: bool = True
    rule: tuple[tuple[str, Any], ...] = ()


CASES_IN_FULL = (
    Case(),
    Case(splits=1),
    Case(splits=1, long_keys=64, group=1),
    Case(norm_offset=None, group=7, num_kv_heads=1),
    Case(turns=False, group=3),
    Case(norm_offset=None, turns=False, splits=1),
    Case(norm_offset=1.0, head_dim=128, group=20, num_kv_heads=1, block_size=256),
    Case(rule=(("sliding_window", 1),)),
    Case(rule=(("sliding_window", 33), ("softcap", 2.0)), splits=1),
    Case(cache_dtype=torch.float16),
)
IN_HALF = (
    Case(dtype=torch.bfloat16, head_dim=128, group=2),
    Case(dtype=torch.bfloat16, head_dim=128, splits=1, norm_offset=None),
    Case(dtype=torch.bfloat16, head_dim=256, group=2, norm_offset=1.0, rule=(("sliding_window", 50),)),
    Case(dtype=torch.float16, head_dim=64, group=8, block_size=32),
)


def step_of(case: Case, device: str) -> tuple[PagedBatch, UnpreparedHeads]:
    """A step of decodes whose new keys and values are not in the cache."""
    num_heads = case.group * case.num_kv_heads
    sizes: dict[str, Any] = {"num_heads": num_heads, "num_kv_heads": case.num_kv_heads, "head_dim": case.head_dim}
    shape = AttentionShape(**sizes, scale=case.head_dim**-0.5, **dict(case.rule))
    types: dict[str, Any] = {"dtype": case.dtype, "cache_dtype": case.cache_dtype, "device": device}
    batch = make_batch([(1, length) for length in LENGTHS], shape, block_size=case.block_size, **types)
    generator = torch.Generator().manual_seed(1)
    gains = (1.0 + torch.randn(2, case.head_dim, generator=generator) / 4).to(device, case.dtype)
    norm = None
    if case.norm_offset is not None:
        weights = torch.cat((gains[:1].expand(num_heads, -1), gains[1:].expand(case.num_kv_heads, -1)))
        offset = case.norm_offset
        norm = HeadNorm(q_weight=gains[0], k_weight=gains[1], weights=weights.contiguous(), eps=1e-6, offset=offset)
    angles = torch.rand(max(LENGTHS), case.head_dim // 2, generator=generator) * 6
    table = torch.cat((angles.cos(), angles.sin()), 1).to(device, case.dtype)
    positions = (batch.metadata.seq_lens.to(torch.int64) - 1).clamp_min(0)
    new = UnpreparedHeads(
        heads=torch.cat((batch.query, batch.key, batch.value), 1),
        norm=norm,
        rotation=Rotation(table, positions) if case.turns else None,
        slot_mapping=batch.metadata.slot_mapping,
    )
    return batch, new


def prepared_apart(
    batch: PagedBatch, new: UnpreparedHeads, *, exact: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twins, one after the other, if ``exact`` all in float32: the output, and the cache behind them."""
    shape, metadata, dtype = batch.shape, batch.metadata, torch.float32 if exact else new.heads.dtype
    norm, rotation = new.norm, new.rotation
    if norm is not None:
        weights = norm.weights.to(dtype)
        norm = replace(norm, q_weight=weights[0], k_weight=weights[-1], weights=weights)
    if rotation is not None:
        rotation = Rotation(rotation.table.to(dtype), rotation.positions)
    cache = batch.kv_cache.to(dtype if exact else batch.kv_cache.dtype, copy=True)
    heads = new.heads.to(dtype, copy=True)
    query, key, value = prepare_heads(heads, shape.num_kv_heads, norm, rotation, None, metadata.slot_mapping)
    assert key is not None and value is not None
    store_kv(KeyValue(key, value), LayerKv(cache), metadata.slot_mapping)
    tables = metadata.block_table, metadata.seq_lens, metadata.query_start
    return paged_attention(query, LayerKv(cache), *tables, **rule_of(shape, query.device)), cache


def prepared_inside(batch: PagedBatch, new: UnpreparedHeads, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel, which leaves the heads as they are: the output, and the cache behind it."""
    shape, cache, before = batch.shape, batch.cache_for(TritonBackend()), new.heads.clone()
    sizes = decode_sizes(1, shape.num_kv_heads, shape.head_dim, case.dtype.itemsize, 132)
    most = 4 if case.long_keys < 512 else case.splits
    query = new.heads[:, : shape.num_heads]
    out = torch.full(query.shape, float("nan"), dtype=query.dtype, device=query.device)
    arrivals = torch.zeros(MAX_ARRIVALS, dtype=torch.int32, device=query.device)
    assert can_prepare(shape.head_dim, new.norm, new.rotation, LayerKv(cache))
    paged_decode_triton(
        query,
        LayerKv(cache),
        batch.metadata.block_table,
        batch.metadata.seq_lens,
        out,
        sizes=replace(sizes, usual_splits=case.splits, num_splits=most, long_keys=case.long_keys),
        arrivals=arrivals,
        unprepared=new,
        **rule_of(shape, query.device),
    )
    assert torch.equal(new.heads, before) and not arrivals.any()
    return out, cache


def run(case: Case, device: str = "cpu") -> None:
    """The output's and the new states' errors are at most twice those of the twins; no other slot changes."""
    batch, new = step_of(case, device)
    found, exact = prepared_inside(batch, new, case), prepared_apart(batch, new, exact=True)
    plain = prepared_apart(batch, new)
    for own, best, twin in zip(found, exact, plain, strict=True):
        assert torch.equal(own.isnan(), best.isnan()), case
        error, granted = (float((one.float() - best).nan_to_num().abs().max()) for one in (own, twin))
        assert error <= max(2 * granted, 4e-6), f"{case}: error {error}, in plain PyTorch {granted}"
    slots = new.slot_mapping[new.slot_mapping >= 0]
    is_old = torch.ones(batch.kv_cache.shape[1:3].numel(), dtype=torch.bool, device=device)
    is_old[slots] = False
    own, before = (cache.flatten(1, 2)[:, is_old] for cache in (found[1], batch.kv_cache))
    torch.testing.assert_close(own, before, rtol=0, atol=0, equal_nan=True)


def check_rule() -> None:
    """What is left to the kernel before attention.  Oracle: by hand."""
    weights, table = torch.ones(3, 64), torch.ones(9, 64)
    cache, scales = torch.zeros(2, 4, 16, 1, 64), torch.zeros(2, 4, 1, 16)
    norm = HeadNorm(q_weight=weights[0], k_weight=weights[0], weights=weights, eps=1e-6)
    positions, scale = torch.zeros(1, dtype=torch.int64), torch.ones(9)
    plain = LayerKv(cache)
    assert can_prepare(64, norm, Rotation(table, positions), plain)
    assert can_prepare(64, None, None, plain)
    assert not can_prepare(64, norm, Rotation(table[:, :32], positions), plain)
    assert not can_prepare(64, norm, Rotation(table, positions, scale), plain)
    assert not can_prepare(96, norm, None, plain)
    assert not can_prepare(64, replace(norm, includes_values=True), None, plain)
    assert not can_prepare(64, norm, None, LayerKv(cache.to(torch.int8), scales))


def check_backend() -> None:
    """Only steps of decodes alone are taken, and only if the backend is asked to.  Oracle: prepared heads."""
    case = Case(dtype=torch.float32)
    batch, new = step_of(case, "cpu")
    cache = LayerKv(batch.cache_for(TritonBackend()))
    for backend in (TritonBackend(), TritonBackend(prepares_heads=True)):
        backend.prepare(batch.metadata)
        out = backend.attend_unprepared(new, cache, batch.metadata, batch.shape)
        assert (out is None) == (not backend.prepares_heads)
    assert out is not None
    torch.testing.assert_close(out, prepared_apart(batch, new)[0], rtol=1e-5, atol=1e-5)
    mixed = make_batch([(1, 40), (5, 5)], batch.shape)
    backend.prepare(mixed.metadata)
    more = replace(new, heads=torch.cat((mixed.query, mixed.key, mixed.value), 1))
    assert backend.attend_unprepared(more, LayerKv(mixed.kv_cache), mixed.metadata, mixed.shape) is None


# For tests/gpu.
CASES: dict[str, Callable[[str], None]] = {
    f"decode with heads {number}": partial(run, case) for number, case in enumerate((*CASES_IN_FULL, *IN_HALF))
}


def main() -> None:
    for case in (*CASES_IN_FULL, *IN_HALF):
        run(case)
    check_rule()
    check_backend()
    print(AGREEMENT)


# (heads, KV heads, head_dim, type, offset of the gains, the layer's rule)
LAUNCHES: tuple[tuple[int, int, int, torch.dtype, float | None, dict[str, Any]], ...] = (
    (16, 8, 128, torch.bfloat16, 0.0, {}),  # Qwen3-0.6B
    (32, 8, 128, torch.float16, None, {"window": 4096}),  # Mistral
    (8, 4, 256, torch.bfloat16, 1.0, {"window": 1024}),  # Gemma 3
    (16, 2, 64, torch.bfloat16, None, {"sinks": torch.empty(16, dtype=torch.float32, device="meta")}),
    (8, 8, 64, torch.float32, 0.0, {}),  # the tests' precision
    (16, 2, 512, torch.bfloat16, 0.0, {}),
)


# Everything on sm_90; the others cover each type, size and feature that differs.
LAUNCHES_OF = {80: (0, 2), 90: range(len(LAUNCHES)), 100: (1, 3)}


def launch_all(capability: int) -> None:
    """Decodes with and without splits."""

    def empty(*sizes: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device="meta")

    for num_heads, num_kv_heads, head_dim, dtype, offset, rule in (
        LAUNCHES[number] for number in LAUNCHES_OF[capability]
    ):
        weights = empty(num_heads + num_kv_heads, head_dim, dtype=dtype)
        norm = HeadNorm(q_weight=weights[0], k_weight=weights[-1], weights=weights, eps=1e-6, offset=offset or 0.0)
        new = UnpreparedHeads(
            heads=empty(64, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype),
            norm=None if offset is None else norm,
            rotation=Rotation(empty(4096, head_dim, dtype=dtype), empty(64, dtype=torch.int64)),
            slot_mapping=empty(64, dtype=torch.int64),
        )
        for num_requests in (64, 100_000):
            paged_decode_triton(
                new.heads[:, :num_heads],
                LayerKv(empty(2, 100, 16, num_kv_heads, head_dim, dtype=dtype)),
                empty(64, 100, dtype=torch.int32),
                empty(64, dtype=torch.int32),
                empty(64, num_heads, head_dim, dtype=dtype),
                scale=head_dim**-0.5,
                sizes=decode_sizes(num_requests, num_kv_heads, head_dim, dtype.itemsize, 132),
                arrivals=empty(MAX_ARRIVALS, dtype=torch.int32),
                unprepared=new,
                **rule,
            )


if __name__ == "__main__":
    main()
