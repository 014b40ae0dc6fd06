"""All-gather in one kernel, over memory that the ranks' GPUs share.

::

    rank r    part [ block 0 | block 1 | ... ]  ->  its buffer       a program copies its blocks
              meet                                                   every rank's are there
              all buffers  ->  whole [ rank 0's part | rank 1's part | ... ]
              meet                                                   the buffers may be overwritten

A rank reads no more bytes than any all-gather, and waits for two exchanges of signals.  Programs of kernels
on different ranks wait for each other by signals in memory that the ranks' GPUs share::

    signals of rank r    [place 0: from rank 0, 1, .. W-1 | place 1: ... ]      int32, 0 between kernels

A program meets the program of the same number on every other rank, at places of its own.  Torch's kernels over
symmetric memory use the same words in the same way.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from tp_engine.kernels.dependent_launch_triton import begin_program, dependent_launch
from tp_engine.kernels.jit import jit

_BLOCK = 512
_NEVER = tl.constexpr(2)  # no signal is ever this, so a lane that waits for it changes nothing
MAX_PROGRAMS = 32
"""Of a launch: all must run at once, because they wait for other ranks, and the signals of their two places must fit
into the pad."""


@jit
def meet(signals, rank, place, WORLD_SIZE: tl.constexpr):
    """Tell every rank that this program has arrived, and wait for all; what was stored before can be read after.

    Each peer has a lane of its own: signals take one or two microseconds each, and cross the links side by side.
    """
    tl.debug_barrier()
    peer = tl.arange(0, WORLD_SIZE)
    theirs = tl.load(signals + peer).to(tl.pointer_type(tl.int32)) + place * WORLD_SIZE + rank
    mine = tl.load(signals + rank).to(tl.pointer_type(tl.int32)) + place * WORLD_SIZE + peer
    _change_all(theirs, 0, 1, "release")
    _change_all(mine, 1, 0, "acquire")
    tl.debug_barrier()


@jit
def _change_all(words, old, new, SEM: tl.constexpr):
    """Change each of ``words`` from ``old`` to ``new``, as soon as it is ``old``."""
    awaited = tl.full(words.shape, old, tl.int32)
    num_left = tl.full((), 1, tl.int32)
    while num_left > 0:
        found = tl.atomic_cas(words, awaited, tl.full(words.shape, new, tl.int32), sem=SEM, scope="sys")
        awaited = tl.where(found == awaited, _NEVER, awaited)
        num_left = tl.sum((awaited != _NEVER).to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["rank", "num_words"], do_not_specialize_on_alignment=["part"])
@no_type_check
def gather_kernel(
    part, whole, buffers, signals, num_words, rank, BLOCK: tl.constexpr, WORLD_SIZE: tl.constexpr, PDL: tl.constexpr
):
    """One program: every ``num_programs``-th block of each part."""
    begin_program(PDL)
    program, num_programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    own = tl.load(buffers + rank).to(tl.pointer_type(tl.int64))
    for start in range(program * BLOCK, num_words, num_programs * BLOCK):
        word = start + lane
        tl.store(own + word, tl.load(part + word, mask=word < num_words), mask=word < num_words)
    meet(signals, rank, program * 2, WORLD_SIZE)
    for start in range(program * BLOCK, num_words, num_programs * BLOCK):
        word = start + lane
        for peer in tl.static_range(WORLD_SIZE):
            theirs = tl.load(buffers + peer).to(tl.pointer_type(tl.int64))
            words = tl.load(theirs + word, mask=word < num_words)
            tl.store(whole + peer * num_words + word, words, mask=word < num_words)
    meet(signals, rank, program * 2 + 1, WORLD_SIZE)


def all_gather_triton(part: torch.Tensor, *, buffers: torch.Tensor, signals: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the parts (n,) int64 of all ranks, contiguous, as (world size, n); a collective.

    ``buffers`` and ``signals`` (world size,) int64 hold the addresses of the ranks' buffers, with room for ``part``,
    and of their signals, all 0.
    """
    assert part.dim() == 1 and part.dtype == torch.int64 and part.is_contiguous()
    world_size, num_words = len(buffers), len(part)
    whole = part.new_empty((world_size, num_words))
    if num_words == 0:
        return whole
    gather_kernel[(min(triton.cdiv(num_words, _BLOCK), MAX_PROGRAMS),)](
        part, whole, buffers, signals, num_words, rank, BLOCK=_BLOCK, WORLD_SIZE=world_size,
        **dependent_launch(part.device),
    )  # fmt: skip
    return whole
