"""Dense layers that round their inputs in blocks, as checkpoints declare it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.quantised.checkpoints import compress
from tests.quantised.fake_rows import fake_rows, scale_experts
from tests.quantised.formats import INPUT_SCALE
from tests.unit.layers import test_quantised_formats
from tests.unit.layers.test_quantised_formats import EXPERTS, SHAPE, load
from tp_engine.errors import WeightError
from tp_engine.kernels.layer_ops import gate
from tp_engine.kernels.quantization.weights import dequantise
from tp_engine.layers.experts import Experts
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.quantization import quantised
from tp_engine.layers.quantization.quantised import Quantised
from tp_engine.layers.quantization.quantised_products import choose_quantised_product
from tp_engine.model_config import load_model_config, with_rounded_inputs
from tp_engine.model_config.mlp import SILU
from tp_engine.models.language_model import LanguageModel
from tp_engine.models.mla_attention import LatentUp

KINDS = {
    "nvfp4-pack-quantized": "nvfp4", "nvfp4-modelopt": "nvfp4", "quark-mxfp4": "mxfp4", "mxfp8": "mxfp8",
    "mxfp8-quantized": "mxfp8",
}  # fmt: skip


EXPERTS_IN_GROUPS = EXPERTS | {"moe_intermediate_size": 128}


def load_rounding(folder: Path, rank: int, world_size: int, **options: Any) -> LanguageModel:
    """``load``, with the option."""

    def rounding(*arguments: Any) -> Any:
        spec, path = load_model_config(*arguments)
        return with_rounded_inputs(spec), path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_quantised_formats, "load_model_config", rounding)
        return load(folder, rank, world_size, **options)


@pytest.mark.parametrize("name", KINDS)
def test_products_round_their_rows(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: compressed-tensors' rows times the weight; on 2 ranks, too, where shards cut no group.  NVFP4's scale of
    all inputs comes from the checkpoint."""
    compress(checkpoint("qwen3", **SHAPE), tmp_path / "target", tmp_path / "twin", name)
    kind = KINDS[name]
    scale = INPUT_SCALE if kind == "nvfp4" else None
    for rank, world_size in ((0, 1), (1, 2)):
        model = load_rounding(tmp_path / "target", rank, world_size)
        for module in ("layers.0.self_attn.o_proj", "layers.1.mlp.down_proj"):
            layer = model.get_submodule(module)
            assert isinstance(layer, LocalLinear) and isinstance(layer.format, Quantised)
            weight = layer.format.weight(dict(layer.named_parameters(recurse=False)), layer.shape)
            values, x = dequantise(weight), torch.randn(3, weight.shape[1])
            rounded = fake_rows(x, kind, scale)
            layer.finish_loading()
            found = layer.product(x, None)
            torch.testing.assert_close(found, F.linear(rounded, values), rtol=1e-5, atol=1e-5)
            assert (found - F.linear(x, values)).abs().max() > 1e-3, "the rows are rounded"


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_routed_experts_round_by_their_own_scales(
    name: str, splits: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: compressed-tensors' rows before gate and up, and before down, expert by expert; of gate and up the larger
    scale holds.  On 2 ranks experts are split, where groups of 16 and 32 stay whole, or there are some of them."""
    compress(checkpoint("qwen3-moe", **(SHAPE | EXPERTS_IN_GROUPS)), tmp_path / "target", tmp_path / "twin", name)
    scales = scale_experts(tmp_path / "target")
    for rank, world_size in ((0, 1), (1, 2)):
        model = load_rounding(tmp_path / "target", rank, world_size, enable_expert_parallel=not splits)
        experts = [one for one in model.modules() if isinstance(one, Experts)][1]
        assert isinstance(experts.format, Quantised)
        own = experts.format.experts(dict(experts.named_parameters(recurse=False)), experts.shape)
        gate_up, down = dequantise(own.gate_up), dequantise(own.down)
        x, ids = (
            torch.randn(7, gate_up.shape[2]),
            torch.tensor([[0, 2], [2, 1], [1, 0], [0, 1], [1, 2], [2, 0], [0, 1]]),
        )
        weights = torch.rand(7, 2)
        expected, whole = torch.zeros_like(x), torch.zeros_like(x)
        for expert in range(own.first, own.first + len(down)):
            of_x, of_inner = scales.get(expert, (None, None))
            share = (weights * (ids == expert)).sum(1, keepdim=True)
            values = gate_up[expert - own.first], down[expert - own.first]
            inner = gate(F.linear(fake_rows(x, KINDS[name], of_x), values[0]), SILU)
            expected += share * F.linear(fake_rows(inner, KINDS[name], of_inner), values[1])
            whole += share * F.linear(gate(F.linear(x, values[0]), SILU), values[1])
        experts.finish_loading()
        assert experts._product is not None
        found = experts._product(x, ids.int(), weights)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * whole.abs().max().item())
        assert (found - whole).norm() > 0.01 * whole.norm(), "rows are rounded"


def test_parts_of_a_product_must_agree(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: queries whose inputs are whole beside keys whose inputs are rounded are refused with the option alone."""
    compress(checkpoint("qwen3", **SHAPE), tmp_path / "target", tmp_path / "twin", "nvfp4-modelopt")
    spec = load_model_config(str(tmp_path / "target"))[0]
    assert spec.quantization is not None
    (pattern, scheme), names = spec.quantization.rules[-1], ("layers.0.q", "layers.0.k")
    assert scheme is not None
    mixed = replace(spec.quantization, rules=(("layers.0.q", replace(scheme, input_blocks=None)), (pattern, scheme)))
    assert mixed.scheme_of_parts([[name] for name in names]) == replace(scheme, input_blocks=None)
    with pytest.raises(ValueError, match="parts of one product"):
        mixed.with_rounded_inputs().scheme_of_parts([[name] for name in names])


def test_maps_of_latents_are_no_product_of_codes(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: a static scale of inputs brings a 1 between two 8-bit floats, so GPUs multiply its row as it is; other
    products of the layer round theirs."""
    compress(checkpoint("deepseek-v2"), tmp_path / "target", tmp_path / "twin", "modelopt-fp8")
    model, asked = load(tmp_path / "target", 0, 1), {}
    for name in ("kv_b_proj", "o_proj"):
        layer = model.get_submodule(f"layers.0.self_attn.{name}")
        assert isinstance(layer, LocalLinear)
        with patch.object(quantised, "choose_quantised_product", wraps=choose_quantised_product) as choose:
            layer.finish_loading()
        given = choose.call_args.kwargs
        asked[name] = (given["input_scale"] is not None, given["quantises_activations"])
    assert asked == {"kv_b_proj": (False, False), "o_proj": (True, True)}


@pytest.mark.parametrize("name", ["nvfp4-modelopt", "mxfp8"])
def test_maps_of_latents_are_whole(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the maps without the option: they are read by rows with a single 1, which nothing may round."""
    compress(checkpoint("deepseek-v2"), tmp_path / "target", tmp_path / "twin", name)
    found = []
    for each in (load, load_rounding):
        maps = each(tmp_path / "target", 0, 1).get_submodule("layers.0.self_attn.kv_b_proj")
        assert isinstance(maps, LatentUp) and "input_scale" not in dict(maps.named_parameters())
        maps.finish_loading()
        found.append(maps.up)
    assert torch.equal(*found) and found[0].std() > 0


@pytest.mark.parametrize("value", [0.0, -1.0, torch.inf, torch.nan])
@pytest.mark.parametrize(
    ("name", "suffix"), [("nvfp4-modelopt", "input_scale"), ("nvfp4-pack-quantized", "input_global_scale")]
)
@pytest.mark.parametrize("module", ["layers.1.mlp", "layers.2.mlp.experts.2"])
def test_a_scale_that_rows_cannot_be_divided_by_is_refused(
    module: str, name: str, suffix: str, value: float, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the tensor is named; with 0 all rows would become 0 in silence."""
    compress(checkpoint("qwen3-moe", **(SHAPE | EXPERTS)), tmp_path / "target", tmp_path / "twin", name)
    (file,) = (tmp_path / "target").glob("*.safetensors")
    tensors = load_file(file)
    damaged = f"model.{module}.down_proj.{suffix}"
    tensors[damaged].fill_(value)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=f"{re.escape(damaged)} is .* must be above 0 and finite"):
        load_rounding(tmp_path / "target", 0, 1)
