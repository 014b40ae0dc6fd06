"""A short convolution between two gates in C (``short_conv.c``), for decodes and for prompts."""

import ctypes
from collections.abc import Callable

import torch

from tp_engine.cpu.kernels.layout import DTYPE_CODES
from tp_engine.cpu.kernels.recurrent import chunk_table, is_taken, row_addresses
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
    if not is_taken(mixed, rule.kind):
        return twins.short_conv_decode(mixed, rule, states, slots, runs)
    return _run(library.short_conv_decode, mixed, rule, states, row_addresses(slots, runs), len(mixed))


def short_conv_prefill(
    library: ctypes.CDLL, mixed: torch.Tensor, rule: ShortConvRule, states: LayerStates | None, chunks: list[Chunk]
) -> torch.Tensor:
    """Compute ``short_conv.short_conv_prefill`` in C; the results are bit by bit those of ``short_conv_decode``."""
    if not is_taken(mixed, rule.kind):
        return twins.short_conv_prefill(mixed, rule, states, chunks)
    table = chunk_table(chunks, has_states=states is not None)
    return _run(library.short_conv_prefill, mixed, rule, states, (table.ctypes.data,), len(chunks))


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
