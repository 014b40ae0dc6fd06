"""The modules of a class with this engine's in their place: linear layers and the embedding; and whence each other
parameter comes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tp_engine.layers.context import LayerContext
from tp_engine.layers.embedding import VocabParallelEmbedding
from tp_engine.model_config.class_modules import ClassModules
from tp_engine.model_config.spec import AttentionSpec, ModelSpec
from tp_engine.models.class_model.linears import ClassLinear, Plan, stored_rows
from tp_engine.models.class_model.stored import Piece, stored_pieces
from tp_engine.weights.source import Source


class ClassEmbedding(nn.Module):
    """In the place of a class's embedding: ``embed`` for (1, N) token ids.  ``weight`` has its type and its device
    alone, which some classes ask for."""

    weight: torch.Tensor

    def __init__(self, embed: VocabParallelEmbedding, context: LayerContext) -> None:
        super().__init__()
        empty = torch.empty(0, dtype=context.dtype, device=context.device)
        self.register_buffer("weight", empty, persistent=False)
        self._embed = (embed,)  # in a tuple, or it would be a part of this module

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(..., N) -> (..., N, hidden)."""
        rows: torch.Tensor = self._embed[0](token_ids.reshape(-1))
        return rows.view(*token_ids.shape, -1)


def make_body(model: Any, spec: ModelSpec, embed: VocabParallelEmbedding, context: LayerContext) -> nn.Module:
    """Return the body of ``model``, of the class that ``spec`` has the modules of; its parameters are on meta."""
    modules = spec.modules
    assert modules is not None
    body: nn.Module = model.get_submodule(modules.body)
    pieces = stored_pieces(model)
    _replace(model, modules.embedding, ClassEmbedding(embed, context))
    plan = _plan_of(model, modules, spec)
    kept = _kept_patterns(model)
    for path, module in list(model.named_modules()):
        if type(module) is not nn.Linear or not path.startswith(f"{modules.body}.") or _is_kept(path, kept):
            continue
        if (stored := stored_rows(pieces[f"{path}.weight"], module)) is not None:
            named = replace(stored, name=usual_name(stored.name, modules))
            _replace(model, path, ClassLinear(module, path, named, plan, context))
    _take_parameters(body, modules, pieces, kept, context)
    return body.to(context.device)


def usual_name(path: str, modules: ClassModules) -> str:
    """Return the name of the stored module or tensor ``path`` where the body is called ``model``."""
    return f"model.{path.removeprefix(f'{modules.body}.')}"


def _plan_of(model: Any, modules: ClassModules, spec: ModelSpec) -> Plan:
    if not modules.splits:
        return Plan({}, {})
    attention = {
        f"{modules.body}.{path}": layer.attention
        for path, layer in zip(modules.places, spec.layers, strict=True)
        if isinstance(layer.attention, AttentionSpec)
    }
    return Plan(dict(model.tp_plan or {}), attention)


def _take_parameters(
    body: nn.Module,
    modules: ClassModules,
    pieces: dict[str, list[Piece]],
    kept: list[str],
    context: LayerContext,
) -> None:
    """Let every parameter on meta, and every stored buffer, come whole from the checkpoint."""
    made: dict[int, nn.Parameter] = {}
    for path, module in body.named_modules():
        if isinstance(module, ClassLinear):
            continue
        own = dict(module._parameters)
        own |= {name: one for name, one in module._buffers.items() if name not in module._non_persistent_buffers_set}
        for name, value in own.items():
            if value is None:
                continue
            full = ".".join(part for part in (modules.body, path, name) if part)
            if id(value) not in made:
                sources = [
                    piece.source(
                        usual_name(piece.name, modules), init=1.0 if value.dim() == 1 and name == "weight" else None
                    )
                    for piece in pieces[full]
                ]
                made[id(value)] = _parameter(value, sources, _is_kept(full, kept), context)
            module._buffers.pop(name, None)
            module._parameters[name] = made[id(value)]


def _parameter(value: torch.Tensor, sources: list[Source], is_kept: bool, context: LayerContext) -> nn.Parameter:
    of_model = value.is_floating_point() and value.dtype != torch.float32
    dtype = torch.float32 if is_kept and value.is_floating_point() else context.dtype if of_model else value.dtype
    return context.parameter(tuple(value.shape), sources, dtype=dtype)


def _kept_patterns(model: Any) -> list[str]:
    """Parts of the names of modules that the class keeps in float32."""
    strict, others = model._keep_in_fp32_modules_strict, model._keep_in_fp32_modules
    return [*(strict or ()), *((others or ()) if model.dtype == torch.float16 else ())]


def _is_kept(path: str, kept: list[str]) -> bool:
    return any(f".{one}." in f".{path}." for one in kept)


def _replace(model: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)
