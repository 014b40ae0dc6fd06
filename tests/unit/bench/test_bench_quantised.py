"""Quantised weights in the benchmarks: checkpoints in 4 bits, contenders by their weights, and accuracy."""

from __future__ import annotations

import json
from pathlib import Path

import bench_quantization
import pytest
import torch
from benchmarks.int4_checkpoint import (
    pack_along,
    pack_layer,
    quantization_config,
    round_to_codes,
    write_int4_checkpoint,
)
from benchmarks.offline import contenders
from benchmarks.offline.engines import Measurement
from benchmarks.offline.options import parse_arguments
from benchmarks.offline.summary import pairs_of_packings, summarise
from benchmarks.roofline import Ceilings, ModelCost
from benchmarks.shapes import DEMO_MODEL
from benchmarks.workloads import Workload
from safetensors.torch import load_file, save_file

from tests.quantised.numbers import Numbers
from tests.quantised.packing import pack_awq, pack_gptq
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.quant_methods import read_quantization

MLP = "model.layers.0.mlp"


def nibble(word: int, place: int) -> int:
    """Four bits of an int32, the lowest first."""
    return (word >> 4 * place) & 15


@pytest.mark.parametrize("symmetric", [False, True])
def test_rounding_to_codes(symmetric: bool) -> None:
    """Oracle: no value is further from its code's value than a step; a group of zeros stays zero."""
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    weight[2, 8:16] = 0
    codes, zeros, scales = round_to_codes(weight, 8, symmetric=symmetric)
    assert codes.shape == (32, 6) and zeros.shape == scales.shape == (4, 6)
    assert codes.min() >= 0 and codes.max() <= 15 and (not symmetric or set(zeros.flatten().tolist()) == {8})
    steps = scales.float().repeat_interleave(8, 0)
    values = (codes - zeros.repeat_interleave(8, 0)) * steps
    assert ((values - weight.T).abs() <= 0.51 * steps + (0.5 * steps if not symmetric else 0)).all()
    assert not values[8:16, 2].any()


def test_words_of_eight_codes() -> None:
    """Oracle: by hand, also for the sign bit: AWQ's order puts the codes of columns 0, 2, 4, 6, 1, 3, 5, 7 one after
    the other."""
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.int32)
    word = int(pack_along(codes, 1)) & 0xFFFFFFFF
    assert [nibble(word, place) for place in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]
    word = int(pack_along(codes, 1, (0, 2, 4, 6, 1, 3, 5, 7))) & 0xFFFFFFFF
    assert [nibble(word, place) for place in range(8)] == [1, 3, 5, 7, 2, 4, 6, 8]
    assert torch.equal(pack_along(codes.T, 0), pack_along(codes, 1))


@pytest.mark.parametrize("packing", ["awq", "gptq"])
def test_a_checkpoint_in_four_bits(tmp_path: Path, packing: str) -> None:
    """Oracle: the shapes of the layout; a layer whose inputs the group does not divide stays, and config.json says so.

    The code of one weight is read from its word by the layout's own rule.
    """
    (source := tmp_path / "source").mkdir()
    weights = {
        "model.embed_tokens.weight": torch.randn(40, 32),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(16, 32),
        "model.layers.0.mlp.down_proj.weight": torch.randn(32, 24),
        "model.norm.weight": torch.ones(32),
    }
    save_file(weights, source / "model.safetensors")
    (source / "config.json").write_text('{"hidden_size": 32}')
    target = write_int4_checkpoint(source, tmp_path / "target", packing, group=16)
    found = load_file(target / "model.safetensors")
    layer = "model.layers.0.self_attn.q_proj"
    packed = {name.removeprefix(f"{layer}."): value for name, value in found.items() if name.startswith(layer)}
    assert set(found) - {f"{layer}.{name}" for name in packed} == set(weights) - {f"{layer}.weight"}
    assert packed["qzeros"].shape == (2, 2) and packed["scales"].shape == (2, 16)
    codes, zeros, _ = round_to_codes(weights[f"{layer}.weight"], 16, symmetric=packing == "gptq")
    row, column = 13, 9
    if packing == "awq":
        assert packed["qweight"].shape == (32, 2)
        assert nibble(int(packed["qweight"][row, 1]), 4) == codes[row, column]
        assert nibble(int(packed["qzeros"][0, 1]), 4) == zeros[0, column]
    else:
        assert packed["qweight"].shape == (4, 16) and packed["g_idx"].tolist() == [0] * 16 + [1] * 16
        assert nibble(int(packed["qweight"][1, column]), 5) == codes[row, column]
        assert nibble(int(packed["qzeros"][0, 1]), 1) == 7, "zero - 1"
    config = json.loads((target / "config.json").read_text())
    assert config["hidden_size"] == 32 and config["quantization_config"]["quant_method"] == packing
    assert config["quantization_config"] == quantization_config(packing, 16, ["down_proj"])


def test_contenders_by_weights() -> None:
    """Oracle: names that end with the weights; only those that are quantised while loading get the option."""
    args = parse_arguments(["--quantization", "none,int8,awq", "--no-peer", "--shape", "C"])
    makers = contenders.engine_makers(args, "model", {"awq": "model-awq"})
    assert list(makers) == ["tp_engine TP 1", "tp_engine TP 1 int8", "tp_engine TP 1 awq"]
    calls = [maker.args[1:] for maker in makers.values()]  # type: ignore[attr-defined]
    assert [(model, options.get("quantization")) for model, options in calls] == [
        ("model", None),
        ("model", "int8"),
        ("model-awq", None),
    ]


def test_engines_that_read_the_same_files() -> None:
    """Oracle: worked out by hand: vLLM takes 3 s and tp_engine 1.5 s for the AWQ checkpoint; GPTQ has no partner."""
    work = Workload("two", [[1] * 5, [1] * 7], [3, 3])
    seconds = {"tp_engine TP 1 int4": 1.0, "tp_engine TP 1 awq": 1.5, "vllm 0.32.0 awq": 3.0, "vllm 0.32.0 gptq": 2.0}
    runs = {name: [Measurement(took, None, [[1] * 3, [2] * 3])] for name, took in seconds.items()}
    assert pairs_of_packings(list(runs)) == [("tp_engine TP 1 awq", "vllm 0.32.0 awq")]
    cost = ModelCost(num_parameters=1000, itemsize=2, kv_values=10, num_layers=1, attention_width=4)
    result = summarise(work, runs, cost, Ceilings(bytes_per_s=1e3))
    assert result["same_checkpoint"] == {
        "vllm 0.32.0 awq": {"engine": "tp_engine TP 1 awq", "speedup": 2.0, "equal_answers": 1.0}
    }
    assert result["speedup_over"]["vllm 0.32.0 awq"] == 3.0


def test_command_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the errors for senseless values state the rule."""
    args = parse_arguments(["--peer", "llama.cpp:Q4_0", "llama.cpp:Q4_K_M", "vllm:awq"])
    assert args.peer == ["llama.cpp:Q4_0", "llama.cpp:Q4_K_M", "vllm:awq"]
    wrong = {
        ("--quantization", "int3"): "int3; choose among none,",
        ("--peer", "vllm:Q4_0"): "invalid choice",
        ("--shape", "qwen3-8b", "--no-peer", "--quantization", "awq"): "has no weights to write as awq",
        ("--shape", "qwen3-8b", "--peer", "llama.cpp:Q4_0"): "choose A, B or C",
    }
    for arguments, told in wrong.items():
        with pytest.raises(SystemExit):
            parse_arguments(list(arguments))
        assert told in capsys.readouterr().err
    for arguments, told in {
        ("--quantization", "int3"): "int3; choose among",
        ("--checkpoint", "folder"): "--checkpoint goes with --demo",
        ("--shape", "qwen3-8b", "--quantization", "gptq"): "has no weights to write as awq or gptq",
    }.items():
        with pytest.raises(SystemExit):
            bench_quantization.parse_arguments(list(arguments))
        assert told in capsys.readouterr().err


def test_accuracy_of_logits(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: int8 rounds, so its logits differ, but by less than a tenth; one column per kind."""
    arguments = ["--shape", "C", "--tokens", "8", "--quantization", "int8"]
    assert bench_quantization.main(arguments) == 0
    *printed, line = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert list(report["kinds"]) == ["int8"] and 0 < report["kinds"]["int8"]["relative_rms_error"] < 0.1
    assert any(row.split() == ["int8"] for row in printed)


def test_accuracy_of_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the demo model sorts; the unquantised model comes first, a given folder last."""
    folder = str(DEMO_MODEL)
    arguments = ["--demo", "--samples", "2", "--quantization", "int8", "--checkpoint", folder]
    assert bench_quantization.main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(report["kinds"]) == ["none", "int8", folder]
    assert report["kinds"]["none"] == report["kinds"][folder] and report["kinds"]["none"]["sort"] == 1.0


@pytest.mark.parametrize("packing", ["awq", "gptq"])
def test_tp_engine_reads_the_layout(packing: str) -> None:
    """Oracle: the tests' own packers, written apart from these, and the reader of config.json."""
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    codes, zeros, scales = round_to_codes(weight, 16, symmetric=packing == "gptq")
    numbers = Numbers(kind="int", codes=codes.T, scales=scales.T, block=(1, 16), bits=4, zeros=zeros.T)
    expected = pack_awq(numbers) if packing == "awq" else pack_gptq(numbers, version=1)
    found = pack_layer(weight, packing, 16)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    config = {"quantization_config": quantization_config(packing, 128, ["down_proj"])}
    spec = read_quantization(ConfigJson(config))
    assert spec is not None
    up, down, head = (spec.scheme_of(name) for name in (f"{MLP}.up_proj", f"{MLP}.down_proj", "lm_head"))
    assert down is None and head is None and up is not None and (up.packing, up.group) == (packing, 128)
