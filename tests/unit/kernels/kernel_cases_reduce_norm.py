"""All-reduce, residual sum and norm in one kernel: as one of several ranks, of which the test plays the others,
interpreted and on CUDA (``CASES``), and the launches of real models (``launch_all``)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.unit.kernels.kernel_cases_gather import MEETING, addresses
from tests.unit.kernels.kernel_cases_layer_ops import Case, assert_close_enough, random
from tests.unit.kernels.kernel_harness import spilled_bytes
from tests.unit.kernels.ptx import in_order, instructions
from tp_engine.kernels.distributed.gather_triton import MAX_PROGRAMS
from tp_engine.kernels.distributed.reduce_norm_triton import all_reduce_add_norm_triton
from tp_engine.kernels.layer_ops import NormRule, add_norm

ORDER = ("ld.global", "st.global", *MEETING, "ld.global", "st.global", *MEETING)
# Rows, of which some are more than programs; a size that is no power of two.
SHAPES = ((1, 48), (3, 64), (MAX_PROGRAMS + 2, 40))
RULES: dict[str, dict[str, Any]] = {"rms": {}, "offset": {"offset": 1.0}, "layer norm": {"is_centred": True}}


def check(device: str, shape: tuple[int, int], world_size: int, dtype: torch.dtype, rule_of: str) -> None:
    """The other ranks' parts lie in their buffers, and their signals are set before the kernel starts; each rank has
    the same bits."""
    num_rows, size = shape
    parts = [random(shape, dtype, device, peer) for peer in range(world_size)]
    stream = random((num_rows, size + 8), dtype, device, 20)[:, :-8]
    rule = NormRule(random((size,), dtype, device, 21), 1e-6, **RULES[rule_of])
    scales = (1.0, 1.0) if rule_of == "rms" else (0.5, 0.75)
    results = []
    for rank in (0, world_size - 1):
        buffers = [torch.zeros_like(part) if peer == rank else part.clone() for peer, part in enumerate(parts)]
        num_places = 2 * min(num_rows, MAX_PROGRAMS)
        signals = [torch.zeros(num_places, world_size, dtype=torch.int32, device=device) for _ in range(world_size)]
        signals[rank][:] = 1
        signals[rank][:, rank] = 0
        residual = stream.clone()
        part = torch.cat((parts[rank], parts[rank]), 1)[:, :size]
        places: dict[str, Any] = {"buffers": addresses(buffers), "signals": addresses(signals), "rank": rank}
        found = all_reduce_add_norm_triton(part, residual, rule, *scales, **places)
        assert torch.equal(buffers[rank], parts[rank])
        assert not signals[rank].any() and all(
            bool((one[:, rank] == 1).all()) for one in signals if one is not signals[rank]
        )
        results.append((found, residual))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    exact_rule = NormRule(rule.weight.double(), rule.eps, rule.offset, rule.is_centred)
    exact_stream, plain_stream = stream.double(), stream.clone()
    exact = add_norm(torch.stack(parts).double().sum(0), exact_stream, exact_rule, *scales)
    plain = add_norm(torch.stack(parts).sum(0), plain_stream, rule, *scales)
    for own, other, wide in zip(results[0], (plain, plain_stream), (exact, exact_stream), strict=True):
        assert_close_enough(own, other, wide, wide.abs().max().item())


CASES: dict[str, Case] = {
    f"{shape}, {world_size} ranks, {dtype}, {rule_of}": partial(
        check, shape=shape, world_size=world_size, dtype=dtype, rule_of=rule_of
    )
    for shape, world_size, dtype, rule_of in (
        (SHAPES[0], 2, torch.float32, "rms"),
        (SHAPES[1], 4, torch.bfloat16, "offset"),
        (SHAPES[1], 8, torch.float32, "layer norm"),
        (SHAPES[2], 4, torch.bfloat16, "rms"),
    )
}


def launch_all() -> None:
    """Llama-70B on 8 ranks, gpt-oss-120b on 4, Qwen3.5-35B on 2."""
    for world_size, size in ((8, 8192), (4, 2880), (2, 2048)):
        pointers = torch.empty(world_size, dtype=torch.int64, device="meta")
        x, residual = (torch.empty(16, size, dtype=torch.bfloat16, device="meta") for _ in range(2))
        rule = NormRule(torch.empty(size, dtype=torch.bfloat16, device="meta"), 1e-5)
        all_reduce_add_norm_triton(x, residual, rule, buffers=pointers, signals=pointers, rank=1)


def check_compiled(kernel: Any, capability: int) -> None:
    """All threads copy, meet, one for each peer signals and then waits, all meet, read, and the same again; nothing
    spills, and it starts early where the GPU can."""
    lines = instructions(kernel.asm["ptx"])
    assert in_order(lines, ORDER), f"{kernel.name} meets in another order"
    for kind in ("release", "acquire"):
        assert sum(f"{kind}.sys.cas" in line for line in lines) == 2
    assert spilled_bytes(kernel) == 0
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
