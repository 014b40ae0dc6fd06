"""Bytes that a model needs on one rank beside its weights.  Blocks are exact, the rest is an estimate."""

from tp_engine.model_config import padded_vocab_size
from tp_engine.model_config.kv_layout import default_snapshots, local_num_kv_heads
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec
from tp_engine.model_config.recurrent import RecurrentSpec
from tp_engine.model_config.spec import AttentionSpec, ModelSpec
from tp_engine.system.units import GIB, MIB

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
QUANTISED = ("fp8", "int8")
_LOGITS_COPIES = 3  # raw, edited and sorted, in float32


def local_heads(attention: AttentionSpec, world_size: int) -> tuple[int, int]:
    """Query heads and KV heads of one rank."""
    return attention.num_heads // world_size, local_num_kv_heads(attention.num_kv_heads, world_size)


def local_vocab_size(model: ModelSpec, world_size: int) -> int:
    """Logits of one rank.  Those of a single rank have no padding."""
    size = model.vocab_size
    return size if world_size == 1 else padded_vocab_size(size, world_size) // world_size


def block_bytes(model: ModelSpec, world_size: int, block_size: int, kv_dtype: str) -> int:
    """Bytes of one KV block on one rank."""
    layout = model.kv_layout_on(world_size)
    return layout.block_bytes(block_size, ITEMSIZES[kv_dtype], has_scales=kv_dtype in QUANTISED)


def state_bytes(model: ModelSpec, world_size: int, max_num_seqs: int, num_draft_rows: int = 0) -> int:
    """Bytes of the recurrent states of all rows, and of snapshots, on one rank; 0 if no layer has one."""
    states, num_slots = model.kv_layout_on(world_size).states, max_num_seqs + default_snapshots(max_num_seqs) + 1
    return 0 if states is None else (num_slots + num_draft_rows) * states.slot_bytes


def activation_bytes(model: ModelSpec, world_size: int, *, dtype: str, num_tokens: int, num_sequences: int) -> int:
    """Estimate of the largest step's peak: one layer's tensors for ``num_tokens``, and the logits of all sequences."""
    per_token = 0
    for layer in model.distinct_layers:
        heads = _mixer_elements(layer.attention, world_size)
        inner = max((_mlp_elements(model.hidden_size, mlp, world_size) for mlp in layer.mlps), default=0)
        waiting = 0 if layer.beside is None else 2 * model.hidden_size  # the dense MLP's output, and the experts' input
        per_token = max(per_token, inner + waiting, 2 * heads)
    logits = num_sequences * local_vocab_size(model, world_size) * ITEMSIZES["float32"] * _LOGITS_COPIES
    streams = 3 if model.mtp is None else 4  # a head reads the model's outputs of the whole step
    if model.streams is not None:  # all of them, and in float32 what is read and what is written
        streams += model.streams.count * (1 + 2 * ITEMSIZES["float32"] // ITEMSIZES[dtype])
    own = model.layer_embedding
    per_token += 0 if own is None else 3 * model.num_layers * own.size  # rows, what is projected, and its norm
    return num_tokens * (streams * model.hidden_size + per_token) * ITEMSIZES[dtype] + logits


def image_bytes(model: ModelSpec, *, dtype: str, num_tokens: int, max_model_len: int) -> tuple[int, int]:
    """Bytes of the encoder cache with an image between two of the tower's layers, and an estimate of the tower's
    tensors for the largest image that fits into a prompt; 0 for models that are served as text."""
    vision = model.vision
    if vision is None or not vision.is_served:
        return 0, 0
    most = min(vision.most_rows, max_model_len)
    cache = max(num_tokens, most) * vision.hidden_size * (1 + vision.deep_layers) * ITEMSIZES[dtype]
    hidden, inner = (vision.config.get(name) or 0 for name in ("hidden_size", "intermediate_size"))
    between = vision.merge**2 * hidden + vision.deep_layers * vision.hidden_size
    cache += most * (3 * vision.cell**2 + between * ITEMSIZES[dtype])
    per_patch = (9 * hidden + 3 * inner) * ITEMSIZES[dtype]  # what the products of one layer read and write
    per_patch += 3 * vision.patch**2 * (ITEMSIZES["float32"] * 3 + vision.temporal_patch * ITEMSIZES[dtype])
    return cache, most * vision.merge**2 * per_patch


def _mixer_elements(attention: AttentionSpec | RecurrentSpec | None, world_size: int) -> int:
    """Numbers of a token's queries, keys, values and gates.

    With latents also of its row, and of the keys and values computed from it; with a recurrent state also of the
    convolution's outputs.
    """
    if attention is None:
        return 0
    if isinstance(attention, RecurrentSpec):
        own = attention.kv_kind.on(world_size)
        return 3 * own.num_channels + own.num_value_heads * (own.value_dim + 2)
    num_heads, num_kv_heads = local_heads(attention, world_size)
    latent = attention.latent
    if (rows := attention.shared_row) is not None:
        made = 0 if rows.compression is None else 2 * rows.compression.num_series * rows.compression.width
        of_outputs = rows.num_groups // world_size * rows.group_rank
        return rows.query_rank + attention.head_dim + made + 3 * num_heads * attention.head_dim + of_outputs
    if latent is None:
        return (num_heads + 2 * num_kv_heads) * attention.head_dim + num_heads * attention.gate_dim
    of_index = 0 if latent.index is None else (latent.index.num_heads + 1) * latent.index.dim
    of_index += latent.down_rows(num_heads) + latent.row_dim
    return of_index + num_heads * (2 * latent.query_dim + latent.value_dim)


def _mlp_elements(hidden: int, mlp: MlpSpec | ExpertsSpec, world_size: int) -> int:
    """Numbers that an MLP computes for one token: gate, if there is one, up, and their activated product; with experts,
    also copies of the token's input and outputs for each of its experts."""
    if isinstance(mlp, MlpSpec):
        return (mlp.activation.num_parts + 1) * mlp.inner_size // world_size
    shared = 0 if mlp.shared is None else _mlp_elements(hidden, mlp.shared, world_size)
    hidden = hidden if mlp.latent is None else mlp.latent.size
    inner = (mlp.activation.num_parts + 1) * mlp.inner_size // world_size
    return max(mlp.rule.top_k * (2 * hidden + inner), shared)


def overhead_bytes(world_size: int, *, is_gpu: bool) -> int:
    """Estimate of memory that torch does not count: CUDA context, kernels, graphs, NCCL's buffers; on CPUs the
    interpreter."""
    if not is_gpu:
        return 512 * MIB
    return int(1.25 * GIB) + (GIB if world_size > 1 else 0)
