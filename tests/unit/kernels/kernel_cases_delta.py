"""The gated delta rule by Triton against its PyTorch twin: interpreted and on CUDA (``CASES``), and the launches of
real models (``launch_all``).

The rule is that of ``kernel_cases_layer_ops``; what is exact is the twin's in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch

from tests.unit.kernels.kernel_cases_layer_ops import DTYPES, Case, assert_close_enough, both, random
from tests.unit.kernels.kernel_harness import spilled_bytes
from tests.unit.kernels.recurrent_runs import Runs, chunks_of
from tp_engine.kernels.gated_delta_net import DeltaRule
from tp_engine.kernels.ops import implementation
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.model_config.kv_layout import StateKind

# Key heads, value heads, key_dim, value_dim, taps.
KINDS = ((2, 4, 16, 8, 4), (1, 3, 24, 40, 2), (3, 3, 8, 64, 3), (1, 2, 48, 16, 1))
NUM_SLOTS = 6
# Two steps of the rows of some slots; -1 is padding.
STEPS = ((3, -1, 0, 4), (4, 3, -1, -1))


def kind_of(numbers: tuple[int, ...]) -> StateKind:
    """The kind by the numbers of ``KINDS``."""
    key_heads, value_heads, key_dim, value_dim, taps = numbers
    return StateKind(
        num_key_heads=key_heads, num_value_heads=value_heads, key_dim=key_dim, value_dim=value_dim, taps=taps
    )


def make_rule(kind: StateKind, device: str) -> DeltaRule:
    """Constants of which the decay of the first head is slow, and that of the last one fast."""
    decay = -torch.logspace(-4, 1, kind.num_value_heads).to(device)
    conv = random((kind.taps, kind.num_channels), torch.float32, device, 1)
    dt_bias = random((kind.num_value_heads,), torch.float32, device, 2) * 3
    return DeltaRule(kind, conv, decay, dt_bias, random((kind.value_dim,), torch.float32, device, 3), 1e-6)


def make_states(kind: StateKind, device: str) -> LayerStates:
    """Views of one tensor whose slots have room between them, like those of several layers."""
    num_matrices = kind.num_value_heads * kind.key_dim * kind.value_dim
    raw = random((NUM_SLOTS, kind.num_conv_elements + num_matrices + 8), torch.float32, device, 4)
    conv, matrices = raw[:, : kind.num_conv_elements], raw[:, -num_matrices:]
    inputs = (NUM_SLOTS, kind.taps - 1, kind.num_channels)
    return LayerStates(conv.view(inputs), matrices.view(NUM_SLOTS, kind.num_value_heads, kind.key_dim, kind.value_dim))


def in_float64(rule: DeltaRule, states: LayerStates) -> tuple[DeltaRule, LayerStates]:
    """Copies for the exact results."""
    conv, decay, dt_bias, norm = (one.double() for one in (rule.conv, rule.decay, rule.dt_bias, rule.norm))
    return DeltaRule(rule.kind, conv, decay, dt_bias, norm, rule.eps), LayerStates(*(part.double() for part in states))


def check_step(device: str, numbers: tuple[int, ...], dtype: torch.dtype) -> None:
    """Rows that are slices of wider rows; gates far from zero; slots that no row has stay as they are."""
    kind = kind_of(numbers)
    step, twin = both("gated_delta_net_decode")
    rule, states = make_rule(kind, device), make_states(kind, device)
    exact_rule, exact_states = in_float64(rule, states)
    twin_states, before = (LayerStates(*(part.clone() for part in states)) for _ in range(2))
    width = kind.num_channels + kind.num_value_heads * kind.value_dim
    for seed, chosen in enumerate(STEPS):
        slots = torch.tensor(chosen, dtype=torch.int32, device=device)
        mixed = random((len(slots), width + 8), dtype, device, seed)[:, :width]
        gates = random((len(slots), 2 * kind.num_value_heads + 3), dtype, device, seed)[:, :-3]
        gates[0] *= 40
        found, by_twin = step(mixed, gates, rule, states, slots), twin(mixed, gates, rule, twin_states, slots)
        exact = twin(mixed.double(), gates.double(), exact_rule, exact_states, slots)
        used = slots >= 0
        unit_of_sums = 4 if dtype == torch.float32 else 1e-2
        assert_close_enough(found[used], by_twin[used], exact[used], unit_of_sums * exact[used].abs().max().item())
        assert found.isfinite().all()
    for own, other, wide, old in zip(states, twin_states, exact_states, before, strict=True):
        kept = [slot for slot in range(NUM_SLOTS) if not any(slot in chosen for chosen in STEPS)]
        assert torch.equal(own[kept], old[kept])
        if own.numel():
            assert_close_enough(own[:-1], other[:-1], wide[:-1], 4 * wide.abs().max().item())


def check_draft_runs(device: str, numbers: tuple[int, ...], dtype: torch.dtype) -> None:
    """Draft rows after rows; what is compared is the same kernel on the tokens one by one, bit by bit."""
    kind = kind_of(numbers)
    step, _ = both("gated_delta_net_decode")
    rule, states = make_rule(kind, device), make_states(kind, device)
    alone = LayerStates(*(part.clone() for part in states))
    width = kind.num_channels + kind.num_value_heads * kind.value_dim
    slots = torch.tensor([3, -1, 0, 4, 1], dtype=torch.int32, device=device)
    runs = torch.tensor([[2, 3], [0, 0], [0, -1], [0, -1], [0, -1]], dtype=torch.int32, device=device)
    mixed, gates = random((5, width), dtype, device, 5), random((5, 2 * kind.num_value_heads), dtype, device, 6)
    found = step(mixed, gates, rule, states, slots, runs)
    nothing = torch.zeros((1, 2), dtype=torch.int32, device=device)
    for index, place in enumerate((0, 2, 3, 4)):
        row = slice(place, place + 1)
        assert torch.equal(step(mixed[row], gates[row], rule, alone, slots[:1], nothing), found[row])
        for own, other in zip(states, alone, strict=True):
            assert torch.equal(own[slots[place]], other[3])
            own[3] = own[3] if index else other[3]
    for own, other in zip(states, alone, strict=True):
        assert torch.equal(own[2], other[2])


# Tokens, slot, is_fresh: a tile of tokens and longer, shorter than the convolution, not kept.
PROMPTS: Runs = [(70, 0, False), (1, 3, False), (5, None, False), (2, 4, True)]


def check_chunks(device: str, numbers: tuple[int, ...], dtype: torch.dtype) -> None:
    """Chunks of several rows, in rows that lie apart, gates far from zero; other slots stay as they are, and nothing is
    kept without states."""
    kind, chunks = kind_of(numbers), chunks_of(PROMPTS)
    prefill, twin = both("gated_delta_net_prefill")
    rule, states = make_rule(kind, device), make_states(kind, device)
    exact_rule, exact_states = in_float64(rule, states)
    twin_states, before = (LayerStates(*(part.clone() for part in states)) for _ in range(2))
    num_tokens, width = sum(count for count, *_ in PROMPTS), kind.num_channels + kind.num_value_heads * kind.value_dim
    mixed = random((num_tokens, width + 8), dtype, device, 7)[:, :width]
    gates = random((num_tokens, 2 * kind.num_value_heads + 3), dtype, device, 8)[:, :-3]
    gates[:9] *= 20
    mixed[30:60] = mixed[30]  # keys that repeat
    found, by_twin = prefill(mixed, gates, rule, states, chunks), twin(mixed, gates, rule, twin_states, chunks)
    exact = twin(mixed.double(), gates.double(), exact_rule, exact_states, chunks)
    largest = exact.abs().max().item()
    assert_close_enough(found, by_twin, exact, 4 * largest if dtype == torch.float32 else largest)
    assert all(torch.equal(own[[1, 2, 5]], old[[1, 2, 5]]) for own, old in zip(states, before, strict=True))
    for own, other, wide in zip(states, twin_states, exact_states, strict=True):
        if own.numel():
            assert_close_enough(own, other, wide, 4 * wide.abs().max().item())
    (start, count, *_), last = chunks[2], states.recurrent.clone()
    row = slice(start, start + count)
    alone = prefill(mixed[row], gates[row], rule, None, [Chunk(0, count, None, False)])
    assert torch.equal(alone, found[row]) and torch.equal(states.recurrent, last)


CASES: dict[str, Case] = {
    f"delta-{name}-{numbers}-{dtype}": partial(check, numbers=numbers, dtype=dtype)
    for name, check in (("step", check_step), ("draft-runs", check_draft_runs))
    for numbers, dtype in product(KINDS, DTYPES)
}

CASES |= {f"delta-chunks-{numbers}": partial(check_chunks, numbers=numbers, dtype=torch.float32) for numbers in KINDS}
CASES |= {
    f"delta-chunks-{dtype}": partial(check_chunks, numbers=KINDS[0], dtype=dtype)
    for dtype in (torch.bfloat16, torch.float16)
}


def launch_step(
    num_rows: int,
    numbers: tuple[int, ...] = (16, 32, 128, 128, 4),
    dtype: torch.dtype = torch.bfloat16,
    *,
    has_runs: bool = False,
    chunks: Sequence[Chunk] = (),
) -> None:
    """A step of one layer, by default of Qwen3-Next on one rank, whose inputs begin a batch with prompts; only if there
    are ``chunks`` of them their kernels are launched, which take long to compile."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kind = kind_of(numbers)
    heads, width = kind.num_value_heads, kind.value_dim
    rule = DeltaRule(kind, empty(kind.taps, kind.num_channels), empty(heads), empty(heads), empty(width), 1e-6)
    states = LayerStates(empty(9, kind.taps - 1, kind.num_channels), empty(9, heads, kind.key_dim, width))
    num_tokens = num_rows + 5 + sum(chunk.num_tokens for chunk in chunks)
    mixed = empty(num_tokens, kind.num_channels + heads * width, dtype=dtype)
    gates, slots = empty(num_tokens, 2 * heads, dtype=dtype), empty(num_tokens, dtype=torch.int32)
    step = implementation("gated_delta_net_decode", "triton")
    runs = empty(num_rows, 2, dtype=torch.int32) if has_runs else None
    step(mixed[:num_rows], gates[:num_rows], rule, states, slots[:num_rows], runs)
    if chunks:
        prefill = implementation("gated_delta_net_prefill", "triton")
        prefill(mixed[num_rows:], gates[num_rows:], rule, states, list(chunks))


def launch_all() -> None:
    """Qwen3-Next and Qwen3.5 on one rank, on one of 2 and of 16, in every type, and the largest heads."""
    launch_step(7, chunks=chunks_of(PROMPTS))
    launch_step(7, (8, 16, 128, 128, 4), chunks=chunks_of(PROMPTS))
    launch_step(7, (16, 48, 128, 128, 4))
    launch_step(7, has_runs=True)
    for dtype in DTYPES:
        launch_step(7, (1, 2, 128, 128, 4), dtype)
    launch_step(7, (1, 1, 256, 256, 4), chunks=chunks_of(PROMPTS))


def check_compiled(kernel: Any, capability: int) -> None:
    """Dependent launch where the GPU has it; the registers hold all that programs of chunks need."""
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
    if kernel.name in ("solve_tiles_kernel", "scan_tiles_kernel"):
        assert spilled_bytes(kernel) == 0, kernel.name
