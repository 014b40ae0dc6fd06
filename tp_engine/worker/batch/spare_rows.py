"""Spare rows: rows after those of the batch, each of which stands for a row at a later position during one step.

A spare row has the block table of its row, so it reads the row's keys and values and stores its own after them.  Where
the row does not keep the token, they stay in slots after its last computed one, and its next tokens overwrite them.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.layers.upload import upload_all
from tp_engine.plan import IntArray


class MirroredTable:
    """An int32 table of ``shape`` on the device, with a twin on the host: write ``host`` (numpy), then ``push``.

    On a CPU both are the same memory (``is_shared``) and a push costs nothing; on CUDA only the named entries travel.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        on_host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda", device="cpu")
        self.host: IntArray = on_host.numpy()
        self.device = on_host if device.type == "cpu" else torch.zeros(shape, dtype=torch.int32, device=device)
        self.is_shared = device.type == "cpu"

    def push(self, *index: npt.NDArray[np.integer]) -> None:
        """Send ``host[..., *index]`` to the device, without a synchronisation."""
        if self.is_shared:
            return
        on_host: tuple[Any, ...] = (..., *index)
        axes = (axis.astype(np.int64) for axis in index)
        values, *places = upload_all((self.host[on_host], *axes), self.device.device)
        on_device: tuple[Any, ...] = (..., *places)
        self.device[on_device] = values


def places_in_runs(rows: IntArray) -> npt.NDArray[np.int64]:
    """Return the place of each of ``rows`` (n,), which are grouped, in its group: 0 0 1 2 0 for rows 3 7 7 7 4."""
    is_first = np.ones(len(rows), dtype=np.bool_)
    np.not_equal(rows[1:], rows[:-1], out=is_first[1:])
    if is_first.all():  # as in steps of decodes
        return np.zeros(len(rows), dtype=np.int64)
    first_of_run = np.flatnonzero(is_first)
    lengths = np.diff(first_of_run, append=len(rows))
    return np.arange(len(rows)) - np.repeat(first_of_run, lengths)


class SpareRows:
    """Enters tokens of spare rows, and those that rows keep, into a batch's tables: ``token_ids`` (rows, stride) on the
    device, ``block_table`` (G, rows, M) and ``computed`` (rows,).
    """

    def __init__(self, token_ids: torch.Tensor, block_table: MirroredTable, computed: MirroredTable) -> None:
        self._flat_token_ids, self._stride = token_ids.view(-1), token_ids.shape[1]
        self._block_table = block_table
        self._computed = computed

    def keep(self, rows: IntArray, tokens: IntArray) -> None:
        """``rows`` (n,) have one more computed token for each entry, after which ``tokens`` (n,) come."""
        positions = self._computed.host[rows] + 1 + places_in_runs(rows)
        self._write(rows, positions, tokens)
        self._computed.host[rows] = positions  # of a row's entries numpy enters the last
        self._computed.push(rows)

    def fill(self, spare_rows: IntArray, rows: IntArray, tokens: IntArray, num_blocks: int) -> None:
        """``spare_rows`` (n,) stand for ``rows`` (n,), which have up to ``num_blocks`` blocks, and have read
        ``tokens``."""
        positions = self._computed.host[rows] + 1 + places_in_runs(rows)
        self._write(spare_rows, positions, tokens)
        self._computed.host[spare_rows] = positions
        self._computed.push(spare_rows)
        tables = self._block_table
        tables.host[:, spare_rows, :num_blocks] = tables.host[:, rows, :num_blocks]
        if not tables.is_shared:
            targets, sources = upload_all((spare_rows.astype(np.int64), rows.astype(np.int64)), tables.device.device)
            tables.device[:, targets, :num_blocks] = tables.device[:, sources, :num_blocks]

    def _write(self, rows: IntArray, positions: npt.NDArray[np.int64], tokens: IntArray) -> None:
        places = rows.astype(np.int64) * self._stride + positions
        self._flat_token_ids.index_copy_(0, *upload_all((places, tokens.copy()), self._flat_token_ids.device))
