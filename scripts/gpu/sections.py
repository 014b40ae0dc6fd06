"""The sections of scripts/gpu_check: commands that also work by hand, each with its own time limit."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from dataclasses import dataclass

_PYTEST = "-m pytest -q -p no:cacheprovider"
_WORKERS = 8  # the most: the kernels' tests mainly compile, and engines share the GPU's memory
_ENGINE_TESTS = "tests/gpu/test_engine_gpu.py"
_CODEC_TESTS = "tests/gpu/test_codecs_gpu.py"
_CORE = ("torch", "transformers", "safetensors", "msgspec", "zmq", "xxhash")
_TESTS = (*_CORE, "pytest", "psutil", "triton")
_SERVER = (*_CORE, "fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2")
GPU_PEERS = ("vllm", "nano-vllm")


@dataclass(frozen=True, kw_only=True)
class Section:
    """``command`` follows the interpreter; ``modules`` must be importable.  ``needs`` is what the command line must
    name and does not; the section is then skipped."""

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: float
    modules: tuple[str, ...] = ()
    min_gpus: int = 1
    needs: str = ""

    def argv(self) -> list[str]:
        """The whole command line."""
        return [sys.executable, *self.command]


def all_sections(args: argparse.Namespace) -> list[Section]:
    """All sections, in the order in which they run."""
    given = [pair.partition("=")[0] for pair in args.peer_python] + ["nano-vllm"] * bool(args.nano_vllm_path)
    peers = shlex.join(
        [
            *("--peer", *(dict.fromkeys(given) or GPU_PEERS)),
            *(part for pair in args.peer_python for part in ("--peer-python", pair)),
            *(("--nano-vllm-path", args.nano_vllm_path) if args.nano_vllm_path else ()),
        ]
    )
    needs = "" if given else "--peer-python vllm=PATH or --nano-vllm-path PATH"
    return [
        Section(
            name=name,
            limit_s=limit_s,
            what=what,
            command=tuple(shlex.split(command.format(peers=peers))),
            modules=_SERVER if "bench_serve" in command else _TESTS if "pytest" in command else _CORE,
            min_gpus=2 if "torch.distributed.run" in command else 1,
            needs=needs if "{peers}" in command else "",
        )
        for name, limit_s, what, command in _SECTIONS
    ]


def _pytest(arguments: str, most: int = _WORKERS) -> str:
    """Tests in several processes, two cores for each and at most so many, if pytest-xdist is installed."""
    processes = max(1, min(most, len(os.sched_getaffinity(0)) // 2))
    side_by_side = "" if importlib.util.find_spec("xdist") is None else f"-n {processes} "
    return f"{_PYTEST} {side_by_side}{arguments}"


def _engine(tests: str) -> str:
    """The engine's tests that the expression ``tests`` selects."""
    return _pytest(f"{_ENGINE_TESTS} -k '{tests}'", _WORKERS // 2)


def _offline(size: str, arguments: str) -> str:
    return f"scripts/bench_offline.py --shape qwen3-{size} {arguments}"


def _serve(server_args: str = "") -> str:
    """The 0.6B shape over HTTP, with more arguments for the server."""
    return (
        "scripts/bench_serve.py --shape qwen3-0.6b --request-rate 8,32,inf --num-prompts 200 --input-len 512 "
        "--output-len 128 --random-range-ratio 0.5 --goodput ttft:500 tpot:50 "
        f"--server-args '--max-model-len 2048{server_args}'"
    )


_PEERS = "--together --rounds 3 --workloads {} {{peers}}"
_QUANTISED = "--rounds 1 --no-peer --quantization none,fp8,int4 --workloads latency,batch32,batch256"
_STEPS = "scripts/bench_steps.py --shape qwen3-{} --batch-size 256 --context-len 512"
_PROMPTS = "scripts/bench_steps.py --shape qwen3-{} --prompts 'none;auto' --batch-size 32 --context-len 128 --steps 50"
_KERNELS = "scripts/bench_kernels.py"
_RECORDED = " --cudagraph-prefill-capture-sizes auto --served-model-name prompts-recorded"

_SECTIONS = (
    # name, its limit in seconds, what it is, what follows the interpreter
    ("environment", 60, "GPUs, driver, versions, missing packages", "scripts/gpu/environment.py"),
    (
        "kernels", 420, "tests/gpu without the engine: kernels and backends against their twins, captured too",
        _pytest(f"tests/gpu --ignore={_ENGINE_TESTS} --ignore={_CODEC_TESTS}"),
    ),
    ("codecs", 240, "blocks through the host tier's codecs, on a stream and back", _pytest(_CODEC_TESTS)),
    (
        "engine", 240, "the engine against transformers, preempted, twice",
        _engine("not (recorded or ranks_on_one_gpu or latent or prompt_graphs)"),
    ),
    ("graphs", 420, "recorded steps give the tokens of eager ones", _engine("recorded and not latent")),
    ("prompt_graphs", 240, "recorded steps with prompts give the tokens of launched ones", _engine("prompt_graphs")),
    ("latents", 240, "latent attention, recorded and eager, gives the tokens of a CPU", _engine("latent")),
    ("ranks", 240, "2 and 4 ranks on one GPU give the tokens of one", _engine("ranks_on_one_gpu_give")),
    (
        "ranks_recorded", 420, "the same with decodes recorded over symmetric memory",
        _engine("ranks_on_one_gpu_record"),
    ),
    (
        "multi_gpu", 420, "tests/multi_gpu on all GPUs",
        f"-m torch.distributed.run --standalone --nproc-per-node gpu {_PYTEST} tests/multi_gpu",
    ),
    ("bench_kernels", 420, "kernels of the 8B shape", f"{_KERNELS} --shape qwen3-8b"),
    (
        "prompt_attention", 240, "attention of prompts, 8B shape",
        f"{_KERNELS} --only 'prefill attention' --batch 1 --prefill 1024,1280,2048,8192,32768",
    ),
    (
        "bench_latents", 240, "decode attention of DeepSeek-V3 on 1 and 8 ranks",
        f"{_KERNELS} --only latent --batch 1,32,256 --length 1024,8192",
    ),
    (
        "offline_latents", 300, "batch 1 and 256 requests, a small DeepSeek-like shape",
        "scripts/bench_offline.py --shape D --rounds 1 --no-peer",
    ),
    ("offline_0.6b", 240, "batch 1 and 256 requests, 0.6B shape", _offline("0.6b", "--rounds 2 --no-peer")),
    ("steps_0.6b", 180, "gaps between decode steps, 0.6B shape", _STEPS.format("0.6b")),
    ("offline_8b", 240, "batch 1 and 256 requests, 8B shape", _offline("8b", "--rounds 1 --no-peer")),
    ("steps_8b", 180, "gaps between decode steps, 8B shape", _STEPS.format("8b")),
    ("serve_0.6b", 240, "HTTP at three rates, 0.6B shape", _serve()),
    ("prompts_0.6b", 300, "prompts of 128 tokens, launched and recorded, 0.6B shape", _PROMPTS.format("0.6b")),
    ("prompts_8b", 300, "prompts of 128 tokens, launched and recorded, 8B shape", _PROMPTS.format("8b")),
    ("serve_prompts", 240, "the same with CUDA graphs of steps with prompts", _serve(_RECORDED)),
    ("peers_0.6b", 420, "batch 1 and 256 requests, 0.6B shape beside transformers", _offline("0.6b", "--rounds 1")),
    (
        "peers_gpu_0.6b", 540, "in turns with vLLM and nano-vllm, 0.6B shape",
        _offline("0.6b", _PEERS.format("latency,batch32,batch256")),
    ),
    (
        "peers_gpu_8b", 590, "in turns with vLLM and nano-vllm, 8B shape",
        _offline("8b", _PEERS.format("latency,batch32")),
    ),
    ("offline_14b", 300, "batch 1 and 256 requests, 14B shape", _offline("14b", "--rounds 1 --no-peer")),
    ("offline_30b-a3b", 420, "batch 1 and 256 requests, 30B-A3B shape", _offline("30b-a3b", "--rounds 1 --no-peer")),
    ("quantised_8b", 560, "fp8 and int4 weights beside bfloat16, 8B shape", _offline("8b", _QUANTISED)),
    (
        "quantised_tiles", 560, "tiles for few rows with quantised weights, 8B shape",
        f"{_KERNELS} --tiles quantised --batch 16,64,256 --weights 'int4, group 128' 'fp8 per row' mxfp4",
    ),
    (
        "experts_mxfp4", 420, "tiles of experts of gpt-oss-20b as released",
        f"{_KERNELS} --tiles experts --experts gpt-oss-20b --weights mxfp4 --batch 1,32,256,2048",
    ),
    (
        "experts", 420, "tiles of experts beside torch._grouped_mm",
        f"{_KERNELS} --tiles experts --weights none --batch 1,8,32,128,256,2048",
    ),
    ("offline_32b", 420, "batch 1 and 256 requests, 32B shape", _offline("32b", "--rounds 1 --no-peer")),
    ("quantised_32b", 600, "fp8 and int4 weights beside bfloat16, 32B shape", _offline("32b", _QUANTISED)),
    (
        "ranks_0.6b", 300, "1, 2 and 4 ranks on one GPU, 0.6B shape",
        _offline(
            "0.6b", "--rounds 1 --no-peer --workloads latency --tensor-parallel-size 1,2,4 --device-ids 0,0,0,0"
        ),
    ),
)  # fmt: skip
