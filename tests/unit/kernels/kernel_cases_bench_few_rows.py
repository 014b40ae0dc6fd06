"""Launches what ``scripts/bench_few_rows.py`` launches, once, in its own process with TRITON_INTERPRET=1.

Oracle: the library's kernels beside Triton's, which write the same stream, or choose the same tokens.
"""

from __future__ import annotations

import sys

import torch

from tests.unit.kernels.kernel_harness import AGREEMENT, ROOT


def main() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    from bench_few_rows import layers_of
    from benchmarks.head_choice import heads
    from benchmarks.kernels.cases import Shape

    from tp_engine.kernels.linear.few_rows_linear_triton import Tiles

    shape = Shape(name="tiny", hidden=128, inner=128, num_heads=4, num_kv_heads=2, head_dim=32, device="cpu")
    for layer in layers_of(shape):
        for num_rows, tiles in ((1, None), (3, None), (3, Tiles(64, 32, 4, 2, 4))):
            one = layer.tensors(num_rows, "cpu")
            other = one | {"stream": one["stream"].clone()}
            layer.triton(one, tiles)()
            layer.library(other)()
            torch.testing.assert_close(one["stream"], other["stream"], rtol=2**-7, atol=2**-7)
            assert layer.is_normed == torch.equal(one["stream"], other["stream"])
    torch.manual_seed(0)  # no ties by rounding
    for head in heads(128, 150):
        one = head.tensors(3, "cpu")
        assert torch.equal(head.triton(one, Tiles(64, 32, 4, 2, 1))(), head.library(one)())
    print(AGREEMENT)


if __name__ == "__main__":
    main()
