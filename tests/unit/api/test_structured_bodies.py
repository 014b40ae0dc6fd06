"""The constraints in request bodies, in every spelling.  Oracle: ``StructuredOutputsParams`` written out."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from tp_engine.api.openai.protocol import ChatBody, CompletionBody, parse_body
from tp_engine.api.openai.sampling import beam_search_params, chat_params, completion_params
from tp_engine.engine import messages
from tp_engine.errors import RequestError
from tp_engine.requests.request import EngineRequest
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.requests.structured_outputs import StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
SPELLINGS: list[tuple[dict[str, Any], StructuredOutputsParams | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        StructuredOutputsParams(json=SCHEMA),
    ),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": "a+", "json": None}}, StructuredOutputsParams(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=("a", "b"))),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputsParams(grammar='start: "a"')),
    ({"structured_outputs": {"json_object": True}}, StructuredOutputsParams(json_object=True)),
    ({"guided_json": SCHEMA}, StructuredOutputsParams(json=SCHEMA)),
    ({"guided_json": json.dumps(SCHEMA)}, StructuredOutputsParams(json=SCHEMA)),
    ({"guided_regex": "a+", "guided_decoding_backend": "auto"}, StructuredOutputsParams(regex="a+")),
    ({"guided_choice": ["a", "b"]}, StructuredOutputsParams(choice=["a", "b"])),
    ({"guided_grammar": 'start: "a"'}, StructuredOutputsParams(grammar='start: "a"')),
    (
        {"guided_json": SCHEMA, "guided_whitespace_pattern": " ?"},
        StructuredOutputsParams(json=SCHEMA, whitespace_pattern=" ?"),
    ),
    # what guidance's client sends: the newer field, and what older servers read
    (
        {"structured_outputs": {"regex": "a"}, "guided_grammar": "b", "guided_decoding_backend": "guidance"},
        StructuredOutputsParams(regex="a"),
    ),
    ({"structured_outputs": {"regex": "a"}, "guided_choice": []}, StructuredOutputsParams(regex="a")),
    ({"structured_outputs": {}, "guided_regex": "a"}, StructuredOutputsParams(regex="a")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
]
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format", "'xml'"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
    ({"response_format": {"type": "json_object", "schema": [1]}}, "response_format", "object"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format", "only one"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": "{"}}}, "response_format", "read"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}}, "response_format", "object"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs", "choice is []"),
    ({"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs", "''"),
    ({"structured_outputs": {"choice": "abc"}}, "structured_outputs", "list"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs", "regex is 3"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs", "regex is ''"),
    ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "structured_outputs", ": json and regex of"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs", "none of"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs", "none of"),
    ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs", "json_object is 'yes'"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "'xml'"),
    ({"structured_outputs": "json"}, "structured_outputs", "an object"),
    ({"guided_choice": []}, "guided_choice", "[]"),
    ({"guided_json": "nonsense"}, "guided_json", "read"),
    ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format", "guided_*"),
]


def completion(fields: dict[str, Any]) -> CompletionBody:
    return parse_body(CompletionBody, json.dumps({"prompt": "x", **fields}))


def chat(fields: dict[str, Any]) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}))


@pytest.mark.parametrize(("fields", "expected"), SPELLINGS)
def test_every_spelling(fields: dict[str, Any], expected: StructuredOutputsParams | None) -> None:
    """Oracle: see above.  Completions and chats take the same fields; the parameters survive the way to rank 0."""
    for params in (completion_params(completion(fields)), chat_params(chat(fields))):
        assert params.structured_outputs == expected
        request = EngineRequest(request_id="r", prompt_token_ids=[1], params=params)
        sent = messages.decode_to_engine(messages.encode(messages.AddRequest(request=request)))
        assert isinstance(sent, messages.AddRequest) and sent.request.params.structured_outputs == expected


@pytest.mark.parametrize(("fields", "param", "text"), REFUSED)
def test_what_can_not_be_meant_is_refused_by_name(fields: dict[str, Any], param: str, text: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion_params(completion(fields))
    assert caught.value.param == param and text in str(caught.value)


def test_not_with_beam_search() -> None:
    with pytest.raises(RequestError, match="structured output is not supported with use_beam_search"):
        beam_search_params(completion({"guided_regex": "a", "use_beam_search": True, "n": 2}), 100)


def test_a_schema_of_ones_own() -> None:
    """Oracle: by hand: for tools, a schema becomes the sampling field."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=SCHEMA))
    assert params.structured_outputs is not None and params.structured_outputs.kind == "json"
    assert json.loads(str(params.structured_outputs.json)) == SCHEMA
    assert SamplingParams(structured_outputs={"json": SCHEMA}) == params  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="surrogate"):
        StructuredOutputsParams(regex="\ud800")


def test_a_malformed_message_is_a_validation_error() -> None:
    """Oracle: rank 0 refuses a constraint that the frontend should have refused, like every malformed request."""
    data = messages.encode(
        messages.AddRequest(request=EngineRequest(request_id="r", prompt_token_ids=[1], params=SamplingParams()))
    )
    wire = msgspec.msgpack.decode(data)
    wire[1]["params"]["structured_outputs"] = {"choice": []}
    with pytest.raises(msgspec.ValidationError, match="choice"):
        messages.decode_to_engine(msgspec.msgpack.encode(wire))
