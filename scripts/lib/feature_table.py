"""The page that says which features are tested on which models, read from the tests' ``@covers`` marks.

What a model lacks or is refused follows from its configuration; a test compares the rest, which is quicker.

Usage: python -m lib.feature_table, in scripts/
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tests.covers import ANSWERS, OPTIONS, covered_by
from tests.families import FAMILIES
from tests.image_models import IMAGE_FAMILIES
from tests.tiny_models import make_config
from tp_engine.model_config import read_model
from tp_engine.model_config.spec import AttentionSpec, ModelSpec

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "features.md"
_TEXT = """# Which feature on which models

Which features are tested on which architectures, and on how many ranks. `scripts/generate` writes the page from the
parameters of the tests; a cell has the numbers of ranks on which a test compares the feature with its oracle.

An empty cell means that no test compares it; **-** that the architecture has no such part; **no** that the engine
refuses it at the start, with the reason.

{answers}

Architectures that are not in this table are tested with none of these:

{options}

What is compared:

{meanings}

The models are tiny ones of each family, on CPUs. [Models](models.md) names the checkpoints of each architecture, and
[Benchmarks](benchmarks.md) tells what has run on GPUs.
"""


def _is_missing(feature: str) -> Callable[[ModelSpec], bool] | None:
    """Whether a model has no part for the feature; None if every model has."""
    return {
        "images": lambda model: model.vision is None,
        "split experts": lambda model: all(layer.experts is None for layer in model.layers),
    }.get(feature)


def _is_refused(feature: str) -> Callable[[ModelSpec], bool] | None:
    """Whether the engine refuses the feature for a model; None if for none."""
    return {
        "KV tiers": lambda model: model.kv_layout.states is not None,
        "tp-invariant": lambda model: any(
            isinstance(one, AttentionSpec) and one.qk_norm is not None and one.qk_norm.spans_heads
            for one in model.attentions
        ),
    }.get(feature)


def architecture(model: str) -> str:
    """Return the name in config.json of a tests' model."""
    name = (FAMILIES.get(model) or IMAGE_FAMILIES[model]).model
    return next((family.hub_name for family in FAMILIES.values() if family.model == name and family.hub_name), name)


def read_covered() -> dict[tuple[str, str], set[int]]:
    """Return the numbers of ranks by architecture and feature, of all tests with marks."""
    found: dict[tuple[str, str], set[int]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "\n@covers(" not in path.read_text(encoding="utf-8"):
            continue
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for test in vars(module).values():
            for feature, model, ranks in covered_by(getattr(test, "pytestmark", ())):
                found.setdefault((architecture(model), feature), set()).add(ranks)
    return found


def read_specs() -> dict[str, list[ModelSpec]]:
    """Return the tests' models of each architecture."""
    specs: dict[str, list[ModelSpec]] = {}
    for name in FAMILIES:
        config = json.loads(make_config(name).to_json_string())
        specs.setdefault(architecture(name), []).append(read_model(config | {"architectures": [architecture(name)]}))
    return specs


def shown(ranks: Iterable[int]) -> str:
    """Return the text of a cell that a test covers."""
    return ", ".join(map(str, sorted(ranks)))


def row(
    name: str, features: Iterable[str], models: Iterable[ModelSpec], covered: Mapping[tuple[str, str], set[int]]
) -> str:
    """Return the line of an architecture."""
    cells = (
        shown(covered[name, feature]) if (name, feature) in covered else _without(feature, models)
        for feature in features
    )
    return f"| `{name}` | {' | '.join(cells)} |"


def page(answers: Iterable[str], options: Iterable[str]) -> str:
    """Return the text of docs/features.md with the rows of the two tables."""
    return _TEXT.format(
        answers="\n".join([*_head(ANSWERS), *answers]),
        options="\n".join([*_head(OPTIONS), *options]),
        meanings="\n".join(f"* {feature}: {meaning}" for feature, meaning in (ANSWERS | OPTIONS).items()),
    )


def _head(features: Iterable[str]) -> tuple[str, str]:
    names = ["architecture", *features]
    return f"| {' | '.join(names)} |", f"|{' --- |' * len(names)}"


def _without(feature: str, models: Iterable[ModelSpec]) -> str:
    """Return the text of a cell that no test covers."""
    for text, rule in (("-", _is_missing(feature)), ("no", _is_refused(feature))):
        if rule is not None and all(map(rule, models)):
            return text
    return ""


if __name__ == "__main__":
    covered, specs = read_covered(), read_specs()
    with_options = [name for name in specs if any((name, feature) in covered for feature in OPTIONS)]
    text = page(
        (row(name, ANSWERS, models, covered) for name, models in specs.items()),
        (row(name, OPTIONS, specs[name], covered) for name in with_options),
    )
    PAGE.write_text(text, encoding="utf-8")
