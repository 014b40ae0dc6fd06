"""Peers: find each engine's interpreter, or say why the engine is left out, and run the engine in a process."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from benchmarks.int4_checkpoint import PACKINGS
from benchmarks.offline.engines import Measurement
from benchmarks.offline.peer_side import ANSWER
from benchmarks.workloads import Workload

SCRIPTS = Path(__file__).resolve().parents[2]
MODULE = "benchmarks.offline.peer_side"
PACKAGES = {"vllm": ("vllm",), "ctranslate2": ("ctranslate2", "transformers"), "llama.cpp": ("llama_cpp", "gguf")}
"""Peers that run in a separate process, and the modules that their interpreter must have."""
WEIGHT_KINDS = {"llama.cpp": ("Q4_0", "Q4_K_M", "Q8_0"), "vllm": PACKINGS}
"""The quantised weights that a peer can run with: file types of llama.cpp, checkpoints that the benchmark writes."""
PEERS = ("transformers", *PACKAGES, *(f"{name}:{kind}" for name, kinds in WEIGHT_KINDS.items() for kind in kinds))

_PROBE_S, _CLOSE_S = 60.0, 20.0
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


@dataclass(frozen=True, kw_only=True)
class Found:
    """An interpreter that has the peer."""

    python: str
    version: str


def find_peer(name: str, python: str) -> Found | str:
    """The peer's interpreter, or the reason why the peer is left out."""
    if not os.access(python, os.X_OK) or Path(python).is_dir():
        return f"{python} is no interpreter; give one with --peer-python {name}=PATH"
    probe = [python, "-c", _PROBE, *PACKAGES[name]]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python} does not answer: {error}"
    if done.returncode:
        missing = done.stdout.strip() or f"it fails with exit code {done.returncode}"
        return f"not installed for {python}: {missing}; give another with --peer-python {name}=PATH"
    return Found(python=python, version=done.stdout.strip())


class PeerProcess:
    """A peer with a model loaded.  Raises ``RuntimeError`` with its output if it fails or does not answer in time."""

    def __init__(self, name: str, python: str, model: str, *, threads: int, timeout_s: float, **load: Any) -> None:
        self._name, self._timeout_s = name, timeout_s
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed by close
        self._process = subprocess.Popen(
            [python, "-m", MODULE, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=peer_environment(name, python, threads, load.get("options", {}).get("tensor_parallel_size", 1)),
        )  # fmt: skip
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_follow, args=(self._process.stdout, self._answers), daemon=True).start()
        try:
            self._ask(load={"model": model, **load})
        except BaseException:
            self.close()
            raise

    def run(self, workload: Workload) -> Measurement:
        """Generate exactly the tokens that the workload asks for."""
        found = self._ask(run={"prompts": workload.prompts, "max_tokens": workload.max_tokens})
        time.sleep(_SETTLE_S)
        lengths = [len(tokens) for tokens in found["token_ids"]]
        if lengths != workload.max_tokens:
            raise RuntimeError(f"{self._name} generated {lengths} tokens; {workload.max_tokens} were asked for")
        return Measurement(found["total_s"], found["first_token_s"], found["token_ids"])

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _ask(self, **command: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=self._timeout_s)
        except queue.Empty:
            self._process.kill()
            raise RuntimeError(
                f"{self._name} did not answer within {self._timeout_s:g} s{self._last_words()}"
            ) from None
        except BrokenPipeError:
            line = None
        if line is None:
            code = self._process.wait(_CLOSE_S)
            raise RuntimeError(f"{self._name}'s process ended with exit code {code}{self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self._name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return f"; it said last: {lines[-1]}" if lines else ""


def peer_environment(name: str, python: str, threads: int, num_ranks: int = 1) -> dict[str, str]:
    """The environment that the peer's documentation recommends on CPUs: a core per thread, faster libraries if found.

    tp_engine gets only the number of threads, if one was chosen.
    """
    cores = sorted(os.sched_getaffinity(0))[: threads or None]
    paths = [str(SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    if name == "vllm":
        found |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
        share = max(1, len(cores) // num_ranks)
        bound = [",".join(map(str, cores[rank * share : (rank + 1) * share])) for rank in range(num_ranks)]
        found |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "|".join(bound)}
        if libraries := faster_libraries(Path(python)):
            found["LD_PRELOAD"] = ":".join(libraries)
    elif name == "tp_engine":
        found |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
    else:
        found |= {"CT2_USE_MKL": "0", "OMP_NUM_THREADS": str(len(cores))}
    return found


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


def _follow(output: IO[str] | None, answers: queue.SimpleQueue[str | None]) -> None:
    assert output is not None
    for line in output:
        if line.startswith(ANSWER):
            answers.put(line.removeprefix(ANSWER))
    answers.put(None)
