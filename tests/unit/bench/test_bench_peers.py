"""Other engines beside ours in the offline benchmark: how it finds, calls and ends them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bench_offline import main
from benchmarks.machine import cpu_matmul_rate
from benchmarks.offline.contenders import add_checkpoint
from benchmarks.offline.gguf_checkpoint import gguf_name, interleave, read_checkpoint
from benchmarks.offline.options import parse_arguments
from benchmarks.offline.peer_side import link_with_tokenizer
from benchmarks.offline.peers import Found, PeerProcess, faster_libraries, find_peer, peer_environment
from benchmarks.shapes import qwen3_config
from benchmarks.workloads import Workload
from safetensors.torch import save_file

# A stand-in with the part of vLLM's interface that the benchmark uses; like an engine, it writes to standard output.
VLLM = """
print("hello from the import")


class SamplingParams:
    def __init__(self, temperature, ignore_eos, max_tokens, detokenize):
        assert temperature == 0 and ignore_eos and not detokenize
        self.max_tokens = max_tokens


class Answer:
    def __init__(self, token_ids):
        self.token_ids, self.outputs = token_ids, [self]


class LLM:
    def __init__(self, model, dtype, skip_tokenizer_init, max_model_len, disable_log_stats, mode="good",
                 tensor_parallel_size=1, load_format="auto"):
        assert dtype == "float32" and skip_tokenizer_init and max_model_len > 0
        self.cached, self.mode = set(), mode
        if mode == "refuses":
            raise ValueError("no such model")

    def generate(self, prompts, params, use_tqdm):
        import os, time
        if self.mode == "dies":
            print("out of memory")
            os._exit(9)
        if self.mode == "hangs":
            time.sleep(60)
        keys = [tuple(prompt["prompt_token_ids"]) for prompt in prompts]
        assert not self.cached & set(keys), "the prompt's first run was not forgotten"
        self.cached |= set(keys)
        counts = [one.max_tokens - (self.mode == "short") for one in params]
        return [Answer([sum(key) % 97] * count) for key, count in zip(keys, counts)]

    def reset_prefix_cache(self):
        self.cached.clear()
"""
WORK = Workload("one", [[5, 6, 7]], [4])


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module called vllm, which children of this process import."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "vllm.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    return tmp_path


def peer(mode: str = "good", timeout_s: float = 60.0) -> PeerProcess:
    load: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "options": {"mode": mode}}
    return PeerProcess("vllm", sys.executable, "somewhere", threads=1, timeout_s=timeout_s, **load)


def test_a_peer_in_its_own_process(stand_in: Path) -> None:
    """Oracle: the stand-in's tokens; one request has a time to the first token, several have none; the child ends."""
    engine = peer()
    try:
        one = engine.run(WORK)
        assert one.token_ids == [[18] * 4] and one.first_token_s is not None and one.total_s > 0
        two = engine.run(Workload("two", [[1], [2, 3]], [2, 1]))
        assert two.token_ids == [[1, 1], [5]] and two.first_token_s is None
    finally:
        engine.close()
    assert engine._process.returncode == 0


@pytest.mark.parametrize(
    ("mode", "told"),
    [
        ("refuses", "vllm: ValueError: no such model"),
        ("short", r"vllm generated \[3\] tokens; \[4\] were asked for"),
        ("dies", "ended with exit code 9; it said last: out of memory"),
    ],
)
def test_a_peer_that_fails(stand_in: Path, mode: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: an error with the child's output; the child is gone afterwards in every case."""
    engine = None
    with pytest.raises(RuntimeError, match=told):
        engine = peer(mode)
        engine.run(WORK)
    if engine is not None:
        engine.close()
        assert engine._process.returncode is not None
    assert mode == "short" or "hello from the import" in capsys.readouterr().err


def test_a_peer_that_hangs(stand_in: Path) -> None:
    """Oracle: the time limit, and the child's end."""
    engine = peer("hangs")
    engine._timeout_s = 0.5
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=r"vllm did not answer within 0\.5 s"):
        engine.run(WORK)
    engine.close()
    assert time.monotonic() - started < 50 and engine._process.returncode is not None


def test_peers_that_are_absent_are_told(tmp_path: Path, stand_in: Path) -> None:
    """Oracle: a reason that names the interpreter and the option; an installed module is found."""
    missing = find_peer("vllm", str(tmp_path / "python"))
    assert isinstance(missing, str) and "is no interpreter; give one with --peer-python vllm=PATH" in missing
    broken = find_peer("vllm", "/bin/false")
    assert isinstance(broken, str) and "it fails with exit code 1" in broken
    assert find_peer("vllm", sys.executable) == Found(python=sys.executable, version="")
    (stand_in / "packages" / "vllm.py").unlink()
    gone = find_peer("vllm", sys.executable)
    assert isinstance(gone, str) and gone.startswith(f"not installed for {sys.executable}: vllm; give another")


def test_the_child_gets_what_its_documentation_recommends(tmp_path: Path) -> None:
    """Oracle: a core per thread; libraries are preloaded only where they exist."""
    assert peer_environment("ctranslate2", sys.executable, 1)["OMP_NUM_THREADS"] == "1"
    bound = peer_environment("vllm", sys.executable, 2, num_ranks=2)["VLLM_CPU_OMP_THREADS_BIND"]
    assert bound == "|".join(map(str, sorted(os.sched_getaffinity(0))[:2]))
    python, system = tmp_path / "environment" / "bin" / "python", tmp_path / "system"
    assert faster_libraries(python, system) == []
    libraries = [system / "arch" / "libtcmalloc_minimal.so.4", tmp_path / "environment" / "lib" / "libiomp5.so"]
    for library in libraries:
        library.parent.mkdir(parents=True)
        library.touch()
    assert faster_libraries(python, system) == [str(library) for library in libraries]


def test_a_checkpoint_without_a_tokenizer_gets_one(tmp_path: Path) -> None:
    """Oracle: as many words as the vocabulary has ids, one for each id."""
    from tokenizers import Tokenizer

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 40}))
    link_with_tokenizer(tmp_path / "model", tmp_path / "linked")
    tokenizer = Tokenizer.from_file(str(tmp_path / "linked" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 40 and tokenizer.id_to_token(17) == "<17>"
    assert (tmp_path / "linked" / "config.json").is_symlink()


LLAMA_CPP = """
import ctypes


class Llama:
    def __init__(self, path, n_ctx, n_threads, n_threads_batch, verbose):
        assert open(path, "rb").read(4) == b"GGUF" and n_ctx == 64 and n_threads > 0 and not verbose
        self.kept = None

    def generate(self, tokens, top_k, temp):
        assert top_k == 1 and temp == 0 and self.kept != tokens, "the prompt's first run was not forgotten"
        self.kept = tokens
        while True:
            yield len(tokens)

    def reset(self):
        self.kept = None


LLAMA_FTYPE_MOSTLY_Q4_K_M = 15


class llama_model_quantize_params(ctypes.Structure):
    _fields_ = [("ftype", ctypes.c_int)]


llama_model_quantize_default_params = llama_model_quantize_params


def llama_model_quantize(source, target, params):
    if params._obj.ftype != 15:
        return 1
    with open(target, "wb") as file:
        file.write(open(source, "rb").read())
    return 0
"""
GGUF = """
from enum import IntEnum
from types import SimpleNamespace


class GGMLQuantizationType(IntEnum):
    F32 = 0
    BF16 = 30


class TokenType(IntEnum):
    NORMAL, UNKNOWN, CONTROL = 1, 2, 3


quants = SimpleNamespace(quantize=lambda values, kind: values)


class GGUFWriter:
    def __init__(self, path, kind):
        self.path, self.kind, self.tensors, self.facts = path, kind, [], {}

    def __getattr__(self, name):
        return lambda *values: self.facts.update({name: values})

    def add_tensor(self, name, values, raw_dtype=None):
        self.tensors.append(name)

    def write_tensors_to_file(self):
        assert self.kind == "llama" and self.facts["add_block_count"] == (1,)
        assert len(self.facts["add_token_list"][0]) == 8
        self.path.write_bytes(b"GGUF" + ",".join(self.tensors).encode())
"""


def tiny_llama(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of one layer; returns its weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=8, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def test_a_checkpoint_read_without_torch(tmp_path: Path) -> None:
    """Oracle: transformers' weights, in float32 and, to the bit, in bfloat16; every tensor has a name in GGUF."""
    weights = tiny_llama(tmp_path)
    found = dict(read_checkpoint(tmp_path))
    assert found.keys() == weights.keys()
    assert all(torch.equal(torch.from_numpy(values), weights[name]) for name, values in found.items())
    names = {gguf_name(name) for name in found}
    assert {"token_embd.weight", "output.weight", "output_norm.weight", "blk.0.attn_q.weight"} <= names
    assert len(names) == len(found)
    save_file({"x": weights["lm_head.weight"].bfloat16()}, tmp_path / "model.safetensors")
    ((_, halves),) = read_checkpoint(tmp_path)
    assert torch.equal(torch.from_numpy(halves), weights["lm_head.weight"].bfloat16().float())


def test_rows_of_a_head_change_places() -> None:
    """Oracle: the drawing in the module: the halves of each head are interleaved."""
    rows = np.arange(12, dtype=np.float32).reshape(12, 1)
    assert interleave(rows, 2).ravel().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.parametrize("further", [{}, {"quantization": "Q4_K_M"}])
def test_llama_cpp_gets_a_converted_checkpoint(stand_in: Path, further: dict[str, str]) -> None:
    """Oracle: stand-ins for llama_cpp and gguf: the file is written first, one request follows the other."""
    (stand_in / "packages" / "llama_cpp.py").write_text(LLAMA_CPP)
    (stand_in / "packages" / "gguf.py").write_text(GGUF)
    tiny_llama(stand_in / "model")
    assert isinstance(find_peer("llama.cpp", sys.executable), Found)
    load: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "options": {}} | further
    engine = PeerProcess("llama.cpp", sys.executable, str(stand_in / "model"), threads=1, timeout_s=60, **load)
    try:
        assert engine.run(WORK).token_ids == [[3] * 4]
        assert engine.run(Workload("two", [[1], [2, 3]], [2, 1])).token_ids == [[1, 1], [2]]
    finally:
        engine.close()


def test_a_run_with_a_peer(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: one JSON line with both engines, the ratio, the measured limit, and the engines that were left out."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = qwen3_config("qwen3-0.6b", "float32") | small | {"vocab_size": 300, "head_dim": 16, "eos_token_id": 2}
    (stand_in / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "num_key_value_heads": 2}))
    add_checkpoint(stand_in, "float32")
    arguments = [
        "--model",
        str(stand_in),
        "--workloads",
        "shared_prefix",
        "--rounds",
        "1",
        "--peer",
        "vllm",
        "llama.cpp",
    ]
    arguments += ["--peer-python", f"llama.cpp={stand_in}/nowhere"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    (result,) = report["workloads"]
    assert list(result["engines"]) == ["tp_engine TP 1", "vllm"] and list(result["speedup_over"]) == ["vllm"]
    assert result["equal_answers"] == {"vllm": 0.0} and report["matmul_tflops"] > 0
    assert result["engines"]["tp_engine TP 1"]["share_of_roofline"] > 0
    assert list(report["skipped"]) == ["llama.cpp"] and "llama.cpp left out: " in printed


def test_a_run_with_several_numbers_of_ranks(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the same tokens from one rank and from two, each in a process of its own; vLLM's ranks follow."""
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = qwen3_config("qwen3-0.6b", "float32") | small | {"vocab_size": 300, "head_dim": 16, "eos_token_id": 2}
    (stand_in / "config.json").write_text(json.dumps(config | {"bos_token_id": 1, "num_key_value_heads": 2}))
    arguments = ["--model", str(stand_in), "--workloads", "shared_prefix", "--rounds", "1", "--peer", "vllm"]
    arguments += ["--tensor-parallel-size", "1,2", "--engine-options", '{"load_format": "dummy"}']
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (result,) = report["workloads"]
    assert list(result["engines"]) == [f"{name} TP {size}" for name in ("tp_engine", "vllm") for size in (1, 2)]
    assert result["equal_answers"]["tp_engine TP 2"] == 1.0


def test_rate_of_matrix_products() -> None:
    """Oracle: the rate lies between the slowest and the fastest plausible machine's."""
    assert 1e8 < cpu_matmul_rate(torch.float32, size=64, repeats=2) < 1e15


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the documented defaults and pairs; the error for a senseless value states the rule."""
    assert parse_arguments([]).peer == ["transformers"] and parse_arguments(["--no-peer"]).peer == []
    args = parse_arguments(["--cells", "A:bfloat16,C:float32", "--peer", "vllm", "--peer-python", "vllm=/x/python"])
    assert args.cells == [("A", "bfloat16"), ("C", "float32")] and args.peer_python["vllm"] == "/x/python"
    assert args.peer_python["ctranslate2"] == sys.executable
    wrong = {
        ("--cells", "A"): "write SHAPE:DTYPE",
        ("--cells", "A:float32", "--model", "m"): "leave out --model and --shape",
        ("--peer", "vllm", "--no-peer"): "exclude each other",
        ("--peer-python", "vllm"): "'vllm' is not NAME=PATH with NAME one of vllm",
        (
            "--shape",
            "qwen3-8b",
            "--peer",
            "ctranslate2",
            "vllm",
        ): "no weights to load for ctranslate2; choose A, B or C",
        ("--shape", "qwen3-8b", "--peer", "vllm:awq"): "no weights to load for vllm:awq; choose A, B or C",
    }
    for arguments, told in wrong.items():
        with pytest.raises(SystemExit):
            parse_arguments(list(arguments))
        assert told in capsys.readouterr().err


def test_several_shapes_in_one_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: each cell's own shape and dtype, in order, in one JSON line; one failure fails the run."""
    import bench_offline

    def compare(args: argparse.Namespace, model: str) -> dict[str, object]:
        return {
            "shape": args.shape,
            "dtype": args.dtype,
            "model": model,
            "failures": {"x": "y"} if model == "B" else {},
        }

    monkeypatch.setattr(bench_offline, "compare", compare)
    monkeypatch.setattr(bench_offline, "make_folder", lambda folder, shape, dtype: shape)
    monkeypatch.setattr(bench_offline, "print_table", lambda report: None)
    assert main(["--cells", "A:bfloat16,C:float32"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(cell["shape"], cell["dtype"], cell["model"]) for cell in report["cells"]] == [
        ("A", "bfloat16", "A"),
        ("C", "float32", "C"),
    ]
    assert main(["--cells", "C:float32,B:float32"]) == 1
    assert main(["--shape", "C"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["shape"] == "C"
