"""Options that are objects: read once, at the door, and records from then on."""

from __future__ import annotations

import ast
import dataclasses
import json
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tp_engine.apps.batch.config import BatchConfig
from tp_engine.config import EngineConfig
from tp_engine.engine.rank_process import RankSpec
from tp_engine.errors import ConfigError
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.options import dump_table, parse_options
from tp_engine.options.fields import as_json
from tp_engine.options.intake import take_options
from tp_engine.server.config import ServerConfig

PACKAGE = Path(__file__).parents[3] / "tp_engine"
OBJECTS: dict[str, Any] = {
    "hf_overrides": {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
    "kv_events_config": {"enable_kv_cache_events": True, "topic": "kv"},
    "speculative_config": {"method": "mtp", "num_speculative_tokens": 4},
    "limit_mm_per_prompt": {"image": 3},
    "mm_processor_kwargs": {"size": {"longest_edge": 9}},
    "structured_outputs_config": {"whitespace_pattern": " ?"},
}
"""A value of each option that is a JSON object."""
# Where values of users come in: their parsers (those of features are in options.py), and what takes them.
DOORS = {
    "options", "config.py", "features/registry.py", "requests/structured_outputs.py",
    "api/sampling_defaults.py", "apps/advice/recommend.py", "apps/advice/command.py", "apps/check/engine_check.py",
}  # fmt: skip


def parsers() -> set[str]:
    """The functions that make options of texts and mappings, as code names them."""
    found = {"json_object"}
    for kind in (EngineConfig, ServerConfig, BatchConfig):
        for spec in dataclasses.fields(kind):
            for parse in filter(None, (spec.metadata.get("json"), spec.metadata.get("several"))):
                owner = getattr(parse, "__self__", None)
                found.add(parse.__name__ if owner is None else f"{owner.__name__}.{parse.__name__}")
    return found


def calls(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node.lineno


def test_options_are_parsed_at_the_door_alone() -> None:
    """Oracle: by hand, the files where values of users come in; every other file gets records."""
    names, found = parsers(), []
    assert {"SpeculativeConfig.of", "KVEventsConfig.of", "StructuredOutputsDefaults.of", "parse_modules"} <= names
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if not DOORS & {place, place.partition("/")[0]} and path.name != "options.py":
            found += [f"{place}:{line} {name}" for name, line in calls(path) if name in names]
    assert found == []


def test_no_options_are_patched() -> None:
    """Oracle: the names; a frozen record is changed by making another one."""
    for place in ("options", "features", "config.py", "server", "api", "apps"):
        for path in [PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).rglob("*.py"):
            assert [line for name, line in calls(path) if name == "object.__setattr__"] == [], path


def test_every_object_is_tried_here() -> None:
    """Oracle: the fields."""
    names = {spec.name for spec in dataclasses.fields(EngineConfig) if "json" in spec.metadata}
    assert names - {"feature_options"} == OBJECTS.keys()  # those of other distributions: test_features.py


@pytest.mark.parametrize("name", OBJECTS)
def test_all_ways_in_make_the_same_record(name: str) -> None:
    """Oracle: the mapping as a keyword: text, flags, keys one by one, and the record itself are the same."""
    given = OBJECTS[name]
    config = EngineConfig(**{name: given})
    text, flag = json.dumps(given), "--" + name.replace("_", "-")
    lines = [f"{flag} {shlex.quote(text)}"]
    lines.append(" ".join(f"{flag}.{key} {shlex.quote(json.dumps(value))}" for key, value in given.items()))
    values: tuple[Any, ...] = (text, getattr(config, name))
    made = [dataclasses.replace(config), *(EngineConfig(**{name: value}) for value in values)]
    for line in lines:
        options = parse_options("serve", "", {"engine": EngineConfig}, shlex.split(line))
        made.append(options.build("engine", EngineConfig))
    assert made == [config] * len(made) and config != EngineConfig()


def test_a_printed_configuration_and_one_of_another_process_are_the_same() -> None:
    """Oracle: the configuration itself, with every object and adapters."""
    given = {**OBJECTS, "enable_lora": True, "lora_modules": ["a=/x", {"name": "b", "path": "/y"}], "max_num_seqs": 9}
    config = EngineConfig(**given)
    printed = tomllib.loads(dump_table("engine", config))["engine"]
    assert EngineConfig(**take_options(printed, [EngineConfig])) == config
    assert printed["speculative_config"] == OBJECTS["speculative_config"]
    spec = RankSpec(config=config, rank=1, store_host="", store_port=1, parent_pid=1, board="")
    assert msgspec.json.decode(msgspec.json.encode(spec), type=RankSpec).config == config


@pytest.mark.parametrize("value", [None, float("inf"), 'a\x7f"\n', [1, None], {"b.c": [True, 0.5, {"d": "é"}]}, {}])
def test_what_is_printed_reads_back(value: Any) -> None:
    """Oracle: the configuration itself, also with what TOML has no word for."""
    given: dict[str, Any] = {"hf_overrides": {"a key": value}, "model": "m\x7f"}
    config = EngineConfig(**given)
    printed = tomllib.loads(dump_table("engine", config))["engine"]
    assert EngineConfig(**take_options(printed, [EngineConfig])) == config


@pytest.mark.parametrize(
    "given",
    [
        {"method": "mtp"},
        {"method": "mtp", "num_speculative_tokens": 4},
        {"method": "ngram"},
        {"prompt_lookup_max": 1},
        {"prompt_lookup_min": 7},
        {"model": "a/head"},
    ],
)
def test_the_text_of_a_record_is_the_record(given: dict[str, Any]) -> None:
    """Oracle: the record: defaults that follow from other keys are written where these do not say them."""
    config = SpeculativeConfig.of(given)
    assert config is not None and SpeculativeConfig.of(as_json(config)) == config


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"lora_modules": 3, "enable_lora": True}, "lora_modules is 3; it must be texts"),
        ({"lora_modules": [""], "enable_lora": True}, "lora_modules is ''; it must be texts"),
        ({"lora_modules": ["[a"], "enable_lora": True}, "lora_modules begins like a JSON list"),
        ({"lora_modules": ["a=/x", "b=/y"]}, "lora_modules is 'a=/x b=/y', and enable_lora is off"),
        ({"hf_overrides": {"a": object()}}, "hf_overrides cannot be written as JSON"),
        ({"mm_processor_kwargs": "[1]"}, "mm_processor_kwargs is '.1.'; it must be a JSON object"),
        ({"limit_mm_per_prompt": {"image": 5000}}, "has image 5000; it must be a whole number from 0"),
    ],
)
def test_what_is_no_record_is_refused(given: dict[str, Any], words: str) -> None:
    """Oracle: the option, the value, the rule, before any model is read."""
    with pytest.raises(ConfigError, match=words):
        EngineConfig(**given)
