"""How programs of kernels on different ranks wait for each other, by signals in memory that the ranks' GPUs share.

::

    signals of rank r    [place 0: from rank 0, 1, .. W-1 | place 1: ... ]      int32, 0 between kernels

A program meets the program of the same number on every other rank, at places of its own.  Torch's kernels over
symmetric memory use the same words in the same way.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NEVER = tl.constexpr(2)  # no signal is ever this, so a lane that waits for it changes nothing
MAX_PROGRAMS = 32
"""The most of a launch: all must run at once, because they wait for other ranks, and the signals of two places of each
must fit the pad."""


@triton.jit  # type: ignore[untyped-decorator]
def meet(signals, rank, place, WORLD_SIZE: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Tell every rank that this program is here, and wait until all are; what was stored before is seen after.

    Each peer has a lane of its own: signals take one or two microseconds each, and cross the links side by side.
    """
    tl.debug_barrier()
    peer = tl.arange(0, WORLD_SIZE)
    theirs = tl.load(signals + peer).to(tl.pointer_type(tl.int32)) + place * WORLD_SIZE + rank
    mine = tl.load(signals + rank).to(tl.pointer_type(tl.int32)) + place * WORLD_SIZE + peer
    _change_all(theirs, 0, 1, "release")
    _change_all(mine, 1, 0, "acquire")
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def _change_all(words, old, new, SEM: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Change each of ``words`` from ``old`` to ``new``, as soon as it is ``old``."""
    awaited = tl.full(words.shape, old, tl.int32)
    num_left = tl.full((), 1, tl.int32)
    while num_left > 0:
        found = tl.atomic_cas(words, awaited, tl.full(words.shape, new, tl.int32), sem=SEM, scope="sys")
        awaited = tl.where(found == awaited, _NEVER, awaited)
        num_left = tl.sum((awaited != _NEVER).to(tl.int32), axis=0)
