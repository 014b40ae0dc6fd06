"""The figures that scripts/gpu_check shows for each benchmark: values from its JSON, beside their goals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Goals on one H200 in bfloat16: (shape, workload) -> output tokens per second, or share of the copy bandwidth.
_TOKENS_PER_S = {("qwen3-0.6b", "256 requests"): 26_000.0}
_SHARE = {("qwen3-0.6b", "latency"): 0.60, ("qwen3-8b", "latency"): 0.85}
_QUANTISED_SHARE = 0.80  # of the copy bandwidth, in bytes of weights that a token needs, at batch 1
_PAGED_DECODE_SHARE = 0.80
_GAP_US = 50.0
_FIRST_TOKEN_MS = {"qwen3-0.6b": 3.0}  # of a single prompt of 128 tokens, recorded


@dataclass(frozen=True)
class Figure:
    """A measured value, which should reach ``goal``, or stay below it if ``lower`` is set."""

    label: str
    value: float
    unit: str
    goal: float | None = None
    lower: bool = False

    @property
    def verdict(self) -> str:
        """Whether the goal is met; empty without a goal."""
        if self.goal is None:
            return ""
        met = self.value <= self.goal if self.lower else self.value >= self.goal
        return "met" if met else "missed"


def figures_of(report: Mapping[str, Any]) -> list[Figure]:
    """The figures of a script's JSON line; none for an unknown report."""
    kinds = {"kernels": _kernels, "steps": _steps, "serve": _serve, "start": _start}
    if "decode_roofline_ms" in report and "workloads" in report:
        return list(_offline(report))
    make = kinds.get(str(report.get("benchmark")))
    return [] if make is None else list(make(report))


def kernel_times(report: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The kernels and copies of a decode step with their microseconds, longest first; empty for other reports."""
    found = report["results"][0] if report.get("benchmark") == "steps" else {}
    return list(found.get("kernels_us", {}).items())


def why_not_profiled(report: Mapping[str, Any]) -> str:
    """The reason why steps have no times of kernels; empty if they have, and for other reports."""
    return str(report["results"][0].get("not_profiled", "")) if report.get("benchmark") == "steps" else ""


def _offline(report: Mapping[str, Any]) -> Iterator[Figure]:
    yield Figure("copy bandwidth", report.get("copy_gb_per_s", 0.0), "GB/s")
    yield Figure("matrix products", report.get("matmul_tflops", 0.0), "TFLOP/s")
    together = ", GPU shared" if report.get("memory_share") else ""
    for result in report["workloads"]:
        case = (report["shape"], result["workload"])
        for engine, found in result["engines"].items():
            label = f"{report['shape']} {result['workload']}, {engine}" + together
            ours = engine == "tp_engine TP 1"
            kind = engine.removeprefix("tp_engine TP 1 ")
            if kind in report.get("weight_bytes", {}):
                yield from _quantised(report, result, engine, label)
            elif "ms_per_token" in found:
                yield Figure(label, found["ms_per_token"], "ms/token")
                yield Figure(label, found["share_of_roofline"], "of the roofline", _SHARE.get(case) if ours else None)
            else:
                yield Figure(label, found["tokens_per_s"], "tokens/s", _TOKENS_PER_S.get(case) if ours else None)
                yield Figure(label, found["share_of_roofline"], "of the roofline")


def _quantised(report: Mapping[str, Any], result: Mapping[str, Any], engine: str, label: str) -> Iterator[Figure]:
    """Quantised weights: how many times faster than the first engine, and the share of the bandwidth."""
    found, num_bytes = result["engines"][engine], report["weight_bytes"][engine.rpartition(" ")[2]]
    if engine in result["speedup_over"]:
        yield Figure(label, 1 / result["speedup_over"][engine], "times unquantised")
    if "ms_per_token" not in found:
        yield Figure(label, found["tokens_per_s"], "tokens/s")
        return
    yield Figure(label, found["ms_per_token"], "ms/token")
    share = num_bytes / (found["ms_per_token"] * 1e-3) / (report["copy_gb_per_s"] * 1e9)
    yield Figure(label, share, "of the copy bandwidth", _QUANTISED_SHARE)


def _kernels(report: Mapping[str, Any]) -> Iterator[Figure]:
    yield Figure("copy bandwidth", report["copy_gb_per_s"], "GB/s")
    for row in report["results"]:
        if "error" in row:
            continue
        goal = _PAGED_DECODE_SHARE if _is_large_decode(row) else None
        label = f"{row['kernel']} {row['size']}"
        if "share_of_matmul" in row:
            yield Figure(label, row["share_of_matmul"], "of matrix products")
        else:
            yield Figure(label, row["share_of_copy"], "of the copy bandwidth", goal)


def _is_large_decode(row: Mapping[str, Any]) -> bool:
    """Whether a row is decode attention of 64 requests or more; its size reads ``64 x 1024``."""
    num_requests = str(row["size"]).partition(" ")[0]
    return row["kernel"].startswith("decode attention") and num_requests.isdigit() and int(num_requests) >= 64


def _steps(report: Mapping[str, Any]) -> Iterator[Figure]:
    """Decodes, prompts, and the gain and cost of recordings of steps with prompts against the first engine."""
    first, rows = report["results"][0], report["batch_size"]
    for found in report["results"]:
        label, is_first = f"{report['shape']}, {rows} rows, prompts of {report['prompt_len']}", found is first
        label += "" if is_first else f", prompt graphs {found['sizes']}"
        yield Figure(label, found["step_ms"], "ms/step")
        yield Figure(label, found["share_of_roofline"], "of the roofline")
        for key, goal in (
            ("gap_us_median", _GAP_US),
            ("device_idle_us_per_step", None),
            ("device_busy_us_per_step", None),
        ):
            if key in found:
                yield Figure(f"{label}, {key.split('_us')[0].replace('_', ' ')}", found[key], "us", goal, lower=True)
        goal = None if is_first else _FIRST_TOKEN_MS.get(report["shape"])
        yield Figure(label, found["ms_to_first_token"], "ms to the first token", goal, lower=True)
        yield Figure(label, found["mixed_step_ms"], "ms/step with a prompt")
        if not is_first:
            yield Figure(label, first["mixed_step_ms"] / found["mixed_step_ms"], "times, steps with a prompt")
            yield Figure(label, found["equal_tokens"], "of the tokens equal")
            yield Figure(label, found["start_s"] - first["start_s"], "s more to start")
            yield Figure(label, found["graph_mib"] - first["graph_mib"], "MiB more of graphs")


def _start(report: Mapping[str, Any]) -> Iterator[Figure]:
    for cache, seconds in report["seconds"].items():
        yield Figure(f"start of the demo model, {cache} kernel caches", seconds, "s")


def _serve(report: Mapping[str, Any]) -> Iterator[Figure]:
    for result in report["results"]:
        label = f"{result['model_id']} at {result['request_rate']} requests/s"
        yield Figure(label, result["output_throughput"], "tokens/s")
        yield Figure(label, result["median_ttft_ms"], "ms to the first token")
        yield Figure(label, result["median_tpot_ms"], "ms/token")
