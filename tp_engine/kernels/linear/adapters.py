"""Products with adapters (LoRA): each row of a step adds the product with its own adapter's pair of matrices.

::

    row t with the adapter in slot s:      out[t] += B[s] (A[s] x[t])

    a merged product of parts (queries, keys, values), a pair for each:

    A (slots, parts * max_rank, in)        B (slots, max_rank, out)
      [ A of part 0 ]                        [ B of part 0 | B of part 1 | ... ]   transposed: column o belongs to
      [ A of part 1 ]                                                              output o and its part

``AdapterRows`` groups the rows of a step by slot, once for all layers: tiles of up to ``TILE_ROWS`` rows of one slot.
Sums are float32 and rounded once, when they are added to the output.  Rows without an adapter are not touched.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.plan import IntArray

TILE_ROWS = 16  # as in cpu/adapters.c


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRows:
    """The rows of a step that have an adapter, by slot.

    ``rows`` (n,) int32 are their numbers, slot by slot; ``tiles`` (T, 3) int32 are runs of them: where a run begins in
    ``rows``, how many rows it has, and their slot.  ``host_tiles`` are the same on the host.
    """

    rows: torch.Tensor
    tiles: torch.Tensor
    host_tiles: IntArray

    @property
    def num_rows(self) -> int:
        """Rows with an adapter."""
        return len(self.rows)


def group_rows(slots: npt.NDArray[np.integer]) -> tuple[IntArray, IntArray]:
    """``rows`` and ``tiles`` of a step whose row t has the adapter in ``slots[t]`` (N,), -1 for none."""
    chosen = np.flatnonzero(slots >= 0)
    rows = chosen[np.argsort(slots[chosen], kind="stable")].astype(np.int32)
    of_row = slots[rows]
    firsts = np.flatnonzero(np.diff(of_row, prepend=-1))  # of each slot's rows
    places = np.arange(len(rows)) - firsts.repeat(np.diff(firsts, append=len(rows)))
    starts = np.flatnonzero(places % TILE_ROWS == 0)
    counts = np.diff(starts, append=len(rows))
    return rows, np.stack((starts, counts, of_row[starts]), axis=1).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWeights:
    """The slots of one product: ``a`` (slots, parts * max_rank, in) and ``b`` (slots, max_rank, out), of one type.

    ``ranks`` (slots,) int32: a slot's matrices are zero beyond these rows; 0 if its adapter leaves this product alone.
    ``part_sizes``: the outputs of each part, which add up to ``out``.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    part_sizes: tuple[int, ...]

    @property
    def max_rank(self) -> int:
        """Rows of B in a slot."""
        return self.b.shape[1]

    def parts(self) -> Iterator[tuple[slice, slice]]:
        """Yield each part's rows of A and columns of B."""
        first = 0
        for part, size in enumerate(self.part_sizes):
            yield slice(part * self.max_rank, (part + 1) * self.max_rank), slice(first, first + size)
            first += size


def add_adapters(out: torch.Tensor, x: torch.Tensor, weights: AdapterWeights, rows: AdapterRows) -> None:
    """Add the adapters' products of ``x`` (N, in) to ``out`` (N, out), of one type, in place."""
    for first, count, slot in rows.host_tiles.tolist():
        own = rows.rows[first : first + count].long()
        shrunk = x[own].float() @ weights.a[slot].float().T
        b = weights.b[slot].float()
        added = torch.cat([shrunk[:, of_a] @ b[:, of_b] for of_a, of_b in weights.parts()], 1)
        out[own] = (out[own].float() + added).to(out.dtype)
