"""Products with quantised weights as Triton kernels: which weights they take; they are never compiled anew."""

from __future__ import annotations

import torch

from tests.unit.kernels.kernel_cases_quantised import BFLOAT16, make_weight
from tests.unit.kernels.kernel_harness import compiled_for, needs_triton, quiet

pytestmark = needs_triton


@quiet
def test_no_number_of_rows_compiles_a_kernel_anew() -> None:
    """Oracle: Triton's own cache: after one step for each line of the table of tiles, no step adds to it."""
    from tp_engine.kernels.quantization.linear_triton import TILES, quantised_linear_triton

    weight = make_weight("int4", (256, 256), "meta", group=128, scales=BFLOAT16)
    x = torch.empty(200, 256, dtype=BFLOAT16, device="meta")
    with compiled_for(90) as kernels:
        for most, _ in TILES:
            quantised_linear_triton(x[: min(most, 130) - 3], weight, None)
        known = {id(kernel) for kernel in kernels}
        for num_rows in (1, 2, 16, 17, 32, 33, 64, 65, 128, 200):
            quantised_linear_triton(x[:num_rows], weight, None)
        assert {id(kernel) for kernel in kernels} == known


def test_which_weights_the_kernel_for_one_row_takes() -> None:
    """Oracle: rows of whole words, of which each has one scale."""
    from tp_engine.kernels.quantization.row_triton import block_of_words, takes_row

    assert takes_row(make_weight("int4", (4, 64), group=8)) and not takes_row(make_weight("int4", (4, 64), group=4))
    assert not takes_row(make_weight("int4", (4, 60))) and takes_row(make_weight("int8", (4, 60), group=60))
    assert [block_of_words(words) for words in (512, 360, 1440, 3200, 7)] == [512, 128, 512, 512, 32]
