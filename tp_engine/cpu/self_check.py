"""Compare the compiled kernels with their PyTorch twins on small inputs, before anything depends on them."""

import ctypes
from collections.abc import Iterator
from dataclasses import fields, replace
from types import ModuleType
from typing import Any, TypeAlias, get_args

import numpy as np
import torch
import torch.nn.functional as F

from tp_engine.cpu import block_codes as native_block_codes
from tp_engine.cpu import experts as native_experts
from tp_engine.cpu import index as native_index
from tp_engine.cpu import latents as native_latents
from tp_engine.cpu import ops, recurrent
from tp_engine.cpu.experts import NativeExperts
from tp_engine.cpu.layout import DTYPE_CODES
from tp_engine.cpu.linear import NativeInt8Rows, PackedWeight
from tp_engine.cpu.paged_attention import PagedAttention, in_kernel_order
from tp_engine.cpu.quantised import QuantisedPanels
from tp_engine.kernels import gated_delta_net, layer_ops, mamba2, short_conv
from tp_engine.kernels.attention import heads as head_twins
from tp_engine.kernels.attention import index_keys, latents
from tp_engine.kernels.attention.heads import HeadNorm, Rotation
from tp_engine.kernels.attention.plain_attention import attend
from tp_engine.kernels.experts import experts, routing
from tp_engine.kernels.experts.experts import ExpertWeights
from tp_engine.kernels.kv_cache import block_codes
from tp_engine.kernels.kv_cache.layer_kv import LayerKv, dequantise, is_quantised, quantise
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.linear import adapters
from tp_engine.kernels.quantization.int8_rows import TorchInt8Rows
from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, multiply_quantised, values_per_byte
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.steps import decode_inputs, draft_inputs
from tp_engine.model_config.kv_layout import StateKind
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
_WRITTEN = decode_inputs.RowTables, decode_inputs.DecodeInputs, draft_inputs.DraftInputs
_LARGEST: dict[Codes, float] = {"int4": 16.0, "int8": 136.0, "e4m3": 448.0, "e2m1": 6.0}

Check: TypeAlias = tuple[str, torch.Tensor, torch.Tensor]
"""A kernel's name, its result, and the right one."""


def disagreement(library: ctypes.CDLL) -> str | None:
    """Return the first kernel of ``library`` with a wrong result, as a sentence, or None.  Takes 0.05 s on one core."""
    for dtype in DTYPE_CODES:
        tolerance, checks = 16 * torch.finfo(dtype).eps, _Checks(library, dtype)
        for name, found, expected in checks.all():
            if not torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance):
                return f"{name} in {dtype} differs from PyTorch"
    return None


class _Checks:
    """The kernels of ``library`` for tensors of ``dtype``."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self.library, self.dtype = library, dtype
        self.generator = torch.Generator().manual_seed(0)

    def all(self) -> Iterator[Check]:
        """Return every check."""
        for checks in (
            self._rows, self._recurrent, self._heads, self._linear, self._quantised, self._experts, self._attention,
            self._latents, self._chosen_keys, self._block_codes, self._adapters, self._int8_rows, self._index,
            self._steps, self._blocks,
        ):  # fmt: skip
            yield from checks()

    def wide(self, *shape: int) -> torch.Tensor:
        """Return normal numbers, float32."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float32, device="cpu")

    def draw(self, *shape: int) -> torch.Tensor:
        """Return normal numbers of the type."""
        return self.wide(*shape).to(self.dtype)

    def both(
        self, native: ModuleType, twins: ModuleType, name: str, *given: Any, writes: bool = False
    ) -> Iterator[Check]:
        """Return what ``name`` of both modules makes of ``given``; if it ``writes``, or returns nothing, also what it
        leaves of the tensors among them."""
        own, other = _copies(given), _copies(given)
        found, expected = getattr(native, name)(self.library, *own), getattr(twins, name)(*other)
        if writes or found is None:
            found, expected = (found, own), (expected, other)
        for one, twin in zip(_tensors(found), _tensors(expected), strict=True):
            yield name, one, twin

    def _rows(self) -> Iterator[Check]:
        """Operations on rows."""
        x, residual, weight = self.draw(3, 40), self.draw(3, 40), self.draw(40)
        for rule in (NormRule(weight, 1e-5), NormRule(weight, 1e-5, offset=1.0, is_centred=True)):
            yield from self.both(ops, layer_ops, "norm", x, rule)
            yield from self.both(ops, layer_ops, "add_norm", x, residual, rule, 0.5, writes=True)
        yield from self.both(ops, layer_ops, "add", x, residual, 0.25)
        yield from self.both(ops, layer_ops, "copy_rows", x[:, :8], residual[:, 20:28])
        for kind in _ACTIVATIONS:
            yield from self.both(ops, layer_ops, "gate", x, kind)
        yield from self.both(
            ops, layer_ops, "embed", torch.tensor([1, 4, 2], dtype=torch.int32, device="cpu"), x, 1, 3.0
        )
        for cap in (None, 2.0):
            yield from self.both(ops, layer_ops, "cap_logits", x * 3, 0.5, cap)
        yield from self.both(ops, layer_ops, "sigmoid_gate", x[:, :20].contiguous(), x[:, 20:])

    def _recurrent(self) -> Iterator[Check]:
        """Layers with a state, with heads and channels that vectors do not divide, and the norm of groups.  Padding is
        behind the rows, and the last slot is for what twins leave of it."""
        kind = StateKind(num_key_heads=2, num_value_heads=4, key_dim=12, value_dim=40, taps=3)
        conv, channels = self.wide(3, kind.num_channels) / 4, kind.num_channels
        delta = gated_delta_net.DeltaRule(kind, conv, -self.wide(4).abs(), self.wide(4), self.wide(40), 1e-6)
        mamba = mamba2.Mamba2Rule(kind, conv, self.wide(channels), -self.wide(4).abs(), self.wide(4), self.wide(4))
        short = StateKind(num_key_heads=1, num_value_heads=37, key_dim=0, value_dim=1, taps=3)
        short_rule = short_conv.ShortConvRule(short, self.wide(3, 37))
        slots, chunks = (
            torch.tensor([2, 0, -1], dtype=torch.int32, device="cpu"),
            [Chunk(0, 2, 1, False), Chunk(2, 1, 0, True)],
        )
        states = LayerStates(self.wide(4, 2, channels) / 4, self.wide(4, 4, 12, 40) / 4)
        inputs = LayerStates(self.wide(4, 2, 37), torch.empty(4, 37, 0, 1, dtype=torch.float32, device="cpu"))
        for name, twins, *given in (
            ("gated_delta_net", gated_delta_net, self.draw(3, channels + 160), self.draw(3, 8), delta, states),
            ("mamba2", mamba2, self.draw(3, channels + 164) / 4, mamba, states),
            ("short_conv", short_conv, self.draw(3, 111), short_rule, inputs),
        ):
            for way, places, count in (("decode", slots, 2), ("prefill", chunks, 3)):
                for full, found, expected in self.both(recurrent, twins, f"{name}_{way}", *given, places, writes=True):
                    seen = slice(count if len(found) == 3 else 3)
                    yield full, found[seen], expected[seen]
        rows, squares, weight = self.wide(3, 160), self.wide(3, 2).abs() * 80, self.draw(160)
        yield from self.both(recurrent, mamba2, "group_squares", rows, 2)
        for own, size in ((None, 80), (squares, 160)):
            yield from self.both(recurrent, mamba2, "norm_groups", rows, weight, 2, 1e-5, own, size)

    def _heads(self) -> Iterator[Check]:
        """Operations on queries and keys."""
        heads, weights = self.draw(3, _HEADS + 2 * _KV_HEADS, _HEAD_DIM), self.draw(_HEADS + _KV_HEADS, _HEAD_DIM)
        norm = HeadNorm(q_weight=weights[0], k_weight=weights[-1], weights=weights, eps=1e-5, offset=1.0)
        positions, scale = (
            torch.tensor([4, 0, 2], dtype=torch.int64, device="cpu"),
            torch.rand(5, generator=self.generator, dtype=torch.float32, device="cpu") + 0.5,
        )
        for own_norm, rotation in (
            (None, Rotation(self.draw(5, _HEAD_DIM), positions)),
            (norm, Rotation(self.draw(5, 10), positions, scale)),
        ):
            given = (heads, _KV_HEADS, own_norm, rotation, None, positions)
            yield from self.both(ops, head_twins, "qk_norm_rope_store", *given)
        counts, squares = (_HEADS, _KV_HEADS), head_twins.head_squares(heads, _HEADS, _KV_HEADS)
        yield from self.both(ops, head_twins, "head_squares", heads, *counts)
        widths = (_HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM)
        yield from self.both(ops, head_twins, "norm_width", heads, *counts, squares, weights, widths, 1e-5)

    def _linear(self) -> Iterator[Check]:
        """Seven rows times a weight of odd sizes, and the same by PyTorch in float64: on some processors PyTorch's
        float32 is less exact than ours."""
        x, weight, bias = (self.wide(*shape).div(3).to(self.dtype) for shape in ((7, 86), (37, 86), (37,)))
        expected = F.linear(x.double(), weight.double(), bias.double())
        yield "packed_linear", PackedWeight(self.library, weight)(x, bias), expected
        for rule in _ACTIVATIONS:
            gated = PackedWeight(self.library, weight[:36], activation=rule)
            yield f"packed_linear with {rule.kind}", gated(x, bias[:36]), layer_ops.gate(expected[:, :36], rule)
            yield "packed_linear of both parts", gated.before_activation(x, bias[:36]), expected[:, :36]
        ids = torch.tensor([36, 0, 50, 17], dtype=torch.int32, device="cpu")
        wanted = torch.where(ids[:, None] < 37, weight[ids.clamp(max=36).long()], 0.0) * 2
        yield "embed_panels", PackedWeight(self.library, weight).rows(ids, None, 2.0), wanted

    def quantised_weight(self, kind: Codes, *shape: int) -> QuantisedWeight:
        """Return one with groups of 8 columns; zeros if the kind may have them."""
        *outer, in_size = shape
        codes = torch.randint(
            256, (*outer, in_size // values_per_byte(kind)), generator=self.generator, dtype=torch.int64, device="cpu"
        )
        codes, groups = codes.to(torch.uint8), (*outer, -(-in_size // 8))
        zeros = torch.randint(-128, 128, groups, generator=self.generator, dtype=torch.int64, device="cpu").to(
            torch.int8
        )
        return QuantisedWeight(
            kind=kind,
            codes=codes.masked_fill(codes & 127 == 127, 1),  # no NaN
            scales=(
                (torch.rand(groups, generator=self.generator, dtype=torch.float32, device="cpu") + 0.5) / _LARGEST[kind]
            ).bfloat16(),
            group=8,
            zeros=zeros if kind.startswith("int") else None,
            factors=torch.rand(outer, generator=self.generator, dtype=torch.float32, device="cpu") + 0.5,
        )

    def _quantised(self) -> Iterator[Check]:
        """Two rows, and more than a tile, times a weight of odd sizes."""
        x, bias = (self.wide(*shape).div(3).to(self.dtype) for shape in ((7, 88), (37,)))
        for kind in get_args(Codes):
            weight = self.quantised_weight(kind, 37, 88)
            expected = multiply_quantised(x.double(), weight, bias.double())
            product = QuantisedPanels(self.library, weight, self.dtype)
            for rows in (2, 7):
                yield f"quantised_linear of {kind}", product(x[:rows], bias), expected[:rows]

    def _experts(self) -> Iterator[Check]:
        """Routing, and the experts that are routed to."""
        logits, x, correction = self.draw(5, 8), self.draw(5, 24), self.wide(8)
        for rule in _ROUTING_RULES:
            for name, found, expected in self.both(native_experts, routing, "route", logits, rule, correction):
                yield f"{name} by {rule.scores}", found.to(self.dtype), expected.to(self.dtype)
        ids, shares = routing.route(logits, _ROUTING_RULES[-1], correction)
        gate_up, down = self.wide(8, 40, 24) * 0.2, self.wide(8, 24, 20) * 0.2
        biases = self.draw(8, 40), self.draw(8, 24)
        for activation in (_ACTIVATIONS[0], _ACTIVATIONS[-1]):
            rows = 20 * activation.num_parts
            weights = ExpertWeights(
                gate_up=gate_up[:, :rows].to(self.dtype),
                down=down.to(self.dtype),
                gate_up_bias=biases[0][:, :rows],
                down_bias=biases[1],
                first=0,
                activation=activation,
            )
            expected = experts.mix_experts(x, ids, shares, weights)
            yield "mix_experts", NativeExperts(self.library, weights, 3)(x, ids, shares), expected
        quantised = ExpertWeights(
            gate_up=self.quantised_weight("int4", 8, 40, 24),
            down=self.quantised_weight("e4m3", 8, 24, 20),
            gate_up_bias=biases[0],
            down_bias=biases[1],
            first=0,
            activation=_ACTIVATIONS[0],
        )
        mixed = NativeExperts(self.library, quantised, 3, self.dtype)(x, ids, shares)
        yield "mix_experts, quantised", mixed, experts.mix_experts(x, ids, shares, quantised)
        yield from self.both(native_experts, experts, "add_gated", x, x, logits[:, 2:3])
        yield from self.both(native_experts, routing, "to_float32", x)

    def _latents(self) -> Iterator[Check]:
        """Latent attention's small operations, for more tokens than share what is read; then the attention to its
        rows."""
        query, rows, up = self.draw(5, 2, 14), self.draw(5, 40), self.draw(2, 17, 36) / 10
        rule, rotation = (
            NormRule(self.draw(36), 1e-6),
            Rotation(self.draw(9, 4), torch.arange(5, dtype=torch.int64, device="cpu")),
        )
        given = (query, rows, rule, rotation, True, None, torch.zeros(5, dtype=torch.float32, device="cpu"))
        yield from self.both(native_latents, latents, "prepare_latents", *given)
        yield from self.both(native_latents, latents, "absorb_w_uk", query, up, 10)
        absorbed = latents.absorb_w_uk(query, up, 10)
        means = absorbed[..., :36].contiguous()
        yield from self.both(native_latents, latents, "project_w_uv", means, up, 10)
        cache, out = self.draw(1, 13, _BLOCK_SIZE, 1, 40), torch.empty_like(means[:2])
        table = torch.randperm(13, generator=self.generator, dtype=torch.int64, device="cpu").int().view(1, 13)
        attention = self.one_request(2, 50, table)
        attention(absorbed[:2].contiguous(), None, cache, out, scale=_SCALE)
        kept = cache[0, table[0].long()].view(1, 52, 40)[:, :50].float()
        hidden = torch.full((2, 50), float("-inf"), dtype=torch.float32, device="cpu").triu(49)
        by_head = absorbed[:2].float().transpose(0, 1)
        attended = attend(by_head, kept, kept[..., :36], hidden, scale=_SCALE, softcap=None, sinks=None)
        yield "paged_attention of latents", out, attended.transpose(0, 1)

    def one_request(self, num_queries: int, num_keys: int, table: torch.Tensor) -> PagedAttention:
        """Return the attention of a step with one request, whose keys are stored."""
        attention = PagedAttention(self.library)
        lengths, start, keys = np.array([[num_queries], [0], [num_keys]], dtype=np.int32)
        attention.set_step(lengths, start, keys, table, torch.full((num_queries,), -1, dtype=torch.int64, device="cpu"))
        return attention

    def _index(self) -> Iterator[Check]:
        """Index queries and keys: what becomes of them, and what is stored of the keys."""
        slots, positions = (torch.tensor(places, dtype=torch.int64, device="cpu") for places in ([5, -1, 2], [4, 0, 2]))
        norm = index_keys.KeyNorm(self.draw(20), self.draw(20), 1e-5)
        queries, keys, rotation = self.draw(3, 2, 20), self.draw(3, 20), Rotation(self.draw(5, 12), positions)
        for is_interleaved in (False, True):
            given = queries, keys, norm, rotation, is_interleaved, None, slots
            yield from self.both(native_index, index_keys, "prepare_index", *given)
            kv = LayerKv(torch.zeros(1, 2, _BLOCK_SIZE, 1, 20, dtype=self.dtype, device="cpu"))
            native_index.prepare_index(
                self.library, queries.clone(), keys.clone(), norm, rotation, is_interleaved, kv, slots
            )
            _, turned = index_keys.prepare_index(*given)
            assert turned is not None, "nothing stores them"
            expected = torch.zeros(2 * _BLOCK_SIZE, 20, dtype=self.dtype, device="cpu")
            expected[slots[::2]] = turned[::2]
            yield "prepare_index, stored", kv.cache.flatten(0, 3), expected

    def _chosen_keys(self) -> Iterator[Check]:
        """One decode's choice, of whole numbers, so that neither types nor the order of sums change a score; then
        attention to rows at the chosen places."""
        table = torch.randperm(13, generator=self.generator, dtype=torch.int64, device="cpu").int().view(1, 13)
        sizes = (1, 3, 8), (52, 8), (1, 3)
        query, keys, weights = (
            torch.randint(-2, 3, size, generator=self.generator, dtype=torch.int64, device="cpu") for size in sizes
        )
        index_kv = LayerKv(keys.to(self.dtype).view(1, 13, _BLOCK_SIZE, 1, 8))
        given = (
            query.to(self.dtype),
            weights.float(),
            1.0,
            index_kv,
            table,
            torch.tensor([50], dtype=torch.int32, device="cpu"),
            9,
        )
        yield from self.both(native_index, index_keys, "choose_keys", *given)
        chosen = index_keys.choose_keys(*given)
        heads, cache = self.draw(1, 2, 24), self.draw(1, 13, _BLOCK_SIZE, 1, 24)
        out = torch.empty(1, 2, 20, dtype=self.dtype, device="cpu")
        self.one_request(1, 50, table)(heads, None, cache, out, scale=_SCALE, chosen=chosen)
        rows = cache[0, table[0].long()].view(1, 52, 24)[:, chosen.positions[0].long()].float()
        by_head, seen = heads.float().transpose(0, 1), torch.zeros(1, 9, dtype=torch.float32, device="cpu")
        attended = attend(by_head, rows, rows[..., :20], seen, scale=_SCALE, softcap=None, sinks=None)
        yield "paged_attention to chosen keys", out, attended.transpose(0, 1)

    def _steps(self) -> Iterator[Check]:
        """The inputs of three decodes, of which one is padding, in two groups; the step's end; then drafts of requests
        that have slots, no more, and none."""
        deltas = torch.tensor([0, -2, 0, 3], dtype=torch.int32, device="cpu")
        blocks = torch.tensor([[0, 0, 0], [7, 3, 0], [5, 0, 0], [2, 6, 4]], dtype=torch.int32, device="cpu")
        tables = decode_inputs.RowTables(
            token_ids=torch.arange(4 * 12, dtype=torch.int32, device="cpu").view(4, 12),
            num_computed=torch.tensor([0, 5, 2, 9], dtype=torch.int32, device="cpu"),
            block_table=torch.stack((blocks, blocks * 2)),
            block_size=_BLOCK_SIZE,
            rope_deltas=deltas,
        )
        inputs = decode_inputs.DecodeInputs.allocate(3, tables).first(3)
        inputs.rows.copy_(torch.tensor([3, decode_inputs.PAD_ROW, 1], dtype=torch.int32, device="cpu"))
        yield from self.both(ops, decode_inputs, "prepare_decodes", tables, inputs)
        decode_inputs.prepare_decodes(tables, inputs)
        sampled = torch.tensor([90, 91, 92], dtype=torch.int32, device="cpu")
        yield from self.both(ops, decode_inputs, "advance_decodes", tables, inputs, sampled)
        nothing = torch.zeros(3, dtype=torch.int64, device="cpu")
        drafts = draft_inputs.DraftInputs(
            positions=torch.tensor([3, 7, 0], dtype=torch.int64, device="cpu"),
            limits=torch.tensor([9, 8, 0], dtype=torch.int64, device="cpu"),
            block_table=blocks[1:],
            slot_mapping=nothing,
            seq_lens=nothing.int(),
            rope_deltas=deltas[1:],
            rope_positions=nothing,
        )
        yield from self.both(ops, draft_inputs, "advance_drafts", drafts, _BLOCK_SIZE)
        logits = self.draw(3, 37)
        logits[1, 5:9] = logits.max() + 1
        yield "best_tokens", ops.best_tokens(self.library, logits), logits.float().argmax(1)

    def _blocks(self) -> Iterator[Check]:
        """Copies of blocks; keys and values of two heads, made of cached rows, from the second group of columns on."""
        pairs, blocks = np.array([[2, 0], [0, 3]], dtype=np.int32), self.draw(4, 40)
        copied, expected = blocks.flip(0), blocks.flip(0)
        self.library.copy_blocks(blocks, copied, pairs.ctypes.data, len(pairs), blocks[0].nbytes)
        expected[pairs[:, 1]] = blocks[pairs[:, 0]]
        yield "copy_blocks", copied, expected
        nope, rope, value_dim, size = 8, 4, 10, 32
        made, turned = self.draw(29, 2, nope + value_dim), self.draw(29, 2, rope)[:, 0]
        columns, values = torch.zeros(2, 2, 2, size, nope + rope, dtype=self.dtype, device="cpu")
        self.library.store_expanded(
            made, turned.data_ptr(), turned.stride(0), columns, values, size, 29, 0, 2, 2, size, nope, rope, value_dim,
            self.dtype,
        )  # fmt: skip
        keys = torch.zeros(2, 2, size, nope + rope, dtype=self.dtype, device="cpu")
        keys[1, :, :29] = torch.cat((made[..., :nope], turned[:, None].expand(-1, 2, -1)), 2).transpose(0, 1)
        keys[1, :, 29:] = keys[1, :, 28:29]  # the lanes behind the last token repeat it
        in_order = in_kernel_order(self.library, torch.stack((keys, keys)).transpose(2, 3))[0]
        yield "store_expanded", values[1, :, :29, :value_dim], made[..., nope:].transpose(0, 1)
        yield "store_expanded, keys", columns[1].flatten(), in_order[1].flatten()

    def _int8_rows(self) -> Iterator[Check]:
        """Rows of numbers that are codes already, so that rounding cannot differ."""
        rows, twin = NativeInt8Rows(self.library), TorchInt8Rows()
        x = torch.randint(-127, 128, (3, 40), generator=self.generator, dtype=torch.int64, device="cpu").to(self.dtype)
        x[:, 7] = -127
        products, bias = self.wide(3, 40), self.draw(40)
        (codes, scales), (expected, expected_scales) = rows.quantise(x), twin.quantise(x)
        yield "quantise_rows", codes, expected
        yield "quantise_rows", scales, expected_scales
        found = rows.scale(products, scales, bias, self.dtype)
        yield "scale_rows", found, twin.scale(products, expected_scales, bias, self.dtype)

    def _block_codes(self) -> Iterator[Check]:
        """Two blocks whose keys are columns, and what they become when they come back."""
        pairs, simd_width = (
            np.array([[1, 0], [0, 1]], dtype=np.int32),
            native_block_codes.simd_width_of(self.library, 16),
        )
        form = block_codes.BlockForm(
            num_parts=2, block_size=16, num_kv_heads=1, head_dim=40, dtype=self.dtype, simd_width=simd_width
        )
        pool = torch.randint(
            -7, 8, (2, form.num_vectors * 40), generator=self.generator, dtype=torch.int64, device="cpu"
        ).to(self.dtype)
        pool[:, ::40] = pool[:, 1::40] = 7
        blocks = pool.view(torch.uint8)
        for codes in (torch.int8, torch.float8_e4m3fn):
            blobs, twin = torch.zeros(2, 2, form.blob_bytes, dtype=torch.uint8, device="cpu")
            native_block_codes.encode_blocks(self.library, blocks, blobs, pairs, form, codes)
            block_codes.encode_blocks(blocks, twin, pairs, form, codes)
            back, expected = torch.zeros(2, *blocks.shape, dtype=torch.uint8, device="cpu")
            native_block_codes.decode_blocks(self.library, blobs, back, pairs, form, codes)
            block_codes.decode_blocks(twin, expected, pairs, form, codes)
            yield f"blocks in {codes}", back.view(self.dtype), expected.view(self.dtype)

    def _adapters(self) -> Iterator[Check]:
        """A product of two parts, seven rows of which have one of two adapters, of ranks 5 and 2."""
        ranks, sizes = torch.tensor([5, 2], dtype=torch.int32, device="cpu"), (70, 23)
        weights = adapters.AdapterWeights(
            a=self.draw(2, 10, 37) / 8, b=self.draw(2, 5, 93) / 8, ranks=ranks, part_sizes=sizes
        )
        weights.a[1].view(2, 5, 37)[:, 2:], weights.b[1, 2:] = 0, 0
        rows, tiles = adapters.group_rows(np.array([0, -1, 1, 0, 0, 0, -1, 0, 1]))
        grouped = adapters.AdapterRows(rows=torch.from_numpy(rows), tiles=torch.from_numpy(tiles), host_tiles=tiles)
        yield from self.both(ops, adapters, "add_adapters", self.draw(9, 93), self.draw(9, 37), weights, grouped)

    def _attention(self) -> Iterator[Check]:
        """Output of two requests in scattered blocks, and the same by softmax over explicit scores."""
        query_lens, seq_lens = (np.array(column, dtype=np.int32) for column in zip(*_REQUESTS, strict=True))
        num_tokens, num_blocks = int(query_lens.sum()), 14
        blocks = torch.randperm(num_blocks, generator=self.generator, dtype=torch.int32, device="cpu")
        table = torch.zeros(2, 10, dtype=torch.int32, device="cpu")
        table[0, :3], table[1, :10] = blocks[:3], blocks[3:13]
        kv_cache, query = (
            self.draw(2, num_blocks, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM),
            self.draw(num_tokens, _HEADS, _HEAD_DIM),
        )
        starts, sinks = np.cumsum(query_lens, dtype=np.int32) - query_lens, self.wide(_HEADS)
        attention = PagedAttention(self.library)
        attention.set_step(
            query_lens, starts, seq_lens, table, torch.full((num_tokens,), -1, dtype=torch.int64, device="cpu")
        )
        for name, cache_dtype, softcap, own_sinks in (
            ("paged_attention", self.dtype, None, None),
            ("paged_attention with a softcap and sinks", self.dtype, _SOFTCAP, sinks),
            ("paged_attention to int8", torch.int8, _SOFTCAP, sinks),
            ("paged_attention to fp8", torch.float8_e4m3fn, None, None),
        ):
            states, scales = kv_cache, None
            if is_quantised(cache_dtype):
                states, token_scales = quantise(kv_cache, cache_dtype)
                kv_cache, scales = dequantise(states, token_scales), token_scales.transpose(2, 3).contiguous()
            out, cache = torch.empty_like(query), in_kernel_order(self.library, states)
            attention(query, None, cache, out, scales=scales, scale=_SCALE, softcap=softcap, sinks=own_sinks)
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
    hidden = torch.full((num_queries, num_keys), float("-inf"), dtype=torch.float32, device="cpu").triu(
        num_keys - num_queries + 1
    )
    by_head, own_sinks = query.float().transpose(0, 1), None if sinks is None else sinks.view(-1, 1, 1)
    out = attend(by_head, keys, values, hidden, scale=_SCALE, softcap=softcap, sinks=own_sinks)
    return out.transpose(0, 1)


def _copies(given: Any) -> Any:
    """``given`` with copies of the tensors in it, in the same strides."""
    if isinstance(given, torch.Tensor):
        return torch.empty_strided(given.shape, given.stride(), dtype=given.dtype, device="cpu").copy_(given)
    if isinstance(given, LayerStates):
        return LayerStates(*map(_copies, given))
    if isinstance(given, _WRITTEN):
        return replace(given, **{one.name: _copies(getattr(given, one.name)) for one in fields(given)})
    return tuple(map(_copies, given)) if type(given) is tuple else given


def _tensors(found: Any) -> list[torch.Tensor]:
    if isinstance(found, _WRITTEN):
        found = tuple(getattr(found, one.name) for one in fields(found))
    if isinstance(found, tuple):
        return [tensor for one in found for tensor in _tensors(one)]
    return [found] if isinstance(found, torch.Tensor) else []
