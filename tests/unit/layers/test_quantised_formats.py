"""Quantised checkpoints as the layers keep them, beside the float checkpoint that stands for the same numbers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.quantised.checkpoints import SAME_NUMBERS, compress, compress_alike, compress_mixed
from tests.quantised.formats import FORMATS, INPUT_SCALE
from tests.tiers import slow_but
from tests.unit.models.test_shard import Somewhere
from tp_engine.apps.check.stored import StoredWeights
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.cpu.library import native_library
from tp_engine.cpu.quantised import QuantisedPanels
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.quantization.weights import QuantisedWeight, dequantise
from tp_engine.layers.experts import Experts
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.quantization import quantised
from tp_engine.layers.quantization.base import Product
from tp_engine.layers.quantization.quantised import Quantised
from tp_engine.layers.quantization.quantised_products import choose_quantised_product
from tp_engine.model_config import load_model_config
from tp_engine.model_config.recurrent import GatedDeltaNetSpec
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.models.causal_lm import build_model
from tp_engine.models.language_model import LanguageModel
from tp_engine.weights.loader import load_weights

# 192 inner elements: with blocks of 128, a shard of 96 or 48 cuts one.
SHAPE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "num_heads": 8, "num_kv_heads": 2}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 96, "num_experts": 3, "num_experts_per_tok": 2}
GROUPED = sorted(name for name, how in FORMATS.items() if how.group is not None and not how.ordered)


def load(folder: Path, rank: int, world_size: int, *, load_format: str = "auto", **options: Any) -> LanguageModel:
    """One rank's model, loaded but not finished; every parameter was NaN or 85 before."""
    spec, path = load_model_config(str(folder))
    model = build_model(
        spec,
        communicator=Somewhere(rank, world_size),  # type: ignore[arg-type]
        dtype=torch.float32,
        device=torch.device("cpu"),
        backends=[TorchBackend()] * len(spec.kv_layout.groups),
        max_model_len=16,
        **options,
    )
    for parameter in model.parameters():
        parameter.fill_(torch.nan if parameter.is_floating_point() else 85)
    info = RankInfo(rank=rank, world_size=world_size)
    load_weights(dict(model.named_parameters()), spec, path, info=info, load_format=load_format)
    return model


def weights(model: LanguageModel) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """Each linear weight's values in float32 by its name, and whether it is quantised."""
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False)) if isinstance(module, LocalLinear | Experts) else {}
        own.pop("bias", None)
        if isinstance(module, LocalLinear) and own:
            kept = module.format
            if isinstance(kept, Quantised):
                yield name, dequantise(kept.weight(own, module.shape)), True
            else:
                yield name, own["weight"], False
        elif isinstance(module, Experts):
            yield from experts(name, module, own)


def experts(name: str, module: Experts, own: dict[str, nn.Parameter]) -> Iterator[tuple[str, torch.Tensor, bool]]:
    kept = module.format
    if isinstance(kept, Quantised):
        found = kept.experts(own, module.shape)
        yield f"{name}.gate_up", dequantise(found.gate_up), True
        yield f"{name}.down", dequantise(found.down), True
    else:
        yield f"{name}.gate_up", own["gate_up"], False
        yield f"{name}.down", own["down"], False


def assert_equal_twin(target: Path, twin: Path, world_size: int, *, least: int, **options: Any) -> None:
    """At least ``least`` weights are quantised, and all equal the twin's, but for the last bit of a float32."""
    for rank in range(world_size):
        found, expected = load(target, rank, world_size, **options), load(twin, rank, world_size, **options)
        num_quantised = 0
        for (name, values, is_quantised), (other, wanted, _) in zip(weights(found), weights(expected), strict=True):
            assert name == other
            num_quantised += is_quantised
            torch.testing.assert_close(values, wanted.data, rtol=3e-7, atol=0, msg=name)
        assert num_quantised >= least


@pytest.mark.parametrize("world_size", slow_but([2], [1, 2, 4, 8]))
@pytest.mark.parametrize("name", sorted(name for name, how in FORMATS.items() if not how.fused and not how.ordered))
def test_dense_shards(name: str, world_size: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the same rank's weights of the twin.  Blocks and groups are cut by most shards."""
    folder = checkpoint("llama" if world_size < 8 else "qwen3", **SHAPE)
    group: dict[str, Any] = {"group": 32} if FORMATS[name].group == 128 and "fp8" not in name else {}
    compress(folder, tmp_path / "target", tmp_path / "twin", name, **group)
    assert_equal_twin(tmp_path / "target", tmp_path / "twin", world_size, least=8)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("world_size", slow_but([2], [1, 2, 4]))
@pytest.mark.parametrize(
    "name", ["fp8-block", "fp8-tensor-static", "pack-quantized-asym", "awq", "gptq", "nvfp4-modelopt"]
)
def test_shards_of_experts(
    name: str, world_size: int, splits: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the same rank's weights of the twin, whose experts are split or whole."""
    folder = checkpoint("qwen3-moe", **(SHAPE | EXPERTS))
    group: dict[str, Any] = {"group": 32} if FORMATS[name].group == 128 and "fp8" not in name else {}
    compress(folder, tmp_path / "target", tmp_path / "twin", name, **group)
    assert_equal_twin(tmp_path / "target", tmp_path / "twin", world_size, least=6, enable_expert_parallel=not splits)


@pytest.mark.parametrize("architecture", ["llama", "qwen3-moe"])
def test_scales_that_are_powers_of_two(architecture: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the same scales in float32.  With the ``scale_fmt`` ue8m0 transformers stores them in eight bits."""
    folder = checkpoint(architecture, **SHAPE, **(EXPERTS if architecture == "qwen3-moe" else {}))
    compress(folder, tmp_path / "powers", tmp_path / "twin", "fp8-block")
    stored = load_file(tmp_path / "powers" / "model.safetensors")
    scales = {name: value.to(torch.float8_e8m0fnu) for name, value in stored.items() if name.endswith("scale_inv")}
    shutil.copytree(tmp_path / "powers", tmp_path / "floats")
    save_file(stored | scales, tmp_path / "powers" / "model.safetensors")
    save_file(stored | {name: value.float() for name, value in scales.items()}, tmp_path / "floats/model.safetensors")
    models = (load(tmp_path / name, 0, 2) for name in ("powers", "floats"))
    pairs = list(zip(*map(weights, models), strict=True))
    assert scales and all(found[0] == other[0] and torch.equal(found[1], other[1]) for found, other in pairs)


@pytest.mark.parametrize("tail", [(), (1,)])
def test_scales_of_stacked_experts(tail: tuple[int, ...], checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the twin.  transformers stacks experts in FP8, with a scale for each gate, up and down (3 experts)."""
    folder = checkpoint("mistral4", n_routed_experts=3, num_experts_per_tok=2, num_layers=1, n_group=1, topk_group=1,
                        first_k_dense_replace=0)  # fmt: skip
    compress(folder, tmp_path / "target", tmp_path / "twin", "fp8-tensor-transformers")
    path = tmp_path / "target" / "model.safetensors"
    stored = load_file(path)
    base = "model.layers.0.mlp.experts"
    of_each = {
        (name, suffix): [stored.pop(f"{base}.{number}.{name}.{suffix}") for number in range(3)]
        for name in ("gate_proj", "up_proj", "down_proj")
        for suffix in ("weight", "weight_scale_inv", "activation_scale")
    }
    pairs = zip(of_each["gate_proj", "weight"], of_each["up_proj", "weight"], strict=True)
    scales = [torch.stack(of_each[name, "weight_scale_inv"]) for name in ("gate_proj", "up_proj", "down_proj")]
    stored[f"{base}.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
    stored[f"{base}.gate_up_proj_scale_inv"] = torch.stack(scales[:2], 1).reshape(3, 2, *tail)
    stored[f"{base}.gate_up_proj_activation_scale"] = torch.ones(3)
    stored[f"{base}.down_proj"] = torch.stack(of_each["down_proj", "weight"])
    stored[f"{base}.down_proj_scale_inv"] = scales[2].reshape(3, *tail, *tail)
    save_file(stored, path)
    for world_size in (1, 2):
        assert_equal_twin(tmp_path / "target", tmp_path / "twin", world_size, least=6)
    with StoredWeights(tmp_path / "target") as ours, StoredWeights(tmp_path / "twin") as twin:
        assert sorted(ours.names) == sorted(twin.names)
        for name in twin.names:
            assert torch.equal(ours.read(name), twin.read(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3-next", "qwen3.5", "qwen3.5-moe-vision", "lfm2"])
@pytest.mark.parametrize("name", ["fp8-block", "pack-quantized-asym", "awq"])
def test_shards_of_hybrids(name: str, architecture: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the same rank's weights of the twin.  Rows of q, k, v and z lie in turns in one module of Qwen3-Next, and
    queries and their gates in q_proj of all; few of them end where blocks do."""
    inner = (
        {}
        if architecture in ("qwen3.5", "lfm2")
        else {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96}
    )
    compress(checkpoint(architecture, **inner), tmp_path / "target", tmp_path / "twin", name, group=32)
    for world_size in (1, 2, 8):
        assert_equal_twin(tmp_path / "target", tmp_path / "twin", world_size, least=10)


@pytest.mark.slow
@pytest.mark.parametrize("is_joint", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3.5", "qwen3.5-moe-vision", "phi3"])
def test_shards_of_mixed_precision(
    architecture: str, is_joint: bool, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the same rank's weights of the twin, with the output head; a scale for each of q, k and v in one module
    of the delta rule is that of its rows."""
    inner = SHAPE if architecture == "phi3" else {"intermediate_size": 128}
    moe = {"moe_intermediate_size": 96, "shared_expert_intermediate_size": 96} if "moe" in architecture else {}
    folder = checkpoint(architecture, tie=False, vocab_size=208, **inner, **moe)
    one = load_model_config(str(folder))[0].layers[0].attention
    if isinstance(one, GatedDeltaNetSpec):
        joint_rows = [one.num_key_heads * one.key_dim] * 2 + [one.num_value_heads * one.value_dim]
    else:
        assert isinstance(one, AttentionSpec)
        joint_rows = [heads * one.head_dim for heads in (one.num_heads, one.num_kv_heads, one.num_kv_heads)]
    compress_mixed(folder, tmp_path / "target", tmp_path / "twin", joint_rows=joint_rows if is_joint else ())
    for world_size in (1, 2, 8):
        assert_equal_twin(tmp_path / "target", tmp_path / "twin", world_size, least=7)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_shards_of_gpt_oss(world_size: int, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the twin, whose experts are cut in the same blocks; 3 blocks on 2 ranks are 1 and 2."""
    folder = checkpoint("gpt-oss", hidden_size=64, intermediate_size=160, num_heads=8, num_kv_heads=2)
    compress(folder, tmp_path / "target", tmp_path / "twin", "mxfp4")
    for rank in range(world_size):
        shape = next(
            one.shape for one in load(tmp_path / "target", rank, world_size).modules() if isinstance(one, Experts)
        )
        assert shape.inner.start % 32 == shape.inner.size % 32 == 0
    if world_size == 1:
        assert_equal_twin(tmp_path / "target", tmp_path / "twin", 1, least=4)


def test_three_packings_of_the_same_numbers(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: each other: codes, scales and zero points are equal bit by bit, on both of 2 ranks."""
    folder = checkpoint("qwen3", **SHAPE)
    compress_alike(folder, {name: tmp_path / name for name in SAME_NUMBERS}, tmp_path / "twin", group=64)
    for rank in range(2):
        first, *others = (
            {name: one for name, one in load(tmp_path / name, rank, 2).named_parameters() if "proj" in name}
            for name in SAME_NUMBERS
        )
        for other in others:
            assert first.keys() == other.keys()
            for key, values in first.items():
                assert torch.equal(values, other[key]), key


@pytest.mark.parametrize("name", ["fp8-block", "awq", "gptq-8", "nvfp4-modelopt", "w8a8-int8"])
def test_dummy_weights(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: finite values of a model's usual width, the same parts for 2 ranks as for 1."""
    folder = checkpoint("qwen3", **SHAPE)
    group: dict[str, Any] = {"group": 32} if FORMATS[name].group == 128 and "fp8" not in name else {}
    compress(folder, tmp_path / "target", tmp_path / "twin", name, **group)
    whole = {key: values for key, values, _ in weights(load(tmp_path / "target", 0, 1, load_format="dummy"))}
    halves = [
        {key: values for key, values, _ in weights(load(tmp_path / "target", rank, 2, load_format="dummy"))}
        for rank in range(2)
    ]
    for key, values in whole.items():
        assert values.isfinite().all() and 0.005 < values.std() < 0.1, (key, values.std())
        if key.endswith("down_proj"):
            assert torch.equal(torch.cat([half[key] for half in halves], 1), values)


def test_integer_products_equal_an_emulation(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: each row rounded to 8 bits by its largest value, times the codes, in float64."""
    folder = checkpoint("qwen3", **SHAPE)
    compress(folder, tmp_path / "target", tmp_path / "twin", "w8a8-int8")
    layer = load(tmp_path / "target", 0, 1).get_submodule("layers.0.self_attn.o_proj")
    assert isinstance(layer, LocalLinear) and isinstance(layer.format, Quantised)
    own = dict(layer.named_parameters(recurse=False))
    values = dequantise(layer.format.weight(own, layer.shape)).double()
    x = torch.randn(5, values.shape[1])
    scale = x.abs().amax(1, keepdim=True) / 127
    expected = (x / scale).round().double() * scale @ values.T
    layer.finish_loading()
    torch.testing.assert_close(layer.product(x, None).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("is_auto_round", [False, True])
@pytest.mark.parametrize("name", slow_but(["gptq"], ["awq", "gptq", "gptq-8-asym"]))
def test_quantised_heads(name: str, is_auto_round: bool, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the twin, with the output head; AutoRound writes the same tensors, and other keys."""
    folder = checkpoint("qwen3", tie=False, vocab_size=208, **SHAPE)
    compress(folder, tmp_path / "target", tmp_path / "twin", name, group=32, with_head=True)
    path = tmp_path / "target" / "config.json"
    config = json.loads(path.read_text())
    own = config["quantization_config"]
    own["lm_head"] = True
    if is_auto_round:
        shared = {"bits": own["bits"], "group_size": 32, "sym": own.get("sym", True), "data_type": "int"}
        config["quantization_config"] = {
            "quant_method": "auto-round",
            **shared,
            "packing_format": f"auto_round:auto_{'awq' if name == 'awq' else 'gptq'}",
            "block_name_to_quantize": "model.layers",
            "extra_config": {"lm_head": shared, "model.layers.0.self_attn.qkv": {"bits": 16, "data_type": "float"}},
            "autoround_version": "0.9.0",
            "seqlen": 512,
        }
    path.write_text(json.dumps(config))
    for world_size in (1, 2):
        assert_equal_twin(tmp_path / "target", tmp_path / "twin", world_size, least=9)


@pytest.mark.parametrize("name", ["awq", "gptq"])
def test_unnamed_plain_modules_are_found(name: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the twin, although config.json does not name the layer that is not quantised."""
    folder = checkpoint("qwen3", **SHAPE)
    compress(folder, tmp_path / "target", tmp_path / "twin", name, group=32, kept_layers=(1,))
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    for key in ("modules_to_not_convert", "dynamic", "modules_in_block_to_quantize"):
        config["quantization_config"].pop(key, None)
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    assert_equal_twin(tmp_path / "target", tmp_path / "twin", 2, least=4)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "name", ["fp8-block", "fp8-channel", "pack-quantized-asym", "awq", "gptq", "nvfp4-modelopt", "mxfp4-pack-quantized"]
)
def test_memory_is_what_lies_on_disk(
    name: str, world_size: int, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Oracle: the sizes of the files' tensors; what C keeps is within 3 % of them, divided by the ranks."""
    library = native_library()
    if library is None:
        pytest.skip("the native kernels cannot be built here")
    folder = checkpoint("llama", hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=8, num_layers=1)
    compress(folder, tmp_path / "target", tmp_path / "twin", name)
    stored = load_file(tmp_path / "target" / "model.safetensors")
    on_disk = sum(one.nbytes for key, one in stored.items() if "_proj." in key and not key.endswith("input_scale"))
    for rank in range(world_size):
        kept = 0
        for module in load(tmp_path / "target", rank, world_size).modules():
            if isinstance(module, LocalLinear) and isinstance(module.format, Quantised):
                weight = module.format.weight(dict(module.named_parameters(recurse=False)), module.shape)
                kept += QuantisedPanels(library, weight, torch.bfloat16, module.shape.activation).num_bytes
        assert abs(kept / (on_disk / world_size) - 1) < 0.03, kept


@pytest.mark.parametrize(
    "name", ["fp8-tensor-static", "fp8-tensor-transformers", "fp8-ct-tensor", "fp8-tensor-dynamic"]
)
def test_stored_scales_of_inputs_are_used(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the scale that the packer writes; of a dynamic checkpoint there is none."""
    compress(checkpoint("qwen3", **SHAPE), tmp_path / "target", tmp_path / "twin", name)
    given: list[torch.Tensor | None] = []

    def choose(weight: QuantisedWeight, *, input_scale: torch.Tensor | None, **options: Any) -> Product:
        given.append(input_scale)
        return choose_quantised_product(weight, input_scale=input_scale, **options)

    monkeypatch.setattr(quantised, "choose_quantised_product", choose)
    load(tmp_path / "target", 1, 2).finish_loading()
    assert len(given) == 8
    assert all((one is None) if name.endswith("dynamic") else bool(one == INPUT_SCALE) for one in given)
