"""The structures of ``attention_types.h``, ``quantised.h`` and of some C files, field by field."""

import ctypes
from functools import partial
from typing import Any, TypeAlias

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# Types of elements that have a scale beside them.
SCALED_CODES = {torch.int8: 3, torch.float8_e4m3fn: 4}
CACHE_CODES = DTYPE_CODES | SCALED_CODES

_Fields: TypeAlias = tuple[tuple[str, Any], ...]


def _fields(kind: Any, names: str) -> _Fields:
    """Fields of one type, ``names`` with spaces between."""
    return tuple((name, kind) for name in names.split())


pointers, integers, floats = (partial(_fields, kind) for kind in (ctypes.c_void_p, ctypes.c_int64, ctypes.c_float))


class Step(ctypes.Structure):
    """What all layers of a step share; ``arrays`` keeps the memory at its addresses alive."""

    arrays: tuple[object, ...]

    _fields_ = (
        *integers("num_requests num_tokens"),
        *pointers("query_lens query_starts seq_lens block_table"),
        *integers("table_stride"),
        *pointers("slots"),
        *integers("num_threads"),
    )


class AttentionLayer(ctypes.Structure):
    """What is constant for a layer: its cache and its shape.  ``window`` 0: none, ``softcap`` 0: none; dtypes as in
    ``CACHE_CODES``; ``sinks_tensor`` keeps the memory at ``sinks`` alive."""

    sinks_tensor: torch.Tensor | None

    _fields_ = (
        *pointers("key_cache value_cache key_scales value_scales"),
        *integers("block_bytes scale_bytes block_size num_heads num_kv_heads head_dim value_dim values_in_keys window"),
        *integers("cache_dtype dtype"),
        *pointers("sinks"),
        *floats("scale softcap"),
    )


class Routing(ctypes.Structure):
    """``routing.c``: a ``RoutingRule`` for logits of ``num_experts``; ``scores`` is the index in ``RouterScores``."""

    _fields_ = (
        *integers("num_experts top_k scores renormalises num_groups top_groups group_best dtype"),
        *floats("sum_eps factor"),
    )


class ExpertPanels(ctypes.Structure):
    """``experts.c``: the experts from ``first`` on, in panels; ``kept`` has the memory at its addresses."""

    kept: tuple[object, ...]

    _fields_ = (
        *pointers("gate_up down gate_up_bias down_bias"),
        *integers("first num_experts hidden inner top_k kind dtype"),
        *floats("alpha limit"),
        *pointers("quantised_gate_up quantised_down gate_up_factors down_factors"),
        *integers("num_shards keeps_sums"),
    )


class QuantisedLayout(ctypes.Structure):
    """``quantised.h``: what all panels of a quantised weight share."""

    _fields_ = (
        *integers("codes scales has_zeros columns group"),
        ("values", ctypes.c_float * 16),
        ("high", ctypes.c_uint8 * 128),
        ("low", ctypes.c_uint8 * 128),
    )


class BlockCodes(ctypes.Structure):
    """``block_codes.c``: a ``BlockForm``, its codes (``SCALED_CODES``), and the threads that share the work."""

    _fields_ = (*integers("num_parts part_vectors head_dim simd_width dtype codes num_threads"),)


MAX_ADAPTED_PARTS = 8


class Adapters(ctypes.Structure):
    """``adapters.c``: the slots of one product."""

    _fields_ = (
        *pointers("a b ranks"),
        *integers("in_size out_size max_rank num_parts dtype"),
        ("part_sizes", ctypes.c_int64 * MAX_ADAPTED_PARTS),
    )
