"""What each rank has of the model, and which rank is wrong where all ranks see the sum of what they computed.

::

    weights   all rows and columns of a stored module are on some rank

    layers    the input of a row-parallel layer: a rank has some columns of what transformers' layer of that name reads
    experts   a rank has a part of the sum that transformers' experts give with that part of their weights alone
    head      a rank has some token ids: the differences at one position are equal but for its own
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from tp_engine.apps.check.answers import Floats, Ids
from tp_engine.apps.check.linears import MLPS, below_layers, layer_of
from tp_engine.apps.check.watched import Watched

_APART = 16.0  # how much further off than another rank one is that stands out
_LEAST = 1e-6


def rank_apart(
    watched: Watched, reads: Mapping[str, Floats], experts: Mapping[int, Sequence[Floats]], index: int, *, in_mlp: bool
) -> tuple[str, str] | None:
    """Which ranks of layer ``index`` give a row-parallel layer another input than ``reads`` has, or have another
    part of the experts' output than ``experts``, and the name of that; None if all or none do.  ``in_mlp``: of the
    layer's MLP, else before it."""
    kept = watched.linear_positions >= 0
    ranks = range(len(watched.arrays))
    columns, given = [watched.columns(rank) for rank in ranks], [watched.row_inputs(rank) for rank in ranks]
    for name in given[0]:
        layer, _, module = below_layers(name).partition(".")
        exact = reads.get(below_layers(name))
        if layer != str(index) or exact is None or in_mlp != (module.partition(".")[0] in MLPS):
            continue
        pairs = [(given[rank][name], exact[:, slice(*columns[rank][name])]) for rank in ranks]
        if apart := _standing_out([_error(one[kept], other[kept]) for one, other in pairs]):
            return apart, f"what {module} reads"
    if in_mlp and len(parts := experts.get(index, ())) == len(ranks):
        outputs = [
            one for rank in ranks for name, one in watched.expert_outputs(rank).items() if layer_of(name) == index
        ]
        errors = [_error(one[kept], other[kept]) for one, other in zip(outputs, parts, strict=False)]
        if len(errors) == len(ranks) and (apart := _standing_out(errors)):
            return apart, "its part of the experts' output"
    return None


def _error(given: Floats, exact: Floats) -> float:
    """The largest error of a row, relative to its size."""
    size = np.maximum(np.linalg.norm(exact, axis=1), 1e-30)
    return float(np.max(np.linalg.norm(given - exact, axis=1) / size, initial=0.0))


def _standing_out(errors: Sequence[float]) -> str:
    """The ranks that are far further off than another; empty if all are, or none."""
    least = max(_LEAST, min(errors))
    apart = [str(rank) for rank, error in enumerate(errors) if not error <= _APART * least]
    return " and ".join(apart) if len(apart) < len(errors) else ""


def rank_of_slice(differences: Floats, ranks: Ids, num_ranks: int, bound: float) -> int | None:
    """The rank without whose token ids the ``differences`` (n, m) of each position are equal to ``bound``, as
    they are where only the sum over all tokens is another; None unless it is one.  ``ranks`` (n, m) have the ids."""
    found = []
    for rank in range(num_ranks):
        others = np.where(ranks == rank, np.nan, differences)
        rows = others[(~np.isnan(others)).sum(1) > 1]
        if len(rows) and float((np.nanmax(rows, 1) - np.nanmin(rows, 1)).max()) <= 2 * bound:
            found.append(rank)
    return found[0] if len(found) == 1 else None


def missing_rows(watched: Watched) -> list[str]:
    """The stored modules of which the ranks together do not have every row, or every column, equally often."""
    held: dict[tuple[str, int], list[int]] = defaultdict(list)
    columns: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for layouts in watched.layouts:
        for layout in layouts.values():
            for part in layout["parts"]:
                key = (part["name"], part["stored_rows"])
                held[key] += part["rows"]
                columns[(part["name"], layout["stored_columns"])].append(tuple(layout["columns"]))
    problems = []
    for (name, num_rows), rows in held.items():
        counts = np.bincount(rows, minlength=num_rows)
        if len(counts) != num_rows or not counts.all():
            missing = np.flatnonzero(counts == 0)[:3].tolist()
            problems.append(f"{name}: rows {missing} are on no rank")
    for (name, num_columns), spans in columns.items():
        covered = np.zeros(num_columns, bool)
        for begin, end in spans:
            covered[begin:end] = True
        if not covered.all():
            problems.append(f"{name}: columns {np.flatnonzero(~covered)[:3].tolist()} are on no rank")
    return problems
