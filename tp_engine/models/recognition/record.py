"""One run of a transformers model: what each module reads and makes, and what each layer asks of attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from tp_engine.models.recognition.refusal import RefusalError

NAME = "tp_engine_asks"
"""Of the attention and of the mask function that record."""

FLOATS: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
INTEGERS: dict[str, Any] = {"dtype": torch.int64, "device": torch.device("cpu")}


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a module without parts: the first tensor that it read, and the one that it made."""

    path: str
    module: nn.Module
    read: torch.Tensor
    made: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertsCall(ModuleCall):
    """One call of a module that holds experts, with the chosen ``ids`` and their ``weights`` (n, k)."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call of attention: ``query`` (1, heads, n, dim), ``key`` and ``value`` (1, KV heads, n, dim), ``out``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Heads, KV heads, elements of a head."""
        return self.query.shape[1], self.key.shape[1], self.query.shape[3]


@dataclass(slots=True)
class LayerRun:
    """What happened within one layer, in order; ``blocks`` have both experts and their router."""

    path: str
    read: torch.Tensor | None = None
    made: torch.Tensor | None = None
    calls: list[ModuleCall] = field(default_factory=list)
    experts: list[ExpertsCall] = field(default_factory=list)
    blocks: list[ModuleCall] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)


@dataclass(slots=True)
class ModelRun:
    """A run: its layers, the calls outside of them, and the logits."""

    layers: list[LayerRun]
    outside: list[ModuleCall]
    logits: torch.Tensor


class Mask:
    """Stands for a mask: what the model's mask function was to make."""

    def __init__(self, function: Any, size: int | None) -> None:
        self.function, self.size = function, size

    def __getitem__(self, _key: object) -> Mask:
        return self

    def __getattr__(self, name: str) -> Any:
        raise RefusalError(f"it computes with its mask itself ({name})")

    def __radd__(self, _other: object) -> Any:
        raise RefusalError("it computes with its mask itself, and not by the attention interface")


def run(model: Any, layers_path: str, ids: torch.Tensor, positions: torch.Tensor) -> ModelRun:
    """Run ``model`` on ``ids`` (n,) at ``positions`` (n,), with noise in the place of what attention makes."""
    layers = model.get_submodule(layers_path)
    found = ModelRun([LayerRun(f"{layers_path}.{index}") for index in range(len(layers))], [], torch.empty(0, **FLOATS))
    with _recording(model, layers, found), torch.no_grad():
        given = {"input_ids": ids[None], "position_ids": positions[None], "use_cache": False}
        found.logits = model(**given, attention_mask=torch.ones_like(ids)[None]).logits[0]
    return found


class _CallRecorder:
    """Notes what happens in a run: the hooks of modules, and attention itself, call it."""

    def __init__(self, found: ModelRun) -> None:
        self._found, self._current = found, list[LayerRun]()

    def enter(self, layer: LayerRun, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if layer.read is not None:
            raise RefusalError("its layers run several times in a step")
        layer.read = _first(arguments, named)
        self._current.append(layer)

    def leave(self, layer: LayerRun, output: Any) -> None:
        layer.made = _output(output)
        self._current.pop()

    def note(self, path: str, module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        read, made = _first(arguments, named), _output(output)
        if read is not None and made is not None:
            calls = self._current[-1].calls if self._current else self._found.outside
            calls.append(ModuleCall(path, module, read, made))

    def note_experts(self, path: str, module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        if not self._current:
            raise RefusalError("it has experts outside of its layers")
        self._current[-1].experts.append(_experts_call(path, module, arguments, named, output))

    def note_block(self, path: str, module: nn.Module, arguments: Any, named: Any, output: Any) -> None:
        read, made = _first(arguments, named), _output(output)
        if self._current and read is not None and made is not None:
            self._current[-1].blocks.append(ModuleCall(path, module, read, made))

    def attend(
        self, _module: nn.Module, query: Any, key: Any, value: Any, mask: Any, named: dict[str, Any]
    ) -> torch.Tensor:
        if not self._current:
            raise RefusalError("it attends outside of its layers")
        layer = self._current[-1]
        out = noise(query, value, len(layer.asked))
        layer.asked.append(asked(query, key, value, mask, out, named))
        return out


class AttentionLog(Protocol):
    """Takes the calls of attention."""

    def attend(
        self, module: nn.Module, query: Any, key: Any, value: Any, mask: Any, named: dict[str, Any]
    ) -> torch.Tensor:
        """Note the call; return its output."""


_recorders: list[AttentionLog] = []


def _attend(
    module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, *_more: Any, **named: Any
) -> Any:
    return _recorders[-1].attend(module, query, key, value, attention_mask, named), None


def register() -> None:
    """Make the attention that records known to transformers, before a model that uses it is made."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(
        NAME, lambda *_a, mask_function=None, local_size=None, **_n: Mask(mask_function, local_size)
    )


@contextlib.contextmanager
def _recording(model: nn.Module, layers: nn.ModuleList, found: ModelRun) -> Iterator[None]:
    recorder = _CallRecorder(found)
    hooks = []
    with_experts = [path for path, module in model.named_modules() if has_experts(module)]
    blocks = {path.rpartition(".")[0] for path in with_experts}
    for path, module in model.named_modules():
        notes = [recorder.note] if not any(True for _ in module.children()) and path not in with_experts else []
        notes += [recorder.note_experts] if path in with_experts else []
        notes += [recorder.note_block] if path in blocks else []
        hooks += [module.register_forward_hook(partial(_noted, note, path), with_kwargs=True) for note in notes]
    for layer, own in zip(layers, found.layers, strict=True):
        hooks.append(
            layer.register_forward_pre_hook(
                lambda _m, read, named, own=own: recorder.enter(own, read, named), with_kwargs=True
            )
        )
        hooks.append(layer.register_forward_hook(lambda _m, _read, made, own=own: recorder.leave(own, made)))
    try:
        with recorded_by(recorder), without_numbers(model):
            yield
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def without_numbers(model: nn.Module) -> Iterator[None]:
    """Within, experts of a ``model`` on meta return rows: what they compute depends on values."""
    if next(model.parameters()).is_meta:
        for module in model.modules():
            if has_experts(module):
                module.forward = _empty_rows
    yield


@contextlib.contextmanager
def recorded_by(recorder: AttentionLog) -> Iterator[None]:
    """Within, ``recorder`` gets the calls of attention."""
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.pop()


def _noted(note: Any, path: str, module: nn.Module, arguments: Any, named: Any, made: Any) -> None:
    note(path, module, arguments, named, made)


def _empty_rows(x: torch.Tensor, *_given: Any, **_named: Any) -> torch.Tensor:
    return torch.empty_like(x)


def has_experts(module: nn.Module) -> bool:
    """Whether a module holds experts itself: tensors of three dimensions."""
    return any(one.dim() == 3 for one in module.parameters(recurse=False))


@contextlib.contextmanager
def expert_calls(block: nn.Module) -> Iterator[list[ExpertsCall]]:
    """Within, the calls of experts in ``block`` are noted."""
    found: list[ExpertsCall] = []
    hooks = [
        module.register_forward_hook(
            lambda one, read, named, made, path=path: found.append(_experts_call(path, one, read, named, made)),
            with_kwargs=True,
        )
        for path, module in block.named_modules()
        if has_experts(module)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _experts_call(path: str, module: nn.Module, arguments: Any, named: Any, output: Any) -> ExpertsCall:
    """Raises ``RefusalError`` unless the experts are given rows, and for each row experts and weights."""
    given = [one for one in (*arguments, *named.values()) if isinstance(one, torch.Tensor)]
    made = _output(output)
    if len(given) != 3 or made is None:
        raise RefusalError("its experts are given something else than rows, choices and weights")
    x, (ids, weights) = given[0], sorted(given[1:], key=torch.is_floating_point)
    if (
        torch.is_floating_point(ids)
        or ids.dim() != 2
        or ids.shape != weights.shape
        or len(ids) != x.numel() // x.shape[-1]
    ):
        raise RefusalError("its experts are given something else than rows, choices and weights")
    rows = x.detach().clone().reshape(-1, x.shape[-1])
    return ExpertsCall(path, module, rows, made, ids.detach().clone(), weights.detach().clone())


def _output(made: Any) -> torch.Tensor | None:
    return _first(made if isinstance(made, tuple) else (made,), {})


def _first(arguments: Any, named: dict[str, Any]) -> torch.Tensor | None:
    """The first tensor, as it is now: what comes may change it in place."""
    found = next((one for one in (*arguments, *named.values()) if isinstance(one, torch.Tensor)), None)
    return None if found is None else found.detach().clone()


def noise(query: torch.Tensor, value: torch.Tensor, seed: int) -> torch.Tensor:
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    if query.is_meta:
        return query.new_empty(shape)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), **FLOATS).to(query.dtype)


_KNOWN = {"scaling", "sliding_window", "softcap", "s_aux", "dropout", "is_causal"}
# What transformers hands on to every attention, and what asks for nothing of this kind.
_HANDED_ON = {"position_ids", "output_attentions", "use_cache", "cache_position", "position_embeddings"}


def asked(query: Any, key: Any, value: Any, mask: Any, out: torch.Tensor, named: dict[str, Any]) -> Asked:
    unknown = [name for name, one in named.items() if name not in _KNOWN | _HANDED_ON and one not in (None, False)]
    if unknown:
        raise RefusalError(f"it gives attention {', '.join(sorted(unknown))}, which is not known here")
    if named.get("is_causal") is False:
        raise RefusalError("its attention is not causal")
    if named.get("scaling") is None:
        named["scaling"] = query.shape[3] ** -0.5
    window, softcap = named.get("sliding_window"), named.get("softcap")
    if mask is not None:
        if not isinstance(mask, Mask):
            raise RefusalError("it makes a mask of its own")
        if window not in (None, mask.size):
            raise RefusalError(f"its mask has a window of {mask.size}, and its attention one of {window}")
        window = mask.size
        _check_mask(mask)
    clones = [one.detach().clone() for one in (query, key, value)]
    return Asked(
        query=clones[0],
        key=clones[1],
        value=clones[2],
        out=out,
        scale=float(named["scaling"]),
        window=window,
        softcap=None if softcap is None else float(softcap),
        sinks=named.get("s_aux"),
    )


def is_chunked(mask: Mask) -> bool:
    """Return whether a query sees what is before it in its part of the text, one of ``mask.size`` tokens each."""
    size = mask.size
    assert size is not None
    pairs = [(query, key) for query in (size - 1, size, size + 1, 2 * size) for key in (0, size - 1, size, size + 1)]
    try:
        seen = [_sees(mask, query, key) for query, key in pairs]
    except Exception:
        return False
    return seen == [key <= query and key // size == query // size for query, key in pairs]


def can_be_asked(mask: Mask) -> bool:
    """Return whether it answers, which one that needs numbers of a model on meta does not."""
    try:
        _sees(mask, 0, 0)
    except Exception:
        return False
    return True


def _sees(mask: Mask, query: int, key: int) -> bool:
    return bool(mask.function(0, 0, torch.tensor(query, **INTEGERS), torch.tensor(key, **INTEGERS)))


def _check_mask(mask: Mask) -> None:
    """Raise ``RefusalError`` unless a query sees itself and what is before it, within the window if there is one."""
    size = mask.size
    queries = (0, 1, 5, 1000) if size is None else (0, size - 1, size, size + 1, 2 * size, 2 * size + size // 2)
    for query in queries:
        near = {query - 1, query, query + 1, query // 2, 0}
        near |= set() if size is None else {query - size - 1, query - size, query - size + 1}
        for key in sorted(one for one in near if one >= 0):
            expected = key <= query and (size is None or key > query - size)
            try:
                sees = _sees(mask, query, key)
            except Exception as error:
                raise RefusalError("its mask depends on more than positions") from error
            if sees != expected:
                what = "causal" if size is None else f"a window of {size} keys"
                raise RefusalError(f"its mask is not {what}: it attends in chunks, or to later tokens")
