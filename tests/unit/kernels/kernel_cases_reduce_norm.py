"""The fused all-reduce as one of several ranks; the test plays the other ranks.  Interpreted (``main``), on CUDA
(``CASES``), and the launches of real models (``launch_all``).

The other ranks' rows lie in their buffers, and their signals are set before the kernel starts.  Afterwards the kernel
has cleared the signals that it waited for, and has signalled every rank once at each of a program's two places.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from tests.unit.kernels.kernel_cases_layer_ops import assert_close_enough, granted_for
from tests.unit.kernels.kernel_harness import AGREEMENT
from tp_engine.kernels.layer_ops import NormRule, add_norm
from tp_engine.kernels.ranks.meeting_triton import MAX_PROGRAMS
from tp_engine.kernels.ranks.reduce_norm_triton import all_reduce_add_norm_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6
# (offset, is_centred, scale): the rule of most models, each of the two other rules, and both together.
KINDS = ((0.0, False, 1.0), (1.0, False, 0.22), (0.0, True, 1.0), (0.5, True, 2.0))


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    """(n,) int64."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)


def check(
    num_rows: int,
    size: int,
    world_size: int,
    rank: int,
    dtype: torch.dtype,
    kind: tuple[float, bool, float],
    device: str,
) -> None:
    """Rows that are slices of wider rows; signals as the other ranks set them; the norm of one of ``KINDS``."""
    offset, is_centred, scale = kind
    generator = torch.Generator().manual_seed(size + rank)
    parts = [torch.randn(num_rows, size, generator=generator).to(device, dtype) for _ in range(world_size)]
    wide = torch.zeros(num_rows, size + 16, dtype=dtype, device=device)
    wide[:, :size] = parts[rank]
    residual = torch.randn(num_rows, size, generator=generator).to(device, dtype)
    weight = torch.randn(size, generator=generator).to(device, dtype)
    plain_residual, exact_residual = residual.clone(), residual.double()
    rule, exact_rule = (NormRule(gain, EPS, offset, is_centred) for gain in (weight, weight.double()))
    plain = add_norm(torch.stack(parts).float().sum(0).to(dtype), plain_residual, rule, scale)
    exact = add_norm(torch.stack(parts).double().sum(0), exact_residual, exact_rule, scale)
    buffers = [torch.zeros_like(part) if peer == rank else part.clone() for peer, part in enumerate(parts)]
    num_places = 2 * min(num_rows, MAX_PROGRAMS)
    signals = [torch.zeros(num_places, world_size, dtype=torch.int32, device=device) for _ in range(world_size)]
    signals[rank][:] = 1
    signals[rank][:, rank] = 0
    out = all_reduce_add_norm_triton(
        wide[:, :size],
        residual,
        rule,
        scale,
        buffers=addresses(buffers),
        signals=addresses(signals),
        rank=rank,
    )
    assert_close_enough(residual, plain_residual, exact_residual)
    assert_close_enough(out, plain, exact, granted_for(exact, dtype) if is_centred else 1e-2)
    assert torch.equal(buffers[rank], parts[rank])
    for peer in range(world_size):
        given = torch.zeros(num_places, world_size, dtype=torch.int32, device=device)
        given[:, rank] = int(peer != rank)
        assert torch.equal(signals[peer], given), (peer, signals[peer])


def check_late_ranks() -> None:
    """Peers that come one after the other, and one that has not taken this rank's last signal yet (interpreted only).

    Each word changes once: a signal that the kernel has given already is not given again.
    """
    world_size, rank, size = 4, 1, 32
    parts = [torch.full((1, size), float(2**peer)) for peer in range(world_size)]
    buffers = [part.clone() for part in parts]
    signals = [torch.zeros(2, world_size, dtype=torch.int32) for _ in range(world_size)]
    signals[3][0, rank] = 1
    taken: list[int] = []

    def peers() -> None:
        for place in (0, 1):
            for peer in (2, 3, 0):
                time.sleep(0.03)
                if peer == 3 and place == 0:
                    signals[3][0, rank] = 0
                    time.sleep(0.03)
                while signals[peer][place, rank] == 0:
                    time.sleep(0.001)
                signals[peer][place, rank] = 0  # this rank's signal, taken
                taken.append(peer)
                signals[rank][place, peer] = 1

    thread = threading.Thread(target=peers, daemon=True)
    thread.start()
    residual = torch.zeros(1, size)
    out = all_reduce_add_norm_triton(
        parts[rank], residual, NormRule(torch.ones(size), EPS), 1.0,
        buffers=addresses(buffers), signals=addresses(signals), rank=rank,
    )  # fmt: skip
    thread.join(timeout=60.0)
    assert not thread.is_alive() and taken == [2, 3, 0, 2, 3, 0]
    assert torch.equal(residual, torch.full((1, size), 15.0)) and torch.allclose(out, torch.ones(1, size))
    assert not any(words.any() for words in signals)


def make_cases() -> dict[str, Callable[[str], None]]:
    """Name -> check on a device."""
    plain, *others = KINDS
    sizes = [(3, 48, world_size, world_size - 1, dtype, plain) for dtype in DTYPES for world_size in (2, 4)]
    sizes += [(MAX_PROGRAMS + 5, 64, 2, 0, torch.bfloat16, plain), (1, 200, 8, 5, torch.float32, plain)]
    sizes += [(4, 200, 2, 1, dtype, kind) for dtype in DTYPES for kind in others]
    return {
        f"{rows} x {size}, rank {rank} of {world_size}, {dtype}, {kind}": partial(
            check, rows, size, world_size, rank, dtype, kind
        )
        for rows, size, world_size, rank, dtype, kind in sizes
    }


CASES = make_cases()


def main() -> None:
    for one in CASES.values():
        one("cpu")
    check_late_ranks()
    print(AGREEMENT)


def launch_all() -> None:
    """Decode batches in the engine's shapes, on 2 to 8 ranks."""
    plain, *others = KINDS
    shapes = [*itertools.product(((2, 1024), (4, 4096), (8, 5120)), (plain,)), *itertools.product(((2, 4096),), others)]
    for dtype, ((world_size, size), (offset, is_centred, scale)) in itertools.product(
        (torch.float32, torch.bfloat16), shapes
    ):
        x, residual = (torch.empty(64, size, dtype=dtype, device="meta") for _ in range(2))
        weight = torch.empty(size, dtype=dtype, device="meta")
        pointers = torch.empty(world_size, dtype=torch.int64, device="meta")
        rule = NormRule(weight, EPS, offset, is_centred)
        all_reduce_add_norm_triton(x, residual, rule, scale, buffers=pointers, signals=pointers, rank=1)


if __name__ == "__main__":
    main()
