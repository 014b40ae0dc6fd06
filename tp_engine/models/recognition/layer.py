"""The run of one layer -> what it is made of.

Nothing is read from names: a module has the role that its inputs and outputs show.  Numbers of tokens are compared, so
a layer that does anything else between two modules is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
from torch import nn

from tp_engine.model_config.head_gate import HeadGateSpec
from tp_engine.model_config.mlp import Activation, ExpertsSpec, MlpSpec
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, NormSpec, QkNormSpec
from tp_engine.models.recognition.experts import read_experts
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
from tp_engine.models.recognition.stored_names import ExpertLayout, StoredNames

_GATE = "gate_proj"


@dataclass(slots=True)
class RecognisedLayer:
    """A layer's description; ``turn`` is how it turns, ``names`` what each usual module name below it stands for.

    ``down`` is the path, below the layer, of the module with an MLP's inner size, and ``routed`` what its experts are.
    """

    spec: LayerSpec
    turn: HeadTurn | None
    names: dict[str, str]
    down: str | None
    routed: tuple[str, ExpertLayout] | None

    def mlp(self, module: nn.Module) -> MlpSpec | ExpertsSpec:
        """The layer's MLP with the sizes of ``module``, a layer of the same class."""
        mlp = self.spec.mlp
        inner = 0 if self.down is None else _inner_size(module.get_submodule(self.down))
        if self.routed is None:
            assert isinstance(mlp, MlpSpec)
            return replace(mlp, inner_size=inner)
        assert isinstance(mlp, ExpertsSpec)
        path, layout = self.routed
        count, size = layout.sizes(module.get_submodule(path))
        shared = None if mlp.shared is None else replace(mlp.shared, inner_size=inner)
        return replace(mlp, num_experts=count, inner_size=size, shared=shared)


def _inner_size(module: nn.Module) -> int:
    assert isinstance(module, nn.Linear)
    return module.in_features


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    """What the layers of a model have in common."""

    rotations: Rotations
    positions: torch.Tensor
    stored: StoredNames
    config: Any


def recognise(run: LayerRun, module: nn.Module, context: ModelContext) -> RecognisedLayer:
    """Raises ``RefusalError``."""
    if len(run.asked) != 1:
        raise RefusalError(f"a layer attends {len(run.asked)} times in a step; native layers attend once")
    return _LayerReader(run, module, context).read()


class _LayerReader:
    def __init__(self, run: LayerRun, module: nn.Module, context: ModelContext) -> None:
        assert run.read is not None and run.made is not None
        self._asked, self._read, self._made = run.asked[0], run.read[0], run.made[0]
        self._run, self._path, self._module = run, run.path, module
        self._context, self._positions = context, context.positions
        self._linears = [call for call in run.calls if isinstance(call.module, nn.Linear)]
        others = [call for call in run.calls if not isinstance(call.module, nn.Linear)]
        self._norms = [call for call in others if any(True for _ in call.module.parameters())]
        self._used: list[ModuleCall] = []
        self._known: set[int] = set()
        self._down: ModuleCall | None = None
        self._routed: tuple[str, ExpertLayout] | None = None
        self._names: dict[str, str] = {}

    def read(self) -> RecognisedLayer:
        attention, turn, x = self._read_attention()
        o, gate_name = self._read_output(x)
        input_norm = self._norm_before(x, self._read)
        mlp, y, out = self._read_experts() if self._run.experts else self._read_mlp(self._rest(), "mlp")
        attention = replace(
            attention,
            out_bias=o.module.bias is not None,
            gate=None if gate_name is None else HeadGateSpec(name=gate_name),
        )
        if are_close(y, x):
            return self._parallel(attention, turn, mlp, input_norm, o.made[0] + out)
        attention_out_norm, added = self._norm_after(o.made[0])
        mlp_out_norm, last = self._norm_after(out)
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

    def _parallel(self, attention: Any, turn: Any, mlp: Any, norm: Any, added: torch.Tensor) -> RecognisedLayer:
        scale = constant_ratio(self._made - self._read, added)
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
        known = self._known | {id(one) for call in self._used for one in call.module.parameters()}
        known |= {id(self._asked.sinks)} if self._asked.sinks is not None else set()
        left = parameters - known
        if left:
            name = next(name for name, one in self._module.named_parameters() if id(one) in left)
            raise RefusalError(f"{self._path}.{name} has no role that is known")
        down = None if self._down is None else self._own(self._down)
        return RecognisedLayer(spec, turn, self._names, down, self._routed)

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
            self._context.rotations.find(one, turned, self._positions)
            for one, turned in zip(plain, (query, key), strict=True)
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
        self._names["self_attn.sinks"] = self._context.stored.below(self._path, f"{self._path}.{found[0]}", "")
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
            self._names[f"self_attn.{name}"] = self._stored(norm)
        return QkNormSpec(eps=specs[0].eps, offset=specs[0].offset, spans_heads=spans[0])

    def _rest(self) -> list[ModuleCall]:
        return [call for call in self._linears if call not in self._used]

    def _read_mlp(self, rest: list[ModuleCall], name: str) -> tuple[MlpSpec, torch.Tensor, torch.Tensor]:
        """The MLP of the linear layers that are left, what it reads, and what it makes."""
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
            parts, fused_name = list(_rows(wide[0].made).chunk(2, -1)), "gate_up_proj"
            activation = activation_of(parts, down.read)
            self._use(wide[0], f"{name}.gate_up_proj")
        else:
            activation = self._activation(wide, down, name)
        if activation is None:
            raise RefusalError("the activation of its MLP is none of SiLU and GELU (tanh) with a gate, or ReLU squared")
        if any(not are_close(call.read, wide[0].read) for call in wide):
            raise RefusalError("the linear layers of its MLP read different inputs")
        self._use(down, f"{name}.down_proj")
        self._down = down
        spec = MlpSpec(inner_size=inner, activation=activation, bias=biases.pop(), fused_name=fused_name)
        return spec, _rows(wide[0].read), _rows(down.made)

    def _read_experts(self) -> tuple[ExpertsSpec, torch.Tensor, torch.Tensor]:
        """The block of experts with its shared MLP, what it reads, and what it makes."""
        if len(self._run.experts) != 1 or len(self._run.blocks) != 1:
            raise RefusalError("a layer has experts at several places")
        call, block = self._run.experts[0], self._run.blocks[0]
        x, made = _rows(block.read), _rows(block.made)
        if not are_close(call.read, x):
            raise RefusalError("its experts read something else than their block")
        routed = read_experts(call, block.module, self._path, self._context.stored, self._context.config)
        self._known |= {id(one) for one in routed.known}
        self._used += [one for one in self._linears if one.path == routed.router]
        self._used += [one for one in self._norms if {id(own) for own in one.module.parameters()} <= self._known]
        gate = next((one for one in self._rest() if one.made.shape[-1] == 1), None)
        rest = [one for one in self._rest() if one is not gate]
        inside, beside = torch.zeros_like(made), torch.zeros_like(made)
        if rest:
            name = self._stored(rest[-1]).rpartition(".")[0]
            mlp, read, shared = self._read_mlp(rest, name)
            if not are_close(read, x):
                raise RefusalError("its shared MLP reads something else than its experts")
            routed = replace(routed, spec=replace(routed.spec, shared=replace(mlp, name=name)))
            if gate is not None:
                self._used.append(gate)
                shared = shared * _rows(gate.made).sigmoid()
                routed = replace(routed, spec=replace(routed.spec, shared_gate=self._stored(gate)))
            inside, beside = (shared, beside) if rest[-1].path.startswith(f"{block.path}.") else (inside, shared)
        factor = constant_ratio(made - inside, _rows(call.made))
        if factor is None:
            raise RefusalError("the outputs of its experts and of its shared MLP are not simply added")
        rule = replace(routed.spec.rule, factor=snapped(routed.spec.rule.factor * factor, self._context.config))
        self._routed = self._own(call), routed.layout
        return replace(routed, spec=replace(routed.spec, rule=rule)).named(), x, made + beside

    def _activation(self, wide: list[ModuleCall], down: ModuleCall, name: str) -> Activation | None:
        """Also says which of two is the gate."""
        for order in (wide, wide[::-1]):
            found = activation_of([call.made for call in order], down.read)
            if found is not None:
                for call, role in zip(order, ("gate_proj", "up_proj")[-len(order) :], strict=True):
                    self._use(call, f"{name}.{role}")
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

    def _norm_after(self, made: torch.Tensor) -> tuple[NormSpec | None, torch.Tensor]:
        """The norm that reads what a block has ``made``, and what comes of both."""
        found = next((call for call in self._norms if are_close(call.read, made)), None)
        return (None, made) if found is None else (self._norm(found), found.made[0])

    def _norm(self, call: ModuleCall) -> NormSpec:
        spec = norm_of(call.module, self._stored(call))
        if spec is None:
            raise RefusalError(
                f"{call.path} ({type(call.module).__name__}) is neither an RMS norm nor a layer norm without bias"
            )
        self._used.append(call)
        return spec

    def _read_output(self, x: torch.Tensor) -> tuple[ModuleCall, str | None]:
        """The linear layer that reads what attention makes, and the name of the one whose gates are between both."""
        out = self._asked.out[0].flatten(1)
        for linear in self._rest():
            if are_close(linear.read[0], out):
                self._use(linear, "self_attn.o_proj")
                return linear, None
        for linear, gate in permutations(self._rest(), 2):
            is_gate = are_close(gate.read[0], x) and gate.made[0].shape == out.shape
            if is_gate and are_close(linear.read[0], out * gate.made[0].sigmoid()):
                self._use(linear, "self_attn.o_proj")
                self._use(gate, f"self_attn.{_GATE}")
                return linear, _GATE
        raise RefusalError("no linear layer reads what attention makes: something is done to it before")

    def _use(self, call: ModuleCall, usual: str) -> None:
        if type(call.module) is not nn.Linear:
            raise RefusalError(f"{call.path} is a {type(call.module).__name__}")
        self._used.append(call)
        self._names[usual] = self._stored(call)

    def _own(self, call: ModuleCall) -> str:
        """The path of a module below its layer."""
        return call.path.removeprefix(f"{self._path}.")

    def _stored(self, call: ModuleCall) -> str:
        """The name of a module below its layer in a checkpoint."""
        tensor = next((name for name, _ in call.module.named_parameters(recurse=False)), "weight")
        return self._context.stored.below(self._path, call.path, tensor)


def _rows(one: torch.Tensor) -> torch.Tensor:
    """``one`` (1, n, width) or (n, width) as (n, width)."""
    return one.reshape(-1, one.shape[-1])


def _by_token(one: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """``one`` (1, n, heads, dim), (1, heads, n, dim) or (1, n, heads * dim), in ``shape`` (n, heads, dim)."""
    if one.numel() != shape.numel():
        return None
    if one.dim() == 4 and one.shape[1] == shape[1] and one.shape[2] == shape[0]:
        return one[0].transpose(0, 1)
    return one.reshape(shape)
