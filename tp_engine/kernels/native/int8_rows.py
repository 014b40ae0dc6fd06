"""Rows quantised and scaled in C: ``int8_rows.c``, the twin of ``kernels.int8_rows.TorchInt8Rows``."""

from __future__ import annotations

import ctypes

import torch

from tp_engine.kernels.native.layout import DTYPE_CODES


class NativeInt8Rows:
    """See ``kernels.int8_rows.Int8Rows``; types are those of ``DTYPE_CODES``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._quantise, self._scale = library.quantise_rows, library.scale_rows

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Int8Rows``."""
        x = x.contiguous()
        rows, width = x.shape
        codes, scales = torch.empty((rows, width), dtype=torch.uint8), torch.empty(rows)
        threads = torch.get_num_threads()
        self._quantise(x.data_ptr(), codes.data_ptr(), scales.data_ptr(), rows, width, DTYPE_CODES[x.dtype], threads)
        return codes, scales

    def scale(
        self, products: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """See ``Int8Rows``."""
        assert products.is_contiguous() and products.dtype == torch.float32 and (bias is None or bias.dtype == dtype)
        rows, width = products.shape
        out = torch.empty((rows, width), dtype=dtype)
        self._scale(
            products.data_ptr(),
            scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            DTYPE_CODES[dtype],
            torch.get_num_threads(),
        )
        return out
