"""Mamba2's state space layer.  Oracles: transformers' mixer, and a chunk that is computed token by token."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.unit.kernels.recurrent_runs import NUM_SLOTS, RUNS, check_chunks, chunks_of, copy_of, random_states
from tp_engine.cpu import recurrent as native
from tp_engine.cpu.library import native_library
from tp_engine.kernels.mamba2 import Mamba2Rule, group_squares, mamba2_decode, mamba2_prefill, norm_groups
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.model_config.kv_layout import StateKind

KINDS = [
    StateKind(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=8, taps=4),
    StateKind(num_key_heads=1, num_value_heads=11, key_dim=8, value_dim=16, taps=2),
    StateKind(num_key_heads=3, num_value_heads=3, key_dim=20, value_dim=40, taps=5),
    StateKind(num_key_heads=2, num_value_heads=4, key_dim=128, value_dim=64, taps=4),
]


def rule_of(kind: StateKind) -> Mamba2Rule:
    heads = kind.num_value_heads
    return Mamba2Rule(
        kind,
        torch.randn(kind.taps, kind.num_channels) * kind.taps**-0.5,
        torch.randn(kind.num_channels),
        -torch.rand(heads) * 2,
        torch.randn(heads),
        torch.randn(heads),
    )


def inputs_of(kind: StateKind, num_tokens: int) -> torch.Tensor:
    width = kind.num_channels + kind.num_value_heads * (kind.value_dim + 1)
    return torch.randn(num_tokens, width)


def library_or_skip() -> Any:
    library = native_library()
    if library is None:
        pytest.skip("no compiled kernels")
    return library


def mixer_of(kind: StateKind, hidden_size: int, **changes: Any) -> Any:
    """transformers' layer with random weights."""
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    config = NemotronHConfig(
        hidden_size=hidden_size,
        layers_block_type=["linear_attention"],
        mamba_num_heads=kind.num_value_heads,
        mamba_head_dim=kind.value_dim,
        ssm_state_size=kind.key_dim,
        n_groups=kind.num_key_heads,
        conv_kernel=kind.taps,
        **{"chunk_size": 32, "time_step_min": 1e-30, **changes},
    )
    mixer = NemotronHMamba2Mixer(config, 0)
    with torch.no_grad():
        for name, weight in mixer.named_parameters():
            weight.copy_(torch.randn_like(weight) * (0.3 if name.endswith("weight") else 1.0))
        mixer.norm.weight.add_(1.0)
    return mixer.eval()


class Twin:
    """The same layer of the twin's operations: ``in_proj`` has the rows [z | x | B | C | dt]."""

    def __init__(self, mixer: Any, kind: StateKind) -> None:
        self._kind, self._mixer = kind, mixer
        inner, keys = kind.num_value_heads * kind.value_dim, kind.num_key_heads * kind.key_dim
        x, b, c = (
            torch.arange(start, start + size) for start, size in ((0, inner), (inner, keys), (inner + keys, keys))
        )
        channels, rest = (
            torch.cat((c, b, x)),
            torch.arange(2 * inner + 2 * keys, 2 * inner + 2 * keys + kind.num_value_heads),
        )
        self.weight = mixer.in_proj.weight[torch.cat((channels + inner, torch.arange(inner), rest))]
        conv = mixer.conv1d
        taps, bias = conv.weight.squeeze(1).t()[:, channels].contiguous(), conv.bias[channels].contiguous()
        self.rule = Mamba2Rule(kind, taps, bias, -mixer.A_log.exp(), mixer.dt_bias, mixer.D)

    def finish(self, scanned: torch.Tensor) -> torch.Tensor:
        kind, norm = self._kind, self._mixer.norm
        normed = norm_groups(scanned, norm.weight, kind.num_key_heads, norm.variance_epsilon, None, norm.group_size)
        return F.linear(normed, self._mixer.out_proj.weight)

    def run(self, x: torch.Tensor, cuts: list[int]) -> torch.Tensor:
        """``x`` (T, hidden) in chunks that end at ``cuts``, then one by one."""
        mixed, states, parts = F.linear(x, self.weight), random_states(self._kind, 1), []
        for first, end in pairwise([0, *cuts]):
            chunk = [Chunk(0, end - first, 0, first == 0)]
            parts.append(mamba2_prefill(mixed[first:end], self.rule, states, chunk))
        slots = torch.zeros(1, dtype=torch.int32)
        parts += [mamba2_decode(mixed[token, None], self.rule, states, slots) for token in range(cuts[-1], len(x))]
        return self.finish(torch.cat(parts))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 65])
def test_chunks_and_steps_equal_transformers(kind: StateKind, chunk: int) -> None:
    """Oracle: ``NemotronHMamba2Mixer`` over all tokens at once; it has a smallest step in its chunks alone, which is
    set to none."""
    mixer, num_tokens = mixer_of(kind, 48), 2 * chunk + 6
    x = torch.randn(num_tokens, 48)
    found = Twin(mixer, kind).run(x, [chunk, 2 * chunk])
    torch.testing.assert_close(found, mixer(x[None])[0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_steps_have_no_bounds() -> None:
    """Oracle: transformers' mixer, whose chunks take a step below 0.001 for 0.001 unless that is configured away: its
    own decode, other engines and this one do not."""
    kind, x = KINDS[0], torch.randn(40, 48)
    mixer, bounded = mixer_of(kind, 48), mixer_of(kind, 48, time_step_min=0.001)
    mixer.in_proj.weight[-kind.num_value_heads :] *= 0.1
    mixer.dt_bias.copy_(torch.tensor([-8.0, -9.0, -10.0, -12.0]))  # steps of 3e-4 to 6e-6
    mixer.D.zero_()
    bounded.load_state_dict(mixer.state_dict())
    found, expected = Twin(mixer, kind).run(x, [40]), mixer(x[None])[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (bounded(x[None])[0] - expected).abs().max() > 1e-2


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_c", [True, False])
def test_groups_are_normalised(num_ranks: int, dtype: torch.dtype, in_c: bool) -> None:
    """Oracle: transformers' norm of the whole row, of which each rank has a part of every group."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHRMSNormGated

    squares_of, norm = group_squares, norm_groups
    if in_c:
        library = library_or_skip()
        squares_of, norm = partial(native.group_squares, library), partial(native.norm_groups, library)
    whole = NemotronHRMSNormGated(88, 44, eps=1e-5)
    whole.weight.data = torch.randn(88).to(dtype).float()
    x = torch.randn(5, 88)
    expected = whole(x)
    parts = [x.view(5, 2, num_ranks, -1)[:, :, rank].flatten(1) for rank in range(num_ranks)]
    weights = [whole.weight.data.view(2, num_ranks, -1)[:, rank].flatten().to(dtype) for rank in range(num_ranks)]
    squares = torch.stack([squares_of(part, 2) for part in parts]).sum(0) if num_ranks > 1 else None
    found = [norm(part, own, 2, 1e-5, squares, 44) for part, own in zip(parts, weights, strict=True)]
    assert found[0].dtype is dtype
    joined = torch.stack([one.view(5, 2, -1) for one in found], 2).flatten(1)
    tolerance = max(1e-5, torch.finfo(dtype).eps)
    torch.testing.assert_close(joined.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [1, 9])
def test_steps_in_c(dtype: torch.dtype, num_rows: int) -> None:
    """Oracle: the twin; with several threads and padding the same bits as each row alone."""
    library = library_or_skip()
    for kind in KINDS:
        mixed, rule, states = inputs_of(kind, num_rows).to(dtype), rule_of(kind), random_states(kind, num_rows + 2)
        expected_states, alone = copy_of(states), copy_of(states)
        slots = torch.randperm(num_rows + 2)[:num_rows].int()
        slots[-1] = -1 if num_rows > 1 else slots[-1]
        found = native.mamba2_decode(library, mixed, rule, states, slots)
        expected = mamba2_decode(mixed, rule, expected_states, slots)
        used = slots >= 0
        torch.testing.assert_close(found[used], expected[used], rtol=1e-5, atol=1e-4)
        assert not found[~used].any()
        for own, other in zip(states, expected_states, strict=True):
            torch.testing.assert_close(own[:-1], other[:-1], rtol=1e-5, atol=1e-5)
        for row in range(num_rows):
            own_row = slice(row, row + 1)
            one = native.mamba2_decode(library, mixed[own_row], rule, alone, slots[own_row])
            assert torch.equal(one, found[own_row])
        assert all(torch.equal(one, other) for one, other in zip(states, alone, strict=True))


# Places of each run's tokens: with draft rows behind the others, in any order; the last row is padding.
DRAFT_RUNS = [[0, 3, 4, 5, 6, 7, 8], [1], [2, 9, 10], [11]]


@pytest.mark.parametrize("in_c", [True, False])
def test_draft_rows_go_on_behind_their_row(in_c: bool) -> None:
    """Oracle: the tokens of a run one by one in the row's own slot, in C bit by bit, outputs and the state behind each;
    slots of other rows stay as they are."""
    rtol, atol = (0.0, 0.0) if in_c else (1e-5, 1e-5)
    step = partial(native.mamba2_decode, library_or_skip()) if in_c else mamba2_decode
    runs = torch.tensor([[0, -1]] * 12, dtype=torch.int32)
    for first, *behind in DRAFT_RUNS:
        runs[first] = torch.tensor([behind[0] if behind else 0, len(behind)])
    for kind in KINDS:
        mixed, rule, states = inputs_of(kind, 12), rule_of(kind), random_states(kind, 14)
        before, slots = copy_of(states), torch.randperm(14)[:12].int()
        slots[11] = -1
        found = step(mixed, rule, states, slots, runs)
        for places in DRAFT_RUNS[:-1]:
            alone, own = copy_of(before), slots[places[:1]]
            for place in places:
                one = step(mixed[place : place + 1], rule, alone, own)
                torch.testing.assert_close(one, found[place : place + 1], rtol=rtol, atol=atol)
                for part, other in zip(states, alone, strict=True):
                    torch.testing.assert_close(part[slots[place]], other[own[0]], rtol=rtol, atol=atol)
        unused = sorted({*range(14)} - {*slots.tolist()})
        assert all(torch.equal(part[unused], old[unused]) for part, old in zip(states, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_in_c(kind: StateKind, dtype: torch.dtype) -> None:
    """Oracles: the twin; and bit by bit, states and outputs, the tokens of each row one by one in C, the same tokens in
    other chunks and batches with another number of threads, and the slots that no chunk names."""
    library, rule = library_or_skip(), rule_of(kind)
    chunks = chunks_of(RUNS)
    wide = inputs_of(kind, sum(count for count, *_ in RUNS))
    mixed = torch.cat((wide, wide[:, :8]), 1).to(dtype)[:, :-8]
    states = random_states(kind, NUM_SLOTS)
    before, of_twin = copy_of(states), copy_of(states)
    found = native.mamba2_prefill(library, mixed, rule, states, chunks)
    expected = mamba2_prefill(mixed, rule, of_twin, chunks)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    for own, other in zip(states, of_twin, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)

    def step(rows: slice, own: LayerStates, slots: torch.Tensor) -> torch.Tensor:
        return native.mamba2_decode(library, mixed[rows], rule, own, slots)

    def prefill(rows: slice, own: LayerStates, piece: list[Chunk]) -> torch.Tensor:
        return native.mamba2_prefill(library, mixed[rows], rule, own, piece)

    check_chunks(chunks, before, found, states, step, prefill)


def test_tokens_whose_state_is_not_kept() -> None:
    """Oracle: a row that begins with the same tokens, bit by bit."""
    kind, library = KINDS[2], library_or_skip()
    mixed, rule = inputs_of(kind, 7), rule_of(kind)
    for prefill in (mamba2_prefill, partial(native.mamba2_prefill, library)):
        expected = prefill(mixed, rule, random_states(kind, 1), [Chunk(0, 7, 0, True)])
        assert torch.equal(prefill(mixed, rule, None, [Chunk(0, 7, None, False)]), expected)
