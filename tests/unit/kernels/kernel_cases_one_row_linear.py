"""Linear layers of one row by Triton: interpreted (``main``), on CUDA (``CASES``), and those of real models
(``launch_all``).

The rule: against float64, the error is at most twice that of PyTorch's product in the same precision; in float32, where
the order of a sum matters, it may be four units of the largest result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

from tests.unit.kernels.kernel_cases_layer_ops import (
    ACTIVATIONS,
    DTYPES,
    EPS,
    assert_close_enough,
    gate_exactly,
    norm_exactly,
    random,
)
from tests.unit.kernels.kernel_harness import AGREEMENT
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.linear.fused_linear import RowsToNorm, fused_linear
from tp_engine.kernels.linear.one_row_linear_triton import one_row_linear_triton, takes_weight
from tp_engine.model_config.mlp import SILU, Activation

# (in, out): a block that is all of a row, several blocks of 1024 and of 128, the largest block.
SIZES = ((256, 32), (3072, 8), (384, 64), (4096, 4))
# (in, out, gated) of Qwen3-0.6B, 8B, 14B and 32B on 8 ranks, and an inner size that few powers of two divide.
MODELS = (
    (1024, 4096, False), (2048, 1024, False), (1024, 6144, True), (3072, 1024, False), (4096, 24576, True),
    (12288, 4096, False), (5120, 34816, True), (1024, 5120, False), (11008, 4096, False),
)  # fmt: skip


def check(
    device: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    activation: Activation | None,
    has_bias: bool,
    offset: float | None = None,
    scale: float | None = None,
) -> None:
    """The row is the start of a wider row; ``offset``: that of a norm; ``scale``: of what is added to a stream."""
    num_in, num_out = sizes
    x = random((1, num_in + 64), dtype, device)[:, :num_in]
    weight = (random((num_out, num_in), torch.float32, device, 1) * num_in**-0.5).to(dtype)
    bias = random((num_out,), dtype, device, 2) if has_bias else None
    norm = None if offset is None else NormRule(random((num_in,), dtype, device, 3), EPS, offset)
    width = num_out if activation is None else num_out // 2
    streams = None if scale is None else random((2, 1, width), dtype, device, 4)[:1].repeat(2, 1, 1)
    wide = x.double() if norm is None else norm_exactly(x, norm)
    exact = F.linear(wide, weight.double(), None if bias is None else bias.double())
    exact = exact if activation is None else gate_exactly(exact, activation)
    exact = exact if streams is None or scale is None else streams[0].double() + scale * exact
    assert takes_weight(weight, is_gated=activation is not None)
    rows = x if norm is None else RowsToNorm(x, norm)
    found, twin = (
        product(rows, weight, bias, activation, stream=None if streams is None else streams[i], scale=scale or 1.0)
        for i, product in enumerate((one_row_linear_triton, fused_linear))
    )
    granted = 4 * exact.abs().max().item() if dtype == torch.float32 else 1e-2
    assert_close_enough(found, twin, exact, granted)
    assert streams is None or torch.equal(found, streams[0])


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device: every size plain and with SwiGLU, one size with every activation; every size with a
    norm, and added to a stream."""
    cases: dict[str, Callable[[str], None]] = {}
    kinds = [*product(SIZES, (None, SILU)), *product(SIZES[2:3], ACTIVATIONS[1:])]
    for dtype, (sizes, activation), bias in product(DTYPES, kinds, (False, True)):
        gated = "" if activation is None else f", {activation.kind} {activation.limit}"
        name = f"{sizes[0]} to {sizes[1]}, {str(dtype)[6:]}{gated}{', bias' * bias}"
        cases[name] = partial(check, sizes=sizes, dtype=dtype, activation=activation, has_bias=bias)
    for dtype, sizes, bias in product(DTYPES, SIZES, (False, True)):
        name = f"{sizes[0]} to {sizes[1]}, {str(dtype)[6:]}{', bias' * bias}"
        case = partial(check, sizes=sizes, dtype=dtype, has_bias=bias)
        cases[f"{name}, norm"] = partial(case, activation=None, offset=0.0)
        cases[f"{name}, norm with an offset, gated"] = partial(case, activation=SILU, offset=1.0)
        cases[f"{name}, added"] = partial(case, activation=None, scale=0.25)
    return cases


CASES = make_cases()


def main() -> None:
    for case in CASES.values():
        case("cpu")
    print(AGREEMENT)


def launch_all() -> None:
    """One launch of each layer as in a chain, of a norm or added to a stream; the first also alone and with a bias, and
    the third with every activation, which are the same code for all layers."""
    for number, (num_in, num_out, is_gated) in enumerate(MODELS):
        weight = torch.empty(num_out, num_in, dtype=torch.bfloat16, device="meta")
        assert takes_weight(weight, is_gated=is_gated)
        activation, x = SILU if is_gated else None, weight[:1]
        if num_in < num_out:
            one_row_linear_triton(RowsToNorm(x, NormRule(weight[0], EPS)), weight, None, activation)
        else:
            one_row_linear_triton(x, weight, None, stream=weight[:, 0].contiguous()[None])
        for bias in (None, weight[:, 0].contiguous()) if number == 0 else ():
            one_row_linear_triton(x, weight, bias, activation)
        for other in ACTIVATIONS[1:] if number == 2 else ():
            one_row_linear_triton(x, weight, None, other)


if __name__ == "__main__":
    main()
