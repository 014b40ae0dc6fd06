"""Compare the compiled kernels with their PyTorch twins on small inputs, before anything depends on them."""

import ctypes
from collections.abc import Iterator
from typing import TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F

from tp_engine.cpu.kernels import block_codes as native_block_codes
from tp_engine.cpu.kernels import delta, experts, ops
from tp_engine.cpu.kernels import index as native_index
from tp_engine.cpu.kernels import latents as native_latents
from tp_engine.cpu.kernels import mamba2 as native_mamba2
from tp_engine.cpu.kernels import short_conv as native_short_conv
from tp_engine.cpu.kernels.experts import NativeExperts, NativeQuantisedExperts
from tp_engine.cpu.kernels.layout import DTYPE_CODES
from tp_engine.cpu.kernels.linear import NativeInt8Rows, PackedWeight
from tp_engine.cpu.kernels.paged_attention import PagedAttention, in_kernel_order
from tp_engine.cpu.kernels.quantised import QuantisedPanels
from tp_engine.kernels import layer_ops, mamba2, short_conv
from tp_engine.kernels.attention import heads as head_twins
from tp_engine.kernels.attention import index_keys, latents
from tp_engine.kernels.attention.heads import HeadNorm, Rotation
from tp_engine.kernels.attention.plain_attention import attend
from tp_engine.kernels.experts import routing
from tp_engine.kernels.experts.experts import (
    ExpertWeights,
    QuantisedExpertWeights,
    add_gated,
    mix_experts,
    mix_quantised_experts,
)
from tp_engine.kernels.gated_delta_net import (
    DeltaRule,
    gated_delta_net_decode,
    gated_delta_net_prefill,
)
from tp_engine.kernels.kv_cache import block_codes
from tp_engine.kernels.kv_cache.layer_kv import LayerKv
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.linear import adapters
from tp_engine.kernels.quantization.int8_rows import TorchInt8Rows
from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, multiply_quantised, values_per_byte
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kv_layout import StateKind
from tp_engine.model_config.mlp import Activation, ActivationKind, RoutingRule

_ACTIVATIONS = tuple(Activation(kind) for kind in get_args(ActivationKind))

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 4, 2, 24, 4
# (queries, keys) of each request.
_REQUESTS = ((1, 9), (3, 40))
_SCALE, _SOFTCAP = 0.2, 1.5
_ROUTING_RULES = (
    RoutingRule(top_k=2, scores="softmax_of_chosen"),
    RoutingRule(top_k=3, scores="sigmoid", renormalises=True, num_groups=4, top_groups=2),
    RoutingRule(top_k=3, num_groups=4, top_groups=2, group_best=1),
    RoutingRule(top_k=3, renormalises=True, factor=2.0),
)

_LARGEST: dict[Codes, float] = {"int4": 16.0, "int8": 136.0, "e4m3": 448.0, "e2m1": 6.0}

Check: TypeAlias = tuple[str, torch.Tensor, torch.Tensor]
"""A kernel's name, its result, and the right one."""


def disagreement(library: ctypes.CDLL) -> str | None:
    """Return the first kernel of ``library`` with a wrong result, as a sentence, or None.  Takes a few milliseconds."""
    for dtype in DTYPE_CODES:
        generator = torch.Generator().manual_seed(0)
        for name, found, expected in (
            *_rows(library, dtype, generator),
            *_heads(library, dtype, generator),
            *_delta(library, dtype, generator),
            *_mamba2(library, dtype, generator),
            *_short_conv(library, dtype, generator),
            *_linear(library, dtype, generator),
            *_quantised(library, dtype, generator),
            *_experts(library, dtype, generator),
            *_attention(library, dtype, generator),
            *_latents(library, dtype, generator),
            *_chosen_keys(library, dtype, generator),
            *_block_codes(library, dtype, generator),
            *_adapters(library, dtype, generator),
            *_int8_rows(NativeInt8Rows(library), dtype, generator),
        ):
            tolerance = 16 * torch.finfo(dtype).eps
            if not torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance):
                return f"{name} in {dtype} differs from PyTorch"
    return None


def _rows(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """Operations on rows."""
    x, residual = torch.randn(2, 3, 40, generator=generator).to(dtype)
    weight = torch.randn(40, generator=generator).to(dtype)
    for rule in (NormRule(weight, 1e-5), NormRule(weight, 1e-5, offset=1.0, is_centred=True)):
        yield "norm", ops.norm(library, x, rule), layer_ops.norm(x, rule)
        found, expected = residual.clone(), residual.clone()
        yield "add_norm", ops.add_norm(library, x, found, rule, 0.5), layer_ops.add_norm(x, expected, rule, 0.5)
        yield "add_norm", found, expected
        ops.add(library, x, found, 0.25)
        layer_ops.add(x, expected, 0.25)
        yield "add", found, expected
    target = torch.zeros_like(x)
    ops.copy_rows(library, x[:, :8], target[:, 20:28])
    yield "copy_rows", target, F.pad(x[:, :8], (20, 12))
    for kind in _ACTIVATIONS:
        yield f"gate by {kind.kind}", ops.gate(library, x, kind), layer_ops.gate(x, kind)
    ids = torch.tensor([1, 4, 2], dtype=torch.int32)
    yield "embed", ops.embed(library, ids, x, 1, 3.0), layer_ops.embed(ids, x, 1, 3.0)
    for cap in (None, 2.0):
        found, expected = x * 3, x * 3
        ops.cap_logits(library, found, 0.5, cap)
        layer_ops.cap_logits(expected, 0.5, cap)
        yield "cap_logits", found, expected


def _delta(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """The gated delta rule, with heads that vectors do not divide, and the gate of attention's output."""
    kind = StateKind(num_key_heads=2, num_value_heads=4, key_dim=12, value_dim=40, taps=3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    rule = DeltaRule(kind, draw(3, kind.num_channels), -draw(4).abs(), draw(4), draw(40), 1e-6)
    mixed, gates = draw(3, kind.num_channels + 160).to(dtype), draw(3, 8).to(dtype)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32)
    states = [LayerStates(draw(4, 2, kind.num_channels), draw(4, 4, 12, 40))]
    states.append(LayerStates(*(part.clone() for part in states[0])))
    found = delta.gated_delta_net_decode(library, mixed, gates, rule, states[0], slots)
    expected = gated_delta_net_decode(mixed, gates, rule, states[1], slots)
    yield "gated_delta_net_decode", found[::2], expected[::2]
    chunks = [Chunk(0, 2, 1, False), Chunk(2, 1, 0, True)]
    yield (
        "gated_delta_net_prefill",
        delta.gated_delta_net_prefill(library, mixed, gates, rule, states[0], chunks),
        gated_delta_net_prefill(mixed, gates, rule, states[1], chunks),
    )
    for one, other in zip(*states, strict=True):
        yield "the delta rule's states", one[:3], other[:3]
    gated, expected = mixed[:, :20].contiguous(), mixed[:, :20].contiguous()
    delta.sigmoid_gate(library, gated, mixed[:, 20:40])
    layer_ops.sigmoid_gate(expected, mixed[:, 20:40])
    yield "sigmoid_gate", gated, expected


def _mamba2(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """The state space layer and its norm, with heads that vectors do not divide; sums are of the size of 1."""
    kind = StateKind(num_key_heads=2, num_value_heads=4, key_dim=12, value_dim=40, taps=3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    channels = kind.num_channels
    rule = mamba2.Mamba2Rule(kind, draw(3, channels) / 4, draw(channels), -draw(4).abs(), draw(4), draw(4))
    mixed, slots = (draw(3, channels + 164) / 4).to(dtype), torch.tensor([2, -1, 0], dtype=torch.int32)
    states = [LayerStates(draw(4, 2, channels) / 4, draw(4, 4, 12, 40) / 4)]
    states.append(LayerStates(*(part.clone() for part in states[0])))
    found = native_mamba2.mamba2_decode(library, mixed, rule, states[0], slots)
    expected = mamba2.mamba2_decode(mixed, rule, states[1], slots)
    yield "mamba2_decode", found[::2], expected[::2]
    chunks = [Chunk(0, 2, 1, False), Chunk(2, 1, 0, True)]
    expected = mamba2.mamba2_prefill(mixed, rule, states[1], chunks)
    yield "mamba2_prefill", native_mamba2.mamba2_prefill(library, mixed, rule, states[0], chunks), expected
    for one, other in zip(*states, strict=True):
        yield "the state space layer's states", one[:3], other[:3]
    squares = mamba2.group_squares(expected, 2)
    yield "group_squares", native_mamba2.group_squares(library, expected, 2), squares
    weight = draw(160).to(dtype)
    for own, size in ((None, 80), (squares, 160)):
        arguments = (expected, weight, 2, 1e-5, own, size)
        yield "norm_groups", native_mamba2.norm_groups(library, *arguments), mamba2.norm_groups(*arguments)


def _short_conv(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """The short convolution, with channels that vectors do not divide."""
    kind = StateKind(num_key_heads=1, num_value_heads=37, key_dim=0, value_dim=1, taps=3)
    mixed, slots = torch.randn(3, 111, generator=generator).to(dtype), torch.tensor([2, -1, 0], dtype=torch.int32)
    rule = short_conv.ShortConvRule(kind, torch.randn(3, 37, generator=generator))
    kept, nothing = torch.randn(4, 2, 37, generator=generator), torch.empty(4, 37, 0, 1)
    states = [LayerStates(kept, nothing), LayerStates(kept.clone(), nothing)]
    found = native_short_conv.short_conv_decode(library, mixed, rule, states[0], slots)
    yield "short_conv_decode", found[::2], short_conv.short_conv_decode(mixed, rule, states[1], slots)[::2]
    chunks = [Chunk(0, 2, 1, False), Chunk(2, 1, 0, True)]
    found = native_short_conv.short_conv_prefill(library, mixed, rule, states[0], chunks)
    yield "short_conv_prefill", found, short_conv.short_conv_prefill(mixed, rule, states[1], chunks)
    yield "the short convolution's states", states[0].conv[:3], states[1].conv[:3]


def _heads(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """Operations on queries and keys."""
    heads = torch.randn(3, _HEADS + 2 * _KV_HEADS, _HEAD_DIM, generator=generator).to(dtype)
    weights = torch.randn(_HEADS + _KV_HEADS, _HEAD_DIM, generator=generator).to(dtype)
    head_norm = HeadNorm(q_weight=weights[0], k_weight=weights[-1], weights=weights, eps=1e-5, offset=1.0)
    positions, scale = torch.tensor([4, 0, 2]), torch.rand(5, generator=generator) + 0.5
    tables = [torch.randn(5, size, generator=generator).to(dtype) for size in (_HEAD_DIM, 10)]
    for own_norm, rotation in (
        (None, Rotation(tables[0], positions)),
        (head_norm, Rotation(tables[1], positions, scale)),
    ):
        arguments = (_KV_HEADS, own_norm, rotation, None, positions)
        found, expected = (
            ops.qk_norm_rope_store(library, heads.clone(), *arguments),
            head_twins.qk_norm_rope_store(heads, *arguments),
        )
        for one, twin in zip(found, expected, strict=True):
            assert one is not None and twin is not None
            yield "qk_norm_rope_store", one, twin
    counts = (_HEADS, _KV_HEADS)
    squares = head_twins.head_squares(heads, *counts)
    yield "head_squares", ops.head_squares(library, heads, *counts), squares
    widths = (_HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM)
    own, other = heads.clone(), heads.clone()
    ops.norm_width(library, own, *counts, squares, weights, widths, 1e-5)
    head_twins.norm_width(other, *counts, squares, weights, widths, 1e-5)
    yield "norm_width", own, other


def _linear(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """Seven rows times a weight of odd sizes, and the same by PyTorch in float64: on some processors PyTorch's float32
    is less exact than ours."""
    shapes = ((7, 86), (37, 86), (37,))
    x, weight, bias = ((torch.randn(*shape, generator=generator) / 3).to(dtype) for shape in shapes)
    expected = F.linear(x.double(), weight.double(), bias.double())
    yield "packed_linear", PackedWeight(library, weight)(x, bias), expected
    for rule in _ACTIVATIONS:
        gated = PackedWeight(library, weight[:36], activation=rule)
        yield f"packed_linear with {rule.kind}", gated(x, bias[:36]), layer_ops.gate(expected[:, :36], rule)
        yield "packed_linear of both parts", gated.before_activation(x, bias[:36]), expected[:, :36]
    ids = torch.tensor([36, 0, 50, 17], dtype=torch.int32)
    wanted = torch.where(ids[:, None] < 37, weight[ids.clamp(max=36).long()], 0.0) * 2
    yield "embed_panels", PackedWeight(library, weight).rows(ids, None, 2.0), wanted


def _quantised_weight(kind: Codes, shape: tuple[int, ...], generator: torch.Generator) -> QuantisedWeight:
    """Groups of 8 columns; zeros if the kind may have them."""
    *outer, in_size = shape
    codes = torch.randint(256, (*outer, in_size // values_per_byte(kind)), generator=generator).to(torch.uint8)
    groups = (*outer, -(-in_size // 8))
    zeros = torch.randint(-128, 128, groups, generator=generator).to(torch.int8)
    return QuantisedWeight(
        kind=kind,
        codes=codes.masked_fill(codes & 127 == 127, 1),  # no NaN
        scales=((torch.rand(groups, generator=generator) + 0.5) / _LARGEST[kind]).bfloat16(),
        group=8,
        zeros=zeros if kind.startswith("int") else None,
        factors=torch.rand(outer, generator=generator) + 0.5,
    )


def _quantised(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """Two rows, and more than a tile, times a weight of odd sizes."""
    x, bias = ((torch.randn(*shape, generator=generator) / 3).to(dtype) for shape in ((7, 88), (37,)))
    for kind in get_args(Codes):
        weight = _quantised_weight(kind, (37, 88), generator)
        expected = multiply_quantised(x.double(), weight, bias.double())
        product = QuantisedPanels(library, weight, dtype)
        for rows in (2, 7):
            yield f"quantised_linear of {kind}", product(x[:rows], bias), expected[:rows]


def _experts(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """Routing, and the experts that are routed to."""
    logits, x = torch.randn(5, 8, generator=generator).to(dtype), torch.randn(5, 24, generator=generator).to(dtype)
    correction = torch.randn(8, generator=generator)
    for rule in _ROUTING_RULES:
        found, expected = experts.route(library, logits, rule, correction), routing.route(logits, rule, correction)
        yield f"route by {rule.scores}", found[0], expected[0]
        yield f"route by {rule.scores}", found[1].to(dtype), expected[1].to(dtype)
    ids, shares = expected
    gate_up, down = torch.randn(8, 40, 24, generator=generator) * 0.2, torch.randn(8, 24, 20, generator=generator) * 0.2
    biases = torch.randn(8, 40, generator=generator).to(dtype), torch.randn(8, 24, generator=generator).to(dtype)
    for activation in (_ACTIVATIONS[0], _ACTIVATIONS[-1]):
        rows = 20 * activation.num_parts
        weights = ExpertWeights(
            gate_up=gate_up[:, :rows].to(dtype),
            down=down.to(dtype),
            gate_up_bias=biases[0][:, :rows],
            down_bias=biases[1],
            first=0,
            activation=activation,
        )
        yield "mix_experts", NativeExperts(library, weights, 3)(x, ids, shares), mix_experts(x, ids, shares, weights)
    quantised = QuantisedExpertWeights(
        gate_up=_quantised_weight("int4", (8, 40, 24), generator),
        down=_quantised_weight("e4m3", (8, 24, 20), generator),
        gate_up_bias=biases[0],
        down_bias=biases[1],
        first=0,
        activation=_ACTIVATIONS[0],
    )
    found_mix = NativeQuantisedExperts(library, quantised, dtype, 3)(x, ids, shares)
    yield "mix_experts, quantised", found_mix, mix_quantised_experts(x, ids, shares, quantised)
    found_sum, expected_sum = x.clone(), x.clone()
    experts.add_gated(library, found_sum, x, logits[:, 2:3])
    add_gated(expected_sum, x, logits[:, 2:3])
    yield "add_gated", found_sum, expected_sum


def _latents(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """Latent attention's small operations, for more tokens than share what is read; then the attention to its rows."""
    query, rows, up = (
        (torch.randn(*shape, generator=generator) * size).to(dtype)
        for shape, size in (((5, 2, 14), 1), ((5, 40), 1), ((2, 17, 36), 0.1))
    )
    rotation = Rotation(torch.randn(9, 4, generator=generator).to(dtype), torch.arange(5))
    given = (NormRule(torch.randn(36, generator=generator).to(dtype), 1e-6), rotation, True, None, torch.zeros(5))
    expected = latents.prepare_latents(query, rows, *given)
    found = native_latents.prepare_latents(library, query.clone(), rows.clone(), *given)
    for one, other in zip(found, expected, strict=True):
        assert one is not None and other is not None
        yield "prepare_latents", one, other
    absorbed, twin = native_latents.absorb_w_uk(library, query, up, 10), latents.absorb_w_uk(query, up, 10)
    yield "absorb_w_uk", absorbed, twin
    means = twin[..., :36].contiguous()
    yield "project_w_uv", native_latents.project_w_uv(library, means, up, 10), latents.project_w_uv(means, up, 10)
    cache = torch.randn(1, 13, _BLOCK_SIZE, 1, 40, generator=generator).to(dtype)
    table, out = torch.randperm(13, generator=generator).int().view(1, 13), torch.empty_like(means[:2])
    attention = PagedAttention(library)
    queries, start, keys = (np.array([length], dtype=np.int32) for length in (2, 0, 50))
    attention.set_step(queries, start, keys, table, torch.full((2,), -1))
    attention(absorbed[:2], None, cache, out, scale=_SCALE)
    kept = cache[0, table[0].long()].view(1, 52, 40)[:, :50].float()
    hidden = torch.full((2, 50), float("-inf")).triu(49)
    by_head = absorbed[:2].float().transpose(0, 1)
    attended = attend(by_head, kept, kept[..., :36], hidden, scale=_SCALE, softcap=None, sinks=None)
    yield "paged_attention of latents", out, attended.transpose(0, 1)


def _chosen_keys(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """One decode's choice, of whole numbers, so that neither types nor the order of sums change a score; then attention
    to rows at the chosen places."""
    table = torch.randperm(13, generator=generator).int().view(1, 13)
    query, keys, weights = (torch.randint(-2, 3, size, generator=generator) for size in ((1, 3, 8), (52, 8), (1, 3)))
    index_kv = LayerKv(keys.to(dtype).view(1, 13, _BLOCK_SIZE, 1, 8))
    given = (query.to(dtype), weights.float(), 1.0, index_kv, table, torch.tensor([50], dtype=torch.int32), 9)
    chosen, expected = native_index.choose_keys(library, *given), index_keys.choose_keys(*given)
    yield "choose_keys", chosen.positions, expected.positions
    heads, cache = (
        torch.randn(*size, generator=generator).to(dtype) for size in ((1, 2, 24), (1, 13, _BLOCK_SIZE, 1, 24))
    )
    attention, out = PagedAttention(library), torch.empty(1, 2, 20, dtype=dtype)
    one, start, length = (np.array([number], dtype=np.int32) for number in (1, 0, 50))
    attention.set_step(one, start, length, table, torch.full((1,), -1))
    attention(heads, None, cache, out, scale=_SCALE, chosen=chosen)
    rows = cache[0, table[0].long()].view(1, 52, 24)[:, expected.positions[0].long()].float()
    by_head, seen = heads.float().transpose(0, 1), torch.zeros(1, 9)
    attended = attend(by_head, rows, rows[..., :20], seen, scale=_SCALE, softcap=None, sinks=None)
    yield "paged_attention to chosen keys", out, attended.transpose(0, 1)


def _int8_rows(rows: NativeInt8Rows, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """Rows of numbers that are codes already, so that rounding can not differ."""
    twin = TorchInt8Rows()
    x = torch.randint(-127, 128, (3, 40), generator=generator).to(dtype)
    x[:, 7] = -127
    products, bias = torch.randn(3, 40, generator=generator), torch.randn(40, generator=generator).to(dtype)
    (codes, scales), (expected, expected_scales) = rows.quantise(x), twin.quantise(x)
    yield "quantise_rows", codes, expected
    yield "quantise_rows", scales, expected_scales
    found = rows.scale(products, scales, bias, dtype)
    yield "scale_rows", found, twin.scale(products, expected_scales, bias, dtype)


def _block_codes(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """Two blocks whose keys are columns, and what they become when they come back."""
    pairs = np.array([[1, 0], [0, 1]], dtype=np.int32)
    form = block_codes.BlockForm(
        num_parts=2,
        block_size=16,
        num_kv_heads=1,
        head_dim=40,
        dtype=dtype,
        simd_width=native_block_codes.simd_width_of(library, 16),
    )
    pool = torch.randint(-7, 8, (2, form.num_vectors * 40), generator=generator).to(dtype)
    pool[:, ::40] = pool[:, 1::40] = 7
    blocks = pool.view(torch.uint8)
    for codes in (torch.int8, torch.float8_e4m3fn):
        blobs, twin = torch.zeros(2, 2, form.blob_bytes, dtype=torch.uint8)
        native_block_codes.encode_blocks(library, blocks, blobs, pairs, form, codes)
        block_codes.encode_blocks(blocks, twin, pairs, form, codes)
        back, expected = torch.zeros(2, *blocks.shape, dtype=torch.uint8)
        native_block_codes.decode_blocks(library, blobs, back, pairs, form, codes)
        block_codes.decode_blocks(twin, expected, pairs, form, codes)
        yield f"blocks in {codes}", back.view(dtype), expected.view(dtype)


def _adapters(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """A product of two parts, seven rows of which have one of two adapters, of ranks 5 and 2."""
    weights = adapters.AdapterWeights(
        a=torch.randn(2, 10, 37, generator=generator).to(dtype) / 8,
        b=torch.randn(2, 5, 93, generator=generator).to(dtype) / 8,
        ranks=torch.tensor([5, 2], dtype=torch.int32),
        part_sizes=(70, 23),
    )
    weights.a[1].view(2, 5, 37)[:, 2:], weights.b[1, 2:] = 0, 0
    rows, tiles = adapters.group_rows(np.array([0, -1, 1, 0, 0, 0, -1, 0, 1]))
    grouped = adapters.AdapterRows(rows=torch.from_numpy(rows), tiles=torch.from_numpy(tiles), host_tiles=tiles)
    x, found = (torch.randn(9, size, generator=generator).to(dtype) for size in (37, 93))
    expected = found.clone()
    ops.add_adapters(library, found, x, weights, grouped)
    adapters.add_adapters(expected, x, weights, grouped)
    yield "add_adapters", found, expected


def _attention(library: ctypes.CDLL, dtype: torch.dtype, generator: torch.Generator) -> Iterator[Check]:
    """Output of two requests in scattered blocks, and the same by softmax over explicit scores."""
    query_lens, seq_lens = (np.array(column, dtype=np.int32) for column in zip(*_REQUESTS, strict=True))
    num_tokens, num_blocks = int(query_lens.sum()), 14
    blocks = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    table = torch.zeros(2, 10, dtype=torch.int32)
    table[0, :3], table[1, :10] = blocks[:3], blocks[3:13]
    kv_cache = torch.randn(2, num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, generator=generator).to(dtype)
    query = torch.randn(num_tokens, _HEADS, _HEAD_DIM, generator=generator).to(dtype)
    starts = np.cumsum(query_lens, dtype=np.int32) - query_lens
    sinks = torch.randn(_HEADS, generator=generator)
    attention, cache = PagedAttention(library), in_kernel_order(library, kv_cache)
    attention.set_step(query_lens, starts, seq_lens, table, torch.full((num_tokens,), -1))
    for name, softcap, own_sinks in (
        ("paged_attention", None, None),
        ("paged_attention with a softcap and sinks", _SOFTCAP, sinks),
    ):
        out = torch.empty_like(query)
        attention(query, None, cache, out, scale=_SCALE, softcap=softcap, sinks=own_sinks)
        expected = [
            _attend_plainly(
                query[start : start + length], kv_cache[:, row.long()].flatten(1, 2)[:, :total], softcap, own_sinks
            )
            for start, length, total, row in zip(starts, query_lens, seq_lens, table, strict=True)
        ]
        yield name, out, torch.cat(expected)


def _attend_plainly(
    query: torch.Tensor, keys_values: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None
) -> torch.Tensor:
    """``query`` (n, heads, head_dim), the last of ``keys_values`` (2, tokens, KV heads, head_dim); in float32."""
    keys, values = keys_values.float().repeat_interleave(_HEADS // _KV_HEADS, 2).transpose(1, 2)
    num_queries, num_keys = len(query), keys.shape[1]
    hidden = torch.full((num_queries, num_keys), float("-inf")).triu(num_keys - num_queries + 1)
    by_head, own_sinks = query.float().transpose(0, 1), None if sinks is None else sinks.view(-1, 1, 1)
    out = attend(by_head, keys, values, hidden, scale=_SCALE, softcap=softcap, sinks=own_sinks)
    return out.transpose(0, 1)
