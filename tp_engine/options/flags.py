"""The command line: flags from configuration dataclasses, in the spellings that ``vllm serve`` takes.

::

    --max_model_len 8192              --max-model-len 8192: underscores for dashes
    --speculative-config.method mtp   --speculative-config '{"method": "mtp"}': keys of a JSON object, one by one
    -cc.pass_config.x True            the same for short flags, and for keys inside keys
    --a.list+ x,y                     a list
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

from tp_engine.errors import ConfigError, did_you_mean
from tp_engine.options.fields import base_type, is_switch
from tp_engine.options.foreign import foreign_options
from tp_engine.options.intake import flag_of, known_value, parsed_text
from tp_engine.system.units import parse_bytes, parse_count, shown_size

MODEL_TAG = "model_tag"
_ENGINE = "engine"
_EPILOG = (
    "--help=WORD shows the options with WORD in their names, or a whole section.  Options of vLLM and SGLang that are "
    "not here are accepted, translated or refused, with the reason: docs/command_line.md."
)
_KEYS = re.compile(r"--?[A-Za-z][\w-]*(\.[\w-]+)+\+?")


class OptionsParser(argparse.ArgumentParser):
    """An argparse parser that raises ``ConfigError`` and names the flag nearest to an unknown one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's method, but every refusal has a remedy."""
        words = plain_spelling(sys.argv[1:] if args is None else args)
        if asked := next((word for word in words if word.startswith("--help=")), None):
            self._print_message(self.help_on(asked.removeprefix("--help=").removesuffix("all")), sys.stdout)
            self.exit()
        parsed, unknown = self.parse_known_args([self._plain_switch(word) for word in words], namespace)
        for word in unknown:
            flag = word.partition("=")[0]
            if flag.startswith("-"):
                self.error(f"unknown option {flag}{did_you_mean(flag, self._option_string_actions)}")
            self.error(f"unexpected argument {word!r}; options are written --name value")
        return parsed

    def _plain_switch(self, word: str) -> str:
        """``--x=false`` -> ``--no-x``."""
        flag, equals, value = word.partition("=")
        if not equals or not isinstance(self._option_string_actions.get(flag), Switch):
            return word
        is_on = parsed_text(value.capitalize())
        if not isinstance(is_on, bool):
            self.error(f"{flag} is {value!r}; it takes no value, or true or false")
        opposite = f"--{flag[5:]}" if flag.startswith("--no-") else f"--no-{flag[2:]}"
        return flag if is_on else opposite

    def help_on(self, word: str) -> str:
        """Return the options that have ``word`` in their names or in their section's, also those of other servers."""
        word, formatter = word.replace("_", "-").lower(), self._get_formatter()
        for group in self._action_groups:
            actions = [one for one in group._group_actions if one.help != argparse.SUPPRESS]
            if word not in (group.title or "").lower():
                actions = [one for one in actions if any(word in flag for flag in one.option_strings)]
            if actions:
                formatter.start_section(group.title)
                formatter.add_arguments(actions)
                formatter.end_section()
        known = self._option_string_actions
        others = [
            f"  {flag_of(name)}: {row.told}"
            for name, row in foreign_options().items()
            if word in flag_of(name) and getattr(known.get(flag_of(name)), "help", None) == argparse.SUPPRESS
        ]
        text = formatter.format_help() + "\n".join(["", "Of vLLM and SGLang:", *others, ""] if others else [])
        return text.lstrip("\n") or f"no option has {word!r} in its name; all options: --help\n"

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting: the launcher reports the error and chooses the exit code."""
        raise ConfigError(f"{message} (all options: --help)")


class Switch(argparse.Action):
    """``--x`` and its other spellings mean True, ``--no-x`` means False."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        negated = [f"--no-{flag[2:]}" for flag in option_strings[:1] if flag.startswith("--")]
        spellings = [*option_strings[:1], *negated, *option_strings[1:]]
        super().__init__(spellings, dest, nargs=0, **settings)

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Note the value that the spelling stands for."""
        setattr(namespace, self.dest, not str(option_string).startswith("--no-"))


class _Value(argparse.Action):
    """A value; keys of a JSON object that come one by one belong to one object."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Note the value."""
        earlier, later = parsed_text(getattr(namespace, self.dest, None)), parsed_text(values)
        both = isinstance(earlier, dict) and isinstance(later, dict)
        setattr(namespace, self.dest, {**earlier, **later} if both else values)


class _Values(argparse.Action):
    """Several values, also as a JSON list; a flag that comes again adds its values."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Note the values."""
        listed = parsed_text(values[0]) if len(values) == 1 else values
        more = listed if isinstance(listed, list) else values
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, ()), *more])


class _HelpFormatter(argparse.HelpFormatter):
    """Flags in a wide column, each with its value named once."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


def make_parser(prog: str, description: str, tables: Mapping[str, type[Any]]) -> OptionsParser:
    """Return a parser whose namespace holds only the given values, keyed by field name, ``config`` and
    ``print_config``."""
    takes_model = any(spec.metadata.get("positional") for kind in tables.values() for spec in dataclasses.fields(kind))
    # A later table overrides a flag of the same name: the -q of ``tp-engine chat`` overrides the engine's.
    parser = OptionsParser(
        prog=prog,
        usage=f"{prog} {'[MODEL] ' if takes_model else ''}[options]",
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        conflict_handler="resolve",
        formatter_class=_HelpFormatter,
        epilog=_EPILOG if _ENGINE in tables else None,
    )
    files = ", ".join(f"[{name}]" for name in tables)
    parser.add_argument(
        "--config", metavar="FILE", help=f"TOML file with any of the tables {files}, or YAML file of flags"
    )
    if takes_model:
        parser.add_argument(MODEL_TAG, metavar="MODEL", nargs="?", help="the model, as with --model")
    parser.add_argument("--print-config", action="store_true", help="print the effective configuration and exit")
    for name, kind in tables.items():
        group = None
        for spec in dataclasses.fields(kind):
            if group is None or "section" in spec.metadata:
                group = parser.add_argument_group(spec.metadata.get("section", name))
            _add_flag(group, spec)
    if _ENGINE in tables:
        _add_foreign_flags(parser)
    return parser


def plain_spelling(words: Sequence[str]) -> list[str]:
    """Return the command line with dashes in the names of flags, and each JSON object in one piece."""
    plain: list[str] = []
    objects: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        flag, equals, text = word.partition("=")
        if _KEYS.fullmatch(flag):
            flag, *keys = flag.split(".")
            value = text if equals else next(rest, None)
            if value is None:
                return [*plain, _dashed(flag)]  # argparse asks for the value
            is_list = keys[-1].endswith("+")
            keys[-1] = keys[-1].removesuffix("+")
            _put(objects.setdefault(_dashed(flag), {}), keys, value.split(",") if is_list else parsed_text(value))
        else:
            plain.append(_dashed(flag) + equals + text)
    return plain + [word for flag, found in objects.items() for word in (flag, json.dumps(found))]


def _dashed(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _put(target: dict[str, Any], keys: Sequence[str], value: Any) -> None:
    *outer, last = keys
    for key in outer:
        inner = target.setdefault(key, {})
        target = inner if isinstance(inner, dict) else target.setdefault(key, {})
    earlier = target.get(last)
    target[last] = earlier + value if isinstance(earlier, list) and isinstance(value, list) else value


def _add_flag(group: argparse._ArgumentGroup, spec: dataclasses.Field[Any]) -> None:
    names = (flag_of(spec.name), *spec.metadata.get("flags", ()))
    settings: dict[str, Any] = {"dest": spec.name, "help": _help(spec)}
    if is_switch(spec):
        settings["action"] = Switch
    else:
        settings |= _value_settings(spec)
    group.add_argument(*names, **settings)
    if negatives := spec.metadata.get("negative_flags"):
        text = f"as --no-{flag_of(spec.name)[2:]}"
        group.add_argument(*negatives, dest=spec.name, action="store_false", default=argparse.SUPPRESS, help=text)


def _value_settings(spec: dataclasses.Field[Any]) -> dict[str, Any]:
    base, choices = base_type(spec), spec.metadata.get("choices")
    if choices:
        return {"type": _raising(partial(_choice, spec)), "metavar": "{" + ",".join(map(str, choices)) + "}"}
    if spec.metadata.get("size"):
        return {"type": _raising(parse_bytes), "metavar": "SIZE"}
    if spec.metadata.get("count"):
        return {"type": _raising(partial(_count, spec)), "metavar": "N"}
    if spec.metadata.get("json"):
        return {"action": _Value, "metavar": "JSON"}
    if base.startswith("tuple"):
        return {"action": _Values, "nargs": "+", "metavar": "NAME"}
    if spec.metadata.get("numbers"):
        return {"action": _Values, "nargs": "+", "metavar": "N"}
    return {
        "type": {"int": int, "float": float}.get(base, str),
        "metavar": {"int": "N", "float": "X"}.get(base, "TEXT"),
    }


def _raising(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse``, whose ``ConfigError`` becomes argparse's own error, which names the flag."""

    def parse_value(text: str) -> Any:
        try:
            return parse(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_value


def _count(spec: dataclasses.Field[Any], text: str) -> int | str:
    return parse_count(text) if known_value(spec.name, text) is None else text


def _choice(spec: dataclasses.Field[Any], text: str) -> Any:
    """A choice in any case, or a value of other servers, which is translated later."""
    choices = spec.metadata["choices"]
    found = next((one for one in choices if str(one).lower() == text.lower()), None)
    if found is None and known_value(spec.name, text) is None:
        raise ConfigError(f"{text!r} is none of {', '.join(map(str, choices))}{did_you_mean(text, map(str, choices))}")
    return text if found is None else found


def _help(spec: dataclasses.Field[Any]) -> str:
    text, default = str(spec.metadata.get("help", "")), cast(Any, spec.default)
    is_told = default in (None, "", ()) or default is False or "json" in spec.metadata or "(default:" in text
    if not is_told:
        if isinstance(default, tuple):
            default = " ".join(default)
        elif spec.metadata.get("size"):
            default = shown_size(default)
        text += f" (default: {'on' if default is True else default})"
    return text.replace("%", "%%")


def _add_foreign_flags(parser: OptionsParser) -> None:
    """Flags of other servers: ``--help`` does not show them."""
    known = parser._option_string_actions
    for name, row in foreign_options().items():
        flags = [flag for flag in (flag_of(name), *row.short_flags) if flag not in known and "." not in flag]
        if not flags:
            continue
        settings: dict[str, Any] = {"action": _Value if row.arity else Switch}
        if row.arity == "=*":
            settings = {"action": _Values, "nargs": "+"}
        parser.add_argument(*flags, dest=name, help=argparse.SUPPRESS, **settings)
