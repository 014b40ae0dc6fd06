"""The page that says which model fits on which GPUs, as ``recommend`` calculates it.

It makes each model without its weights for every number of ranks that is tried, which takes half a minute, so a test
computes the first row alone.

Usage: python -m lib.gpu_table, in scripts/
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gpu.slices import COMMON, WHOLES

from tp_engine.apps.advice.question import find_gpu, find_workload
from tp_engine.apps.advice.recommend import recommend
from tp_engine.apps.bench.shapes import qwen3_config
from tp_engine.model_config import read_model
from tp_engine.system.units import format_gib

PAGE = Path(__file__).parents[2] / "docs" / "which_gpus.md"
GPUS = {"rtx4090": "RTX 4090", "l40s": "L40S", "h100": "A100, H100", "h200": "H200", "b200": "B200"}
_QWEN3 = {"qwen3-0.6b": "0.6B", "qwen3-8b": "8B", "qwen3-14b": "14B", "qwen3-32b": "32B", "qwen3-30b-a3b": "30B-A3B"}
_WHOLES = {
    "llama-70b-tp8": "Llama 3 70B",
    "qwen3.5-35b-a3b-tp2": "Qwen3.5-35B-A3B",
    "qwen3-235b-tp8": "Qwen3-235B-A22B",
    "gpt-oss-120b-tp4": "gpt-oss-120b",
}
_PUBLISHED = {"gpt-oss-120b-tp4": {"intermediate_size": 2880}}  # the slice's is padded
_TEXT = """# Which model on which GPUs

How many GPUs a model needs at least, and how many chats they hold at once: what `tp-engine recommend` calculates from
config.json before anything is loaded. These figures are calculated, not measured; `scripts/generate` writes the page.

```sh
tp-engine recommend --model Qwen/Qwen3-8B --gpu h100
```

A cell is the smallest number of GPUs, and behind it the chats of {tokens} tokens that their KV cache holds at once. A
dash means that no number up to {most} is enough. Weights are in bfloat16, or as the checkpoint has them.

{table}

Fewer GPUs do if weights or cache have fewer bits (`--quantization fp8`, `int4`, `--kv-cache-dtype fp8`) or the context
is shorter (`--max-model-len`); more GPUs make a token faster. Other models and lengths: `tp-engine recommend --help`.
Models and formats that are served at all are in [Models](models.md); [Throughput and latency](faster.md) says what to
do when the server runs.
"""
MOST_RANKS = 8


def models() -> dict[str, Mapping[str, Any]]:
    """Return the config.json of each row, as published."""
    small = {f"Qwen3-{size}": qwen3_config(shape, "bfloat16") for shape, size in _QWEN3.items()}
    return small | {
        title: {**COMMON, **WHOLES[name].sizes, **_PUBLISHED.get(name, {})} for name, title in _WHOLES.items()
    }


def row(title: str, config: Mapping[str, Any]) -> str:
    """Return the line of a model: the bytes of its weights, and a cell for each GPU."""
    model, cells, total = read_model(config), [], 0
    for gpu in GPUS:
        found = recommend(model, gpu=gpu)
        total = found.weight_bytes * found.tensor_parallel_size
        holds = found.fits and found.tensor_parallel_size <= MOST_RANKS
        cells.append(f"{found.tensor_parallel_size}: {found.expected_concurrency:,.0f}" if holds else "-")
    return f"| {title} | {format_gib(total)} | {' | '.join(cells)} |"


def page(rows: Iterable[str]) -> str:
    """Return the text of docs/which_gpus.md with these rows."""
    titles = [f"{name}, {find_gpu(gpu).memory / 2**30:.0f} GiB" for gpu, name in GPUS.items()]
    head = f"| model | weights | {' | '.join(titles)} |\n| --- | --- |{' --- |' * len(GPUS)}"
    chat = find_workload("chat")
    return _TEXT.format(tokens=f"{chat.prompt + chat.output:,.0f}", most=MOST_RANKS, table="\n".join([head, *rows]))


if __name__ == "__main__":
    PAGE.write_text(page(row(title, config) for title, config in models().items()), encoding="utf-8")
