"""A block of experts -> its ``ExpertsSpec``: the router's rule by what it chose, an expert by what it makes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations, product
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tp_engine.kernels.experts.routing import route
from tp_engine.model_config.mlp import Activation, ExpertsSpec, RouterScores, RoutingRule, StoredExperts
from tp_engine.models.recognition.leaves import ACTIVATIONS, are_close, constant_ratio, snapped
from tp_engine.models.recognition.record import FLOATS, INTEGERS, ExpertsCall, expert_calls
from tp_engine.models.recognition.refusal import RefusalError
from tp_engine.models.recognition.stored_names import ExpertLayout, StoredNames

_TOKENS = 96
_SCORES: tuple[RouterScores, ...] = ("softmax", "softmax_of_chosen", "sigmoid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A block but for its shared MLP, with names below the layer.

    ``known`` are the tensors that have a role, and ``router`` is the path of the module with the logits' weight.
    """

    spec: ExpertsSpec
    layout: ExpertLayout
    known: tuple[torch.Tensor, ...]
    router: str

    def named(self) -> ExpertsSpec:
        """The spec with the block's name, which all names of its parts begin with."""
        spec = self.spec
        shared = [] if spec.shared is None else [spec.shared.name]
        gates = [one for one in (spec.correction, spec.shared_gate) if one is not None]
        words = [one.split(".") for one in (spec.router, *_names(spec.stored), *shared, *gates)]
        length = next(n for n, row in enumerate(zip(*words, strict=False)) if len(set(row)) > 1)
        name = ".".join(words[0][:length])

        def below(one: str) -> str:
            return one.removeprefix(f"{name}.")

        return replace(
            spec,
            name=name,
            router=below(spec.router),
            correction=None if spec.correction is None else below(spec.correction),
            shared=None if spec.shared is None else replace(spec.shared, name=below(spec.shared.name)),
            shared_gate=None if spec.shared_gate is None else below(spec.shared_gate),
            stored=tuple(
                replace(one, gate=below(one.gate), up=below(one.up), down=below(one.down)) for one in spec.stored
            ),
        )


def _names(stored: tuple[StoredExperts, ...]) -> list[str]:
    return [name for one in stored for name in (one.gate, one.up, one.down)]


def read_experts(call: ExpertsCall, block: nn.Module, prefix: str, stored: StoredNames, config: Any) -> Routed:
    """The experts of ``call`` and their router; ``block`` has both, and ``prefix`` is the layer's path.  Raises
    ``RefusalError``."""
    layout, path = _layout(call.module, call.read.shape[-1]), call.path.rpartition(".")[0]
    seen = _probe(call, block)
    router, weight, bias = _router(block, layout.sizes(call.module)[0], call.read.shape[-1])
    rule, correction = _rule(functional.linear(seen.read, weight, bias), seen, block, config)
    num_experts, inner_size = layout.sizes(call.module)
    spec = ExpertsSpec(
        num_experts=num_experts,
        inner_size=inner_size,
        rule=rule,
        activation=layout.activation,
        router=stored.below(prefix, f"{path}.{router}"),
        router_bias=bias is not None,
        routes_in_float32=_routes_in_float32(block.get_submodule(router), weight),
        correction=None if correction is None else stored.below(prefix, f"{path}.{correction}", ""),
        correction_rows=None if correction is None or _tensors(block)[correction].dim() == 1 else 1,
        stored=stored.experts(prefix, call, layout.parts(call.module, 1), layout),
    )
    known = [weight, *(getattr(call.module, one) for one in (*layout.inputs, layout.down))]
    known += [] if bias is None else [bias]
    known += [] if correction is None else [_tensors(block)[correction]]
    return Routed(spec=spec, layout=layout, known=tuple(known), router=f"{path}.{router}")


def _layout(module: nn.Module, width: int) -> ExpertLayout:
    """How the experts are kept, by what one of them makes of some rows."""
    own = {name: one for name, one in module.named_parameters(recurse=False) if one.dim() == 3}
    rows = min(4, len(next(iter(own.values()))))
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(3), **FLOATS)
    ids = torch.arange(rows, **INTEGERS)[:, None]
    made = module(x, ids, torch.ones(rows, 1, **FLOATS))
    for down, is_transposed in product(own, (False, True)):
        rest = [name for name in own if name != down]
        for inputs, is_interleaved in product(permutations(rest), (False, True)):
            for kind, function in ACTIVATIONS.items():
                layout = ExpertLayout(
                    inputs=inputs, down=down, is_transposed=is_transposed, is_interleaved=is_interleaved,
                    activation=Activation(kind),
                )  # fmt: skip
                if are_close(_made(layout, module, function, x), made):
                    return layout
    raise RefusalError("its experts compute something else than an MLP with SiLU, GELU (tanh) or ReLU squared")


def _made(layout: ExpertLayout, module: nn.Module, function: Any, x: torch.Tensor) -> torch.Tensor | None:
    """What the experts make of ``x``, a row each, if this is their layout."""
    rows = []
    for expert, row in enumerate(x):
        *inputs, down = layout.parts(module, expert)
        if len(inputs) != layout.activation.num_parts or any(one.shape[1] != len(row) for one in inputs):
            return None
        inner = function(*(one @ row for one in inputs))
        if down.shape != (len(row), len(inner)):
            return None
        rows.append(down @ inner)
    return torch.stack(rows)


def _probe(call: ExpertsCall, block: nn.Module) -> ExpertsCall:
    """What the experts are given for many rows; what they were given in the run, if the block cannot run alone."""
    x = torch.randn(1, _TOKENS, call.read.shape[-1], generator=torch.Generator().manual_seed(4), **FLOATS)
    with expert_calls(block) as calls, torch.no_grad():
        try:
            block(x)
        except (RuntimeError, TypeError, ValueError):
            return call
    (found,) = calls
    return found


def _tensors(block: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(block.named_parameters()), **dict(block.named_buffers())}


def _router(block: nn.Module, num_experts: int, width: int) -> tuple[str, torch.Tensor, torch.Tensor | None]:
    """The module that has the weight of the logits, by its shape."""
    found = [
        (path, module)
        for path, module in block.named_modules()
        if isinstance(weight := getattr(module, "weight", None), torch.Tensor) and weight.shape == (num_experts, width)
    ]
    if len(found) != 1:
        raise RefusalError("its router is no single product of what the experts read")
    path, module = found[0]
    bias = module.bias if isinstance(module, nn.Linear) else None
    return path, module.get_parameter("weight"), bias


def _rule(logits: torch.Tensor, seen: ExpertsCall, block: nn.Module, config: Any) -> tuple[RoutingRule, str | None]:
    """The rule that chooses ``seen.ids`` and ``seen.weights``, and the tensor that corrects the scores."""
    count, top_k = logits.shape[1], seen.ids.shape[1]
    order = seen.ids.sort(1).indices
    ids, weights = seen.ids.gather(1, order), seen.weights.gather(1, order)
    corrections = [None, *(name for name, one in _tensors(block).items() if one.shape in ((count,), (1, count)))]
    for groups, name in product(_groupings(config, count, top_k), corrections):
        correction = None if name is None else _tensors(block)[name].reshape(-1)
        for scores, renormalises in product(_SCORES, (False, True)):
            rule = RoutingRule(top_k=top_k, scores=scores, renormalises=renormalises, **groups)
            found, own = route(logits, rule, correction)
            order = found.sort(1).indices
            if not torch.equal(found.gather(1, order), ids.to(found.dtype)):
                continue
            factor = constant_ratio(weights, own.gather(1, order))
            if factor is not None:
                return replace(rule, factor=snapped(factor, config)), name
    raise RefusalError("its router chooses and weighs experts by a rule that is not known")


def _groupings(config: Any, num_experts: int, top_k: int) -> Iterator[dict[str, int]]:
    """No groups, and those that numbers of the configuration may mean."""
    yield {}
    sizes = sorted({one for name, one in vars(config).items() if type(one) is int and "group" in name and one > 0})
    for groups, top, best in product(sizes, sizes, (2, 1)):
        if top <= groups > 1 and num_experts % groups == 0 and num_experts // groups * top >= top_k:
            yield {"num_groups": groups, "top_groups": top, "group_best": best}


def _routes_in_float32(router: nn.Module, weight: torch.Tensor) -> bool:
    """Whether the logits of bfloat16 weights and rows are a product of float32."""
    if isinstance(router, nn.Linear):
        return False
    own, x = copy.deepcopy(router).bfloat16(), torch.randn(1, 4, weight.shape[1], **FLOATS).bfloat16()
    try:
        made = own(x)
    except Exception:  # it needs more than its input
        return False
    found = made[0] if isinstance(made, tuple) else made
    return are_close(found, functional.linear(x.float(), weight.bfloat16().float()), 1e-6)
