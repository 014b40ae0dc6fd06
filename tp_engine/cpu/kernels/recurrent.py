"""What C functions with a recurrent state (``recurrent.h``, ``matrix_states.h``) are given."""

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.cpu.kernels.layout import DTYPE_CODES
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kv_layout import StateKind

MAX_DIM = 256  # of matrix_states.h


def is_taken(mixed: torch.Tensor, kind: StateKind) -> bool:
    """Return whether the functions take rows ``mixed`` (N, ...), and states of ``kind``."""
    return mixed.dtype in DTYPE_CODES and mixed.stride(1) == 1 and max(kind.key_dim, kind.value_dim) <= MAX_DIM


def row_addresses(slots: torch.Tensor, runs: torch.Tensor | None) -> tuple[int, int | None]:
    """Return the addresses of a decode's ``slots`` (B,) int32 and ``runs`` (B, 2) int32, or None."""
    assert all(one.dtype == torch.int32 and one.is_contiguous() for one in (slots, runs) if one is not None)
    return slots.data_ptr(), None if runs is None else runs.data_ptr()


def chunk_table(chunks: list[Chunk], *, has_states: bool) -> npt.NDArray[np.int64]:
    """Return the start, count, slot (-1: none) and is_fresh of each chunk, (chunks, 4)."""
    rows = [
        (start, count, -1 if slot is None or not has_states else slot, is_fresh)
        for start, count, slot, is_fresh in chunks
    ]
    return np.array(rows, np.int64)


def matrix_arguments(states: LayerStates | None, kind: StateKind) -> tuple[int | None, ...]:
    """Return the addresses of both parts of ``states``, the elements from slot to slot of each, and the sizes of
    ``kind``."""
    places = (None, None) if states is None else tuple(part.data_ptr() for part in states)
    strides = (0, 0) if states is None else tuple(part.stride(0) for part in states)
    heads = kind.num_key_heads, kind.num_value_heads
    return *places, *strides, *heads, kind.key_dim, kind.value_dim, kind.taps


def check_memory(failed: int) -> None:
    """Raise ``MemoryError`` if a function says that it ``failed``."""
    if failed:
        raise MemoryError("there is no memory for recurrent states that are not kept")
