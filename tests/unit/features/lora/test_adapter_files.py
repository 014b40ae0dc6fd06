"""What an engine reads of a PEFT adapter, and what it refuses by name; names of adapters among the options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError, RequestError, WeightError
from tp_engine.features.lora.options import AdapterSource, LoRARequest, adapter_names, load_for, parse_modules
from tp_engine.model_config import load_model_config
from tp_engine.model_config.lora import check_expert_adapters, read_adapter_config
from tp_engine.weights.lora import check_all_used, read_adapter

PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
PAIR = {f"{Q}.lora_A.weight": torch.ones(4, 6), f"{Q}.lora_B.weight": torch.ones(5, 4)}


def write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    safetensors.torch.save_file(PAIR if tensors is None else tensors, folder / "adapter_model.safetensors")
    return folder


def test_ranks_and_scales(tmp_path: Path) -> None:
    """Oracle: PEFT's ``get_pattern_key``, by hand: the first pattern that is a name, or its end behind a dot."""
    config = PLAIN | {"rank_pattern": {"q_proj": 2, r"layers\.1\..*": 16}, "alpha_pattern": {"self_attn.q_proj": 3}}
    spec = read_adapter_config(write(tmp_path, config))
    names = ("model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj", "model.layers.0.other_q_proj")
    assert [spec.rank_of(name) for name in names] == [2, 16, 4]
    assert [spec.scale_of(name) for name in names] == [3 / 2, 8 / 16, 8 / 4]
    assert read_adapter_config(write(tmp_path, config | {"use_rslora": True})).scale_of(names[1]) == 8 / 16**0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"use_dora": True}, "DoRA cannot be served"),
        ({"bias": "all"}, "trained biases"),
        ({"lora_bias": True}, "biases of B"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"init_lora_weights": "olora"}, "changes the base weights"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters"),
        ({"target_parameters": ["mlp.experts.down_proj", "gate.weight"]}, "such as a router's"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"fan_in_fan_out": True}, "transposed"),
        ({"r": 0}, "a rank is an integer, at least 1"),
        ({"r": None}, "a rank is an integer"),
        ({"lora_alpha": "8"}, "lora_alpha '8'; it must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan; it must be a number"),
        ({"use_foo_lora": True}, "use_foo_lora True, a field that this engine does not know"),
        ({"rank_pattern": {"(": 2}}, "is not a regular expression"),
        ({"rank_pattern": {"q_proj": "2"}}, "rank_pattern 'q_proj'"),
        ({"alpha_pattern": ["q_proj"]}, "it must be an object"),
    ],
)
def test_configurations_that_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """Oracle: the name of the field, or what it stands for."""
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        read_adapter_config(write(tmp_path, PLAIN | change))


def test_every_field_of_peft_is_known(tmp_path: Path) -> None:
    """Oracle: what PEFT itself writes, with its defaults and with fields of the training."""
    from peft import LoraConfig

    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    config.save_pretrained(str(tmp_path))
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert read_adapter_config(write(tmp_path, written | {"unsloth_fixed": True, "use_new_thing": False})).r == 4
    assert {spec.name for spec in dataclasses.fields(LoraConfig)} <= written.keys() | {"runtime_config"}


@pytest.mark.parametrize("value", [True, False, "gaussian", "orthogonal", "eva"])
def test_initialisations_that_leave_the_base_alone(tmp_path: Path, value: object) -> None:
    """Oracle: PEFT, which changes only A and B for these."""
    assert read_adapter_config(write(tmp_path, PLAIN | {"init_lora_weights": value})).r == 4


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({**PAIR, f"{Q}.lora_magnitude_vector": torch.ones(5)}, "DoRA cannot be served"),
        ({**PAIR, "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)}, "of an embedding"),
        ({**PAIR, f"{Q}.lora_B.bias": torch.ones(5)}, "biases of B"),
        ({**PAIR, "base_model.model.lm_head.base_layer.weight": torch.ones(2, 2)}, "of embeddings and output heads"),
        ({**PAIR, "model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 6)}, "names are base_model.model.MODULE"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 6)}, "lacks lora_B of"),
        ({**PAIR, f"{Q}.lora_A.weight": torch.ones(3, 6)}, "have the ranks 3 and 4, not 4"),
        ({**PAIR, f"{Q}.lora_A.weight": torch.ones(4, 6, dtype=torch.int32)}, "not a matrix"),
        ({}, "holds no tensor"),
    ],
)
def test_tensors_that_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    """Oracle: the tensor's name, or what it stands for; none is left out in silence."""
    with pytest.raises(WeightError, match=message):
        read_adapter(write(tmp_path, PLAIN, tensors), 8)


def test_stacks_of_experts(tmp_path: Path) -> None:
    """Oracle: PEFT's layout by hand: (experts * r, in) and (out, r * experts); the file does not name the parameter, so
    patterns that tell a stack from the other cannot be followed; other modules have no stacks."""
    config = PLAIN | {"target_parameters": ["mlp.experts.gate_up_proj", "down_proj"]}
    down = "base_model.model.model.layers.0.mlp.experts"
    stacks = {
        f"{name}.lora_{side}.weight": torch.ones(shape)
        for name, a, b in ((down, (12, 5), (6, 12)), (f"{down}.base_layer", (12, 6), (10, 12)))
        for side, shape in (("A", a), ("B", b))
    }
    found = read_adapter(write(tmp_path, config, stacks), 4)
    assert {name: (pair.rank, pair.scale) for name, pair in found.items()} == {
        "model.layers.0.mlp.experts": (4, 2),
        "model.layers.0.mlp.experts.base_layer": (4, 2),
    }
    with pytest.raises(ConfigError, match="have other ranks or scales"):
        read_adapter(write(tmp_path, config | {"alpha_pattern": {"experts.down_proj": 1}}, stacks), 4)
    with pytest.raises(WeightError, match="the ranks 12 and 12, not 8"):
        read_adapter(write(tmp_path, config | {"r": 8}, stacks), 8)
    linear = {name.replace("experts", "gate"): values for name, values in stacks.items()}
    with pytest.raises(WeightError, match="the ranks 12 and 12, not 4"):
        read_adapter(write(tmp_path, config, linear), 4)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen3", {}, "this Qwen3ForCausalLM has none"),
        ("gpt-oss", {}, "biases or transposed stacks"),
        ("qwen3-moe", {"quantization": "int8"}, "only unquantised experts"),
        ("qwen3-moe", {"device": "cuda"}, "they have no kernel for GPUs"),
        ("qwen3-moe", {"enable_lora": False}, "enable_lora is off"),
    ],
)
def test_experts_that_can_not_be_adapted(
    checkpoint: Callable[..., Path], family: str, changes: dict[str, Any], message: str
) -> None:
    """Oracle: the reason, before a device is touched."""
    folder = checkpoint(family)
    with pytest.raises(ConfigError, match=message):
        options = {"device": "cpu", "enable_lora": True, "lora_experts": True, **changes}
        config = EngineConfig(model=str(folder), **options)
        check_expert_adapters(load_model_config(str(folder))[0], config)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    """Oracle: errors that name the file; a torn file, a rank above the limit, modules that no layer has."""
    with pytest.raises(ConfigError, match="give the folder of a PEFT adapter"):
        read_adapter(tmp_path / "nowhere", 8)
    folder = write(tmp_path, PLAIN)
    assert list(read_adapter(folder, 4)) == ["model.layers.0.self_attn.q_proj"]
    with pytest.raises(ConfigError, match="rank 4, above max_lora_rank 3: raise max_lora_rank"):
        read_adapter(folder, 3)
    with pytest.raises(WeightError, match=r"adapts a\.b, which the model lacks"):
        check_all_used(folder, ["a.b", "c"], ["c"])
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5])
    with pytest.raises(WeightError, match="is not a whole safetensors file"):
        read_adapter(folder, 8)
    weights.unlink()
    with pytest.raises(ConfigError, match="safe_serialization=True"):
        read_adapter(folder, 8)
    (folder / "adapter_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not JSON"):
        read_adapter_config(folder)


def test_names_of_adapters() -> None:
    """Oracle: vLLM's two forms; errors that name the value."""
    both = parse_modules(["a=some/folder=1", '{"name": "b", "path": "other", "base_model_name": "x"}'])
    assert both == (AdapterSource(name="a", path="some/folder=1"), AdapterSource(name="b", path="other"))
    for wrong, message in (
        (["a"], "write NAME=PATH"),
        (["=x"], "the name of an adapter is ''"),
        (["a="], "the path of an adapter is ''"),
        (['{"name": 1, "path": "x"}'], "the name of an adapter is 1"),
        (['{"name": "a", "folder": "x"}'], "has 'folder'"),
        (["{"], "is not JSON"),
        (["a=x", "a=y"], "names 'a' twice"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_modules(wrong)
    with pytest.raises(ConfigError, match="'b', which names the model itself"):
        adapter_names(parse_modules(["a=x", "b=y"]), ["b"])
    with pytest.raises(ConfigError, match="enable_lora is off"):
        EngineConfig(**dict[str, Any](lora_modules=("a=x",)))


def test_what_a_call_loads() -> None:
    """Oracle: by hand: what is loaded already is not loaded again, another folder is, a name alone must be known."""
    loaded = {"a": "x"}
    assert load_for(LoRARequest("a", 1, "x"), loaded) is load_for(LoRARequest("a"), loaded) is None
    assert load_for(LoRARequest("a", 1, "y"), loaded) == {"name": "a", "path": "y", "replaces": True}
    with pytest.raises(RequestError, match="no adapter is loaded under the name 'b'; give a lora_path"):
        load_for(LoRARequest("b"), loaded)
