"""The layers' small operations by Triton against their PyTorch twins: interpreted (``main``), on CUDA (``CASES``), and
the launches of real models (``launch_all``).

The rule: against float32 (for float32: float64), the error is at most twice that of the twin in the same precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch

from tests.unit.kernel_harness import AGREEMENT
from tp_engine.kernels.kv_quant import LARGEST_VALUE, dequantise, is_quantised
from tp_engine.kernels.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.norm import NormRule
from tp_engine.kernels.ops import OPS, implementation
from tp_engine.kernels.rope import HeadNorm, Rotation
from tp_engine.kernels.store_kv import store_kv
from tp_engine.model_config.activation import SILU

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6
MAX_LEN = 100
KERNELS = SimpleNamespace(
    **{name: implementation(name, "triton") for name, entry in OPS.items() if entry.triton is not None}
)
TWINS = SimpleNamespace(**{name: entry.twin for name, entry in OPS.items()})


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Normal values, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_close_enough(found: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor, granted: float = 1e-2) -> None:
    """Errors against ``exact``; of the type's unit a hundredth is granted where the twin happens to be exact."""
    assert found.dtype == twin.dtype and found.shape == twin.shape
    unit = torch.finfo(found.dtype).eps
    allowed = 2 * (twin.double() - exact).abs().max().item() + unit * granted
    error = (found.double() - exact).abs().max().item()
    assert error <= allowed, f"error {error} above {allowed} for {found.dtype}, {tuple(found.shape)}"


def check_norm(device: str, size: int, dtype: torch.dtype) -> None:
    """Rows that are slices of wider ones, then with a residual that is added to in place."""
    x = random((5, size + 24), dtype, device)[:, 8 : 8 + size]
    weight, residual = random((size,), dtype, device, 1), random((5, size), dtype, device, 2)
    rule = NormRule(weight, EPS)

    def exact(rows: torch.Tensor) -> torch.Tensor:
        wide = rows.double()
        return wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()

    found, twin = KERNELS.norm(x, rule), TWINS.norm(x, rule)
    assert_close_enough(found, twin, exact(x))
    sums = residual.clone(), residual.clone()
    found = KERNELS.add_norm(x, sums[0], rule)
    twin = TWINS.add_norm(x, sums[1], rule)
    torch.testing.assert_close(*sums, rtol=0, atol=0)
    assert_close_enough(found, twin, exact(sums[0]))


def check_silu(device: str, size: int, dtype: torch.dtype) -> None:
    """Gates far from zero too, where the exponential overflows."""
    gate_up = random((4, 2 * size + 16), dtype, device)[:, : 2 * size]
    gate_up[0, :size] *= 100
    gate, up = gate_up.double().chunk(2, -1)
    found = KERNELS.gate(gate_up, SILU)
    assert_close_enough(found, TWINS.gate(gate_up, SILU), gate * gate.sigmoid() * up)


def check_heads(
    device: str, heads: tuple[int, int, int], dtype: torch.dtype, normalises: bool, cache_dtype: torch.dtype | None
) -> None:
    """Merged rows of (heads, KV heads, head_dim); stored with padding among the slots, or left where they are."""
    num_heads, num_kv_heads, head_dim = heads
    merged = random((6, num_heads + 2 * num_kv_heads, head_dim), dtype, device)
    norm = make_norm(num_heads, num_kv_heads, head_dim, dtype, device) if normalises else None
    rotation = make_rotation(head_dim, torch.tensor([0, 1, 7, 50, 98, 99], device=device), dtype)
    slots = torch.tensor([3, -1, 0, 19, 7, -1], device=device)
    exact = prepare_exactly(merged, num_kv_heads, norm, rotation)
    twin = TWINS.prepare_heads(merged.clone(), num_kv_heads, norm, rotation, None, slots)
    assert twin[1] is not None and twin[2] is not None
    cache, scales = empty_cache(num_kv_heads, head_dim, cache_dtype or dtype, device)
    bound = None if cache_dtype is None else LayerKv(cache, scales)
    query, key, value = KERNELS.prepare_heads(merged.clone(), num_kv_heads, norm, rotation, bound, slots)
    assert_close_enough(query, twin[0], exact[:, :num_heads])
    if cache_dtype is None:
        assert key is not None and value is not None and not cache.any()
        assert_close_enough(key, twin[1], exact[:, num_heads:])
        assert torch.equal(value, merged[:, -num_kv_heads:])
        return
    assert key is None and value is None
    expected = empty_cache(num_kv_heads, head_dim, cache_dtype, device)
    store_kv(KeyValue(twin[1], twin[2]), LayerKv(*expected), slots)
    exact_cache = empty_cache(num_kv_heads, head_dim, torch.float64, device)[0]
    store_kv(KeyValue(exact[:, num_heads:], merged[:, -num_kv_heads:]), LayerKv(exact_cache), slots)
    for part in (0, 1):
        found, wanted = (read_part(*kept, part) for kept in ((cache, scales), expected))
        assert not found[exact_cache[part] == 0].any(), "something was stored where no slot points"
        assert_close_enough(found, wanted, exact_cache[part])


def empty_cache(
    num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Five blocks of four, and their scales if they are quantised."""
    cache = torch.zeros(2, 5, 4, num_kv_heads, head_dim, device=device).to(dtype)
    return cache, torch.zeros(2, 5, num_kv_heads, 4, device=device) if is_quantised(dtype) else None


def read_part(cache: torch.Tensor, scales: torch.Tensor | None, part: int) -> torch.Tensor:
    """Keys or values as they will be read."""
    return cache[part] if scales is None else dequantise(cache[part], scales[part].transpose(1, 2))


def make_norm(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> HeadNorm:
    """Random weights."""
    q_weight, k_weight = random((2, head_dim), dtype, device, 3)
    weights = torch.cat((q_weight.expand(num_heads, -1), k_weight.expand(num_kv_heads, -1)))
    return HeadNorm(q_weight=q_weight, k_weight=k_weight, weights=weights, eps=EPS)


def make_rotation(head_dim: int, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Plain rotary angles of ``positions``, as the model's table holds them."""
    frequencies = 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(MAX_LEN), frequencies)
    return Rotation(torch.cat((angles.cos(), angles.sin()), -1).to(dtype).to(positions.device), positions)


def prepare_exactly(merged: torch.Tensor, num_kv_heads: int, norm: HeadNorm | None, rotation: Rotation) -> torch.Tensor:
    """Queries and keys in float64."""
    wide = merged[:, :-num_kv_heads].double()
    if norm is not None:
        wide = wide * (wide.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weights.double()
    cos, sin = rotation.table[rotation.positions].double()[:, None].chunk(2, -1)
    a, b = wide.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device."""
    cases: dict[str, Callable[[str], None]] = {}
    for dtype in DTYPES:
        for size in (48, 512, 1000):
            cases[f"norm-{size}-{dtype}"] = partial(check_norm, size=size, dtype=dtype)
        for size in (24, 1500):
            cases[f"silu-{size}-{dtype}"] = partial(check_silu, size=size, dtype=dtype)
        for sizes, normalises, cache_dtype in (
            ((4, 2, 32), True, dtype),
            ((4, 2, 32), False, None),
            ((1, 1, 128), False, dtype),
            ((3, 3, 80), True, None),
            ((20, 5, 24), True, dtype),
            ((2, 1, 256), True, dtype),
            ((2, 2, 96), False, torch.int8),
            ((4, 2, 64), True, torch.int8),
            ((3, 3, 80), False, torch.float8_e4m3fn),
        ):
            cases[f"heads-{sizes}-{dtype}-in-{cache_dtype}"] = partial(
                check_heads, heads=sizes, dtype=dtype, normalises=normalises, cache_dtype=cache_dtype
            )
    return cases


CASES = make_cases()


def launch_all(capability: int) -> None:
    """What Qwen3-0.6B and 32B launch, and in every type a model with odd sizes; 8-bit floats need sm_89."""
    quantised = [dtype for dtype in LARGEST_VALUE if dtype == torch.int8 or capability >= 89]
    launch_model(torch.bfloat16, 1024, 3072, (16, 8, 128), quantised)
    launch_model(torch.bfloat16, 5120, 25600, (64, 8, 128), [])
    for dtype in DTYPES:
        launch_model(dtype, 576, 1536, (9, 3, 80), [])


def launch_model(
    dtype: torch.dtype, hidden: int, inner: int, heads: tuple[int, int, int], quantised: list[torch.dtype]
) -> None:
    """The launches of one layer, with a cache of its own type and with quantised ones."""
    num_heads, num_kv_heads, head_dim = heads

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x = empty(7, hidden)
    rule = NormRule(empty(hidden), EPS)
    KERNELS.norm(x, rule)
    KERNELS.add_norm(x, empty(7, hidden), rule)
    KERNELS.gate(empty(7, 2 * inner), SILU)
    merged = empty(7, num_heads + 2 * num_kv_heads, head_dim)
    rotation = Rotation(empty(4096, head_dim), empty(7, dtype=torch.int64))
    slots = empty(7, dtype=torch.int64)
    norm = HeadNorm(
        q_weight=empty(head_dim), k_weight=empty(head_dim), weights=empty(num_heads + num_kv_heads, head_dim), eps=EPS
    )
    scales = empty(2, 64, num_kv_heads, 16, dtype=torch.float32)
    for cache_dtype in (dtype, *quantised):
        cache = empty(2, 64, 16, num_kv_heads, head_dim, dtype=cache_dtype)
        kv = LayerKv(cache, scales if is_quantised(cache_dtype) else None)
        KERNELS.prepare_heads(merged, num_kv_heads, norm, rotation, kv, slots)
        KERNELS.prepare_heads(merged, num_kv_heads, None, rotation, kv, slots)
    KERNELS.prepare_heads(merged, num_kv_heads, norm, rotation, None, slots)


def main() -> None:
    for name, check in CASES.items():
        try:
            check("cpu")
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
    print(AGREEMENT)


if __name__ == "__main__":
    main()
