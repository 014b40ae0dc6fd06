"""Steps of tp_engine: a single prompt, decodes, decodes beside a prompt, and the parts of a decode's time.

For ``tp-engine bench offline --steps``.  The times are taken without a profiler; then as many decode steps run under
torch's.  A GPU is idle while no kernel or copy runs; the gap between two steps is the longest idle time in each step's
period.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from tp_engine import SamplingParams
from tp_engine.api.engine_options import read_options
from tp_engine.api.input_processor import InputProcessor
from tp_engine.apps.bench.roofline import Ceilings, ModelCost, decode_step_s
from tp_engine.cpu import naming_calls
from tp_engine.engine.engine import Engine
from tp_engine.engine.start import start_engine

_WARM_UP_PROMPTS, _WARM_UP_STEPS = 4, 16
_BUDGET = 16384
_DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
_NAME_LENGTH = 80  # a library's kernel name includes template arguments and can be very long
_NOTHING_SEEN = "torch's profiler saw no work of the GPU: CUPTI is missing, forbidden here, or used by another profiler"


class Steps:
    """Greedy requests with random prompts of ``prompt_len`` tokens, the same for each engine."""

    def __init__(self, engine: Engine, vocab_size: int, prompt_len: int) -> None:
        self._engine, self._vocab_size, self._prompt_len = engine, vocab_size, prompt_len
        self._inputs = InputProcessor(engine.model_info, None)
        self._rng, self._count = np.random.default_rng(0), 0

    def alone(self, count: int) -> tuple[float, list[int]]:
        """Compute ``count`` prompts, one after the other; returns the median of the seconds to the first token, and
        these tokens."""
        times, tokens = [], []
        for _ in range(_WARM_UP_PROMPTS + count):
            started = time.perf_counter()
            self._add(1)
            while self._engine.has_unfinished:
                tokens += [token for output in self._engine.step() for token in output.new_token_ids]
            times.append(time.perf_counter() - started)
        return statistics.median(times[_WARM_UP_PROMPTS:]), tokens

    def start_decoding(self, count: int, num_steps: int) -> None:
        """Start ``count`` requests; returns after some steps in which all of them decode, as they do for ``num_steps``
        more."""
        num_prompt_steps = -(-count * self._prompt_len // (_BUDGET - count))
        for _ in range(count):
            self._add(2 * num_prompt_steps + _WARM_UP_STEPS + num_steps + 32)
        num_full = 0
        while num_full < _WARM_UP_STEPS:
            num_full += len(self._engine.step()) == count
            if not self._engine.has_unfinished:
                raise RuntimeError(
                    f"{count} requests do not fit at once; fewer or shorter ones do (--steps ROWSxTOKENS)"
                )

    def run(self, count: int, *, with_prompts: bool = False) -> float:
        """Return seconds per step, results included; with ``with_prompts`` a new prompt begins in each."""
        started = time.perf_counter()
        for _ in range(count):
            if with_prompts:
                self._add(1)
            self._engine.step()
        return (time.perf_counter() - started) / count

    def _add(self, num_tokens: int) -> None:
        prompt = self._rng.integers(3, self._vocab_size, self._prompt_len).tolist()
        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_tokens)
        self._count += 1
        self._engine.add_request(self._inputs.process(prompt, params, request_id=str(self._count)))


def measure_steps(
    folder: str,
    options: Mapping[str, Any],
    sizes: Sequence[str],
    shape: tuple[int, int, int],
    cost: ModelCost,
    ceilings: Ceilings,
) -> list[dict[str, Any]]:
    """Measure an engine for each of ``sizes``, values of ``cudagraph_prefill_capture_sizes``, one after the other.

    ``shape`` is the number of requests that decode, of tokens of each prompt, and of steps.  ``equal_tokens`` is the
    share of first tokens that equals those of the first engine: padding may make a library choose a product that rounds
    differently.
    """
    found = [_measure(folder, {**options, "cudagraph_prefill_capture_sizes": one}, *shape) for one in sizes]
    rows, prompt_len, num_steps = shape
    tokens = rows * (prompt_len + _WARM_UP_STEPS + num_steps // 2)
    least_ms = decode_step_s(cost, ceilings, num_rows=rows, num_context_tokens=tokens) * 1e3
    all_first = [one.pop("first_tokens") for one in found]
    for one, first in zip(found, all_first, strict=True):
        one["equal_tokens"] = sum(a == b for a, b in zip(first, all_first[0], strict=True)) / len(first)
        one |= {"roofline_ms": round(least_ms, 4), "share_of_roofline": round(least_ms / one["step_ms"], 3)}
    return found


def _measure(folder: str, options: Mapping[str, Any], rows: int, prompt_len: int, num_steps: int) -> dict[str, Any]:
    vocab_size = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    num_tokens = 2 * (rows * prompt_len // (_BUDGET - rows)) + 4 * num_steps + 64
    limits = {"max_model_len": prompt_len + num_tokens, "max_num_seqs": rows + 8, "max_num_batched_tokens": _BUDGET}
    started = time.perf_counter()
    config = read_options("steps", folder, {**limits, "enable_prefix_caching": False, **options}).engine
    with closing(start_engine(config)) as engine:
        start_s = time.perf_counter() - started
        steps = Steps(engine, vocab_size, prompt_len)
        first_token_s, first_tokens = steps.alone(num_steps)
        steps.start_decoding(rows, 3 * num_steps)
        step_s = steps.run(num_steps)
        profiled = _profile_gpu if torch.cuda.is_available() else _profile_cpu
        found = profiled(steps, num_steps, step_s * 1e6)
        mixed_s = steps.run(num_steps, with_prompts=True)
        graph_bytes = engine.report().ranks[0].memory["cuda_graphs"]
    return {
        "sizes": options["cudagraph_prefill_capture_sizes"],
        "ms_to_first_token": round(first_token_s * 1e3, 4),
        "step_ms": round(step_s * 1e3, 4),
        "tokens_per_s": round(rows / step_s, 1),
        "mixed_step_ms": round(mixed_s * 1e3, 4),
        "start_s": round(start_s, 2),
        "graph_mib": round(graph_bytes / 2**20, 1),
        "first_tokens": first_tokens,
        **found,
    }


def _profile_gpu(steps: Steps, num_steps: int, period_us: float) -> dict[str, Any]:
    """Profile rank 0's GPU.  Without a profiler the reason takes the place of its figures; what broke a step breaks the
    next one, too."""
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            steps.run(num_steps)
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            profiler.export_chrome_trace(str(trace := Path(folder) / "trace.json"))
            events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    except Exception as error:  # whatever a profiler or its libraries say
        return {"not_profiled": f"{type(error).__name__}: {error}"}
    return device_figures(events, num_steps, period_us) or {"not_profiled": _NOTHING_SEEN}


def _profile_cpu(steps: Steps, num_steps: int, period_us: float) -> dict[str, Any]:
    """Own time of this process's compiled kernels and PyTorch operations; the rest is Python, dispatch, the calls."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler, naming_calls(record_function):
        steps.run(num_steps)
    times = {event.key: event.self_cpu_time_total / num_steps for event in profiler.key_averages()}
    return {"kernels_us": longest(times, period_us, period_us)}


def device_figures(events: Sequence[Mapping[str, Any]], num_steps: int, period_us: float) -> dict[str, Any]:
    """Busy and idle time per step, the gap between two steps, and the time per step of each kernel and copy, from a
    Chrome trace's events; all in microseconds, and nothing without events.  The ``num_steps - 1``
    longest gaps count as those between the steps."""
    busy = [event for event in events if event.get("ph") == "X" and event.get("cat") in _DEVICE_EVENTS]
    gaps, ends = list[float](), list[float]()
    times: dict[str, float] = {}
    for event in sorted(busy, key=lambda event: float(event["ts"])):
        begin, length = float(event["ts"]), float(event["dur"])
        if ends and begin > ends[-1]:
            gaps.append(begin - ends[-1])
        ends.append(max([begin + length, *ends[-1:]]))
        name = str(event["name"])[:_NAME_LENGTH]
        times[name] = times.get(name, 0.0) + length / num_steps
    if not ends:
        return {}
    span = ends[-1] - min(float(event["ts"]) for event in busy)
    between = sorted(gaps)[-(num_steps - 1) :] or [0.0]
    return {
        "device_busy_us_per_step": round((span - sum(gaps)) / num_steps, 1),
        "device_idle_us_per_step": round(sum(gaps) / num_steps, 1),
        "gap_us_median": round(statistics.median(between), 1),
        "gap_us_max": round(between[-1], 1),
        "device_events_per_step": round(len(busy) / num_steps, 1),
        "kernels_us": longest(times, period_us, sum(times.values())),
    }


def longest(times: Mapping[str, float], period_us: float, total_us: float) -> dict[str, float]:
    """The times of at least a hundredth of ``period_us``, longest first; ``other`` is the rest of ``total_us``."""
    shown = sorted(((us, name) for name, us in times.items() if us >= period_us / 100), reverse=True)
    other = max(0.0, total_us - sum(us for us, _ in shown))
    return {name: round(us, 1) for us, name in shown} | {"other": round(other, 1)}


def print_steps(report: Mapping[str, Any]) -> None:
    """A line per figure, for one engine after the other."""
    print(f"\n{report['machine']}; {report['dtype']}, shape {report['shape']}, {report['batch_size']} requests")
    for found in report["results"]:
        for key, value in found.items():
            print(f"{key:<32}{value}")
