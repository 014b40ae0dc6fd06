"""The whole model of a class: its layers, what is before and after them, its names and its published sizes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from tp_engine.model_config.asked_decoder import AskedDecoder
from tp_engine.model_config.names import USUAL_NAMES, CheckpointNames
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import AttentionSpec, LayerSpec, NormSpec
from tp_engine.models.recognition import record
from tp_engine.models.recognition.layer import ModelContext, RecognisedLayer, recognise
from tp_engine.models.recognition.leaves import HeadTurn, Rotations, are_close, constant_ratio, norm_of, number_of
from tp_engine.models.recognition.model_class import NARROW_VOCAB, ModelClass, layers_path_of
from tp_engine.models.recognition.record import FLOATS, INTEGERS, Asked, ModelRun
from tp_engine.models.recognition.refusal import RefusalError
from tp_engine.models.recognition.stored_names import StoredNames

_IDS = (5, 9, 33, 70, 12, 99, 101, 40)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recognised:
    """The published decoder, and the narrow one with what makes it again: the arguments of ``ModelClass.narrow``."""

    published: AskedDecoder
    narrow: AskedDecoder
    recipe: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """What is done before the first layer and after the last."""

    final_norm: NormSpec
    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Structure:
    """What models of a class share, whatever their sizes; the layers are below ``path``."""

    layers: list[RecognisedLayer]
    rotations: Rotations
    names: CheckpointNames
    path: str

    def decoder(self, model_class: ModelClass, model: Any, asked: list[Asked], ends: _Ends) -> AskedDecoder:
        """The decoder with the sizes of ``model``, and what its layers have ``asked`` of attention."""
        ropes: list[RopeSpec] = []
        specs = []
        for index, (layer, own) in enumerate(zip(self.layers, asked, strict=True)):
            rope = None if layer.turn is None else _rope(layer.turn, self.rotations)
            if rope is not None and rope not in ropes:
                ropes.append(rope)
            module = model.get_submodule(f"{self.path}.{index}")
            specs.append(_sized(layer, own, module, None if rope is None else ropes.index(rope)))
        vocab_size, hidden_size = model.get_input_embeddings().weight.shape
        return AskedDecoder.of_layers(
            specs,
            architecture=model_class.name,
            vocab_size=vocab_size,
            hidden_size=hidden_size,
            ropes=tuple(ropes),
            final_norm=ends.final_norm,
            tie_word_embeddings=is_tied(model),
            max_position=model_class.max_position,
            eos_token_ids=model_class.eos_token_ids,
            embedding_scale=ends.embedding_scale,
            logit_scale=ends.logit_scale,
            logit_softcap=ends.logit_softcap,
            names=self.names,
            known_keys=tuple(model_class.known_keys),
        )


def describe(model_class: ModelClass) -> Recognised:
    """Raises ``RefusalError``, or anything that the class raises when it runs."""
    published = model_class.published()
    path = layers_path_of(published)
    asked = _interview(published, path)
    narrow, recipe = _make_narrow(model_class, path, asked)
    positions = _positions(model_class)
    layers, run, rotations, stored = _recognised(narrow, path, positions)
    wider = model_class.narrow(**recipe, implementation=record.NAME, unit=3)
    _check_numbers(layers, _recognised(wider, path, positions)[0])
    structure = _Structure(layers=layers, rotations=rotations, names=_names(narrow, stored, layers), path=path)
    hollow = model_class.hollow(path)
    hollow_run = record.run(hollow, path, _ids(), positions)
    own = [one.asked[0] for one in run.layers]
    return Recognised(
        published=structure.decoder(model_class, published, asked, _ends(hollow, hollow_run, path)),
        narrow=structure.decoder(model_class, narrow, own, _ends(narrow, run, path)),
        recipe=recipe,
    )


def _recognised(
    model: Any, path: str, positions: torch.Tensor
) -> tuple[list[RecognisedLayer], ModelRun, Rotations, StoredNames]:
    """The layers of a narrow model by a run of it, its tables of frequencies, and its names in a checkpoint."""
    rotations, stored = Rotations(model), StoredNames(model, path)
    run = record.run(model, path, _ids(), positions)
    context = ModelContext(rotations=rotations, positions=positions, stored=stored, config=model.config)
    modules = model.get_submodule(path)
    layers = [recognise(one, module, context) for one, module in zip(run.layers, modules, strict=True)]
    _check_tables(model, rotations)
    return layers, run, rotations, stored


def _check_numbers(narrow: Sequence[RecognisedLayer], wider: Sequence[RecognisedLayer]) -> None:
    """Raise ``RefusalError`` if the ``wider`` layers have other numbers than the ``narrow`` ones."""
    for one, other in zip(narrow, wider, strict=True):
        for (name, first), (_, second) in zip_longest(_measured(one), _measured(other), fillvalue=("", None)):
            if first is None or second is None or not math.isclose(first, second, rel_tol=1e-3, abs_tol=1e-9):
                raise RefusalError(f"a number of its layers depends on their sizes: {name} is {first}, then {second}")


def _measured(layer: RecognisedLayer) -> Iterator[tuple[str, float | None]]:
    """What is measured of it; the scale and the cap of its attention are asked of the published model."""
    spec = layer.spec
    if isinstance(spec.attention, AttentionSpec):
        spec = replace(spec, attention=replace(spec.attention, scale=0.0, softcap=None))
    yield from _floats("", spec)
    yield from _floats("turn", layer.turn)


def _floats(name: str, value: Any) -> Iterator[tuple[str, float | None]]:
    if isinstance(value, float):
        yield name, value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _floats(f"{name}.{field.name}".strip("."), getattr(value, field.name))


def _interview(model: Any, path: str) -> list[Asked]:
    """What each layer of the published model asks of attention."""
    positions = torch.arange(3, dtype=torch.int64, device="meta")
    run = record.run(model, path, torch.ones_like(positions), positions)
    found = next((len(one.asked) for one in run.layers if len(one.asked) != 1), 1)
    if found != 1:
        raise RefusalError(f"a layer attends {found} times in a step, and native layers attend once")
    return [one.asked[0] for one in run.layers]


def _ids() -> torch.Tensor:
    return torch.tensor(_IDS, **INTEGERS)


def _positions(model_class: ModelClass) -> torch.Tensor:
    """Near ones, and as far as the model goes."""
    most = model_class.max_position
    return torch.tensor([0, 1, 2, 3, 5, 8, most // 2, most - 1], **INTEGERS)


def _make_narrow(model_class: ModelClass, path: str, asked: list[Asked]) -> tuple[Any, dict[str, Any]]:
    dims = {one.sizes[2] for one in asked}
    kinds = {"all" if one.sizes[0] == one.sizes[1] else "one" if one.sizes[1] == 1 else "some" for one in asked}
    if len(dims) > 1 or len(kinds) > 1:
        raise RefusalError("its layers differ in the sizes or the sharing of their heads")
    recipe: dict[str, Any] = {"head_dim": dims.pop(), "kv_heads": kinds.pop(), "is_free": True}
    for is_free in (True, False):
        recipe["is_free"] = is_free
        try:
            model = model_class.narrow(**recipe, implementation=record.NAME)
            record.run(model, path, _ids(), torch.arange(len(_IDS), **INTEGERS))
        except RuntimeError:  # some classes have heads as wide as the stream
            if not is_free:
                raise
        else:
            return model, recipe
    raise AssertionError


def _check_tables(model: Any, rotations: Rotations) -> None:
    """Raise ``RefusalError`` if the tables of frequencies have changed, because positions were far."""
    changed = Rotations(model)
    if any(not torch.equal(table, changed.tables[name]) for name, table in rotations.tables.items()):
        raise RefusalError("its rotation depends on the length of a request")


def _ends(model: Any, run: ModelRun, path: str) -> _Ends:
    base = path.rpartition(".")[0]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        raise RefusalError("its output head is no linear layer without bias")
    of_head = next((call for call in run.outside if call.module is head), None)
    if of_head is None:
        raise RefusalError("its output head is not run")
    norms = [call for call in run.outside if call.module is not head and constant_ratio(of_head.read, call.made)]
    if not norms or norms[-1].module is embedding:
        raise RefusalError("its output head does not read what a last norm makes")
    last, spec = norms[-1], norm_of(norms[-1].module, norms[-1].path.removeprefix(f"{base}."))
    if spec is None:
        raise RefusalError(
            f"{last.path} ({type(last.module).__name__}) is neither an RMS norm nor a layer norm without bias"
        )
    stream = run.layers[0].read if run.layers else last.read
    embedded = constant_ratio(stream, embedding.weight.detach()[_ids()])
    if embedded is None:
        raise RefusalError("its first layer reads something else than embeddings times a number")
    if run.layers and not are_close(last.read, run.layers[-1].made):
        raise RefusalError("its last norm does not read what the last layer makes")
    before = constant_ratio(of_head.read, last.made)
    scale, softcap = _logits(model, head, path)
    assert before is not None
    return _Ends(
        final_norm=spec,
        embedding_scale=number_of(model.config, embedded),
        logit_scale=number_of(model.config, before * scale),
        logit_softcap=softcap,
    )


def _logits(model: Any, head: nn.Module, path: str) -> tuple[float, float | None]:
    """What the class makes of its head's output: the scale, and the soft cap."""
    grid = torch.linspace(-1.0, 1.0, NARROW_VOCAB, **FLOATS)
    rows = torch.stack([grid * size for size in (1e-3, 1.0, 30.0, 1e3, 1e6)])
    handle = head.register_forward_hook(lambda *_given: rows[None].clone())
    try:
        ids = _ids()[: len(rows)]
        made = record.run(model, path, ids, torch.arange(len(ids), **INTEGERS)).logits
    finally:
        handle.remove()
    return scale_and_cap(rows, made, model.config)


def scale_and_cap(rows: torch.Tensor, made: torch.Tensor, config: Any) -> tuple[float, float | None]:
    """Return by what number the head's ``rows`` (n, vocabulary) are multiplied in the logits ``made`` of them, and how
    they are bounded then; ``rows`` are the same but for their size, which is small in the first and large in the
    last."""
    scale, cap = constant_ratio(made[0], rows[0]), float(made.abs().max())
    if scale is not None:
        for found, expected in ((None, rows * scale), (cap, cap * torch.tanh(rows * scale / cap))):
            if all(are_close(one, other, 1e-4) for one, other in zip(made, expected, strict=True)):
                return scale, None if found is None else number_of(config, cap)
    raise RefusalError("its logits are neither the head's output times a number, nor that with a soft cap")


def _names(model: Any, stored: StoredNames, layers: list[RecognisedLayer]) -> CheckpointNames:
    """How the class names what native modules have other names for."""
    base, tail = stored.layers_path.removesuffix(stored.tail), stored.tail
    modules = {id(module): name for name, module in model.named_modules()}
    head, embedding = (
        stored.module(modules[id(one)]) for one in (model.get_output_embeddings(), model.get_input_embeddings())
    )
    renamed: dict[str, str] = {"layers": tail, "embed_tokens": embedding.removeprefix(base)}
    for layer in layers:
        for usual, own in layer.names.items():
            if renamed.setdefault(usual, own) != own:
                raise RefusalError(f"its layers call {usual} by several names")
    spelling = (base, f"{head}.")
    if spelling == USUAL_NAMES.spellings[0] and all(usual == own for usual, own in renamed.items()):
        return USUAL_NAMES
    return CheckpointNames(
        spellings=(spelling,), renamed=tuple((usual, own) for usual, own in renamed.items() if usual != own)
    )


def is_tied(model: Any) -> bool:
    """Whether the class says that its output head is its embedding."""
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    return f"{head}.weight" in (model.all_tied_weights_keys or {})


def _rope(turn: HeadTurn, rotations: Rotations) -> RopeSpec:
    table = rotations.tables[turn.table]
    return RopeSpec(
        rotary_dim=2 * len(table),
        kind="given",
        frequencies=tuple(table.tolist()),
        attention_factor=turn.factor,
        is_interleaved=turn.is_interleaved,
    )


def _sized(layer: RecognisedLayer, asked: Asked, module: nn.Module, rope: int | None) -> LayerSpec:
    """The layer with the sizes of ``module``, and the numbers of heads, the scale and the window that it asked for."""
    attention = layer.spec.attention
    assert isinstance(attention, AttentionSpec)
    if (attention.window is None) != (asked.window is None) or attention.has_sinks != (asked.sinks is not None):
        raise RefusalError("its narrow twin attends in another way")
    heads, kv_heads, head_dim = asked.sizes
    sized = replace(
        attention, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=asked.scale, window=asked.window,
        softcap=asked.softcap, rope=rope,
    )  # fmt: skip
    return replace(layer.spec, attention=sized, mlp=layer.mlp(module))
