"""The processes of engines: find a peer's interpreter, or the reason to leave it out; have it load and run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tp_engine.apps.bench.int4_checkpoint import PACKINGS
from tp_engine.apps.bench.offline import engines
from tp_engine.apps.bench.offline.engines import ANSWER
from tp_engine.apps.bench.workloads import BenchWorkload
from tp_engine.system import env

_PACKAGES = Path(__file__).resolve().parents[4]  # the folder that has the package, a checkout or site-packages
RUN_FILE = (
    "import runpy, sys; sys.path[:] = filter(None, sys.path); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
)
"""Runs a file in an interpreter that need not have tp_engine, without the current directory's modules."""
PACKAGES = {
    "vllm": ("vllm",),
    "nano-vllm": ("nanovllm", "flash_attn"),
    "ctranslate2": ("ctranslate2", "transformers"),
    "llama.cpp": ("llama_cpp", "gguf"),
    "transformers": ("transformers",),
}
"""Peers, and the modules that their interpreter must have."""
_SAME_OPTIONS = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
GPU_PEERS = {"vllm": (*_SAME_OPTIONS, "load_format", "enable_prefix_caching"), "nano-vllm": _SAME_OPTIONS}
"""Peers that run on a GPU, and the options of tp_engine that they have under the same name and also get."""
WEIGHT_KINDS = {"llama.cpp": ("Q4_0", "Q4_K_M", "Q8_0"), "vllm": PACKINGS}
"""The quantised weights that a peer can run with: file types of llama.cpp, checkpoints that the benchmark writes."""
DUMMY_PEERS = ("transformers", *GPU_PEERS)
"""Peers of shapes without weights: they draw random ones, or get a checkpoint of random ones."""
PEERS = (*PACKAGES, *(f"{name}:{kind}" for name, kinds in WEIGHT_KINDS.items() for kind in kinds))

_PROBE_S, _CLOSE_S = 60.0, 20.0
_SHOWN_LINES = 60
_SETTLE_S = 0.3  # OpenMP's threads spin for 0.2 s after their last work and would slow the next engine
_PROBE = """
import importlib.util, sys
from importlib import metadata
missing = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is None]
if missing:
    print(", ".join(missing))
    sys.exit(3)
names = metadata.packages_distributions().get(sys.argv[1], [])
print(metadata.version(names[0]) if names else "")
"""


@dataclass(frozen=True)
class Measurement:
    """One run of a workload; ``first_token_s`` is set only if the workload is one request, and ``token_ids`` only if
    they can be compared with those of other engines.  ``kernel_choices`` is the word of tp_engine's kernels."""

    total_s: float
    first_token_s: float | None
    token_ids: list[list[int]]
    cpu_s: float = 0.0
    kernel_choices: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """An interpreter that has the engine, and the folder with the engine's package if it is not installed."""

    python: str = sys.executable
    version: str = ""
    folder: Path | None = None


def find_peer(name: str, python: str, folder: Path | None = None) -> Found | str:
    """The peer's interpreter, or the reason why the peer is left out."""
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        return f"{python} is no interpreter; give one with --peer-python {name}=PATH"
    probe, environment = [python, "-c", _PROBE, *PACKAGES[name]], env.copied() | {"PYTHONPATH": env.python_path(folder)}
    try:
        done = subprocess.run(probe, env=environment, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not answer: {error}"
    if done.returncode:
        missing = done.stdout.strip() or f"it fails with exit code {done.returncode}"
        return f"not installed for {python}: {missing}; give another with --peer-python {name}=PATH"
    return Found(python=python, version=done.stdout.strip(), folder=folder)


class EngineProcess:
    """An engine with a model loaded.  Raises ``RuntimeError`` if it fails or does not answer in time; the end of its
    output, which may have the cause, goes to standard error."""

    def __init__(self, name: str, found: Found, *, threads: int, timeout_s: float, **load: Any) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed by close
        num_ranks = load.get("options", {}).get("tensor_parallel_size", 1)
        self._process = subprocess.Popen(
            [found.python, "-c", RUN_FILE, engines.__file__, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=peer_environment(name, found.python, threads, num_ranks, found.folder),
        )  # fmt: skip
        try:
            self._comparable = self._ask(load=load)["comparable"]
        except BaseException:
            self.close()
            raise

    def run(self, workload: BenchWorkload) -> Measurement:
        """Generate exactly the tokens that the workload asks for."""
        found = self._ask(run={"prompts": workload.prompts, "max_tokens": workload.max_tokens})
        time.sleep(_SETTLE_S)
        lengths = [len(tokens) for tokens in found["token_ids"]]
        if lengths != workload.max_tokens:
            raise RuntimeError(f"{self._name} generated {lengths} tokens; {workload.max_tokens} were asked for")
        return Measurement(**found | ({} if self._comparable else {"token_ids": []}))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        late = threading.Timer(self._timeout_s, self._process.kill)
        began_s, line = time.monotonic(), ""
        late.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(json.dumps(command) + "\n")
                self._process.stdin.flush()
                line = next((one for one in self._process.stdout if one.startswith(ANSWER)), "")
        finally:
            late.cancel()
        answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER)) if line else {}
        if line and "error" not in answer:
            return answer
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        print(*lines[-_SHOWN_LINES:], sep="\n", file=sys.stderr, flush=True)
        if line:
            raise RuntimeError(f"{self._name}: {answer['error']}")
        if time.monotonic() - began_s >= self._timeout_s:
            told = f"did not answer within {self._timeout_s:g} s"
        else:
            told = f"ended with exit code {self._process.wait(_CLOSE_S)}"
        raise RuntimeError(f"{self._name}'s process {told}; it said last: {lines[-1] if lines else 'nothing'}")


def peer_environment(
    name: str, python: str, threads: int, num_ranks: int = 1, folder: Path | None = None
) -> dict[str, str]:
    """The environment that the peer's documentation recommends on CPUs: a core per thread, faster libraries if found.
    tp_engine and transformers get only the number of threads, if one was chosen.  On a GPU vLLM runs as by default."""
    cores = sorted(os.sched_getaffinity(0))[: threads or None]
    own = _PACKAGES if name == "tp_engine" else None
    found = env.copied() | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": env.python_path(own, folder)}
    if name == "vllm":
        found |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        if not torch.cuda.is_available():
            found |= _vllm_on_cpus(Path(python), cores, num_ranks)
    elif name in ("tp_engine", "transformers", "nano-vllm"):
        found |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    else:
        found |= {"CT2_USE_MKL": "0", "OMP_NUM_THREADS": str(len(cores))}
    return found


def _vllm_on_cpus(python: Path, cores: list[int], num_ranks: int) -> dict[str, str]:
    share = max(1, len(cores) // num_ranks)
    bound = [",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(num_ranks)]
    found = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "|".join(bound)}
    if libraries := faster_libraries(python):
        found["LD_PRELOAD"] = ":".join(libraries)
    return found | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def faster_libraries(python: Path, system: Path = Path("/usr/lib")) -> list[str]:
    """The system's tcmalloc and the interpreter's iomp, if they exist."""
    openmp = python.parents[1] / "lib" / "libiomp5.so"
    found = sorted(system.glob("*/libtcmalloc_minimal.so.4"))[:1]
    return [str(library) for library in (*found, openmp) if library.exists()]


def parse_pythons(pairs: Sequence[str]) -> dict[str, str]:
    """Each peer's interpreter: this one, or the path of its ``NAME=PATH`` pair.  ``ValueError`` for other text."""
    pythons = dict.fromkeys(PACKAGES, sys.executable)
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not equals or name not in PACKAGES:
            raise ValueError(f"{pair!r} is not NAME=PATH with NAME one of {', '.join(PACKAGES)}")
        pythons[name] = os.path.expanduser(path)
    return pythons
