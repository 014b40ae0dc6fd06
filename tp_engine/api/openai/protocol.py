"""Bodies of the OpenAI completion and chat requests, with vLLM's extra sampling fields.

A field that is null or absent takes the default of ``SamplingParams``.  The server and the batch job read all bodies
with ``parse_body``, so both accept and refuse the same.
"""

import itertools
import json
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema

from tp_engine.api.openai import foreign_fields
from tp_engine.api.openai.foreign_fields import HARMLESS, Refused, refuse_foreign
from tp_engine.api.preparing import LARGE
from tp_engine.errors import RequestError, shown
from tp_engine.options.params import describe
from tp_engine.requests.sampling_params import SamplingParams
from tp_engine.system.log import get_logger, warn_once
from tp_engine.system.panics import panics_refused

logger = get_logger(__name__)

REQUEST_ID = r"^[!-~]+$"  # visible ASCII, because it comes back in a header
MAX_REQUEST_ID = 128
_MOST_PARTS = 250_000
_MOST_ELEMENTS = 2_000_000
_PART_MARKS = (b"{", b"[", b":")
_MOST_WARNED = 256
_NUMBER = re.compile(r"-?\d{1,40}(?:\.\d{1,40})?(?:[eE][+-]?\d{1,3})?")
_LONGEST_NUMBER = 64
_EXACT = 2**53  # whole numbers that a double tells apart
_SWITCHES = {"true": True, "false": False, "1": True, "0": False}


def _failing_fast(part: Any) -> Any:
    """A part of a schema of pydantic, in which all lists and objects fail fast."""
    if isinstance(part, (list, tuple)):
        return type(part)(map(_failing_fast, part))
    if not isinstance(part, dict):
        return part
    found = {name: _failing_fast(value) for name, value in part.items()}
    return found | {"fail_fast": True} if part.get("type") in ("list", "dict") else found


class RequestBody(BaseModel):
    """Base of all bodies and of objects in them.  ``foreign`` are other servers' fields that a body refuses.

    Checking stops at the first fault in a list or an object: a stranger may send millions.
    """

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())
    foreign: ClassVar[Mapping[str, Refused]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _failing_fast(handler(source))
        return schema


class StreamOptions(RequestBody):
    """Options of a stream; ``include_usage`` adds a last chunk with the token counts."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class PromptBody(RequestBody):
    """Fields of all bodies that run prompts."""

    model: str | None = None
    stream: bool | None = None
    user: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=MAX_REQUEST_ID, pattern=REQUEST_ID)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)


def _with_bounds(schema: dict[str, Any]) -> None:
    """``max_tokens`` 0 means 1 in completions."""
    describe(SamplingParams, {name: one for name, one in schema["properties"].items() if name != "max_tokens"})


class GenerationBody(PromptBody):
    """Fields of all bodies that generate.  This class checks types, ``SamplingParams`` checks ranges, which the schema
    also has."""

    model_config = ConfigDict(json_schema_extra=_with_bounds)
    foreign = foreign_fields.GENERATION

    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None
    prompt_cache_key: str | None = Field(None, max_length=1024)
    kv_transfer_params: dict[str, Any] | None = None
    logprob_token_ids: list[int] | None = None
    thinking_token_budget: int | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries usage; only a stream that ends with usage does, as in vLLM."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class Thinking(RequestBody):
    """Whether the model thinks first; ``auto`` and ``between_tools`` leave it to the model."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["enabled", "disabled", "adaptive", "auto", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None


class Reasoning(RequestBody):
    """How much a model reasons before it answers."""

    model_config = ConfigDict(extra="ignore")

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = Field(None, ge=0)


class ThinkingBody(RequestBody):
    """The fields by which clients of any API ask a model to think, or not to."""

    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    reasoning: Reasoning | None = None
    reasoning_effort: str | None = None
    think: bool | str | None = None
    thinking: Thinking | bool | None = None
    thinking_budget: int | None = Field(None, ge=-1)
    thinking_token_budget: int | None = Field(None, ge=-1)

    @property
    def effort(self) -> str | None:
        """The word for how much thinking is wanted."""
        nested = None if self.reasoning is None else self.reasoning.effort
        return self.reasoning_effort or nested or (self.think if isinstance(self.think, str) else None)

    @property
    def budget(self) -> int | None:
        """How many tokens of thinking there may be, if any; 0 switches it off, and -1 limits nothing."""
        asked = (
            self.thinking_token_budget,
            self.thinking.budget_tokens if isinstance(self.thinking, Thinking) else None,
            None if self.reasoning is None else self.reasoning.max_tokens,
            self.thinking_budget,
        )
        return next((budget for budget in asked if budget is not None and budget > 0), None)

    @property
    def thinks(self) -> bool | None:
        """Whether thinking is switched on or off; None for neither.  Off takes precedence over on."""
        kind = self.thinking.type if isinstance(self.thinking, Thinking) else self.thinking
        wishes = {
            {"enabled": True, "adaptive": True, "disabled": False}.get(kind) if isinstance(kind, str) else kind,
            self.enable_thinking,
            self.think if isinstance(self.think, bool) else None,
            None if self.reasoning is None else self.reasoning.enabled,
            False if 0 in (self.thinking_budget, self.thinking_token_budget) else None,
        } - {None}
        return all(wishes) if wishes else None


class CompletionBody(GenerationBody):
    """``POST /v1/completions``.  ``logprobs`` is the number of alternatives per token."""

    foreign = foreign_fields.COMPLETION

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class ChatBody(ThinkingBody, GenerationBody):
    """``POST /v1/chat/completions``.  ``max_completion_tokens`` is the newer name of ``max_tokens``."""

    foreign = foreign_fields.CHAT

    messages: list[dict[str, Any]] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    include_reasoning: bool | None = None


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], raw: bytes | bytearray | str) -> Body:
    """Parse and check JSON text; raises ``RequestError``, which names the field."""
    is_large = len(raw) > LARGE
    if is_large:
        _check_size(raw.encode() if isinstance(raw, str) else raw)
    try:
        with panics_refused("the body cannot be read"):
            body = kind.model_validate_json(raw)
    except ValidationError as error:
        plain = _with_plain_values(kind, raw, error)
        if plain is None:
            raise request_error(error, shows_value=not is_large) from None
        body = plain
    extra = body.model_extra or {}
    if issubclass(kind, RequestBody):
        refuse_foreign(kind.foreign, extra)
    for name in itertools.islice(extra, _MOST_WARNED):
        kind_of = "request field, which changes no result:" if name in HARMLESS else "unknown request field"
        warn_once(logger, "ignoring the %s %s", kind_of, shown(name))
    return body


def _with_plain_values(kind: type[Body], raw: bytes | bytearray | str, error: ValidationError) -> Body | None:
    """The body of a client whose numbers are doubles (``100.0``) or texts (``"0.5"``), and whose switches are texts or
    numbers (``"false"``, ``1``), as vLLM reads them too; None if that is not what is wrong with it, or a number would
    change."""
    complaints = error.errors(include_url=False, include_context=False, include_input=False)
    if not {"int_type", "float_type", "bool_type"} & {one["type"] for one in complaints}:
        return None
    texts = {one["loc"][0] for one in complaints if one["type"] == "string_type"}  # texts in these stay texts
    fields = json.loads(raw)
    for name in {one["loc"][0] for one in complaints}:
        fields[name] = _plain_number(fields.get(name), reads_texts=name not in texts)
    for one in complaints:
        if one["type"] == "bool_type":
            _switch(fields, one["loc"])
    try:
        return kind.model_validate_json(json.dumps(fields, allow_nan=False))
    except (ValidationError, ValueError):
        return None


def _switch(fields: dict[str, Any], place: tuple[int | str, ...]) -> None:
    """Replace a text or a number at ``place``, a field of a body or of an object in it, by a switch."""
    *path, name = place
    for step in path:
        inner = fields.get(step) if isinstance(step, str) else None
        if not isinstance(inner, dict):
            return
        fields = inner
    if isinstance(name, str) and isinstance(given := fields.get(name), (str, int)):
        fields[name] = _SWITCHES.get(str(given).lower(), given)


def _plain_number(value: Any, *, reads_texts: bool) -> Any:
    if isinstance(value, list):
        return [_plain_number(one, reads_texts=reads_texts) for one in value]
    if isinstance(value, dict):
        return {name: _plain_number(one, reads_texts=reads_texts) for name, one in value.items()}
    if reads_texts and isinstance(value, str) and len(value) < _LONGEST_NUMBER and _NUMBER.fullmatch(value):
        value = int(value) if value.lstrip("-").isdigit() else float(value)
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT else value


def request_error(error: ValidationError, *, shows_value: bool = True) -> RequestError:
    """The first complaint in one line; for a union of types, the complaints of all its members."""
    complaints = error.errors(include_url=False, include_context=False, include_input=shows_value)
    first = complaints[0]
    if first["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {first['msg']}")
    location = first["loc"]
    if not location:
        return RequestError(f"the body must be a JSON object: {first['msg']}")
    name = str(location[0])
    if first["type"] == "missing":
        place = name + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in location[1:])
        return RequestError(f"{place} is missing; it is required", param=name)
    messages = dict.fromkeys(item["msg"] for item in complaints if item["loc"][:1] == location[:1])
    value = f" is {shown(first['input'])}" if shows_value else ""
    return RequestError(f"{name}{value}: {'; or '.join(messages)}", param=name)


def _check_size(raw: bytes | bytearray) -> None:
    """Refuse JSON text with so many parts that reading it would take long, as it stops all other threads."""
    if sum(map(raw.count, _PART_MARKS)) <= _MOST_PARTS and raw.count(b",") <= _MOST_ELEMENTS:
        return
    # Count exactly, outside of texts: a text begins and ends with a quotation mark that is not escaped.
    plain = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), dtype=np.uint8)
    outside = np.bitwise_xor.accumulate((plain == ord('"')).view(np.uint8)) == 0
    num_parts = sum(int(np.count_nonzero(outside & (plain == ord(mark)))) for mark in _PART_MARKS)
    if num_parts > _MOST_PARTS:
        raise RequestError(f"the body has {num_parts} objects, lists and fields; at most {_MOST_PARTS} are allowed")
    num_elements = int(np.count_nonzero(outside & (plain == ord(","))))
    if num_elements > _MOST_ELEMENTS:
        raise RequestError(f"the body has {num_elements} elements; at most {_MOST_ELEMENTS} are allowed")
