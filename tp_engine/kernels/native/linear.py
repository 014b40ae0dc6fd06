"""Products with a weight: plain, for few rows, by ``linear.c``; in panels, for any, by ``packed_linear.c``."""

from __future__ import annotations

import ctypes

import torch

from tp_engine.kernels import huge_pages
from tp_engine.kernels.native.layout import DTYPE_CODES
from tp_engine.units import round_up

_WIDENED_ALIGNMENT = 16  # numbers of the longest vector


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


def fits_panels(weight: torch.Tensor) -> bool:
    """Whether ``PackedWeight`` takes ``weight`` (out, in): float32, and bfloat16 in pairs."""
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0)


class PackedWeight:
    """A weight (out, in) in the order that ``packed_linear.c`` reads.

    One that ``is_gated`` is gate and up, one above the other (out = 2 * size).
    """

    def __init__(self, library: ctypes.CDLL, weight: torch.Tensor, *, is_gated: bool = False) -> None:
        assert weight.is_contiguous() and fits_panels(weight)
        out_size, in_size = weight.shape
        width = library.panel_width()
        self._library, self._dtype, self._out_size = library, weight.dtype, out_size
        self._num_parts = 2 if is_gated else 1
        assert out_size % self._num_parts == 0, f"gate and up have {out_size} rows, an odd number"
        self._items = in_size * weight.itemsize // 4
        is_widened = weight.dtype == torch.bfloat16 and not library.multiplies_bfloat16()
        self._widened_size = round_up(in_size, _WIDENED_ALIGNMENT) if is_widened else 0
        self._panels = huge_pages.zeros((-(-out_size // width), self._items, width), torch.float32)
        library.pack_weight(
            weight.data_ptr(),
            self._panels.data_ptr(),
            out_size,
            self._items,
            self._num_parts,
            torch.get_num_threads(),
        )

    def product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``, as ``few_rows_linear``, of any number of rows; (N, size), ``silu_and_mul`` of that,
        if it is gated, bit by bit as if it were applied to it."""
        assert x.dtype is self._dtype and (bias is None or bias.dtype is self._dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = x.shape[0]
        out = torch.empty((rows, self._out_size // self._num_parts), dtype=x.dtype)
        widened = torch.empty((rows, self._widened_size), dtype=torch.float32) if self._widened_size else None
        self._library.packed_linear(
            x.data_ptr(),
            x.stride(0),
            self._panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            None if widened is None else widened.data_ptr(),
            rows,
            self._out_size,
            self._items,
            self._num_parts,
            DTYPE_CODES[x.dtype],
            torch.get_num_threads(),
        )
        return out

    def rows(self, token_ids: torch.Tensor, first_id: int | None) -> torch.Tensor:
        """The weight's rows for ``token_ids`` (N,), as ``kernels.embedding.embed``: (N, in)."""
        token_ids = token_ids.to(torch.int32).contiguous()
        out = torch.empty((len(token_ids), self._items * 4 // self._dtype.itemsize), dtype=self._dtype)
        self._library.embed_panels(
            token_ids.data_ptr(),
            self._panels.data_ptr(),
            out.data_ptr(),
            len(token_ids),
            self._items,
            first_id or 0,
            self._out_size,
            torch.get_num_threads(),
        )
        return out
