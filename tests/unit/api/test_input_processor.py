"""Users' requests, checked and tokenized."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fake_engine import MODEL_INFO
from tests.text_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer
from tp_engine.api.input_processor import InputProcessor, load_tokenizer, prompt_text
from tp_engine.api.openai.protocol import CompletionBody
from tp_engine.api.openai.requests import prepare
from tp_engine.errors import ConfigError, RequestError
from tp_engine.requests.sampling_params import SamplingParams

INFO = msgspec.structs.replace(MODEL_INFO, max_model_len=32, vocab_size=400)
PROCESSOR = InputProcessor(INFO, byte_level_tokenizer())


def process(prompt: Any, processor: InputProcessor = PROCESSOR, **params: Any) -> Any:
    return processor.process(prompt, SamplingParams(**params), request_id="r")


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("the quick 世界", "the quick 世界"),
        ({"prompt": "the quick 世界"}, "the quick 世界"),
        ([5, 6, 7], None),
        ((5, 6, 7), None),
        ({"prompt_token_ids": [5, 6, 7]}, None),
        ({"prompt": None, "prompt_token_ids": [5, 6, 7]}, None),
    ],
)
def test_forms_of_a_prompt(prompt: Any, text: str | None) -> None:
    """Oracle: the tokenizer's own ids, or the ids that were given."""
    expected = [5, 6, 7] if text is None else byte_level_tokenizer().encode(text)
    assert process(prompt).prompt_token_ids == expected
    assert prompt_text(prompt) == text


def test_the_request_carries_what_the_engine_needs() -> None:
    """Oracle: the model's EOS ids, a time between before and after, max_tokens from the rest of the context."""
    before_s = time.monotonic()
    request = PROCESSOR.process([5] * 10, SamplingParams(max_tokens=None, stop="x"), request_id="r", priority=-3)
    assert before_s <= request.arrival_s <= time.monotonic()
    assert (request.request_id, request.priority, request.eos_token_ids) == ("r", -3, (1,))
    assert request.params == SamplingParams(max_tokens=22, stop="x")
    assert process([5] * 10, max_tokens=7).params.max_tokens == 7


@pytest.mark.parametrize(
    ("prompt", "params", "param", "text"),
    [
        ("", {}, "prompt", "the prompt is empty"),
        ([], {}, "prompt", "the prompt is empty"),
        ([1, 400], {}, "prompt", "token id 400; the model's token ids are 0 to 399"),
        ([-1, 1], {}, "prompt", "token id -1"),
        ([2**70], {}, "prompt", "token ids are 0 to 399"),
        ([1, True], {}, "prompt", "contains True"),
        ([1, 2.0], {}, "prompt", r"contains 2\.0"),
        ([1, "2"], {}, "prompt", "contains '2'"),
        ([[1, 2]], {}, "prompt", "contains"),
        (None, {}, "prompt", "of type NoneType"),
        (17, {}, "prompt", "of type int"),
        (b"text", {}, "prompt", "of type bytes"),
        ({}, {}, "prompt", "give either"),
        ({"prompt": "a", "prompt_token_ids": [1]}, {}, "prompt", "give either"),
        ({"prompt": "a", "multi_modal_data": 1}, {}, "prompt", "multi_modal_data"),
        ("half a pair \ud83d", {}, "prompt", "surrogate pair at character 12"),
        ("a", {"stop": ["\ud83d"]}, "stop", "surrogate"),
        ("a", {"cache_salt": "\ud83d"}, "cache_salt", "surrogate"),
        ("a", {"cache_salt": 5}, "cache_salt", "of type int"),
        ("a", {"stop_token_ids": [400]}, "stop_token_ids", "end at 399"),
        ("a", {"logit_bias": {400: 1.0}}, "logit_bias", "end at 399"),
        ("a", {"allowed_token_ids": [400]}, "allowed_token_ids", "end at 399"),
        ("a", {"logprobs": 21}, "logprobs", "logprobs is 21; this engine gives at most 20"),
        ("a", {"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
    ],
)
def test_bad_requests_are_refused_by_name(prompt: Any, params: dict[str, Any], param: str, text: str) -> None:
    """Oracle: the wrong field, and a message that names the value."""
    with pytest.raises(RequestError, match=text) as caught:
        process(prompt, **params)
    assert caught.value.param == param


@pytest.mark.parametrize("more", [{}, {"use_beam_search": True, "n": 2, "temperature": 0}])
def test_one_of_several_prompts_of_a_body_is_named(more: dict[str, Any]) -> None:
    """Oracle: by hand: the place of the one that is bad, and no place where there is one alone."""
    for prompts, param in ((["a", ""], "prompt[1]"), ([[5], [6], [-1]], "prompt[2]"), ([""], "prompt"), ("", "prompt")):
        body = CompletionBody.model_validate({"prompt": prompts, "max_tokens": 1, **more})
        with pytest.raises(RequestError) as caught:
            prepare(body, PROCESSOR, "m")
        assert caught.value.param == param and (param == "prompt") == str(caught.value).startswith("the prompt")


def test_all_log_probabilities() -> None:
    """Oracle: vLLM: -1 is the whole vocabulary, which only --max-logprobs -1 allows; the error names what was sent."""
    everything = InputProcessor(msgspec.structs.replace(INFO, max_logprobs=-1), byte_level_tokenizer())
    request = process("a", everything, logprobs=-1, prompt_logprobs=-1)
    assert (request.params.logprobs, request.params.prompt_logprobs) == (400, 400)
    for name in ("logprobs", "prompt_logprobs"):
        every: dict[str, Any] = {name: -1}
        with pytest.raises(RequestError, match=f"{name} is -1; this engine gives at most 20, or all with") as caught:
            process("a", **every)
        assert caught.value.param == name
        too_low: dict[str, Any] = {name: -2}
        with pytest.raises(RequestError, match=f"{name} is -2"):
            SamplingParams(**too_low)


def test_a_seed_of_minus_one_is_none() -> None:
    """Oracle: vLLM; other negative seeds are seeds."""
    assert SamplingParams(seed=-1) == SamplingParams()
    assert SamplingParams(seed=-2).seed == -2


@pytest.mark.parametrize(("side", "kept"), [("left", [7, 8, 9]), ("right", [5, 6, 7])])
def test_truncation_has_a_side(side: Any, kept: list[int]) -> None:
    """Oracle: vLLM: right keeps the first tokens, left, the default, the last."""
    params = SamplingParams(max_tokens=1)
    request = PROCESSOR.process([5, 6, 7, 8, 9], params, request_id="r", truncate_prompt_tokens=3, truncation_side=side)
    assert request.prompt_token_ids == kept


@pytest.mark.parametrize("priority", [True, 1.5, 2**31, None])
def test_priority_is_a_whole_number(priority: Any) -> None:
    """Oracle: the scheduler sorts by it, and it crosses the socket."""
    with pytest.raises(RequestError, match="priority"):
        PROCESSOR.process([1], SamplingParams(), request_id="r", priority=priority)


def test_context_length() -> None:
    """Oracle: 31 tokens leave room for one, 32 for none; the message has both numbers, the code is OpenAI's.  As in
    vLLM's Python API any number is a limit, also one above the whole context."""
    for asked in (None, 1, 2, 1_000_000):
        assert process([5] * 31, max_tokens=asked).params.max_tokens == 1
    with pytest.raises(RequestError, match=r"maximum context length is 32 tokens.*prompt has 32") as caught:
        process([5] * 32)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(RequestError, match="min_tokens is 3") as caught:
        process([5] * 30, max_tokens=None, min_tokens=3)
    assert caught.value.param == "min_tokens"


class Untouched:
    """A tokenizer that may not be called; of one whose texts cannot be measured there is no ``backend_tokenizer``."""

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "encode":
            raise AssertionError("the text is tokenized")
        return getattr(self._inner, name)


@pytest.mark.parametrize("text", [" " * 10**6 + "x", "\n" * 10**6, "x " * 10**6, "\u3000" * 10**6])
def test_a_text_that_can_not_fit_is_not_tokenized(text: str) -> None:
    """Oracle: a tokenizer that fails when it is called; white space counts as other characters do."""
    processor = InputProcessor(INFO, Untouched(byte_level_tokenizer()))
    with pytest.raises(RequestError, match=r"maximum context length is 32 tokens\. However, your text has at least"):
        process(text, processor)


@pytest.mark.parametrize("truncate", [None, 5])
def test_a_text_far_beyond_the_context_is_not_tokenized(truncate: int | None) -> None:
    """Oracle: the same, with a tokenizer of which nothing is known: WordPiece makes one token of a long word."""
    processor = InputProcessor(INFO, Untouched())
    for text in (" " * (1 << 21), "x" * (1 << 21)):
        with pytest.raises(RequestError, match="prompt has 2097152 characters; at most 1048576 are taken"):
            process(text, processor, truncate_prompt_tokens=truncate)


def test_without_a_tokenizer_token_ids_work() -> None:
    """Oracle: the given ids; the error for text has the remedy."""
    processor = InputProcessor(INFO, None)
    assert process([5, 6], processor).prompt_token_ids == [5, 6]
    with pytest.raises(RequestError, match="has no tokenizer; send the prompt as a list of token ids"):
        process("text", processor)
    with pytest.raises(RequestError, match="no chat template"):
        processor.chat_token_ids([{"role": "user", "content": "hi"}])


def chat_text(messages: Any, **options: Any) -> str:
    processor = InputProcessor(msgspec.structs.replace(INFO, max_model_len=500), byte_level_tokenizer())
    return str(byte_level_tokenizer().decode(processor.chat_token_ids(messages, **options)))


def test_chat_goes_through_the_template() -> None:
    """Oracle: the template written out by hand; parts take a line each; special tokens appear once."""
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "say"}, {"type": "text", "text": "hi"}]},
    ]
    assert chat_text(messages) == "<s>system: be brief</s><s>user: say\nhi</s><s>assistant:"
    assert chat_text(messages, shout=True).endswith("<s>assistant:!")
    assert chat_text(messages, add_generation_prompt=False).endswith("user: say\nhi</s>")
    assert chat_text(messages, continue_final_message=True).endswith("user: say\nhi")
    ids = InputProcessor(INFO, byte_level_tokenizer()).chat_token_ids([{"role": "user", "content": "a"}])
    assert ids[0] == 0 and ids.count(0) == 2 and ids.count(1) == 1


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([], "messages is empty"),
        ("hi", "messages must be a list"),
        ({"role": "user", "content": "a"}, "messages must be a list"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([{"content": "a"}], r"messages\[0\].role is None"),
        ([{"role": 5, "content": "a"}], "role is 5"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], "content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "part of type 'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "part of type 'text'"),
        ([{"role": "user", "content": [5]}], "part of type 'int'"),
        ([{"role": "robot", "content": "a"}], "unknown role robot"),
        ([{"role": "user", "content": "\ud83d"}], "surrogate"),
    ],
)
def test_malformed_messages_are_refused(messages: Any, text: str) -> None:
    """Oracle: the message names the place and the fault, also with the template's own refusal."""
    with pytest.raises(RequestError, match=text):
        chat_text(messages)


def test_chat_without_a_template_and_reserved_options() -> None:
    """Oracle: the error's text."""
    with pytest.raises(RequestError, match="no chat template"):
        InputProcessor(INFO, byte_fallback_tokenizer()).chat_token_ids([{"role": "user", "content": "a"}])
    with pytest.raises(RequestError, match="tokenize is not an option"):
        chat_text([{"role": "user", "content": "a"}], tokenize=True)


def test_load_tokenizer(tmp_path: Path) -> None:
    """A saved tokenizer loads, a folder without one gives None, the error for a broken one names it. Oracle: a text's
    ids."""
    byte_level_tokenizer().save_pretrained(tmp_path / "good")
    loaded = load_tokenizer(str(tmp_path / "good"))
    assert loaded is not None and loaded.encode("the 世界") == byte_level_tokenizer().encode("the 世界")
    (tmp_path / "none").mkdir()
    assert load_tokenizer(str(tmp_path / "none")) is None
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"broken.*cannot be loaded"):
        load_tokenizer(str(tmp_path / "broken"))


def test_named_templates_without_a_default_are_listed() -> None:
    """Oracle: the names; with tools the one named for them is taken."""
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.chat_template = {"rag": "a", "tool_use": "{{ messages[0].content }}"}
    processor, messages = InputProcessor(INFO, tokenizer), [{"role": "user", "content": "hi"}]
    with pytest.raises(RequestError, match=r"none of .* chat templates \('rag', 'tool_use'\) is the default"):
        processor.chat_token_ids(messages)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert processor.chat_token_ids(messages, tools=tools) == tokenizer.encode("hi", add_special_tokens=False)
