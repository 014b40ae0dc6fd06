"""Options from the command line and from TOML files; the fields of configuration dataclasses define both.

Every dataclass is one *table*.  Its fields are flags (``--block-size 32``) and keys of that table in the file of
``--config`` (``[engine]`` ``block_size = 32``).  The command line overrides the file, and the file overrides the
defaults, which exist only in the dataclasses.
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tp_engine.errors import ConfigError
from tp_engine.options.fields import plain
from tp_engine.options.flags import MODEL_TAG, make_parser
from tp_engine.options.intake import flag_of, take_options
from tp_engine.system.files import read_text
from tp_engine.system.log import get_logger

Config = TypeVar("Config")

logger = get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class Options:
    """The values given per table.  ``print_config``: print the effective configuration instead of running.

    ``notes`` say what became of options of other servers.
    """

    tables: Mapping[str, type[Any]]
    given: dict[str, dict[str, Any]]
    print_config: bool = False
    notes: list[str] = field(default_factory=list)
    _built: dict[str, Any] = field(default_factory=dict)

    def build(self, table: str, kind: type[Config]) -> Config:
        """Return the configuration of one table.  Raises ``ConfigError`` if a value breaks a rule."""
        assert self.tables[table] is kind
        config: Config = kind(**self.given[table])
        self._built[table] = config
        return config

    def effective_toml(self) -> str:
        """Return the tables built so far, as a file for ``--config``, without secrets."""
        return "\n".join(dump_table(name, config) for name, config in self._built.items())


def parse_options(
    prog: str, description: str, tables: Mapping[str, type[Any]], argv: Sequence[str] | None = None
) -> Options:
    """Parse ``argv`` (default: that of this process) and the TOML file that it names.  Raises ``ConfigError``."""
    flags = vars(make_parser(prog, description, tables).parse_args(argv))
    notes: list[str] = []
    given: dict[str, dict[str, Any]] = {name: {} for name in tables}
    if "config" in flags:
        given = load_tables(flags.pop("config"), tables, note=notes.append)
    print_config = flags.pop("print_config", False)
    tag = flags.pop(MODEL_TAG, None)
    if tag is not None and flags.setdefault("model", tag) != tag:
        raise ConfigError(f"the model is given twice, as {tag!r} and as --model {flags['model']!r}; give it once")
    taken = take_options(flags, tables.values(), spelled=flag_of, note=notes.append)
    for name, kind in tables.items():
        given[name] |= fields_of(kind, taken)
    return Options(tables=tables, given=given, print_config=print_config, notes=notes)


def fields_of(kind: type[Any], taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options among ``taken`` that are fields of the dataclass ``kind``."""
    return {spec.name: taken[spec.name] for spec in dataclasses.fields(kind) if spec.name in taken}


def adopt_world_size(engine: dict[str, Any], world_size: int | None) -> None:
    """Set ``tensor_parallel_size`` to torchrun's ``world_size``; refuse a contradiction.

    All ranks of a job share one model, so the two numbers must be equal.  Without torchrun (None) rank 0 starts the
    other ranks itself.
    """
    if world_size is None:
        return
    asked = engine.get("tensor_parallel_size")
    if asked is not None and asked != world_size:
        raise ConfigError(
            f"tensor_parallel_size is {asked} but torchrun started {world_size} ranks; leave the option out, or start "
            f"torchrun with --nproc-per-node {asked}"
        )
    engine["tensor_parallel_size"] = world_size


def load_tables(
    path: str, tables: Mapping[str, type[Any]], *, note: Callable[[str], None] = logger.info
) -> dict[str, dict[str, Any]]:
    """Read ``path``; the result has every table.  Raises ``ConfigError`` that names file, key and remedy.

    A YAML file is vLLM's: one mapping of flags, without tables.
    """
    is_yaml = Path(path).suffix in (".yaml", ".yml")
    try:
        text = read_text(Path(path))
        document = _yaml(text) if is_yaml else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {'YAML' if is_yaml else 'TOML'}: {error}") from error
    if is_yaml:
        flags = {str(name).replace("-", "_"): value for name, value in document.items()}
        taken = take_options(flags, tables.values(), where=path, note=note)
        return {name: fields_of(kind, taken) for name, kind in tables.items()}
    for name in document:
        if name not in tables:
            known = ", ".join(f"[{table}]" for table in tables)
            raise ConfigError(f"{path}: unknown entry {name!r}; a file has the tables {known}")
    given = {name: document.get(name, {}) for name in tables}
    for name, table in given.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} is {table!r}; it must be a table, [{name}]")
    return {
        name: take_options(given[name], [kind], where=f"{path}, [{name}]", note=note) for name, kind in tables.items()
    }


def _yaml(text: str) -> dict[Any, Any]:
    import yaml  # a start without such a file does not need it

    try:
        node, document = yaml.compose(text, yaml.SafeLoader), yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    fields = node.value if isinstance(node, yaml.MappingNode) else []
    names = [str(name.value).replace("-", "_") for name, _ in fields]
    if again := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"it has {again!r} twice; give several values as a list")  # the library keeps the last one
    if not isinstance(document, dict):
        raise ValueError("it must be a mapping of flags to values")
    return document


def dump_table(name: str, config: Any) -> str:
    """Return one ``[name]`` table with every field.  Fields without a value, and secrets, are comments."""
    lines = [f"[{name}]"]
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if value is None or (spec.metadata.get("secret") and not value):
            lines.append(f"# {spec.name} is not set")
        elif spec.metadata.get("secret"):
            lines.append(f"# {spec.name} is set and not shown")
        else:
            lines.append(f"{spec.name} = {_toml(plain(value))}")
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value of plain data in TOML; a JSON object with what TOML does not have, such as null, as its text."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if not isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if not _has_toml(value):
        return _toml(json.dumps(value, ensure_ascii=False))
    return "{" + ", ".join(f"{_toml(name)} = {_toml(one)}" for name, one in value.items()) + "}"


def _has_toml(value: Any) -> bool:
    if isinstance(value, (Mapping, list, tuple)):
        return all(map(_has_toml, value.values() if isinstance(value, Mapping) else value))
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))
