"""Where a checkpoint keeps the tensors of a class: asked of transformers' own conversion, which writes them.

The conversion is run on tensors without memory.  It makes views of the class's tensors, or joins several: a view says
which part of which tensor it is, and whether its last two dimensions are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tp_engine.models.recognition.refusal import RefusalError
from tp_engine.weights.source import Decode, Source, Span, Spans, as_stored, whole


@dataclass(frozen=True, slots=True)
class Piece:
    """The spans ``taken`` of the stored tensor ``name`` of ``shape`` fill the spans ``target`` of a class's tensor."""

    name: str
    shape: tuple[int, ...]
    taken: Spans
    target: Spans
    is_transposed: bool = False

    def source(self, name: str, **changes: Any) -> Source:
        """Return it as the source of a whole parameter; ``name`` is its name in the usual spelling."""
        sizes = tuple(span.size for span in self.target)
        decode: Decode = as_stored
        if self.is_transposed:
            decode = _transposed(sizes)
        elif sizes != tuple(span.size for span in self.taken):
            decode = _shaped(sizes)
        return Source(name=name, shape=self.shape, taken=self.taken, target=self.target, decode=decode, **changes)


def stored_pieces(model: Any) -> dict[str, list[Piece]]:
    """Return what fills each tensor of ``model``, whose parameters are on meta.  Raises ``RefusalError`` for a tensor
    that is stored in another order."""
    from transformers.core_model_loading import revert_weight_conversion

    given = model.state_dict()
    owners: dict[int, str] = {}
    for name, value in given.items():
        owners.setdefault(_storage(value), name)  # tied tensors are stored once
    found: dict[str, list[Piece]] = {name: [] for name in given}
    with _Views() as views:
        stored = revert_weight_conversion(model, {name: given[name] for name in owners.values()})
    for name, value in stored.items():
        shape = tuple(value.shape)
        parts, dim = views.joined.get(_storage(value), ([value], 0))
        first = 0
        for part in parts:
            if (owner := owners.get(_storage(part))) is None:
                raise RefusalError(f"checkpoints have {name}, whose numbers are in another order than its class's")
            taken = [*whole(shape)]
            if len(parts) > 1:
                taken[dim] = Span(first, part.shape[dim])
                first += part.shape[dim]
            found[owner].append(_piece(name, shape, tuple(taken), part, given[owner]))
    return found


class _Views(TorchFunctionMode):
    """Within, a view is never copied, and ``joined`` says of each tensor that was concatenated of what parts."""

    def __init__(self) -> None:
        super().__init__()
        self.joined: dict[int, tuple[list[torch.Tensor], int]] = {}
        self._kept: list[torch.Tensor] = []  # or another could get its place

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        made, named = func(*args, **(kwargs or {})), kwargs or {}
        if func is torch.cat:
            self.joined[_storage(made)] = list(args[0]), int(args[1] if len(args) > 1 else named.get("dim", 0))
            self._kept.append(made)
        return made


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _piece(name: str, shape: tuple[int, ...], taken: Spans, view: torch.Tensor, of: torch.Tensor) -> Piece:
    """The piece that fills the part of the tensor ``of`` that ``view`` is."""
    is_transposed = view.dim() >= 2 and view.stride(-1) != 1 and view.stride(-2) == 1
    rows = view.transpose(-1, -2) if is_transposed else view
    rest, target = int(view.storage_offset()), list[Span]()
    sizes = {stride: size for stride, size in zip(rows.stride(), rows.shape, strict=True) if size > 1}
    for stride, most in zip(of.stride(), of.shape, strict=True):
        start, rest = divmod(rest, stride) if most > 1 else (0, rest)
        target.append(Span(start, sizes.pop(stride, 1) if most > 1 else 1))
    if sizes or any(span.start + span.size > most for span, most in zip(target, of.shape, strict=True)):
        raise RefusalError(f"checkpoints have {name}, whose rows are in another order than its class's")
    return Piece(name, shape, taken, tuple(target), is_transposed)


def _shaped(sizes: tuple[int, ...]) -> Decode:
    return lambda values: values.reshape(sizes)


def _transposed(sizes: tuple[int, ...]) -> Decode:
    return lambda values: values.transpose(-1, -2).reshape(sizes)
