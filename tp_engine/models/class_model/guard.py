"""A narrow model of a class by its own modules, on one rank and on several: equal logits, or it is not served.

The weights go the way of every checkpoint.  Two requests are computed in chunks, then token by token.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any

import numpy as np
import torch

from tp_engine.attention.base import AttentionMetadata, prepare_groups
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.thread_ranks import run_ranks
from tp_engine.errors import WeightError
from tp_engine.layers.attention import forward_context
from tp_engine.model_config.asked_decoder import AskedModules
from tp_engine.model_config.spec import ModelSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.models.class_model.interview import (
    AskedRun,
    ask_calls,
    ask_ends,
    check_alike,
    check_sizes,
    describe,
    with_plan,
)
from tp_engine.models.language_model import LanguageModel
from tp_engine.models.recognition.model_class import NARROW_VOCAB, ModelClass
from tp_engine.models.recognition.record import FLOATS, INTEGERS, NAME
from tp_engine.models.recognition.refusal import RefusalError
from tp_engine.models.recognition.twin import plain_model
from tp_engine.system.log import get_logger
from tp_engine.weights.loader import load_weights

logger = get_logger(__name__)

_LENGTHS = (29, 13)
_STEPS = ((13, 5), (9, 6), (1, 1), (1, 1), (5, 0))  # tokens of each request
_BLOCK_SIZE, _BLOCKS = 16, 2
_WORLDS = (2, 4)
_CLOSE, _SEEDS = 1e-3, (2, 3)
_CPU = torch.device("cpu")


def served_by_modules(model_class: ModelClass) -> AskedModules:
    """Return what the class's own modules are served as.  Raises ``RefusalError``, or anything that the class raises
    when it runs."""
    published = model_class.published()
    run = ask_calls(published, torch.arange(3, dtype=torch.int64, device="meta"))
    check_sizes(run)
    ends = ask_ends(model_class.without_layers_memory(), run.body)
    found = describe(model_class, published, model_class.values, run, ends)
    recipe = _find_recipe(model_class, found)
    return with_plan(found) if _follows_plan(model_class, recipe, _narrow(model_class, recipe, run)) else found


def _narrow(model_class: ModelClass, recipe: dict[str, Any], published: AskedRun) -> AskedModules:
    """The narrow model as ``recipe`` makes it, which attends as the ``published`` one does."""
    model, unused = (model_class.narrow(**recipe, implementation=NAME) for _ in range(2))
    config = {**json.loads(model.config.to_json_string(use_diff=False)), "architectures": [model_class.name]}
    run = ask_calls(model, _positions(model_class))
    check_alike(published, run)
    new = dict(unused.named_buffers())
    if any(name not in new or not torch.equal(one, new[name]) for name, one in model.named_buffers()):
        raise RefusalError("its tables depend on the length of a request")
    return describe(model_class, model, config, run, ask_ends(unused, run.body))


def _follows_plan(model_class: ModelClass, recipe: dict[str, Any], narrow: AskedModules) -> bool:
    """Whether ranks that follow the class's plan give its logits too.  Raises ``RefusalError`` unless those that gather
    do, or one rank does."""
    plain = plain_model(model_class, recipe)
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        oracle = _Oracle(plain, Path(folder))
        try:
            oracle.compare(narrow, 1)
        except WeightError as error:
            raise RefusalError(f"its tensors are not those of its modules: {error}") from error
        if plain.tp_plan:
            try:
                for world_size in _WORLDS:
                    oracle.compare(with_plan(narrow), world_size)
                return True
            except (BrokenBarrierError, MemoryError, OSError):  # of a slow or full machine, not of the plan
                raise
            except Exception:  # a plan may be wrong in any way
                logger.debug("the plan of %s is not followed", model_class.name, exc_info=True)
        for world_size in _WORLDS:
            oracle.compare(narrow, world_size)
    return False


class _Oracle:
    """The class's own model ``plain``, which is stored in ``folder``."""

    def __init__(self, plain: Any, folder: Path) -> None:
        self._plain, self._folder = plain, folder

    def compare(self, narrow: AskedModules, world_size: int) -> None:
        """Raise ``RefusalError`` unless ``world_size`` ranks give its logits of all tokens.

        Those of a second draw count if the first differ: where a router has a tie, rounding errors decide.
        """
        differences = []
        for seed in _SEEDS:
            differences.append(self._difference(narrow, world_size, seed))
            if differences[-1] <= _CLOSE:
                return
        raise RefusalError(
            f"its modules with this engine's attention give other logits on {world_size} ranks (by "
            f"{min(differences):.2g} of their deviation)"
        )

    def _difference(self, narrow: AskedModules, world_size: int, seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        sequences = [torch.randint(1, NARROW_VOCAB, (length,), generator=generator, **INTEGERS) for length in _LENGTHS]
        spec = narrow.model(dtype="float32")
        made = run_ranks(world_size, lambda communicator: _logits(spec, self._folder, sequences, communicator))[0]
        with torch.inference_mode():
            expected = [self._plain(input_ids=one[None], use_cache=False).logits[0].float() for one in sequences]
        return max(
            float((one - other).abs().max() / other.std().clamp_min(1e-3))
            for one, other in zip(made, expected, strict=True)
        )


def _logits(
    spec: ModelSpec, folder: Path, sequences: list[torch.Tensor], communicator: Communicator
) -> list[torch.Tensor]:
    """The logits of each sequence (n, vocabulary); an empty list but on rank 0."""
    groups = spec.kv_layout_on(communicator.info.world_size).groups
    backends = [TorchBackend() for _ in groups]
    model = build_model(
        spec,
        communicator=communicator,
        dtype=torch.float32,
        device=_CPU,
        backends=backends,
        max_model_len=_BLOCK_SIZE * _BLOCKS,
    )
    load_weights(dict(model.named_parameters()), spec, folder, info=communicator.info)
    model.finish_loading()
    _bind_caches(model, len(sequences))
    made: list[list[torch.Tensor]] = [[] for _ in sequences]
    done = [0] * len(sequences)
    for step in _STEPS:
        running = [index for index, size in enumerate(step) if size]
        spans = {index: (done[index], done[index] + step[index]) for index in running}
        ids = torch.cat([sequences[index][slice(*spans[index])] for index in running])
        positions = torch.cat([torch.arange(*spans[index], **INTEGERS) for index in running])
        metadata = [_metadata(spans)] * len(groups)
        prepare_groups(backends, metadata)
        with torch.inference_mode(), forward_context(metadata):
            logits = model.compute_logits(model(ids, positions))
        if logits is not None:
            for index, rows in zip(running, logits.split([step[index] for index in running]), strict=True):
                made[index].append(rows)
        for index in running:
            done[index] += step[index]
    return [torch.cat(rows) for rows in made] if communicator.info.is_first else []


def _find_recipe(model_class: ModelClass, found: AskedModules) -> dict[str, Any]:
    """The arguments of ``ModelClass.narrow`` that make a model which runs."""
    first = found.kinds[0]
    sharing = "all" if first.num_heads == first.num_kv_heads else "one" if first.num_kv_heads == 1 else "some"
    recipe: dict[str, Any] = {"head_dim": first.head_dim, "kv_heads": sharing, "is_free": True}
    try:
        ask_calls(model_class.narrow(**recipe, implementation=NAME), torch.arange(3, **INTEGERS))
    except (RuntimeError, ValueError):  # some classes have heads as wide as the stream
        recipe["is_free"] = False
    return recipe


def _positions(model_class: ModelClass) -> torch.Tensor:
    """Near ones, and as far as the model goes."""
    most = model_class.max_position
    return torch.tensor([0, 1, 2, 5, most // 2, most - 1], **INTEGERS)


def _bind_caches(model: LanguageModel, num_sequences: int) -> None:
    for layer in model.attention_layers:
        sizes = num_sequences * _BLOCKS, _BLOCK_SIZE, layer.shape.num_kv_heads, layer.shape.head_dim
        layer.bind_kv_cache(torch.zeros(2, *sizes, **FLOATS))


def _metadata(spans: dict[int, tuple[int, int]]) -> AttentionMetadata:
    """A step of the requests in ``spans``, each in blocks of its own, with the first and the last of its tokens."""
    lengths = np.asarray([end - begin for begin, end in spans.values()], np.int32)
    ends = np.asarray([end for _, end in spans.values()], np.int32)
    tables = torch.arange((max(spans) + 1) * _BLOCKS, dtype=torch.int32, device=_CPU).view(-1, _BLOCKS)
    slots = [index * _BLOCKS * _BLOCK_SIZE + torch.arange(*span, **INTEGERS) for index, span in spans.items()]
    return AttentionMetadata(
        num_decodes=0,
        slot_mapping=torch.cat(slots),
        block_table=tables[list(spans)],
        seq_lens=torch.from_numpy(ends),
        query_start=torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)),
        host_query_lens=lengths,
        host_seq_lens=ends,
    )
