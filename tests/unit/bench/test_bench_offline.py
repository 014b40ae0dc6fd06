"""The offline benchmark's arithmetic; every engine gets the same work and the same weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.offline import contenders
from benchmarks.offline.engines import (
    Measurement,
    TpEngine,
    TransformersGenerate,
    dummy_weights,
    save_dummy_checkpoint,
)
from benchmarks.offline.options import parse_arguments
from benchmarks.offline.summary import print_table, summarise
from benchmarks.roofline import Ceilings, ModelCost, decode_step_s, model_cost, prompts_s, workload_s
from benchmarks.shapes import DUMMY_SHAPES, SHAPES, qwen3_config, random_model
from benchmarks.workloads import WORKLOADS, Workload, batch256

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
        self.served: list[Workload] = []

    def run(self, workload: Workload) -> Measurement:
        self.served.append(workload)
        if self.fails:
            raise RuntimeError("out of memory")
        return Measurement(self.total_s, None, [[1] * count for count in workload.max_tokens])

    def close(self) -> None:
        self.closed = True


def makers(**engines: Answers) -> contenders.Makers:
    return {name: lambda _, engine=engine: engine for name, engine in engines.items()}  # type: ignore[misc]


def small_config(folder: Path) -> None:
    """The config.json of a small Qwen3."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = qwen3_config("qwen3-0.6b", "float32") | small | {"vocab_size": 300, "head_dim": 16, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "num_key_value_heads": 2}))


@pytest.mark.parametrize("shape", DUMMY_SHAPES)
def test_qwen3_shapes_have_the_published_number_of_parameters(shape: str) -> None:
    """Oracle: the number that the hub shows for each checkpoint."""
    config = qwen3_config(shape, "bfloat16")
    embedding = 0 if config["tie_word_embeddings"] else config["vocab_size"] * config["hidden_size"]
    cost = model_cost(config, "bfloat16")
    idle = sum(parameters * (total - top_k) for parameters, total, top_k in cost.experts)
    assert cost.num_parameters + idle + embedding == PUBLISHED[shape]


@pytest.mark.parametrize("shape", SHAPES)
def test_cost_of_the_small_shapes(shape: str, tmp_path: Path) -> None:
    """Oracle: transformers' own tensors, without memory: the parameters of each shape; those of D, G, Q by the goal.

    By hand: two layers of G keep the 512 rows of their keys twice, as values too; six layers of Q have states of 8
    matrices of 128 x 128 and 3 inputs of 2048 channels.
    """
    with torch.device("meta"):
        model = random_model(shape)
    model.save_pretrained(tmp_path, state_dict={})
    cost = model_cost(json.loads((tmp_path / "config.json").read_text()), "bfloat16")
    tensors = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}
    num_parameters = sum(tensors.values())
    idle = sum(parameters * (total - top_k) for parameters, total, top_k in cost.experts)
    embedding = 0 if model.config.tie_word_embeddings else model.config.vocab_size * model.config.hidden_size
    repeated = 2 * 512 * 640 if shape == "G" else 0
    assert cost.num_parameters + idle + embedding == num_parameters + repeated
    assert shape not in "DGQ" or 90e6 < num_parameters < 115e6
    assert cost.state_bytes == (6 * 4 * (8 * 128 * 128 + 3 * 2048) if shape == "Q" else 0)


def test_weights_of_experts_that_rows_go_to() -> None:
    """Oracle: by hand: one row reads 2 of 4 experts of 100, two rows 4 (1 - 1/4) of them on the average, many all."""
    cost = ModelCost(
        num_parameters=1000, itemsize=2, kv_values=10, num_layers=1, attention_width=4, experts=((100, 4, 2),)
    )
    assert [cost.weight_bytes(rows) for rows in (1, 2)] == [2000, 2200]
    assert cost.weight_bytes(1000) == pytest.approx(2400)


def test_roofline_of_a_step() -> None:
    """Oracle: worked out by hand: 2000 bytes of weights and 20 bytes per token at 1 MB/s; 2000 operations per row."""
    assert decode_step_s(COST, CEILINGS, num_rows=1, num_context_tokens=100) == pytest.approx(4e-3)
    assert decode_step_s(COST, CEILINGS, num_rows=10_000, num_context_tokens=0) == pytest.approx(20e-3)
    recurrent = replace(COST, state_bytes=500)  # read and written, for each of 3 rows
    assert decode_step_s(recurrent, CEILINGS, num_rows=3, num_context_tokens=0) == pytest.approx(5e-3)
    assert prompts_s(COST, CEILINGS, [3]) == pytest.approx((2 * 1000 * 3 + 4 * 4 * 6) / 1e9)
    shared = (2 * 1000 * (2 + 1 + 2) + 4 * 4 * (3 + 3 + 7)) / 1e9
    assert prompts_s(COST, CEILINGS, [3, 4], num_shared=2) == pytest.approx(shared), "the first 2 tokens once"


def test_roofline_of_a_workload() -> None:
    """Oracle: worked out by hand: the second token of both requests, then the third of one."""
    work = Workload("two", [[1] * 5, [1] * 7], [3, 2])
    steps = [(2, 5 + 1 + 7 + 1), (1, 5 + 2)]
    expected = prompts_s(COST, CEILINGS, [5, 7]) + sum((2000 + 20 * context) / 1e6 for _, context in steps)
    assert workload_s(COST, CEILINGS, work) == pytest.approx(expected)


def test_the_256_requests_are_alike_for_every_seed() -> None:
    """Oracle: the definition: 100 to 1024 tokens in and out; only the ids differ between seeds."""
    first, second = batch256(151_936, 0), batch256(151_936, 1)
    lengths = [len(prompt) for prompt in first.prompts]
    assert len(lengths) == 256 and min(lengths) >= 100 and max(lengths) <= 1024
    assert min(first.max_tokens) >= 100 and max(first.max_tokens) <= 1024
    assert lengths == [len(prompt) for prompt in second.prompts] and first.max_tokens == second.max_tokens
    assert first.prompts != second.prompts and first == batch256(151_936, 0)


def test_engines_take_turns_on_the_same_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: both engines get the warm-up and then the same workload in each round, and are closed; times are told."""
    ours, theirs = Answers(), Answers()
    runs, failures = contenders.run_all(makers(ours=ours, theirs=theirs), ["latency"], 100, rounds=2)
    assert not failures and {name: len(rounds) for name, rounds in runs["latency"].items()} == {"ours": 2, "theirs": 2}
    assert ours.served == theirs.served and len(ours.served) == 3
    assert ours.closed and theirs.closed
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 6 and [line.partition(";")[0] for line in told[-2:]] == [
        "latency, seed 1, ours: 2.000 s",
        "latency, seed 1, theirs: 2.000 s",
    ]


def test_a_peer_that_fails_costs_only_its_own_figures() -> None:
    """Oracle: the first engine's rounds are complete; the report has the failure."""
    runs, failures = contenders.run_all(makers(ours=Answers(), theirs=Answers(fails=True)), ["latency"], 100, 2)
    assert list(runs["latency"]) == ["ours"] and failures == {"theirs": "RuntimeError: out of memory"}


def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: worked out by hand: 6 tokens in 2 and 3 seconds."""
    work = Workload("two", [[1] * 5, [1] * 7], [3, 3])
    runs = {name: [Answers(total_s).run(work)] for name, total_s in (("ours", 2.0), ("theirs", 3.0))}
    result = summarise(work, runs, COST, Ceilings(bytes_per_s=1e3))
    assert result["speedup_over"] == {"theirs": 1.5} and result["equal_answers"] == {"theirs": 1.0}
    roofline = 6 / workload_s(COST, Ceilings(bytes_per_s=1e3), work)
    assert result["roofline"] == {"tokens_per_s": pytest.approx(roofline, rel=0.01)}
    assert result["engines"]["ours"]["share_of_roofline"] == pytest.approx(3.0 / roofline, rel=0.01)
    facts: dict[str, Any] = {"torch": "", "threads": 1, "machine": "", "dtype": "", "shape": "", "bandwidth": "read"}
    facts |= {"read_gb_per_s": 1, "decode_roofline_ms": 1, "failures": {"x": "y"}, "workloads": [result]}
    print_table(facts)
    assert "1.50x theirs; 100% of the answers equal" in capsys.readouterr().out


def test_dummy_weights_are_those_of_the_peers(tmp_path: Path) -> None:
    """Oracle: tp_engine with ``load_format="dummy"``: transformers gives the same tokens with the copied weights.

    Also with a static cache, as on a GPU, where transformers then compiles its decode step.
    """
    small_config(tmp_path)
    work = Workload("two", [list(range(5, 25)), [7, 9, 11]], [12, 8])
    options = {"dtype": "float32", "load_format": "dummy", "max_model_len": 64, "num_gpu_blocks_override": 32}
    ours, theirs = TpEngine(str(tmp_path), options), TransformersGenerate(str(tmp_path), "float32", dummy=True)
    try:
        expected = ours.run(work).token_ids
        assert theirs.run(work).token_ids == expected
        theirs._options = {"cache_implementation": "static"}
        assert theirs.run(work).token_ids == expected
    finally:
        ours.close()
        theirs.close()


def test_dummy_checkpoint_holds_the_same_weights(tmp_path: Path) -> None:
    """Oracle: the weights that the benchmark puts into transformers' model."""
    from safetensors.torch import load_file

    shapes = {"a.weight": (3, 5), "norm.weight": (4,)}
    save_dummy_checkpoint(tmp_path, shapes, torch.bfloat16)
    saved = load_file(tmp_path / "model.safetensors")
    for name, value in dummy_weights(shapes, torch.bfloat16, torch.device("cpu")):
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0)


def test_command_line_depends_on_the_shape(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the documented defaults; the error for an unknown workload or a wrong folder states the rule."""
    small, large = parse_arguments([]), parse_arguments(["--shape", "qwen3-8b", "--devices", "0,0"])
    assert (small.dtype, small.workloads, small.is_dummy) == ("float32", "latency,throughput,shared_prefix", False)
    assert (large.dtype, large.workloads, large.is_dummy) == ("bfloat16", "latency,batch256", True)
    options = contenders.engine_options(large, 1)
    assert options["load_format"] == "dummy" and options["devices"] == "0"
    for wrong in (["--workloads", "latency,speed"], ["--nano-vllm-path", "nowhere"]):
        with pytest.raises(SystemExit):
            parse_arguments(wrong)
    told = capsys.readouterr().err
    assert "speed; choose among" in told and "must be the folder that holds nanovllm/" in told
    assert set(small.workloads.split(",")) <= set(WORKLOADS)
