"""A short convolution between two gates in C (``short_conv.c``), for decodes and for prompts."""

import ctypes
from collections.abc import Callable

import torch

from tp_engine.cpu.kernels.layout import DTYPE_CODES
from tp_engine.cpu.kernels.recurrent import chunk_table
from tp_engine.kernels import short_conv as twins
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.short_conv import ShortConvRule


def short_conv_decode(
    library: ctypes.CDLL,
    mixed: torch.Tensor,
    rule: ShortConvRule,
    states: LayerStates,
    slots: torch.Tensor,
    runs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``short_conv.short_conv_decode`` in C."""
    if not _takes(mixed):
        return twins.short_conv_decode(mixed, rule, states, slots, runs)
    assert all(one.dtype == torch.int32 and one.is_contiguous() for one in (slots, runs) if one is not None)
    rows = slots.data_ptr(), None if runs is None else runs.data_ptr()
    return _run(library.short_conv_decode, mixed, rule, states, rows, len(mixed))


def short_conv_prefill(
    library: ctypes.CDLL, mixed: torch.Tensor, rule: ShortConvRule, states: LayerStates | None, chunks: list[Chunk]
) -> torch.Tensor:
    """Compute ``short_conv.short_conv_prefill`` in C; the results are bit by bit those of ``short_conv_decode``."""
    if not _takes(mixed):
        return twins.short_conv_prefill(mixed, rule, states, chunks)
    table = chunk_table(chunks, has_states=states is not None)
    return _run(library.short_conv_prefill, mixed, rule, states, (table.ctypes.data,), len(chunks))


def _takes(mixed: torch.Tensor) -> bool:
    return mixed.dtype in DTYPE_CODES and mixed.stride(1) == 1


def _run(
    function: Callable[..., int],
    mixed: torch.Tensor,
    rule: ShortConvRule,
    states: LayerStates | None,
    rows: tuple[int | None, ...],
    num_rows: int,
) -> torch.Tensor:
    """``function`` of the library; ``rows`` are the addresses of what says where its ``num_rows`` rows or chunks
    are."""
    kind = rule.kind
    out = torch.empty((len(mixed), kind.num_channels), dtype=mixed.dtype)
    inputs = (None, 0) if states is None else (states.conv.data_ptr(), states.conv.stride(0))
    function(
        rule.conv.data_ptr(), *inputs, kind.num_channels, kind.taps, mixed.data_ptr(), mixed.stride(0), *rows,
        out.data_ptr(), num_rows, DTYPE_CODES[mixed.dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out
