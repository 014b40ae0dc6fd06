"""The fixed prompts of a check: several languages, code, figures, chats by the model's template, and a long one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tp_engine.apps.check.report import CheckFinding
from tp_engine.system.panics import panics_refused

TEXTS: Mapping[str, str] = {
    "english": "The harbour was quiet that morning. Two fishermen mended a net beside the wall, and the older one said",
    "code": "def median(values: list[float]) -> float:\n    ordered = sorted(values)\n    middle = len(ordered) // 2\n",
    "german": "Am Rande des Waldes stand ein kleines Haus, dessen Fensterläden seit Jahren geschlossen waren.",
    "chinese": "春天的河边的柳树长出了新的叶子。孩子们在草地上放风筝。",
    "arabic": "في الصباح الباكر فتح البائع دكانه ورتب الكتب على الرفوف ثم",
    "russian": "Поезд опаздывал на сорок минут, и пассажиры грелись в зале ожидания.",
    "figures": "Invoice 4711\nqty  price   total\n  3  12.50   37.50\n 10   0.99    9.90\n 12  7.25",
}
QUICK_TEXTS = ("english", "code", "chinese")
CHATS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "chat": [{"role": "user", "content": "Name three rivers, and the seas that they reach."}],
    "chat with history": [
        {"role": "user", "content": "What is 17 + 25?"},
        {"role": "assistant", "content": "42"},
        {"role": "user", "content": " And twice that?  Answer with the number only. "},
    ],
}
WEATHER_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}, "sunny": {"type": "boolean"}},
    "required": ["city", "sunny"],
    "additionalProperties": False,
}
WEATHER_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Lima"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
WEATHER_QUESTION: Sequence[Mapping[str, Any]] = [{"role": "user", "content": "What is the weather in Oslo?"}]
NO_TOOLS = "the chat template takes no tools"
UNSETTLED = "transformers makes other tokens of a prompt each time: the template tells the time, or the tokenizer draws"
PROMPT_REMEDY = (
    "the model reads another prompt than in its training; answers get worse, never an error",
    "compare tokenizer.json, tokenizer_config.json and chat_template.jinja with the original; a server's "
    "--chat-template and --tokenizer take other files",
)
"""What a wrong prompt means for answers, and what to try."""
_LONG = (
    "Chapter {}. The survey of the northern valley went on for {} days. Each evening the party wrote down the height "
    "of the river, the state of the bridges and the names of the farms that they had passed. "
)
_NUM_DRAWN = {"drawn 1": 33, "drawn 2": 21, "drawn 3": 48}
_SEED = 46


@dataclass(frozen=True, slots=True)
class CheckPrompt:
    """A prompt by its tokens; ``text`` or ``messages`` is what they come from, None if they are drawn."""

    name: str
    token_ids: tuple[int, ...]
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None


def follows_weather_schema(text: str | None) -> bool:
    """Whether an answer is JSON of ``WEATHER_SCHEMA``."""
    try:
        answer = json.loads(text or "")
        return (
            answer.keys() == {"city", "sunny"} and answer["city"] in ("Oslo", "Lima") and type(answer["sunny"]) is bool
        )
    except (ValueError, AttributeError):
        return False


def make_prompts(
    tokenizer: Any | None, *, vocab_size: int, long_len: int, max_len: int, quick: bool
) -> list[CheckPrompt]:
    """The prompts, each of at most ``max_len`` tokens; the last one has ``long_len``.

    Texts and chats are tokenized by transformers, the oracle of the engine's own tokens.  A model without a tokenizer
    gets tokens drawn from a fixed seed, and so does one whose tokenizer makes none of these texts.
    """
    if tokenizer is not None and (found := _of_texts(tokenizer, vocab_size, long_len, max_len, quick=quick)):
        return found
    rng = np.random.default_rng(_SEED)
    lengths = {**_NUM_DRAWN, "long": long_len}
    drawn = {name: rng.integers(0, vocab_size, length) for name, length in lengths.items()}
    return [CheckPrompt(name, tuple(map(int, ids[:max_len]))) for name, ids in drawn.items()]


def _of_texts(tokenizer: Any, vocab_size: int, long_len: int, max_len: int, *, quick: bool) -> list[CheckPrompt]:
    """Those prompts of texts and chats that the tokenizer can make; none if the long one is not among them."""
    texts = {name: text for name, text in TEXTS.items() if not quick or name in QUICK_TEXTS}
    found = [
        CheckPrompt(name, _ids(ids, max_len), text=text)
        for name, text in texts.items()
        if (ids := text_ids(tokenizer, text)) is not None
    ]
    for name, messages in CHATS.items() if getattr(tokenizer, "chat_template", None) else ():
        if (ids := chat_ids(tokenizer, messages)) is not None and (not quick or name == "chat"):
            found.append(CheckPrompt(name, _ids(ids, max_len), messages=messages))
    long_len = min(long_len, max_len)
    text = "".join(_LONG.format(number, 3 * number + 2) for number in range(1, long_len))[: 8 * long_len]
    long_ids = text_ids(tokenizer, text, truncation=True, max_length=long_len)
    found.append(CheckPrompt("long", _ids(long_ids or (), long_len)))
    known = [one for one in found if one.token_ids and max(one.token_ids) < vocab_size]
    return known if known and known[-1].name == "long" else []


def text_ids(tokenizer: Any, text: str, **options: Any) -> list[int] | None:
    """The tokens of a text by transformers; None if its tokenizer fails."""
    try:
        with panics_refused("the text cannot be tokenized"):
            ids: list[int] = tokenizer(text, **options)["input_ids"]
    except Exception:  # a tokenizer may raise anything
        return None
    return ids


def chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int] | None:
    """The tokens of a chat by transformers' ``apply_chat_template``; None if the template refuses the chat."""
    try:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
    except Exception:  # a template may raise anything
        return None
    return text_ids(tokenizer, text, add_special_tokens=False)


def tool_chat_ids(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int] | None:
    """The tokens of a chat with ``WEATHER_TOOL`` by transformers; None if the template shows no tools, or
    refuses the chat."""
    found = chat_ids(tokenizer, messages, tools=[WEATHER_TOOL], **options)
    return None if found == chat_ids(tokenizer, messages, **options) else found


def _ids(ids: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(map(int, ids[:most]))


def differing_prompt(
    check: str, name: str, found: Sequence[int], expected: Sequence[int], tokenizer: Any
) -> CheckFinding:
    """The finding that a prompt's tokens differ from transformers', with the first place where they do."""
    pairs = zip(found, expected, strict=False)
    position = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(found), len(expected)))
    window = slice(max(0, position - 2), position + 4)
    texts = [repr(tokenizer.decode(ids[window])) for ids in (list(found), list(expected))]
    return CheckFinding.wrong(
        check,
        f"{name}: {len(found)} tokens, transformers has {len(expected)}",
        f"position {position}: {texts[0]} instead of {texts[1]}",
        *PROMPT_REMEDY,
    )
