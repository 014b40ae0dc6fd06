"""The pages of docs/ name everything that a user can send or set, and only things that exist."""

from __future__ import annotations

import argparse
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from lib import feature_table, generated, gpu_table

from tests.covers import ANSWERS, OPTIONS
from tests.families import FAMILIES
from tp_engine.api.openai.reasoning import REASONING_FORMATS
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.apps.batch.config import BatchConfig
from tp_engine.config import EngineConfig
from tp_engine.options.flags import make_parser
from tp_engine.server.app import create_app
from tp_engine.server.config import ServerConfig
from tp_engine.server.state import ServerState

DOCS = Path(__file__).parents[3] / "docs"
LAUNCHERS = ({"engine": EngineConfig, "server": ServerConfig}, {"engine": EngineConfig, "batch": BatchConfig})
FLAG = re.compile(r"`(-{1,2}[a-z][a-z0-9-]*)(?: [^`]*)?`")
# The app adds these by itself; they are not routes of the schema.
DESCRIPTION_PATHS = {"/openapi.json", "/docs", "/redoc"}


@cache
def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def section(title: str) -> str:
    """The text of docs/http_api.md under ``## title``, up to the next section."""
    return page("http_api.md").split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_column(text: str) -> str:
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return "\n".join(row.split(" | ")[0] for row in rows)


def flags() -> set[str]:
    """Every spelling that the launchers' ``--help`` shows, except the ``--no-x`` of a ``--x``."""
    actions = [action for tables in LAUNCHERS for action in make_parser("serve", "", tables)._actions]
    names = {name for action in actions if action.help != argparse.SUPPRESS for name in action.option_strings}
    return {name for name in names if not name.startswith("--no-")}


@cache
def schema() -> dict[str, Any]:
    return create_app(ServerState(ServerConfig(), ("demo",))).openapi()


def body_fields(prefix: str = "/") -> set[str]:
    """The names of the fields of the bodies of all paths that begin with ``prefix``."""
    names: set[str] = set()
    for path, operations in schema()["paths"].items():
        for operation in operations.values() if path.startswith(prefix) else ():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            names |= body.get("properties", {}).keys()
    return names


def test_every_flag_is_documented() -> None:
    """Oracle: the parser of the launchers, in both directions."""
    names = "\n".join(line.split(": ")[0] for line in (page("flags_engine.md") + page("flags_server.md")).splitlines())
    documented = set(FLAG.findall("\n".join(line for line in names.splitlines() if line.startswith("* `-"))))
    assert sorted(flags() - documented) == [], "scripts/generate writes the pages of flags"
    assert sorted(documented - flags()) == [], "the pages of flags name one that does not exist"


@pytest.mark.parametrize("name", sorted(generated.files()))
def test_generated_files_are_current(name: str) -> None:
    """Oracle: what ``scripts/generate`` writes."""
    assert (DOCS.parent / name).read_text(encoding="utf-8") == generated.files()[name], "run scripts/generate"


@pytest.mark.slow
def test_the_page_of_gpus_is_current() -> None:
    """Oracle: what ``scripts/generate`` writes: the first row whole, of the others the models."""
    text = gpu_table.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| \S.*GiB \| [-\d].*$", text, re.MULTILINE)
    (title, config), *others = gpu_table.models().items()
    assert [line.split(" | ")[0][2:] for line in rows[1:]] == [name for name, _ in others]
    assert text == gpu_table.page([gpu_table.row(title, config), *rows[1:]]), "run scripts/generate"


@pytest.mark.slow
def test_the_page_of_features_is_current() -> None:
    """Oracle: the marks and parameters of the tests, and the table of families."""
    text, remedy = feature_table.PAGE.read_text(encoding="utf-8"), "run scripts/generate"
    tables = [re.findall(r"^\| `.*", part, re.MULTILINE) for part in text.split("\nArchitectures that are not")]
    assert {row.split("`")[1] for row in tables[0]} == set(map(feature_table.architecture, FAMILIES)), remedy
    told = {
        (row.split("`")[1], feature): cell
        for rows, features in zip(tables, (ANSWERS, OPTIONS), strict=True)
        for row in rows
        for feature, cell in zip(features, row.removesuffix(" |").split(" | ")[1:], strict=True)
        if cell[:1].isdigit()
    }
    assert told == {place: feature_table.shown(ranks) for place, ranks in feature_table.read_covered().items()}, remedy
    assert text == feature_table.page(*tables), remedy


def test_every_endpoint_is_documented() -> None:
    """Oracle: the server's own schema, in both directions."""
    there = {f"{method.upper()} {path}" for path, operations in schema()["paths"].items() for method in operations}
    documented = set(re.findall(r"`([A-Z]+ /[^`]*)`", first_column(section("Endpoints"))))
    assert sorted(there - documented) == [], "add a row to docs/http_api.md, Endpoints"
    stale = {name for name in documented - there if name.split()[1] not in DESCRIPTION_PATHS}
    assert sorted(stale) == [], "docs/http_api.md names an endpoint that does not exist"


def test_every_request_field_is_documented() -> None:
    """Oracle: the bodies' schemas, in both directions."""
    documented = set(re.findall(r"`([a-z_0-9]+)`", first_column(section("Request fields"))))
    assert sorted(body_fields("/v1/") - documented) == [], "add a row to docs/http_api.md, Request fields"
    assert sorted(documented - body_fields()) == [], "docs/http_api.md names a field that does not exist"
    beside_endpoints = set(re.findall(r"`([a-z_]+)`", section("Endpoints")))
    assert sorted(body_fields() - documented - beside_endpoints) == [], "name it in docs/http_api.md, Endpoints"


def test_formats_of_calls_and_reasoning() -> None:
    """Oracle: the tables of formats: a row for each, with its models, and one with its other names."""
    rows = page("tools.md").splitlines()
    for name, calls in TOOL_FORMATS.items():
        assert any(row.startswith(f"| `{name}` | {calls.models} | ") for row in rows), name
    names = [(name, calls.aliases) for name, calls in TOOL_FORMATS.items()]
    names += [(name, reasoning.aliases) for name, reasoning in REASONING_FORMATS.items()]
    for name, aliases in names:
        row = "".join(row for row in rows if row.startswith(f"| `{name}` | "))
        assert row and all(f"`{alias}`" in row for alias in aliases), name
