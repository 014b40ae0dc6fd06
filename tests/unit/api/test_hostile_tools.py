"""Schemas of tools that are made to take long: each is answered or refused, and costs other requests nothing."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.api.openai.protocol import ChatBody
from tp_engine.api.openai.sampling import chat_params
from tp_engine.api.openai.tools.argument_types import ArgumentTypes
from tp_engine.api.openai.tools.forced_constraint import forced_grammar
from tp_engine.api.openai.tools.formats import TOOL_FORMATS
from tp_engine.api.openai.tools.request import ToolRequest
from tp_engine.api.openai.tools.token_writing import TokenWriting
from tp_engine.errors import RequestError
from tp_engine.grammar.schema import lenient_schema, normal_schema, object_schema, unkept_keywords
from tp_engine.requests.nesting import is_schema_deeper
from tp_engine.requests.structured_outputs import StructuredOutputsParams
from tp_engine.system.isolation.cancellation import Cancellation, cancelled_by
from tp_engine.system.isolation.process import CancelledCallError

DEADLINE_S = 120.0
Schema = dict[str, Any]


def long_way(n: int) -> Schema:
    """Many references to a definition that is itself a long reference."""
    return {"type": "object", "x": {"$ref": "#" + "/a" * (8 * n)}, "anyOf": [{"$ref": "#/x"}] * n}


def long_list(n: int) -> Schema:
    return {"type": "object", "x": {"enum": [1] * (8 * n)}, "anyOf": [{"$ref": "#/x"} for _ in range(n)]}


def long_name(n: int) -> Schema:
    inner = {"type": "object", "properties": {f"p{i}": {} for i in range(n)}}
    return {"type": "object", "properties": {"k" * (40 * n): inner}}


def branches(n: int) -> Schema:
    """Branches that are compared in pairs, name by name and value by value, again for each property."""
    names = [f"n{i}" for i in range(60)]
    values = {name: {"enum": list(range(60))} for name in names}
    parts = {f"b{i}": {"type": "object", "required": [f"u{i}", *names], "properties": values} for i in range(10)}
    one = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in parts]}
    return {"type": "object", "$defs": parts, "properties": {f"p{i}": dict(one) for i in range(n)}}


def required(n: int) -> Schema:
    names = [f"a{i}" for i in range(4 * n)]
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}


def definitions(n: int) -> Schema:
    """Definitions that each property refers to, and that stand in the rule of each."""
    parts = {f"d{i}": {"type": "object", "properties": {"a": {"type": "integer"}}} for i in range(n)}
    properties = {f"p{i}": {"type": "array", "items": {"$ref": "#/$defs/d0"}, "minItems": i} for i in range(n)}
    return {"type": "object", "$defs": parts, "properties": properties}


def shared_texts(n: int) -> Schema:
    """A list of texts that each property refers to."""
    texts = {"enum": ["x" * 40 + str(i) for i in range(n)]}
    return {"type": "object", "$defs": {"d": texts}, "properties": {f"p{i}": {"$ref": "#/$defs/d"} for i in range(n)}}


def doubling(n: int) -> Schema:
    """A definition that stands for 2**n."""
    parts = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(n)}
    return {
        "type": "object",
        "$defs": {**parts, f"d{n}": {"type": "string"}},
        "properties": {"a": {"$ref": "#/$defs/d0"}},
    }


def deep(n: int) -> Schema:
    found: Schema = {"type": "object"}
    for _ in range(n):
        found = {"type": "object", "properties": {"a": found}}
    return found


SCHEMAS: list[Callable[[int], Schema]] = [
    long_way, long_list, long_name, branches, required, definitions, shared_texts,
]  # fmt: skip


def chat(schema: Schema, *, strict: bool) -> ChatBody:
    function = {"name": "f", "parameters": schema, "strict": strict}
    return ChatBody.model_validate(
        {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": function}],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
        }
    )


def processor_s(work: Callable[[], object]) -> float:
    """The least processor time of two runs."""
    found = []
    gc.disable()
    for _ in range(2):
        began_s = time.process_time()
        work()
        found.append(time.process_time() - began_s)
    gc.enable()
    return min(found)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("schema", [*SCHEMAS, doubling, deep], ids=lambda one: one.__name__)
def test_a_hostile_schema_is_read_elsewhere(schema: Callable[[int], Schema], strict: bool) -> None:
    """Oracle: this process writes the job and reads the answer, and does nothing else: at most a tenth of a second for
    hundreds of kilobytes; what comes is bounded, or a refusal that names the tools."""
    body = chat(schema(30 if schema is doubling else 400), strict=strict)
    tools = ToolRequest.of(body)
    assert tools is not None
    began_s = time.process_time()
    for name in ("seed_oss", "gemma4", "openai"):
        try:
            params = chat_params(body)
            assert params.structured_outputs is not None
            form, writing = TOOL_FORMATS[name], TokenWriting.of(byte_level_tokenizer())
            forced_grammar(tools, form.message or form, writing, StructuredOutputsParams(json={}), thinks=True)
        except RequestError as error:
            assert error.param == "tools" and len(str(error)) < 1000
    assert time.process_time() - began_s < 1.0


def test_parameters_that_are_too_long_are_the_tools() -> None:
    """By hand: the refusal names the field that the client sent, though a constraint is made of it."""
    described = {"type": "object", "properties": {"a": {"type": "string", "description": "d" * (1 << 20)}}}
    with pytest.raises(RequestError, match=r"^tools: the parameters .* at most 1048576 are allowed") as caught:
        chat_params(chat(described, strict=True))
    assert caught.value.param == "tools"


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda one: one.__name__)
def test_schemas_are_read_in_linear_time(schema: Callable[[int], Schema]) -> None:
    """Oracle: four times as large a schema takes about four times as long, as it did not when it was 16 times."""
    small, large = schema(100), schema(400)
    for read in (
        normal_schema,
        lenient_schema,
        object_schema,
        lambda one: list(unkept_keywords(one)),
        lambda one: is_schema_deeper(one, 500),
        lambda one: [ArgumentTypes(one).of(name) for name in one.get("properties", {})],
    ):
        once, again = processor_s(lambda: read(small)), processor_s(lambda: read(large))  # noqa: B023
        assert again < 9 * max(once, 0.01)


def test_a_long_way_in_a_refusal_is_cut() -> None:
    """Oracle: the keyword and the beginning of its place, whatever the names' lengths."""
    schema = {"type": "object", "properties": {"k" * 100_000: {"uniqueItems": True}}}
    with pytest.raises(RequestError, match=r"uniqueItems at /properties/kkk.*\.\.\.") as caught:
        chat_params(chat(schema, strict=True))
    assert len(str(caught.value)) < 500


def test_work_on_a_schema_ends_with_its_client() -> None:
    """Oracle: the call ends at once, and its process is gone."""
    cancellation = Cancellation()
    body = chat(branches(60_000), strict=True)

    def work() -> None:
        with cancelled_by(cancellation), pytest.raises((CancelledCallError, RequestError)):
            chat_params(body)

    def forks() -> set[int]:
        host = ["tp_engine.system.isolation.host"]
        hosts = [one for one in psutil.Process().children() if one.cmdline()[-1:] == host]
        return {fork.pid for host in hosts for fork in host.children()}

    others = forks()  # those of chat templates stay
    with ThreadPoolExecutor(1) as threads:
        future = threads.submit(work)
        deadline = time.monotonic() + DEADLINE_S
        while not forks() - others and not future.done():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        cancellation.cancel()
        future.result(DEADLINE_S)
        while forks() - others:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert threading.active_count() < 100
