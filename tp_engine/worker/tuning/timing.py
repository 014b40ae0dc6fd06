"""The times of candidates, round by round: in turns, forth and back, over copies of the weight.

On a GPU a round of a candidate is a replay of a graph with many calls, between two events, or the calls themselves of
what is never recorded.  On a CPU it is the
processor time of one thread, so that other processes hardly change it.  All candidates read the same inputs, and each
has several copies of its weight, which it reads in turns, so that no cache holds them: in an engine other layers come
between two reads of a weight.
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tp_engine.kernels.candidates import Inputs, Run
from tp_engine.worker.device import clock_rates
from tp_engine.worker.tuning.proof import record
from tp_engine.worker.tuning.rule import FIRST_ROUNDS, HOPELESS, MORE_ROUNDS, ROUNDS, drift, is_unsure

Clock = Callable[[], float]
"""Runs a round of a candidate, and returns the nanoseconds of a call."""

_CALLS_OF_GRAPH = 20
_CALLS_WITHOUT_GRAPH = 4
_LEAST_ROUND_NS = 200_000
_MOST_COPIES = 8
_CPU_CACHE_BYTES = 32 << 20
_PROCESSORS = Path("/proc/cpuinfo")


def num_copies(num_bytes: int, device: torch.device) -> int:
    """Return how many copies of a weight are more than the caches hold."""
    cache = _CPU_CACHE_BYTES
    if device.type == "cuda":
        cache = 2 * int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", cache))
    return max(2, min(_MOST_COPIES, cache // max(1, num_bytes) + 1))


def time_rounds(
    runs: Mapping[str, Sequence[Run]],
    inputs: Sequence[Inputs],
    device: torch.device,
    default: str | None,
    note: Callable[[str], None],
    *,
    is_recorded: bool = True,
) -> dict[str, list[float]]:
    """Each candidate's nanoseconds of a call, round by round.  ``runs``: its copies, which get ``inputs`` in turns;
    ``note`` is called with a candidate before it runs.  One that is hopeless beside the ``default``, if that is among
    them, has few rounds."""
    clocks: dict[str, Clock] = {}
    for name, copies in runs.items():
        note(name)
        if device.type != "cuda":
            clocks[name] = _thread_clock(copies, inputs)
        else:
            clocks[name] = (_graph_clock if is_recorded else _event_clock)(copies, inputs)
    times = take_rounds(clocks, default, note)
    return take_rounds(clocks, default, note) if drift(times, default) else times


def take_rounds(
    clocks: Mapping[str, Clock], default: str | None, note: Callable[[str], None]
) -> dict[str, list[float]]:
    """Return the times of some rounds, more of them where the first ones are not clear."""
    times: dict[str, list[float]] = {name: [] for name in clocks}
    order = list(clocks)
    for number in range(ROUNDS + MORE_ROUNDS):
        if number == ROUNDS and (default is None or not is_unsure(times, default)):
            break
        for name in order if number % 2 else order[::-1]:
            note(name)
            times[name].append(clocks[name]())
        if number + 1 == FIRST_ROUNDS and default is not None:
            order = [one for one in order if min(times[one]) <= HOPELESS * min(times[default])]
    return times


def _thread_clock(copies: Sequence[Run], inputs: Sequence[Inputs]) -> Clock:
    def once() -> float:
        began, calls = time.thread_time_ns(), 0
        while True:
            for place, run in enumerate(copies):
                run(*inputs[place % len(inputs)])
            calls += len(copies)
            took = time.thread_time_ns() - began
            if took >= _LEAST_ROUND_NS:
                return took / calls

    once()
    return once


def _graph_clock(copies: Sequence[Run], inputs: Sequence[Inputs]) -> Clock:
    calls = max(_CALLS_OF_GRAPH, len(copies))
    graph, _ = record(lambda: _in_turns(copies, inputs, calls))
    return _between_events(graph.replay, calls)


def _event_clock(copies: Sequence[Run], inputs: Sequence[Inputs]) -> Clock:
    calls = max(_CALLS_WITHOUT_GRAPH, len(copies))
    return _between_events(lambda: _in_turns(copies, inputs, calls), calls)


def _in_turns(copies: Sequence[Run], inputs: Sequence[Inputs], calls: int) -> tuple[torch.Tensor, ...]:
    """Call the copies in turns; each result's memory is free for the next."""
    for number in range(calls):
        found = copies[number % len(copies)](*inputs[number % len(inputs)])
    return (found,)


def _between_events(run: Callable[[], object], calls: int) -> Clock:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once() -> float:
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e6 / calls

    for _ in range(3):
        once()
    return once


def clocks_of(device: torch.device) -> str:
    """Return the present clocks of ``device`` in words, such as ``units 1980, memory 2619 MHz``; empty if nobody tells
    them."""
    if device.type == "cuda":
        rates = clock_rates(str(torch.cuda.get_device_properties(device).uuid))
        return ", ".join(f"{name} {rate}" for name, rate in rates.items()) + " MHz" if rates else ""
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = _PROCESSORS.read_text(encoding="utf-8", errors="replace").splitlines()
        found = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    return f"cores {sum(found) / len(found):.0f} MHz" if found else ""
