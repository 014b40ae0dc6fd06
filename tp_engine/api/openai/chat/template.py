"""Chat templates: Jinja programs of a model or of the operator, run in a sandbox with bounds.

A template may use what transformers' ``apply_chat_template`` offers: filters, ``raise_exception``, ``strftime_now``,
``generation`` blocks and loop controls.
"""

import json
import re
import time
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tp_engine.errors import ConfigError

MAX_RENDER_S = 10.0
MAX_PROMPT_CHARACTERS = 64 << 20
# A variable and a filter that the compiled template has in its loops.
_LATEST, _CHECK = "tp_engine_latest_s", "tp_engine_check_time"


class TemplateRefusal(Exception):  # noqa: N818 - the template's decision, or a bound
    """A template refused the messages, or exceeded a bound; the text is for the client."""


class ChatTemplate:
    """A compiled template.  Raises ``ConfigError`` for a text that is not a template."""

    def __init__(self, text: str) -> None:
        environment = _environment()
        try:
            tree = environment.parse(text)
            _watch(tree)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
        self._text = text

    def render(self, variables: Mapping[str, Any], *, deadline_s: float | None = None) -> str:
        """Return the text; raises ``TemplateRefusal`` if the template raises, takes too long or writes too much.

        Both are processor time of this thread, as a busy machine is no reason: ``deadline_s`` (time.thread_time()) may
        end it before ``MAX_RENDER_S``.
        """
        latest_s = time.thread_time() + MAX_RENDER_S
        latest_s = latest_s if deadline_s is None else min(deadline_s, latest_s)
        pieces, num_characters = [], 0
        try:
            for piece in self._template.generate(**variables, **{_LATEST: latest_s}):
                pieces.append(piece)
                num_characters += len(piece)
                if num_characters > MAX_PROMPT_CHARACTERS:
                    raise TemplateRefusal(f"the prompt is longer than {MAX_PROMPT_CHARACTERS} characters")
                _check_time(latest_s)
        except TemplateRefusal:
            raise
        except Exception as error:  # a template is a program, and raises whatever it likes
            raise TemplateRefusal(str(error) or type(error).__name__) from error
        return "".join(pieces)

    def mentions(self, word: str) -> bool:
        """Return whether the template's source has the word, not as a part of a longer one."""
        return re.search(rf"\b{re.escape(word)}\b", self._text) is not None


def _watch(tree: nodes.Template) -> None:
    """Let every turn of a loop and every call of a macro check the time, also where they write nothing."""
    blocks: list[nodes.For | nodes.Macro | nodes.CallBlock]
    blocks = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]
    for block in blocks:
        check = nodes.Filter(nodes.Name(_LATEST, "load"), _CHECK, [], [], None, None)
        block.body.insert(0, nodes.ExprStmt(check).set_lineno(block.lineno))


def _check_time(latest_s: float) -> None:
    if time.thread_time() > latest_s:
        raise TemplateRefusal(f"the template takes longer than {MAX_RENDER_S:g} s")


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it only renders its content."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _SafeNamespace(Namespace):
    """A namespace without attributes of the interpreter: no name may begin with an underscore."""

    def __init__(*arguments: Any, **attributes: Any) -> None:
        given = dict(*arguments[1:], **attributes)
        for name in given:
            _check_attribute(name)
        Namespace.__init__(arguments[0], given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can not have the attribute {name!r}")


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters |= {"tojson": _to_json, _CHECK: _check_time}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
        "namespace": _SafeNamespace,
        "dict": lambda *arguments, **entries: dict(*arguments, **entries),
    }
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as models saw it in training; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
