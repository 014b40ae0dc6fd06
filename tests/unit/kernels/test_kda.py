"""Kimi delta attention.  Oracle: transformers' two functions and gate, and a chunk that is computed token by token."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from tests.unit.kernels.recurrent_runs import NUM_SLOTS, RUNS, check_chunks, chunks_of, copy_of, random_states
from tp_engine.cpu.library import native_library
from tp_engine.cpu.recurrent import kda_decode as native_decode
from tp_engine.cpu.recurrent import kda_prefill as native_prefill
from tp_engine.kernels.kda import KdaRule, attend_in_chunks, kda_decode, kda_prefill
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.model_config.kv_layout import StateKind

needs_library = pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")


def kind_of(heads: int, dim: int, taps: int = 4) -> StateKind:
    return StateKind(num_key_heads=heads, num_value_heads=heads, key_dim=dim, value_dim=dim, taps=taps)


KINDS = [kind_of(2, 16), kind_of(3, 8, 2), kind_of(1, 20, 5)]


class Inputs(NamedTuple):
    """What the projections make of some tokens: q, k and v; beta; decays; z."""

    mixed: torch.Tensor
    beta: torch.Tensor
    decay: torch.Tensor
    z: torch.Tensor

    def rows(self, own: slice) -> Inputs:
        return Inputs(*(one[own] for one in self))


def inputs_of(kind: StateKind, num_tokens: int, lower_bound: float = 0.0) -> tuple[Inputs, KdaRule]:
    """Decays from slow to fast; parts of wider rows, as the layer's are."""
    heads, width = kind.num_key_heads, kind.num_key_heads * kind.key_dim
    rate = -torch.logspace(-2, 1, heads)
    norm, bias, conv = torch.randn(kind.key_dim), torch.randn(width), torch.randn(kind.taps, kind.num_channels)
    rule = KdaRule(kind, conv, rate, bias, norm, 1e-6, lower_bound)
    wide = torch.randn(num_tokens, 5 * width + heads)
    return Inputs(*wide.split((3 * width, heads, width, width), 1)), rule


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 100])
def test_chunks_equal_transformers(kind: StateKind, num_tokens: int) -> None:
    """Oracle: ``chunk_kimi_delta_attention`` and ``recurrent_kimi_delta_attention``, with a state before."""
    from transformers.models.kimi_linear import modeling_kimi_linear as oracle

    heads, dim = kind.num_key_heads, kind.key_dim
    query, key, value = torch.randn(3, num_tokens, heads, dim)
    decay, beta = -torch.rand(num_tokens, heads, dim) * 3, torch.rand(num_tokens, heads)
    state = torch.randn(heads, dim, dim)
    query, key = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (query, key))
    found, behind = attend_in_chunks(query * dim**-0.5, key, value, decay, beta, state)
    given = [one.unsqueeze(0) for one in (query, key, value, decay, beta)]
    for function in (oracle.chunk_kimi_delta_attention, oracle.recurrent_kimi_delta_attention):
        expected, last = function(*given, initial_state=state.unsqueeze(0), output_final_state=True)
        torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(behind, last[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bound", [0.0, -5.0])
def test_decays_and_gates_equal_transformers(bound: float) -> None:
    """Oracle: the modules of the two classes, of which one bounds decays; a token after nothing, for whose state the
    decay does not count, and one after it."""
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextForgetGate
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearForgetGate, KimiLinearRMSNormGated

    kind = kind_of(2, 16, 2)
    inputs, rule = inputs_of(kind, 3, bound)

    class Config:
        hidden_size, linear_head_dim, linear_num_heads, linear_lower_bound = 8, 16, 2, bound

    gate = (Glm5NextTextForgetGate if bound else KimiLinearForgetGate)(Config())
    gate.f_a_proj = gate.f_b_proj = torch.nn.Identity()
    gate.A_log.data, gate.dt_bias.data = (-rule.decay).log().view(gate.A_log.shape), rule.dt_bias
    g = gate(inputs.decay.unsqueeze(0))[0]
    norm = KimiLinearRMSNormGated(16, eps=rule.eps)
    norm.weight.data = rule.norm
    padded = F.pad(inputs.mixed.t(), (1, 0)).unsqueeze(0)
    turned = F.silu(F.conv1d(padded, rule.conv.t().unsqueeze(1), groups=96))[0].t()
    query, key, value = turned.unflatten(1, (3, 2, 16)).unbind(1)
    query, key = (one * (one.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for one in (query, key))
    attended, _ = attend_in_chunks(query / 4, key, value, g, inputs.beta.sigmoid(), torch.zeros(2, 16, 16))
    expected = norm(attended, inputs.z.unflatten(1, (2, 16))).flatten(1)
    found = kda_prefill(*inputs, rule, None, [Chunk(0, 3, None, True)])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_chunks(kind: StateKind) -> None:
    """Oracle: the chunks of the same tokens, one of which goes on after another."""
    inputs, rule = inputs_of(kind, 40)
    states = random_states(kind, 3)
    by_chunks, by_steps = copy_of(states), copy_of(states)
    expected = kda_prefill(*inputs, rule, by_chunks, [Chunk(0, 25, 1, True)])
    again = kda_prefill(*inputs.rows(slice(25, 40)), rule, by_chunks, [Chunk(0, 15, 1, False)])
    by_steps.conv[1], by_steps.recurrent[1] = 0.0, 0.0
    found = [kda_decode(*inputs.rows(slice(i, i + 1)), rule, by_steps, torch.tensor([1]).int()) for i in range(40)]
    torch.testing.assert_close(torch.cat(found), torch.cat((expected, again)), rtol=1e-4, atol=1e-4)
    for one, other in zip(by_steps, by_chunks, strict=True):
        torch.testing.assert_close(one[:3], other[:3], rtol=1e-4, atol=1e-4)


@needs_library
@pytest.mark.parametrize("bound", [0.0, -5.0])
@pytest.mark.parametrize("kind", [*KINDS, kind_of(2, 128)])
def test_native_chunks(kind: StateKind, bound: float) -> None:
    """Oracle: the twin; and the tokens one by one, bit by bit."""
    library = native_library()
    chunks = chunks_of(RUNS)
    inputs, rule = inputs_of(kind, sum(count for _, count, *_ in chunks), bound)
    before = random_states(kind, NUM_SLOTS)
    expected_states, states = copy_of(before), copy_of(before)
    expected = kda_prefill(*inputs, rule, expected_states, chunks)
    found = native_prefill(library, *inputs, rule, states, chunks)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)
    for one, other in zip(states, expected_states, strict=True):
        torch.testing.assert_close(one[:-1], other[:-1], rtol=2e-4, atol=2e-4)

    def step(own: slice, at: LayerStates, slots: torch.Tensor) -> torch.Tensor:
        return native_decode(library, *inputs.rows(own), rule, at, slots)

    def prefill(own: slice, at: LayerStates, of: list[Chunk]) -> torch.Tensor:
        return native_prefill(library, *inputs.rows(own), rule, at, of)

    check_chunks(chunks, before, found, states, step, prefill)


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_native_decodes_with_draft_rows(dtype: torch.dtype) -> None:
    """Oracle: the twin, of rows with draft rows, without, and padding, whose output is 0."""
    kind = kind_of(2, 16)
    inputs, rule = inputs_of(kind, 6)
    inputs = Inputs(*(one.to(dtype) for one in inputs))
    slots = torch.tensor([3, 1, -1, 0, 2, 4]).int()
    runs = torch.tensor([[3, 2], [0, 0], [0, 0], [0, -1], [0, -1], [5, 0]]).int()
    before = random_states(kind, 6)
    states, expected_states = copy_of(before), copy_of(before)
    found = native_decode(native_library(), *inputs, rule, states, slots, runs)
    expected = kda_decode(*inputs, rule, expected_states, slots, runs)
    own = slots >= 0
    assert not found[~own].any()
    torch.testing.assert_close(found[own].float(), expected[own].float(), rtol=2e-2, atol=2e-2)
    for one, other in zip(states, expected_states, strict=True):
        torch.testing.assert_close(one[:-1], other[:-1], rtol=1e-4, atol=1e-4)
