"""Products with weights in C: a weight in panels (``panels.h``, ``packed_linear.c``), and rows for int8 products."""

import ctypes
from abc import ABC, abstractmethod

import torch

from tp_engine.cpu.layout import DTYPE_CODES
from tp_engine.kernels import huge_pages
from tp_engine.model_config.mlp import Activation
from tp_engine.system.units import round_up

BOTH_PARTS, NO_ACTIVATION = -2, -1  # as in gated.h
_WIDENED_ALIGNMENT = 16  # numbers of the longest vector


def fits_panels(weight: torch.Tensor) -> bool:
    """Return whether ``PackedWeight`` takes ``weight`` (out, in): a type of ``DTYPE_CODES``, 16 bits in pairs."""
    return weight.dtype in DTYPE_CODES and weight.shape[1] * weight.itemsize % 4 == 0


class Panels(ABC):
    """The base of weights (out, in) in C, for rows of ``dtype``.

    With an ``activation`` the weight is the gate's rows, then up's (out = 2 * size), or up's alone.
    """

    is_recordable = True

    def __init__(
        self, library: ctypes.CDLL, dtype: torch.dtype, out_size: int, activation: Activation | None, made: torch.dtype
    ) -> None:
        self._library, self._dtype, self._out_size, self._made = library, dtype, out_size, made
        self._num_parts = 1 if activation is None else activation.num_parts
        self._kind = NO_ACTIVATION if activation is None else activation.code
        self._kind_before = NO_ACTIVATION if self._num_parts == 1 else BOTH_PARTS
        self._bounds = (0.0, 0.0) if activation is None else (float(activation.alpha), float(activation.limit))

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``: (N, in), (out,) -> (N, out), all of ``dtype``, or of the type ``made``.

        Sums are float32 and rounded once; a row's result is the same, bit by bit, for any other rows and any number of
        threads.  With an activation the result is ``gate`` of that product, (N, size), bit by bit.
        """
        return self._multiply(x, bias, self._kind, self._out_size // self._num_parts)

    def before_activation(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the product without the activation, bit by bit that of a weight without one: (N, out)."""
        return self._multiply(x, bias, self._kind_before, self._out_size)

    def _multiply(self, x: torch.Tensor, bias: torch.Tensor | None, kind: int, width: int) -> torch.Tensor:
        assert x.dtype is self._dtype and (bias is None or bias.dtype is self._dtype)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((x.shape[0], width), dtype=self._made, device="cpu")  # faster than `len`
        self._run(x, bias, out, kind)
        return out

    @abstractmethod
    def _run(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, kind: int) -> None: ...


class PackedWeight(Panels):
    """A weight (out, in) in the order of ``panels.h``.

    With ``num_shards`` the product is ``tree_linear``, bit by bit on a kind of processor; ``keeps_sums``: it is
    float32.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        weight: torch.Tensor,
        activation: Activation | None = None,
        *,
        num_shards: int = 0,
        keeps_sums: bool = False,
    ) -> None:
        assert weight.is_contiguous() and fits_panels(weight)
        assert activation is None if num_shards else not keeps_sums, "only a tree's sums are kept"
        (out_size, in_size), dtype = weight.shape, weight.dtype
        super().__init__(library, dtype, out_size, activation, torch.float32 if keeps_sums else dtype)
        self._num_shards, self._keeps_sums, width = num_shards, keeps_sums, library.panel_width()
        assert out_size % self._num_parts == 0, f"gate and up have {out_size} rows, an odd number"
        self._items = in_size * weight.itemsize // 4
        assert num_shards == 0 or self._items % num_shards == 0, f"{self._items} items in {num_shards} shards"
        self._widened_size = round_up(in_size, _WIDENED_ALIGNMENT) if library.widens(dtype) else 0
        self._panels = huge_pages.zeros((-(-out_size // width), self._items, width), torch.float32)
        library.pack_weight(weight, self._panels, out_size, self._items, self._num_parts, dtype)

    def _run(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, kind: int) -> None:
        rows = x.shape[0]
        widened = (
            torch.empty((rows, self._widened_size), dtype=torch.float32, device="cpu") if self._widened_size else None
        )
        self._library.packed_linear(
            x, x.stride(0), self._panels, bias, out, widened, rows, self._out_size, self._items, kind, *self._bounds,
            x.dtype, self._num_shards, self._keeps_sums,
        )  # fmt: skip

    def rows(self, token_ids: torch.Tensor, first_id: int | None, scale: float = 1.0) -> torch.Tensor:
        """Return the weight's rows for ``token_ids`` (N,) times ``scale``, as ``layer_ops.embed``: (N, in)."""
        token_ids = token_ids.to(torch.int32).contiguous()
        out = torch.empty((len(token_ids), self._items * 4 // self._dtype.itemsize), dtype=self._dtype, device="cpu")
        self._library.embed_panels(
            token_ids, self._panels, out, len(token_ids), self._items, first_id or 0, self._out_size, scale, self._dtype
        )
        return out


def multiply_packed(library: ctypes.CDLL, x: torch.Tensor, panels: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` (N, rows of the panels) = ``x`` (N, in) times a weight in ``panels``, which are taken as of one part."""
    rows, in_size = x.shape
    widened = torch.empty(
        rows * round_up(in_size, _WIDENED_ALIGNMENT) if library.widens(x.dtype) else 0,
        dtype=torch.float32,
        device="cpu",
    )
    library.packed_linear(
        x, x.stride(0), panels, None, out, widened, rows, out.shape[1], panels.shape[1], NO_ACTIVATION, 0.0, 0.0,
        x.dtype, 0, False,
    )  # fmt: skip


class NativeInt8Rows:
    """``kernels.int8_rows.Int8Rows`` by ``int8_rows.c``; types are those of ``DTYPE_CODES``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._quantise, self._scale = library.quantise_rows, library.scale_rows

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.contiguous()
        rows, width = x.shape
        codes, scales = (
            torch.empty((rows, width), dtype=torch.uint8, device="cpu"),
            torch.empty(rows, dtype=torch.float32, device="cpu"),
        )
        self._quantise(x, codes, scales, rows, width, x.dtype)
        return codes, scales

    def scale(
        self, products: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        assert products.is_contiguous() and products.dtype == torch.float32 and (bias is None or bias.dtype == dtype)
        rows, width = products.shape
        out = torch.empty((rows, width), dtype=dtype, device="cpu")
        self._scale(products, scales, bias, out, rows, width, dtype)
        return out
