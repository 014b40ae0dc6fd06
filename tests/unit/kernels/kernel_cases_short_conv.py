"""The short convolution's step by Triton against its PyTorch twin: interpreted and on CUDA (``CASES``), and the
launches of real models (``launch_all``).

The rule is that of ``kernel_cases_layer_ops``; what is exact is the twin's in float64.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from tests.unit.kernels.kernel_cases_delta import NUM_SLOTS, STEPS
from tests.unit.kernels.kernel_cases_layer_ops import DTYPES, Case, assert_close_enough, both, random
from tests.unit.kernels.recurrent_runs import Runs, chunks_of
from tp_engine.kernels.ops import implementation
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.short_conv import ShortConvRule
from tp_engine.model_config.kv_layout import StateKind

SIZES = ((40, 3), (300, 4), (16, 2))  # channels, taps
# Tokens, slot, is_fresh: shorter than the convolution, as many as a program has and more, not kept.
RUNS: Runs = [
    (1, 3, False),
    (35, 0, False),
    (5, None, False),
    (16, 1, True),
    (2, 4, True),
]


def kind_of(size: tuple[int, int]) -> StateKind:
    """The kind of a layer with so many channels and taps."""
    return StateKind(num_key_heads=1, num_value_heads=size[0], key_dim=0, value_dim=1, taps=size[1])


def make_states(kind: StateKind, device: str) -> LayerStates:
    """Views of one tensor whose slots have room between them, like those of several layers."""
    raw = random((NUM_SLOTS, kind.num_conv_elements + 8), torch.float32, device, 4)
    inputs = raw[:, : kind.num_conv_elements].view(NUM_SLOTS, kind.taps - 1, kind.num_channels)
    return LayerStates(inputs, raw[:, :0].view(NUM_SLOTS, kind.num_channels, 0, 1))


def check_step(device: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Rows that are slices of wider rows; slots that no row has stay as they are."""
    kind = kind_of(size)
    step, twin = both("short_conv_decode")
    rule = ShortConvRule(kind, random((kind.taps, kind.num_channels), torch.float32, device, 1))
    states, width = make_states(kind, device), 3 * kind.num_channels
    twin_states, before = (LayerStates(*(part.clone() for part in states)) for _ in range(2))
    exact_rule, exact_states = ShortConvRule(kind, rule.conv.double()), LayerStates(*(one.double() for one in states))
    for seed, chosen in enumerate(STEPS):
        slots = torch.tensor(chosen, dtype=torch.int32, device=device)
        mixed = random((len(slots), width + 8), dtype, device, seed)[:, :width]
        found, by_twin = step(mixed, rule, states, slots), twin(mixed, rule, twin_states, slots)
        exact, used = twin(mixed.double(), exact_rule, exact_states, slots), slots >= 0
        granted = 4 * exact[used].abs().max().item() if dtype == torch.float32 else 1e-2
        assert_close_enough(found[used], by_twin[used], exact[used], granted)
        assert found.isfinite().all()
    kept = [slot for slot in range(NUM_SLOTS) if not any(slot in chosen for chosen in STEPS)]
    assert torch.equal(states.conv[kept], before.conv[kept])
    torch.testing.assert_close(states.conv[:-1], twin_states.conv[:-1])


def check_draft_runs(device: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Draft rows after rows; what is compared is the same kernel on the tokens one by one, bit by bit."""
    kind = kind_of(size)
    step, _ = both("short_conv_decode")
    rule = ShortConvRule(kind, random((kind.taps, kind.num_channels), torch.float32, device, 1))
    states = make_states(kind, device)
    alone = LayerStates(*(part.clone() for part in states))
    slots = torch.tensor([3, -1, 0, 4, 1], dtype=torch.int32, device=device)
    runs = torch.tensor([[2, 3], [0, 0], [0, -1], [0, -1], [0, -1]], dtype=torch.int32, device=device)
    mixed = random((5, 3 * kind.num_channels), dtype, device, 5)
    found = step(mixed, rule, states, slots, runs)
    nothing = torch.zeros((1, 2), dtype=torch.int32, device=device)
    for place in (0, 2, 3, 4):
        row = slice(place, place + 1)
        assert torch.equal(step(mixed[row], rule, alone, slots[:1], nothing), found[row])
        assert torch.equal(states.conv[slots[place]], alone.conv[3])
    assert torch.equal(states.conv[2], alone.conv[2])


def check_chunks(device: str, size: tuple[int, int], dtype: torch.dtype) -> None:
    """Behind other tokens; slots that no chunk has stay as they are, and nothing is kept without states."""
    kind, chunks = kind_of(size), chunks_of(RUNS)
    prefill, twin = both("short_conv_prefill")
    rule = ShortConvRule(kind, random((kind.taps, kind.num_channels), torch.float32, device, 1))
    states, exact_rule = make_states(kind, device), ShortConvRule(kind, rule.conv.double())
    twin_states, before = (LayerStates(*(part.clone() for part in states)) for _ in range(2))
    exact_states = LayerStates(*(part.double() for part in states))
    mixed = random((3 + sum(count for count, *_ in RUNS), 3 * kind.num_channels), dtype, device, 7)[3:]
    found, by_twin = prefill(mixed, rule, states, chunks), twin(mixed, rule, twin_states, chunks)
    exact = twin(mixed.double(), exact_rule, exact_states, chunks)
    assert_close_enough(found, by_twin, exact, 4 * exact.abs().max().item() if dtype == torch.float32 else 1e-2)
    assert torch.equal(states.conv[[2, 5]], before.conv[[2, 5]])
    torch.testing.assert_close(states.conv[:-1], twin_states.conv[:-1])
    (start, count, *_), last = chunks[3], states.conv.clone()
    alone = prefill(mixed[start : start + count], rule, None, [Chunk(0, count, None, False)])
    assert torch.equal(alone, found[start : start + count]) and torch.equal(states.conv, last)


CASES: dict[str, Case] = {
    f"short-conv-{name}-{size}-{dtype}": partial(check, size=size, dtype=dtype)
    for name, check in (("step", check_step), ("draft-runs", check_draft_runs), ("chunks", check_chunks))
    for size, dtype in product(SIZES, DTYPES)
}


def launch_all() -> None:
    """LFM2 on one rank, in every type, with draft rows too, and chunks."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kind, step = kind_of((2048, 3)), implementation("short_conv_decode", "triton")
    prefill = implementation("short_conv_prefill", "triton")
    rule = ShortConvRule(kind, empty(3, 2048))
    states = LayerStates(empty(9, 2, 2048), empty(9, 2048, 0, 1))
    for dtype in DTYPES:
        mixed, slots = empty(12, 3 * 2048, dtype=dtype), empty(12, dtype=torch.int32)
        step(mixed[:7], rule, states, slots[:7])
        step(mixed[:7], rule, states, slots[:7], empty(7, 2, dtype=torch.int32))
        prefill(mixed[7:], rule, states, [Chunk(0, 5, 3, True)])
