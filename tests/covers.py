"""``@covers``: the feature that a test compares with its oracle, on which models and numbers of ranks.

``scripts/lib/feature_table.py`` makes docs/features.md of it.  ``tests/conftest.py`` fails a test that names a model
whose configuration no test has made.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from typing import Any, TypeAlias

import pytest

Runs: TypeAlias = Iterable[tuple[str, int]]
"""(model, number of ranks); a model is a key of ``FAMILIES`` or ``IMAGE_FAMILIES``."""

# The columns of the page's two tables: feature -> what its tests compare.
ANSWERS = {
    "tokens": "greedy tokens and log-probabilities equal transformers'",
    "preemption": "so they do in chunks of prompts, when requests are preempted and computed again",
    "prefix cache": "so they do with cached prefixes",
    "split experts": "so they do with `--enable-expert-parallel`",
    "quantised": "tokens of quantised checkpoints equal those of their unquantised twins",
    "images": "answers about images equal transformers'",
    "vectors, scores": "embeddings, classes and scores equal transformers'",
}
OPTIONS = {
    "text drafts": "drafts from texts (n-gram, suffix) change no bit",
    "draft heads": "drafts of MTP and EAGLE-3 heads and assistants change no bit",
    "grammars": "constrained tokens are those of masked logits, or the same with drafts",
    "LoRA": "answers of adapters equal PEFT's",
    "KV tiers": "tokens are the same with a host or disk tier",
    "8-bit KV": "ranks agree, and errors are bounded, with a KV cache or tier of 8 bits",
    "new weights": "an engine with new weights equals one that starts with them",
    "tp-invariant": "`--tp-invariant`: the same bits on any number of ranks",
}
made = set[str]()
"""The models whose configurations this process's tests have made."""


def covers(feature: str, runs: Callable[..., Runs]) -> pytest.MarkDecorator:
    """Mark a test that compares the feature; ``runs`` takes those of the test's parameters that it names."""
    assert feature in ANSWERS | OPTIONS
    return pytest.mark.covers(feature, runs)


def covered_by(marks: Iterable[pytest.Mark]) -> Iterator[tuple[str, str, int]]:
    """Yield feature, model and number of ranks for all values of the parameters."""
    marks = list(marks)
    parameters = [list(_values(mark)) for mark in marks if mark.name == "parametrize"]
    for mark in marks:
        if mark.name == "covers":
            for values in product(*parameters):
                yield from _runs(mark, {name: value for part in values for name, value in part.items()})


def unmade(item: pytest.Function) -> list[str]:
    """The models that a test names and of which no test has made the configuration."""
    values = item.callspec.params if hasattr(item, "callspec") else {}
    runs = (_runs(mark, values) for mark in item.iter_markers("covers"))
    return sorted({model for each in runs for _, model, _ in each} - made)


def _runs(mark: pytest.Mark, values: dict[str, Any]) -> Iterator[tuple[str, str, int]]:
    feature, runs = mark.args
    wanted = inspect.signature(runs).parameters
    yield from ((feature, model, ranks) for model, ranks in runs(**{name: values[name] for name in wanted}))


def _values(mark: pytest.Mark) -> Iterator[dict[str, Any]]:
    """Yield the values of a ``parametrize`` by name."""
    names, sets = mark.args
    listed = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    is_alone = isinstance(names, str) and len(listed) == 1
    for one in sets:
        values = one.values if hasattr(one, "marks") else (one,) if is_alone else one
        yield dict(zip(listed, values, strict=True))
