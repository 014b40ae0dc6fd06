"""One pass of the oracle, or of its twin, over all that a check compares: sequences, and layers of the engine's states.

::

    sequences   run freely: log-probabilities of prompts and answers
    watched     each layer reads what the engine's own layer read, so an error shows in the layer that makes it
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from tp_engine.apps.check.answers import Answer, Floats, Ids
from tp_engine.apps.check.linears import MLPS, below_layers, layer_of
from tp_engine.apps.check.observed import Observed
from tp_engine.apps.check.oracle import Oracle, Query, Scores
from tp_engine.apps.check.watched import Watched

_MOST_PART_BYTES = 1 << 30  # of second weights that are copied, for each rank in turn
Sequence_ = tuple[int, ...]


@dataclass(slots=True)
class Passed:
    """What a pass found.

    ::

        scores      sequence -> its log-probabilities
        layers      of the watched answer: the outputs (layers + 1, n, hidden) of embeddings and layers
        inner       of the watched answer: layer -> what its MLP reads (n, hidden)
        head        of the watched answer: log-probabilities after the engine's last states
        reads       of the watched answer: linear layer -> what it reads (n, in), at ``Watched.linear_positions``
        experts     of the watched answer: layer -> of each rank its part of the experts' output (n, hidden), likewise
        logits      after the prompt of the draws, and after each token of their greedy answer (n, vocabulary)
        of_few      the same with the answer of few tokens
        wide        last names of modules whose outputs are float32 in any type, such as routers

    ``quantization`` is the checkpoint's, ``activation`` that of the gate in the model's MLPs.
    """

    scores: dict[Sequence_, Scores] = field(default_factory=dict)
    layers: list[Floats] = field(default_factory=list)
    inner: dict[int, Floats] = field(default_factory=dict)
    head: Scores | None = None
    reads: dict[str, Floats] = field(default_factory=dict)
    experts: dict[int, list[Floats]] = field(default_factory=dict)
    logits: Floats | None = None
    of_few: Floats | None = None
    wide: set[str] = field(default_factory=set)
    quantization: Mapping[str, Any] | None = None
    activation: Callable[[torch.Tensor], torch.Tensor] = torch.nn.functional.silu


def questions(observed: Observed) -> dict[Sequence_, Ids]:
    """Each sequence of any set-up with the token ids (n, m) that are compared after each position.

    Those of the alternatives of all answers with that sequence; 0 where there is none.
    """
    found: dict[Sequence_, list[Ids]] = defaultdict(list)
    for answers in observed.set_ups.values():
        for answer in answers if isinstance(answers, list) else ():
            found[answer.sequence].append(answer.alternatives)
    return {sequence: np.maximum(np.concatenate(parts, 1), 0) for sequence, parts in found.items()}


def logprobs_of(scores: Scores, asked: Ids, answer: Answer) -> Floats:
    """What a pass says of an answer's alternatives (n, m); NaN where there is none."""
    places = (asked[:, None, :] == answer.alternatives[:, :, None]).argmax(-1)
    found = np.take_along_axis(scores.wanted, places, 1)
    return np.where(answer.alternatives >= 0, found, np.nan)


def _array(values: torch.Tensor) -> Floats:
    return np.array(values.to(torch.promote_types(values.dtype, torch.float32)).cpu().numpy())


class _Recorder:
    """Records what the oracle's layers read for the watched answer, the last of its sequences; ``num_free`` others run
    freely."""

    def __init__(self, passed: Passed, watched: Watched | None, num_free: int) -> None:
        self._passed, self._watched, self._num_free = passed, watched, num_free
        self._num_begun = 0  # sequences that the present layer has begun
        names = () if watched is None else watched.row_inputs(0)
        self._split = frozenset(map(below_layers, names))

    def see(self, index: int, states: Sequence[torch.Tensor]) -> Sequence[torch.Tensor] | None:
        """Keep the output of a layer; the next one reads that of the engine."""
        self._num_begun = 0
        if self._watched is None:
            return None
        self._passed.layers.append(_array(states[-1]))
        return [*states[: self._num_free], torch.from_numpy(self._watched.arrays[0][f"streams.{index + 1}"])]

    def hooks(self, index: int, layer: torch.nn.Module) -> Iterator[Any]:
        """Record in ``layer`` from now on; yields the hooks."""
        yield layer.register_forward_pre_hook(self._begin)
        mlp = next((getattr(layer, name) for name in MLPS if hasattr(layer, name)), None)
        if mlp is not None:
            yield mlp.register_forward_pre_hook(partial(self._read_inner, index))
        for name, module in layer.named_modules():
            if f"{index}.{name}" in self._split:
                yield module.register_forward_pre_hook(partial(self._read, f"{index}.{name}"))
            if isinstance(getattr(module, "down_proj", None), torch.nn.Parameter):
                yield module.register_forward_hook(partial(self._part_experts, index), with_kwargs=True)
            if name.endswith(("gate", "router")):
                yield module.register_forward_hook(partial(self._note_type, name))

    def _begin(self, _layer: object, _inputs: object) -> None:
        self._num_begun += 1

    def _rows(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor | None:
        """The rows (n, width) that a module reads, if they are the watched ones."""
        return inputs[0].reshape(-1, inputs[0].shape[-1]) if inputs and self._num_begun > self._num_free else None

    def _read_inner(self, index: int, _mlp: object, inputs: tuple[torch.Tensor, ...]) -> None:
        if (rows := self._rows(inputs)) is not None:
            self._passed.inner[index] = _array(rows)

    def _read(self, name: str, _module: object, inputs: tuple[torch.Tensor, ...]) -> None:
        rows = self._rows(inputs)
        if rows is not None and self._watched is not None:
            self._passed.reads[name] = _array(rows[torch.from_numpy(np.maximum(self._watched.linear_positions, 0))])

    def _part_experts(self, index: int, experts: Any, inputs: tuple[Any, ...], named: Any, _output: object) -> None:
        """Run the watched rows again with each rank's part of the experts' second weights alone."""
        watched = self._watched
        whole = {name: one for name, one in experts.named_parameters(recurse=False) if name.startswith("down_proj")}
        is_large = sum(one.nbytes for one in whole.values()) > _MOST_PART_BYTES
        if watched is None or self._num_begun <= self._num_free or len(watched.arrays) == 1 or is_large:
            return
        num_rows, rows = len(watched.sequence), torch.from_numpy(np.maximum(watched.linear_positions, 0))

        def own_rows(value: Any) -> Any:
            return value[rows] if isinstance(value, torch.Tensor) and len(value) == num_rows else value

        arguments, options = [own_rows(one) for one in inputs], {name: own_rows(one) for name, one in named.items()}
        layouts = [one for of_rank in watched.experts for name, one in of_rank.items() if layer_of(name) == index]
        parts = list[Floats]()
        try:
            for layout in layouts:
                for name, weight in whole.items():
                    own = torch.nn.Parameter(_own_part(weight, layout, experts), requires_grad=False)
                    setattr(experts, name, own)
                found = _array(experts.forward(*arguments, **options))
                parts.append(found.reshape(-1, found.shape[-1]))
            self._passed.experts[index] = parts
        except (RuntimeError, ValueError, TypeError, LookupError):
            pass  # experts of another form: they are judged as any layer, but no rank is named
        finally:
            for name, weight in whole.items():
                setattr(experts, name, weight)

    def _note_type(self, name: str, _module: object, _inputs: object, output: object) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.dtype is torch.float32:
            self._passed.wide.add(name.rpartition(".")[2])


def _own_part(weight: torch.Tensor, layout: Mapping[str, Any], experts: Any) -> torch.Tensor:
    """``weight`` (experts, hidden, inner), or with inner elements before hidden, or (experts, hidden) of a bias, with
    zeros for all that a rank does not have."""
    own = torch.zeros_like(weight)
    here, inner = slice(*layout["experts"]), slice(*layout["inner"])
    if weight.dim() == 2:
        own[here] = weight[here] if layout["adds_bias"] else 0.0
    elif getattr(experts, "is_transposed", weight.shape[2] != layout["inner_size"]):
        own[here, inner] = weight[here, inner]
    else:
        own[here, :, inner] = weight[here, :, inner]
    return own


def run_pass(oracle: Oracle, observed: Observed, note_layer: Callable[[], None]) -> Passed:
    """Score all sequences, and run each layer on the engine's own states where they are watched; that runs last."""
    asked, watched, draws = questions(observed), observed.watched, observed.draws
    passed = Passed(quantization=oracle.quantization, activation=oracle.activation)
    queries = [Query(sequence, wanted) for sequence, wanted in asked.items()]
    if draws is not None:
        queries += [Query(one, logits_from=len(draws.prompt.token_ids) - 1) for one in draws.sequences]
    recorder = _Recorder(passed, watched, len(queries))
    if watched is not None:
        queries.append(Query(watched.sequence, np.maximum(watched.answer.alternatives[: len(watched.sequence)], 0)))
    hooks = [one for index, layer in enumerate(oracle.layers) for one in recorder.hooks(index, layer)]
    try:
        scores = oracle.score_all(queries, see_layer=recorder.see, note_layer=note_layer)
    finally:
        for hook in hooks:
            hook.remove()
    passed.scores = dict(zip(asked, scores, strict=False))
    if draws is not None:
        passed.logits, passed.of_few = (scores[len(asked) + place].logits for place in range(2))
    passed.head = None if watched is None else scores[-1]
    return passed
