"""Launches what ``scripts/bench_few_rows.py`` launches, once, in its own process with TRITON_INTERPRET=1.

Oracle: the library's kernels beside Triton's, which write the same stream.
"""

from __future__ import annotations

import sys

import torch

from tests.unit.kernel_harness import AGREEMENT, ROOT


def main() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    from bench_few_rows import layers_of, library_launch, tensors, triton_launch
    from benchmarks.kernels.cases import Shape

    from tp_engine.kernels.few_rows_linear_triton import Tiles

    shape = Shape(name="tiny", hidden=128, inner=128, num_heads=4, num_kv_heads=2, head_dim=32, device="cpu")
    for layer in layers_of(shape):
        for num_rows, tiles in ((1, None), (3, None), (3, Tiles(64, 32, 4, 2, 4))):
            one = tensors(layer, num_rows, "cpu")
            other = one | {"stream": one["stream"].clone()}
            triton_launch(layer, one, tiles)()
            library_launch(layer, other, "cpu")()
            torch.testing.assert_close(one["stream"], other["stream"], rtol=2**-7, atol=2**-7)
            assert layer.is_normed == torch.equal(one["stream"], other["stream"])
    print(AGREEMENT)


if __name__ == "__main__":
    main()
