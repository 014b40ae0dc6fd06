"""Configuration from the command line and from TOML files, both derived from the fields of configuration dataclasses.

Every dataclass is one *table*: its fields are flags (``--block-size 32``) and keys of the table of that name in the
file given by ``--config`` (``[engine]`` ``block_size = 32``).  The command line wins over the file, the file over the
defaults; the defaults live in the dataclasses alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tp_engine.errors import ConfigError
from tp_engine.options.cli import MODEL_TAG, make_parser
from tp_engine.options.toml import dump_table, load_tables

Config = TypeVar("Config")


@dataclass(slots=True, kw_only=True)
class Options:
    """What was given, per table, and whether the effective configuration shall be printed instead of a run."""

    tables: Mapping[str, type[Any]]
    given: dict[str, dict[str, Any]]
    print_config: bool = False
    _built: dict[str, Any] = field(default_factory=dict)

    def build(self, table: str, kind: type[Config]) -> Config:
        """The configuration of one table; raises ``ConfigError`` where a value breaks a rule."""
        assert self.tables[table] is kind
        config: Config = kind(**self.given[table])
        self._built[table] = config
        return config

    def effective_toml(self) -> str:
        """The tables built so far, as a file that ``--config`` reads back; secrets are left out."""
        return "\n".join(dump_table(name, config) for name, config in self._built.items())


def parse_options(
    prog: str, description: str, tables: Mapping[str, type[Any]], argv: Sequence[str] | None = None
) -> Options:
    """Parse ``argv`` (default: this process's) and the TOML file that it names; raises ``ConfigError``."""
    flags = vars(make_parser(prog, description, tables).parse_args(argv))
    given = load_tables(flags.pop("config"), tables) if "config" in flags else {name: {} for name in tables}
    print_config = flags.pop("print_config", False)
    tag = flags.pop(MODEL_TAG, None)
    if tag is not None and flags.setdefault("model", tag) != tag:
        raise ConfigError(f"the model is given twice, as {tag!r} and as --model {flags['model']!r}; give it once")
    for name, kind in tables.items():
        names = [spec.name for spec in dataclasses.fields(kind) if spec.name in flags]
        given[name] |= {key: tuple(flags[key]) if isinstance(flags[key], list) else flags[key] for key in names}
    return Options(tables=tables, given=given, print_config=print_config)


def adopt_world_size(engine: dict[str, Any], world_size: int | None) -> None:
    """Let ``tensor_parallel_size`` follow torchrun's ``world_size``; refuse a contradiction.

    Every rank of the job belongs to the model, so the two numbers can only be equal.  Without torchrun (None) rank 0
    starts the others itself.
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
