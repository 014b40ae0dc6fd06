"""Prompts of layers with a recurrent state, on a GPU: Triton's kernels for all chunks at once, or plain PyTorch.

No GPU of ours has run these kernels yet, so PyTorch is the code's own choice, with 1,095 launches a layer for 8,192
tokens of the delta rule; a GPU takes the kernel once it has proven itself there.  Its states are compared, too: one
product of tf32 instead of float32 is a hundred times the bound.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import torch

from tp_engine.kernels.candidates import MANY, Candidate, Inputs, Operation, Run, Shape, normal, why_no_triton
from tp_engine.kernels.gated_delta_net import DeltaRule
from tp_engine.kernels.mamba2 import Mamba2Rule
from tp_engine.kernels.ops import Kind, implementation
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.short_conv import ShortConvRule
from tp_engine.model_config.kv_layout import StateKind

_NUM_SLOTS = 4
# Behind a state, longer than tiles; fresh; and one whose state is not kept.
_SLOTS = ((1, False), (0, False), (2, True), (None, False))

Draw: TypeAlias = Callable[..., torch.Tensor]
MakeInputs: TypeAlias = Callable[[StateKind, int, torch.dtype, Draw], tuple[tuple[torch.Tensor, ...], Any]]
"""Of a kind, a number of tokens and their type: what the layer's readers give, and the rule."""


def shape_of(kind: StateKind, dtype: torch.dtype) -> Shape:
    """The shape of prompts of a layer of ``kind``, a rank's part of it, with tokens of ``dtype``."""
    return {
        "key_heads": kind.num_key_heads, "value_heads": kind.num_value_heads, "key": kind.key_dim,
        "value": kind.value_dim, "taps": kind.taps, "type": str(dtype).removeprefix("torch."),
    }  # fmt: skip


def _kind(shape: Shape) -> StateKind:
    return StateKind(
        num_key_heads=int(shape["key_heads"]), num_value_heads=int(shape["value_heads"]), key_dim=int(shape["key"]),
        value_dim=int(shape["value"]), taps=int(shape["taps"]),
    )  # fmt: skip


def _of_delta(kind: StateKind, count: int, dtype: torch.dtype, draw: Draw) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Gates from slow to fast, and tokens that repeat, whose keys are alike."""
    heads = kind.num_value_heads
    mixed = draw(count, kind.num_channels + heads * kind.value_dim).to(dtype)
    mixed[count // 16 : count // 2] = mixed[count // 16]
    gates = (3 * draw(count, 2 * heads)).to(dtype)
    rule = DeltaRule(
        kind, draw(kind.taps, kind.num_channels), _decay(draw(heads)), draw(heads), draw(kind.value_dim), 1e-6
    )
    return (mixed, gates), rule


def _of_mamba2(kind: StateKind, count: int, dtype: torch.dtype, draw: Draw) -> tuple[tuple[torch.Tensor, ...], Any]:
    heads, conv = kind.num_value_heads, draw(kind.taps, kind.num_channels)
    mixed = draw(count, kind.num_channels + heads * (kind.value_dim + 1)).to(dtype)
    rule = Mamba2Rule(kind, conv, draw(kind.num_channels), _decay(draw(heads)), draw(heads), draw(heads))
    return (mixed,), rule


def _of_short_conv(kind: StateKind, count: int, dtype: torch.dtype, draw: Draw) -> tuple[tuple[torch.Tensor, ...], Any]:
    return (draw(count, 3 * kind.num_channels).to(dtype),), ShortConvRule(kind, draw(kind.taps, kind.num_channels))


def _decay(heads: torch.Tensor) -> torch.Tensor:
    """From slow to fast; ``heads`` says how many, and where."""
    return -torch.logspace(-4, 1, len(heads), dtype=torch.float32, device=heads.device)


def _inputs(make: MakeInputs, shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    def draw(*size: int) -> torch.Tensor:
        return normal(size, device, generator)

    kind = _kind(shape)
    tokens, rule = make(kind, num_rows, getattr(torch, str(shape["type"])), draw)
    matrices = (_NUM_SLOTS, kind.num_value_heads, kind.key_dim, kind.value_dim)
    states = LayerStates(draw(_NUM_SLOTS, kind.taps - 1, kind.num_channels), draw(*matrices))
    return (*tokens, rule, states, _chunks(num_rows))


def _chunks(count: int) -> list[Chunk]:
    ends = sorted({0, 1, count * 6 // 10, count * 8 // 10, count})
    return [Chunk(begin, end - begin, *where) for (begin, end), where in zip(pairwise(ends), _SLOTS, strict=False)]


def _states(inputs: Inputs) -> LayerStates:
    found = inputs[-2]
    assert isinstance(found, LayerStates)
    return found


def _twin(name: str, weights: None, shape: Shape, inputs: Inputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    run = implementation(name, "twin")
    *tokens, rule, states, chunks = inputs
    wide_states = LayerStates(*(part.double() for part in states))
    exact = run(*(one.double() for one in tokens), _in_float64(rule), wide_states, chunks)
    plain = run(*inputs)
    return [exact, *wide_states], [plain, *states]


def _in_float64(rule: Any) -> Any:
    values = {name: getattr(rule, name) for name in type(rule).__dataclass_fields__}
    return type(rule)(**{name: one.double() if isinstance(one, torch.Tensor) else one for name, one in values.items()})


def _operation(name: str, make: MakeInputs, sources: tuple[str, ...]) -> Operation:
    def build(kind: Kind, weights: None, shape: Shape) -> Run:
        return implementation(name, kind)

    return Operation(
        candidates=(
            Candidate(name="torch", build=partial(build, "twin")),
            Candidate(name="triton", build=partial(build, "triton"), why_not=why_no_triton),
        ),
        default=lambda shape, device: ((MANY, "torch"),),
        inputs=partial(_inputs, make),
        twin=partial(_twin, name),
        num_bytes=lambda shape: 4 * _kind(shape).num_elements,
        sources=("kernels/recurrent*.py", *sources),
        rows_of=None,
        changed=_states,
        is_by_row=False,
        is_recorded=False,
        comes_first=True,
    )


GATED_DELTA_NET = _operation("gated_delta_net_prefill", _of_delta, ("kernels/gated_delta_net*.py",))
MAMBA2 = _operation("mamba2_prefill", _of_mamba2, ("kernels/mamba2*.py",))
SHORT_CONV = _operation("short_conv_prefill", _of_short_conv, ("kernels/short_conv*.py",))
