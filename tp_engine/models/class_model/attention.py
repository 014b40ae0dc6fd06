"""transformers' attention interface over this engine's cache: each call in a step has a place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tp_engine.attention.base import AttentionBackend, AttentionShape
from tp_engine.layers.attention import Attention
from tp_engine.layers.context import LayerContext
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.weights.source import Span, equal_share, kv_head_share

NAME = "tp_engine"
"""Of the attention, in ``config._attn_implementation``.  No mask function has it, so transformers makes no masks."""

_PLACES = "_tp_engine_places"


class Place:
    """One call of attention in each step; ``attention`` has its part of the cache.

    A class's module may have made the heads of all ranks; then this rank attends with its own, and the ranks' outputs
    are gathered.
    """

    def __init__(self, spec: AttentionSpec, backend: AttentionBackend, group: int, context: LayerContext) -> None:
        self._heads = equal_share(spec.num_heads, context.rank, context.world_size)
        self._kv_heads = kv_head_share(spec.num_kv_heads, context.rank, context.world_size)
        self._dtype, self._communicator = context.dtype, context.communicator
        shape = AttentionShape(
            num_heads=self._heads.size,
            num_kv_heads=self._kv_heads.size,
            head_dim=spec.head_dim,
            scale=spec.scale,
            sliding_window=spec.window,
            softcap=spec.softcap,
        )
        self.attention = Attention(shape, backend, group)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """``query``, ``key`` and ``value`` (1, heads, N, dim) -> (1, N, heads, value dim)."""
        attention, is_whole = self.attention, query.shape[1] != self._heads.size
        if sinks is not None and attention.shape.sinks is None:  # a weight, which is not known before
            own = _own(sinks.view(1, -1), self._heads).flatten().float().contiguous()
            attention.shape = replace(attention.shape, sinks=own)
        rows = [self._rows(_own(query, self._heads)), *(self._rows(_own(one, self._kv_heads)) for one in (key, value))]
        out: torch.Tensor = attention(*rows)[..., : value.shape[3]]
        if is_whole:
            out = self._communicator.all_gather(out.flatten(1)).view(len(out), query.shape[1], -1)
        return out[None].to(query.dtype)

    def _rows(self, heads: torch.Tensor) -> torch.Tensor:
        """(1, heads, N, dim) -> (N, heads, head_dim): values may be narrower than keys, or wider."""
        room = self.attention.shape.head_dim - heads.shape[3]
        padded = functional.pad(heads, (0, room)) if room else heads
        return padded[0].transpose(0, 1).to(self._dtype)


class ModulePlaces:
    """The places of one module, in the order of its calls in a step."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._next = 0

    def add(self, place: Place) -> None:
        """One more call in each step."""
        self._places.append(place)

    def begin_step(self) -> None:
        """The next call is the first of a step."""
        self._next = 0

    def next_place(self) -> Place:
        """That of the next call."""
        self._next += 1
        if self._next > len(self._places):
            raise RuntimeError(
                f"a module attends more often in a step than the {len(self._places)} times it did before"
            )
        return self._places[self._next - 1]

    def end_step(self) -> None:
        """Raise ``RuntimeError`` if there were fewer calls than places: the cache lacks a token then."""
        if self._next != len(self._places):
            raise RuntimeError(f"a module attended {self._next} times in a step, and {len(self._places)} times before")


def place_calls(body: nn.Module, paths: Sequence[str], places: Sequence[Place]) -> list[ModulePlaces]:
    """Give each module of ``body`` that attends its ``places``, which are at ``paths``, in the order of the calls."""
    found: dict[str, ModulePlaces] = {}
    for path, place in zip(paths, places, strict=True):
        if path not in found:
            found[path] = ModulePlaces()
            setattr(body.get_submodule(path), _PLACES, found[path])
        found[path].add(place)
    return list(found.values())


def register() -> None:
    """Make the attention known to transformers, before a model that uses it is made."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)


def _attend(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, *_more: Any, **named: Any
) -> tuple[torch.Tensor, None]:
    if attention_mask is not None:
        raise NotImplementedError(f"{type(module).__name__} attends with a mask of its own, which would be ignored")
    places: ModulePlaces = getattr(module, _PLACES)
    return places.next_place().attend(query, key, value, _sinks_of(named)), None


def _sinks_of(named: dict[str, Any]) -> torch.Tensor | None:
    return named.get("s_aux")


def _own(heads: torch.Tensor, span: Span) -> torch.Tensor:
    """This rank's of ``heads`` (1, heads, ...), unless there are no others."""
    return heads if heads.shape[1] == span.size else heads[:, span.start : span.start + span.size]
