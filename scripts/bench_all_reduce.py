"""Time all-reduces of ranks on CPUs: shared memory and gloo take turns in one run.

    python scripts/bench_all_reduce.py --ranks 2,4 --rows 1,64,512 --width 1024 --dtypes float32,bfloat16

For each size it prints the slowest rank's time: median and tenth percentile over all calls.  Each call begins when all
ranks are ready.  It also prints the machine's load, and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from multiprocessing.queues import Queue
from typing import Any

import torch
from benchmarks.machine import processor_name

from tp_engine.progress import RankProgress
from tp_engine.ranks import groups
from tp_engine.ranks.collectives import Communicator
from tp_engine.ranks.rank import RankInfo
from tp_engine.ranks.store import host_store, join_store

Figures = list[dict[str, Any]]


def main() -> int:
    """Measure each number of ranks, print, and end with the JSON line."""
    args = parse_arguments()
    load = os.getloadavg()[0]
    results = [row for num_ranks in args.ranks for row in run_ranks(num_ranks, args)]
    print(f"{'ranks':>5} {'size':>12} {'dtype':>9} {'shm us':>18} {'gloo us':>18} {'ratio':>6}")
    for row in results:
        shm, gloo = (f"{row[kind + '_us']:.1f} ({row[kind + '_p10_us']:.1f})" for kind in ("shm", "gloo"))
        size = f"{row['rows']} x {args.width}"
        print(f"{row['ranks']:>5} {size:>12} {row['dtype']:>9} {shm:>18} {gloo:>18} {row['ratio']:>6.1f}")
    report = {"benchmark": "all_reduce", "machine": processor_name(), "torch": torch.__version__}
    loads = {"load_before": round(load, 1), "load_after": round(os.getloadavg()[0], 1)}
    print(json.dumps(report | loads | {"width": args.width, "results": results}))
    return 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument("--rows", type=numbers, default=[1, 64, 512])
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--dtypes", type=lambda text: text.split(","), default=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=10, help="turns of each kind; they alternate")
    parser.add_argument("--calls", type=int, default=100, help="calls per turn")
    return parser.parse_args(arguments)


def run_ranks(num_ranks: int, args: argparse.Namespace) -> Figures:
    """Start the ranks, and take rank 0's figures."""
    spawn = multiprocessing.get_context("spawn")
    store = host_store(timeout_s=120)
    found: Queue[Figures] = spawn.Queue()
    ranks = [
        spawn.Process(target=run_rank, args=(rank, num_ranks, store.port, args, found)) for rank in range(num_ranks)
    ]
    for process in ranks:
        process.start()
    try:
        return found.get(timeout=600)
    finally:
        for process in ranks:
            process.join(30)
            process.kill()


def run_rank(rank: int, num_ranks: int, port: int, args: argparse.Namespace, found: Queue[Figures]) -> None:
    """Join the other ranks and measure; rank 0 puts the figures into ``found``."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_ranks))
    info = RankInfo(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks)
    store = join_store("127.0.0.1", port, timeout_s=120)
    joined = groups.join(info, store, RankProgress(), lambda: None, device_type="cpu", start_s=120, collective_s=120)
    gloo = joined.communicator
    joined.use_shared_memory(is_required=True)
    figures = []
    for dtype in args.dtypes:
        for rows in args.rows:
            tensor = torch.randn(rows, args.width).to(getattr(torch, dtype))
            row = measure(tensor, {"shm": joined.communicator, "gloo": gloo}, gloo, args)
            figures.append({"ranks": num_ranks, "rows": rows, "dtype": dtype} | row)
    if info.is_first:
        found.put(figures)
    joined.close()


def measure(
    tensor: torch.Tensor, kinds: dict[str, Communicator], library: Communicator, args: argparse.Namespace
) -> dict[str, float]:
    """Microseconds of the slowest rank, for each kind; ``ratio`` is gloo's time over shared memory's."""
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(args.turns + 1):
        for kind, communicator in kinds.items():
            times = torch.tensor([time_call(communicator, tensor.clone()) for _ in range(args.calls)])
            slowest = library.all_gather(times.double()).view(-1, args.calls).amax(0)
            if turn > 0:  # the first warms up
                seconds[kind] += slowest.tolist()
    row = {}
    for kind, values in seconds.items():
        row[f"{kind}_us"] = round(statistics.median(values) * 1e6, 2)
        row[f"{kind}_p10_us"] = round(statistics.quantiles(values, n=10)[0] * 1e6, 2)
    return row | {"ratio": round(row["gloo_us"] / row["shm_us"], 2)}


def time_call(communicator: Communicator, tensor: torch.Tensor) -> float:
    """Seconds of one all-reduce; another one before it makes all ranks begin at about the same time."""
    communicator.all_reduce(torch.zeros(1))
    started = time.perf_counter()
    communicator.all_reduce(tensor)
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
