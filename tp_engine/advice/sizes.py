"""What a model takes on one rank, in bytes.  Weights and blocks are exact, the rest is an estimate."""

from __future__ import annotations

from tp_engine.kv_size import kv_block_bytes, kv_scale_bytes
from tp_engine.model_config import ModelConfig, kv_layout_of, local_num_kv_heads
from tp_engine.units import GIB, MIB, round_up

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
QUANTISED = ("fp8", "int8")
VOCAB_ALIGNMENT = 16
_LOGITS_COPIES = 3  # raw, edited and sorted, in float32


def local_parameters(model: ModelConfig, world_size: int) -> int:
    """Parameters that one of ``world_size`` ranks holds, the vocabulary's padding included."""
    hidden, inner = model.hidden_size, model.intermediate_size // world_size
    queries = model.num_heads // world_size * model.head_dim
    keys = local_num_kv_heads(model, world_size) * model.head_dim
    qkv = queries + 2 * keys
    attention = hidden * qkv + queries * hidden
    attention += qkv * model.qkv_bias + hidden * model.out_bias + 2 * model.head_dim * model.qk_norm
    mlp = 3 * hidden * inner + (2 * inner + hidden) * model.mlp_bias
    vocabulary = local_vocab_size(model, world_size) * hidden * (1 if model.tie_word_embeddings else 2)
    return model.num_layers * (attention + mlp + 2 * hidden) + hidden + vocabulary


def local_vocab_size(model: ModelConfig, world_size: int) -> int:
    """Rows of the vocabulary on one rank; a world of one does not pad it."""
    if world_size == 1:
        return model.vocab_size
    return round_up(model.vocab_size, VOCAB_ALIGNMENT * world_size) // world_size


def block_bytes(model: ModelConfig, world_size: int, block_size: int, kv_dtype: str) -> int:
    """Bytes of one KV block on one rank."""
    shape = {
        "num_layers": kv_layout_of(model).layers_per_block,
        "block_size": block_size,
        "local_num_kv_heads": local_num_kv_heads(model, world_size),
    }
    scales = kv_scale_bytes(**shape) if kv_dtype in QUANTISED else 0
    return kv_block_bytes(**shape, head_dim=model.head_dim, itemsize=ITEMSIZES[kv_dtype], scale_bytes=scales)


def activation_bytes(model: ModelConfig, world_size: int, *, dtype: str, num_tokens: int, num_sequences: int) -> int:
    """About the peak of the largest step: one layer's tensors for ``num_tokens``, and the logits of all sequences."""
    inner = model.intermediate_size // world_size
    heads = (model.num_heads // world_size + 2 * local_num_kv_heads(model, world_size)) * model.head_dim
    per_token = 3 * model.hidden_size + max(3 * inner, 2 * heads)
    logits = num_sequences * local_vocab_size(model, world_size) * ITEMSIZES["float32"] * _LOGITS_COPIES
    return num_tokens * per_token * ITEMSIZES[dtype] + logits


def overhead_bytes(world_size: int, *, is_gpu: bool) -> int:
    """About what torch does not count: the CUDA context, kernels, graphs, NCCL's buffers; on CPUs the interpreter."""
    if not is_gpu:
        return 512 * MIB
    return int(1.25 * GIB) + (GIB if world_size > 1 else 0)
