"""What a class is asked before its own modules run: each call of attention, its embedding, what is behind its head."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tp_engine.model_config.asked_decoder import AskedModules
from tp_engine.model_config.class_modules import ClassModules
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.models.class_model.stored import Piece, stored_pieces
from tp_engine.models.recognition import record
from tp_engine.models.recognition.leaves import constant_ratio, number_of
from tp_engine.models.recognition.model_class import NARROW_VOCAB, ModelClass
from tp_engine.models.recognition.refusal import RefusalError
from tp_engine.models.recognition.whole import is_tied, scale_and_cap

_MOST_BYTES_PER_CALL = 32 << 10  # of a token's keys and values in 16 bits
# Of a config.json, what is no part of the model: new weights of the same model may differ in it.
_OF_FILE = {"_commit_hash", "_name_or_path", "auto_map", "dtype", "torch_dtype", "transformers_version"}
_SIZES = (1e-3, 1.0, 30.0, 1e3, 1e6)


@dataclass(frozen=True, slots=True)
class AskedCall:
    """One call of attention by the module ``path``; a query sees the keys of its ``chunk`` only, if there is one."""

    path: str
    attention: AttentionSpec
    chunk: int | None


@dataclass(frozen=True, slots=True)
class AskedRun:
    """A run: the module ``body`` that it consists of but for the output head, and the ``calls`` of attention."""

    body: str
    calls: list[AskedCall]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ends:
    """What is done before the body and behind it, at the published width."""

    embedding_scale: float
    logit_scale: float
    logit_softcap: float | None


class _CallLog:
    """Notes the calls of attention in a run of ``model``."""

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[AskedCall] = []
        self._paths: dict[int, str] = {id(module): path for path, module in model.named_modules()}

    def path_of(self, module: nn.Module) -> str:
        """That of a module of the model."""
        return self._paths[id(module)]

    def attend(self, module: nn.Module, query: Any, key: Any, value: Any, mask: Any, named: dict[str, Any]) -> Any:
        chunk = None
        if isinstance(mask, record.Mask) and mask.size is not None and record.is_chunked(mask):
            chunk, mask = mask.size, None
        elif isinstance(mask, record.Mask) and query.is_meta and not record.can_be_asked(mask):
            chunk, mask = mask.size, None  # the narrow model says whether it is one
        out = record.noise(query, value, len(self.calls))
        asked = record.asked(query, key, value, mask, out, named)
        heads, kv_heads, dim = asked.sizes
        if value.shape[1] != kv_heads or heads % kv_heads:
            raise RefusalError(f"it attends with {heads} heads to {kv_heads} of keys and {value.shape[1]} of values")
        attention = AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=max(dim, value.shape[3]),
            scale=asked.scale,
            window=asked.window,
            softcap=asked.softcap,
            has_sinks=asked.sinks is not None,
            rope=None,
        )
        self.calls.append(AskedCall(self.path_of(module), attention, chunk))
        return out


def ask_calls(model: Any, positions: torch.Tensor) -> AskedRun:
    """Return what a run of ``model`` on tokens at ``positions`` (n,) consists of."""
    log, entered = _CallLog(model), list[nn.Module]()
    ids = torch.ones_like(positions)
    given = {"input_ids": ids[None], "position_ids": positions[None], "attention_mask": ids[None], "use_cache": False}
    hooks = [one.register_forward_pre_hook(lambda one, _given: entered.append(one)) for one in model.modules()]
    try:
        with record.recorded_by(log), record.without_numbers(model), torch.no_grad():
            model(**given)
    finally:
        for hook in hooks:
            hook.remove()
    if not log.calls:
        raise RefusalError("it attends to nothing")
    return AskedRun(log.path_of(entered[1]), log.calls)


def ask_ends(model: Any, body: str) -> Ends:
    """Ask ``model``, of 128 tokens, what its embedding makes of a row, and its ``forward`` of what the body and the
    head make; it has other ones afterwards."""
    embedding, head = ends_of(model)
    module, ids = model.get_submodule(embedding), torch.arange(1, 1 + len(_SIZES), **record.INTEGERS)
    weight = torch.randn(module.weight.shape, generator=torch.Generator().manual_seed(1), **record.FLOATS)
    module.weight = nn.Parameter(weight, requires_grad=False)
    with torch.no_grad():
        embedded = constant_ratio(module(ids), weight[ids])
    if embedded is None:
        raise RefusalError("its embedding makes something else of a row than a number times it")
    width = model.get_submodule(head).in_features
    hidden = torch.randn(1, len(_SIZES), width, generator=torch.Generator().manual_seed(0), **record.FLOATS)
    grid = torch.linspace(-1.0, 1.0, NARROW_VOCAB, **record.FLOATS)
    rows = torch.stack([grid * size for size in _SIZES])
    _set(model, body, _StubBody(hidden))
    stub = _StubHead(rows[None])
    _set(model, head, stub)
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits
    before = None if stub.read is None else constant_ratio(stub.read, hidden)
    if before is None:
        raise RefusalError("its output head does not read what its layers make, or a number times it")
    scale, softcap = scale_and_cap(rows, logits[0], model.config)
    return Ends(
        embedding_scale=number_of(model.config, embedded),
        logit_scale=number_of(model.config, before * scale),
        logit_softcap=softcap,
    )


def ends_of(model: Any) -> tuple[str, str]:
    """Return the paths of the embedding and the output head."""
    paths = {id(module): path for path, module in model.named_modules()}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not nn.Linear or not isinstance(embedding, nn.Embedding):
        raise RefusalError("its output head is no linear layer, or its embedding no table")
    if head.in_features != embedding.weight.shape[1]:
        raise RefusalError("its output head and its embedding have different widths")
    return paths[id(embedding)], paths[id(head)]


def describe(model_class: ModelClass, model: Any, config: dict[str, Any], run: AskedRun, ends: Ends) -> AskedModules:
    """Return ``model``, of the class with this ``config``, as ``ask_calls`` and ``ask_ends`` found it."""
    body, calls = run.body, run.calls
    embedding, head = ends_of(model)
    if not all(path.startswith(f"{body}.") for path in (embedding, *(one.path for one in calls))):
        raise RefusalError("it embeds or attends outside of its layers")
    kinds = tuple(dict.fromkeys(one.attention for one in calls))
    chunks = [one.chunk for one in calls if one.chunk is not None]
    output, pieces = model.get_submodule(head), stored_pieces(model)
    inner, stored_head = (_stored_module(pieces, path) for path in (embedding, head))
    inner = inner.removeprefix(f"{body}.")
    prefixes = ("", f"{model.base_model_prefix}.")  # some checkpoints have the second without it
    vocab_size, hidden_size = model.get_submodule(embedding).weight.shape
    return AskedModules(
        architecture=model_class.name,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        kinds=kinds,
        order=tuple(kinds.index(one.attention) for one in calls),
        tie_word_embeddings=is_tied(model),
        max_position=min([model_class.max_position, *chunks]),
        max_position_key="attention_chunk_size" if chunks else "max_position_embeddings",
        eos_token_ids=model_class.eos_token_ids,
        embedding_scale=ends.embedding_scale,
        logit_scale=ends.logit_scale,
        logit_softcap=ends.logit_softcap,
        names=CheckpointNames(
            spellings=tuple((f"{body}.".removeprefix(prefix), f"{stored_head}.") for prefix in prefixes),
            renamed=() if inner == "embed_tokens" else (("embed_tokens", inner),),
        ),
        known_keys=tuple(model_class.known_keys),
        modules=ClassModules(
            architecture=model_class.name,
            config=json.dumps({key: config[key] for key in config.keys() - _OF_FILE}, sort_keys=True),
            places=tuple(one.path.removeprefix(f"{body}.") for one in calls),
            body=body,
            embedding=embedding,
            head=head,
            head_bias=output.bias is not None,
        ),
    )


def check_sizes(run: AskedRun) -> None:
    """Raise ``RefusalError`` if a call keeps much for each token, as latents do where they are made keys and values."""
    for one in run.calls:
        attention = one.attention
        if 4 * attention.num_kv_heads * attention.head_dim > _MOST_BYTES_PER_CALL:
            raise RefusalError(
                f"{one.path} keeps {attention.num_kv_heads} heads of {attention.head_dim} for each token: latents, "
                "which only native layers keep as such"
            )


def check_alike(published: AskedRun, narrow: AskedRun) -> None:
    """Raise ``RefusalError`` unless both attend in the same way, whatever their sizes."""

    def ways(run: AskedRun) -> list[tuple[Any, ...]]:
        return [
            (one.path, one.chunk is None, one.attention.window is None, one.attention.softcap, one.attention.has_sinks)
            for one in run.calls
        ]

    if ways(published) != ways(narrow):
        raise RefusalError("a narrow model of its class attends in another way")


def with_plan(found: AskedModules) -> AskedModules:
    """Return the same, with the class's plan for tensor parallelism."""
    return replace(found, modules=replace(found.modules, splits=True))


def _stored_module(pieces: dict[str, list[Piece]], path: str) -> str:
    """How checkpoints call the module ``path``, whose weight is one of their tensors; tied ones have its own name."""
    found = pieces[f"{path}.weight"]
    return found[0].name.removesuffix(".weight") if found else path


class _StubBody(nn.Module):
    """Returns ``hidden`` for any tokens."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self._hidden = hidden

    def forward(self, *_given: Any, **_named: Any) -> Any:
        return _Output(self._hidden)


class _Output:
    """What a body returns: its first part, and none of the others."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, _name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor | None:
        return self.last_hidden_state if index == 0 else None


class _StubHead(nn.Module):
    """Returns ``rows`` for whatever it reads."""

    def __init__(self, rows: torch.Tensor) -> None:
        super().__init__()
        self._rows = rows
        self.read: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.read = hidden
        return self._rows.clone()


def _set(model: nn.Module, path: str, new: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, new)
