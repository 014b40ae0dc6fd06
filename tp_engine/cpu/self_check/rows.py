"""Operations on rows, recurrent states, the inputs of steps, and blocks."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from tp_engine.cpu import block_codes as native_block_codes
from tp_engine.cpu import ops, recurrent
from tp_engine.cpu.paged_attention import in_kernel_order
from tp_engine.cpu.self_check.base import ACTIVATIONS, BLOCK_SIZE, Check, KernelChecks
from tp_engine.kernels import gated_delta_net, kda, layer_ops, mamba2, short_conv
from tp_engine.kernels.kv_cache import block_codes
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.steps import decode_inputs, draft_inputs
from tp_engine.model_config.kv_layout import StateKind


class RowChecks(KernelChecks):
    """Rows of a step between its products, its inputs, and copies of what is kept."""

    def rows(self) -> Iterator[Check]:
        """Operations on rows."""
        x, residual, weight = self.draw(3, 40), self.draw(3, 40), self.draw(40)
        for rule in (NormRule(weight, 1e-5), NormRule(weight, 1e-5, offset=1.0, is_centred=True)):
            yield from self.both(ops, layer_ops, "norm", x, rule)
            yield from self.both(ops, layer_ops, "add_norm", x, residual, rule, 0.5, writes=True)
        yield from self.both(ops, layer_ops, "add", x, residual, 0.25)
        yield from self.both(ops, layer_ops, "copy_rows", x[:, :8], residual[:, 20:28])
        for kind in ACTIVATIONS:
            yield from self.both(ops, layer_ops, "gate", x, kind)
        yield from self.both(
            ops, layer_ops, "embed", torch.tensor([1, 4, 2], dtype=torch.int32, device="cpu"), x, 1, 3.0
        )
        for cap in (None, 2.0):
            yield from self.both(ops, layer_ops, "cap_logits", x * 3, 0.5, cap)
        yield from self.both(ops, layer_ops, "gate_heads", x[:, :20].contiguous(), x[:, 20:])
        yield from self.both(ops, layer_ops, "gate_heads", x[:, :20].contiguous(), x[:, 20:24], "softplus")

    def recurrent(self) -> Iterator[Check]:
        """Layers with a state, with heads and channels that vectors do not divide, and the norm of groups."""
        kind = StateKind(num_key_heads=2, num_value_heads=4, key_dim=12, value_dim=40, taps=3)
        conv, channels = self.wide(3, kind.num_channels) / 4, kind.num_channels
        delta = gated_delta_net.DeltaRule(kind, conv, -self.wide(4).abs(), self.wide(4), self.wide(40), 1e-6)
        mamba = mamba2.Mamba2Rule(kind, conv, self.wide(channels), -self.wide(4).abs(), self.wide(4), self.wide(4))
        short = StateKind(num_key_heads=1, num_value_heads=37, key_dim=0, value_dim=1, taps=3)
        short_rule = short_conv.ShortConvRule(short, self.wide(3, 37))
        states = LayerStates(self.wide(4, 2, channels) / 4, self.wide(4, 4, 12, 40) / 4)
        inputs = LayerStates(self.wide(4, 2, 37), torch.empty(4, 37, 0, 1, dtype=torch.float32, device="cpu"))
        for name, twins, *given in (
            ("gated_delta_net", gated_delta_net, self.draw(3, channels + 160), self.draw(3, 8), delta, states),
            ("mamba2", mamba2, self.draw(3, channels + 164) / 4, mamba, states),
            ("short_conv", short_conv, self.draw(3, 111), short_rule, inputs),
        ):
            yield from self._of_state(name, twins, *given)
        rows, squares, weight = self.wide(3, 160), self.wide(3, 2).abs() * 80, self.draw(160)
        yield from self.both(recurrent, mamba2, "group_squares", rows, 2)
        for own, size in ((None, 80), (squares, 160)):
            yield from self.both(recurrent, mamba2, "norm_groups", rows, weight, 2, 1e-5, own, size)

    def kimi_delta(self) -> Iterator[Check]:
        """Kimi delta attention, with sizes that vectors do not divide."""
        kind = StateKind(num_key_heads=2, num_value_heads=2, key_dim=20, value_dim=20, taps=3)
        conv, rates, bias, norm = self.wide(3, 120) / 4, -self.wide(2).abs(), self.wide(40), self.wide(20)
        states = LayerStates(self.wide(4, 2, 120) / 4, self.wide(4, 2, 20, 20) / 4)
        inputs = self.draw(3, 120), self.draw(3, 2), self.draw(3, 40), self.draw(3, 40)
        rule = kda.KdaRule(kind, conv, rates, bias, norm, 1e-6, 0.0)
        yield from self._of_state("kda", kda, *inputs, rule, states)

    def _of_state(self, name: str, twins: ModuleType, *given: Any) -> Iterator[Check]:
        """A decode and prompts.  Padding is after the rows, and the last slot is for what twins leave of it."""
        slots = torch.tensor([2, 0, -1], dtype=torch.int32, device="cpu")
        chunks = [Chunk(0, 2, 1, False), Chunk(2, 1, 0, True)]
        for way, places, count in (("decode", slots, 2), ("prefill", chunks, 3)):
            for full, found, expected in self.both(recurrent, twins, f"{name}_{way}", *given, places, writes=True):
                seen = slice(count if len(found) == 3 else 3)
                yield full, found[seen], expected[seen]

    def steps(self) -> Iterator[Check]:
        """The inputs of three decodes, of which one is padding, in two groups; the step's end; then drafts of requests
        that have slots, no more, and none."""
        deltas = torch.tensor([0, -2, 0, 3], dtype=torch.int32, device="cpu")
        blocks = torch.tensor([[0, 0, 0], [7, 3, 0], [5, 0, 0], [2, 6, 4]], dtype=torch.int32, device="cpu")
        tables = decode_inputs.RowTables(
            token_ids=torch.arange(4 * 12, dtype=torch.int32, device="cpu").view(4, 12),
            num_computed=torch.tensor([0, 5, 2, 9], dtype=torch.int32, device="cpu"),
            block_table=torch.stack((blocks, blocks * 2)),
            block_size=BLOCK_SIZE,
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
        yield from self.both(ops, draft_inputs, "advance_drafts", drafts, BLOCK_SIZE)
        logits = self.draw(3, 37)
        logits[1, 5:9] = logits.max() + 1
        yield "best_tokens", ops.best_tokens(self.library, logits), logits.float().argmax(1)

    def blocks(self) -> Iterator[Check]:
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
        keys[1, :, 29:] = keys[1, :, 28:29]  # the lanes after the last token repeat it
        in_order = in_kernel_order(self.library, torch.stack((keys, keys)).transpose(2, 3))[0]
        yield "store_expanded", values[1, :, :29, :value_dim], made[..., nope:].transpose(0, 1)
        yield "store_expanded, keys", columns[1].flatten(), in_order[1].flatten()

    def block_codes(self) -> Iterator[Check]:
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
