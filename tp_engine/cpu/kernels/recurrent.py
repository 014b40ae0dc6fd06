"""What C functions with a recurrent state (``recurrent.h``) are given."""

import numpy as np
import numpy.typing as npt

from tp_engine.kernels.recurrent import Chunk


def chunk_table(chunks: list[Chunk], *, has_states: bool) -> npt.NDArray[np.int64]:
    """Return the start, count, slot (-1: none) and is_fresh of each chunk, (chunks, 4)."""
    rows = [
        (start, count, -1 if slot is None or not has_states else slot, is_fresh)
        for start, count, slot, is_fresh in chunks
    ]
    return np.array(rows, np.int64)
