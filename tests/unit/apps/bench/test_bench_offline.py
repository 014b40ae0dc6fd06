"""The offline benchmark: its arithmetic, the same work and weights for every engine, and a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu import sections
from gpu.figures import figures_of

from tp_engine.apps.bench.offline import command as bench_offline
from tp_engine.apps.bench.offline import contenders, process
from tp_engine.apps.bench.offline.gguf_checkpoint import gguf_name, interleave, read_checkpoint
from tp_engine.apps.bench.offline.options import parse_arguments
from tp_engine.apps.bench.offline.process import EngineProcess, Found, Measurement
from tp_engine.apps.bench.offline.summary import print_table, summarise
from tp_engine.apps.bench.roofline import Ceilings, ModelCost, decode_step_s, model_cost, prompts_s, workload_s
from tp_engine.apps.bench.shapes import DUMMY_SHAPES, qwen3_config
from tp_engine.apps.bench.workloads import BenchWorkload

COST = ModelCost(num_parameters=1000, itemsize=2, kv_values=10, num_layers=1, attention_width=4)
CEILINGS = Ceilings(bytes_per_s=1e6, flops_per_s=1e9)
# Parameters of the published checkpoints, with the input embedding.
PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
}


class Answers:
    """An engine that answers at once, or fails."""

    def __init__(self, total_s: float = 2.0, fails: bool = False) -> None:
        self.total_s, self.fails, self.closed = total_s, fails, False
        self.served: list[BenchWorkload] = []

    def run(self, workload: BenchWorkload) -> Measurement:
        self.served.append(workload)
        if self.fails:
            raise RuntimeError("out of memory")
        return Measurement(self.total_s, None, [[1] * count for count in workload.max_tokens])

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with the config.json of a small Qwen3, without weights."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = qwen3_config("qwen3-0.6b", "float32") | small | {"vocab_size": 300, "head_dim": 16, "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "num_key_value_heads": 2}))
    return tmp_path


def test_qwen3_shapes_have_the_published_number_of_parameters() -> None:
    """Oracle: the number that the hub shows for each checkpoint."""
    for shape in DUMMY_SHAPES:
        config = qwen3_config(shape, "bfloat16")
        embedding = 0 if config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"]
        cost = model_cost(config, "bfloat16")
        idle = sum(parameters * (total - top_k) for parameters, total, top_k in cost.experts)
        assert cost.num_parameters + idle + embedding == PUBLISHED[shape]


def test_roofline() -> None:
    """Oracle: worked out by hand: 2000 bytes of weights and 20 bytes per token at 1 MB/s; 2000 operations per row."""
    assert decode_step_s(COST, CEILINGS, num_rows=1, num_context_tokens=100) == pytest.approx(4e-3)
    assert decode_step_s(COST, CEILINGS, num_rows=10_000, num_context_tokens=0) == pytest.approx(20e-3)
    assert prompts_s(COST, CEILINGS, [3]) == pytest.approx((2 * 1000 * 3 + 4 * 4 * 6) / 1e9)
    work = BenchWorkload("two", [[1] * 5, [1] * 7], [3, 2])
    steps = [(2, 5 + 1 + 7 + 1), (1, 5 + 2)]
    expected = prompts_s(COST, CEILINGS, [5, 7]) + sum((2000 + 20 * context) / 1e6 for _, context in steps)
    assert workload_s(COST, CEILINGS, work) == pytest.approx(expected)


def test_engines_take_turns_on_the_same_prompts() -> None:
    """Oracle: each engine gets the warm-up and the same workload in each round; one that fails is told and closed."""
    engines = {"ours": Answers(), "theirs": Answers(), "broken": Answers(fails=True)}
    makers: contenders.Makers = {name: lambda _, engine=engine: engine for name, engine in engines.items()}  # type: ignore[misc]
    runs, failures = contenders.run_all(makers, ["latency"], 100, rounds=2)
    assert {name: len(rounds) for name, rounds in runs["latency"].items()} == {"ours": 2, "theirs": 2}
    assert failures == {"broken": "RuntimeError: out of memory"}
    assert engines["ours"].served == engines["theirs"].served and len(engines["ours"].served) == 3
    assert all(engine.closed for engine in engines.values())


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: by hand: 6 tokens in 2, 3 and 4 seconds; the last reads the same files as the second."""
    work = BenchWorkload("two", [[1] * 5, [1] * 7], [3, 3])
    seconds = {"tp_engine TP 1": 2.0, "tp_engine TP 1 awq": 3.0, "vllm 0.32.0 awq": 4.5}
    runs = {name: [Answers(total_s).run(work)] for name, total_s in seconds.items()}
    result = summarise(work, runs, COST, Ceilings(bytes_per_s=1e3))
    assert result["speedup_over"] == {"tp_engine TP 1 awq": 1.5, "vllm 0.32.0 awq": 2.25}
    assert result["same_checkpoint"] == {
        "vllm 0.32.0 awq": {"engine": "tp_engine TP 1 awq", "speedup": 1.5, "equal_answers": 1.0}
    }
    roofline = 6 / workload_s(COST, Ceilings(bytes_per_s=1e3), work)
    assert result["engines"]["tp_engine TP 1"]["share_of_roofline"] == pytest.approx(3.0 / roofline, rel=0.01)
    facts: dict[str, Any] = {"torch": "", "threads": 1, "machine": "", "dtype": "", "shape": "", "bandwidth": "read"}
    facts |= {"read_gb_per_s": 1, "decode_roofline_ms": 1, "failures": {"x": "y"}, "workloads": [result]}
    print_table(facts)
    assert "1.50x tp_engine TP 1 awq; 100% of the answers equal" in capsys.readouterr().out


@pytest.mark.slow
def test_every_engine_gets_the_same_weights(model: Path) -> None:
    """Oracle: tp_engine with ``load_format="dummy"``; transformers gives the same tokens with a checkpoint."""
    work = BenchWorkload("two", [list(range(5, 25)), [7, 9, 11]], [12, 8])
    options = {"dtype": "float32", "load_format": "dummy", "max_model_len": 64, "num_gpu_blocks_override": 32}
    found = []
    for name in ("tp_engine", "transformers"):
        if name == "transformers":
            contenders.add_checkpoint(model, "float32")
        load = {"dtype": "float32", "max_model_len": 64, "options": options if name == "tp_engine" else {}}
        engine = EngineProcess(name, Found(), threads=1, timeout_s=120, model=str(model), **load)
        try:
            found.append(engine.run(work).token_ids)
        finally:
            engine.close()
    assert found[0] == found[1] and [len(tokens) for tokens in found[0]] == [12, 8]


def test_a_checkpoint_for_peers_that_need_one(model: Path) -> None:
    """Oracle: every tensor has a name in GGUF; the halves of a head change places as drawn in the module."""
    contenders.add_checkpoint(model, "bfloat16")
    found = dict(read_checkpoint(model))
    names = {gguf_name(name) for name in found}
    assert {"token_embd.weight", "output_norm.weight", "blk.1.attn_q_norm.weight"} <= names
    assert len(names) == len(found) > 20 and found["model.norm.weight"].tolist() == [1.0] * 64
    rows = np.arange(12, dtype=np.float32).reshape(12, 1)
    assert interleave(rows, 2).ravel().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_peers_that_are_absent_are_told(tmp_path: Path) -> None:
    """Oracle: a reason that names the interpreter and the option; gpu_check knows the same peers of a GPU."""
    missing = process.find_peer("vllm", str(tmp_path / "python"))
    assert isinstance(missing, str) and "is no interpreter; give one with --peer-python vllm=PATH" in missing
    broken = process.find_peer("vllm", "/bin/false")
    assert isinstance(broken, str) and "it fails with exit code 1" in broken
    assert tuple(process.GPU_PEERS) == sections.GPU_PEERS


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the documented defaults; the error for a senseless value states the rule."""
    small, large = parse_arguments([]), parse_arguments(["--shape", "qwen3-8b", "--device-ids", "0,0"])
    assert (small.dtype, small.workloads, small.peer) == (
        "float32",
        "latency,throughput,shared_prefix",
        ["transformers"],
    )
    assert (large.dtype, large.workloads, large.is_dummy) == ("bfloat16", "latency,batch256", True)
    options = contenders.engine_options(large, 1)
    assert options["load_format"] == "dummy" and options["device_ids"] == "0"
    wrong = {
        ("--cells", "A"): "write SHAPE:DTYPE",
        ("--workloads", "latency,speed"): "speed; choose among",
        ("--peer", "vllm", "--no-peer"): "exclude each other",
        ("--peer-python", "vllm"): "'vllm' is not NAME=PATH with NAME one of vllm",
        ("--quantization", "int3"): "int3; choose among none,",
        ("--shape", "qwen3-8b", "--peer", "vllm:awq"): "no weights to load for vllm:awq; choose A, B or C",
        ("--nano-vllm-path", "nowhere"): "must be the folder that holds nanovllm/",
    }
    for arguments, told in wrong.items():
        with pytest.raises(SystemExit):
            parse_arguments(list(arguments))
        assert told in capsys.readouterr().err


def test_a_run_on_the_cpu(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: one JSON line with each engine's latency, its share of this run's roofline, and who was left out."""
    arguments = ["--model", str(model), "--workloads", "shared_prefix,latency", "--rounds", "1", "--peer", "llama.cpp"]
    arguments += ["--peer-python", f"llama.cpp={model}/nowhere", "--engine-options", '{"load_format": "dummy"}']
    assert bench_offline.main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["read_gb_per_s"] > 0 and report["decode_roofline_ms"] > 0 and not report["failures"]
    assert list(report["skipped"]) == ["llama.cpp"]
    for result in report["workloads"]:
        assert list(result["engines"]) == ["tp_engine TP 1"]
        assert result["engines"]["tp_engine TP 1"]["share_of_roofline"] > 0
    assert [figure.unit for figure in figures_of(report)].count("of the roofline") == 2, "gpu_check shows both"


@pytest.mark.slow
def test_steps_on_the_cpu(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the requests and steps asked for; a CPU records no prompts, so both engines give the same tokens."""
    arguments = ["--model", str(model), "--steps", "2x20", "--num-steps", "3", "--prefill-graphs", "none;auto"]
    options = {"load_format": "dummy", "num_gpu_blocks_override": 64}
    assert bench_offline.main([*arguments, "--engine-options", json.dumps(options)]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["batch_size"] == 2 and figures_of(report)
    assert [found["sizes"] for found in report["results"]] == ["none", "auto"]
    for found in report["results"]:
        assert found["tokens_per_s"] == pytest.approx(2 / found["step_ms"] * 1e3, rel=0.01)
        assert list(found["kernels_us"])[-1] == "other" and found["mixed_step_ms"] > 0
        assert found["equal_tokens"] == 1.0 and found["graph_mib"] == 0.0
