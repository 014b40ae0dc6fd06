"""The sections of scripts/gpu_check: commands that also work by hand, each with its own time limit."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from dataclasses import dataclass

_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
_WORKERS = 8  # the most: the kernels' tests mainly compile, and engines share the GPU's memory
_ENGINE_TESTS = "tests/gpu/test_engine_gpu.py"
_CODEC_TESTS = "tests/gpu/test_codecs_gpu.py"
_CORE = ("torch", "transformers", "safetensors", "msgspec", "zmq", "xxhash")
_TESTS = (*_CORE, "pytest", "psutil")
_SERVER = (*_CORE, "fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2")
GPU_PEERS = ("vllm", "nano-vllm")


@dataclass(frozen=True, kw_only=True)
class Section:
    """``command`` follows the interpreter; ``modules`` must be importable.

    ``needs`` is what the command line must name and does not; the section is then skipped.
    """

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
    benchmarks = list(_BENCHMARKS)
    place = next(number for number, one in enumerate(benchmarks) if one.name == "offline_14b")
    benchmarks[place:place] = [
        _gpu_peers(args, "0.6b", 540, "latency,batch32,batch256"),
        _gpu_peers(args, "8b", 590, "latency,batch32"),
    ]
    return [*_checks(), *benchmarks]


def _checks() -> list[Section]:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "gpu")
    return [
        Section(
            name="environment",
            what="GPUs, driver, versions, missing packages",
            command=("scripts/gpu/environment.py",),
            limit_s=60,
        ),
        Section(
            name="kernels",
            what="tests/gpu without the engine: kernels and backends against their twins, captured too",
            command=(
                *(*_PYTEST, *_side_by_side(_WORKERS), "tests/gpu"),
                *(f"--ignore={tests}" for tests in (_ENGINE_TESTS, _CODEC_TESTS)),
            ),
            limit_s=420,
            modules=(*_TESTS, "triton"),
        ),
        Section(
            name="codecs",
            what="blocks through the host tier's codecs, on a stream and back",
            command=(*_PYTEST, *_side_by_side(_WORKERS), _CODEC_TESTS),
            limit_s=240,
            modules=(*_TESTS, "triton"),
        ),
        _engine(
            "engine",
            "the engine against transformers, preempted, twice",
            "not (recorded or ranks_on_one_gpu or latent or prompt_graphs)",
        ),
        _engine("graphs", "recorded steps give the tokens of eager ones", "recorded and not latent", limit_s=420),
        _engine("prompt_graphs", "recorded steps with prompts give the tokens of launched ones", "prompt_graphs"),
        _engine("latents", "latent attention, recorded and eager, gives the tokens of a CPU", "latent"),
        _engine("ranks", "2 and 4 ranks on one GPU give the tokens of one", "ranks_on_one_gpu_give"),
        _engine(
            "ranks_recorded",
            "the same with decodes recorded over symmetric memory",
            "ranks_on_one_gpu_record",
            limit_s=420,
        ),
        Section(
            name="multi_gpu",
            what="tests/multi_gpu on all GPUs",
            command=(*torchrun, *_PYTEST, "tests/multi_gpu"),
            limit_s=420,
            modules=(*_TESTS, *_SERVER, "httpx"),
            min_gpus=2,
        ),
    ]


def _engine(name: str, what: str, tests: str, *, limit_s: float = 240) -> Section:
    """A section of the engine's tests that the expression ``tests`` selects."""
    command = (*_PYTEST, *_side_by_side(_WORKERS // 2), _ENGINE_TESTS, "-k", tests)
    return Section(name=name, what=what, command=command, limit_s=limit_s, modules=_TESTS)


def _side_by_side(most: int) -> tuple[str, ...]:
    """Options that run tests in several processes, two cores for each, if pytest-xdist is installed."""
    if importlib.util.find_spec("xdist") is None:
        return ()
    return ("-n", str(max(1, min(most, len(os.sched_getaffinity(0)) // 2))))


def _gpu_peers(args: argparse.Namespace, size: str, limit_s: float, workloads: str) -> Section:
    """The shape beside the peers that the command line names, taking turns on one GPU."""
    given = [pair.partition("=")[0] for pair in args.peer_python] + ["nano-vllm"] * bool(args.nano_vllm_path)
    return Section(
        name=f"peers_gpu_{size}",
        what=f"{workloads} in turns with vLLM and nano-vllm, {size.upper()} shape",
        command=(
            "scripts/bench_offline.py",
            *("--shape", f"qwen3-{size}", "--together", "--rounds", "3", "--workloads", workloads),
            *("--peer", *(dict.fromkeys(given) or GPU_PEERS)),
            *(part for pair in args.peer_python for part in ("--peer-python", pair)),
            *(("--nano-vllm-path", args.nano_vllm_path) if args.nano_vllm_path else ()),
        ),
        limit_s=limit_s,
        modules=_CORE,
        needs="" if given else "--peer-python vllm=PATH or --nano-vllm-path PATH",
    )


def _bench(name: str, limit_s: float, what: str, command: str, modules: tuple[str, ...] = _CORE) -> Section:
    """A script of scripts/ with its arguments, quoted as in a shell."""
    script, *arguments = shlex.split(command)
    command_line = (f"scripts/{script}.py", *arguments)
    return Section(name=name, what=what, command=command_line, limit_s=limit_s, modules=modules)


def _offline(name: str, limit_s: float, arguments: str) -> Section:
    size = name.partition("_")[2]
    peers = " beside transformers" if name.startswith("peers") else ""
    what = f"batch 1 and 256 requests, {size.upper()} shape{peers}"
    return _bench(name, limit_s, what, f"bench_offline --shape qwen3-{size} {arguments}")


def _quantised(size: str, limit_s: float) -> Section:
    return _bench(
        f"quantised_{size}",
        limit_s,
        f"fp8 and int4 weights beside bfloat16 at batch 1, 32 and 256, {size.upper()} shape",
        f"bench_offline --shape qwen3-{size} --rounds 1 --no-peer --quantization none,fp8,int4 "
        "--workloads latency,batch32,batch256",
    )


def _steps(size: str) -> Section:
    what = f"gaps between decode steps, {size.upper()} shape"
    return _bench(f"steps_{size}", 180, what, f"bench_steps --shape qwen3-{size} --batch-size 256 --context-len 512")


def _prompts(size: str) -> Section:
    return _bench(
        f"prompts_{size}",
        300,
        f"prompts of 128 tokens, launched and recorded, {size.upper()} shape",
        f"bench_steps --shape qwen3-{size} --prompts 'none;auto' --batch-size 32 --context-len 128 --steps 50",
    )


def _serve(name: str, what: str, server_args: str = "") -> Section:
    """The 0.6B shape over HTTP, with more arguments for the server."""
    return _bench(
        name,
        240,
        what,
        "bench_serve --shape qwen3-0.6b --request-rate 8,32,inf --num-prompts 200 --input-len 512 --output-len 128 "
        f"--random-range-ratio 0.5 --goodput ttft:500 tpot:50 --server-args '--max-model-len 2048{server_args}'",
        _SERVER,
    )


_BENCHMARKS = (
    _bench("bench_kernels", 420, "kernels of the 8B shape", "bench_kernels --shape qwen3-8b"),
    _bench(
        "prompt_attention",
        240,
        "attention of prompts, 8B shape: our kernel beside cuDNN, and cuDNN's plans",
        "bench_kernels --only 'prefill attention' --batch 1 --prefill 1024,1280,2048,8192,32768",
    ),
    _bench(
        "bench_latents",
        240,
        "decode attention of DeepSeek-V3 on 1 and 8 ranks",
        "bench_kernels --only latent --batch 1,32,256 --length 1024,8192",
    ),
    _bench(
        "offline_latents",
        300,
        "batch 1 and 256 requests, a small DeepSeek-like shape",
        "bench_offline --shape D --rounds 1 --no-peer",
    ),
    _offline("offline_0.6b", 240, "--rounds 2 --no-peer"),
    _steps("0.6b"),
    _offline("offline_8b", 240, "--rounds 1 --no-peer"),
    _steps("8b"),
    _serve("serve_0.6b", "HTTP at three rates, 0.6B shape"),
    _prompts("0.6b"),
    _prompts("8b"),
    _serve(
        "serve_prompts",
        "the same with CUDA graphs of steps with prompts",
        " --cudagraph-prefill-capture-sizes auto --served-model-name prompts-recorded",
    ),
    _offline("peers_0.6b", 420, "--rounds 1"),
    _offline("offline_14b", 300, "--rounds 1 --no-peer"),
    _offline("offline_30b-a3b", 420, "--rounds 1 --no-peer"),
    _quantised("8b", 560),
    _bench(
        "quantised_tiles",
        560,
        "tiles for few rows with quantised weights, 8B shape",
        "bench_kernels --tiles quantised --batch 16,64,256 --weights 'int4, group 128' 'fp8 per row' mxfp4",
    ),
    _bench(
        "experts_mxfp4",
        420,
        "tiles of experts of gpt-oss-20b as released",
        "bench_kernels --tiles experts --experts gpt-oss-20b --weights mxfp4 --batch 1,32,256,2048",
    ),
    _bench(
        "experts",
        420,
        "tiles of experts beside torch._grouped_mm",
        "bench_kernels --tiles experts --weights none --batch 1,8,32,128,256,2048",
    ),
    _offline("offline_32b", 420, "--rounds 1 --no-peer"),
    _quantised("32b", 600),
    _bench(
        "ranks_0.6b",
        300,
        "1, 2 and 4 ranks on one GPU, 0.6B shape",
        "bench_offline --shape qwen3-0.6b --rounds 1 --no-peer --workloads latency "
        "--tensor-parallel-size 1,2,4 --devices 0,0,0,0",
    ),
)
