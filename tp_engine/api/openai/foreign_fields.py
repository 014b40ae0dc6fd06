"""Fields that clients of other servers send and no body here has: what changes a result is refused, never ignored.

::

    a field that a body declares     is used, or refused where it is read
    one of a table below             is refused, unless its value asks for nothing
    one of ``HARMLESS``              changes no result: it is ignored, and the log says so once
    any other                        is unknown, and treated likewise
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tp_engine.errors import RequestError, shown

_NOTHING: tuple[Any, ...] = (None, False, 0, "", [], {})


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that is refused, with the ``remedy``, unless its value is one of ``neutral``."""

    remedy: str
    neutral: tuple[Any, ...] = _NOTHING


_FORM = "describe the form with response_format or structured_outputs"
_IMAGES = "mm_processor_kwargs of a chat, and detail, say in which sizes images are read"
_IN_CHATS = "images are parts of the contents of a chat's messages (image_url)"
_DRAWN = "tokens are drawn by temperature, top_p, top_k, min_p and the penalties"
_CUT = "cut with truncate_prompt_tokens; -1 keeps what the context holds"
_TEMPLATE = "a template is a program, which only the operator chooses; serve with --chat-template"
_CHATS_ALONE = "it is a field of /v1/chat/completions alone"
_PREFIX = "write what the model wants before a query or a document into the text"

_PROMPT = {
    "lora_path": Refused("name a loaded adapter as the model"),
    "lora_request": Refused("name a loaded adapter as the model"),
    "media_io_kwargs": Refused(_IMAGES),
    "prompt_embeds": Refused("send the prompt as text or token ids"),
}
GENERATION: Mapping[str, Refused] = {
    **_PROMPT,
    **dict.fromkeys(("image_data", "images", "multi_modal_data"), Refused(_IN_CHATS)),
    **dict.fromkeys(("ebnf", "grammar", "json_schema", "regex", "structural_tag"), Refused(_FORM)),
    **dict.fromkeys(("dry_multiplier", "mirostat", "no_repeat_ngram_size", "top_a", "xtc_probability"),
                    Refused(_DRAWN)),
    **dict.fromkeys(("tfs_z", "typical_p"), Refused(_DRAWN, (None, 1))),
    "custom_logit_processor": Refused(_DRAWN),
    "logits_processors": Refused(_DRAWN),
    "max_new_tokens": Refused("its name is max_tokens"),
    "no_stop_trim": Refused("its name is include_stop_str_in_output"),
    "format": Refused(_FORM),
    "options": Refused("send its fields beside the others, by the names of this API"),
    "repeat_penalty": Refused("its name is repetition_penalty", (None, 1)),
    "repetition_detection": Refused("set repetition_penalty, or stop"),
    "return_hidden_states": Refused("serve the model with --convert embed"),
    "return_prompt_text": Refused("ask /v1/chat/completions/render, or /tokenize"),
    "stop_regex": Refused("give texts as stop"),
    "vllm_xargs": Refused("this server has no extensions that read it"),
    "watermarking": Refused("this server writes no watermark"),
}  # fmt: skip
_AS_SYSTEM = Refused("send it as a message with the role system")
_AS_MAX_TOKENS = Refused("its name is max_tokens", (None,))
_AS_STOP = Refused("its name is stop")
COMPLETION: Mapping[str, Refused] = {
    **GENERATION,
    "max_completion_tokens": _AS_MAX_TOKENS,
    "max_output_tokens": _AS_MAX_TOKENS,
    "stop_sequences": _AS_STOP,
    "top_logprobs": Refused("its name is logprobs"),
}
CHAT: Mapping[str, Refused] = {
    **GENERATION,
    "audio": Refused("answers are text"),
    "best_of": Refused("its name is n", (None, 1)),
    "function_call": Refused("functions are tools now, and this is tool_choice", (None, "none", "auto")),
    "instructions": _AS_SYSTEM,
    "max_output_tokens": _AS_MAX_TOKENS,
    "modalities": Refused("answers are text", (None, [], ["text"])),
    "separate_reasoning": Refused("reasoning always has a field of its own", (None, True)),
    "stop_sequences": _AS_STOP,
    "stream_reasoning": Refused("reasoning is always streamed", (None, True)),
    "system": _AS_SYSTEM,
    "web_search_options": Refused("this server searches nothing; give a function that does"),
}
RESPONSES: Mapping[str, Refused] = {
    **GENERATION,
    "documents": Refused("write the texts into the input"),
    "echo": Refused("it is a field of /v1/chat/completions and /v1/completions alone"),
    "enable_response_messages": Refused("ask /v1/chat/completions/render for the prompt"),
    "functions": Refused("functions are tools now"),
    "logprobs": Refused("set include to message.output_text.logprobs"),
    "max_completion_tokens": Refused("its name is max_output_tokens", (None,)),
    "modalities": CHAT["modalities"],
    "previous_input_messages": Refused("send all items as input"),
    "previous_response": Refused("send all items as input"),
    "stop_sequences": _AS_STOP,
    "system": Refused("its name is instructions"),
}
COUNTED_MESSAGES: Mapping[str, Refused] = {
    **_PROMPT,
    "add_generation_prompt": Refused(_CHATS_ALONE, (None, True)),
    "chat_template": Refused(_TEMPLATE),
    "container": Refused("this server runs no code; give a tool that the client runs"),
    "continue_final_message": Refused("a conversation that ends with the assistant's text is continued"),
    "documents": Refused("write the texts into the content of a message"),
    "mcp_servers": Refused("this server connects to none; give their tools as tools of your own"),
    "mm_processor_kwargs": Refused(_CHATS_ALONE),
}
MESSAGES: Mapping[str, Refused] = {
    **GENERATION,
    **COUNTED_MESSAGES,
    **dict.fromkeys(
        ("add_special_tokens", "allowed_token_ids", "bad_words", "echo", "frequency_penalty", "ignore_eos",
         "include_stop_str_in_output", "logit_bias", "logprob_token_ids", "logprobs", "min_p", "min_tokens",
         "presence_penalty", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids", "stop_token_ids",
         "top_logprobs", "use_beam_search"),
        Refused(_CHATS_ALONE)),
    **dict.fromkeys(("length_penalty", "n", "repetition_penalty"), Refused(_CHATS_ALONE, (None, 1))),
    **dict.fromkeys(("include_reasoning", "skip_special_tokens", "spaces_between_special_tokens"),
                    Refused(_CHATS_ALONE, (None, True))),
    **dict.fromkeys(("guided_choice", "guided_grammar", "guided_json", "guided_regex", "structured_outputs"),
                    Refused("describe the form with output_config.format")),
    "functions": Refused("functions are tools now"),
    "max_completion_tokens": Refused("its name is max_tokens", (None,)),
    "parallel_tool_calls": Refused("set tool_choice.disable_parallel_tool_use", (None, True)),
    "response_format": Refused("its name is output_config.format", (None, {"type": "text"})),
    "seed": Refused(_CHATS_ALONE, (None,)),
    "stop": Refused("its name is stop_sequences"),
}  # fmt: skip
TEXTS: Mapping[str, Refused] = {
    **_PROMPT,
    "chat_template": Refused(_TEMPLATE),
    "mm_processor_kwargs": Refused(_IMAGES),
    "padding": Refused("prompts are not padded", (None, "do_not_pad")),
}
INPUTS: Mapping[str, Refused] = {
    **TEXTS,
    "embedding_type": Refused("its name is encoding_format", (None, "float")),
    "embedding_types": Refused("its name is encoding_format", (None, [], ["float"])),
    "input_type": Refused(_PREFIX),
    "instruction": Refused(_PREFIX),
    "late_chunking": Refused("each input has a vector of its own"),
    "normalized": Refused("set use_activation to false for vectors of any length", (None, True)),
    "output_dimension": Refused("its name is dimensions"),
    "output_dtype": Refused("its name is embed_dtype, with encoding_format base64", (None, "float")),
    "prompt_name": Refused(_PREFIX),
    "return_multivector": Refused("each input has one vector; ask /pooling for a vector of each token"),
    "task": Refused(_PREFIX),
    "truncate": Refused(_CUT, (None, False, "NONE")),
    "truncation": Refused(_CUT),
}
POOLING: Mapping[str, Refused] = {name: row for name, row in INPUTS.items() if name != "task"}  # it has a ``task``
PAIRS: Mapping[str, Refused] = {
    **TEXTS,
    "max_chunks_per_doc": Refused("a document is read once; cut it with max_tokens_per_doc"),
    "max_doc_length": Refused("its name is max_tokens_per_doc"),
    "max_query_length": Refused("its name is max_tokens_per_query"),
    "rank_fields": Refused("a document is its text", (None, [], ["text"])),
    "raw_scores": Refused("set use_activation to false"),
    "return_embeddings": Refused("ask /v1/embeddings"),
    "truncate": Refused(_CUT, (None, False, "NONE")),
    "truncation": Refused(_CUT),
}
TOKENS: Mapping[str, Refused] = {"chat_template": Refused(_TEMPLATE), "media_io_kwargs": Refused(_IMAGES)}

# These name, bill, store, route or speed up a request, or shape its chunks.
HARMLESS = frozenset({
    "betas", "cache_control", "context_management", "ec_transfer_params", "inference_geo", "metadata", "moderation",
    "prediction", "prompt_cache_options", "prompt_cache_retention", "return_mm_kwargs", "return_token_offsets",
    "routed_experts_prompt_start", "safety_identifier", "service_tier", "session_id", "speed", "store",
    "stream_interval", "verbosity",
})  # fmt: skip


def refuse_foreign(table: Mapping[str, Refused], extra: Mapping[str, Any]) -> None:
    """Raise ``RequestError`` for the first field of a body's ``extra`` ones that ``table`` refuses."""
    for name in sorted(table.keys() & extra.keys()):
        value, row = extra[name], table[name]
        if value not in row.neutral:
            raise RequestError(f"{name} is {shown(value)}, which is not supported: {row.remedy}", param=name)
