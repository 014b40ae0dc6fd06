"""Preparing queries and keys by Triton against the PyTorch twins: interpreted and on CUDA (``CASES``), and the
launches of real models (``launch_all``).

The rule is that of ``kernel_cases_layer_ops``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from tests.paged_batches import among_layers
from tests.unit.kernels.kernel_cases_layer_ops import DTYPES, EPS, Case, assert_close_enough, both, random
from tp_engine.kernels.attention.heads import HeadNorm, Rotation
from tp_engine.kernels.kv_cache.layer_kv import LARGEST_VALUE, KeyValue, LayerKv, dequantise, is_quantised, store_kv
from tp_engine.kernels.ops import implementation

MAX_LEN = 100
POSITIONS = (0, 1, 7, 50, 98, 99)
SLOTS = (3, -1, 0, 19, 7, -1)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """One specialisation.  ``rotary_dim`` None rotates the whole head; without ``turns`` there is no rotation."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    normalises: bool = False
    offset: float = 0.0
    turns: bool = True
    rotary_dim: int | None = None
    scales_query: bool = False
    includes_values: bool = False
    cache_dtype: torch.dtype | None = None

    def norm(self, device: str) -> HeadNorm | None:
        """Random weights."""
        if not self.normalises:
            return None
        q_weight, k_weight = random((2, self.head_dim), self.dtype, device, 3)
        weights = [q_weight.expand(self.num_heads, -1), k_weight.expand(self.num_kv_heads, -1)]
        if self.includes_values:
            weights.append(torch.full_like(weights[1], 1.0 - self.offset))
        return HeadNorm(
            q_weight=q_weight,
            k_weight=k_weight,
            weights=torch.cat(weights),
            eps=EPS,
            offset=self.offset,
            includes_values=self.includes_values,
        )

    def rotation(self, device: str) -> Rotation | None:
        """A rotation at ``POSITIONS``."""
        if not self.turns:
            return None
        rotary_dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        scale = torch.linspace(1, 2, MAX_LEN, device=device) if self.scales_query else None
        return make_rotation(rotary_dim, torch.tensor(POSITIONS, device=device), self.dtype, scale)

    def cache(self, dtype: torch.dtype, device: str) -> LayerKv:
        """Five blocks of four tokens, with scales if quantised."""
        cache = among_layers(torch.zeros(2, 5, 4, self.num_kv_heads, self.head_dim, device=device).to(dtype))
        scales = among_layers(torch.zeros(2, 5, self.num_kv_heads, 4, device=device))
        return LayerKv(cache, scales if is_quantised(dtype) else None)


def make_rotation(
    rotary_dim: int, positions: torch.Tensor, dtype: torch.dtype, query_scale: torch.Tensor | None = None
) -> Rotation:
    """Plain rotary angles of ``positions``, as the model's table holds them."""
    frequencies = 1e4 ** -(torch.arange(0, rotary_dim, 2) / max(rotary_dim, 1))
    angles = torch.outer(torch.arange(MAX_LEN), frequencies)
    table = torch.cat((angles.cos(), angles.sin()), -1).to(dtype).to(positions.device)
    return Rotation(table, positions, query_scale)


def prepare_exactly(
    merged: torch.Tensor, num_kv_heads: int, norm: HeadNorm | None, rotation: Rotation | None
) -> torch.Tensor:
    """Queries and keys in float64."""
    wide = merged[:, :-num_kv_heads].double()
    if norm is not None:
        weights = norm.weights[: wide.shape[1]].double() + norm.offset
        wide = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * weights
    if rotation is None:
        return wide
    cos, sin = rotation.table[rotation.positions].double()[:, None].chunk(2, -1)
    rotary_dim = rotation.table.shape[1]
    a, b = wide[..., :rotary_dim].chunk(2, -1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin, wide[..., rotary_dim:]), -1)
    if rotation.query_scale is not None:
        turned[:, :-num_kv_heads] *= rotation.query_scale[rotation.positions].double()[:, None, None]
    return turned


def check_heads(device: str, case: Heads) -> None:
    """Merged rows: stored, with padding among the slots, or without a cache."""
    num_heads, num_kv_heads = case.num_heads, case.num_kv_heads
    merged = random((6, num_heads + 2 * num_kv_heads, case.head_dim), case.dtype, device)
    norm, rotation, slots = case.norm(device), case.rotation(device), torch.tensor(SLOTS, device=device)
    exact = prepare_exactly(merged, num_kv_heads, norm, rotation)
    qk_norm_rope_store, prepare_plainly = both("qk_norm_rope_store")
    twin = prepare_plainly(merged.clone(), num_kv_heads, norm, rotation, None, slots)
    kv = None if case.cache_dtype is None else case.cache(case.cache_dtype, device)
    exact_value = merged[:, -num_kv_heads:].double()
    if case.includes_values:
        exact_value = exact_value * (exact_value.square().mean(-1, keepdim=True) + EPS).rsqrt()
    query, key, value = qk_norm_rope_store(merged.clone(), num_kv_heads, norm, rotation, kv, slots)
    assert_close_enough(query, twin[0], exact[:, :num_heads])
    if kv is None:
        assert_close_enough(key, twin[1], exact[:, num_heads:])
        assert case.includes_values or torch.equal(value, merged[:, -num_kv_heads:])
        assert_close_enough(value, twin[2], exact_value)
        return
    assert key is None and value is None
    expected, exact_kv = case.cache(kv.cache.dtype, device), case.cache(torch.float64, device)
    store_kv(KeyValue(twin[1], twin[2]), expected, slots)
    store_kv(KeyValue(exact[:, num_heads:], exact_value), exact_kv, slots)
    for part in (0, 1):
        found, exact_part = read_part(kv, part), exact_kv.cache[part]
        assert not found[exact_part == 0].any(), "something was stored where no slot points"
        assert_close_enough(found, read_part(expected, part), exact_part)


def read_part(kv: LayerKv, part: int) -> torch.Tensor:
    """Keys or values as attention reads them."""
    return kv.cache[part] if kv.scales is None else dequantise(kv.cache[part], kv.scales[part].transpose(1, 2))


def check_width(device: str, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    """Rows that are slices of wider rows, as on several ranks: the squares of all ranks sum to three times this rank's.

    The order of summation matters, so the error may be four units of the largest value.
    """
    num_all = num_heads + 2 * num_kv_heads
    wide = random((5, num_all + 1, head_dim), dtype, device)
    heads, weights = wide[:, :num_all], random((num_heads + num_kv_heads, head_dim), dtype, device, 1)
    sizes = [num_heads, num_kv_heads]
    parts = torch.split(heads[:, : sum(sizes)].double(), sizes, 1)
    squares = torch.stack([part.square().sum((1, 2)) for part in parts], 1)
    find_squares, plain_squares = both("head_squares")
    found = find_squares(heads, *sizes)
    assert_close_enough(found, plain_squares(heads, *sizes), squares, 4 * squares.max().item())
    of_all, widths = (3 * squares).float(), (3 * num_heads * head_dim, 3 * num_kv_heads * head_dim)
    factors = (of_all.double() / torch.tensor(widths, device=device) + EPS).rsqrt()[..., None, None]
    exact = torch.cat([parts[part] * factors[:, part] for part in (0, 1)], 1) * weights.double()
    results = []
    for run in both("norm_width"):
        kept = wide.clone()
        run(kept[:, :num_all], *sizes, of_all, weights, widths, EPS)
        assert torch.equal(kept[:, sum(sizes) :], wide[:, sum(sizes) :]), "values are no part of the norm"
        results.append(kept[:, : sum(sizes)])
    assert_close_enough(results[0], results[1], exact)


def heads_of(dtype: torch.dtype) -> list[Heads]:
    """Cases of one type: sizes that are not powers of two, whole, partial and no rotation, and every kind of cache."""
    shapes: list[tuple[tuple[int, int, int], dict[str, Any]]] = [
        ((4, 2, 32), {"normalises": True, "cache_dtype": dtype}),
        ((4, 2, 32), {}),
        ((1, 1, 128), {"cache_dtype": dtype}),
        ((3, 3, 80), {"normalises": True}),
        ((20, 5, 24), {"normalises": True, "cache_dtype": dtype}),
        ((2, 1, 256), {"normalises": True, "cache_dtype": dtype, "offset": 1.0}),
        ((2, 2, 96), {"cache_dtype": torch.int8}),
        ((4, 2, 64), {"normalises": True, "cache_dtype": torch.int8}),
        ((3, 3, 80), {"cache_dtype": torch.float8_e4m3fn}),
        ((4, 2, 32), {"normalises": True, "cache_dtype": dtype, "rotary_dim": 24}),
        ((3, 3, 80), {"rotary_dim": 32}),
        ((2, 1, 256), {"normalises": True, "cache_dtype": dtype, "rotary_dim": 64, "offset": 1.0}),
        ((20, 5, 24), {"normalises": True, "cache_dtype": torch.int8, "rotary_dim": 8, "scales_query": True}),
        ((2, 2, 96), {"cache_dtype": torch.float8_e4m3fn, "rotary_dim": 94, "scales_query": True}),
        ((4, 2, 32), {"cache_dtype": dtype, "scales_query": True}),
        ((4, 2, 48), {"normalises": True, "rotary_dim": 0, "scales_query": True}),
        ((4, 2, 48), {"normalises": True, "cache_dtype": torch.int8, "turns": False}),
        ((5, 1, 80), {"turns": False}),
        ((8, 1, 512), {"normalises": True, "cache_dtype": dtype, "rotary_dim": 128, "includes_values": True}),
        ((3, 3, 80), {"normalises": True, "includes_values": True, "offset": 1.0}),
        ((4, 2, 48), {"normalises": True, "cache_dtype": torch.int8, "includes_values": True}),
    ]
    return [Heads(num_heads=h, num_kv_heads=kv, head_dim=size, dtype=dtype, **rest) for (h, kv, size), rest in shapes]


def _name(case: Heads) -> str:
    """Its sizes, and the other fields that differ from the defaults."""
    named = {field.name: getattr(case, field.name) for field in fields(case)}
    plain = {field.name: field.default for field in fields(case)}
    return "-".join(["heads", *(f"{name}-{value}" for name, value in named.items() if value != plain[name])])


CASES: dict[str, Case] = {
    **{_name(case): partial(check_heads, case=case) for dtype in DTYPES for case in heads_of(dtype)},
    **{
        f"width-{sizes}-{dtype}": partial(
            check_width, num_heads=sizes[0], num_kv_heads=sizes[1], head_dim=sizes[2], dtype=dtype
        )
        for dtype in DTYPES
        for sizes in ((4, 2, 32), (3, 1, 80), (40, 5, 128), (1, 1, 24))
    },
}


def launch_all(capability: int) -> None:
    """The launches of Qwen3-0.6B and 32B, Gemma 3 and 4, GLM 4.5, Llama 4 and OLMo 2, and of a model with odd sizes in
    every type; 8-bit floats need sm_89."""
    quantised = [dtype for dtype in LARGEST_VALUE if dtype == torch.int8 or capability >= 89]
    bfloat16 = torch.bfloat16
    launch_model(bfloat16, (16, 8, 128), 128, quantised)
    launch_model(bfloat16, (64, 8, 128), 128)
    launch_model(bfloat16, (8, 4, 256), 256, offset=1.0)
    launch_model(bfloat16, (12, 1, 128), 64, quantised)
    launch_model(bfloat16, (40, 8, 128), 0, scales_query=True)
    launch_model(bfloat16, (32, 8, 128), None)
    launch_model(bfloat16, (16, 8, 256), 256, includes_values=True)
    launch_model(bfloat16, (16, 2, 512), 128, quantised, includes_values=True)
    for dtype in DTYPES:
        launch_model(dtype, (9, 3, 80), 80)
        launch_model(dtype, (9, 3, 80), 32, scales_query=True)
        launch_width(dtype, (9, 3, 80))
    launch_width(bfloat16, (40, 40, 128))


def launch_model(
    dtype: torch.dtype,
    sizes: tuple[int, int, int],
    rotary_dim: int | None,
    quantised: list[torch.dtype] | None = None,
    *,
    offset: float = 0.0,
    scales_query: bool = False,
    includes_values: bool = False,
) -> None:
    """One layer, with a cache of its own type, with quantised caches and with none; no rotation if ``rotary_dim`` is
    None."""
    num_heads, num_kv_heads, head_dim = sizes

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    merged, slots, rotation = empty(7, num_heads + 2 * num_kv_heads, head_dim), empty(7, dtype=torch.int64), None
    if rotary_dim is not None:
        scale = empty(4096, dtype=torch.float32) if scales_query else None
        rotation = Rotation(empty(4096, rotary_dim), empty(7, dtype=torch.int64), scale)
    weights = empty(num_heads + (2 if includes_values else 1) * num_kv_heads, head_dim)
    norm = HeadNorm(
        q_weight=weights[0],
        k_weight=weights[num_heads],
        weights=weights,
        eps=EPS,
        offset=offset,
        includes_values=includes_values,
    )
    scales = empty(2, 64, num_kv_heads, 16, dtype=torch.float32)
    qk_norm_rope_store = implementation("qk_norm_rope_store", "triton")
    for cache_dtype in (dtype, *(quantised or ())):
        cache = empty(2, 64, 16, num_kv_heads, head_dim, dtype=cache_dtype)
        kv = LayerKv(cache, scales if is_quantised(cache_dtype) else None)
        for own_norm in (norm, None):
            qk_norm_rope_store(merged, num_kv_heads, own_norm, rotation, kv, slots)
    qk_norm_rope_store(merged, num_kv_heads, norm, rotation, None, slots)


def launch_width(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    """The norm over all heads of eight ranks."""
    num_heads, num_kv_heads, head_dim = sizes
    merged = torch.empty(7, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, device="meta")
    squares = implementation("head_squares", "triton")(merged, num_heads, num_kv_heads)
    weights, widths = merged[0, : num_heads + num_kv_heads], (8 * num_heads * head_dim, 8 * num_kv_heads * head_dim)
    implementation("norm_width", "triton")(merged, num_heads, num_kv_heads, squares, weights, widths, EPS)


def check_compiled(kernel: Any, capability: int) -> None:
    """Dependent launch where the GPU has it."""
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
