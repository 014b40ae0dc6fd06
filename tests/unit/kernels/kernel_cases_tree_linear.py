"""Linear layers as trees over shards by Triton: interpreted and on CUDA (``CASES``), and those of real models
(``launch_all``).

The rule: against float64, the error is at most twice that of the twin; a row has the same bits in any batch; and the
ranks' parts, added as a tree and rounded once, are the product of one rank, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from tests.unit.kernels.kernel_cases_layer_ops import DTYPES, assert_close_enough, random
from tp_engine.kernels.linear.tree_linear_triton import tree_linear_triton
from tp_engine.kernels.linear.tree_sum import tree_linear, tree_sum
from tp_engine.model_config.tp_invariant import NUM_SHARDS, WORLD_SIZES

# (in, out): shards smaller than a block, and of several blocks with a rest; outputs that blocks do not divide.
SIZES = ((64, 40), (1088, 72))
# (in, out, shards) of Qwen3-0.6B and 8B on 1 and 8 ranks: column parallel (1 shard), row parallel, a vocabulary.
MODELS = ((1024, 4096, 1), (2048, 1024, 8), (384, 1024, 1), (4096, 12288, 1), (12288, 4096, 8), (4096, 151936, 1))


def check(device: str, sizes: tuple[int, int], dtype: torch.dtype, has_bias: bool) -> None:
    """Rows are slices of wider rows."""
    num_in, num_out = sizes
    x = random((70, num_in + 8), dtype, device)[:, :num_in]
    weight = (random((num_out, num_in), torch.float32, device, 1) * num_in**-0.5).to(dtype)
    bias = random((num_out,), dtype, device, 2) if has_bias else None
    found = tree_linear_triton(x, weight, bias, NUM_SHARDS, keeps_sums=False)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    granted = 4 * exact.abs().max().item() if dtype == torch.float32 else 1e-2
    assert_close_enough(found, tree_linear(x, weight, bias, NUM_SHARDS, keeps_sums=False), exact, granted)
    for row in (0, 69):
        alone = tree_linear_triton(x[row : row + 1], weight, bias, NUM_SHARDS, keeps_sums=False)
        assert torch.equal(alone[0], found[row]), row
    for world_size in WORLD_SIZES:
        shards = NUM_SHARDS // world_size
        parts = [
            tree_linear_triton(rows, own.contiguous(), None if rank else bias, shards, keeps_sums=True)
            for rank, (rows, own) in enumerate(zip(x.chunk(world_size, 1), weight.chunk(world_size, 1), strict=True))
        ]
        assert torch.equal(tree_sum(parts).to(dtype), found), world_size


CASES: dict[str, Callable[[str], None]] = {
    f"{sizes[0]} to {sizes[1]}, {str(dtype)[6:]}{', bias' * bias}": partial(
        check, sizes=sizes, dtype=dtype, has_bias=bias
    )
    for sizes, dtype, bias in product(SIZES, DTYPES, (False, True))
    if sizes == SIZES[0] or bias
}


def launch_all() -> None:
    """One launch of each layer; the first also with a bias, and a rank's part in float32."""
    for number, (num_in, num_out, num_shards) in enumerate(MODELS):
        weight = torch.empty(num_out, num_in, dtype=torch.bfloat16, device="meta")
        tree_linear_triton(weight[:1], weight, None, num_shards, keeps_sums=False)
        if number == 0:
            tree_linear_triton(weight[:1], weight, weight[:, 0].contiguous(), num_shards, keeps_sums=False)
        if number in (1, 2):
            tree_linear_triton(weight[:1], weight, None, num_shards, keeps_sums=True)


def check_compiled(kernel: Any, capability: int) -> None:
    """Dependent launch where the GPU has it."""
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
