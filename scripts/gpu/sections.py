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
    """``command`` follows the interpreter; ``modules`` must be importable; ``option`` must be an engine option.

    ``needs`` is what the command line must name and does not; the section is then skipped.  ``variables`` of the
    environment are NAME=VALUE.
    """

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: float
    modules: tuple[str, ...] = ()
    option: str | None = None
    min_gpus: int = 1
    needs: str = ""
    variables: tuple[str, ...] = ()

    def argv(self) -> list[str]:
        """The whole command line."""
        return [*(("env", *self.variables) if self.variables else ()), sys.executable, *self.command]


def all_sections(args: argparse.Namespace) -> list[Section]:
    """All sections, in the order in which they run."""
    return [*_checks(), *_benchmarks(args)]


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
        _engine("ranks", "2 and 4 ranks on one GPU give the tokens of one", "ranks_on_one_gpu_give", option="devices"),
        _engine(
            "ranks_recorded",
            "the same with decodes recorded over symmetric memory",
            "ranks_on_one_gpu_record",
            limit_s=420,
            option="devices",
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


def _engine(name: str, what: str, tests: str, *, limit_s: float = 240, option: str | None = None) -> Section:
    """A section of the engine's tests that the expression ``tests`` selects."""
    command = (*_PYTEST, *_side_by_side(_WORKERS // 2), _ENGINE_TESTS, "-k", tests)
    return Section(name=name, what=what, command=command, limit_s=limit_s, modules=_TESTS, option=option)


def _side_by_side(most: int) -> tuple[str, ...]:
    """Options that run tests in several processes, two cores for each, if pytest-xdist is installed."""
    if importlib.util.find_spec("xdist") is None:
        return ()
    return ("-n", str(max(1, min(most, len(os.sched_getaffinity(0)) // 2))))


def _benchmarks(args: argparse.Namespace) -> list[Section]:
    offline = "scripts/bench_offline.py"
    return [
        _bench("bench_kernels", "kernels of the 8B shape", 420, "scripts/bench_kernels.py", "--shape", "qwen3-8b"),
        _bench(
            "prompt_attention",
            "attention of prompts, 8B shape: our kernel beside cuDNN, and cuDNN's plans",
            240,
            "scripts/bench_kernels.py",
            *("--only", "prefill attention", "--batch", "1", "--prefill", "1024,1280,2048,8192,32768"),
        ),
        _bench(
            "bench_latents",
            "decode attention of DeepSeek-V3 on 1 and 8 ranks",
            240,
            "scripts/bench_kernels.py",
            *("--only", "latent", "--batch", "1,32,256", "--length", "1024,8192"),
        ),
        _bench(
            "offline_latents",
            "batch 1 and 256 requests, a small DeepSeek-like shape",
            300,
            "scripts/bench_offline.py",
            *("--shape", "D", "--rounds", "1", "--no-peer"),
        ),
        _offline("offline_0.6b", 240, "--shape", "qwen3-0.6b", "--rounds", "2", "--no-peer"),
        _steps("steps_0.6b", "--shape", "qwen3-0.6b", "--batch-size", "256", "--context-len", "512"),
        _offline("offline_8b", 240, "--shape", "qwen3-8b", "--rounds", "1", "--no-peer"),
        _steps("steps_8b", "--shape", "qwen3-8b", "--batch-size", "256", "--context-len", "512"),
        _serve("serve_0.6b", "HTTP at three rates, 0.6B shape"),
        _prompts("prompts_0.6b"),
        _prompts("prompts_8b"),
        _serve(
            "serve_prompts",
            "the same with CUDA graphs of steps with prompts",
            *("--cuda-graph-prefill-sizes", "auto", "--served-model-name", "prompts-recorded"),
        ),
        _offline("peers_0.6b", 420, "--shape", "qwen3-0.6b", "--rounds", "1"),
        _gpu_peers(args, "0.6b", 540, "latency,batch32,batch256"),
        _gpu_peers(args, "8b", 590, "latency,batch32"),
        _offline("offline_14b", 300, "--shape", "qwen3-14b", "--rounds", "1", "--no-peer"),
        _offline("offline_30b-a3b", 420, "--shape", "qwen3-30b-a3b", "--rounds", "1", "--no-peer"),
        _quantised("quantised_8b", 560),
        _bench(
            "quantised_tiles",
            "tiles for few rows with quantised weights, 8B shape",
            560,
            "scripts/bench_kernels.py",
            *("--tiles", "quantised", "--batch", "16,64,256", "--weights", "int4, group 128", "fp8 per row", "mxfp4"),
        ),
        _bench(
            "experts_mxfp4",
            "tiles of experts of gpt-oss-20b as released",
            420,
            "scripts/bench_kernels.py",
            *("--tiles", "experts", "--experts", "gpt-oss-20b", "--weights", "mxfp4", "--batch", "1,32,256,2048"),
        ),
        _bench(
            "experts",
            "tiles of experts beside torch._grouped_mm",
            420,
            "scripts/bench_kernels.py",
            *("--tiles", "experts", "--weights", "none", "--batch", "1,8,32,128,256,2048"),
        ),
        _offline("offline_32b", 420, "--shape", "qwen3-32b", "--rounds", "1", "--no-peer"),
        _quantised("quantised_32b", 600),
        Section(
            name="ranks_0.6b",
            what="1, 2 and 4 ranks on one GPU, 0.6B shape",
            command=(
                offline,
                *("--shape", "qwen3-0.6b", "--rounds", "1", "--no-peer", "--workloads", "latency"),
                *("--tensor-parallel-size", "1,2,4", "--devices", "0,0,0,0"),
            ),
            limit_s=300,
            modules=_CORE,
            option="devices",
        ),
    ]


def _offline(name: str, limit_s: float, *arguments: str) -> Section:
    size = name.partition("_")[2].upper()
    peers = " beside transformers" if name.startswith("peers") else ""
    return _bench(
        name, f"batch 1 and 256 requests, {size} shape{peers}", limit_s, "scripts/bench_offline.py", *arguments
    )


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


def _quantised(name: str, limit_s: float) -> Section:
    """The shape with weights as they are, in fp8 and in int4, side by side."""
    size = name.partition("_")[2]
    return _bench(
        name,
        f"fp8 and int4 weights beside bfloat16 at batch 1, 32 and 256, {size.upper()} shape",
        limit_s,
        "scripts/bench_offline.py",
        *("--shape", f"qwen3-{size}", "--rounds", "1", "--no-peer", "--quantization", "none,fp8,int4"),
        *("--workloads", "latency,batch32,batch256"),
    )


def _steps(name: str, *arguments: str) -> Section:
    size = name.partition("_")[2].upper()
    return _bench(name, f"gaps between decode steps, {size} shape", 180, "scripts/bench_steps.py", *arguments)


def _serve(name: str, what: str, *server_args: str) -> Section:
    """The 0.6B shape over HTTP, with more arguments for the server."""
    return _bench(
        name,
        what,
        240,
        "scripts/bench_serve.py",
        *("--shape", "qwen3-0.6b", "--request-rate", "8,32,inf", "--num-prompts", "200"),
        *("--input-len", "512", "--output-len", "128", "--random-range-ratio", "0.5"),
        *("--goodput", "ttft:500", "tpot:50", "--server-args", shlex.join(("--max-model-len", "2048", *server_args))),
        modules=_SERVER,
    )


def _prompts(name: str) -> Section:
    """Prompts alone and beside decodes, with and without CUDA graphs of them."""
    size = name.partition("_")[2]
    return _bench(
        name,
        f"prompts of 128 tokens, launched and recorded, {size.upper()} shape",
        300,
        *("scripts/bench_steps.py", "--shape", f"qwen3-{size}", "--prompts", "none;auto"),
        *("--batch-size", "32", "--context-len", "128", "--steps", "50"),
    )


def _bench(name: str, what: str, limit_s: float, *command: str, modules: tuple[str, ...] = _CORE) -> Section:
    return Section(name=name, what=what, command=command, limit_s=limit_s, modules=modules)
