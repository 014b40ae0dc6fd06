"""Figures from rounds: medians, ratios, shares of the roofline, and the printed table."""

from __future__ import annotations

import statistics
from typing import Any

from tp_engine.apps.bench.int4_checkpoint import PACKINGS
from tp_engine.apps.bench.offline.process import Measurement
from tp_engine.apps.bench.roofline import Ceilings, ModelCost, decode_step_s, workload_s
from tp_engine.apps.bench.workloads import BenchWorkload

Figures = dict[str, float]


def summarise(
    workload: BenchWorkload, runs: dict[str, list[Measurement]], cost: ModelCost, ceilings: Ceilings
) -> dict[str, Any]:
    """Medians per engine, the roofline, and the ratio of the first engine to each other one (above 1: it is faster)."""
    roofline = least_times(workload, cost, ceilings)
    figures = {name: medians(workload, measured) for name, measured in runs.items()}
    for figure in figures.values():
        figure["share_of_roofline"] = share_of_roofline(figure, roofline)
    first, *others = runs
    return {
        "workload": workload.name,
        "roofline": roofline,
        "engines": figures,
        "kernel_choices": {name: found for name, (one, *_) in runs.items() if (found := one.kernel_choices)},
        "speedup_over": {other: speedup(figures[first], figures[other]) for other in others},
        "equal_answers": {
            other: equal_share(runs[first], runs[other])
            for other in others
            if all(run.token_ids for run in runs[other])
        },
        "same_checkpoint": {
            other: {
                "engine": mine,
                "speedup": speedup(figures[mine], figures[other]),
                "equal_answers": equal_share(runs[mine], runs[other]),
            }
            for mine, other in pairs_of_packings(list(runs))
        },
    }


def pairs_of_packings(names: list[str]) -> list[tuple[str, str]]:
    """(tp_engine, peer) for each peer that reads the same packed checkpoint; names end with the packing."""
    ours = [name for name in names if name.startswith("tp_engine ")]
    return [
        (mine, other)
        for packing in PACKINGS
        for mine in [name for name in ours if name.endswith(f" {packing}")][:1]
        for other in names
        if other not in ours and other.endswith(f" {packing}")
    ]


def least_times(workload: BenchWorkload, cost: ModelCost, ceilings: Ceilings) -> Figures:
    """The best figures that the measured rates allow: time per token of a single request, throughput of several."""
    if len(workload.prompts) == 1:
        context = len(workload.prompts[0]) + workload.max_tokens[0] // 2
        step_s = decode_step_s(cost, ceilings, num_rows=1, num_context_tokens=context)
        return {"ms_per_token": round(step_s * 1e3, 4)}
    return {"tokens_per_s": round(workload.num_output_tokens / workload_s(cost, ceilings, workload), 1)}


def share_of_roofline(figure: Figures, roofline: Figures) -> float:
    """The figure as a share of the roofline: 1 is the roofline itself."""
    if "ms_per_token" in roofline:
        return round(roofline["ms_per_token"] / figure["ms_per_token"], 3)
    return round(figure["tokens_per_s"] / roofline["tokens_per_s"], 3)


def medians(workload: BenchWorkload, measured: list[Measurement]) -> Figures:
    """Output tokens per second and, for a single request, milliseconds to the first token and per token after it."""
    figure = {"tokens_per_s": workload.num_output_tokens / statistics.median(run.total_s for run in measured)}
    firsts = [run.first_token_s for run in measured if run.first_token_s is not None]
    if firsts:
        steps = workload.max_tokens[0] - 1
        after = [(run.total_s - first) / steps for run, first in zip(measured, firsts, strict=True)]
        figure |= {"ttft_ms": statistics.median(firsts) * 1e3, "ms_per_token": statistics.median(after) * 1e3}
    return {key: round(value, 3) for key, value in figure.items()}


def speedup(ours: Figures, theirs: Figures) -> float:
    """By what factor tp_engine is faster: in time per token for one request, in throughput for several."""
    if "ms_per_token" in ours:
        return round(theirs["ms_per_token"] / ours["ms_per_token"], 2)
    return round(ours["tokens_per_s"] / theirs["tokens_per_s"], 2)


def equal_share(ours: list[Measurement], theirs: list[Measurement]) -> float:
    """The share of answers whose tokens are all equal."""
    pairs = [
        mine == other
        for a, b in zip(ours, theirs, strict=True)
        for mine, other in zip(a.token_ids, b.token_ids, strict=True)
    ]
    return sum(pairs) / len(pairs)


def print_table(report: dict[str, Any]) -> None:
    software = f"torch {report['torch']}, {report['threads']} threads"
    print(f"\n{report['machine']}; {software}; {report['dtype']}, shape {report['shape']}")
    kind, ceiling = report["bandwidth"], f"decode roofline {report['decode_roofline_ms']} ms per step"
    print(f"{kind} bandwidth {report[kind + '_gb_per_s']} GB/s: {ceiling}")
    if "matmul_tflops" in report:
        print(f"matrix products {report['matmul_tflops']} TFLOP/s")
    if report.get("memory_share"):
        print(f"the engines share the GPU and take turns; each may use {report['memory_share']:.1%} of its memory")
    print(f"\n{'workload':<16}{'engine':<48}{'tokens/s':>10}{'TTFT ms':>10}{'ms/token':>10}{'roofline':>10}")
    for result in report["workloads"]:
        for name, figure in result["engines"].items():
            cells = [figure.get(key) for key in ("tokens_per_s", "ttft_ms", "ms_per_token")]
            shown = "".join(f"{cell:>10.2f}" if cell is not None else f"{'':>10}" for cell in cells)
            print(f"{result['workload']:<16}{name:<48}{shown}{figure['share_of_roofline']:>10.0%}")
        for other, ratio in result["speedup_over"].items():
            share = result["equal_answers"].get(other)
            equal = f"; {share:.0%} of the answers equal" if share is not None else ""
            print(f"{'':<16}{ratio:.2f}x {other}{equal}")
        for other, pair in result["same_checkpoint"].items():
            told = f"{pair['speedup']:.2f}x {other} from the same checkpoint"
            print(f"{'':<16}{pair['engine']}: {told}; {pair['equal_answers']:.0%} of the answers equal")
    for name, error in report["failures"].items():
        print(f"{name} failed: {error}")
    for name, reason in report.get("skipped", {}).items():
        print(f"{name} left out: {reason}")
    print()
