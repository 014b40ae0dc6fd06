"""Checks of one communicator's collectives against one process's results from all ranks' parts; and their speed.

::

    all_reduce     whole numbers: exact.  Random ones: the rounding of each addition in the type.  All ranks: equal bits
    tree_reduce    exact: ``tree_sum`` of the parts
    all_gather     exact
    gather         exact on rank 0, nothing elsewhere

Every rank makes the parts of all ranks from their numbers, so the oracle needs no exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from tp_engine.apps.check.report import CheckFinding, CheckStatus
from tp_engine.distributed.collectives import Communicator
from tp_engine.distributed.rank import Agreeing
from tp_engine.kernels.linear.tree_sum import tree_sum
from tp_engine.system.units import KIB, MIB

DTYPES = (torch.float32, torch.bfloat16)
SIZES = (16, 4 * KIB, 256 * KIB, 1 * MIB + 16, 6 * MIB)
_WHOLE_NUMBERS = 13  # 0 to 12, whose sum over some ranks bfloat16 holds exactly
_TIMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to add up: a communicator under its ``name``, the ``host`` group by which ranks agree on a finding, the
    ``device`` of tensors, and ``wait``, which waits for all launched work.  ``begin`` is told what comes next."""

    name: str
    communicator: Communicator
    host: Agreeing
    device: torch.device
    wait: Callable[[], None] = lambda: None
    begin: Callable[[str], None] = lambda what: None


Mistake: TypeAlias = str | None
"""What is wrong in one comparison, None if nothing is."""


def random_part(rank: int, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    """One rank's tensor (num_elements,), on the CPU; every rank can make it."""
    return torch.randn(
        num_elements, generator=torch.Generator().manual_seed(rank), dtype=torch.float32, device="cpu"
    ).to(dtype)


def check_collectives(way: Way, sizes: Sequence[int] = SIZES) -> Iterator[CheckFinding]:
    """Yield a finding for each kind of collective; every rank calls this, and all get the same findings."""
    for kind, compare in _KINDS.items():
        name, started_s = f"{kind}, {way.name}", time.monotonic()
        mistakes = []
        for dtype in DTYPES:
            for num_bytes in sizes:
                way.begin(f"{name}: {num_bytes:,} bytes of {_short(dtype)}")
                mistakes += [one for one in compare(way, num_bytes // dtype.itemsize, dtype) if one is not None]
        told = [text.decode() for text in way.host.all_gather_bytes("; ".join(mistakes[:3]).encode())]
        wrong = next((rank for rank, text in enumerate(told) if text), None)
        yield CheckFinding(
            name=name,
            status=CheckStatus.RIGHT if wrong is None else CheckStatus.WRONG,
            detail=f"{len(sizes)} sizes up to {max(sizes):,} bytes, {len(told)} ranks: "
            + ("equal to the parts of all ranks, put together by one" if wrong is None else told[wrong]),
            place="" if wrong is None else f"rank {wrong}",
            meaning="" if wrong is None else "every layer on several ranks uses these: no answer can be trusted",
            remedy="" if wrong is None else _remedy(way.name),
            seconds=time.monotonic() - started_s,
        )


def check_speed(way: Way, num_bytes: int) -> CheckFinding:
    """The bandwidth of all-reduces of ``num_bytes``, counted as NCCL's tests do (busbw); every rank calls this.

    The figure is that of the slowest rank.
    """
    num_ranks, started_s = way.communicator.info.world_size, time.monotonic()
    way.begin(f"speed of {way.name}: {num_bytes:,} bytes")
    tensor = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=way.device)
    times_s = []
    for _ in range(_TIMED + 1):
        way.host.all_gather_bytes(b"")
        begun_s = time.perf_counter()
        way.communicator.all_reduce(tensor.fill_(1))
        way.wait()
        times_s.append(time.perf_counter() - begun_s)
    own_s = sorted(times_s[1:])[_TIMED // 2]
    slowest_s = max(float(text) for text in way.host.all_gather_bytes(repr(own_s).encode()))
    gigabytes = 2 * (num_ranks - 1) / num_ranks * num_bytes / slowest_s / 1e9
    return CheckFinding.right(
        f"speed, {way.name}",
        f"all-reduce of {num_bytes:,} bytes over {num_ranks} ranks: {slowest_s * 1e6:,.0f} us, "
        f"{gigabytes:.1f} GB/s per rank; for comparison with other machines, not judged",
        numbers={"all_reduce_us": slowest_s * 1e6, "bus_gb_per_s": gigabytes},
        seconds=time.monotonic() - started_s,
    )


def _all_reduce(way: Way, num_elements: int, dtype: torch.dtype) -> Iterator[Mistake]:
    info = way.communicator.info
    places = torch.arange(num_elements, dtype=torch.int64, device="cpu").remainder(_WHOLE_NUMBERS)
    whole = [(places + rank).remainder(_WHOLE_NUMBERS).to(dtype) for rank in range(info.world_size)]
    found = _reduced(way, whole[info.rank])
    yield _unequal("a sum of whole numbers", found, torch.stack(whole).double().sum(0).to(dtype))
    parts = [random_part(rank, num_elements, dtype) for rank in range(info.world_size)]
    found, stacked = _reduced(way, parts[info.rank]), torch.stack(parts).double()
    # Each of the additions rounds once, and no partial sum is larger than the sum of the magnitudes.
    allowed = info.world_size * torch.finfo(dtype).eps / 2 * stacked.abs().sum(0)
    error = (found.double() - stacked.sum(0)).abs()
    if bool((error > allowed).any()) or not bool(found.isfinite().all()):
        worst = int((error - allowed).nan_to_num(float("inf")).argmax())
        yield (
            f"a sum of {num_elements:,} numbers of {_short(dtype)}: element {worst:,} is {float(found[worst]):g} "
            f"instead of {float(stacked.sum(0)[worst]):g}; additions in this type explain an error of "
            f"{float(allowed[worst]):.1g}"
        )
    digests = way.host.all_gather_bytes(_digest(found))
    if digests[info.rank] != digests[0]:
        yield f"a sum of {num_elements:,} numbers of {_short(dtype)} has other bits than on rank 0"


def _tree_reduce(way: Way, num_elements: int, dtype: torch.dtype) -> Iterator[Mistake]:
    info = way.communicator.info
    parts = [random_part(rank, num_elements, torch.float32) for rank in range(info.world_size)]
    found = way.communicator.tree_reduce(parts[info.rank].to(way.device), dtype)
    way.wait()
    yield _unequal("a tree of sums", found.cpu(), tree_sum(parts).to(dtype))


def _all_gather(way: Way, num_elements: int, dtype: torch.dtype) -> Iterator[Mistake]:
    for shape in _shapes(num_elements):
        parts = [random_part(rank, num_elements, dtype).view(shape) for rank in range(way.communicator.info.world_size)]
        found = way.communicator.all_gather(parts[way.communicator.info.rank].to(way.device))
        way.wait()
        yield _unequal(f"parts {shape} together", found.cpu(), torch.cat(parts, dim=-1))


def _gather(way: Way, num_elements: int, dtype: torch.dtype) -> Iterator[Mistake]:
    info = way.communicator.info
    for shape in _shapes(num_elements):
        parts = [random_part(rank, num_elements, dtype).view(shape) for rank in range(info.world_size)]
        found = way.communicator.gather(parts[info.rank].to(way.device))
        way.wait()
        if not info.is_first:
            yield None if found is None else "a rank other than 0 has a result"
        elif found is None:
            yield "rank 0 has no result"
        else:
            yield _unequal(f"parts {shape} on rank 0", found.cpu(), torch.cat(parts, dim=-1))


_KINDS: dict[str, Callable[[Way, int, torch.dtype], Iterator[Mistake]]] = {
    "all_reduce": _all_reduce,
    "tree_reduce": _tree_reduce,
    "all_gather": _all_gather,
    "gather": _gather,
}


def _reduced(way: Way, part: torch.Tensor) -> torch.Tensor:
    found = way.communicator.all_reduce(part.to(way.device, copy=True))
    way.wait()
    return found.cpu()


def _shapes(num_elements: int) -> tuple[tuple[int, ...], ...]:
    return (num_elements,), (4, num_elements // 4)


def _unequal(what: str, found: torch.Tensor, expected: torch.Tensor) -> Mistake:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{what}: {tuple(found.shape)} of {found.dtype} instead of {tuple(expected.shape)} of {expected.dtype}"
    differs = found != expected
    if not bool(differs.any()):
        return None
    first = int(differs.flatten().nonzero()[0])
    return (
        f"{what} ({found.numel():,} of {_short(found.dtype)}): {int(differs.sum()):,} elements differ, the first is "
        f"{first:,}: {float(found.flatten()[first]):g} instead of {float(expected.flatten()[first]):g}"
    )


def _digest(tensor: torch.Tensor) -> bytes:
    from xxhash import xxh3_128_digest

    return xxh3_128_digest(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _remedy(name: str) -> str:
    others = {"symm_mem": "--all-reduce-backend nccl", "nccl": "NCCL_P2P_DISABLE=1", "shm": "--all-reduce-backend gloo"}
    way = f"start with {others[name]}, which goes another way, and check again; " if name in others else ""
    return way + "if that is right, the driver, the firmware or a link between the devices is not"
