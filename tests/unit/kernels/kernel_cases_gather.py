"""The all-gather: as one of several ranks, of which the test plays the others, interpreted and on CUDA (``CASES``); as
all ranks at once, each a process (``check_ranks``); and the launches of real models (``launch_all``)."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any
from unittest.mock import patch

import torch

from tests.unit.kernels.ptx import in_order, instructions
from tp_engine.kernels.distributed import gather_triton
from tp_engine.kernels.distributed.gather_triton import MAX_PROGRAMS, all_gather_triton, meet

BLOCK = 512
NUM_PLACES = 2 * MAX_PROGRAMS
# One word, a decode's shares, a block and one more, more blocks than programs.
SIZES = (1, 3 * 65, BLOCK, BLOCK + 1, (MAX_PROGRAMS + 2) * BLOCK + 7)
DEADLINE_S = 120.0
MEETING = ("bar.sync", "release.sys.cas", "acquire.sys.cas", "bar.sync")
ORDER = ("ld.global", "st.global", *MEETING, "ld.global", "st.global", *MEETING)


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    """(n,) int64."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)


def part_of(rank: int, num_words: int, call: int = 0) -> torch.Tensor:
    """What ``rank`` gives in the ``call``-th all-gather: no two words of a call are equal, and they take 64 bits."""
    return torch.arange(num_words) + (rank << 40) + (call << 50)


def check(num_words: int, world_size: int, rank: int, device: str) -> None:
    """The other ranks' parts lie in their buffers, and their signals are set before the kernel starts."""
    parts = [part_of(peer, num_words).to(device) for peer in range(world_size)]
    buffers = [torch.zeros_like(part) if peer == rank else part.clone() for peer, part in enumerate(parts)]
    num_places = 2 * min(-(-num_words // BLOCK), MAX_PROGRAMS)
    signals = [torch.zeros(num_places, world_size, dtype=torch.int32, device=device) for _ in range(world_size)]
    signals[rank][:] = 1
    signals[rank][:, rank] = 0
    # The part begins after a word, so it is aligned to a word only.
    part = torch.cat((parts[rank][:1], parts[rank]))[1:]
    whole = all_gather_triton(part, buffers=addresses(buffers), signals=addresses(signals), rank=rank)
    assert torch.equal(whole, torch.stack(parts)) and torch.equal(buffers[rank], parts[rank])
    for peer in range(world_size):
        given = torch.zeros(num_places, world_size, dtype=torch.int32, device=device)
        given[:, rank] = int(peer != rank)
        assert torch.equal(signals[peer], given), (peer, signals[peer])


def take_part(rank: int, buffers: torch.Tensor, signals: torch.Tensor, num_calls: int) -> None:
    """A rank of several: all-gathers one after the other; it comes to them late or early, and so from each meeting."""
    world_size = len(buffers)
    places = {"buffers": addresses([*buffers]), "signals": addresses([*signals])}
    delays = cycle([(rank + turn) % world_size for turn in range(world_size)])

    def meet_and_linger(*arguments: Any) -> None:
        meet(*arguments)
        time.sleep(0.003 * next(delays))

    with patch.object(gather_triton, "meet", meet_and_linger):
        for call in range(num_calls):
            num_words = SIZES[call % len(SIZES)]
            time.sleep(0.02 * ((rank + call) % world_size))
            whole = all_gather_triton(part_of(rank, num_words, call), **places, rank=rank)
            expected = torch.stack([part_of(peer, num_words, call) for peer in range(world_size)])
            assert torch.equal(whole, expected), f"all-gather {call} of rank {rank}"


def check_ranks(world_size: int, num_calls: int) -> None:
    """Ranks that are processes, over memory that they share at equal addresses."""
    buffers = torch.zeros(world_size, max(SIZES), dtype=torch.int64).share_memory_()
    signals = torch.zeros(world_size, NUM_PLACES, world_size, dtype=torch.int32).share_memory_()
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=take_part, args=(rank, buffers, signals, num_calls), daemon=True)
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + DEADLINE_S
    for process in ranks:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
    assert [process.exitcode for process in ranks] == [0] * world_size, [process.exitcode for process in ranks]
    assert not signals.any()


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device."""
    sizes = [(num_words, world_size, world_size - 1) for num_words in SIZES for world_size in (2, 4)]
    return {
        f"{num_words} words, rank {rank} of {world_size}": partial(check, num_words, world_size, rank)
        for num_words, world_size, rank in [*sizes, (700, 8, 3)]
    }


CASES = make_cases()


def launch_all() -> None:
    """The keys of a decode batch, on 2 to 8 ranks."""
    for world_size in (2, 4, 8):
        pointers = torch.empty(world_size, dtype=torch.int64, device="meta")
        part = torch.empty(64 * 65, dtype=torch.int64, device="meta")
        all_gather_triton(part, buffers=pointers, signals=pointers, rank=1)


def check_compiled(kernel: Any, capability: int) -> None:
    """All threads copy, meet, one for each peer signals and then waits, all meet, read, and the same again; words of 8
    bytes are read and written whole."""
    lines = instructions(kernel.asm["ptx"])
    assert in_order(lines, ORDER), f"{kernel.name} meets in another order"
    for kind in ("release", "acquire"):
        assert sum(f"{kind}.sys.cas" in line for line in lines) == 2
    narrow = [line for line in lines if ".global.b16" in line or ".global.b8" in line]
    assert not narrow, narrow
