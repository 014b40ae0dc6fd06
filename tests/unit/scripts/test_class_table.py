"""The table of transformers' causal classes in docs/classes.md: whole, current, and true of classes that are drawn."""

from __future__ import annotations

import random

import pytest
from lib import class_table

from tp_engine.model_config.families import families
from tp_engine.model_config.installed_classes import transformers_version
from tp_engine.models.recognition import child

VERSION, WAYS = class_table.read_data()
_DRAWN = {"recognised": 2, "refused": 3}

needs_its_version = pytest.mark.skipif(
    transformers_version() != VERSION, reason=f"the table is of transformers {VERSION}; class_table --ask makes another"
)


def drawn() -> list[str]:
    source = random.Random(5)
    return [
        name
        for way, count in _DRAWN.items()
        for name in source.sample(sorted(name for name, found in WAYS.items() if found[0] == way), count)
    ]


@needs_its_version
def test_each_class_of_transformers_has_a_row() -> None:
    """Oracle: the installed transformers, and the engine's families."""
    names = class_table.class_names()
    assert sorted(WAYS) == names
    assert {name for name, (way, _) in WAYS.items() if way == "native"} == set(names) & set(families())
    assert all((way == "refused") == bool(reason) and way in class_table.WAYS for way, reason in WAYS.values())


def test_the_page_has_the_table() -> None:
    """Oracle: what ``scripts/generate`` writes of docs/classes.json."""
    assert class_table.PAGE.read_text(encoding="utf-8") == class_table.page(VERSION, WAYS), "run scripts/generate"


@needs_its_version
@pytest.mark.parametrize("name", drawn())
def test_drawn_rows_hold(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the class itself, asked again."""
    monkeypatch.setattr(class_table, "ask", child.answer)
    assert class_table.way_of(name) == WAYS[name]
