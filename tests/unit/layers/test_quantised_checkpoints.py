"""Quantised checkpoints and their twins as whole folders: names, what stays as it is, configurations."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quantised.checkpoints import SAME_NUMBERS, compress, compress_alike
from tests.quantised.formats import FORMATS
from tests.quantised.packing import Tensors

FUSED = [name for name, how in FORMATS.items() if how.fused]
OTHERS = [name for name, how in FORMATS.items() if not how.fused]


def tensors_of(folder: Path) -> Tensors:
    """All tensors of a checkpoint of one file."""
    from safetensors.torch import load_file

    found: Tensors = load_file(folder / "model.safetensors")
    return found


def config_of(folder: Path) -> dict[str, Any]:
    """Its config.json."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("name", OTHERS)
def test_all_linear_modules_of_layers_are_quantised(
    name: str, architecture: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the source; a twin differs from it in each quantised weight, and nothing else is touched."""
    source = checkpoint(architecture, **({"moe_intermediate_size": 96} if architecture == "qwen3-moe" else {}))
    group = 32 if FORMATS[name].group == 128 else None
    compress(source, tmp_path / "own", tmp_path / "twin", name, group=group)
    before, own, twin = tensors_of(source), tensors_of(tmp_path / "own"), tensors_of(tmp_path / "twin")
    changed = {key for key in before if not torch.equal(before[key], twin[key])}
    assert before.keys() == twin.keys() and all(one.dtype == torch.float32 for one in twin.values())
    assert changed == {key for key in before if key.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight"))}
    assert all(torch.equal(own[key], before[key]) for key in before.keys() - changed)
    assert all(key.rpartition(".")[0] + ".weight" in changed for key in own.keys() - before.keys())
    assert not [key for key in changed if key in own and own[key].dtype == torch.float32]
    assert config_of(tmp_path / "twin") == config_of(source)
    config = config_of(tmp_path / "own")
    assert config.pop("quantization_config") and config == config_of(source)


@pytest.mark.parametrize("with_patterns", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_a_kept_layer_is_float_and_named(
    name: str, with_patterns: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the source; the configuration speaks of layer 1."""
    source, group = checkpoint("qwen3"), 32 if FORMATS[name].group == 128 else None
    paths = tmp_path / "own", tmp_path / "twin"
    compress(source, *paths, name, group=group, kept_layers=[1], with_patterns=with_patterns)
    before, own = tensors_of(source), tensors_of(paths[0])
    inside = {key for key in before if key.startswith("model.layers.1.")}
    assert {key for key in own if key.startswith("model.layers.1.")} == inside
    assert all(torch.equal(own[key], before[key]) for key in inside)
    text = json.dumps(config_of(paths[0])["quantization_config"]).replace("\\", "")
    assert "layers.1" in text and "layers.0" not in text
    assert with_patterns is False or "compressed-tensors" not in text or "re:model.layers.1..*" in text


def test_gpt_oss_has_quantised_experts_only(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the names and shapes of the released checkpoints, by the tiny model's sizes."""
    source = checkpoint("gpt-oss", intermediate_size=96)
    compress(source, tmp_path / "own", tmp_path / "twin", FUSED[0])
    before, own = tensors_of(source), tensors_of(tmp_path / "own")
    experts = "model.layers.0.mlp.experts."
    assert {key.removeprefix(experts): tuple(own[key].shape) for key in own if key.startswith(experts)} == {
        "gate_up_proj_blocks": (6, 192, 2, 16),
        "gate_up_proj_scales": (6, 192, 2),
        "gate_up_proj_bias": (6, 192),
        "down_proj_blocks": (6, 64, 3, 16),
        "down_proj_scales": (6, 64, 3),
        "down_proj_bias": (6, 64),
    }
    assert {key for key in own if ".experts." not in key} == {key for key in before if ".experts." not in key}


@pytest.mark.parametrize("moves_experts", [False, True])
def test_stacked_experts_become_modules(moves_experts: bool, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the names that llm-compressor and ModelOpt write for Gemma 4; the twin has the source's tensors."""
    source = checkpoint("gemma4-experts", moe_intermediate_size=96)
    paths = tmp_path / "own", tmp_path / "twin"
    compress(source, *paths, "pack-quantized", group=32, moves_experts=moves_experts)
    before, own, twin = tensors_of(source), tensors_of(paths[0]), tensors_of(paths[1])
    layer, last = "model.language_model.layers.0.", ("weight_packed", "weight_scale", "weight_shape")
    path = f"{layer}{'moe.' if moves_experts else ''}experts."
    assert {name for name in own if name.startswith(path)} == {
        f"{path}{number}.{part}.{suffix}"
        for number in range(5) for part in ("gate_proj", "up_proj", "down_proj") for suffix in last
    }  # fmt: skip
    gate = own[f"{path}2.gate_proj.weight_shape"]
    assert gate.tolist() == [96, 64] and before[f"{layer}experts.gate_up_proj"].shape == (5, 192, 64)
    changed = {name for name in before if not torch.equal(before[name], twin[name])}
    assert before.keys() == twin.keys() and f"{layer}experts.gate_up_proj" in changed
    kept = {name for name in before if "router" in name or "vision" in name}
    assert kept and not kept & changed and kept <= own.keys()
    ignored = config_of(paths[0])["quantization_config"]["ignore"]
    assert f"{layer}router.proj" in ignored and not [name for name in ignored if "experts" in name]


def test_the_same_numbers_in_four_packings(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: one another; the scales are the same bits, in rows or in columns."""
    targets = {name: tmp_path / name for name in SAME_NUMBERS}
    compress_alike(checkpoint("llama"), targets, tmp_path / "twin")
    found = {name: tensors_of(target) for name, target in targets.items()}
    module = "model.layers.1.mlp.down_proj"
    scales = found["pack-quantized-asym"][f"{module}.weight_scale"]
    assert scales.shape == (64, 3) and scales.dtype == torch.float16
    for name in SAME_NUMBERS[1:]:
        assert torch.equal(found[name][f"{module}.scales"].T, scales)
    first, second = found["gptq-asym"], found["gptq-v2-asym"]
    assert torch.equal(first[f"{module}.qweight"], second[f"{module}.qweight"])
    ones = torch.tensor(0x11111111, dtype=torch.int32)  # the sum of int32 wraps
    assert torch.equal(first[f"{module}.qzeros"] + ones, second[f"{module}.qzeros"])


# Quark's class wants Quark, and compressed-tensors has dropped the actorder group.
@pytest.mark.parametrize(
    "name", [name for name in FORMATS if not re.search("modelopt|quark|pack-quantized-ordered", name)]
)
def test_transformers_knows_the_configuration(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: transformers' classes of ``quantization_config``; each keeps the numbers that it knows."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    source = checkpoint("gpt-oss", intermediate_size=96) if name in FUSED else checkpoint("llama")
    compress(source, tmp_path / "own", tmp_path / "twin", name, group=32 if FORMATS[name].group == 128 else None)
    written = config_of(tmp_path / "own")["quantization_config"]
    read = AutoQuantizationConfig.from_dict(written)
    assert read.quant_method == written["quant_method"]
    for key in ("bits", "group_size", "desc_act", "sym", "zero_point", "activation_scheme"):
        assert getattr(read, key, written.get(key)) == written.get(key, getattr(read, key, None)), key


def test_modelopt_says_the_same_in_two_files(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: hf_quant_config.json and config.json speak of the same modules and the same algorithm."""
    for name, algorithm in {"modelopt-fp8-kv": "FP8", "nvfp4-modelopt": "NVFP4"}.items():
        compress(checkpoint("llama"), tmp_path / "own", tmp_path / "twin", name)
        other = json.loads((tmp_path / "own" / "hf_quant_config.json").read_text(encoding="utf-8"))["quantization"]
        config = config_of(tmp_path / "own")["quantization_config"]
        assert other["quant_algo"] == config["quant_algo"] == algorithm
        assert other["exclude_modules"] == config["ignore"] == ["lm_head"]
        has_cache = any(key.endswith("k_proj.k_scale") for key in tensors_of(tmp_path / "own"))
        assert has_cache == (other["kv_cache_quant_algo"] == "FP8") == ("kv_cache_scheme" in config)


def test_refusals(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the rules of the packers."""
    paths = tmp_path / "own", tmp_path / "twin"
    with pytest.raises(ValueError, match="96 columns are no multiple of the group 128"):
        compress(checkpoint("llama"), *paths, "awq")
    with pytest.raises(ValueError, match="fp8-channel has no groups"):
        compress(checkpoint("llama"), *paths, "fp8-channel", group=32)
    with pytest.raises(ValueError, match="gptq cannot hold"):
        compress_alike(checkpoint("llama"), {"gptq": paths[0]}, paths[1])
