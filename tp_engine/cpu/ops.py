"""Operations of ``kernels.ops.OPS`` in C: each equals its PyTorch twin, and calls it for inputs that C does not take.

The first argument is the compiled library, whose functions take tensors and types (``tape.NativeFunction``).
"""

import ctypes

import torch

from tp_engine.cpu.layout import DTYPE_CODES, MAX_ADAPTED_PARTS, Adapters
from tp_engine.cpu.tape import address_of
from tp_engine.kernels import layer_ops as twins
from tp_engine.kernels.attention import heads as head_twins
from tp_engine.kernels.attention.heads import HeadNorm, Heads, Rotation
from tp_engine.kernels.kv_cache.layer_kv import LayerKv
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.linear import adapters as adapter_twins
from tp_engine.kernels.linear.adapters import AdapterRows, AdapterWeights
from tp_engine.kernels.steps.decode_inputs import DecodeInputs, RowTables
from tp_engine.kernels.steps.draft_inputs import DraftInputs
from tp_engine.model_config.head_gate import GateFunction
from tp_engine.model_config.mlp import Activation

MAX_HEAD_DIM = 512


def embed(
    library: ctypes.CDLL, token_ids: torch.Tensor, weight: torch.Tensor, first_id: int | None, scale: float = 1.0
) -> torch.Tensor:
    is_dense = token_ids.is_contiguous() and weight.is_contiguous()
    if token_ids.dtype != torch.int32 or not is_dense or weight.dtype not in DTYPE_CODES:
        return twins.embed(token_ids, weight, first_id, scale)
    num_ids, width = weight.shape
    out = torch.empty((len(token_ids), width), dtype=weight.dtype, device="cpu")
    row_bytes = width * weight.itemsize
    library.embed(token_ids, weight, out, len(token_ids), row_bytes, first_id or 0, num_ids, scale, weight.dtype)
    return out


def norm(library: ctypes.CDLL, x: torch.Tensor, rule: NormRule) -> torch.Tensor:
    if not (x.stride(-1) == 1 and x.dtype is rule.weight.dtype and x.dtype in DTYPE_CODES):
        return twins.norm(x, rule)
    return _normalise(library, x, None, rule)


def add_norm(
    library: ctypes.CDLL,
    x: torch.Tensor,
    residual: torch.Tensor,
    rule: NormRule,
    scale: float = 1.0,
    stream_scale: float = 1.0,
) -> torch.Tensor:
    if not (are_dense(x, residual) and x.dtype is rule.weight.dtype):
        return twins.add_norm(x, residual, rule, scale, stream_scale)
    return _normalise(library, x, residual, rule, scale, stream_scale)


def _normalise(
    library: ctypes.CDLL,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    rule: NormRule,
    scale: float = 1.0,
    stream_scale: float = 1.0,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu")
    library.norm_rows(
        x, residual, rule.weight, out, *x.shape, x.stride(0), rule.eps, rule.offset, scale, stream_scale,
        rule.is_centred, x.dtype,
    )  # fmt: skip
    return out


def add(
    library: ctypes.CDLL, x: torch.Tensor, residual: torch.Tensor, scale: float = 1.0, stream_scale: float = 1.0
) -> None:
    if not are_dense(x, residual):
        twins.add(x, residual, scale, stream_scale)
        return
    library.add_scaled(x, residual, x.numel(), scale, stream_scale, x.dtype)


def copy_rows(library: ctypes.CDLL, rows: torch.Tensor, target: torch.Tensor) -> None:
    if not (rows.stride(1) == target.stride(1) == 1 and rows.dtype is target.dtype):
        twins.copy_rows(rows, target)
        return
    size = rows.itemsize
    strides = rows.stride(0) * size, target.stride(0) * size
    library.copy_rows(rows, target, len(rows), rows.shape[1] * size, *strides)


def gate(library: ctypes.CDLL, gate_up: torch.Tensor, rule: Activation) -> torch.Tensor:
    if gate_up.dtype not in DTYPE_CODES or not gate_up.is_contiguous():
        return twins.gate(gate_up, rule)
    rows, size = len(gate_up), gate_up.shape[1] // rule.num_parts
    out = torch.empty((rows, size), dtype=gate_up.dtype, device="cpu")
    library.gate_rows(gate_up, out, rows, size, rule.code, rule.alpha, rule.limit, gate_up.dtype)
    return out


def gate_heads(library: ctypes.CDLL, x: torch.Tensor, gate: torch.Tensor, function: GateFunction = "sigmoid") -> None:
    """Compute ``layer_ops.gate_heads`` in C."""
    is_taken = x.dtype in DTYPE_CODES and gate.dtype is x.dtype
    if not (is_taken and x.is_contiguous() and gate.stride(1) == 1):
        twins.gate_heads(x, gate, function)
        return
    rows, count = gate.shape
    library.gate_heads(x, gate, gate.stride(0), rows, count, x.shape[1] // count, function == "softplus", x.dtype)


def qk_norm_rope_store(
    library: ctypes.CDLL,
    heads: torch.Tensor,
    num_kv_heads: int,
    norm: HeadNorm | None,
    rotation: Rotation | None,
    kv: LayerKv | None,
    slot_mapping: torch.Tensor,
) -> Heads:
    """Compute ``heads.qk_norm_rope_store`` in C; the heads are overwritten, nothing is stored."""
    num_tokens, num_all, head_dim = heads.shape
    if heads.dtype not in DTYPE_CODES or heads.stride()[1:] != (head_dim, 1) or head_dim > MAX_HEAD_DIM:
        return head_twins.qk_norm_rope_store(heads, num_kv_heads, norm, rotation, kv, slot_mapping)
    num_heads = num_all - 2 * num_kv_heads
    assert norm is None or norm.weights.dtype == heads.dtype
    if norm is not None or rotation is not None:
        library.qk_norm_rope_store(
            heads, heads.stride(0), *_rotation_arguments(rotation, heads.dtype),
            *(None, 0.0, 0.0) if norm is None else (norm.weights, norm.eps, norm.offset), num_tokens, num_heads,
            num_kv_heads, num_kv_heads if norm is not None and norm.includes_values else 0, head_dim, heads.dtype,
        )  # fmt: skip
    query, key, value = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), 1)
    return query, key, value


def head_squares(library: ctypes.CDLL, heads: torch.Tensor, num_heads: int, num_kv_heads: int) -> torch.Tensor:
    if heads.dtype not in DTYPE_CODES or not heads.is_contiguous():
        return head_twins.head_squares(heads, num_heads, num_kv_heads)
    num_tokens, num_all, head_dim = heads.shape
    squares = torch.empty((num_tokens, 2), dtype=torch.float32, device="cpu")
    sizes = num_tokens, num_heads, num_kv_heads, head_dim
    library.head_squares(heads, num_all * head_dim, squares, *sizes, heads.dtype)
    return squares


def norm_width(
    library: ctypes.CDLL,
    heads: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    squares: torch.Tensor,
    weights: torch.Tensor,
    widths: tuple[int, int],
    eps: float,
) -> None:
    is_dense = heads.is_contiguous() and squares.is_contiguous() and weights.is_contiguous()
    if not is_dense or heads.dtype not in DTYPE_CODES or heads.dtype is not weights.dtype:
        head_twins.norm_width(heads, num_heads, num_kv_heads, squares, weights, widths, eps)
        return
    assert squares.dtype == torch.float32
    num_tokens, num_all, head_dim = heads.shape
    sizes = num_tokens, num_heads, num_kv_heads, head_dim
    library.norm_width(heads, num_all * head_dim, squares, weights, *sizes, *widths, eps, heads.dtype)


def cap_logits(library: ctypes.CDLL, scores: torch.Tensor, scale: float, cap: float | None) -> None:
    if scores.dtype not in DTYPE_CODES or scores.stride(1) != 1:
        twins.cap_logits(scores, scale, cap)
        return
    library.cap_logits(scores, scores.stride(0), *scores.shape, scale, cap or 0.0, scores.dtype)


def prepare_decodes(library: ctypes.CDLL, tables: RowTables, inputs: DecodeInputs) -> None:
    source, target = tables.block_table, inputs.block_table
    num_columns = source.stride(1)
    assert target.stride(1) == num_columns
    deltas, turns = tables.rope_deltas, inputs.rope_positions
    of_turns = (None, None) if deltas is None or turns is None else (deltas, turns)
    library.prepare_decodes(
        inputs.rows, len(inputs.rows), tables.token_ids, tables.token_ids.stride(0), tables.num_computed, source,
        len(source), source.stride(0), num_columns, tables.block_size, inputs.input_ids, inputs.positions,
        inputs.slot_mapping, inputs.slot_mapping.stride(0), inputs.seq_lens, target, target.stride(0), *of_turns,
    )  # fmt: skip


def advance_decodes(library: ctypes.CDLL, tables: RowTables, inputs: DecodeInputs, sampled: torch.Tensor) -> None:
    """Compute ``decode_inputs.advance_decodes`` in C; the lengths are those of ``inputs``, so a second call changes
    nothing."""
    assert sampled.dtype == torch.int32 and sampled.is_contiguous()
    rows, token_ids = inputs.rows, tables.token_ids
    library.advance_decodes(
        rows, inputs.seq_lens, sampled, len(rows), token_ids, token_ids.stride(0), tables.num_computed
    )


def advance_drafts(library: ctypes.CDLL, inputs: DraftInputs, block_size: int) -> None:
    tables = inputs.block_table
    assert tables.stride(1) == 1
    library.advance_drafts(
        inputs.positions, inputs.limits, tables, tables.stride(0), len(tables), block_size, inputs.slot_mapping,
        inputs.seq_lens, inputs.rope_deltas, inputs.rope_positions,
    )  # fmt: skip


def best_tokens(library: ctypes.CDLL, logits: torch.Tensor) -> torch.Tensor:
    """Return the first maximum of each row of ``logits`` (n, width), of a type of ``DTYPE_CODES``, as (n,) int32.

    A NaN is above all numbers, as for its twin ``ranking.row_argmax`` of ``sampling``.
    """
    assert logits.stride(1) == 1
    tokens = torch.empty(len(logits), dtype=torch.int32, device="cpu")
    library.best_tokens(logits, logits.stride(0), tokens, *logits.shape, logits.dtype)
    return tokens


def add_adapters(
    library: ctypes.CDLL, out: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows
) -> None:
    dtype = DTYPE_CODES.get(out.dtype)
    is_taken = out.is_contiguous() and out.dtype is x.dtype is weights.a.dtype and x.stride(1) == 1
    if dtype is None or not is_taken or len(weights.part_sizes) > MAX_ADAPTED_PARTS:
        adapter_twins.add_adapters(out, x, weights, rows)
        return
    shrunk = torch.empty((rows.num_rows, weights.a.shape[1]), dtype=torch.float32, device="cpu")
    library.add_adapters(
        ctypes.byref(_adapters(weights, dtype)), x, x.stride(0), out, rows.rows, rows.tiles, shrunk, rows.num_rows,
        len(rows.tiles),
    )  # fmt: skip


def are_dense(x: torch.Tensor, residual: torch.Tensor) -> bool:
    """Return whether C takes both: contiguous, of one type of ``DTYPE_CODES``."""
    is_dense = x.is_contiguous() and residual.is_contiguous()
    return is_dense and x.dtype is residual.dtype and x.dtype in DTYPE_CODES


def _rotation_arguments(rotation: Rotation | None, dtype: torch.dtype) -> tuple[torch.Tensor | int | None, ...]:
    """Positions and table, the rotary dimension, the queries' scales."""
    if rotation is None:
        return None, None, 0, None
    table, positions, scale = rotation.table, rotation.positions, rotation.query_scale
    assert table.dtype == dtype and table.is_contiguous() and positions.dtype == torch.int64
    assert scale is None or (scale.dtype == torch.float32 and scale.is_contiguous())
    return positions, table, rotation.rotary_dim, scale


def _adapters(weights: AdapterWeights, dtype: int) -> Adapters:
    """What C reads of ``weights``, which hold the memory."""
    assert weights.a.is_contiguous() and weights.b.is_contiguous()
    return Adapters(
        a=address_of(weights.a), b=address_of(weights.b, weights.a.dtype),
        ranks=address_of(weights.ranks, torch.int32), in_size=weights.a.shape[2], out_size=weights.b.shape[2],
        max_rank=weights.max_rank, num_parts=len(weights.part_sizes), dtype=dtype, part_sizes=weights.part_sizes,
    )  # fmt: skip
