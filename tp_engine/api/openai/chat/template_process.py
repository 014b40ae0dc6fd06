"""The process of one chat template: it compiles the template, and renders until its link is closed.

It is a fork that may be killed (``template.py``): a template may turn a few letters into a text of any size.
"""

import contextlib
import json
import signal
import time
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from tp_engine.errors import ConfigError

_MOST_CHARACTERS = 1 << 20  # of a template: reading one takes microseconds for each, and those of models have 1 to 40 k
_LONGEST_REFUSAL = 4096  # characters
# The process ends when it is old or has long been idle; another one takes its place.
_LIFE_S, _IDLE_S = 43_200.0, 3600.0
# A variable and a filter in the loops of compiled templates.
_LATEST, _CHECK = "tp_engine_latest_s", "tp_engine_check_time"


class TemplateRefusal(Exception):  # noqa: N818 - the template's decision, or a bound
    """A template refused the messages, or exceeded a bound; the text is for the client.  ``cpu_s``: the processor time
    until then."""

    def __init__(self, message: str, *, cpu_s: float = 0.0) -> None:
        super().__init__(message)
        self.cpu_s = cpu_s


def parse_template(text: str) -> nodes.Template:
    """The template's tree.  Raises ``ConfigError`` for a text that is no template, is too long, or uses what none
    needs: the power operator makes numbers of any size, and ``lipsum`` writes noise."""
    if len(text) > _MOST_CHARACTERS:
        raise ConfigError(f"the chat template has {len(text):,} characters; at most {_MOST_CHARACTERS:,} are read")
    environment = new_environment()
    try:
        tree = environment.parse(text)
        for node in tree.find_all((nodes.Pow, nodes.Name, nodes.Filter, nodes.Test)):
            if words := _refused(node, environment):
                raise ConfigError(f"the chat template has an error in line {node.lineno}: {words}")
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ConfigError("the chat template is nested too deeply") from error
    except ConfigError:
        raise
    except ValueError as error:  # a number with thousands of digits
        raise ConfigError(f"the chat template has an error: {error}") from error
    return tree


def _refused(node: nodes.Node, environment: jinja2.Environment) -> str:
    """What is wrong with a part of a template; empty if it is allowed."""
    match node:
        case nodes.Pow():
            return "** is not allowed in chat templates"
        case nodes.Name(name="lipsum"):
            return "lipsum is not allowed in chat templates"
        case nodes.Filter(name=name) if name is not None and name not in environment.filters:
            return f"No filter named {name!r}."
        case nodes.Test(name=name) if name not in environment.tests:
            return f"No test named {name!r}."
    return ""


def prepare(_text: str = "") -> None:
    """Make the environment that compiles templates, before the forks that use it."""
    new_environment()


def serve(data: bytes, descriptor: int) -> bytes:
    """Render the template ``data`` for each job that comes through ``descriptor``, until the other end is closed or
    this process is old.

    A job is a JSON object: ``variables``, ``max_characters``, the time ``now`` if it is not the clock's, and seconds of
    processor time: after ``cpu_s`` a loop refuses the messages, after ``dies_s`` this process ends wherever it is.
    The answer is JSON: processor time, whether it is a prompt, and that or the words of a refusal.
    """
    signal.setitimer(signal.ITIMER_REAL, 0.0)  # those who wait have their own limits
    template = _Template(data.decode())
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    latest_s = time.monotonic() + _LIFE_S
    with Connection(descriptor) as link, contextlib.suppress(EOFError):
        while time.monotonic() < latest_s and link.poll(_IDLE_S):
            job = json.loads(link.recv_bytes())
            began_s = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, job.pop("dies_s"))
            try:
                answer = [True, template.render(**job)]
            except TemplateRefusal as error:
                answer = [False, str(error)[:_LONGEST_REFUSAL]]
            signal.setitimer(signal.ITIMER_PROF, 0.0)
            link.send_bytes(json.dumps([time.process_time() - began_s, *answer]).encode())
    return b""


class _Template:
    """A compiled template."""

    def __init__(self, text: str) -> None:
        tree = parse_template(text)
        _watch(tree)
        self._template = new_environment().from_string(tree)

    def render(self, variables: Mapping[str, Any], cpu_s: float, max_characters: int, now: str | None) -> str:
        """The text; raises ``TemplateRefusal`` if the template raises, takes too long or writes too much."""
        latest_s = time.thread_time() + cpu_s
        clock = {} if now is None else {"strftime_now": datetime.fromisoformat(now).strftime}
        pieces, num_characters = [], 0
        try:
            for piece in self._template.generate(**variables, **clock, **{_LATEST: latest_s}):
                pieces.append(piece)
                num_characters += len(piece)
                if num_characters > max_characters:
                    raise TemplateRefusal(f"the prompt is longer than {max_characters} characters")
                _check_time(latest_s)
        except (TemplateRefusal, MemoryError):
            raise
        except _OutOfTimeError:
            raise TemplateRefusal(f"the template takes longer than {cpu_s:g} s") from None
        except Exception as error:  # a template is a program and may raise anything
            raise TemplateRefusal(str(error) or type(error).__name__) from error
        return "".join(pieces)


class _OutOfTimeError(Exception):
    pass


def _watch(tree: nodes.Template) -> None:
    """Have every iteration of a loop and every call of a macro check the time, also where they write nothing."""
    blocks: list[nodes.For | nodes.Macro | nodes.CallBlock]
    blocks = [*tree.find_all(nodes.For), *tree.find_all(nodes.Macro), *tree.find_all(nodes.CallBlock)]
    for block in blocks:
        check = nodes.Filter(nodes.Name(_LATEST, "load"), _CHECK, [], [], None, None)
        block.body.insert(0, nodes.ExprStmt(check).set_lineno(block.lineno))


def _check_time(latest_s: float) -> None:
    if time.thread_time() > latest_s:
        raise _OutOfTimeError


class _GenerationBlock(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's words for training; here it just renders its content."""

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
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


@cache
def new_environment() -> ImmutableSandboxedEnvironment:
    """The environment that compiles templates: Jinja's sandbox, with the additions of ``apply_chat_template``."""
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
    """JSON as models saw it in training; Jinja's filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
