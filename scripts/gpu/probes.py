"""Small jobs on a GPU that no test covers, each a section of scripts/gpu_check.

python scripts/gpu/probes.py start|nccl|kill; the last line is JSON, with the verdict and figures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tp_engine import LLM, SamplingParams

REPLAYS = 10_000
ABORT_S = 20.0
RAISE_S = 30.0


def start() -> dict[str, Any]:
    """Start the demo model with empty and with full kernel caches; each rank has a context only on its own GPU."""
    seconds, contexts, size = {}, Counter[str](), min(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        for cache in ("cold", "warm"):
            code = (
                "import gpu.probes as probes, json, time; began_s = time.monotonic()\n"
                f"with probes.LLM(tensor_parallel_size={size}) as llm:\n"
                "    print(json.dumps([time.monotonic() - began_s, *probes.contexts_now()]))\n"
            )
            before = Counter(contexts_now())
            done = subprocess.run(
                [sys.executable, "-c", code], env=_importing(), stdout=subprocess.PIPE, text=True, check=True
            )
            seconds[cache], *found = json.loads(done.stdout.splitlines()[-1])
            contexts = Counter(found) - before
    is_right = sorted(contexts.values()) == [1] * size
    text = ", ".join(f"{number} on {gpu[:12]}" for gpu, number in contexts.items()) or "nvidia-smi shows none"
    return {
        "benchmark": "start",
        "seconds": seconds,
        "verdict": f"{'right' if is_right else 'WRONG'}: contexts of {size} ranks: {text}",
        "is_right": is_right or not contexts,
    }


def contexts_now() -> list[str]:
    """The GPU of each context of a process, as nvidia-smi lists them."""
    shown = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=gpu_uuid", "--format=csv,noheader"], capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    return shown.stdout.split() if shown.returncode == 0 else []


def nccl() -> dict[str, Any]:
    """NCCL with one rank: a recorded all-reduce and all-gather, replayed; abort while a graph runs; destroy."""
    torch.cuda.set_device(0)
    with tempfile.NamedTemporaryFile() as file:
        began_s = time.monotonic()
        _join(file.name + "-1")
        init_s, ones = time.monotonic() - began_s, torch.ones(1 << 16, device="cuda")
        tensor, gathered = ones.clone(), torch.empty_like(ones)

        def step() -> None:
            tensor.add_(1)
            dist.all_reduce(tensor)
            dist.all_gather_into_tensor(gathered, tensor)

        graph = _recorded(step)
        tensor.fill_(0)
        began_s = time.monotonic()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        replay_us = (time.monotonic() - began_s) * 1e6 / REPLAYS
        is_right = bool((gathered == REPLAYS).all())
        del graph
        dist.destroy_process_group()
        aborted_s = _abort_in_a_graph(file.name + "-2")
    ended = aborted_s <= ABORT_S
    return {
        "benchmark": "nccl",
        "init_s": round(init_s, 2),
        "replay_us": round(replay_us, 2),
        "abort_s": round(aborted_s, 2),
        "is_right": is_right and ended,
        "verdict": f"{'right' if is_right and ended else 'WRONG'}: {REPLAYS:,} replays"
        f"{'' if is_right else ' with wrong sums'}, abort after {aborted_s:.1f} s",
    }


def _join(file: str) -> None:
    dist.init_process_group(
        "nccl", init_method=f"file://{file}", rank=0, world_size=1, timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", 0),
    )  # fmt: skip


def _recorded(step: Any) -> torch.cuda.CUDAGraph:
    """The graph of a step, run once before."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _abort_in_a_graph(file: str) -> float:
    """Seconds that it takes to abort a group from another thread while a long graph with its collectives runs."""
    _join(file)
    tensor = torch.ones(1 << 26, device="cuda")

    def step() -> None:
        for _ in range(200):
            dist.all_reduce(tensor)
            tensor.mul_(0.5)

    graph = _recorded(step)
    for _ in range(20):
        graph.replay()
    began_s = time.monotonic()
    thread = threading.Thread(target=lambda: dist.distributed_c10d._abort_process_group(), daemon=True)
    thread.start()
    thread.join(ABORT_S)
    return time.monotonic() - began_s if not thread.is_alive() else float("inf")


def kill() -> dict[str, Any]:
    """A rank that shares a GPU's memory is killed while steps run: the script's call raises, and names the rank."""
    options: dict[str, Any] = {"tensor_parallel_size": 2, "device_ids": "0,0", "all_reduce_backend": "symm_mem"}
    llm, error = LLM(**options), ""
    victims = psutil.Process().children(recursive=True)
    killed_s: list[float] = []

    def strike() -> None:
        killed_s.append(time.monotonic())
        for victim in victims:
            victim.kill()

    threading.Timer(2.0, strike).start()
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    try:
        while not killed_s or time.monotonic() < killed_s[0] + RAISE_S:
            llm.generate([[5, 6, 7]] * 8, params, use_tqdm=False)
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}".splitlines()[0]
    seconds = time.monotonic() - killed_s[0] if killed_s else 0.0
    is_right = "rank 1" in error and seconds <= RAISE_S
    return {
        "benchmark": "kill",
        "raised_s": round(seconds, 2),
        "is_right": is_right,
        "verdict": f"{'right' if is_right else 'WRONG'}: after {seconds:.1f} s {error or 'nothing was raised'}",
    }


def _importing() -> dict[str, str]:
    """An environment in which a child imports what this process does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def main(probe: str) -> int:
    """Run a probe; returns the exit status."""
    report = {"start": start, "nccl": nccl, "kill": kill}[probe]()
    print(json.dumps(report), flush=True)
    sys.stdout.flush()
    os._exit(0 if report["is_right"] else 1)  # an aborted group or a broken job may leave threads


if __name__ == "__main__":
    main(sys.argv[1])
