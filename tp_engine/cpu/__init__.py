"""Kernels in C for CPUs, compiled where they run and called through ctypes; each has its plain PyTorch twin.

This front is the one door: other folders import from here and nothing below.  ``kernels/ops.py`` alone finds the
functions of its table by the names of their modules.
"""

from tp_engine.cpu.block_codes import simd_width_of
from tp_engine.cpu.exchange import MAX_RANKS, ExchangeLayout, NativeExchange
from tp_engine.cpu.experts import NativeExperts, takes_experts
from tp_engine.cpu.layout import DTYPE_CODES
from tp_engine.cpu.library import native_library
from tp_engine.cpu.linear import NativeInt8Rows, PackedWeight, fits_panels
from tp_engine.cpu.ops import best_tokens
from tp_engine.cpu.paged_attention import PagedAttention
from tp_engine.cpu.quantised import QuantisedPanels
from tp_engine.cpu.tape import Tape, call, is_recording, naming_calls, recording

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
    "naming_calls",
    "native_library",
    "recording",
    "simd_width_of",
    "takes_experts",
]
