"""Short convolutions between two gates.  Oracles: transformers' layer, and a chunk that is computed token by token."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tp_engine.cpu import recurrent as native
from tp_engine.cpu.library import native_library
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.short_conv import ShortConvRule, short_conv_decode, short_conv_prefill
from tp_engine.model_config.kv_layout import StateGroup, StateKind
from tp_engine.worker.batch.recurrent_states import RecurrentStatePool

# Channels, and taps: less than a vector, less and more than a task's, of real models.
SIZES = [(5, 3), (200, 4), (300, 2), (2048, 3)]
NUM_SLOTS = 8


def kind_of(size: tuple[int, int]) -> StateKind:
    channels, taps = size
    return StateKind(num_key_heads=1, num_value_heads=channels, key_dim=0, value_dim=1, taps=taps)


def rule_of(kind: StateKind) -> ShortConvRule:
    return ShortConvRule(kind, torch.randn(kind.taps, kind.num_channels))


def random_states(kind: StateKind) -> LayerStates:
    """With one slot more, which padding may write to; in the engine's pool of two such layers."""
    pool = RecurrentStatePool(StateGroup(((0, kind), (1, kind))), NUM_SLOTS, torch.device("cpu"))
    layers = [_Layer(kind), _Layer(kind)]
    pool.bind(layers)  # type: ignore[arg-type]
    pool.raw.normal_()
    states = layers[1].states
    assert states is not None and states.recurrent.shape == (NUM_SLOTS + 1, kind.num_channels, 0, 1)
    return states


class _Layer:
    """What the pool asks of a layer."""

    def __init__(self, kind: StateKind) -> None:
        self.kind = kind
        self.states: LayerStates | None = None

    def bind_states(self, states: LayerStates | None) -> None:
        self.states = states


def copy_of(states: LayerStates) -> LayerStates:
    return LayerStates(*(part.clone() for part in states))


def operations(in_c: bool) -> tuple[Any, Any]:
    """The decode and the prefill."""
    if not in_c:
        return short_conv_decode, short_conv_prefill
    library = native_library()
    if library is None:
        pytest.skip("no compiled kernels")
    return partial(native.short_conv_decode, library), partial(native.short_conv_prefill, library)


@torch.no_grad()
@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("cut", [1, 2, 17])
def test_chunks_and_steps_equal_transformers(in_c: bool, cut: int) -> None:
    """Oracle: ``Lfm2ShortConv`` over all tokens at once; two chunks, the first from zeros, then steps."""
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    kind = kind_of((40, 3))
    layer = Lfm2ShortConv(Lfm2Config(hidden_size=40, num_hidden_layers=1, layer_types=["conv"]), 0).eval()
    x, states = torch.randn(cut + 9, 40), random_states(kind)
    rule = ShortConvRule(kind, layer.conv.weight.squeeze(1).t().contiguous())
    (step, prefill), mixed = operations(in_c), F.linear(x, layer.in_proj.weight)
    parts = [prefill(mixed[:cut], rule, states, [Chunk(0, cut, 3, True)])]
    parts.append(prefill(mixed[cut : cut + 5], rule, states, [Chunk(0, 5, 3, False)]))
    slots = torch.tensor([3], dtype=torch.int32)
    parts += [step(mixed[token, None], rule, states, slots) for token in range(cut + 5, len(x))]
    found = F.linear(torch.cat(parts), layer.out_proj.weight)
    torch.testing.assert_close(found, layer(x[None])[0], rtol=1e-5, atol=1e-6)


# Tokens, slot, is_fresh: shorter than the convolution, as long as a block of 16 tokens, and longer; None is not kept.
RUNS = [(1, 4, False), (33, 1, True), (2, 6, False), (70, None, False), (16, 0, False), (5, 3, True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_chunks_in_c(size: tuple[int, int], dtype: torch.dtype) -> None:
    """Oracles: the twin; and bit by bit, states and outputs, the tokens of each row one by one in C, also with the
    other number of threads; slots that no chunk names stay as they are."""
    step, prefill = operations(in_c=True)
    kind = kind_of(size)
    rule, states = rule_of(kind), random_states(kind)
    starts = [sum(count for count, *_ in RUNS[:index]) for index in range(len(RUNS))]
    chunks = [Chunk(start, *run) for start, run in zip(starts, RUNS, strict=True)]
    wide = torch.randn(sum(count for count, *_ in RUNS), 3 * kind.num_channels + 8).to(dtype)
    mixed = wide[:, :-8]
    before, of_twin, by_steps = (copy_of(states) for _ in range(3))
    found, expected = prefill(mixed, rule, states, chunks), short_conv_prefill(mixed, rule, of_twin, chunks)
    assert found.dtype is dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(states.conv, of_twin.conv)
    assert torch.equal(states.conv[[2, 5, 7, 8]], before.conv[[2, 5, 7, 8]])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3 - min(num_threads, 2))
    try:
        for start, count, slot, is_fresh in chunks:
            place = NUM_SLOTS - 1 if slot is None else slot
            if slot is None or is_fresh:
                by_steps.conv[place] = 0.0
            for row in range(start, start + count):
                one = step(mixed[row, None], rule, by_steps, torch.tensor([place]).int())
                assert torch.equal(one[0], found[row])
    finally:
        torch.set_num_threads(num_threads)
    assert torch.equal(by_steps.conv[: NUM_SLOTS - 1], states.conv[: NUM_SLOTS - 1])
    nowhere = [Chunk(start, count, None, False) for start, count, *_ in chunks]
    zeroed = [Chunk(start, count, index, True) for index, (start, count, *_) in enumerate(chunks)]
    assert torch.equal(prefill(mixed, rule, None, nowhere), prefill(mixed, rule, states, zeroed))


# Places of each run's tokens: with draft rows behind the others, in any order; the last row is padding.
DRAFT_RUNS = [[0, 3, 4, 5], [1], [2, 6], [7]]


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("size", SIZES[:3])
def test_draft_rows_go_on_behind_their_row(in_c: bool, size: tuple[int, int]) -> None:
    """Oracle: the tokens of a run one by one in the row's own slot, in C bit by bit, outputs and the state behind each;
    slots of other rows stay as they are."""
    step, _ = operations(in_c)
    rtol, atol = (0.0, 0.0) if in_c else (1e-5, 1e-5)
    runs = torch.tensor([[0, -1]] * 8, dtype=torch.int32)
    for own, *behind in DRAFT_RUNS:
        runs[own] = torch.tensor([behind[0] if behind else 0, len(behind)])
    kind = kind_of(size)
    mixed, rule, states = torch.randn(8, 3 * kind.num_channels), rule_of(kind), random_states(kind)
    before, slots = copy_of(states), torch.randperm(8).int()
    slots[7] = -1
    found = step(mixed, rule, states, slots, runs)
    for places in DRAFT_RUNS[:-1]:
        alone, own_slot = copy_of(before), slots[places[:1]]
        for place in places:
            one = step(mixed[place, None], rule, alone, own_slot)
            torch.testing.assert_close(one[0], found[place], rtol=rtol, atol=atol)
            torch.testing.assert_close(states.conv[slots[place]], alone.conv[own_slot[0]], rtol=rtol, atol=atol)
    (unused,) = {*range(8)} - {*slots.tolist()}
    assert torch.equal(states.conv[unused], before.conv[unused])
