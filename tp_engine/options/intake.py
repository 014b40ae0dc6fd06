"""From names and values as users give them to fields of configurations.

The command line, TOML files and the Python API all come here, so that a spelling which one of them takes works in all.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from tp_engine.errors import ConfigError, RequestError, did_you_mean, shown
from tp_engine.options.fields import is_switch, unboxed
from tp_engine.options.foreign import foreign_options, foreign_values
from tp_engine.options.foreign_rows import ForeignOption, ForeignValue
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

Parameters = TypeVar("Parameters")


def take_options(
    given: Mapping[str, Any],
    kinds: Iterable[type[Any]],
    *,
    where: str = "",
    spelled: Callable[[str], str] = str,
    note: Callable[[str], None] = logger.info,
) -> dict[str, Any]:
    """Return the fields of the dataclasses ``kinds`` that ``given`` sets: by their names, by other spellings of their
    flags, and by options and values of other servers.

    ``note`` gets a line for what is translated or without an effect; by default the log does.  Raises ``ConfigError``
    for an unknown name, with the nearest one, and for an option that is refused, with the remedy;
    ``where`` begins the message, and ``spelled`` writes names as the user did.
    """
    intake = _Intake(kinds, where, spelled, foreign_options())
    taken = intake.take(given)
    for line in intake.notes():
        note(line)
    return taken


def takes_names_of_others(
    rows: Iterable[tuple[str, ForeignOption]] = (),
) -> Callable[[type[Parameters]], type[Parameters]]:
    """Return a decorator of dataclasses whose constructor takes names of other servers too, by a table such as
    that of ``foreign_options``.

    ``RequestError`` for a name that is refused, and for an unknown one, with the nearest name.
    """
    foreign = dict(rows)

    def decorate(kind: type[Parameters]) -> type[Parameters]:
        construct = kind.__init__
        names = frozenset(spec.name for spec in dataclasses.fields(kind))  # type: ignore[arg-type]  # dataclasses only

        @functools.wraps(construct)
        def construct_by_any_name(self: Parameters, *positional: Any, **given: Any) -> None:
            if not names.issuperset(given):
                try:
                    given = _Intake([kind], kind.__name__, str, foreign, parse=lambda value: value).take(given)
                except ConfigError as error:
                    raise RequestError(str(error)) from error
            construct(self, *positional, **given)

        kind.__init__ = construct_by_any_name  # type: ignore[method-assign, assignment]
        return kind

    return decorate


def flag_of(name: str) -> str:
    """``block_size`` -> ``--block-size``; keys after a dot stay as they are."""
    option, *keys = name.split(".")
    return ".".join(("--" + option.replace("_", "-"), *keys))


def parsed_text(value: Any) -> Any:
    """Return what a text of the command line stands for: JSON, in which True, False and None may stand, else the
    text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(value, value))
    except (ValueError, RecursionError):
        return value


def known_value(name: str, value: Any) -> ForeignValue | None:
    """Return what stands for ``value`` of the option ``name``, if another server has it."""
    rows = foreign_values().get(name, ()) if isinstance(value, str) else ()
    return next((row for row in rows if row.matches(value)), None)


class _Intake:
    def __init__(
        self,
        kinds: Iterable[type[Any]],
        where: str,
        spelled: Callable[[str], str],
        foreign: Mapping[str, ForeignOption],
        parse: Callable[[Any], Any] = parsed_text,
    ) -> None:
        self._fields = {spec.name: spec for kind in kinds for spec in dataclasses.fields(kind)}
        self._where = f"{where}: " if where else ""
        self._spelled = spelled
        self._foreign = foreign
        self._parse = parse
        self._taken: dict[str, Any] = {}
        self._reasons: dict[str, list[str]] = {}
        self._spellings = {
            flag.removeprefix("--").replace("-", "_"): (spec.name, is_opposite)
            for spec in self._fields.values()
            for is_opposite, kind in ((False, "flags"), (True, "negative_flags"))
            for flag in spec.metadata.get(kind, ())
            if flag.startswith("--")
        }
        self._spellings |= {f"no_{spec.name}": (spec.name, True) for spec in self._fields.values() if is_switch(spec)}

    def take(self, given: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: unboxed(value) for name, value in given.items()}
        foreign, own = {}, self._own(given)
        for name in given:
            if name in self._foreign and not self._is_own(name):
                foreign[name] = self._foreign[name]
            elif not self._is_own(name):
                known = [*self._fields, *self._spellings, *(one for one in self._foreign if "." not in one)]
                raise ConfigError(f"{self._where}unknown option {self._spelled(name)}{did_you_mean(name, known)}")
        for name, value in own.items():
            self._taken[name] = self._own_value(self._fields[name], value)
        for name in filter(foreign.__contains__, self._foreign):  # in the order of the table
            self._take_foreign(name, foreign[name], self._parse(given[name]), own)
        return self._taken

    def notes(self) -> list[str]:
        """Return what became of options and values of other servers."""
        return [f"{self._where}{', '.join(names)}: {reason}" for reason, names in self._reasons.items()]

    def _is_own(self, name: str) -> bool:
        return name in self._fields or name in self._spellings

    def _own(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that are given by their names or by other spellings."""
        own = {name: value for name, value in given.items() if name in self._fields}
        for name in given.keys() & self._spellings.keys() - self._fields.keys():
            field, is_opposite = self._spellings[name]
            self._set(own, name, field, not given[name] if is_opposite else given[name])
        return own

    def _set(self, target: dict[str, Any], name: str, field: str, value: Any) -> None:
        """Set ``field`` because ``name`` was given; ``ConfigError`` if it has another value."""
        earlier = target.setdefault(field, value)
        objects = parsed_text(earlier), parsed_text(value)
        if all(isinstance(one, Mapping) for one in objects):
            shared = objects[0].keys() & objects[1].keys()
            earlier, value = ({key: one[key] for key in shared} for one in objects)
            target[field] = {**objects[1], **objects[0]}
        if earlier != value:
            raise ConfigError(
                f"{self._where}{self._spelled(name)} sets {self._spelled(field)} to {shown(value)}, and it is given as "
                f"{shown(earlier)}; give one of them"
            )

    def _take_foreign(self, name: str, row: ForeignOption, value: Any, own: Mapping[str, Any]) -> None:
        if value in row.harmless:
            return
        shown_name = self._spelled(name)
        if row.is_refused:
            raise ConfigError(f"{self._where}{shown_name} is not an option here: {row.reason}")
        try:
            became = {} if row.become is None else row.become(value)
        except ConfigError as error:
            raise ConfigError(f"{self._where}{shown_name}: {error}") from error
        except (TypeError, AttributeError, KeyError, ValueError) as error:
            raise ConfigError(f"{self._where}{shown_name} is {shown(value)}, which it cannot be") from error
        if not became:
            self._reasons.setdefault(row.reason, []).append(shown_name)
        for field, meant in became.items():
            if field not in self._fields:
                raise ConfigError(f"{self._where}unknown option {shown_name}; it is {self._spelled(field)}")
            if not (row.yields and field in own):
                self._set(self._taken, name, field, self._own_value(self._fields[field], meant))
                reason = f"taken as {self._spelled(field)} {_text(meant)}".rstrip()
                self._reasons.setdefault(reason, []).append(f"{shown_name} {_text(value)}".rstrip())

    def _own_value(self, spec: dataclasses.Field[Any], value: Any) -> Any:
        """The value of a field, in this engine's words."""
        if spec.metadata.get("json"):
            return self._without_foreign_keys(spec.name, value)
        if type(value).__module__ == "torch":  # torch.bfloat16, which vLLM takes too
            value = str(value).removeprefix("torch.")
        choices = spec.metadata.get("choices", ())
        if not isinstance(value, str) or value in choices or not (choices or spec.name in foreign_values()):
            return value
        foreign = known_value(spec.name, value)
        if foreign is None:
            return value.lower() if value.lower() in choices else value
        if foreign.means is None:
            raise ConfigError(f"{self._where}{self._spelled(spec.name)} {value} is not served here: {foreign.reason}")
        reason = "; ".join(filter(None, (f"taken as {foreign.means or 'the default'}", foreign.reason)))
        self._reasons.setdefault(reason, []).append(f"{self._spelled(spec.name)} {value}")
        return foreign.means or None

    def _without_foreign_keys(self, name: str, value: Any) -> Any:
        """The JSON object without the keys that have no effect here; what is none is left for the field's check."""
        found = parsed_text(value)
        if not isinstance(found, Mapping):
            return value
        foreign = {key: row for key in found if (row := self._foreign.get(f"{name}.{key}")) is not None}
        for key, row in foreign.items():
            self._take_foreign(f"{name}.{key}", row, found[key], {})
        return {key: one for key, one in found.items() if key not in foreign} if foreign else value


def _text(value: Any) -> str:
    """A value in the log; none for a switch."""
    return "" if value is True else value if isinstance(value, str) else shown(value, 200)
