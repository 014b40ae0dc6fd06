"""Write the files that follow from the options: the pages of flags and of other servers' options, and the keywords of
``LLM`` and ``run_batch``.

Usage: python generated.py
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from tp_engine.api.openai.chat.options import TemplateOptions
from tp_engine.api.sampling_defaults import SamplingDefaultOptions
from tp_engine.apps.batch.config import BatchConfig
from tp_engine.config import EngineConfig
from tp_engine.options.fields import base_type
from tp_engine.options.flags import make_parser
from tp_engine.options.foreign import foreign_table
from tp_engine.options.intake import flag_of
from tp_engine.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
COLUMNS = 120
LONG_VALUE = 80
INTRO = (
    "`scripts/generate` writes this page from the options themselves; `--help` prints the same. "
    "[Command line](command_line.md#flags) tells how flags are written, and has notes on some."
)
# By section of --help: where the documents say more.
MORE = {
    "Model": "[Models](models.md)",
    "KV cache": "[Tiers](tiers.md), [KV memory](architecture.md#kv-memory)",
    "Scheduling": "[Speculation](speculation.md)",
    "Adapters": "[Adapters](adapters.md)",
    "Answers": "[Structured output](structured_output.md), [New weights](new_weights.md)",
    "Time limits": "[When something dies](reliability.md)",
    "Diagnosis": "[The flight record](reliability.md#the-flight-record)",
    "Web pages of other origins": "[Keys and web pages](keys.md#web-pages-and-names)",
    "Keys": "[Keys and web pages](keys.md)",
    "Clients and requests": "[Under load](http_api.md#under-load)",
    "Logs and metrics": "[Metrics and logs](metrics.md)",
    "Chats": "[Chats](chats.md), [Tools and reasoning](tools.md)",
    "Batch job": "[Batch jobs](batch.md)",
}
# Options whose names a table of the documents has, with what each is for.
TABLES = {"--tool-call-parser": "tools.md#tools", "--reasoning-parser": "tools.md#reasoning"}


OTHER_SERVERS = """# Coming from vLLM or SGLang

A command line for vLLM or SGLang starts this server too, unless it asks for something that this server lacks; so do
their keywords in Python and their keys in files. Options with vLLM's names are on the pages of flags:
[engine](flags_engine.md), [server](flags_server.md). `scripts/generate` writes this page from the options' other
spellings and from `tp_engine/options/foreign.toml`; `--help=WORD` tells the same of one option.

## Taken as options of this engine
"""
# The type that a caller may give for a field, by the first word of its metadata that decides it.
GIVEN = {"json": "Mapping[str, Any] | str", "numbers": "Sequence[int] | str", "size": "int | str", "count": "int | str"}
KEYWORDS = '''"""The keywords of {who}, for editors and type checkers: the fields of
{kinds}.

``scripts/generate`` writes this file.  What each keyword means is in its field's ``option(...)`` and in
docs/{page}.
"""

from __future__ import annotations

{imports}


class {name}({base}, total=False):
    """The types that a caller may give; other spellings of vLLM and SGLang are taken too."""

{keywords}
'''


def files() -> dict[str, str]:
    """The text of each file by its path in the repository."""
    of_llm = keywords(EngineConfig, SamplingDefaultOptions, TemplateOptions, without={"model"})
    of_batch = keywords(BatchConfig, without={"input_file", "output_file", *of_llm})
    return {f"docs/{name}": text for name, text in pages().items()} | {
        "docs/other_servers.md": other_servers(),
        "tp_engine/api/keywords.py": KEYWORDS.format(
            who="``LLM`` and ``AsyncLLM``",
            kinds="``EngineConfig``, ``SamplingDefaultOptions`` and ``TemplateOptions``",
            page="flags_engine.md",
            imports="from collections.abc import Mapping, Sequence\nfrom typing import Any, TypedDict",
            name="EngineOptions",
            base="TypedDict",
            keywords=lines(of_llm),
        ),
        "tp_engine/apps/batch/keywords.py": KEYWORDS.format(
            who="``run_batch`` beside those of ``LLM``",
            kinds="``BatchConfig``",
            page="flags_server.md",
            imports="from collections.abc import Sequence\n\nfrom tp_engine.api.keywords import EngineOptions",
            name="BatchOptions",
            base="EngineOptions",
            keywords=lines(of_batch),
        ),
    }


def lines(found: Mapping[str, str]) -> str:
    return "\n".join(f"    {name}: {given}" for name, given in found.items())


def keywords(*kinds: type[Any], without: Set[str] = frozenset()) -> dict[str, str]:
    """The types that a caller may give for the fields of configuration dataclasses, as code."""
    specs = [spec for kind in kinds for spec in dataclasses.fields(kind)]
    return {spec.name: keyword_type(spec) for spec in specs if spec.name not in without}


def keyword_type(spec: dataclasses.Field[Any]) -> str:
    base = base_type(spec)
    given = next((text for name, text in GIVEN.items() if spec.metadata.get(name)), base)
    if base.startswith("tuple"):
        given = "Sequence[Mapping[str, Any] | str] | str" if "several" in spec.metadata else "Sequence[str] | str"
    return given + (" | None" if str(spec.type).endswith(" | None") else "")


def pages() -> dict[str, str]:
    """The text of each page by its name in docs/."""
    engine, server = ({name: kind} for name, kind in (("engine", EngineConfig), ("server", ServerConfig)))
    of_server = sections(server)
    known = {flag for actions in of_server.values() for action in actions for flag in action.option_strings}
    of_batch = {
        title: rest
        for title, actions in sections({"batch": BatchConfig}).items()
        if (rest := [action for action in actions if not known.issuperset(action.option_strings)])
    }
    assert not of_server.keys() & of_batch.keys(), "a section has options of the server, and others of the batch job"
    return {
        "flags_engine.md": page("Flags of the engine", sections(engine, plain=True)),
        "flags_server.md": page("Flags of the server and of batch jobs", of_server | of_batch),
    }


def sections(tables: Mapping[str, type[Any]], *, plain: bool = False) -> dict[str, list[argparse.Action]]:
    """The options by their section of ``--help``; with ``plain`` also those of argparse itself."""
    parser = make_parser("serve", "", tables)
    groups = {group.title or "": group._group_actions for group in parser._action_groups}
    found = {
        title: [one for one in actions if one.option_strings and one.help != argparse.SUPPRESS]
        for title, actions in groups.items()
        if title != "positional arguments" and (plain or title != "options")
    }
    return {"All commands" if title == "options" else title: actions for title, actions in found.items() if actions}


def other_servers() -> str:
    """The page of vLLM's and SGLang's options, by their treatment here."""
    text = [OTHER_SERVERS]
    for spec in (spec for kind in (EngineConfig, ServerConfig) for spec in dataclasses.fields(kind)):
        if flags := [flag for flag in spec.metadata.get("flags", ()) if flag.startswith("--")]:
            text.append(f"* {shown_flags(flags)}: `{flag_of(spec.name)}`")
        if flags := spec.metadata.get("negative_flags", ()):
            text.append(f"* {shown_flags(flags)}: `--no-{flag_of(spec.name)[2:]}`")
    rows = foreign_table()["option"]
    for row in (row for row in rows if "becomes" in row):
        text += wrapped(f"{shown_flags(map(flag_of, names_of(row)))}: `{flag_of(row['becomes'])}`")
    for value in (value for value in foreign_table()["value"] if value.get("means")):
        first, *others = value["patterns"]
        given = [f"{flag_of(value['of'])} {first}", *others]
        text += wrapped(f"{shown_flags(given)}: `{value['means']}`")
    for title, key in (("Refused, with the remedy", "refused"), ("Accepted without effect", "accepted")):
        text += ["", f"## {title}", ""]
        for told in dict.fromkeys(row[key] for row in rows if key in row):
            names = (flag_of(name) for row in rows if row.get(key) == told for name in names_of(row))
            text += wrapped(f"{marked(told)}: {shown_flags(names)}")
    return "\n".join(text) + "\n"


def names_of(row: Mapping[str, Any]) -> list[str]:
    """The options in a row of foreign.toml."""
    return [name for key in ("switches", "values", "lists") for name in row.get(key, ())]


def shown_flags(flags: Iterable[str]) -> str:
    return ", ".join(f"`{flag}`" for flag in flags)


def page(title: str, found: Mapping[str, list[argparse.Action]]) -> str:
    lines = [f"# {title}", "", *textwrap.wrap(INTRO, COLUMNS, break_on_hyphens=False)]
    for name, actions in found.items():
        lines += ["", f"## {name}", ""] + ([f"See {MORE[name]}.", ""] if name in MORE else [])
        lines += [line for action in actions for line in item(action)]
    return "\n".join(lines) + "\n"


def item(action: argparse.Action) -> list[str]:
    """An option as an item of a list: its spellings, its value, what it means."""
    spellings = [flag for flag in action.option_strings if not flag.startswith("--no-")]
    value = action.metavar if isinstance(action.metavar, str) and action.nargs != 0 else ""
    if len(value) > LONG_VALUE:
        value = "NAME"  # the meaning names the choices
    if value:
        spellings[0] += f" {value}" + (" ..." if action.nargs == "+" else "")
    told = marked(str(action.help).replace("%%", "%"))
    if table := TABLES.get(action.option_strings[0]):
        told = re.sub(r"none, .*(?= \(default)", f"none, or [one of these]({table})", told)
    return wrapped(f"{shown_flags(spellings)}: {told}")


def marked(told: str) -> str:
    """A text of ``--help`` with the marks of Markdown."""
    told = told.replace("*", "\\*").replace("<", "\\<")
    told = re.sub(r"'(\{.*?\})'", r"`\1`", told)
    return re.sub(r"(?<![\w`'/-])(--[a-z][a-z-]*[a-z])", r"`\1`", told)


def wrapped(text: str) -> list[str]:
    """The lines of an item of a list."""
    return textwrap.wrap(
        text, COLUMNS, initial_indent="* ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    for name, text in files().items():
        (ROOT / name).write_text(text, encoding="utf-8")
