"""Parameters of one rank, and the bytes of its weights: in the model's type, or as codes and scales."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any, TypeAlias

from tp_engine.advice.sizes import ITEMSIZES, local_heads, local_rows, local_vocab_size
from tp_engine.kv_layout import StateKind
from tp_engine.model_config.mlp import ExpertsSpec, MlpSpec, block_bounds, local_inner_size
from tp_engine.model_config.quantization import Packing, WeightScheme
from tp_engine.model_config.recurrent import GatedDeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, ModelSpec
from tp_engine.units import ceil_div

_FLOAT32 = 4
# Bytes of a scale; packed integers have scales of the model's type.
_SCALES: dict[Packing, int] = {
    "plain": _FLOAT32,
    "awq": 2,
    "gptq": 2,
    "gptq_v2": 2,
    "mxfp4": 1,
    "mxfp4-packed": 1,
    "nvfp4": 1,
    "modelopt-nvfp4": 1,
}
_WITH_FACTORS: tuple[Packing, ...] = ("nvfp4", "modelopt-nvfp4")

Schemes: TypeAlias = tuple[WeightScheme | None, ...]

_PER_ROW = WeightScheme(packing="plain", kind="int8")


@dataclass(frozen=True, slots=True)
class _Online:
    """What ``--quantization`` makes of linear layers, of experts and of the output head (``layers/quantization/``)."""

    linear: WeightScheme
    experts: WeightScheme | None
    head: WeightScheme | None = None


_E4M3 = WeightScheme(packing="plain", kind="e4m3")
_INT4 = WeightScheme(packing="modelopt-nvfp4", kind="int4", group=32, has_zeros=True)  # scales of 8 bits, factors
_ONLINE = {"int8": _Online(_PER_ROW, None), "fp8": _Online(_E4M3, _E4M3), "int4": _Online(_INT4, _INT4, _PER_ROW)}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """``count`` weights of ``rows`` x ``columns`` on this rank.

    ``modules`` are its parts, below the layer.  ``row_cuts`` and ``column_cuts`` are the places, in stored tensors and
    on this rank, at which parts or shares end.
    """

    modules: tuple[str, ...]
    rows: int
    columns: int
    row_cuts: tuple[int, ...] = ()
    column_cuts: tuple[int, ...] = ()
    count: int = 1
    is_expert: bool = False

    @property
    def num_parameters(self) -> int:
        return self.count * self.rows * self.columns


def local_parameters(model: ModelSpec, world_size: int, *, active_only: bool = False) -> int:
    """Parameters of one of ``world_size`` ranks, with the padding of the vocabulary.

    ``active_only`` counts those that one token meets: of experts, the ones that it goes to.
    """
    found = _outside_of_layers(model, world_size, active_only=active_only)
    for layer, count in model.distinct_layers.items():
        products = _products(model.hidden_size, layer, world_size, active_only=active_only)
        found += count * sum(one.num_parameters for one in products)
        found += count * _others(model.hidden_size, layer, world_size, active_only=active_only)
    return found


def local_weight_bytes(
    model: ModelSpec, world_size: int, *, dtype: str, quantization: str | None = None, active_only: bool = False
) -> int:
    """Bytes of the weights of one of ``world_size`` ranks, as the checkpoint or ``quantization`` (online) keeps them.
    Each rank has all of a vision tower.

    Embedding, norms, routers and biases have ``dtype``; so has the output head, unless the checkpoint quantises it, or
    int4 does, which gives it 8 bits.
    """
    itemsize, hidden = ITEMSIZES[dtype], model.hidden_size
    found = _outside_of_layers(model, world_size, active_only=active_only) * itemsize
    if model.vision is not None and model.vision.is_served:
        found += model.vision.num_parameters * itemsize
    online = None if quantization is None or model.quantization is not None else _ONLINE[quantization]
    of_checkpoint = None if model.is_tied else model.scheme_of("lm_head")
    if (head_scheme := of_checkpoint if online is None else online.head) is not None:
        head = _Product(modules=(), rows=local_vocab_size(model, world_size), columns=hidden)
        dense = 0 if model.is_tied else head.num_parameters * itemsize
        found += _weight_bytes(head, head_scheme, itemsize) - dense
    for (layer, schemes), count in _kinds(model, online).items():
        products = _products(hidden, layer, world_size, schemes=schemes, active_only=active_only)
        if online is not None:  # each rank's groups begin at its first column
            products = [replace(one, column_cuts=()) for one in products]
        found += count * _others(hidden, layer, world_size, active_only=active_only) * itemsize
        pairs = zip(products, schemes, strict=False)
        found += count * sum(one.count * _weight_bytes(one, scheme, itemsize) for one, scheme in pairs)
    return found


def _kinds(model: ModelSpec, online: _Online | None) -> dict[tuple[LayerSpec, Schemes], int]:
    """Each kind of layer with the schemes of its products, and how many there are."""

    def schemes_of(path: str, layer: LayerSpec) -> Schemes:
        products = _products(model.hidden_size, layer, 1)
        if online is not None:
            return tuple(online.experts if one.is_expert else online.linear for one in products)
        return tuple(model.scheme_of(*(f"{path}.{name}" for name in one.modules)) for one in products)

    if model.quantization is None:
        return {(layer, schemes_of("", layer)): count for layer, count in model.distinct_layers.items()}
    return Counter((layer, schemes_of(path, layer)) for path, layer in model.layers_by_path.items())


def _weight_bytes(product: _Product, scheme: WeightScheme | None, itemsize: int) -> int:
    """Codes, scales, zeros and factors of one weight (``kernels/quantization/weights.py``)."""
    rows, columns = product.rows, product.columns
    if scheme is None:
        return rows * columns * itemsize
    # An odd number of codes of 4 bits is kept in 8.
    found = rows * columns * scheme.bits // 8 if columns % 2 == 0 else rows * columns
    if scheme.packing == "plain" and scheme.group is None:
        return found + rows * _FLOAT32
    groups = ceil_div(columns, gcd(scheme.group, *product.column_cuts)) if scheme.group else 1
    row_block = gcd(scheme.row_block or 1, *product.row_cuts)
    found += ceil_div(rows, row_block) * groups * _SCALES.get(scheme.packing, itemsize)
    found += rows * groups if scheme.has_zeros else 0
    return found + (rows * _FLOAT32 if scheme.packing in _WITH_FACTORS else 0)


def _products(
    hidden: int, layer: LayerSpec, world_size: int, *, schemes: Schemes | None = None, active_only: bool = False
) -> list[_Product]:
    """The linear weights of a layer that can be quantised; ``schemes`` are theirs, in the same order."""
    attention, found = layer.attention, list[_Product]()
    if isinstance(attention, AttentionSpec):
        found += _products_of_attention(hidden, attention, world_size)
    elif attention is not None:
        found += _SIZES[type(attention)].products(hidden, attention, world_size)
    for mlp in layer.mlps:
        scheme = None if schemes is None else schemes[len(found)]
        found += _products_of_mlp(hidden, mlp, mlp.name, world_size, scheme, active_only)
    if layer.embedding is not None:
        size = layer.embedding.size
        found.append(_Product(modules=("per_layer_input_gate",), rows=size, columns=hidden))
        found.append(_Product(modules=("per_layer_projection",), rows=hidden, columns=size))
    return found


def _products_of_attention(hidden: int, attention: AttentionSpec, world_size: int) -> list[_Product]:
    """The projections of the stream, those of a query's latent, and the output's."""
    num_heads, num_kv_heads = local_heads(attention, world_size)
    latent, width = attention.latent, num_heads * attention.value_dim
    if latent is None:
        queries, keys = num_heads * attention.head_dim, num_kv_heads * attention.head_dim
        keys = keys if attention.kv_source is None else 0
        modules = _below("self_attn", attention.fused_name, *attention.projections)
        rows = queries * (2 if attention.has_gate else 1) + 2 * keys
        found = [_Product(modules=modules, rows=rows, columns=hidden, row_cuts=(queries, keys or queries))]
    else:
        first, queries = latent.down_rows(num_heads), num_heads * latent.query_dim
        modules = _below("self_attn", None, "q_a_proj" if latent.query_rank else "q_proj", "kv_a_proj_with_mqa")
        cuts = (first, latent.row_dim)
        found = [_Product(modules=modules, rows=first + latent.row_dim, columns=hidden, row_cuts=cuts)]
        if latent.query_rank:
            found.append(_Product(modules=("self_attn.q_b_proj",), rows=queries, columns=first, row_cuts=(queries,)))
        if latent.index is not None and latent.index.source is None:
            sizes = {"wq_b": (latent.index.num_heads * latent.index.dim, first), "wk": (latent.index.dim, hidden)}
            found += [
                _Product(modules=(f"self_attn.indexer.{name}",), rows=rows, columns=columns)
                for name, (rows, columns) in sizes.items()
            ]
    return [*found, _row_parallel("self_attn.o_proj", hidden, width, world_size)]


def _products_of_delta(hidden: int, delta: GatedDeltaNetSpec, world_size: int) -> list[_Product]:
    own, path = delta.kv_kind.on(world_size), delta.name
    keys, values = own.num_key_heads * own.key_dim, own.num_value_heads * own.value_dim
    inputs, gates = (
        (("in_proj_qkvz",), ("in_proj_ba",))
        if delta.is_fused
        else (("in_proj_qkv", "in_proj_z"), ("in_proj_b", "in_proj_a"))
    )
    return [
        _Product(
            modules=_below(path, None, *inputs), rows=2 * (keys + values), columns=hidden, row_cuts=(keys, values)
        ),
        _Product(
            modules=_below(path, None, *gates),
            rows=2 * own.num_value_heads,
            columns=hidden,
            row_cuts=(own.num_value_heads,),
        ),
        _row_parallel(f"{path}.out_proj", hidden, values, world_size),
    ]


def _products_of_short_conv(hidden: int, conv: ShortConvSpec, world_size: int) -> list[_Product]:
    own = conv.num_channels // world_size
    return [
        _Product(modules=(f"{conv.name}.in_proj",), rows=3 * own, columns=hidden, row_cuts=(own,)),
        _row_parallel(f"{conv.name}.out_proj", hidden, own, world_size),
    ]


def _products_of_mamba2(hidden: int, mamba: Mamba2Spec, world_size: int) -> list[_Product]:
    own, path = mamba.kv_kind.on(world_size), mamba.name
    keys, values, heads = own.num_key_heads * own.key_dim, own.num_value_heads * own.value_dim, own.num_value_heads
    rows = 2 * (keys + values) + heads
    return [
        _Product(modules=(f"{path}.in_proj",), rows=rows, columns=hidden, row_cuts=(keys, values, heads)),
        _row_parallel(f"{path}.out_proj", hidden, values, world_size),
    ]


@dataclass(frozen=True, slots=True)
class _RecurrentSizes:
    """What ``_products`` and ``_others`` count of a layer with a recurrent state; the latter from a rank's part."""

    products: Callable[[int, Any, int], list[_Product]]
    others: Callable[[StateKind], int]


_SIZES: dict[type[RecurrentSpec], _RecurrentSizes] = {
    GatedDeltaNetSpec: _RecurrentSizes(
        _products_of_delta, lambda own: own.taps * own.num_channels + 2 * own.num_value_heads + own.value_dim
    ),
    ShortConvSpec: _RecurrentSizes(_products_of_short_conv, lambda own: own.taps * own.num_channels),
    Mamba2Spec: _RecurrentSizes(
        _products_of_mamba2,
        lambda own: (own.taps + 1) * own.num_channels + (3 + own.value_dim) * own.num_value_heads,
    ),
}


def _row_parallel(module: str, hidden: int, columns: int, world_size: int) -> _Product:
    cuts = _cuts(world_size, columns)
    return _Product(modules=(module,), rows=hidden, columns=columns, row_cuts=(hidden,), column_cuts=cuts)


def _products_of_mlp(
    hidden: int, mlp: MlpSpec | ExpertsSpec, path: str, world_size: int, scheme: WeightScheme | None, active_only: bool
) -> Iterator[_Product]:
    """Gate and up, then down; of experts, then those of the shared MLP.  ``scheme`` is that of gate and up."""
    if isinstance(mlp, MlpSpec):
        inner = mlp.inner_size // world_size
        parts = mlp.activation.num_parts
        modules = _below(path, mlp.fused_name, *("gate_proj", "up_proj")[-parts:])
        yield _Product(modules=modules, rows=parts * inner, columns=hidden, row_cuts=(inner,))
        cuts = _cuts(world_size, inner)
        yield _Product(
            modules=_below(path, None, "down_proj"), rows=hidden, columns=inner, row_cuts=(hidden,), column_cuts=cuts
        )
        return
    block = 1 if scheme is None else scheme.experts_block
    room = local_inner_size(mlp.inner_size, world_size, block=block)
    cuts = tuple(block_bounds(mlp.inner_size, world_size, block=block)[1:-1])
    stored = mlp.named_by_rules
    names = dict.fromkeys(name.format(0) for name in (*stored.inputs(mlp.activation), stored.down))
    modules = _below(path, None, *names)
    count = mlp.rule.top_k if active_only else mlp.num_experts
    latent, stream = mlp.latent, hidden
    hidden = hidden if latent is None else latent.size
    rows, of_rows = mlp.activation.num_parts * room, (room, *cuts)
    yield _Product(modules=modules, rows=rows, columns=hidden, row_cuts=of_rows, count=count, is_expert=True)
    yield _Product(
        modules=modules, rows=hidden, columns=room, row_cuts=(hidden,), column_cuts=cuts, count=count, is_expert=True
    )
    if latent is not None:
        yield _Product(modules=_below(path, None, latent.down), rows=hidden, columns=stream)
        yield _Product(modules=_below(path, None, latent.up), rows=stream, columns=hidden)
    if mlp.shared is not None:
        (shared,) = _below(path, None, mlp.shared.name)
        yield from _products_of_mlp(stream, mlp.shared, shared, world_size, None, active_only)


def _below(path: str, fused: str | None, *names: str) -> tuple[str, ...]:
    """The modules below ``path``, which may be the layer itself; one, if they are fused."""
    return tuple(f"{path}.{name}" if path else name for name in ((fused,) if fused else names))


def _cuts(world_size: int, share: int) -> tuple[int, ...]:
    return (share,) if world_size > 1 else ()


def _others(hidden: int, layer: LayerSpec, world_size: int, *, active_only: bool) -> int:
    """Parameters of a layer that are never quantised: norms, biases, sinks, router, the maps from latents."""
    attention = layer.attention
    found = hidden * len(list(layer.norms)) + (layer.stream_scale is not None)
    found += sum(_others_of_mlp(hidden, mlp, world_size, active_only=active_only) for mlp in layer.mlps)
    if attention is None:
        return found
    if not isinstance(attention, AttentionSpec):
        return found + _SIZES[type(attention)].others(attention.kv_kind.on(world_size))
    num_heads = local_heads(attention, world_size)[0]
    queries, keys = (heads * attention.head_dim for heads in local_heads(attention, world_size))
    keys = keys if attention.kv_source is None else 0
    rows = queries * (2 if attention.has_gate else 1) + 2 * keys
    found += rows * attention.qkv_bias + hidden * attention.out_bias
    if attention.qk_norm is not None:
        found += queries + keys if attention.qk_norm.spans_heads else (2 if keys else 1) * attention.head_dim
    if attention.latent is not None:
        found += (num_heads * attention.latent.up_dim + 1) * attention.latent.rank + (attention.latent.query_rank or 0)
        if (index := attention.latent.index) is not None and index.source is None:
            found += index.num_heads * hidden + 2 * index.dim
    return found + num_heads * attention.has_sinks


def _others_of_mlp(hidden: int, mlp: MlpSpec | ExpertsSpec, world_size: int, *, active_only: bool) -> int:
    if isinstance(mlp, MlpSpec):
        return (mlp.activation.num_parts * mlp.inner_size // world_size + hidden) * mlp.bias
    biases = (mlp.activation.num_parts * local_inner_size(mlp.inner_size, world_size) + hidden) * mlp.bias
    found = biases * (mlp.rule.top_k if active_only else mlp.num_experts)
    per_expert = hidden + mlp.router_bias + (mlp.correction is not None) + (mlp.expert_scale is not None)
    found += per_expert * mlp.num_experts + hidden * (mlp.router_scale is not None)
    if mlp.shared is not None:
        found += _others_of_mlp(hidden, mlp.shared, world_size, active_only=active_only)
        found += hidden * (mlp.shared_gate is not None)
    return found


def _outside_of_layers(model: ModelSpec, world_size: int, *, active_only: bool) -> int:
    """The embedding, the output head unless it is the same, the last norm; norms and projection of a head (MTP); the
    table of embeddings for each layer, of which a token reads one row."""
    hidden, mtp = model.hidden_size, model.mtp
    found = hidden + local_vocab_size(model, world_size) * hidden * (1 if model.is_tied else 2)
    if mtp is not None:
        found += 2 * hidden * hidden // world_size + hidden * (2 + (mtp.final_norm is not None))
    if (own := model.layer_embedding) is not None:
        rows = 1 if active_only else local_rows(own.vocab_size, world_size)
        found += (rows + hidden) * model.num_layers * own.size + own.size
    return found
