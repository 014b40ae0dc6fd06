"""The run of one layer -> what it is made of.

Nothing is read from names: a module has the role that its inputs and outputs show.  Numbers of tokens are compared, so
a layer that does anything else between two modules is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from tp_engine.model_config.mlp import Activation, MlpSpec
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, NormSpec, QkNormSpec
from tp_engine.models.recognition.leaves import (
    HeadTurn,
    Rotations,
    activation_of,
    are_close,
    constant_ratio,
    norm_of,
    snapped,
)
from tp_engine.models.recognition.record import LayerRun, ModuleCall
from tp_engine.models.recognition.refusal import RefusalError


@dataclass(slots=True)
class RecognisedLayer:
    """A layer's description; ``turn`` is how it turns, ``names`` what each usual module name below it stands for."""

    spec: LayerSpec
    turn: HeadTurn | None
    names: dict[str, str] = field(default_factory=dict)


def recognise(run: LayerRun, module: nn.Module, rotations: Rotations, positions: torch.Tensor) -> RecognisedLayer:
    """Raises ``RefusalError``."""
    if len(run.asked) != 1:
        raise RefusalError(f"a layer attends {len(run.asked)} times in a step; native layers attend once")
    return _LayerReader(run, module, rotations, positions).read()


class _LayerReader:
    def __init__(self, run: LayerRun, module: nn.Module, rotations: Rotations, positions: torch.Tensor) -> None:
        assert run.read is not None and run.made is not None
        self._asked, self._read, self._made = run.asked[0], run.read[0], run.made[0]
        self._prefix, self._module = f"{run.path}.", module
        self._rotations, self._positions = rotations, positions
        self._linears = [call for call in run.calls if isinstance(call.module, nn.Linear)]
        others = [call for call in run.calls if not isinstance(call.module, nn.Linear)]
        self._norms = [call for call in others if any(True for _ in call.module.parameters())]
        self._used: list[ModuleCall] = []
        self._names: dict[str, str] = {}

    def read(self) -> RecognisedLayer:
        attention, turn, x = self._read_attention()
        o = self._take_linear("self_attn.o_proj", self._asked.out[0].flatten(1))
        input_norm = self._norm_before(x, self._read)
        mlp, y, down = self._read_mlp()
        attention = replace(attention, out_bias=o.module.bias is not None)
        if are_close(y, x):
            return self._parallel(attention, turn, mlp, input_norm, o, down)
        attention_out_norm, added = self._norm_after(o)
        mlp_out_norm, last = self._norm_after(down)
        before = next((call for call in self._norms if are_close(call.made, y)), None)
        middle = y if before is None else before.read[0]
        mlp_norm = None if before is None else self._norm(before)
        scale, again = (constant_ratio(middle - self._read, added), constant_ratio(self._made - middle, last))
        if scale is None or again is None or abs(scale - again) > 1e-4 * abs(scale):
            raise RefusalError("a block's output is not simply added to what the block reads")
        spec = LayerSpec(
            attention=attention, mlp=mlp, input_norm=input_norm, attention_out_norm=attention_out_norm,
            mlp_norm=mlp_norm, mlp_out_norm=mlp_out_norm, residual_scale=snapped(scale, self._module),
        )  # fmt: skip
        return self._finished(spec, turn)

    def _parallel(
        self, attention: Any, turn: Any, mlp: Any, norm: Any, o: ModuleCall, down: ModuleCall
    ) -> RecognisedLayer:
        scale = constant_ratio(self._made - self._read, o.made[0] + down.made[0])
        if scale is None:
            raise RefusalError("the outputs of attention and MLP, which read the same, are not simply added")
        spec = LayerSpec(
            attention=attention, mlp=mlp, input_norm=norm, is_parallel=True,
            residual_scale=snapped(scale, self._module),
        )  # fmt: skip
        return self._finished(spec, turn)

    def _finished(self, spec: LayerSpec, turn: HeadTurn | None) -> RecognisedLayer:
        unused = [call.path for call in (*self._linears, *self._norms) if call not in self._used]
        if unused:
            raise RefusalError(f"{unused[0]} has no role that is known")
        parameters = {id(one) for one in self._module.parameters()}
        known = {id(one) for call in self._used for one in call.module.parameters()}
        known |= {id(self._asked.sinks)} if self._asked.sinks is not None else set()
        left = parameters - known
        if left:
            name = next(name for name, one in self._module.named_parameters() if id(one) in left)
            raise RefusalError(f"{self._prefix}{name} has no role that is known")
        return RecognisedLayer(spec, turn, self._names)

    def _read_attention(self) -> tuple[AttentionSpec, HeadTurn | None, torch.Tensor]:
        asked = self._asked
        heads, kv_heads, dim = asked.sizes
        if asked.value.shape[3] != dim:
            raise RefusalError(f"its value heads have {asked.value.shape[3]} elements and its keys {dim}")
        query, key, value = (one[0].transpose(0, 1) for one in (asked.query, asked.key, asked.value))
        fused = next((one for one in self._linears if one.made.shape[-1] == (heads + 2 * kv_heads) * dim), None)
        norms: list[tuple[ModuleCall, ModuleCall] | None] = [None, None]
        if fused is not None and are_close(
            fused.made[0].split([heads * dim, kv_heads * dim, kv_heads * dim], -1)[2], value
        ):
            self._use(fused, "self_attn.qkv_proj")
            parts, x = fused.made[0].split([heads * dim, kv_heads * dim, kv_heads * dim], -1), fused.read[0]
            plain = [parts[0].unflatten(-1, (-1, dim)), parts[1].unflatten(-1, (-1, dim))]
            bias = fused.module.bias is not None
        else:
            v = next((one for one in self._linears if are_close(one.made[0], value)), None)
            if v is None:
                raise RefusalError("no linear layer makes the values that it attends to")
            self._use(v, "self_attn.v_proj")
            x, plain, biases = v.read[0], [], [v.module.bias is not None]
            for number, (name, turned) in enumerate((("q_proj", query), ("k_proj", key))):
                linear, norm = self._projection(turned, x)
                self._use(linear, f"self_attn.{name}")
                biases.append(linear.module.bias is not None)
                norms[number] = None if norm is None else (linear, norm)
                made = (linear if norm is None else norm).made
                plain.append(_by_token(made, turned.shape))
            if len(set(biases)) != 1:
                raise RefusalError("some of its projections of queries, keys and values have a bias, and others none")
            bias = biases[0]
        qk_norm = self._qk_norm(norms, dim)
        turns = [
            self._rotations.find(one, turned, self._positions) for one, turned in zip(plain, (query, key), strict=True)
        ]
        if turns[0] != turns[1]:
            raise RefusalError("its queries turn otherwise than its keys")
        spec = AttentionSpec(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, scale=asked.scale, window=asked.window,
            softcap=asked.softcap, has_sinks=self._has_sinks(), qk_norm=qk_norm, qkv_bias=bias, rope=None,
            fused_name=None if fused is None or fused not in self._used else "qkv_proj",
        )  # fmt: skip
        return spec, turns[0], x

    def _has_sinks(self) -> bool:
        sinks = self._asked.sinks
        if sinks is None:
            return False
        found = [name for name, one in self._module.named_parameters() if one is sinks]
        if not found:
            raise RefusalError("its sinks are no parameter of the layer")
        self._names["self_attn.sinks"] = found[0]
        return True

    def _projection(self, turned: torch.Tensor, x: torch.Tensor) -> tuple[ModuleCall, ModuleCall | None]:
        """What makes ``turned`` (n, heads, dim) at position 0, where nothing turns; and the norm behind it."""
        first = self._positions == 0
        wanted = turned[first]
        for linear in self._linears:
            if linear in self._used or not are_close(linear.read[0], x):
                continue
            made = linear.made[0]
            if made.numel() != turned.numel():
                continue
            if constant_ratio(wanted, made.reshape(turned.shape)[first]) is not None:
                return linear, None
            for norm in self._norms:
                if are_close(_by_token(norm.read, turned.shape), made):
                    own = _by_token(norm.made, turned.shape)
                    if own is not None and constant_ratio(wanted, own[first]) is not None:
                        return linear, norm
        raise RefusalError("no linear layer, with or without a norm, makes the queries or keys that it attends with")

    def _qk_norm(self, norms: list[Any], dim: int) -> QkNormSpec | None:
        if norms == [None, None]:
            return None
        if None in norms:
            raise RefusalError("only its queries, or only its keys, are normalised")
        specs = [self._norm(norm) for _, norm in norms]
        spans = [len(next(norm.module.parameters())) != dim for _, norm in norms]
        if specs[0].kind != "rms" or specs[0].tensor != "weight" or spans[0] != spans[1]:
            raise RefusalError("the norm of its queries and keys is none of RMS")
        if (specs[0].eps, specs[0].offset) != (specs[1].eps, specs[1].offset):
            raise RefusalError("its queries and keys have norms that differ")
        for name, (_, norm) in zip(("q_norm", "k_norm"), norms, strict=True):
            self._names[f"self_attn.{name}"] = norm.path.removeprefix(self._prefix)
        return QkNormSpec(eps=specs[0].eps, offset=specs[0].offset, spans_heads=spans[0])

    def _read_mlp(self) -> tuple[MlpSpec, torch.Tensor, ModuleCall]:
        rest = [call for call in self._linears if call not in self._used]
        hidden = self._read.shape[-1]
        if len(rest) not in (2, 3) or rest[-1].made.shape[-1] != hidden:
            raise RefusalError(f"it has {len(rest)} linear layers beside those of attention; an MLP has 2 or 3")
        down, inner = rest[-1], rest[-1].read.shape[-1]
        wide = rest[:-1]
        biases = {call.module.bias is not None for call in rest}
        if len(biases) != 1:
            raise RefusalError("some linear layers of its MLP have a bias, and others none")
        fused_name = None
        if len(wide) == 1 and wide[0].made.shape[-1] == 2 * inner:
            parts, fused_name = list(wide[0].made[0].chunk(2, -1)), "gate_up_proj"
            activation = activation_of(parts, down.read[0])
            self._use(wide[0], "mlp.gate_up_proj")
        else:
            activation = self._activation(wide, down)
        if activation is None:
            raise RefusalError("the activation of its MLP is none of SiLU and GELU (tanh) with a gate, or ReLU squared")
        if any(not are_close(call.read, wide[0].read) for call in wide):
            raise RefusalError("the linear layers of its MLP read different inputs")
        self._use(down, "mlp.down_proj")
        spec = MlpSpec(inner_size=inner, activation=activation, bias=biases.pop(), fused_name=fused_name)
        return spec, wide[0].read[0], down

    def _activation(self, wide: list[ModuleCall], down: ModuleCall) -> Activation | None:
        """Also says which of two is the gate."""
        for order in (wide, wide[::-1]):
            found = activation_of([call.made[0] for call in order], down.read[0])
            if found is not None:
                for call, name in zip(order, ("gate_proj", "up_proj")[-len(order) :], strict=True):
                    self._use(call, f"mlp.{name}")
                return found
        return None

    def _norm_before(self, x: torch.Tensor, stream: torch.Tensor) -> NormSpec | None:
        """The norm whose output is ``x`` and that reads the ``stream``; None if ``x`` is the stream."""
        if are_close(x, stream):
            return None
        found = next((c for c in self._norms if are_close(c.made[0], x) and are_close(c.read[0], stream)), None)
        if found is None:
            raise RefusalError("attention reads something else than what the layer reads, normalised or not")
        return self._norm(found)

    def _norm_after(self, linear: ModuleCall) -> tuple[NormSpec | None, torch.Tensor]:
        """The norm that reads what ``linear`` makes, and what comes of both."""
        found = next((call for call in self._norms if are_close(call.read, linear.made)), None)
        return (None, linear.made[0]) if found is None else (self._norm(found), found.made[0])

    def _norm(self, call: ModuleCall) -> NormSpec:
        name = call.path.removeprefix(self._prefix)
        spec = norm_of(call.module, name)
        if spec is None:
            raise RefusalError(
                f"{call.path} ({type(call.module).__name__}) is neither an RMS norm nor a layer norm without bias"
            )
        self._used.append(call)
        return spec

    def _take_linear(self, name: str, read: torch.Tensor) -> ModuleCall:
        found = next((call for call in self._linears if are_close(call.read[0], read)), None)
        if found is None:
            raise RefusalError("no linear layer reads what attention makes: something is done to it before")
        self._use(found, name)
        return found

    def _use(self, call: ModuleCall, usual: str) -> None:
        if type(call.module) is not nn.Linear:
            raise RefusalError(f"{call.path} is a {type(call.module).__name__}")
        self._used.append(call)
        self._names[usual] = call.path.removeprefix(self._prefix)


def _by_token(one: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """``one`` (1, n, heads, dim), (1, heads, n, dim) or (1, n, heads * dim), in ``shape`` (n, heads, dim)."""
    if one.numel() != shape.numel():
        return None
    if one.dim() == 4 and one.shape[1] == shape[1] and one.shape[2] == shape[0]:
        return one[0].transpose(0, 1)
    return one.reshape(shape)
