"""How much memory each taped function reads or writes behind its pointers: what a tape is about to replay blindly is
checked once, when it is recorded.

Each expression counts elements of the tensor that is given, in the function's own numbers; ``size`` is the bytes of one
of them.  Where values decide (a slot, a position, a length), it is what any of them needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import CodeType
from typing import Any

import torch

from tp_engine.cpu.layout import DTYPE_CODES
from tp_engine.cpu.prototypes import Prototype

_HEADS = "(num_heads + num_kv_heads) * head_dim"
_CHANNELS = "(2 * key_heads * key_dim + value_heads * value_dim)"
_DECODES = "0 if slots is None else "
_UP = "num_heads * (nope + value_dim) * rank"

EXTENTS: dict[str, dict[str, str]] = {
    "paged_attention": {},  # of the tokens of ``Step``, which is made from the arrays themselves
    "prepare_decodes": {
        "rows": "num_requests", "token_ids": "token_stride", "num_computed": "1",
        "tables": "(num_groups - 1) * source_stride + num_columns", "input_ids": "num_requests",
        "positions": "num_requests", "slots": "(num_groups - 1) * slot_stride + num_requests",
        "seq_lens": "num_requests", "block_table": "(num_groups - 1) * table_stride + num_requests * num_columns",
        "rope_deltas": "1", "rope_positions": "num_requests",
    },
    "advance_decodes": {
        "rows": "num_requests", "seq_lens": "num_requests", "sampled": "num_requests", "token_ids": "token_stride",
        "num_computed": "1",
    },
    "advance_drafts": {
        "positions": "num_requests", "limits": "num_requests", "tables": "(num_requests - 1) * num_columns + 1",
        "slots": "num_requests", "seq_lens": "num_requests", "rope_deltas": "num_requests",
        "rope_positions": "num_requests",
    },
    "embed": {"ids": "n", "weight": "num_ids * row_bytes // size", "out": "n * row_bytes // size"},
    "best_tokens": {"scores": "(n - 1) * stride + width", "out": "n"},
    "gated_delta_net": {
        "conv": f"taps * {_CHANNELS}", "decay": "value_heads", "dt_bias": "value_heads", "norm": "value_dim",
        "inputs": "1", "matrices": "1", "slots": "num_runs", "runs": "2 * num_runs", "chunks": "4 * num_runs",
        "mixed": f"{_DECODES}(num_runs - 1) * mixed_stride + {_CHANNELS} + value_heads * value_dim",
        "gates": f"{_DECODES}(num_runs - 1) * gates_stride + 2 * value_heads",
        "out": f"{_DECODES}num_runs * value_heads * value_dim",
    },
    "kimi_delta": {
        "conv": f"taps * {_CHANNELS}", "decay": "value_heads", "dt_bias": "value_heads * key_dim", "norm": "value_dim",
        "inputs": "1", "matrices": "1", "slots": "num_runs", "runs": "2 * num_runs", "chunks": "4 * num_runs",
        "mixed": f"{_DECODES}(num_runs - 1) * mixed_stride + {_CHANNELS}",
        "beta": f"{_DECODES}(num_runs - 1) * beta_stride + value_heads",
        "decays": f"{_DECODES}(num_runs - 1) * decays_stride + value_heads * key_dim",
        "z": f"{_DECODES}(num_runs - 1) * z_stride + value_heads * value_dim",
        "out": f"{_DECODES}num_runs * value_heads * value_dim",
    },
    "mamba2": {
        "conv": f"taps * {_CHANNELS}", "conv_bias": _CHANNELS, "decay": "value_heads", "dt_bias": "value_heads",
        "skip": "value_heads", "inputs": "1", "matrices": "1", "slots": "num_runs", "runs": "2 * num_runs",
        "chunks": "4 * num_runs", "mixed": f"{_DECODES}(num_runs - 1) * stride + {_CHANNELS} + value_heads",
        "out": f"{_DECODES}num_runs * value_heads * value_dim",
    },
    "short_conv": {
        "conv": "taps * channels", "inputs": "1", "slots": "num_runs", "runs": "2 * num_runs",
        "chunks": "4 * num_runs", "mixed": f"{_DECODES}(num_runs - 1) * stride + 3 * channels",
        "out": f"{_DECODES}num_runs * channels",
    },
    "gate_heads": {"x": "rows * count * dim", "gate": "(rows - 1) * stride + count"},
    "mix_experts": {"x": "rows", "ids": "rows", "weights": "rows", "out": "rows", "memory": "0"},
    "add_gated": {"total": "rows * width", "x": "rows * width", "gates": "(rows - 1) * stride + 1"},
    "qk_norm_rope_store": {
        "heads": "(num_tokens - 1) * stride + (num_heads + num_kv_heads + num_values) * head_dim",
        "positions": "num_tokens", "table": "rotary_dim", "query_scale": "1", "weights": _HEADS,
    },
    "head_squares": {"heads": f"(num_tokens - 1) * stride + {_HEADS}", "squares": "2 * num_tokens"},
    "norm_width": {
        "heads": f"(num_tokens - 1) * stride + {_HEADS}", "squares": "2 * num_tokens", "weights": _HEADS,
    },
    "prepare_index": {
        "queries": "num_tokens * num_heads * dim", "keys": "num_tokens * dim", "positions": "num_tokens",
        "table": "rope", "weight": "dim", "bias": "dim", "rows": "1", "scales": "1",
        "slots": "0 if rows is None else num_tokens",
    },
    "choose_keys": {
        "queries": "num_rows * num_heads * dim", "weights": "num_rows * num_heads", "rows": "1", "scales": "1",
        "block_table": "(num_rows - 1) * table_stride + 1", "seq_lens": "num_rows", "chosen": "num_rows * top_k",
        "counts": "num_rows",
    },
    "prepare_latents": {
        "query": "(num_tokens - 1) * query_stride + num_heads * (nope + rope)",
        "rows": "(num_tokens - 1) * row_stride + rank + rope", "positions": "num_tokens", "table": "rope",
        "query_scale": "1", "weight": "rank",
    },
    "absorb_w_uk": {
        "query": "(num_tokens - 1) * stride + num_heads * (nope + rope)", "up": _UP,
        "out": "num_tokens * num_heads * (rank + rope)",
    },
    "project_w_uv": {
        "attended": "num_tokens * num_heads * rank", "up": _UP, "out": "num_tokens * num_heads * value_dim",
    },
    "group_squares": {"x": "rows * groups * width", "out": "rows * groups"},
    "norm_groups": {
        "x": "rows * groups * width", "weight": "groups * width", "squares": "rows * groups",
        "out": "rows * groups * width",
    },
    "packed_linear": {  # an activation of two parts halves what goes out
        "x": "(rows - 1) * x_stride + items * 4 // size", "weight": "items * out_size", "bias": "out_size",
        "out": "rows * out_size // 2", "widened": "0",
    },
    "quantised_linear": {
        "x": "(rows - 1) * x_stride + 1", "panels": "1", "factors": "out_size", "bias": "out_size",
        "out": "rows * out_size // 2", "prepared": "rows",
    },
    "embed_panels": {"ids": "num_ids", "packed": "items * num_rows", "made": "num_ids * items * 4 // size"},
    "route_tokens": {
        "logits": "(rows - 1) * stride + 1", "correction": "1", "expert_scale": "1", "ids": "rows",
        "weights": "rows", "counts": "1", "slots": "rows",
    },
    "widen_rows_to_float32": {"x": "rows * width", "out": "rows * width"},
    "norm_rows": {
        "x": "(rows - 1) * stride + width", "residual": "rows * width", "weight": "width", "out": "rows * width",
    },
    "add_scaled": {"x": "count", "residual": "count"},
    "copy_rows": {
        "from": "((rows - 1) * from_stride + bytes) // size", "to": "((rows - 1) * to_stride + bytes) // size",
    },
    "gate_rows": {"gate_up": "rows * width", "out": "rows * width"},
    "cap_logits": {"logits": "(rows - 1) * stride + width"},
}  # fmt: skip
_OF_OTHER_TYPES = {("packed_linear", "out"), ("quantised_linear", "panels"), ("quantised_linear", "prepared")}


def check_extents(prototype: Prototype, given: tuple[Any, ...]) -> None:
    """Raise ``ValueError`` for a tensor that is smaller than what the function touches, and ``TypeError`` for one that
    is not of the type which the call names."""
    named = dict(zip(prototype.names, given, strict=False))
    dtype = named.get("dtype")
    for name, item in zip(prototype.names, prototype.items, strict=True):
        tensor = named.get(name)
        if not isinstance(tensor, torch.Tensor):
            continue
        own = DTYPE_CODES.get(tensor.dtype)
        is_of_call = item in ("char", "void") and (prototype.name, name) not in _OF_OTHER_TYPES
        if is_of_call and dtype not in (None, tensor.dtype, own):
            raise TypeError(f"{prototype.name}: {name} is of {tensor.dtype}, and the call of {dtype}")
        needed = _needed(prototype.name, name, tensor.itemsize, named)
        offset = tensor.storage_offset() * tensor.itemsize
        room = (tensor.untyped_storage().nbytes() - offset) // tensor.itemsize
        if room < needed:
            raise ValueError(
                f"{prototype.name}: {name}, of shape {tuple(tensor.shape)}, has memory for {room} elements, and the "
                f"kernel would touch {needed}"
            )


def _needed(function: str, name: str, size: int, named: Mapping[str, Any]) -> int:
    expression = EXTENTS[function].get(name)
    return 0 if expression is None else int(eval(_compiled(expression), {"size": size}, named))


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<extent>", "eval")
