"""The table of docs/benchmarks/readme.json, and where the documents show it."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs" / "benchmarks" / "readme.json"
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "benchmarks" / "engines.md")
BEGIN, END = "<!-- figures of scripts/readme_figures -->", "<!-- end of the figures -->"
COLUMNS = 120
_WORKLOADS = {
    "latency": "one request",
    "throughput": "32 requests",
    "shared_prefix": "32 with a shared prefix",
}
_LOWER_IS_BETTER = ("ms per token", "ms to the first token")
Report = Mapping[str, Any]


def read_figures() -> Report | None:
    """The file of figures; None (null) before a run has written it."""
    report: Report | None = json.loads(FIGURES.read_text(encoding="utf-8"))
    return report


def update_documents(report: Report) -> None:
    """Write the table into each document, between its marks."""
    for path in DOCUMENTS:
        path.write_text(updated(path.read_text(encoding="utf-8"), report), encoding="utf-8")


def updated(text: str, report: Report | None) -> str:
    """A document with the table between its marks, with nothing before there are figures; ``ValueError`` without
    marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"a document has no lines {BEGIN} and {END}, between which the table belongs")
    told = f"\n{section(report)}\n\n" if report else ""
    return f"{before}{begin}\n{told}{end}{after}"


def section(report: Report) -> str:
    """What stands between the marks: where and how it was measured, the table, and what it lacks."""
    rounds = sorted({len(figure["rounds"]) for model in report["models"] for figure in model["figures"]})
    told = (
        f"On CPUs, beside other engines ({machine(report)}, {report['date']}): each is a server with the checkpoint in "
        "bf16, and one client asks them in turns. SmolLM2-135M is a real model, B a Llama of 12 layers x 768 with "
        "random weights. One request has 128 tokens in and out, 32 requests have 16 to 128 of both, and 32 with a "
        f"shared prefix begin with the same 256 tokens and get 16. Median of {' or '.join(map(str, rounds))} "
        "rounds, in brackets the lowest and the highest; "
        "the best of a row is bold."
    )
    lines = [*textwrap.wrap(told, COLUMNS, break_on_hyphens=False), "", *table(report)]
    for engine, reason in report["left_out"].items():
        lines += ["", *textwrap.wrap(f"{engine} is left out: {reason}", COLUMNS, break_on_hyphens=False)]
    return "\n".join(lines)


def machine(report: Report) -> str:
    """The processor's name without marks of trade, and its cores."""
    return re.sub(r"\s+", " ", re.sub(r"\((?:R|TM)\)|(?:Processor|CPU)\b", "", report["machine"])).replace(" ,", ",")


def table(report: Report) -> Iterator[str]:
    """The lines of the table: a column for each engine, a row for each model, workload and unit."""
    engines = list(dict.fromkeys(figure["engine"] for model in report["models"] for figure in model["figures"]))
    versions = {name: "" if name == "tp_engine" else f" {report['versions'][name]}" for name in engines}
    yield f"| | {' | '.join(f'{name}{version}'.strip() for name, version in versions.items())} |"
    yield f"| ---{' | ---' * len(engines)} |"
    for model in report["models"]:
        rows: dict[tuple[str, str], dict[str, Mapping[str, Any]]] = {}
        for figure in model["figures"]:
            rows.setdefault((figure["workload"], figure["unit"]), {})[figure["engine"]] = figure
        for (workload, unit), found in rows.items():
            best = (min if unit in _LOWER_IS_BETTER else max)(one["median"] for one in found.values())
            cells = [cell(found[engine], best) if engine in found else "-" for engine in engines]
            yield f"| {model['model']}: {_WORKLOADS[workload]}, {unit} | {' | '.join(cells)} |"


def cell(figure: Mapping[str, Any], best: float) -> str:
    """The median, bold if it is the row's best, and the lowest and the highest round."""
    median, low, high = (
        f"{figure[name]:,.3g}" if figure[name] < 100 else f"{figure[name]:,.0f}" for name in ("median", "low", "high")
    )
    return f"{f'**{median}**' if figure['median'] == best else median} ({low}-{high})"
