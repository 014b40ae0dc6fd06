"""Linear layers of a few rows by Triton, with norm and sum: interpreted (``main``), on CUDA (``CASES``), and those of
real models (``launch_all``).

The rule: against float64, the error is at most twice that of the twin in the same precision; in float32, where the
order of a sum matters, it may be four units of the largest result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from tests.unit.kernels.kernel_cases_layer_ops import (
    ACTIVATIONS,
    EPS,
    assert_close_enough,
    gate_exactly,
    norm_exactly,
    random,
)
from tests.unit.kernels.kernel_harness import AGREEMENT
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.linear.few_rows_linear_triton import (
    few_rows_linear_triton,
    linear_sizes,
    max_rows,
    takes_weight,
)
from tp_engine.kernels.linear.fused_linear import RowsToNorm, fused_linear
from tp_engine.model_config.mlp import SILU, Activation

FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
# (rows, in, out, gated): gate and up of Qwen3-0.6B at each padded number of rows, its other layers, gate and up of 8B
# in one split, and an inner size that few powers of two divide.
LAUNCHES = (
    (8, 1024, 6144, True), (16, 1024, 6144, True), (32, 1024, 6144, True), (64, 1024, 6144, True),
    (128, 1024, 6144, True), (256, 1024, 6144, True), (8, 1024, 4096, False), (256, 1024, 4096, False),
    (16, 2048, 1024, False), (128, 3072, 1024, False), (64, 4096, 24576, True), (32, 11008, 4096, False),
)  # fmt: skip
SCALE = 0.25
"""Of what is added to the stream."""


def check(
    device: str,
    num_rows: int,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    num_multiprocessors: int = 8,
    activation: Activation | None = None,
    has_bias: bool = False,
    offset: float | None = None,
    adds: bool = False,
) -> None:
    """Rows and stream are slices of wider ones; ``offset``: that of a norm.  Twice: the counters are as before."""
    num_in, num_out = sizes
    x = random((num_rows, num_in + 64), dtype, device)[:, :num_in]
    weight = (random((num_out, num_in), torch.float32, device, 1) * num_in**-0.5).to(dtype)
    bias = random((num_out,), dtype, device, 2) if has_bias else None
    norm = None if offset is None else NormRule(random((num_in,), dtype, device, 3), EPS, offset)
    width = num_out // 2 if activation is not None else num_out
    before = random((num_rows, width + 64), dtype, device, 4)[:, :width] if adds else None
    wide = x.double() if norm is None else norm_exactly(x, norm)
    exact = F.linear(wide, weight.double(), None if bias is None else bias.double())
    exact = exact if activation is None else gate_exactly(exact, activation)
    exact = exact if before is None else before.double() + SCALE * exact
    assert takes_weight(weight, is_gated=activation is not None) and num_rows <= max_rows(dtype)
    own = linear_sizes(weight, num_rows, num_multiprocessors, is_gated=activation is not None)
    arrivals = torch.zeros(width // own.tiles.block_out, dtype=torch.int32, device=device)
    streams = [None if before is None else before.clone() for _ in range(3)]
    rows = x if norm is None else RowsToNorm(x, norm)
    twin = fused_linear(rows, weight, bias, activation, stream=streams[2], scale=SCALE)
    granted = 4 * exact.abs().max().item() if dtype == FLOAT32 else 1e-2
    found = [
        few_rows_linear_triton(rows, weight, bias, activation, stream=stream, scale=SCALE, sizes=own, arrivals=arrivals)
        for stream in streams[:2]
    ]
    assert_close_enough(found[0], twin, exact, granted)
    assert torch.equal(*found) and not arrivals.any()
    if before is not None:
        assert found[0] is streams[0] and twin is streams[2]


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device: each padded number of rows plain, with a norm and gated, and added to a stream; splits
    of unequal size, one split, every activation."""
    cases: dict[str, Callable[[str], None]] = {}
    roles: dict[str, dict[str, Any]] = {
        "plain": {},
        "norm, bias": {"offset": 0.0, "has_bias": True},
        "norm, gated": {"offset": 1.0, "activation": SILU},
        "gated, bias": {"activation": SILU, "has_bias": True},
        "added": {"adds": True},
        "added, bias": {"adds": True, "has_bias": True},
    }
    for dtype, (name, role) in product((FLOAT32, BFLOAT16, FLOAT16), roles.items()):
        if dtype == FLOAT16 and "offset" in role:
            continue  # x * gain may overflow, so a norm of float16 stays a kernel of its own
        for rows in (3, 8, 16, 27, 64, 65, 256) if dtype == BFLOAT16 else (5, 64):
            case = partial(check, num_rows=rows, sizes=(384, 128), dtype=dtype, **role)
            cases[f"{rows} rows, {name}, {str(dtype)[6:]}"] = case
    for name in ("norm, bias", "added"):
        few = partial(check, num_rows=2, dtype=BFLOAT16, **roles[name])
        cases[f"one split, {name}"] = partial(few, sizes=(256, 512), num_multiprocessors=2)
        cases[f"splits of unequal size, {name}"] = partial(few, sizes=(704, 64), num_multiprocessors=5)
    for activation in ACTIVATIONS[1:]:
        name = f"{activation.kind} {activation.limit}"
        cases[name] = partial(check, num_rows=4, sizes=(128, 256), dtype=BFLOAT16, activation=activation)
    return cases


CASES = make_cases()


def main() -> None:
    for case in CASES.values():
        case("cpu")
    print(AGREEMENT)


def launch_all() -> None:
    """One launch of each layer as in a chain: of a norm, or added to a stream; the last also with a bias."""
    for rows, num_in, num_out, is_gated in LAUNCHES:
        weight = torch.empty(num_out, num_in, dtype=BFLOAT16, device="meta")
        x = torch.empty(rows, num_in, dtype=BFLOAT16, device="meta")
        writes = num_in > num_out
        few_rows_linear_triton(
            x if writes else RowsToNorm(x, NormRule(x[0], EPS)),
            weight,
            weight[:, 0].contiguous() if num_in == LAUNCHES[-1][1] else None,
            SILU if is_gated else None,
            stream=torch.empty(rows, num_out, dtype=BFLOAT16, device="meta") if writes else None,
            sizes=linear_sizes(weight, rows, 132, is_gated=is_gated),
            arrivals=torch.empty(num_out, dtype=torch.int32, device="meta"),
        )


if __name__ == "__main__":
    main()
