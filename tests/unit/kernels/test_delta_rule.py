"""The gated delta rule.  Oracle: transformers' two functions, and a chunk that is computed token by token."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.unit.kernels.kernel_harness import needs_triton
from tests.unit.kernels.recurrent_runs import NUM_SLOTS, RUNS, check_chunks, chunks_of, copy_of, random_states
from tp_engine.cpu.library import native_library
from tp_engine.cpu.recurrent import gated_delta_net_decode as native_gated_delta_net_decode
from tp_engine.cpu.recurrent import gated_delta_net_prefill as native_gated_delta_net_prefill
from tp_engine.kernels.gated_delta_net import (
    LENGTH_EPS,
    DeltaRule,
    attend_in_chunks,
    gated_delta_net_decode,
    gated_delta_net_prefill,
)
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.model_config.kv_layout import StateGroup, StateKind
from tp_engine.plan import StepPlan
from tp_engine.worker.batch.recurrent_states import RecurrentStatePool

KINDS = [
    StateKind(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, taps=4),
    StateKind(num_key_heads=1, num_value_heads=3, key_dim=8, value_dim=16, taps=2),
    StateKind(num_key_heads=3, num_value_heads=3, key_dim=16, value_dim=16, taps=4),
]

LARGER = [
    StateKind(num_key_heads=2, num_value_heads=6, key_dim=128, value_dim=128, taps=4),
    StateKind(num_key_heads=1, num_value_heads=2, key_dim=20, value_dim=40, taps=5),
]


class Inputs(NamedTuple):
    """What the projections make of some tokens, and a layer's constants."""

    mixed: torch.Tensor
    gates: torch.Tensor
    rule: DeltaRule


def inputs_of(kind: StateKind, num_tokens: int) -> Inputs:
    width = kind.num_channels + kind.num_value_heads * kind.value_dim
    rule = DeltaRule(
        kind,
        torch.randn(kind.taps, kind.num_channels),
        -torch.rand(kind.num_value_heads) * 2,
        torch.randn(kind.num_value_heads),
        torch.randn(kind.value_dim),
        1e-6,
    )
    return Inputs(torch.randn(num_tokens, width), torch.randn(num_tokens, 2 * kind.num_value_heads), rule)


def kept(states: LayerStates) -> list[torch.Tensor]:
    """All slots but the last."""
    return [part[:-1] for part in states]


def assert_close(found: LayerStates, expected: LayerStates) -> None:
    for one, other in zip(kept(found), kept(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 65, 200])
def test_chunks_equal_transformers(kind: StateKind, num_tokens: int) -> None:
    """Oracle: ``torch_chunk_gated_delta_rule`` and ``torch_recurrent_gated_delta_rule``, with a state before."""
    from transformers.models.qwen3_next import modeling_qwen3_next as oracle

    heads, dims = (kind.num_key_heads, kind.num_value_heads), (kind.key_dim, kind.value_dim)
    query, key = torch.randn(2, num_tokens, heads[0], dims[0])
    value, state = torch.randn(num_tokens, heads[1], dims[1]), torch.randn(heads[1], *dims)
    decay, beta = -3 * torch.rand(num_tokens, heads[1]), torch.rand(num_tokens, heads[1])
    unit_query, unit_key = (x * (x.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt() for x in (query, key))
    found = attend_in_chunks(unit_query * dims[0] ** -0.5, unit_key, value, decay, beta, state)
    for function in (oracle.torch_chunk_gated_delta_rule, oracle.torch_recurrent_gated_delta_rule):
        expected = function(
            query[None],
            key[None],
            value[None],
            g=decay[None],
            beta=beta[None],
            initial_state=state[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [(1, 2), (3, 70), (130,)])
def test_chunks_equal_steps(kind: StateKind, lengths: tuple[int, ...]) -> None:
    """Oracle: the same tokens one by one, in slots 2, 1, ...; the first row goes on, the others begin."""
    mixed, gates, rule = inputs_of(kind, sum(lengths))
    states = random_states(kind, 4)
    others = copy_of(states)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    chunks = [
        Chunk(start, count, 2 - index, index > 0)
        for index, (start, count) in enumerate(zip(starts, lengths, strict=True))
    ]
    found, expected = gated_delta_net_prefill(mixed, gates, rule, states, chunks), []
    for start, count, slot, is_fresh in chunks:
        assert slot is not None
        if is_fresh:
            others.conv[slot], others.recurrent[slot] = 0.0, 0.0
        for token in range(start, start + count):
            own, where = slice(token, token + 1), torch.tensor([slot], dtype=torch.int32)
            expected.append(gated_delta_net_decode(mixed[own], gates[own], rule, others, where))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-4, atol=1e-5)
    assert_close(states, others)


@pytest.mark.parametrize("cut", [1, 2, 3, 64, 99])
def test_a_chunk_goes_on_where_the_last_one_ended(cut: int) -> None:
    """Oracle: all tokens at once."""
    kind = KINDS[0]
    mixed, gates, rule = inputs_of(kind, 100)
    states = random_states(kind, 1)
    whole = copy_of(states)
    expected = gated_delta_net_prefill(mixed, gates, rule, whole, [Chunk(0, 100, 0, True)])
    first = gated_delta_net_prefill(mixed[:cut], gates[:cut], rule, states, [Chunk(0, cut, 0, True)])
    second = gated_delta_net_prefill(mixed[cut:], gates[cut:], rule, states, [Chunk(0, 100 - cut, 0, False)])
    torch.testing.assert_close(torch.cat((first, second)), expected, rtol=1e-4, atol=1e-5)
    assert_close(states, whole)


def test_padding_changes_nothing() -> None:
    """Oracle: the states before, bit by bit, and the outputs of the other rows alone."""
    kind = KINDS[1]
    mixed, gates, rule = inputs_of(kind, 3)
    states = random_states(kind, 4)
    before, alone = copy_of(states), copy_of(states)
    found = gated_delta_net_decode(mixed, gates, rule, states, torch.tensor([-1, 2, -1], dtype=torch.int32))
    expected = gated_delta_net_decode(mixed[1:2], gates[1:2], rule, alone, torch.tensor([2], dtype=torch.int32))
    assert torch.equal(found[1:2], expected)
    for now, then, other in zip(states, before, alone, strict=True):
        assert torch.equal(now[:-1], other[:-1]) and torch.equal(now[[0, 1, 3]], then[[0, 1, 3]])


def test_tokens_whose_state_is_not_kept() -> None:
    """Oracle: a row that begins with the same tokens."""
    kind = KINDS[2]
    mixed, gates, rule = inputs_of(kind, 7)
    expected = gated_delta_net_prefill(mixed, gates, rule, random_states(kind, 1), [Chunk(0, 7, 0, True)])
    assert torch.equal(gated_delta_net_prefill(mixed, gates, rule, None, [Chunk(0, 7, None, False)]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_steps_in_c(dtype: torch.dtype, num_rows: int) -> None:
    """Oracle: the twin; with several threads and padding the same bits as each row alone."""
    library = native_library()
    if library is None:
        pytest.skip("no compiled kernels")
    for kind in (*KINDS, *LARGER):
        mixed, gates, rule = inputs_of(kind, num_rows)
        mixed, gates = mixed.to(dtype), gates.to(dtype)
        states = random_states(kind, num_rows + 2)
        expected_states, alone = copy_of(states), copy_of(states)
        slots = torch.randperm(num_rows + 2)[:num_rows].int()
        slots[-1] = -1 if num_rows > 1 else slots[-1]
        found = native_gated_delta_net_decode(library, mixed, gates, rule, states, slots)
        expected = gated_delta_net_decode(mixed, gates, rule, expected_states, slots)
        tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
        used = slots >= 0
        torch.testing.assert_close(found[used], expected[used], rtol=tolerance, atol=tolerance)
        assert not found[~used].any()
        assert_close(states, expected_states)
        for row in range(num_rows):
            own = slice(row, row + 1)
            one = native_gated_delta_net_decode(library, mixed[own], gates[own], rule, alone, slots[own])
            assert torch.equal(one, found[own])
        assert all(torch.equal(one, other) for one, other in zip(states, alone, strict=True))


# Places of each run's tokens: with draft rows behind the others, in any order; the last row is padding.
DRAFT_RUNS = [[0, 3, 4, 5, 6, 7, 8], [1], [2, 9, 10], [11]]


def runs_of(places: list[list[int]]) -> torch.Tensor:
    found = torch.tensor([[0, -1]] * sum(map(len, places)), dtype=torch.int32)
    for own, *behind in places:
        found[own] = torch.tensor([behind[0] if behind else 0, len(behind)])
    return found


@pytest.mark.parametrize("in_c", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draft_rows_go_on_behind_their_row(in_c: bool, dtype: torch.dtype) -> None:
    """Oracle: the tokens of a run one by one in the row's own slot, in C bit by bit, outputs and the state behind each;
    slots of other rows stay as they are."""
    rtol, atol = (0.0, 0.0) if in_c else (1e-2 if dtype is torch.bfloat16 else 1e-5, 1e-5)
    library = native_library()
    if in_c and library is None:
        pytest.skip("no compiled kernels")
    step = partial(native_gated_delta_net_decode, library) if in_c and library else gated_delta_net_decode
    for kind in (*KINDS, *LARGER):
        mixed, gates, rule = inputs_of(kind, 12)
        mixed, gates = mixed.to(dtype), gates.to(dtype)
        states = random_states(kind, 14)
        before, one_by_one = copy_of(states), copy_of(states)
        slots = torch.randperm(14)[:12].int()
        slots[11] = -1
        found = step(mixed, gates, rule, states, slots, runs_of(DRAFT_RUNS))
        for places in DRAFT_RUNS[:-1]:
            own = slots[places[0]].reshape(1)
            for place in places:
                row = slice(place, place + 1)
                alone = step(mixed[row], gates[row], rule, one_by_one, own)
                torch.testing.assert_close(alone, found[row], rtol=rtol, atol=atol)
                for part, other in zip(states, one_by_one, strict=True):
                    torch.testing.assert_close(part[slots[place]], other[own[0]], rtol=rtol, atol=atol)
                if place == places[0]:
                    first = copy_of(one_by_one)
            for part, other in zip(one_by_one, first, strict=True):
                part[own[0]] = other[own[0]]
        unused = sorted({*range(14)} - {*slots.tolist()})
        assert all(torch.equal(part[unused], old[unused]) for part, old in zip(states, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [*KINDS, *LARGER])
def test_chunks_in_c(kind: StateKind, dtype: torch.dtype) -> None:
    """Oracles: the twin; and bit by bit, states and outputs, the tokens of each row one by one in C, the same tokens in
    other chunks and batches with another number of threads, and the slots that no chunk names."""
    library = native_library()
    if library is None:
        pytest.skip("no compiled kernels")
    chunks = chunks_of(RUNS)
    wide, gates, rule = inputs_of(kind, sum(count for count, *_ in RUNS) + 3)
    mixed, gates = torch.cat((wide, wide[:, :8]), 1).to(dtype)[3:, :-8], gates.to(dtype)[3:]
    states = random_states(kind, NUM_SLOTS)
    before, of_twin = copy_of(states), copy_of(states)
    found = native_gated_delta_net_prefill(library, mixed, gates, rule, states, chunks)
    expected = gated_delta_net_prefill(mixed, gates, rule, of_twin, chunks)
    tolerance = max(1e-5, 2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(found, expected, rtol=10 * tolerance, atol=10 * tolerance)
    for own, other in zip(states, of_twin, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)

    def step(rows: slice, own: LayerStates, slots: torch.Tensor) -> torch.Tensor:
        return native_gated_delta_net_decode(library, mixed[rows], gates[rows], rule, own, slots)

    def prefill(rows: slice, own: LayerStates, piece: list[Chunk]) -> torch.Tensor:
        return native_gated_delta_net_prefill(library, mixed[rows], gates[rows], rule, own, piece)

    check_chunks(chunks, before, found, states, step, prefill)


def test_chunks_in_c_without_states() -> None:
    """Oracle: rows that begin with the same tokens, bit by bit."""
    library = native_library()
    if library is None:
        pytest.skip("no compiled kernels")
    kind = KINDS[0]
    mixed, gates, rule = inputs_of(kind, 9)
    rows = chunks_of([(4, 0, True), (5, 1, True)])
    expected = native_gated_delta_net_prefill(library, mixed, gates, rule, random_states(kind, 2), rows)
    nowhere = chunks_of([(4, None, True), (5, 1, False)])
    assert torch.equal(native_gated_delta_net_prefill(library, mixed, gates, rule, None, nowhere), expected)


def test_slots_are_copied_at_once() -> None:
    """Oracle: the slots before; two change places, and one is read twice.  There is one more, for padding."""
    group = StateGroup(tuple(enumerate(KINDS)))
    states = RecurrentStatePool(group, 3, torch.device("cpu"))
    states.raw.copy_(torch.randn(states.raw.shape))
    before = states.raw.clone()
    states.apply(StepPlan(step_id=1, state_copies=np.array([[0, 1], [1, 0], [1, 3]], dtype=np.int32)))
    assert torch.equal(states.raw, before[[1, 0, 2, 1]])
    assert states.raw.nbytes == 4 * group.slot_bytes


def test_states_are_kept_and_put_back() -> None:
    """Oracle: the slots before; rows that are not named, and padding, keep what was written meanwhile."""
    states = RecurrentStatePool(StateGroup(tuple(enumerate(KINDS))), 3, torch.device("cpu"))
    states.raw.copy_(torch.randn(states.raw.shape))
    before = states.raw.clone()
    put_back = states.keep_rows(torch.tensor([3, -1, 1], dtype=torch.int32))
    states.raw.zero_()
    put_back()
    assert torch.equal(states.raw[[1, 3]], before[[1, 3]]) and not states.raw[[0, 2]].any()


@needs_triton
def test_prompts_take_few_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the launches of one layer for 32 prompts, one of them of 8,192 tokens, by hand; in PyTorch they are above
    two thousand."""
    from triton.runtime.jit import JITFunction

    from tests.unit.kernels.kernel_cases_delta import launch_step
    from tests.unit.kernels.kernel_cases_mamba import launch

    launched: list[str] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **__: launched.append(self.fn.__name__))
    monkeypatch.setattr("tp_engine.kernels.dependent_launch_triton.can_launch_early", lambda device: True)
    chunks = chunks_of([(8192, 0, True), *((40, slot, True) for slot in range(1, 32))])
    launch_step(0, chunks=chunks)
    assert launched == ["conv_chunks_kernel", "solve_tiles_kernel", "scan_tiles_kernel", "norm_outputs_kernel"]
    launched.clear()
    launch((8, 64, 128, 64, 4), chunks=chunks)
    assert launched[2:4] == ["conv_chunks_kernel", "mamba2_scan_kernel"], "between two of a step and those of a norm"
    assert len(launched) == 7
