"""One pass of the oracle, or of its twin, over all that a check compares: sequences, and layers of the engine's states.

::

    sequences   run freely: log-probabilities of prompts and answers
    watched     each layer reads what the engine's own layer read, so an error shows in the layer that makes it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tp_engine.check.observed import Answer, Floats, Ids, Observed
from tp_engine.check.oracle import Oracle, Query, Scores

_MLPS = ("mlp", "feed_forward", "block_sparse_moe", "moe")

Sequence_ = tuple[int, ...]


@dataclass(slots=True)
class Passed:
    """What a pass found.

    ::

        scores      sequence -> its log-probabilities
        layers      of the watched prompt: the outputs (layers + 1, n, hidden) of embeddings and layers
        inner       of the watched prompt: layer -> what its MLP reads (n, hidden)
        head        of the watched prompt: log-probabilities after the engine's last states
        wide        last names of modules whose outputs are float32 in any type, such as routers

    ``quantization`` is the checkpoint's, ``activation`` that of the gate in the model's MLPs.
    """

    scores: dict[Sequence_, Scores] = field(default_factory=dict)
    layers: list[Floats] = field(default_factory=list)
    inner: dict[int, Floats] = field(default_factory=dict)
    head: Scores | None = None
    wide: set[str] = field(default_factory=set)
    quantization: Mapping[str, Any] | None = None
    activation: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu


def questions(observed: Observed) -> dict[Sequence_, Ids]:
    """Return each sequence of any set-up with the token ids (n, m) that are compared after each position.

    Those of the alternatives of all answers with that sequence; 0 where there is none.
    """
    found: dict[Sequence_, list[Ids]] = defaultdict(list)
    for answers in observed.set_ups.values():
        for answer in answers if isinstance(answers, list) else ():
            found[answer.sequence].append(answer.alternatives)
    return {sequence: np.maximum(np.concatenate(parts, 1), 0) for sequence, parts in found.items()}


def logprobs_of(scores: Scores, asked: Ids, answer: Answer) -> Floats:
    """Return what a pass says of an answer's alternatives (n, m); NaN where there is none."""
    places = (asked[:, None, :] == answer.alternatives[:, :, None]).argmax(-1)
    found = np.take_along_axis(scores.wanted, places, 1)
    return np.where(answer.alternatives >= 0, found, np.nan)


def _array(values: torch.Tensor) -> Floats:
    return np.array(values.to(torch.promote_types(values.dtype, torch.float32)).cpu().numpy())


def run_pass(oracle: Oracle, observed: Observed, note_layer: Callable[[], None]) -> Passed:
    """Score all sequences, and run each layer on the engine's own states where they are watched; that runs last."""
    asked, watched = questions(observed), observed.watched
    passed = Passed(quantization=oracle.quantization, activation=oracle.activation)
    queries = [Query(sequence, wanted) for sequence, wanted in asked.items()]
    num_free = len(queries)
    if watched is not None:
        alone = next(one for one in observed.alone if one.prompt.name == watched.prompt.name)
        after_last = np.maximum(alone.alternatives[: len(watched.prompt.token_ids)], 0)
        queries.append(Query(watched.prompt.token_ids, after_last))
    num_called = 0  # sequences of which the present layer's MLP has begun

    def see(index: int, states: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        nonlocal num_called
        num_called = 0
        if watched is None:
            return None
        passed.layers.append(_array(states[-1]))
        return [*states[:num_free], torch.from_numpy(watched.arrays[0][f"streams.{index + 1}"])]

    hooks = []
    for index, layer in enumerate(oracle.layers):
        mlp = next((getattr(layer, name) for name in _MLPS if hasattr(layer, name)), None)
        if mlp is not None:

            def keep(_module: object, inputs: tuple[torch.Tensor, ...], index: int = index) -> None:
                nonlocal num_called
                num_called += 1
                if num_called > num_free and inputs:
                    passed.inner[index] = _array(inputs[0]).reshape(-1, inputs[0].shape[-1])

            hooks.append(mlp.register_forward_pre_hook(keep))
        for name, module in layer.named_modules():
            if name.endswith(("gate", "router")):

                def look(_module: object, _inputs: object, output: object, name: str = name) -> None:
                    first = output[0] if isinstance(output, tuple) else output
                    if isinstance(first, torch.Tensor) and first.dtype is torch.float32:
                        passed.wide.add(name.rpartition(".")[2])

                hooks.append(module.register_forward_hook(look))
    try:
        scores = oracle.score_all(queries, see_layer=see, note_layer=note_layer)
    finally:
        for hook in hooks:
            hook.remove()
    passed.scores = dict(zip(asked, scores[:num_free], strict=True))
    passed.head = None if watched is None else scores[-1]
    return passed
