"""The sections of scripts/gpu_check: commands that also work by hand, each with its own time limit.

Each plan is a call of at most ``PLAN_S`` seconds; ``PLANS`` says what it answers.  The first one already says whether
all is right and how fast a rank is, because a machine may be available for a single call.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_PYTEST = "-m pytest -q -p no:cacheprovider"
_WORKERS = 8  # the most: the kernels' tests mainly compile, and engines share the GPU's memory
_ENGINE_TESTS = "tests/gpu/test_engine_gpu.py"
_CANDIDATE_TESTS = "tests/gpu/test_candidates_gpu.py"
_CODEC_TESTS = "tests/gpu/test_codecs_gpu.py"
_CORE = ("torch", "transformers", "safetensors", "msgspec", "zmq", "xxhash")
_TESTS = (*_CORE, "pytest", "psutil", "triton")
_SERVER = (*_CORE, "fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2")
GPU_PEERS = ("vllm", "nano-vllm")
PLANS = {
    1: "is it right, and how fast is a rank: kernels, engine, memory accesses, slices of large models",
    2: "how fast: 0.6B and 8B, beside the peers that are given",
    3: "contexts, candidates of kernels, ranks on one GPU, a killed rank, 32B, quantised 8B",
}
PLAN_S = 560
AGAIN_S = 200
_REHEARSAL_S = 3600  # a section's limit on a fake GPU, where all is slower


@dataclass(frozen=True, kw_only=True)
class Section:
    """``command`` follows the interpreter, and that follows ``prefix``, a program that runs it; ``modules`` must be
    importable.  ``plan`` 0: in none.

    A section ``beside`` runs while the next ones do, but for those that must be ``alone``, which measure.
    """

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: float
    prefix: tuple[str, ...] = ()
    plan: int = 0
    modules: tuple[str, ...] = ()
    min_gpus: int = 1
    beside: bool = False
    alone: bool = False

    def argv(self) -> list[str]:
        """The whole command line."""
        return [*self.prefix, sys.executable, *self.command]


def all_sections(args: argparse.Namespace) -> list[Section]:
    """All sections, in the order in which they run."""
    given = [pair.partition("=")[0] for pair in args.peer_python] + ["nano-vllm"] * bool(args.nano_vllm_path)
    peers = (
        ["--together", "--rounds", "2", "--peer", *dict.fromkeys(given)] if given else ["--no-peer", "--rounds", "1"]
    )
    peers += [part for pair in args.peer_python for part in ("--peer-python", pair)]
    peers += ["--nano-vllm-path", args.nano_vllm_path] if args.nano_vllm_path else []
    return [
        Section(
            name=name,
            plan=plan,
            limit_s=_REHEARSAL_S if args.rehearse else limit_s,
            what=what,
            command=(*shlex.split(command.format(peers=shlex.join(peers))), *_rehearsal(name, command, args)),
            prefix=_MEMCHECK if name == "memory" else (),
            modules=_modules(command),
            min_gpus=2 if "torch.distributed.run" in command else 1,
            beside=command == _COMPILE,
            alone=command.startswith(_SLICES) and command != _COMPILE,
        )
        for name, plan, limit_s, what, command in _SECTIONS
    ]


def _rehearsal(name: str, command: str, args: argparse.Namespace) -> list[str]:
    if not args.rehearse:
        return []
    return ["--rehearse"] if command.startswith(_SLICES) else shlex.split(_REHEARSALS.get(name, ""))


def again(sections: Sequence[Section], failed: Mapping[str, Sequence[str]]) -> list[Section]:
    """Those of ``sections`` that have failed or not run, except those that only compile; of tests only the failed
    ones, if any are known, with the first failure in full.  They share the time equally."""
    chosen = [one for one in sections if one.name in failed and not one.beside]
    whole = [replace(one, limit_s=AGAIN_S / len(chosen)) for one in chosen]
    return [
        one
        if not failed[one.name]
        else replace(
            one,
            what="tests that failed, again",
            command=(*shlex.split(_PYTEST), "-x", "--tb=long", *failed[one.name]),
        )
        for one in whole
    ]


def _modules(command: str) -> tuple[str, ...]:
    if "bench serve" in command:
        return _SERVER
    if command.startswith("scripts/gpu/environment") or command.endswith("nccl"):
        return ("torch",)
    return _TESTS if "pytest" in command else _CORE


def _pytest(arguments: str, most: int = _WORKERS) -> str:
    """Tests in several processes, with two cores each and at most ``most``, if pytest-xdist is installed."""
    processes = max(1, min(most, len(os.sched_getaffinity(0)) // 2))
    side_by_side = "" if importlib.util.find_spec("xdist") is None else f"-n {processes} "
    return f"{_PYTEST} {side_by_side}{arguments}"


def _engine(tests: str) -> str:
    """The engine's tests that the expression ``tests`` selects."""
    return _pytest(f"{_ENGINE_TESTS} -k '{tests}'", _WORKERS // 2)


def _offline(size: str, arguments: str) -> str:
    return f"-m tp_engine bench offline --shape qwen3-{size} {arguments}"


def _serve(server_args: str = "") -> str:
    """The 0.6B shape over HTTP, with more arguments for the server."""
    return (
        "-m tp_engine bench serve --shape qwen3-0.6b --request-rate 8,32,inf --num-prompts 200 --input-len 512 "
        "--output-len 128 --random-range-ratio 0.5 --goodput ttft:500 tpot:50 "
        f"--server-args '--max-model-len 2048{server_args}'"
    )


_QUANTISED = "--rounds 1 --no-peer --quantization none,fp8,int4 --workloads"
_STEPS = "-m tp_engine bench offline --shape qwen3-{} --steps 256x512"
_PROMPTS = "-m tp_engine bench offline --shape qwen3-{} --steps 32x128 --prefill-graphs 'none;auto' --num-steps 50"
_KERNELS = "scripts/bench_kernels.py"
_SLICES = "scripts/gpu/slices.py"
_COMPILE = f"{_SLICES} --compile"
_MEMCHECK = ("compute-sanitizer", "--tool", "memcheck", "--print-limit", "5", "--error-exitcode", "9")
# All of tests/gpu but for whole engines, backends of attention, and codecs: a new file is among them.
_ELSEWHERE = ("engine", "candidates", "speculation", "attention", "codecs")
_NEW_KERNELS = " ".join(["tests/gpu", *(f"--ignore=tests/gpu/test_{name}_gpu.py" for name in _ELSEWHERE)])
_DECODES = "decode and (paged_attention or cuda_graph) and not flash_attn"
# Further arguments of plan 1's sections in a rehearsal on a fake GPU.  Engines of these sizes take hours in Triton's
# interpreter; the jobs of tests/fake_cuda are engines of each kind.  A library's products of 8-bit floats are replaced
# there by the CPU's, which rounds otherwise, as its logarithm does, and what keeps a GPU busy keeps a CPU busy for ten
# minutes.
_REHEARSALS = {
    "new_kernels": "-k 'not (scaled_product or gpu_is_busy or sampling-noise)'",
    "each_kind": "-k 'other_kernels or sum_with_a_norm'",
    "memory": "-k 'decode and paged_attention'",
}
_RECORDED = " --cudagraph-prefill-capture-sizes auto --served-model-name prompts-recorded"

_SECTIONS = (
    # name, its plan, its limit in seconds, what it is, what follows the interpreter
    ("environment", 1, 15, "GPUs, driver, versions, missing packages", "scripts/gpu/environment.py"),
    ("compile", 1, 270, "beside the tests: what the slices will launch is compiled", _COMPILE),
    (
        "new_kernels", 1, 155, "kernels against their twins, captured too",
        _pytest(f"--maxfail=12 {_NEW_KERNELS}", 11),
    ),
    (
        "each_kind", 1, 125, "an engine of each kind: recorded = eager, other kernels, 2 ranks on one GPU",
        _pytest(f"{_ENGINE_TESTS} {_CANDIDATE_TESTS} -m 'not later'", _WORKERS // 2),
    ),
    (
        "memory", 1, 45, "memory accesses of decode attention",
        f"{_PYTEST} --maxfail=2 tests/gpu/test_attention_gpu.py tests/gpu/test_kernels_gpu.py -k '{_DECODES}'",
    ),
    ("llama-70b_1", 1, 40, "a rank of 8 of Llama-70B, 1 row", f"{_SLICES} llama-70b-tp8"),
    ("gpt-oss-120b_1", 1, 40, "a rank of 4 of gpt-oss-120b, 1 row", f"{_SLICES} gpt-oss-120b-tp4"),
    ("deepseek-v3_1", 1, 40, "a rank of 8 of DeepSeek-V3, 16 layers, 1 row", f"{_SLICES} deepseek-v3-tp8"),
    ("qwen3.5-35b_1", 1, 40, "a rank of 2 of Qwen3.5-35B, 1 row", f"{_SLICES} qwen3.5-35b-a3b-tp2"),
    ("qwen3-235b_64", 1, 40, "a rank of 8 of Qwen3-235B, 64 rows", f"{_SLICES} qwen3-235b-tp8"),
    (
        "figures_0.6b", 2, 250, "batch 1, 32 and 256 requests, 0.6B shape, beside the peers that are given",
        _offline("0.6b", "--workloads latency,batch32,batch256 {peers}"),
    ),
    (
        "figures_8b", 2, 310, "batch 1 and 32 requests, 8B shape, beside the peers that are given",
        _offline("8b", "--workloads latency,batch32 {peers}"),
    ),
    ("start", 3, 100, "contexts per GPU; a start with empty and full kernel caches", "scripts/gpu/probes.py start"),
    ("tune", 3, 40, "candidates of a rank of DeepSeek-V3, proven and timed", f"{_SLICES} deepseek-v3-tp8 --tune"),
    (
        "ranks", 3, 120, "2 and 4 ranks on one GPU give the tokens of one, launched and recorded",
        _engine("ranks_on_one_gpu"),
    ),
    ("kill", 3, 50, "symmetric memory: a killed rank ends the call of the others", "scripts/gpu/probes.py kill"),
    ("offline_32b", 3, 120, "batch 1, 32B shape", _offline("32b", "--rounds 1 --no-peer --workloads latency")),
    (
        "quantised_8b", 3, 130, "fp8 and int4 weights beside bfloat16, 8B shape",
        _offline("8b", f"{_QUANTISED} latency"),
    ),
    (
        "engine", 0, 240, "tokens of transformers; recorded steps give those of eager ones; preempted, twice",
        _engine("not (ranks_on_one_gpu or latent or prompt_graphs)"),
    ),
    (
        "prompt_graphs", 0, 120, "recorded steps with prompts give the tokens of launched ones",
        _engine("prompt_graphs"),
    ),
    (
        "kernels", 0, 420, "tests/gpu without the engine: kernels and backends against their twins, captured too",
        _pytest(f"tests/gpu --ignore={_ENGINE_TESTS} --ignore={_CANDIDATE_TESTS} --ignore={_CODEC_TESTS}"),
    ),
    ("nccl", 0, 40, "one rank: replayed 10,000 times, aborted while a graph runs", "scripts/gpu/probes.py nccl"),
    ("codecs", 0, 240, "blocks through the host tier's codecs, on a stream and back", _pytest(_CODEC_TESTS)),
    ("latents", 0, 240, "latent attention, recorded and eager, gives the tokens of a CPU", _engine("latent")),
    (
        "multi_gpu", 0, 420, "tests/multi_gpu on all GPUs",
        f"-m torch.distributed.run --standalone --nproc-per-node gpu {_PYTEST} tests/multi_gpu",
    ),
    ("bench_kernels", 0, 420, "kernels of the 8B shape", f"{_KERNELS} --shape qwen3-8b"),
    (
        "prompt_attention", 0, 240, "attention of prompts, 8B shape",
        f"{_KERNELS} --only 'prefill attention' --batch 1 --prefill 1024,1280,2048,8192,32768",
    ),
    (
        "bench_latents", 0, 300, "decode attention of DeepSeek-V3 and V3.2 on 1 and 8 ranks",
        f"{_KERNELS} --only latent --batch 1,32,256 --length 1024,8192,32768",
    ),
    ("steps_0.6b", 0, 180, "gaps between decode steps, 0.6B shape", _STEPS.format("0.6b")),
    ("steps_8b", 0, 180, "gaps between decode steps, 8B shape", _STEPS.format("8b")),
    ("serve_0.6b", 0, 240, "HTTP at three rates, 0.6B shape", _serve()),
    ("prompts_0.6b", 0, 300, "prompts of 128 tokens, launched and recorded, 0.6B shape", _PROMPTS.format("0.6b")),
    ("prompts_8b", 0, 300, "prompts of 128 tokens, launched and recorded, 8B shape", _PROMPTS.format("8b")),
    ("serve_prompts", 0, 240, "the same with CUDA graphs of steps with prompts", _serve(_RECORDED)),
    ("offline_14b", 0, 300, "batch 1 and 256 requests, 14B shape", _offline("14b", "--rounds 1 --no-peer")),
    (
        "offline_30b-a3b", 0, 420, "batch 1 and 256 requests, 30B-A3B shape",
        _offline("30b-a3b", "--rounds 1 --no-peer"),
    ),
    (
        "quantised_tiles", 0, 560, "tiles for few rows with quantised weights, 8B shape",
        f"{_KERNELS} --tiles quantised --batch 16,64,256 --weights 'int4, group 128' 'fp8 per row' mxfp4",
    ),
    (
        "experts_mxfp4", 0, 420, "tiles of experts of gpt-oss-20b as released",
        f"{_KERNELS} --tiles experts --experts gpt-oss-20b --weights mxfp4 --batch 1,32,256,2048",
    ),
    (
        "experts", 0, 420, "tiles of experts beside torch._grouped_mm",
        f"{_KERNELS} --tiles experts --weights none --batch 1,8,32,128,256,2048",
    ),
    (
        "quantised_32b", 0, 600, "fp8 and int4 weights beside bfloat16, 32B shape",
        _offline("32b", f"{_QUANTISED} latency"),
    ),
)  # fmt: skip
