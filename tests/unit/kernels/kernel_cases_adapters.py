"""Products with adapters by Triton, and in C, against their PyTorch twin: interpreted and on CUDA (``CASES``),
and the launches of real models (``launch_all``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.unit.kernels.kernel_cases_layer_ops import assert_close_enough, random
from tp_engine.kernels.linear.adapters import AdapterRows, AdapterWeights, add_adapters, group_rows
from tp_engine.kernels.ops import Kind, implementation

# Of each row: two tiles of slot 0, one row of slot 2, none of slot 1, some rows without an adapter.
SLOTS = np.array([0, -1, 0, 2, *[0] * 17, -1, 0])


def make_rows(slots: np.ndarray, device: str) -> AdapterRows:
    """The rows of a step, by their slots."""
    rows, tiles = group_rows(slots)
    on_device = (torch.from_numpy(array).to(device) for array in (rows, tiles))
    return AdapterRows(rows=next(on_device), tiles=next(on_device), host_tiles=tiles)


def make_weights(
    in_size: int, part_sizes: tuple[int, ...], ranks: tuple[int, ...], max_rank: int, dtype: torch.dtype, device: str
) -> AdapterWeights:
    """Random slots; what is after a slot's rank is zero."""
    num_parts, slots = len(part_sizes), len(ranks)
    a = random((slots, num_parts, max_rank, in_size), torch.float32, device, 1) / in_size**0.5
    b = random((slots, max_rank, sum(part_sizes)), torch.float32, device, 2)
    for slot, rank in enumerate(ranks):
        a[slot, :, rank:], b[slot, rank:] = 0, 0
    return AdapterWeights(
        a=a.flatten(1, 2).to(dtype),
        b=b.to(dtype),
        ranks=torch.tensor(ranks, dtype=torch.int32, device=device),
        part_sizes=part_sizes,
    )


def check_adapters(
    device: str, kind: Kind, in_size: int, part_sizes: tuple[int, ...], max_rank: int, dtype: torch.dtype
) -> None:
    """Oracle: the twin in float64; rows that are slices of wider ones.  A row has the same bits in any other step, and
    rows without an adapter, or with one that leaves the product alone, keep theirs."""
    weights = make_weights(in_size, part_sizes, (max_rank, 3, max(1, max_rank // 2)), max_rank, dtype, device)
    x = random((len(SLOTS), in_size + 24), dtype, device)[:, 8 : 8 + in_size]
    before = random((len(SLOTS), sum(part_sizes)), dtype, device, 3)
    run = implementation("add_adapters", kind)
    found, twin, exact = before.clone(), before.clone(), before.double()
    run(found, x, weights, make_rows(SLOTS, device))
    add_adapters(twin, x, weights, make_rows(SLOTS, device))
    wide = AdapterWeights(a=weights.a.double(), b=weights.b.double(), ranks=weights.ranks, part_sizes=part_sizes)
    for row, slot in enumerate(SLOTS.tolist()):
        if slot >= 0:
            shrunk = wide.a[slot] @ x[row].double()
            exact[row] += torch.cat([shrunk[of_a] @ wide.b[slot][:, of_b] for of_a, of_b in wide.parts()])
    assert_close_enough(found, twin, exact, granted=1.0)
    plain = torch.from_numpy(SLOTS < 0)
    assert torch.equal(found[plain], before[plain]) and not torch.equal(found[~plain], before[~plain])
    for row in (0, 3, 20):
        alone = before[row : row + 1].clone()
        run(alone, x[row : row + 1], weights, make_rows(SLOTS[row : row + 1], device))
        assert torch.equal(alone[0], found[row]), f"row {row} alone has other bits"
    weights.ranks.zero_()
    untouched = before.clone()
    if kind != "twin":
        run(untouched, x, weights, make_rows(SLOTS, device))
        assert torch.equal(untouched, before)


def cases_of(kind: Kind) -> dict[str, Callable[[str], None]]:
    """Name -> check on a device."""
    return {
        f"{kind}-{dtype}-{in_size}-{part_sizes}-{max_rank}": partial(
            check_adapters, kind=kind, dtype=dtype, in_size=in_size, part_sizes=part_sizes, max_rank=max_rank
        )
        for dtype, in_size, part_sizes, max_rank in (
            (torch.float32, 200, (96, 24, 24), 8), (torch.bfloat16, 64, (70, 10), 16),
            (torch.float16, 130, (33,), 4), (torch.float32, 37, (64, 16, 16, 64), 32),
            (torch.bfloat16, 513, (300,), 20),
        )
    }  # fmt: skip


CASES = cases_of("triton")


def launch_all() -> None:
    """Queries, keys and values, gate and up, and the output projection of Llama 3.1 8B on 1 and 8 ranks."""
    run = implementation("add_adapters", "triton")
    tiles = np.array([[0, 16, 0], [16, 3, 1]], dtype=np.int32)
    rows = AdapterRows(
        rows=torch.empty(19, dtype=torch.int32, device="meta"),
        tiles=torch.empty(2, 3, dtype=torch.int32, device="meta"),
        host_tiles=tiles,
    )
    for dtype, max_rank in ((torch.bfloat16, 16), (torch.bfloat16, 64), (torch.float16, 8), (torch.float32, 16)):
        for in_size, part_sizes in ((4096, (4096, 1024, 1024)), (4096, (1792, 1792)), (512, (4096,))):
            height, width = len(part_sizes) * max_rank, sum(part_sizes)
            weights = AdapterWeights(
                a=torch.empty(4, height, in_size, dtype=dtype, device="meta"),
                b=torch.empty(4, max_rank, width, dtype=dtype, device="meta"),
                ranks=torch.empty(4, dtype=torch.int32, device="meta"),
                part_sizes=part_sizes,
            )
            x, out = (torch.empty(32, size, dtype=dtype, device="meta") for size in (in_size, width))
            run(out, x, weights, rows)


def check_compiled(kernel: Any, capability: int) -> None:
    """The kernels of both halves."""
    assert kernel.metadata.name in ("shrink_kernel", "expand_kernel")
