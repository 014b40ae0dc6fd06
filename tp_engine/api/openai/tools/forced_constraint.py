"""The constraint of calls that a request forces, made from its tools' schemas in a process that may be killed.

Schemas come from clients, and a grammar may be many times as large, or take long to write.  So nothing reads schemas of
forced calls in this process; one that takes too long is refused, and one whose client leaves is given up.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from tp_engine.api.openai.tools.forced import forced_calls
from tp_engine.api.openai.tools.forced_arguments import UnfitError
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.token_writing import TokenWriting
from tp_engine.api.openai.tools.tool_format import MessageFormat, ToolFormat
from tp_engine.errors import RequestError
from tp_engine.requests.structured_outputs import MAX_CONSTRAINT_CHARACTERS, StructuredOutputsParams
from tp_engine.system.isolation.process import CallError, CancelledCallError, CrashedError, IsolatedProcess, Limits
from tp_engine.system.units import KIB, MIB

# Schemas of a megabyte take a few tenths of a second.
_LIMITS = Limits(
    cpu_s=2.0, memory_bytes=256 * MIB, output_bytes=4 * MAX_CONSTRAINT_CHARACTERS, stack_bytes=16 * MIB, niceness=5
)
_MAX_REMEMBERED = 64
_LARGEST_REMEMBERED = 64 * KIB
_PROCESS = IsolatedProcess()


def forced_schema(tools: ToolRequest) -> StructuredOutputsParams | None:
    """The constraint of an answer whose calls are JSON without marks, as in ``ToolRequest.schema``; None if no
    call is forced.  Raises ``RequestError``."""
    if tools.choice == "auto":
        return None
    schema = _written(write_schema, {"tools": _fields(tools)})
    try:
        return StructuredOutputsParams(json=schema)
    except RequestError as error:
        raise _refusal(str(error)) from None


def forced_grammar(
    tools: ToolRequest,
    form: ToolFormat | MessageFormat,
    writing: TokenWriting,
    like: StructuredOutputsParams,
    *,
    thinks: bool,
) -> str | None:
    """The grammar, in Lark, of the calls that ``tools`` force, in a model's own ``form``.

    None if that form cannot follow a schema, or is unknown: then calls are JSON without marks.  In messages they follow
    reasoning if the model ``thinks``.  White space is as in ``like``.  Raises ``RequestError``.
    """
    name = next((name for name, one in TOOL_FORMATS.items() if _is_of(form, one)), None)
    if name is None or tools.choice == "auto":
        return None
    job = {
        "tools": _fields(tools),
        "form": name,
        "tokens": [writing.special, writing.apart],
        "like": dataclasses.asdict(like),
        "thinks": thinks,
    }
    return _written(write_grammar, job) or None


def write_schema(job: bytes) -> bytes:
    """The isolated half of ``forced_schema``."""
    given = json.loads(job)
    return json.dumps(_tools(given).schema(), ensure_ascii=False).encode()


def write_grammar(job: bytes) -> bytes:
    """The isolated half of ``forced_grammar``; empty if the form does not fit."""
    given = json.loads(job)
    tools, writing, like = _tools(given), TokenWriting(*given["tokens"]), StructuredOutputsParams(**given["like"])
    form = TOOL_FORMATS[given["form"]].for_tokens(writing.apart)
    if form.message is not None:
        return form.message.forced_calls(tools, writing, given["thinks"], like).encode()
    forced = form.forced_form(tools)
    try:
        return b"" if forced is None else forced_calls(forced, form.marks, tools, writing, like).encode()
    except UnfitError:  # each version of the form fits, and all together are too long
        return b""


def _is_of(form: ToolFormat | MessageFormat, row: ToolFormat) -> bool:
    """Whether ``form`` is a row of the table, a version of it, or its messages."""
    return form.models == row.models if isinstance(form, ToolFormat) else form is row.message


def _fields(tools: ToolRequest) -> dict[str, Any]:
    """The fields of ``tools`` that the forced calls depend on."""
    kept = [tool for tool in tools.tools if tools.name in (None, tool["function"]["name"])]
    functions = [{name: tool["function"].get(name) for name in ("name", "parameters", "strict")} for tool in kept]
    return {
        "tools": [{"function": function} for function in functions],
        "choice": tools.choice,
        "name": tools.name,
        "several": tools.several,
    }


def _tools(job: dict[str, Any]) -> ToolRequest:
    return ToolRequest(**{**job["tools"], "tools": tuple(job["tools"]["tools"])})


def _written(function: Callable[[bytes], bytes], job: dict[str, Any]) -> str:
    """``function(job)``, run in that process.  Remembered, as agents send the same tools with each turn."""
    try:
        data = json.dumps(job, ensure_ascii=False).encode(errors="surrogatepass")
    except RecursionError:
        raise _refusal("they are nested too deeply") from None
    return _remembered(function, data) if len(data) <= _LARGEST_REMEMBERED else _called(function, data)


def _called(function: Callable[[bytes], bytes], data: bytes) -> str:
    try:
        return str(bytes(_PROCESS.call(function, data, _LIMITS).output), "utf-8")
    except CancelledCallError:
        raise
    except CrashedError as error:
        raise _refusal("they are nested too deeply" if error.is_overflow else f"they cannot be read: {error}") from None
    except CallError as error:
        raise _refusal(f"a constraint made of them {error}; make them simpler") from None


_remembered = lru_cache(maxsize=_MAX_REMEMBERED)(_called)


def _refusal(reason: str) -> RequestError:
    return RequestError(f"tools: the parameters cannot be kept in a forced call: {reason}", param="tools")
