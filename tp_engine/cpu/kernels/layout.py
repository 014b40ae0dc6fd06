"""The structures of ``attention_types.h``, ``quantised.h`` and of some C files, field by field."""

from __future__ import annotations

import ctypes

import torch

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Step(ctypes.Structure):
    """What all layers of a step share; ``arrays`` keeps the memory at its addresses alive."""

    arrays: tuple[object, ...]

    _fields_ = (
        ("num_requests", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("query_lens", ctypes.c_void_p),
        ("query_starts", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("block_table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("num_threads", ctypes.c_int64),
    )


class AttentionLayer(ctypes.Structure):
    """What is constant for a layer: its cache and its shape.  ``window`` 0: none, ``softcap`` 0: none; dtypes as in
    ``DTYPE_CODES``; ``sinks_tensor`` keeps the memory at ``sinks`` alive."""

    sinks_tensor: torch.Tensor | None

    _fields_ = (
        ("key_cache", ctypes.c_void_p),
        ("value_cache", ctypes.c_void_p),
        ("block_bytes", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("num_heads", ctypes.c_int64),
        ("num_kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("values_in_keys", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("cache_dtype", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class Routing(ctypes.Structure):
    """``routing.c``: a ``RoutingRule`` for logits of ``num_experts``; ``scores`` is the index in ``RouterScores``."""

    _fields_ = (
        ("num_experts", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("scores", ctypes.c_int64),
        ("renormalises", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("top_groups", ctypes.c_int64),
        ("group_best", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("smallest_sum", ctypes.c_float),
        ("factor", ctypes.c_float),
    )


class ExpertPanels(ctypes.Structure):
    """``experts.c``: the experts from ``first`` on, in panels; ``kept`` has the memory at its addresses."""

    kept: tuple[object, ...]

    _fields_ = (
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("gate_up_bias", ctypes.c_void_p),
        ("down_bias", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("num_experts", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("quantised_gate_up", ctypes.c_void_p),
        ("quantised_down", ctypes.c_void_p),
        ("gate_up_factors", ctypes.c_void_p),
        ("down_factors", ctypes.c_void_p),
        ("num_shards", ctypes.c_int64),
        ("keeps_sums", ctypes.c_int64),
    )


class QuantisedLayout(ctypes.Structure):
    """``quantised.h``: what all panels of a quantised weight share."""

    _fields_ = (
        ("codes", ctypes.c_int64),
        ("scales", ctypes.c_int64),
        ("has_zeros", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("values", ctypes.c_float * 16),
        ("high", ctypes.c_uint8 * 128),
        ("low", ctypes.c_uint8 * 128),
    )


class BlockCodes(ctypes.Structure):
    """``block_codes.c``: a ``BlockForm``, its codes (0: int8, 1: e4m3), and the threads that share the work."""

    _fields_ = (
        ("num_parts", ctypes.c_int64),
        ("part_vectors", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("lanes", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("codes", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
    )


MAX_ADAPTED_PARTS = 8


class Adapters(ctypes.Structure):
    """``adapters.c``: the slots of one product."""

    _fields_ = (
        ("a", ctypes.c_void_p),
        ("b", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
        ("in_size", ctypes.c_int64),
        ("out_size", ctypes.c_int64),
        ("max_rank", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("part_sizes", ctypes.c_int64 * MAX_ADAPTED_PARTS),
    )
