"""Checkpoints in 4 bits, which benchmarks write for peers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quantised.numbers import Numbers
from tests.quantised.packing import pack_awq, pack_gptq
from tp_engine.apps.bench.int4_checkpoint import pack_layer, quantization_config, round_to_codes, write_int4_checkpoint
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quant_methods import read_quantization

MLP = "model.layers.0.mlp"


@pytest.mark.parametrize("packing", ["awq", "gptq"])
def test_a_checkpoint_in_four_bits(tmp_path: Path, packing: str) -> None:
    """Oracle: the tests' own packers, written apart from these, and the reader of config.json; values are at most a
    step from their code's; a layer whose inputs the group does not divide stays."""
    weight, symmetric = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)), packing == "gptq"
    codes, zeros, scales = round_to_codes(weight, 16, symmetric=symmetric)
    steps = scales.float().repeat_interleave(16, 0)
    assert (((codes - zeros.repeat_interleave(16, 0)) * steps - weight.T).abs() <= 1.01 * steps).all()
    numbers = Numbers(kind="int", codes=codes.T, scales=scales.T, block=(1, 16), bits=4, zeros=zeros.T)
    expected = pack_gptq(numbers, version=1) if symmetric else pack_awq(numbers)
    found = pack_layer(weight, packing, 16)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    (tmp_path / "source").mkdir()
    weights = {"model.norm.weight": torch.ones(32), f"{MLP}.up_proj.weight": weight}
    weights[f"{MLP}.down_proj.weight"] = torch.randn(32, 24)
    save_file(weights, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text('{"hidden_size": 32}')
    target = write_int4_checkpoint(tmp_path / "source", tmp_path / "target", packing, group=16)
    stored = {name: value for name, value in load_file(target / "model.safetensors").items() if ".up_proj" not in name}
    assert stored.keys() == {"model.norm.weight", f"{MLP}.down_proj.weight"}
    config = json.loads((target / "config.json").read_text())
    assert config["quantization_config"] == quantization_config(packing, 16, ["down_proj"])
    spec = read_quantization(ConfigJson(config))
    assert spec is not None
    up, down = spec.scheme_of(f"{MLP}.up_proj"), spec.scheme_of(f"{MLP}.down_proj")
    assert down is None and up is not None and (up.packing, up.group) == (packing, 16)
