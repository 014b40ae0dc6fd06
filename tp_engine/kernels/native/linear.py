"""Products of few rows with a weight, by ``linear.c``."""

from __future__ import annotations

import ctypes

import torch

from tp_engine.kernels.native.layout import DTYPE_CODES


def few_rows_linear(
    library: ctypes.CDLL, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x @ weight.T + bias``: (N, in), (out, in), (out,) -> (N, out).

    All are of one type of ``DTYPE_CODES``, weight and bias contiguous.  Sums are float32 and rounded once; a row's
    result is the same bit by bit whatever the other rows and the number of threads.
    """
    assert x.dtype is weight.dtype and (bias is None or bias.dtype is weight.dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    rows, in_size = x.shape
    out_size = weight.shape[0]
    out = torch.empty((rows, out_size), dtype=x.dtype)
    library.few_rows_linear(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        rows,
        out_size,
        in_size,
        DTYPE_CODES[x.dtype],
        torch.get_num_threads(),
    )
    return out
