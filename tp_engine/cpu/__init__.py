"""Kernels in C for CPUs, called through ctypes; each has its plain PyTorch twin.  ``compiling/`` makes the library.

This front is the one door: other folders import from here and nothing below.  ``kernels/ops.py`` alone finds the
functions of its table by the names of their modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_engine.cpu.block_codes import simd_width_of
    from tp_engine.cpu.compiling.levels import multiplies_bfloat16_matrices
    from tp_engine.cpu.exchange import MAX_RANKS, ExchangeLayout, NativeExchange
    from tp_engine.cpu.experts import NativeExperts, takes_experts
    from tp_engine.cpu.layout import DTYPE_CODES
    from tp_engine.cpu.library import kernel_level, native_library
    from tp_engine.cpu.linear import NativeInt8Rows, PackedWeight, fits_panels
    from tp_engine.cpu.ops import best_tokens
    from tp_engine.cpu.paged_attention import PagedAttention
    from tp_engine.cpu.quantised import QuantisedPanels
    from tp_engine.cpu.tape import Tape, call, is_recording, naming_calls, recording
    from tp_engine.cpu.waiting import watched_waiting

__all__ = [
    "DTYPE_CODES",
    "MAX_RANKS",
    "ExchangeLayout",
    "NativeExchange",
    "NativeExperts",
    "NativeInt8Rows",
    "PackedWeight",
    "PagedAttention",
    "QuantisedPanels",
    "Tape",
    "best_tokens",
    "call",
    "fits_panels",
    "is_recording",
    "kernel_level",
    "multiplies_bfloat16_matrices",
    "naming_calls",
    "native_library",
    "recording",
    "simd_width_of",
    "takes_experts",
    "watched_waiting",
]

_PLACES = {
    "block_codes": ("simd_width_of",),
    "compiling.levels": ("multiplies_bfloat16_matrices",),
    "exchange": ("MAX_RANKS", "ExchangeLayout", "NativeExchange"),
    "experts": ("NativeExperts", "takes_experts"),
    "layout": ("DTYPE_CODES",),
    "library": ("kernel_level", "native_library"),
    "linear": ("NativeInt8Rows", "PackedWeight", "fits_panels"),
    "ops": ("best_tokens",),
    "paged_attention": ("PagedAttention",),
    "quantised": ("QuantisedPanels",),
    "tape": ("Tape", "call", "is_recording", "naming_calls", "recording"),
    "waiting": ("watched_waiting",),
}
_LAZY = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a name's module at first use: ``compiling/`` runs where torch is not installed yet."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
