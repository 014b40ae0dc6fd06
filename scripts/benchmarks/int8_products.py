"""Time a linear layer with int8 weights by each of torch's ways, and the same layer in the model's type."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

from tp_engine.layers.formats.dense import choose_product
from tp_engine.layers.formats.int8 import make_int8_linear, quantise_weight

Product = Callable[[torch.Tensor], torch.Tensor]


def product_times_us(
    shape: tuple[int, int], dtype: torch.dtype, rows: list[int], seconds: float
) -> dict[str, list[float]]:
    """For each candidate and number of rows: microseconds of the shortest run within ``seconds``."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(shape, generator=generator) * 0.02).to(dtype)
    inputs = [torch.randn(count, shape[1], generator=generator).to(dtype) for count in rows]
    return {name: [_shortest_us(run, x, seconds) for x in inputs] for name, run in candidates(weight).items()}


def candidates(weight: torch.Tensor) -> dict[str, Product]:
    """``x`` (N, in) -> (N, out).  ``_int_mm`` multiplies codes only; quantising and scaling are left out."""
    codes, scales = quantise_weight(weight)
    ours, plain, in_type = make_int8_linear(codes, scales), choose_product(weight), scales.to(weight.dtype)
    packed = _fbgemm_weight(codes, scales)
    return {
        "unquantised": lambda x: plain(x, None),
        "tp_engine": lambda x: ours(x, None),
        "linear_dynamic": lambda x: torch.ops.quantized.linear_dynamic(x.float(), packed).to(x.dtype),
        "_weight_int8pack_mm": lambda x: torch._weight_int8pack_mm(x, codes, in_type),
        "_int_mm": lambda x: torch._int_mm(x.to(torch.int8), codes.T),
    }


def _fbgemm_weight(codes: torch.Tensor, scales: torch.Tensor) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantised tensors are deprecated
        zeros = torch.zeros(len(codes), dtype=torch.long)
        quantised = torch._make_per_channel_quantized_tensor(codes, scales.double(), zeros, 0)
    return torch.ops.quantized.linear_prepack(quantised, None)


def _shortest_us(run: Product, x: torch.Tensor, seconds: float) -> float:
    best, until = float("inf"), time.perf_counter() + seconds
    while True:
        begin = time.perf_counter()
        run(x)
        end = time.perf_counter()
        best = min(best, end - begin)
        if end >= until:
            return round(best * 1e6, 1)
