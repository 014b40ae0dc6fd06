"""The tiles of experts: those for prompts fit a GPU's registers, and a device's choice is what a layer runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.kernels.kernel_cases_experts import make_quantised
from tests.unit.kernels.kernel_cases_quantised import BFLOAT16, E4M3, E8M0, UINT8, make_stack
from tests.unit.kernels.kernel_harness import compiled_for, needs_triton, quiet, spilled_bytes
from tp_engine.kernels.candidates import MANY, Choice, Choices, key_of, operation
from tp_engine.kernels.experts.experts_candidates import NAME, shape_of
from tp_engine.kernels.experts.tiles import DENSE_TILES, QUANTISED_TILES
from tp_engine.kernels.quantization.row_codes import RowCodes, rule_for
from tp_engine.kernels.quantization.weights import Codes
from tp_engine.layers.quantization import dense
from tp_engine.layers.quantization.dense import ExpertsByRows, choose_experts
from tp_engine.model_config.mlp import SILU, ExpertsSpec, RoutingRule

pytestmark = needs_triton
FORMATS: dict[str, tuple[Codes, dict[str, Any]]] = {
    "fp8 in blocks": ("e4m3", {"group": 128, "row_block": 128}),
    "mxfp4": ("e2m1", {"group": 32, "scales": E8M0}),
    "nvfp4": ("e2m1", {"group": 16, "scales": E4M3, "factors": True}),
    "int4": ("int4", {"group": 32, "scales": UINT8, "zeros": True, "factors": True}),
}
PROMPT_ROWS = 64  # of a tile


def prompt_tiles(format_name: str) -> dict[str, bool]:
    """The candidates for prompts of a format's experts, and whether they round rows."""
    kind, options = FORMATS[format_name]
    experts = make_quantised((2, 256, 128), kind, options, BFLOAT16, "cpu", bias=False)
    shape = shape_of(experts, 2, 2, BFLOAT16, rounds_rows=kind == "e4m3")
    refused = "it needs a GPU"
    names = [one.name for one in operation(NAME).candidates if one.why_not(shape, torch.device("cpu")) == refused]
    return {name: name.startswith("codes") for name in names if "library" not in name and _rows_of(name) >= PROMPT_ROWS}


def _rows_of(name: str) -> int:
    return int(name.split("-")[1].split("x")[0])


@quiet
@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("format_name", FORMATS)
def test_no_tile_for_prompts_spills(format_name: str, capability: int) -> None:
    """Oracle: the assembler's own count of the bytes that a thread keeps in memory for want of registers; gate and up
    of a prompt's experts, which need most."""
    from tp_engine.kernels.experts.products_triton import multiply_pairs
    from tp_engine.kernels.experts.sort_triton import PairOrder

    kind, options = FORMATS[format_name]
    weight = make_stack(kind, (8, 512, 2048), **options)
    x = torch.empty(300, 2048, dtype=BFLOAT16, device="meta")
    table, seen = operation(NAME), prompt_tiles(format_name)
    assert len(seen) >= 2 and any(seen.values()) == (kind == "e4m3")
    assert any(name.startswith("mx") for name in seen) == (format_name == "mxfp4")
    for name, rounds_rows in seen.items():
        candidate = table.named(name)
        assert candidate is not None
        tiles = candidate.build.args[0]  # type: ignore[attr-defined]
        pairs, blocks = (torch.empty(size, dtype=torch.int32, device="meta") for size in (1280, 10))
        rows: Any = x
        if rounds_rows:
            scales = torch.empty(2048 // rule_for(weight).group, 300, device="meta").t()
            rows = RowCodes(x.to(torch.float8_e4m3fn), scales)
        with compiled_for(capability) as kernels:
            multiply_pairs(rows, weight, None, PairOrder(pairs, blocks, 600), tiles, pairs_per_row=2, activation=SILU)
        assert [spilled_bytes(one) for one in kernels] == [0], (name, kernels[0].asm["ptx"][:300])
        units = ("wgmma", "tcgen05")[capability == 100]
        assert units in kernels[0].asm["ptx"], name
        has_codes_units = any(word in kernels[0].asm["ptx"] for word in ("e4m3.e4m3", "kind::f8f6f4"))
        assert has_codes_units == rounds_rows, name


@quiet
@pytest.mark.slow
def test_codes_meet_units_of_a_small_blackwell() -> None:
    """Oracle: the instruction for 8-bit floats in what is compiled for an sm_120: the library has none for blocks."""
    from tp_engine.kernels.quantization.linear_triton import RowTiles, TritonCodesProduct

    weight = make_stack("e4m3", (1, 512, 2048), **FORMATS["fp8 in blocks"][1]).expert(0)
    product = TritonCodesProduct(weight, RowTiles(64, 128, 128, 8, 4))
    codes = torch.empty(300, 2048, dtype=torch.float8_e4m3fn, device="meta")
    with compiled_for(120) as kernels:
        product(RowCodes(codes, torch.empty(16, 300, device="meta").t()), None)
    assert "e4m3.e4m3" in kernels[0].asm["ptx"] and spilled_bytes(kernels[0]) == 0


def test_a_layer_runs_what_its_device_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the table by pairs of an expert, as it was before there were candidates; and another choice, by rows."""
    monkeypatch.setattr(dense, "runs_triton", lambda device_type: True)
    kind, options = FORMATS["nvfp4"]
    experts = make_quantised((8, 64, 32), kind, options, BFLOAT16, "cpu", bias=False)
    spec = ExpertsSpec(num_experts=16, inner_size=32, rule=RoutingRule(top_k=2))
    shape = shape_of(experts, 2, 16, BFLOAT16, rounds_rows=False)
    default = operation(NAME).default(shape, torch.device("cpu"))
    assert default == tuple((min(most * 8 // 2, MANY), f"tiles-{tiles.name}") for most, tiles in QUANTISED_TILES)
    whole = operation(NAME).default({**shape, "codes": "none"}, torch.device("cpu"))
    assert [name for _, name in whole] == [f"tiles-{tiles.name}" for _, tiles in DENSE_TILES]
    chosen: Choice = ((5, "tiles-16x64-w4-s4"), (MANY, "tiles-64x128-w8-s3"))
    product = choose_experts(experts, spec, BFLOAT16, choices=Choices({key_of(NAME, shape): chosen}))
    assert isinstance(product, ExpertsByRows)
    runs = [(most, run._tiles.name) for most, run in product._parts]  # type: ignore[attr-defined]
    assert runs == [(5, "16x64-w4-s4"), (MANY, "64x128-w8-s3")]
