"""Peers that run on a GPU in the offline benchmark: their settings, and their turns with ours.  Here on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bench_offline
import pytest
import torch
from benchmarks.offline import contenders, peers
from benchmarks.offline.engines import Engine, Measurement
from benchmarks.offline.options import parse_arguments
from benchmarks.offline.peer_side import beside_others
from benchmarks.shapes import qwen3_config
from benchmarks.workloads import Workload
from gpu import sections
from gpu.figures import figures_of

ROOT = Path(__file__).parents[3]
# Stand-ins; each writes what it got into a file beside itself.
VLLM = """
import json, os, time
from pathlib import Path


class SamplingParams:
    def __init__(self, max_tokens, **others):
        self.max_tokens = max_tokens


class Answer:
    def __init__(self, token_ids):
        self.token_ids, self.outputs = token_ids, [self]


class LLM:
    def __init__(self, model, **options):
        weights = [path.name for path in Path(model).glob("*.safetensors")]
        got = {"options": options, "variables": sorted(os.environ), "weights": weights}
        Path(__file__).with_name("vllm.json").write_text(json.dumps(got))

    def generate(self, prompts, params, use_tqdm):
        time.sleep(1e-3 * max(one.max_tokens for one in params))
        return [Answer([1] * one.max_tokens) for one in params]

    def reset_prefix_cache(self):
        pass
"""
NANO_VLLM = """
import json
import time
from pathlib import Path


class SamplingParams:
    def __init__(self, temperature, ignore_eos, max_tokens):
        assert temperature == 0.6 and ignore_eos
        self.max_tokens = max_tokens


class LLM:
    def __init__(self, model, **options):
        assert (Path(model) / "model.safetensors").exists() and (Path(model) / "tokenizer.json").exists()
        Path(__file__).with_name("options.json").write_text(json.dumps(options))

    def generate(self, prompts, sampling_params, use_tqdm=True):
        time.sleep(1e-3 * max(params.max_tokens for params in sampling_params))
        return [
            {"token_ids": [1] * params.max_tokens, "text": self.tokenizer.decode([1])} for params in sampling_params
        ]
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules called vllm and nanovllm; children of this process import the former."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    (tmp_path / "nano" / "nanovllm").mkdir(parents=True)
    (tmp_path / "nano" / "nanovllm" / "__init__.py").write_text(NANO_VLLM)
    (tmp_path / "nano" / "flash_attn.py").touch()
    return tmp_path


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, but none of its children, takes the machine for one with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def small_model(folder: Path) -> Path:
    """A folder with the config.json of a small Qwen3."""
    folder.mkdir(exist_ok=True)
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = qwen3_config("qwen3-0.6b", "float32") | small | {"vocab_size": 300, "head_dim": 16, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "num_key_value_heads": 2}))
    return folder


def made(arguments: list[str], model: Path, shared: Mapping[str, Any]) -> Engine:
    """The only peer that the command line names."""
    makers, skipped = contenders.peer_makers(parse_arguments(["--shape", "qwen3-0.6b", *arguments]), str(model), {})
    assert not skipped
    (make,) = makers.values()
    return make(shared)


@pytest.mark.usefixtures("on_gpu")
def test_vllm_on_a_gpu_gets_our_settings(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the issue's settings, and nothing of what CPUs need; random weights of its own are not compared."""
    for name in ("LD_PRELOAD", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    model = small_model(stand_ins / "model")
    engine = made(["--peer", "vllm"], model, {"gpu_memory_utilization": 0.425})
    try:
        assert engine.run(Workload("two", [[5], [6, 7]], [4, 2])).token_ids == []
    finally:
        engine.close()
    got = json.loads((stand_ins / "packages" / "vllm.json").read_text())
    assert got["options"] == {
        "dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 16384,
        "enable_prefix_caching": True, "load_format": "dummy", "gpu_memory_utilization": 0.425,
        "skip_tokenizer_init": True, "disable_log_stats": True,
    }  # fmt: skip
    assert not got["weights"]
    unwanted = ("VLLM_CPU", "LD_PRELOAD", "VLLM_ENABLE_V1")
    assert not [name for name in got["variables"] if name.startswith(unwanted)]


def test_options_of_ours_decide_for_the_peers_too(stand_ins: Path) -> None:
    """Oracle: --engine-options before the equal share, --peer-options before both."""
    model = small_model(stand_ins / "model")
    more = ["--engine-options", '{"gpu_memory_utilization": 0.5, "max_num_seqs": 8}']
    more += ["--peer-options", '{"vllm": {"max_num_seqs": 4}}']
    made(["--peer", "vllm", *more], model, {"gpu_memory_utilization": 0.425}).close()
    options = json.loads((stand_ins / "packages" / "vllm.json").read_text())["options"]
    assert options["gpu_memory_utilization"] == 0.5 and options["max_num_seqs"] == 4


def test_nano_vllm_gets_the_same_work(stand_ins: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a stand-in that wants a tokenizer and weights, and samples; its answers are counted, not compared."""
    model = small_model(stand_ins / "model")
    arguments = ["--no-peer", "--nano-vllm-path", str(stand_ins / "nano"), "--dtype", "float32"]
    engine = made([*arguments, "--engine-options", '{"max_num_seqs": 8}'], model, {"gpu_memory_utilization": 0.4})
    try:
        assert engine.run(Workload("one", [[5, 6, 7]], [4])).first_token_s is not None
        assert engine.run(Workload("two", [[5], [6, 7]], [4, 2])).token_ids == []
    finally:
        engine.close()
    options = json.loads((stand_ins / "nano" / "nanovllm" / "options.json").read_text())
    assert options.pop("gpu_memory_utilization") == pytest.approx(0.4)
    assert options == {"max_model_len": 2048, "max_num_seqs": 8}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30, 80))
    assert beside_others(0.2) == pytest.approx(0.825), "50 of 80 are used by others"


def test_a_peer_without_flash_attention_is_left_out(stand_ins: Path) -> None:
    """Oracle: the reason names the module that nano-vllm needs."""
    (stand_ins / "nano" / "flash_attn.py").write_text("")
    found = peers.find_peer("nano-vllm", sys.executable, stand_ins / "nano")
    assert found == peers.Found(python=sys.executable, version="", folder=stand_ins / "nano")
    (stand_ins / "nano" / "flash_attn.py").unlink()
    reason = peers.find_peer("nano-vllm", sys.executable, stand_ins / "nano")
    assert isinstance(reason, str) and "flash_attn; give another with --peer-python nano-vllm=PATH" in reason


class Loaded:
    """An engine that notes when it is made, asked and closed."""

    def __init__(self, name: str, notes: list[str], shared: Mapping[str, Any]) -> None:
        self.name, self.notes = name, notes
        self.notes.append(f"{name} loads, {dict(shared)}")

    def run(self, workload: Workload) -> Measurement:
        self.notes.append(f"{self.name} runs")
        return Measurement(1.0, None, [[1] * count for count in workload.max_tokens])

    def close(self) -> None:
        self.notes.append(f"{self.name} ends")


@pytest.mark.usefixtures("on_gpu")
def test_engines_of_one_gpu_alone_and_together() -> None:
    """Oracle: by hand: a warm-up and one round; 85 % of the memory for two engines together."""
    notes: list[str] = []
    makers: contenders.Makers = {
        name: lambda shared, name=name: Loaded(name, notes, shared)  # type: ignore[misc]
        for name in ("ours", "theirs")
    }
    contenders.run_all(makers, ["latency"], 100, 1)
    alone = [[f"{name} loads, {{}}", *[f"{name} runs"] * 2, f"{name} ends"] for name in makers]
    assert notes == alone[0] + alone[1]
    notes.clear()
    together = parse_arguments(["--shape", "qwen3-0.6b", "--together"])
    share = contenders.memory_share(together, len(makers))
    contenders.run_all(makers, ["latency"], 100, 1, share)
    loads = [f"{name} loads, {{'gpu_memory_utilization': 0.425}}" for name in makers]
    assert notes == [*loads, *["ours runs", "theirs runs"] * 2, "ours ends", "theirs ends"]
    assert contenders.memory_share(parse_arguments(["--shape", "qwen3-0.6b"]), 2) is None


def test_a_run_with_both_peers(
    stand_ins: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the stand-ins; on CPUs --together changes nothing.  With a share, as on a GPU, the report tells it."""
    monkeypatch.setattr(bench_offline, "make_folder", lambda folder, shape, dtype: small_model(folder))
    arguments = ["--shape", "qwen3-0.6b", "--dtype", "float32", "--together", "--workloads", "latency", "--rounds", "1"]
    arguments += ["--peer", "vllm", "--nano-vllm-path", str(stand_ins / "nano")]
    assert bench_offline.main(arguments) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    (result,) = report["workloads"]
    assert list(result["engines"]) == ["tp_engine TP 1", "vllm", "nano-vllm"] and result["equal_answers"] == {}
    assert report["memory_share"] is None and "the engines share the GPU" not in printed
    monkeypatch.setattr(bench_offline, "memory_share", lambda args, num_engines: 0.1 * num_engines)
    assert bench_offline.main(arguments) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert report["memory_share"] == pytest.approx(0.3) and "each may use 30.0% of its memory" in printed
    assert "qwen3-0.6b latency, nano-vllm, GPU shared" in [figure.label for figure in figures_of(report)]
    vllm = json.loads((stand_ins / "packages" / "vllm.json").read_text())
    nano = json.loads((stand_ins / "nano" / "nanovllm" / "options.json").read_text())
    assert vllm["options"]["gpu_memory_utilization"] == pytest.approx(0.3)
    assert nano["gpu_memory_utilization"] >= 0.299


def test_a_run_on_the_cpu(stand_ins: Path) -> None:
    """Oracle: one JSON line with every engine's latency, its share of the roofline of this run, and the ratios."""
    model = small_model(stand_ins / "model")
    (model / "model.safetensors").touch()
    command = [sys.executable, "scripts/bench_offline.py", "--model", str(model), "--rounds", "1"]
    command += ["--workloads", "latency", "--no-peer", "--nano-vllm-path", str(stand_ins / "nano")]
    command += ["--engine-options", '{"load_format": "dummy"}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    (result,) = report["workloads"]
    assert report["read_gb_per_s"] > 0 and report["decode_roofline_ms"] > 0 and not report["failures"]
    assert set(result["engines"]) == {"tp_engine TP 1", "nano-vllm"} and result["roofline"]["ms_per_token"] > 0
    ours = result["engines"]["tp_engine TP 1"]
    assert ours["ttft_ms"] > 0 and ours["ms_per_token"] > 0 and 0 < ours["share_of_roofline"] < 1
    assert set(result["speedup_over"]) == {"nano-vllm"}
    assert [figure.unit for figure in figures_of(report)].count("of the roofline") == 2, "gpu_check shows both engines"


def test_gpu_check_knows_the_same_peers() -> None:
    """Oracle: the benchmark's table; gpu_check imports no torch for it."""
    assert tuple(peers.GPU_PEERS) == sections.GPU_PEERS
