"""One prompt and its answer, layer by layer: what the ranks record of the prompt's pass and of the decode steps.

A step with draft tokens has rows of tokens that never came; a position's row is the one that read the answer's own
token, after its own tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from tp_engine.apps.check.answers import Answer, Floats, Ids

Order: TypeAlias = Callable[[str, Mapping[str, Any]], object]
_LINEARS, _EXPERTS = "linears.", "experts."


@dataclass(frozen=True, slots=True)
class Watched:
    """What every rank recorded of ``answer``, by the names of ``LayerWatch``: streams and inner by position, linears
    and experts as they were recorded, at ``linear_positions`` (-1: of a draft token); ``layouts`` are those of the
    linears, ``experts`` those of the experts."""

    answer: Answer
    arrays: Sequence[Mapping[str, Floats]]
    layouts: Sequence[Mapping[str, Any]]
    linear_positions: Ids
    experts: Sequence[Mapping[str, Any]] = ()

    @property
    def sequence(self) -> tuple[int, ...]:
        """All tokens that layers read: the answer's last one is none of them."""
        return self.answer.sequence[: len(self.arrays[0]["streams.0"])]

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt, which come first."""
        return len(self.answer.prompt.token_ids)

    def row_inputs(self, rank: int) -> dict[str, Floats]:
        """What a rank's row-parallel layers read, by the names of their weights, a row for each of
        ``linear_positions``."""
        found = {}
        for name, layout in self.layouts[rank].items():
            x = self.arrays[rank][f"{_LINEARS}{name}.x"]
            if _is_split(layout) and len(x) == len(self.linear_positions):
                begin, end = layout["columns"]
                found[layout["parts"][0]["name"]] = x[:, : end - begin]
        return found

    def columns(self, rank: int) -> dict[str, tuple[int, int]]:
        """Which columns of its weight each of these has."""
        return {
            one["parts"][0]["name"]: (one["columns"][0], one["columns"][1])
            for one in self.layouts[rank].values()
            if _is_split(one)
        }

    def expert_outputs(self, rank: int) -> dict[str, Floats]:
        """A rank's part of the output of each layer's experts, a row for each of ``linear_positions``."""
        found = {name: self.arrays[rank][f"{_EXPERTS}{name}.y"] for name in self.experts[rank]}
        return {name: one for name, one in found.items() if len(one) == len(self.linear_positions)}


def _is_split(layout: Mapping[str, Any]) -> bool:
    begin, end = layout["columns"]
    return bool(end - begin < layout["stored_columns"])


def watch(order: Order, ask: Callable[[], Answer], num_ranks: int) -> Watched:
    """Watch the layers while ``ask`` asks for an answer; ``order`` is what operators have for all ranks."""
    with tempfile.TemporaryDirectory(prefix="tp_engine-check-") as folder:
        order("watch_layers", {})
        answer = ask()
        order("watch_layers", {"folder": folder})
        arrays, layouts, experts = [], [], []
        for rank in range(num_ranks):
            with np.load(Path(folder) / f"rank{rank}.npz") as file:
                layouts.append(json.loads(str(file["layout"])))
                experts.append(json.loads(str(file["experts_layout"])))
                arrays.append({name: file[name] for name in file.files if not name.endswith("layout")})
    positions = positions_of(answer.sequence, *(arrays[0][f"rows.{name}"] for name in ("steps", "tokens", "places")))
    known = np.flatnonzero(positions >= 0)
    rows = known[np.argsort(positions[known], kind="stable")]
    assert np.array_equal(positions[rows], np.arange(len(rows))), "each position is read once, from the first on"
    by_position = [
        {name: one if name.startswith((_LINEARS, _EXPERTS, "rows.")) else one[rows] for name, one in of_rank.items()}
        for of_rank in arrays
    ]
    num_kept = max((len(one) for name, one in arrays[0].items() if name.startswith(_LINEARS)), default=0)
    of_prompt = min(num_kept, int(arrays[0]["rows.most"][0]), len(answer.prompt.token_ids))
    of_linears = np.concatenate((positions[:of_prompt], positions[len(answer.prompt.token_ids) :]))[:num_kept]
    return Watched(answer, by_position, layouts, of_linears, experts)


def positions_of(
    sequence: Sequence[int], steps: npt.NDArray[Any], tokens: npt.NDArray[Any], places: npt.NDArray[Any]
) -> Ids:
    """The position of each recorded row (n,); -1 where its token, or one before it in its step, is not the
    sequence's."""
    found = np.full(len(steps), -1, np.int64)
    known = np.array(sequence)
    for step in np.unique(steps):
        rows = np.flatnonzero(steps == step)
        at = places[rows].astype(np.int64)
        is_own = (at < len(known)) & (known[np.minimum(at, len(known) - 1)] == tokens[rows])
        own = rows[: int(is_own.cumprod().sum())]
        found[own] = places[own]
    return found
