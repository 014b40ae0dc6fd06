"""The page of all causal classes of transformers, docs/classes.md: who describes each, or why none does.

Each class is asked as at a start, with the configuration that its own defaults make.  That takes minutes, so the
answers are kept in docs/classes.json, and a test asks a few again.

Usage: python -m lib.class_table [--ask [CLASS ...]], in scripts/; without --ask it writes the page from the file
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tp_engine.model_config.asking import ask
from tp_engine.model_config.families import families
from tp_engine.model_config.installed_classes import transformers_version

ROOT = Path(__file__).parents[2]
PAGE, DATA = ROOT / "docs" / "classes.md", ROOT / "docs" / "classes.json"
WAYS = {
    "native": "a family of this engine reads its config.json",
    "recognised": "its layers are like native ones, which run it",
    "transformers": "its own modules run, with this engine's attention, products and cache",
    "refused": "the reason follows",
}
# What a class's defaults leave out, as its published checkpoints say it.
_CHANGES: dict[str, dict[str, Any]] = {
    "Dots1ForCausalLM": {
        "n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_key_value_heads": 32,
    },
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128, "num_experts": 16, "moe_topk": 2},
    "MinistralForCausalLM": {"head_dim": 128},
    "NemotronForCausalLM": {"num_key_value_heads": 48},
}  # fmt: skip
_AT_ONCE = 2
_WIDTH = 120
_TEXT = """# All causal classes of transformers

What serves each causal class of transformers {version}, with the configuration that its defaults make: another one of
the class may ask for more or less. [Models](models.md#other-classes-of-transformers) tells how a class is asked.

{counts}

`scripts/generate` writes the page. In `scripts/`, `python -m lib.class_table --ask` asks the installed transformers
again.

| class | way | what is missing |
| --- | --- | --- |
{rows}
"""


def class_names() -> list[str]:
    """Return the causal classes of the installed transformers, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def default_values(name: str) -> dict[str, Any]:
    """Return the config.json of a class with nothing but its defaults, where these are whole."""
    import transformers

    config = getattr(transformers, name).config_class(**_CHANGES.get(name, {}))
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [name]}


def way_of(name: str) -> tuple[str, str]:
    """Return what serves the class, and the reason if nothing does."""
    if name in families():
        return "native", ""
    try:
        values = default_values(name)
    except Exception as error:  # whatever the class's configuration raises
        return "refused", f"its configuration cannot be made of its defaults: {type(error).__name__}"
    answer = ask(values)
    return answer.way, answer.problem


def asked_ways(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Ask all of them."""
    import transformers

    listed = list(names)
    for name in listed:
        getattr(transformers, name, None)  # its lazy imports are not for several threads
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(listed, pool.map(way_of, listed), strict=True))


def read_data() -> tuple[str, dict[str, tuple[str, str]]]:
    """Return the version of transformers that was asked, and its answers."""
    data = json.loads(DATA.read_text(encoding="utf-8"))
    return data["transformers"], {name: (way, reason) for name, way, reason in data["classes"]}


def write_data(ways: Mapping[str, tuple[str, str]]) -> None:
    """Keep the answers of the installed transformers."""
    rows = ",\n".join(f"  {json.dumps([name, *found])}" for name, found in sorted(ways.items()))
    DATA.write_text(f'{{\n"transformers": "{transformers_version()}",\n"classes": [\n{rows}\n]\n}}\n', encoding="utf-8")


def page(version: str, ways: Mapping[str, tuple[str, str]]) -> str:
    """Return the text of docs/classes.md."""
    found = Counter(way for way, _ in ways.values())
    counts = "\n".join(f"* {way}, {found[way]} classes: {meaning}" for way, meaning in WAYS.items() if found[way])
    rows = "\n".join(_row(f"| `{name}` | {way} |", reason) for name, (way, reason) in ways.items())
    return _TEXT.format(version=version, counts=counts, rows=rows)


def _row(head: str, reason: str) -> str:
    """The line of a class, with as much of the reason as a line of the documents has room for."""
    plain, room = re.sub(r"\s+", " ", reason).replace("|", "/"), _WIDTH - len(head) - 3
    return f"{head} {plain if len(plain) <= room else plain[: room - 4].rpartition(' ')[0] + ' ...'} |"


def main() -> None:
    """Write the page, and before it, if told to, ask."""
    parser = argparse.ArgumentParser(description="The table in docs/classes.md.")
    parser.add_argument("--ask", nargs="*", metavar="CLASS", help="ask these classes again; without a name, all")
    names = parser.parse_args().ask
    if names is not None:
        known = dict(read_data()[1]) if names else {}
        write_data({**known, **asked_ways(names or class_names())})
    PAGE.write_text(page(*read_data()), encoding="utf-8")


if __name__ == "__main__":
    main()
