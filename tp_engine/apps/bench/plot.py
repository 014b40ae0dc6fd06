"""Plots of benchmarks, as SVG or PNG files: latency and throughput over load, and engines beside each other.

matplotlib is the extra ``bench``, and imported when a plot is drawn.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Field names of ``vllm bench serve``: title, median or only line, and the line of the slowest hundredth.
_OVER_LOAD = (
    ("time to first token, ms", "median_ttft_ms", "p99_ttft_ms"),
    ("time per output token, ms", "median_tpot_ms", "p99_tpot_ms"),
    ("output tokens/s", "output_throughput", None),
)
_OF_WORKLOADS = (("output tokens/s", "tokens_per_s"), ("ms per token of one request", "ms_per_token"))


def plot_file(text: str) -> Path:
    """The value of ``--plot``: checked before a long measurement begins."""
    path = Path(text)
    if path.suffix not in (".svg", ".png"):
        raise argparse.ArgumentTypeError(f"{text}: the name of a plot must end in .svg or .png")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("plots need matplotlib: pip install 'tp-engine[bench]', or leave --plot out")
    return path


def earlier_run(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The value of ``--plot-beside``: ``NAME=FOLDER``, result files of this benchmark or of ``vllm bench serve``."""
    name, _, folder = text.partition("=")
    results = []
    for path in sorted(Path(folder).glob("*.json")) if folder else ():
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{path} is not JSON: {error}") from error
        if isinstance(found, dict) and "request_throughput" in found:
            results.append(found)
    if not results:
        raise argparse.ArgumentTypeError(
            f"{text}: give NAME=FOLDER, a folder with the files of --result-dir or of vllm bench serve --save-result"
        )
    return name, results


def plot_over_load(runs: Mapping[str, Sequence[Mapping[str, Any]]], title: str, path: Path) -> None:
    """Draw latency and throughput over the load, a colour per run; results without a completed request are left out.

    The load is what was completed per second, so an overloaded server shows as a line that goes up.
    """
    figure, axes = _figure(len(_OVER_LOAD), title)
    for name, results in runs.items():
        done = sorted(
            (one for one in results if one["completed"]), key=lambda one: float(one.get("request_rate") or "inf")
        )
        load = [one["request_throughput"] for one in done]
        for ax, (label, middle, slowest) in zip(axes, _OVER_LOAD, strict=True):
            (line,) = ax.plot(
                load, [one[middle] for one in done], marker="o", label=f"{name}, p50" if slowest else name
            )
            if slowest is not None and all(slowest in one for one in done):
                slow = [one[slowest] for one in done]
                ax.plot(load, slow, marker=".", linestyle="--", color=line.get_color(), label=f"{name}, p99")
            ax.set_title(label)
    for ax in axes:
        ax.set_xlabel("completed requests/s")
        ax.set_xlim(left=0)
    _write(figure, axes, path)


def plot_workloads(results: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw a bar per engine for each workload, from few requests to many; engines that failed have none."""
    figure, axes = _figure(len(_OF_WORKLOADS), title)
    engines = list(dict.fromkeys(name for result in results for name in result["engines"]))
    width = 0.8 / max(1, len(engines))
    for ax, (label, field) in zip(axes, _OF_WORKLOADS, strict=True):
        shown = [one for one in results if any(field in figure for figure in one["engines"].values())]
        for number, name in enumerate(engines):
            places = [place + (number - (len(engines) - 1) / 2) * width for place in range(len(shown))]
            heights = [one["engines"].get(name, {}).get(field, float("nan")) for one in shown]
            bars = ax.bar(places, heights, width, label=name)
            ax.bar_label(bars, fmt="{:,.4g}", fontsize="x-small")
        ax.set_xticks(range(len(shown)), [one["workload"] for one in shown])
        ax.set_title(label)
    _write(figure, axes, path)


def _figure(num_axes: int, title: str) -> tuple[Figure, list[Axes]]:
    """An empty figure with axes side by side; no window, whatever the settings of matplotlib are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * num_axes, 3.8), layout="constrained")
    figure.suptitle(title, fontsize="medium")
    return figure, list(figure.subplots(1, num_axes, squeeze=False)[0])


def _write(figure: Figure, axes: Sequence[Axes], path: Path) -> None:
    from matplotlib import rc_context

    for ax in axes:
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize="small")
    # Text stays text, and equal figures give equal files.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "tp_engine"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)
