"""Configuration tables from TOML files and back."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.options.cli import did_you_mean
from tp_engine.units import parse_bytes, parse_count


def load_tables(path: str, tables: Mapping[str, type[Any]]) -> dict[str, dict[str, Any]]:
    """Read ``path``; every table is present in the result.  Raises ``ConfigError`` that names file, key and remedy."""
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can not read the configuration file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    for name in document:
        if name not in tables:
            known = ", ".join(f"[{table}]" for table in tables)
            raise ConfigError(f"{path}: unknown entry {name!r}; a file has the tables {known}")
    return {name: _read_table(path, name, document.get(name, {}), kind) for name, kind in tables.items()}


def _read_table(path: str, name: str, table: Any, kind: type[Any]) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: {name} is {table!r}; it must be a table, [{name}]")
    check_names(f"{path}, [{name}]", table, kind)
    specs = {spec.name: spec for spec in dataclasses.fields(kind)}
    return {key: _convert(specs[key], value) for key, value in table.items()}


def check_names(where: str, names: Iterable[str], kind: type[Any]) -> None:
    """Refuse a name that is no field of ``kind``, naming the nearest one that is."""
    known = [spec.name for spec in dataclasses.fields(kind)]
    for name in names:
        if name not in known:
            raise ConfigError(f"{where}: unknown option {name}{did_you_mean(name, known)}")


def _convert(spec: dataclasses.Field[Any], value: Any) -> Any:
    """TOML has no tuples, and sizes may be written as text; everything else is checked by the dataclass itself."""
    if spec.metadata.get("size") and isinstance(value, str):
        return parse_bytes(value)
    if spec.metadata.get("count") and isinstance(value, str):
        return parse_count(value)
    if str(spec.type).startswith("tuple"):
        return tuple(value) if isinstance(value, list) else (value,)
    return value


def dump_table(name: str, config: Any) -> str:
    """One ``[name]`` table with every field; fields without a value, and secrets, appear as comments."""
    lines = [f"[{name}]"]
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if value is None or (spec.metadata.get("secret") and not value):
            lines.append(f"# {spec.name} is not set")
        elif spec.metadata.get("secret"):
            lines.append(f"# {spec.name} is set and not shown")
        else:
            lines.append(f"{spec.name} = {json.dumps(value, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"
