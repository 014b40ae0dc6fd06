"""Mamba2's state space layer by Triton against its PyTorch twin: interpreted and on CUDA (``CASES``), and the launches
of real models (``launch_all``).

The rule is that of ``kernel_cases_layer_ops``; what is exact is the twin's in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from tests.unit.kernels.kernel_cases_delta import KINDS, NUM_SLOTS, STEPS, kind_of, make_states
from tests.unit.kernels.kernel_cases_layer_ops import DTYPES, Case, assert_close_enough, both, random
from tests.unit.kernels.kernel_harness import spilled_bytes
from tests.unit.kernels.recurrent_runs import Runs, chunks_of
from tp_engine.kernels.mamba2 import Mamba2Rule
from tp_engine.kernels.ops import implementation
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.model_config.kv_layout import StateKind

# Tokens, slot, is_fresh: shorter than the convolution, a tile of tokens and longer, not kept.
RUNS: Runs = [
    (1, 3, False),
    (70, 0, False),
    (5, None, False),
    (64, 1, True),
    (2, 4, True),
]
# Groups, a group's width on this rank and on all.
GROUPS = ((1, 300, 600), (3, 64, 64))


def make_rule(kind: StateKind, device: str) -> Mamba2Rule:
    """Constants of which the decay of the first head is slow, and that of the last one fast."""
    heads = kind.num_value_heads
    conv, bias, dt_bias, skip = (
        random(shape, torch.float32, device, seed)
        for seed, shape in enumerate(((kind.taps, kind.num_channels), (kind.num_channels,), (heads,), (heads,)), 1)
    )
    return Mamba2Rule(kind, conv, bias, -torch.logspace(-4, 1, heads).to(device), dt_bias, skip)


def in_float64(rule: Mamba2Rule, states: LayerStates) -> tuple[Mamba2Rule, LayerStates]:
    """Copies for the exact results."""
    constants = (one.double() for one in (rule.conv, rule.conv_bias, rule.decay, rule.dt_bias, rule.skip))
    return Mamba2Rule(rule.kind, *constants), LayerStates(*(part.double() for part in states))


def make_inputs(kind: StateKind, num_rows: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Rows that are slices of wider rows."""
    width = kind.num_channels + kind.num_value_heads * (kind.value_dim + 1)
    return random((num_rows, width + 8), dtype, device, seed)[:, :width]


def check_states(found: LayerStates, twin: LayerStates, exact: LayerStates) -> None:
    """All slots but that of padding."""
    for own, other, wide in zip(found, twin, exact, strict=True):
        if own.numel():
            assert_close_enough(own[:-1], other[:-1], wide[:-1], 4 * wide.abs().max().item())


def check_step(device: str, numbers: tuple[int, ...], dtype: torch.dtype) -> None:
    """Slots that no row has stay as they are."""
    kind = kind_of(numbers)
    step, twin = both("mamba2_decode")
    rule, states = make_rule(kind, device), make_states(kind, device)
    exact_rule, exact_states = in_float64(rule, states)
    twin_states, before = (LayerStates(*(part.clone() for part in states)) for _ in range(2))
    for seed, chosen in enumerate(STEPS):
        slots = torch.tensor(chosen, dtype=torch.int32, device=device)
        mixed = make_inputs(kind, len(slots), dtype, device, seed)
        mixed[0, -kind.num_value_heads :] *= 10  # steps far from usual
        found, by_twin = step(mixed, rule, states, slots), twin(mixed, rule, twin_states, slots)
        exact, used = twin(mixed.double(), exact_rule, exact_states, slots), slots >= 0
        assert_close_enough(found[used], by_twin[used], exact[used], 4 * exact[used].abs().max().item())
        assert found.isfinite().all()
    kept = [slot for slot in range(NUM_SLOTS) if not any(slot in chosen for chosen in STEPS)]
    assert all(torch.equal(own[kept], old[kept]) for own, old in zip(states, before, strict=True))
    check_states(states, twin_states, exact_states)


def check_draft_runs(device: str, numbers: tuple[int, ...], dtype: torch.dtype) -> None:
    """Draft rows after rows; what is compared is the same kernel on the tokens one by one, bit by bit."""
    kind = kind_of(numbers)
    step, _ = both("mamba2_decode")
    rule, states = make_rule(kind, device), make_states(kind, device)
    alone = LayerStates(*(part.clone() for part in states))
    slots = torch.tensor([3, -1, 0, 4, 1], dtype=torch.int32, device=device)
    runs = torch.tensor([[2, 3], [0, 0], [0, -1], [0, -1], [0, -1]], dtype=torch.int32, device=device)
    mixed = make_inputs(kind, 5, dtype, device, 5)
    found = step(mixed, rule, states, slots, runs)
    nothing = torch.zeros((1, 2), dtype=torch.int32, device=device)
    for place in (0, 2, 3, 4):
        row = slice(place, place + 1)
        assert torch.equal(step(mixed[row], rule, alone, slots[:1], nothing), found[row])
        assert all(torch.equal(own[slots[place]], other[3]) for own, other in zip(states, alone, strict=True))
    assert all(torch.equal(own[2], other[2]) for own, other in zip(states, alone, strict=True))


def check_chunks(device: str, numbers: tuple[int, ...], dtype: torch.dtype) -> None:
    """Behind other tokens; slots that no chunk has stay as they are, and nothing is kept without states."""
    kind, chunks = kind_of(numbers), chunks_of(RUNS)
    prefill, twin = both("mamba2_prefill")
    rule, states = make_rule(kind, device), make_states(kind, device)
    exact_rule, exact_states = in_float64(rule, states)
    twin_states, before = (LayerStates(*(part.clone() for part in states)) for _ in range(2))
    mixed = make_inputs(kind, 3 + sum(count for count, *_ in RUNS), dtype, device, 7)[3:]
    found, by_twin = prefill(mixed, rule, states, chunks), twin(mixed, rule, twin_states, chunks)
    exact = twin(mixed.double(), exact_rule, exact_states, chunks)
    assert_close_enough(found, by_twin, exact, 4 * exact.abs().max().item())
    assert all(torch.equal(own[[2, 5]], old[[2, 5]]) for own, old in zip(states, before, strict=True))
    check_states(states, twin_states, exact_states)
    (start, count, *_), last = chunks[3], states.recurrent.clone()
    alone = prefill(mixed[start : start + count], rule, None, [Chunk(0, count, None, False)])
    assert torch.equal(alone, found[start : start + count]) and torch.equal(states.recurrent, last)


def check_norm(device: str, groups: tuple[int, ...], dtype: torch.dtype, *, is_split: bool) -> None:
    """Groups that are whole here, or of which other ranks have as much."""
    num_groups, width, whole = groups
    (norm, twin), (squares_of, twin_squares) = both("norm_groups"), both("group_squares")
    x, weight = random((5, num_groups * width), torch.float32, device, 8), random((num_groups * width,), dtype, device)
    if not is_split:
        found, by_twin = (one(x, weight, num_groups, 1e-5, None, width) for one in (norm, twin))
        exact = twin(x.double(), weight.double(), num_groups, 1e-5, None, width)
    else:
        squares, wide = squares_of(x, num_groups), twin_squares(x.double(), num_groups)
        assert_close_enough(squares, twin_squares(x, num_groups), wide, wide.abs().max().item())
        found, by_twin = (one(x, weight, num_groups, 1e-5, 2 * squares, whole) for one in (norm, twin))
        exact = twin(x.double(), weight.double(), num_groups, 1e-5, 2 * wide, whole)
    assert_close_enough(found, by_twin, exact, exact.abs().max().item() if dtype == torch.float32 else 1e-2)


CASES: dict[str, Case] = {
    f"mamba-{name}-{numbers}-{dtype}": partial(check, numbers=numbers, dtype=dtype)
    for name, check in (("step", check_step), ("draft-runs", check_draft_runs), ("chunks", check_chunks))
    for numbers, dtype in product(KINDS[:3], DTYPES)
}
CASES |= {
    f"mamba-norm-{groups}-{dtype}-{is_split}": partial(check_norm, groups=groups, dtype=dtype, is_split=is_split)
    for groups, dtype, is_split in product(GROUPS, DTYPES, (False, True))
}


TWO_CHUNKS = (Chunk(0, 130, 3, True), Chunk(130, 63, None, False))


def launch(
    numbers: tuple[int, ...],
    dtype: torch.dtype = torch.bfloat16,
    *,
    has_runs: bool = False,
    chunks: Sequence[Chunk] = TWO_CHUNKS,
) -> None:
    """A step, the chunks and the norm of one layer."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kind = kind_of(numbers)
    heads, width = kind.num_value_heads, kind.num_value_heads * kind.value_dim
    constants = empty(kind.num_channels), empty(heads), empty(heads), empty(heads)
    rule = Mamba2Rule(kind, empty(kind.taps, kind.num_channels), *constants)
    states = LayerStates(empty(9, kind.taps - 1, kind.num_channels), empty(9, heads, kind.key_dim, kind.value_dim))
    num_tokens = 7 + sum(chunk.num_tokens for chunk in chunks)
    mixed, slots = empty(num_tokens, kind.num_channels + width + heads, dtype=dtype), empty(12, dtype=torch.int32)
    step, prefill, norm, squares = (
        implementation(name, "triton") for name in ("mamba2_decode", "mamba2_prefill", "norm_groups", "group_squares")
    )
    step(mixed[:7], rule, states, slots[:7], empty(7, 2, dtype=torch.int32) if has_runs else None)
    prefill(mixed[7:], rule, states, list(chunks))
    out, weight = empty(7, width), empty(width, dtype=dtype)
    norm(out, weight, kind.num_key_heads, 1e-5, None, width // kind.num_key_heads)
    norm(out, weight, kind.num_key_heads, 1e-5, squares(out, kind.num_key_heads), 2 * width // kind.num_key_heads)


def launch_all() -> None:
    """Nemotron 3 Nano on one rank and on one of 8, in every type, Nemotron-H 56B and Granite 4.  Chunks, which take
    most of the time, where a scan has other types or tiles: a number of heads changes neither."""
    launch((8, 64, 128, 64, 4), has_runs=True, chunks=())
    for dtype in DTYPES:
        launch((1, 8, 128, 64, 4), dtype)
    launch((8, 256, 256, 64, 4))
    launch((1, 128, 128, 64, 4), chunks=())


def check_compiled(kernel: Any, capability: int) -> None:
    """Dependent launch where the GPU has it; the registers hold all that programs of chunks need."""
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
    if kernel.name in ("mamba2_scan_kernel",):
        assert spilled_bytes(kernel) == 0, kernel.name
