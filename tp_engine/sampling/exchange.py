"""One all-gather for tensors of several shapes and types.

::

    rank r's words (int64)    [ piece 0 | piece 1 | ... ]        every piece a whole number of words
    gathered                  [ rank 0's words | rank 1's words | ... ]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tp_engine.ranks.collectives import Communicator

WORD_BYTES = torch.int64.itemsize


def exchange(communicator: Communicator, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Every rank's ``pieces``, stacked: (m, c) -> (world size, m, c).  A collective, unless there are no pieces.

    Pieces have the same shapes and types on every rank, and rows of a whole number of 8-byte words.
    """
    if not pieces:
        return []
    words = [piece.contiguous().view(torch.int64).reshape(-1) for piece in pieces]
    flat = words[0] if len(words) == 1 else torch.cat(words)
    gathered = communicator.all_gather(flat).view(communicator.info.world_size, -1)
    stacks, start = [], 0
    for piece, part in zip(pieces, words, strict=True):
        stack = gathered[:, start : start + len(part)].contiguous()
        stacks.append(stack.view(piece.dtype).view(-1, *piece.shape))
        start += len(part)
    return stacks


def side_by_side(stack: torch.Tensor) -> torch.Tensor:
    """(world size, m, c) -> (m, world size x c), in rank order."""
    world_size, num_rows, width = stack.shape
    return stack.transpose(0, 1).reshape(num_rows, world_size * width)
