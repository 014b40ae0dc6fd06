"""Programmatic dependent launch: a kernel is set up, and reads its weights, while the one before it still runs.

::

    without    kernel n [ work ]  drained, next one set up  [ n + 1: weights, work ]
    with       kernel n [ work ]
                  [ n + 1 set up, weights ] waits [ work ]

A decode step of few rows is some hundred kernels of a few microseconds each, with about one microsecond between two of
them.  GPUs of compute capability 9.0 and later have it (CUDA Programming Guide, "Programmatic Dependent Launch").

The rule that keeps it correct: every program of such a kernel calls ``wait_for_previous`` before it reads anything that
another kernel writes, and before it writes anything.  The wait ends when the previous kernel has ended.  The programs
of that kernel have waited too, so everything earlier on the stream has ended.  Weights never change while steps run, so
they may be read before the wait.  Kernels of libraries are launched without it: they begin when all earlier ones have
ended.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tp_engine.kernels.jit import jit

_MIN_CAPABILITY = (9, 0)
# Bytes per program.  All programs that run at a time then prefetch less than a second-level cache holds.
_MOST_PREFETCHED = 1 << 16
LINE_BYTES = 128


@jit
def let_next_begin(PDL: tl.constexpr):
    """Let the next kernel be set up from now on, as soon as the GPU has room beside this one."""
    if PDL:
        gdc_launch_dependents()


@jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all earlier kernels of the stream have ended and what they wrote can be read."""
    if PDL:
        gdc_wait()


@jit
def begin_program(PDL: tl.constexpr):
    """Begin a program that reads nothing before the wait."""
    let_next_begin(PDL)
    wait_for_previous(PDL)


@jit
def begin_row(PDL: tl.constexpr):
    """``begin_program``; return the program's row, of 64 bits: a tensor may hold more than 2**31 elements."""
    begin_program(PDL)
    return tl.program_id(0).to(tl.int64)


@jit
def begin_row_block(SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """``begin_row`` of program (i, j), which has elements [j * BLOCK, (j + 1) * BLOCK) of row i: also return their
    columns, and which of these are below SIZE."""
    row = begin_row(PDL)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return row, column, column < SIZE


@jit
def prefetch_weights(place, PDL: tl.constexpr):
    """Prefetch the cache lines of weights at ``place``, pointers, into the second-level cache, before the wait."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1
        )


def prefetched_columns(columns: int, rows: int, itemsize: int, block_in: int) -> int:
    """How many of the next ``columns`` of ``rows`` of weights a program prefetches: whole blocks, within its share."""
    return min(columns, _MOST_PREFETCHED // (rows * itemsize)) // block_in * block_in


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Arguments of a launch on ``device``: the kernel's constant PDL, and Triton's option if the GPU supports it."""
    return {"PDL": True, "launch_pdl": True} if can_launch_early(device) else {"PDL": False}


def launch_row_blocks(
    kernel: Any, like: torch.Tensor, num_rows: int, size: int, *arguments: Any, most: int = 1024, **constants: Any
) -> None:
    """Launch a kernel that starts with ``begin_row_block`` for ``num_rows`` rows of ``size`` elements, on the device of
    ``like``.  A program has up to ``most`` elements.  Without rows nothing is launched."""
    if num_rows:
        block = min(int(triton.next_power_of_2(size)), most)
        grid = (num_rows, triton.cdiv(size, block))
        kernel[grid](*arguments, SIZE=size, BLOCK=block, **constants, **dependent_launch(like.device))


@cache
def can_launch_early(device: torch.device) -> bool:
    """Whether ``device`` is a GPU with programmatic dependent launch."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _MIN_CAPABILITY
