"""The LM head that chooses tokens: its kernels interpreted and compiled, and the heads that have it."""

from __future__ import annotations

import re

import pytest
import torch

from tests.unit.kernels.kernel_harness import (
    CAPABILITIES,
    compile_cases,
    compiled_for,
    interpreted,
    needs_triton,
    quiet,
)
from tp_engine.kernels.sampling.tables import SamplingTables
from tp_engine.layers.formats import head_choice
from tp_engine.layers.formats.base import Product
from tp_engine.layers.formats.dense import PlainLinear, TreeLinear, choose_product
from tp_engine.layers.formats.head_choice import HeadChoice

CASES = "kernel_cases_head_choice"
pytestmark = needs_triton


def test_interpreted_kernels() -> None:
    """Oracle: product, rounding, noise and rank keys in plain PyTorch; the logits that the same product writes, and
    the kernel that reads them; a sampler with logits, on 1 and 2 ranks."""
    interpreted(CASES)


@quiet
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kernels_compile_for(capability: int) -> None:
    """Oracle: Triton's own compiler; the loop is that of a product, on matrix units but for float32."""
    for kernel in compile_cases(CASES, capability):
        assert kernel.metadata.shared <= 99 << 10, (kernel.metadata.shared, kernel.name)
        if kernel.name == "head_choice_kernel":
            assert not kernel.metadata.enable_fp_fusion, "noise has the bits of its twin"
            has_units = re.search(r"wgmma|tcgen05\.mma|mma\.sync", kernel.asm["ptx"]) is not None
            assert has_units or kernel.src.signature["weight"] == "*fp32"


@quiet
def test_no_number_of_rows_compiles_a_kernel_anew() -> None:
    """Oracle: Triton's own cache: one compilation for each padded number of rows."""
    from tp_engine.kernels.linear.head_choice_triton import head_choice_triton, head_sizes

    weight, tables = torch.empty(992, 1024, dtype=torch.bfloat16, device="meta"), SamplingTables.empty(64, META)

    def launch(num_rows: int) -> None:
        hidden = torch.empty(num_rows, 1024, dtype=torch.bfloat16, device="meta")
        rows, positions = (torch.empty(num_rows, dtype=dtype, device="meta") for dtype in (torch.int32, torch.int64))
        sizes = head_sizes(weight, num_rows)
        head_choice_triton(hidden, weight, rows, positions, tables, first_id=16, num_ids=990, sizes=sizes)

    with compiled_for(90) as kernels:
        for num_rows in (8, 16):
            launch(num_rows)
        known = {id(kernel) for kernel in kernels}
        for num_rows in (1, 2, 7, 9, 15):
            launch(num_rows)
        assert {id(kernel) for kernel in kernels} == known and len(known) == 4


META = torch.device("meta")


def choose(product: Product) -> HeadChoice | None:
    return head_choice.choose_head_choice(product, first_id=0, num_ids=100, scale=1.0, softcap=None)


def test_the_heads_that_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: off by the table, which nothing has measured yet; the switch; weights of the model's own type, at most
    256 rows; not sums as trees, no columns in parts of a block, nothing on a CPU."""
    weight = torch.empty(112, 96, dtype=torch.bfloat16, device="meta")
    product = PlainLinear(weight)
    monkeypatch.setenv("TP_ENGINE_FEW_ROWS", "triton")
    assert choose(product) is None
    monkeypatch.setattr(head_choice, "runs_triton", lambda device_type: True)
    chosen, wide = choose(product), choose(PlainLinear(weight.float()))
    assert chosen is not None and [rows for rows in (0, 1, 256, 257) if chosen.takes(rows)] == [1, 256]
    assert wide is not None and [rows for rows in (1, 64, 65) if wide.takes(rows)] == [1, 64]
    assert choose(PlainLinear(weight[:, :80].contiguous())) is None
    assert choose(PlainLinear(weight.double())) is None
    assert choose(TreeLinear(weight, 1, keeps_sums=False)) is None
    assert choose(choose_product(torch.empty(128, 128))) is None
    for by in ("library", "table"):
        monkeypatch.setenv("TP_ENGINE_FEW_ROWS", by)
        assert choose(product) is None
    monkeypatch.setattr(head_choice, "HEAD_MOST_ROWS", ((1024, 0), (1 << 62, 16)))
    measured = choose(product)
    assert measured is not None and [rows for rows in (1, 16, 17) if measured.takes(rows)] == [1, 16]
