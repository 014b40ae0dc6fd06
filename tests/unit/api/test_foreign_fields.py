"""Fields of other servers and clients: each is obeyed, refused by name, or changes no result."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from tp_engine.api.anthropic.protocol import CountTokensBody, MessagesBody
from tp_engine.api.openai import foreign_fields
from tp_engine.api.openai.cohere import CohereEmbedBody
from tp_engine.api.openai.foreign_fields import HARMLESS
from tp_engine.api.openai.pooled import (
    ClassifyBody,
    EmbeddingBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
    TokenizeBody,
)
from tp_engine.api.openai.protocol import ChatBody, CompletionBody, RequestBody, parse_body
from tp_engine.api.openai.responses_api.protocol import ResponsesBody
from tp_engine.errors import RequestError

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
BODIES: dict[type[RequestBody], dict[str, Any]] = {
    ChatBody: MESSAGES,
    CompletionBody: {"prompt": "x"},
    ResponsesBody: {"input": "x"},
    MessagesBody: {**MESSAGES, "max_tokens": 5},
    CountTokensBody: MESSAGES,
    EmbeddingBody: {"input": "x"},
    PoolingBody: {"input": "x"},
    ClassifyBody: {"input": "x"},
    ScoreBody: {"queries": "x", "documents": "y"},
    RerankBody: {"query": "x", "documents": ["y"]},
    CohereEmbedBody: {"texts": ["x"]},
    TokenizeBody: {"prompt": "x"},
}
# What vLLM 0.32 reads for prompts, and what it and OpenAI read for generation.
PROMPT = "model user priority request_id cache_salt truncate_prompt_tokens truncation_side"
GENERATION = f"""{PROMPT} stream stream_options n temperature top_p top_k min_p seed stop stop_token_ids logit_bias
    frequency_penalty presence_penalty repetition_penalty bad_words allowed_token_ids min_tokens ignore_eos
    include_stop_str_in_output skip_special_tokens spaces_between_special_tokens use_beam_search length_penalty
    prompt_logprobs logprob_token_ids add_special_tokens response_format structured_outputs return_token_ids
    return_tokens_as_token_ids return_token_offsets return_mm_kwargs routed_experts_prompt_start session_id
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection watermarking stream_interval
    thinking_token_budget metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention"""
POOLED = f"{PROMPT} padding mm_processor_kwargs"
INPUTS = f"""{POOLED} input messages add_generation_prompt continue_final_message add_special_tokens chat_template
    chat_template_kwargs media_io_kwargs use_activation"""
PAIRS = f"{POOLED} use_activation max_tokens_per_doc max_tokens_per_query instruction"
FIELDS: dict[type[RequestBody], str] = {
    ChatBody: f"""{GENERATION} messages max_tokens max_completion_tokens logprobs top_logprobs tools tool_choice
        parallel_tool_calls functions function_call reasoning_effort include_reasoning echo add_generation_prompt
        continue_final_message documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
        return_prompt_text audio modalities prediction verbosity web_search_options moderation""",
    CompletionBody: f"{GENERATION} prompt echo logprobs max_tokens suffix best_of prompt_embeds",
    ResponsesBody: f"""{PROMPT} background conversation include input instructions max_output_tokens max_tool_calls
        metadata parallel_tool_calls previous_response_id prompt prompt_cache_key prompt_cache_retention reasoning
        safety_identifier service_tier store stream stream_options temperature text tool_choice tools top_logprobs top_p
        truncation top_k min_p logit_bias repetition_penalty seed stop ignore_eos skip_special_tokens vllm_xargs
        include_stop_str_in_output mm_processor_kwargs enable_response_messages previous_input_messages
        previous_response structured_outputs kv_transfer_params context_management""",
    MessagesBody: """model messages max_tokens metadata output_config stop_sequences stream system temperature
        tool_choice tools top_k top_p thinking service_tier container context_management mcp_servers inference_geo speed
        cache_control output_format kv_transfer_params chat_template_kwargs""",
    CountTokensBody: """model messages system tools tool_choice thinking output_config context_management mcp_servers
        chat_template_kwargs cache_control""",
    EmbeddingBody: f"""{INPUTS} encoding_format embed_dtype endianness dimensions task late_chunking truncate normalized
        embedding_type return_multivector input_type""",
    PoolingBody: f"{INPUTS} encoding_format embed_dtype endianness dimensions task",
    ClassifyBody: INPUTS,
    ScoreBody: f"{PAIRS} queries documents text_1 text_2",
    RerankBody: f"""{PAIRS} query documents top_n return_documents return_embeddings truncation max_doc_length
        max_query_length max_chunks_per_doc rank_fields""",
    CohereEmbedBody: """model texts images inputs input_type embedding_types output_dimension truncate max_tokens
        priority""",
    TokenizeBody: """model prompt messages add_special_tokens add_generation_prompt continue_final_message chat_template
        chat_template_kwargs media_io_kwargs mm_processor_kwargs return_token_strs tools""",
}
KV = {"kv_transfer_params"}  # no KV cache moves between servers


def parse(kind: type[RequestBody], **fields: Any) -> RequestBody:
    return parse_body(kind, json.dumps(BODIES[kind] | fields))


@pytest.mark.parametrize("kind", FIELDS, ids=lambda kind: kind.__name__)
def test_every_known_field_has_a_decision(kind: type[RequestBody]) -> None:
    """Oracle: the request models of vLLM 0.32, OpenAI, Anthropic, Cohere and Jina, by hand."""
    known = kind.model_fields.keys() | kind.foreign.keys() | HARMLESS | KV
    assert sorted({*FIELDS[kind].split()} - known) == []
    assert not kind.model_fields.keys() & kind.foreign.keys(), "obeyed and refused"
    assert not HARMLESS & kind.foreign.keys(), "harmless and refused"


def test_messages_ignore_no_field_of_chats() -> None:
    """Oracle: what a chat obeys is obeyed, or refused, by the endpoint beside it, but for what changes no answer."""
    harmless = {"guided_decoding_backend", "guided_whitespace_pattern", "prompt_cache_key", "stream_options"}
    known = MessagesBody.model_fields.keys() | MessagesBody.foreign.keys() | harmless | KV
    assert sorted(ChatBody.model_fields.keys() - known) == []


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences"])
@pytest.mark.parametrize("kind", [ChatBody, CompletionBody, ResponsesBody, MessagesBody])
def test_every_name_of_a_limit_has_a_decision(kind: type[RequestBody], name: str) -> None:
    """Oracle: a limit under the name of another endpoint would be ignored, and the answer be longer."""
    if (kind, name) != (MessagesBody, "max_output_tokens"):  # max_tokens is required there
        assert name in kind.model_fields.keys() | kind.foreign.keys()


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_what_changes_a_result_is_refused_by_name(kind: type[RequestBody]) -> None:
    """Oracle: the table: the field, its value and a remedy; a value that asks for nothing is taken."""
    for name, row in kind.foreign.items():
        for neutral in row.neutral:
            parse(kind, **{name: neutral})
        with pytest.raises(RequestError, match=f"^{name} is 'x9', which is not supported: .{{12}}") as caught:
            parse(kind, **{name: "x9"})
        assert caught.value.param == name


def test_the_others_are_ignored_with_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: a warning for each name, once, also in messages."""
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            parse(MessagesBody, inference_geo="eu", qzx_unheard=1)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "ignoring the request field, which changes no result: 'inference_geo'",
        "ignoring the unknown request field 'qzx_unheard'",
    ]


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (ChatBody, {"max_tokens": 100.0, "n": 1.0, "temperature": "0.5"},
         {"max_tokens": 100, "n": 1, "temperature": 0.5}),
        (ChatBody, {"max_tokens": "100", "top_p": "1", "seed": "-3", "top_k": "2e1"},
         {"max_tokens": 100, "top_p": 1.0, "seed": -3, "top_k": 20}),
        (ChatBody, {"stop_token_ids": [1.0, 2], "logit_bias": {"5": "0.5"}},
         {"stop_token_ids": [1, 2], "logit_bias": {"5": 0.5}}),
        (CompletionBody, {"prompt": [1.0, 2.0]}, {"prompt": [1, 2]}),
        (MessagesBody, {"max_tokens": 8.0}, {"max_tokens": 8}),
        (EmbeddingBody, {"dimensions": 8.0}, {"dimensions": 8}),
        (RerankBody, {"top_n": "2"}, {"top_n": 2}),
        (ChatBody, {"max_tokens": 100.0, "messages": [{"role": "user", "content": "1.0"}]}, {"max_tokens": 100}),
        (ChatBody, {"stream": "false", "logprobs": 1, "ignore_eos": "True", "max_tokens": "5"},
         {"stream": False, "logprobs": True, "ignore_eos": True, "max_tokens": 5}),
        (CompletionBody, {"prompt": ["1", "true"], "echo": 0.0}, {"prompt": ["1", "true"], "echo": False}),
    ],
)  # fmt: skip
def test_numbers_and_switches_of_clients_that_have_doubles_or_texts(
    kind: type[RequestBody], fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    """Oracle: the same values, with the types of the fields; other fields as they were."""
    body = parse(kind, **fields)
    found = {name: getattr(body, name) for name in expected}
    assert found == expected
    assert [type(one) for one in found.values()] == [type(one) for one in expected.values()]
    if "messages" in fields:
        assert body.messages == fields["messages"]  # type: ignore[attr-defined]


def test_a_switch_within_an_object_may_be_a_text() -> None:
    """Oracle: the same as the switch."""
    body = parse(ChatBody, stream=True, stream_options={"include_usage": "true"})
    assert isinstance(body, ChatBody) and body.include_usage


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 100.5},
        {"max_tokens": "100.5"},
        {"max_tokens": True},
        {"max_tokens": "many"},
        {"max_tokens": ""},
        {"max_tokens": 1e300},
        {"max_tokens": "9" * 100},
        {"temperature": "nan"},
        {"temperature": "1e999"},
        {"temperature": "0x1"},
        {"n": [1.0]},
        {"seed": 2.0**60},
        {"stop_token_ids": [1.5]},
        {"logprobs": 5},
        {"stream": "yes"},
        {"stream": ["true"]},
    ],
    ids=str,
)
def test_numbers_that_would_change_are_refused(fields: dict[str, Any]) -> None:
    """Oracle: the name of the field in the error."""
    with pytest.raises(RequestError) as caught:
        parse(ChatBody, **fields)
    assert caught.value.param == next(iter(fields))


def test_texts_stay_texts_where_both_are_taken() -> None:
    """Oracle: a prompt of texts and numbers is neither of the two."""
    with pytest.raises(RequestError, match="prompt"):
        parse(CompletionBody, prompt=["12", 5])
    assert parse(CompletionBody, prompt=["12"]).prompt == ["12"]  # type: ignore[attr-defined]


def test_the_tables_name_no_other_bodies_fields() -> None:
    """Oracle: a row that no body has would decide nothing."""
    tables = {name for name, value in vars(foreign_fields).items() if name.isupper() and isinstance(value, dict)}
    used = {id(kind.foreign) for kind in BODIES}
    assert {name for name in tables if id(getattr(foreign_fields, name)) not in used} <= {
        "GENERATION",
        "TEXTS",
        "_PROMPT",
    }
