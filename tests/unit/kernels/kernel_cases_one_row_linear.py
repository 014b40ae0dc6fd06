"""Linear layers of one row by Triton: interpreted and on CUDA (``CASES``), and those of real models
(``launch_all``).

The rule: against float64, the error is at most twice that of PyTorch's product in the same precision; in float32, where
the order of a sum matters, it may be four units of the largest result.
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
    DTYPES,
    assert_close_enough,
    gate_exactly,
    random,
)
from tp_engine.kernels.layer_ops import gate
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
) -> None:
    """The row is the start of a wider row."""
    num_in, num_out = sizes
    x = random((1, num_in + 64), dtype, device)[:, :num_in]
    weight = (random((num_out, num_in), torch.float32, device, 1) * num_in**-0.5).to(dtype)
    bias = random((num_out,), dtype, device, 2) if has_bias else None
    exact, twin = (
        F.linear(x.double(), weight.double(), None if bias is None else bias.double()),
        F.linear(x, weight, bias),
    )
    if activation is not None:
        exact, twin = gate_exactly(exact, activation), gate(twin, activation)
    assert takes_weight(weight, is_gated=activation is not None and activation.num_parts == 2)
    granted = 4 * exact.abs().max().item() if dtype == torch.float32 else 1e-2
    assert_close_enough(one_row_linear_triton(x, weight, bias, activation), twin, exact, granted)


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device: every size plain and with SwiGLU, one size with every activation."""
    cases: dict[str, Callable[[str], None]] = {}
    kinds = [*product(SIZES, (None, SILU)), *product(SIZES[2:3], ACTIVATIONS[1:])]
    for dtype, (sizes, activation), bias in product(DTYPES, kinds, (False, True)):
        gated = "" if activation is None else f", {activation.kind} {activation.limit}"
        name = f"{sizes[0]} to {sizes[1]}, {str(dtype)[6:]}{gated}{', bias' * bias}"
        cases[name] = partial(check, sizes=sizes, dtype=dtype, activation=activation, has_bias=bias)
    return cases


CASES = make_cases()


def launch_all() -> None:
    """One launch of each layer; the first also with a bias, and the third with every activation, which are the same
    code for all layers."""
    for number, (num_in, num_out, is_gated) in enumerate(MODELS):
        weight = torch.empty(num_out, num_in, dtype=torch.bfloat16, device="meta")
        assert takes_weight(weight, is_gated=is_gated)
        activation, x = SILU if is_gated else None, weight[:1]
        one_row_linear_triton(x, weight, None, activation)
        if number == 0:
            one_row_linear_triton(x, weight, weight[:, 0].contiguous(), activation)
        for other in ACTIVATIONS[1:] if number == 2 else ():
            one_row_linear_triton(x, weight, None, other)


def check_compiled(kernel: Any, capability: int) -> None:
    """Dependent launch where the GPU has it."""
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
