"""One pass of the oracle, or of its twin, over all that a check compares: sequences, and layers of the engine's states.

::

    sequences   run freely: log-probabilities of prompts and answers
    watched     each layer reads what the engine's own layer read, so an error shows in the layer that makes it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from tp_engine.check.observed import Answer, Floats, Ids, Observed, Watched
from tp_engine.check.oracle import Oracle, Query, Scores

_MLPS = ("mlp", "feed_forward", "block_sparse_moe", "moe")

Sequence_ = tuple[int, ...]


@dataclass(slots=True)
class Passed:
    """What a pass found.

    ::

        scores      sequence -> its log-probabilities
        columns     sequence -> the columns of ``wanted`` that belong to each set-up's answer
        layers      for each watched prompt: the outputs (layers + 1, n, hidden) of embeddings and layers
        inner       for each watched prompt: layer -> what its MLP reads (n, hidden)
        heads       for each watched prompt: log-probabilities after the engine's last states
        wide        last names of modules whose outputs are float32 in any type, such as routers
    """

    scores: dict[Sequence_, Scores] = field(default_factory=dict)
    layers: list[Floats] = field(default_factory=list)
    inner: list[dict[int, Floats]] = field(default_factory=list)
    heads: list[Scores] = field(default_factory=list)
    wide: set[str] = field(default_factory=set)


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


def run_pass(
    oracle: Oracle,
    asked: Mapping[Sequence_, Ids],
    watched: Sequence[Watched],
    heads: Sequence[Ids],
    note_layer: Callable[[], None],
) -> Passed:
    """Score all sequences, and run each layer on the states of the engine; ``heads`` are asked after these."""
    passed = Passed(inner=[{} for _ in watched])
    queries = [Query(sequence, wanted) for sequence, wanted in asked.items()]
    num_free = len(queries)
    queries += [Query(one.prompt.token_ids, wanted) for one, wanted in zip(watched, heads, strict=True)]
    outputs: list[list[Floats]] = [[] for _ in watched]
    running = {"call": 0}

    def see(index: int, states: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        running["call"] = 0
        own = []
        for number, one in enumerate(watched):
            outputs[number].append(states[num_free + number].float().cpu().numpy().copy())
            own.append(torch.from_numpy(one.arrays[0][f"streams.{index + 1}"]))
        return [*states[:num_free], *own]

    hooks = []
    for index, layer in enumerate(oracle.layers):
        mlp = next((getattr(layer, name) for name in _MLPS if hasattr(layer, name)), None)
        if mlp is not None:

            def keep(_module: object, inputs: tuple[torch.Tensor, ...], index: int = index) -> None:
                number = running["call"] - num_free
                running["call"] += 1
                if number >= 0 and inputs:
                    passed.inner[number][index] = inputs[0].float().cpu().numpy().reshape(-1, inputs[0].shape[-1])

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
    passed.heads = scores[num_free:]
    passed.layers = [np.stack(one) for one in outputs]
    return passed
