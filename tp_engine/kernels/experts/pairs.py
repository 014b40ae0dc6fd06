"""Pairs of a row and one of its experts, sorted by expert: single products, so that adapters can come between them.

::

    pair     row * top_k + j, of the row's j-th expert; those whose expert is on another rank are left out
    run      consecutive pairs of one expert
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.plan import IntArray


class ExpertRun(NamedTuple):
    """``num_pairs`` pairs from ``first`` on, of the rank's expert ``expert``."""

    expert: int
    first: int
    num_pairs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPairs:
    """Pairs by expert: their numbers ``order`` (P,), their ``experts`` (P,) among the rank's, and the ``runs``."""

    order: npt.NDArray[np.int64]
    experts: IntArray
    runs: list[ExpertRun]


def pair_up(local_ids: IntArray, num_experts: int) -> ExpertPairs:
    """The pairs of rows whose experts are ``local_ids`` (n, k), of which 0 to ``num_experts`` - 1 are the rank's."""
    flat = local_ids.ravel()
    here = np.flatnonzero((flat >= 0) & (flat < num_experts))
    order = here[np.argsort(flat[here], kind="stable")]
    experts = flat[order]
    firsts = np.flatnonzero(np.diff(experts, prepend=-1))
    counts = np.diff(firsts, append=len(experts))
    runs = [ExpertRun(*one) for one in zip(experts[firsts].tolist(), firsts.tolist(), counts.tolist(), strict=True)]
    return ExpertPairs(order=order, experts=experts, runs=runs)


def multiply_runs(x: torch.Tensor, weights: torch.Tensor, runs: list[ExpertRun]) -> torch.Tensor:
    """``x`` (P, in), by expert, each run times its expert's weight of ``weights`` (experts, out, in) -> (P, out)."""
    out = x.new_empty((len(x), weights.shape[1]))
    for expert, first, count in runs:
        torch.mm(x[first : first + count], weights[expert].T, out=out[first : first + count])
    return out
