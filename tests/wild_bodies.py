"""Nearly right request bodies: seeded mutations of good ones, in their values, shape and bytes."""

from __future__ import annotations

import copy
import json
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any

from tp_engine.api.openai.protocol import ChatBody, CompletionBody
from tp_engine.api.openai.responses_api.protocol import ResponsesBody

_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
_PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": _PARAMETERS}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": _PARAMETERS, "strict": True}}
_SCHEMA = {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}, "strict": True}
_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    {"role": "user", "content": "and now?"},
]
GOOD: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "the quick", "max_tokens": 3}),
    ("/v1/completions", {"prompt": ["a", "b c"], "max_tokens": 2, "n": 2, "temperature": 0.5, "top_p": 0.9, "seed": 1}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 2, "logprobs": 2, "echo": False, "stop": ["END", "😀"]}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "max_tokens": 3, "top_k": 5, "min_p": 0.1, "logit_bias": {"9": 5.0}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 4, "use_beam_search": True, "n": 2, "length_penalty": 1.0}),
    ("/v1/completions", {"prompt": "world", "max_tokens": 2, "prompt_logprobs": 1, "ignore_eos": True}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_completion_tokens": 3, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 3, "stream": True, "n": 2, "min_tokens": 1}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 2, "chat_template_kwargs": {"shout": True}}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 2, "tools": [_TOOL], "tool_choice": "none"}),
    ("/v1/chat/completions", {"messages": [*_MESSAGES, {"role": "assistant", "tool_calls": [_CALL]}], "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 9, "response_format": _FORMAT, "n": 2}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 9, "structured_outputs": {"regex": "[a-c]{2}(x|y)*"}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 9, "guided_choice": ["yes", "no"], "stream": True}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 9, "guided_grammar": 'root ::= "a" root | "b"'}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "instructions": "Be brief."}),
    ("/v1/responses", {"input": _ITEMS, "max_output_tokens": 3, "store": True, "metadata": {"k": "v"}}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 3, "stream": True, "top_logprobs": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "tools": [{"type": "function", "name": "f"}]}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 2, "text": {"format": {"type": "json_schema"} | _SCHEMA}}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 2, "response_format": {"type": "json_object"}}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 9, "tools": [_TOOL], "tool_choice": "required"}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 5, "structured_outputs": {"choice": ["yes", "no"]}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 5, "structured_outputs": {"regex": "[a-z]{2,4}"}, "n": 2}),
    ("/tokenize", {"prompt": "the quick", "add_special_tokens": True}),
    ("/tokenize", {"messages": _MESSAGES, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
]  # fmt: skip
_FIELDS = sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *ResponsesBody.model_fields})
_LEAVES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 20, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**63, 2**70, 10**400,
    0.0, -0.0, 0.5, 2.5, 1e308, -1e308, 5e-324, float("nan"), float("inf"), float("-inf"),
    "", " ", "x", "0", "null", "\0", "\x7f\n\r\t", "\ud800", "\udfff\ud800", "a\ud83d", "😀",
    "👨‍👩‍👧‍👦" * 9, "e\u0301" * 30,
    "\u202e\u2028\ufeff\uffff", "{{ 7 * 7 }}", "{% raw", "<think>", "<tool_call>{", "<s></s>", "x" * 3000,
    [], {}, [[]], [{}], [None], {"": None}, {"a": {"b": []}}, [0], [-1], [10**9], ["a", 3], [5, 6], [[5], [6]],
    ["", ""], {"5": 1}, {"5": 1e9}, {"x": {}}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"},
    [{"role": "user", "content": "hi"}], {"role": "user"}, {"type": "function"}, {"type": "object"}, {"$ref": "#"},
    {"pattern": "(a+)+$"},
)  # fmt: skip
_JUNK = (b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b",", b"}", b"\0", b'"', b"\\u", b"9" * 5000, b"1e9999")
_NUDGES: tuple[Callable[[Any], Any], ...] = (
    operator.neg, str, lambda x: x + 1, lambda x: x * 1000, lambda x: x // 3, lambda x: x * 0.5 if abs(x) < 1e9 else x,
)  # fmt: skip


def wild_body(rng: random.Random) -> tuple[str, bytes]:
    """A random path and a body for it."""
    path, good = rng.choice(GOOD)
    body: Any = copy.deepcopy(good)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        body = rng.choice(_SHAPES)(rng, body)
    raw = json.dumps(body, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        raw = rng.choice(_BYTES)(rng, raw)
    if rng.random() < 0.05:
        path = rng.choice(GOOD)[0]
    return path, raw


def _places(body: Any) -> Iterator[tuple[Any, Any]]:
    """All (container, key) pairs in a tree."""
    pairs = body.items() if isinstance(body, dict) else enumerate(body) if isinstance(body, list) else ()
    for key, value in pairs:
        yield body, key
        yield from _places(value)


def _replace(rng: random.Random, body: Any) -> Any:
    places = list(_places(body))
    if not places:
        return rng.choice(_LEAVES)
    container, key = rng.choice(places)
    container[key] = copy.deepcopy(rng.choice(_LEAVES))
    return body


def _set_field(rng: random.Random, body: Any) -> Any:
    if isinstance(body, dict):
        body[rng.choice((*_FIELDS, "unknown", "", "__proto__"))] = copy.deepcopy(rng.choice(_LEAVES))
    return body


def _remove(rng: random.Random, body: Any) -> Any:
    if places := list(_places(body)):
        container, key = rng.choice(places)
        del container[key]
    return body


def _wrap(rng: random.Random, body: Any) -> Any:
    if not (places := list(_places(body))):
        return [body]
    container, key = rng.choice(places)
    container[key] = rng.choice((lambda value: [value], lambda value: {"value": value}, str, json.dumps))(
        container[key]
    )
    return body


def _repeat(rng: random.Random, body: Any) -> Any:
    lists = [container[key] for container, key in _places(body) if isinstance(container[key], list) and container[key]]
    if lists:
        chosen = rng.choice(lists)
        chosen.extend(copy.deepcopy(chosen[:8]) * rng.choice((1, 5, 50)))
    return body


def _nudge(rng: random.Random, body: Any) -> Any:
    numbers = [(container, key) for container, key in _places(body) if type(container[key]) in (int, float)]
    if numbers:
        container, key = rng.choice(numbers)
        container[key] = rng.choice(_NUDGES)(container[key])
    return body


def _cut(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw) + 1)]


def _flip(rng: random.Random, raw: bytes) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def _insert(rng: random.Random, raw: bytes) -> bytes:
    junk = rng.choice(
        (b"\xff\xfe", b"\xed\xa0\x80", b"\xef\xbb\xbf", b",", b"}", b"\0", b'"', b"\\u", b"9" * 5000, b"1e9999")
    )
    place = rng.randrange(len(raw) + 1)
    return raw[:place] + junk + raw[place:]


def _nest(rng: random.Random, raw: bytes) -> bytes:
    depth, (opening, closing) = rng.choice((10, 130, 1000, 20_000)), rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
    name = rng.choice(_FIELDS).encode()
    return raw[:-1] + b',"' + name + b'":' + opening * depth + b"1" + closing * depth + raw[-1:]


def _repeat_keys(rng: random.Random, raw: bytes) -> bytes:
    return raw[:-1] + b"," + raw[1:] if raw.startswith(b"{") else raw * 2


_SHAPES: tuple[Callable[[random.Random, Any], Any], ...] = (
    _replace, _replace, _replace, _set_field, _set_field, _remove, _wrap, _repeat, _nudge,
)  # fmt: skip
_BYTES: tuple[Callable[[random.Random, bytes], bytes], ...] = (_cut, _flip, _insert, _nest, _repeat_keys)
