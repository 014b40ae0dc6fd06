"""A new flag is a field: everything that users see follows from its declaration."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from lib import generated

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.options import dump_table, parse_options
from tp_engine.options.fields import checked, option
from tp_engine.options.flags import make_parser
from tp_engine.options.intake import take_options


@checked()
@dataclass(frozen=True, kw_only=True)
class WithToy(EngineConfig):
    """The engine's options and two more."""

    toy_size: int = option(4, "toys in a box", least=1, most=9, flags=("--toys",), section="Toys")
    toy_bytes: int | None = option(None, "room for toys (default: none)", size=True, positive=True)


TABLES = {"engine": WithToy}


def built(*argv: str) -> WithToy:
    return parse_options("serve", "", TABLES, argv).build("engine", WithToy)


def test_help_and_page() -> None:
    """Oracle: the words of the declaration, in both."""
    text = make_parser("serve", "", TABLES).format_help()
    assert "Toys:\n  --toy-size, --toys N" in text and "toys in a box (default: 4)" in text
    page = generated.page("Flags", generated.sections(TABLES))
    assert "## Toys\n\n* `--toy-size N`, `--toys`: toys in a box (default: 4)\n* `--toy-bytes SIZE`: room" in page


def test_all_ways_in(tmp_path: Path) -> None:
    """Oracle: the values, as flags in each spelling, in TOML and YAML, as keywords, and printed."""
    wanted = WithToy(toy_size=7, toy_bytes=1 << 20)
    toml, yaml = tmp_path / "a.toml", tmp_path / "a.yaml"
    toml.write_text('[engine]\ntoys = 7\ntoy_bytes = "1MiB"\n')
    yaml.write_text("toy-size: 7\ntoy_bytes: 1MiB\n")
    assert wanted == built("--toys", "7", "--toy-bytes=1MiB") == built("--toy_size=7", "--toy-bytes", "1MiB")
    assert wanted == built("--config", str(toml)) == built("--config", str(yaml))
    assert wanted == WithToy(**take_options({"toys": 7, "toy_bytes": "1MiB"}, [WithToy], where="LLM"))
    printed = tomllib.loads(dump_table("engine", wanted))["engine"]
    assert WithToy(**take_options(printed, [WithToy])) == wanted


def test_typed_keywords() -> None:
    """Oracle: the types that a caller may give, by hand."""
    found = generated.keywords(WithToy)
    assert (found["toy_size"], found["toy_bytes"]) == ("int", "int | str | None")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--toys", "10"], "toy_size is 10; it must be at least 1, and at most 9"),
        (["--toy-size", "many"], "--toy-size/--toys: invalid int value: 'many'"),
        (["--toy-bytes", "0"], "toy_bytes is 0; it must be positive"),
        (["--toy-siz", "3"], "did you mean --toy-size"),
    ],
)
def test_its_check(argv: list[str], words: str) -> None:
    """Oracle: the value, the rule and the remedy."""
    with pytest.raises(ConfigError, match=words):
        built(*argv)
