"""Characters and stop strings split between tokens in every possible way: streams and whole answers equal the text."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.asgi import App, run_served
from tests.fake_engine import MODEL_INFO, FakeEngine
from tp_engine.requests.request import EngineRequest

TEXT = "b中😀c"
BYTES = TEXT.encode()
EOS = 0
PARTS = [BYTES[i:j] for i in range(len(BYTES)) for j in range(i + 1, len(BYTES) + 1)]
TOKEN_OF = {part: 1 + number for number, part in enumerate(dict.fromkeys(PARTS))}
PROMPT_ID = 1
# Bit i of a split's number says whether a token ends after byte i.
NUM_SPLITS = 2 ** (len(BYTES) - 1)
PROMPTS_AT_ONCE = 64


def split(number: int) -> list[int]:
    """The token ids of one way to cut the text."""
    cuts = [0, *(i + 1 for i in range(len(BYTES) - 1) if number >> i & 1), len(BYTES)]
    return [TOKEN_OF[BYTES[begin:end]] for begin, end in itertools.pairwise(cuts)]


def printable(part: bytes) -> str:
    """How byte-level BPE writes bytes: printable ones as they are, the others from U+0100 on."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return "".join(chr(byte if byte in plain else 0x100 + others.index(byte)) for byte in part)


@cache
def tokenizer() -> Any:
    """A byte-level tokenizer with a token for every part of the text."""
    vocab = {"<eos>": EOS} | {printable(part): token_id for part, token_id in TOKEN_OF.items()}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    template = "{% for message in messages %}c{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", chat_template=template)


def reply(request: EngineRequest) -> list[int]:
    """The split whose number is the seed plus the prompt's length minus 1."""
    number = (request.params.seed or 0) + len(request.prompt_token_ids) - 1
    return [*split(number), EOS]


def engine() -> FakeEngine:
    info = msgspec.structs.replace(MODEL_INFO, vocab_size=1 + len(TOKEN_OF), eos_token_ids=(EOS,))
    return FakeEngine(reply, model_info=info)


STOPS = [["中"], ["😀"], ["b中😀"], ["😀c", "中😀"], ["c"]]


@pytest.mark.parametrize(
    ("stop", "include"), [([], False), *((stop, include) for stop in STOPS for include in (False, True))], ids=str
)
def test_completions(stop: list[str], include: bool) -> None:
    """Oracle: the text up to the stop string that ends first, for each of the 256 splits, streamed or not."""
    found = min((TEXT.index(one) + len(one), one) for one in stop) if stop else (len(TEXT), "")
    expected = TEXT[: found[0]] if include else TEXT[: found[0] - len(found[1])]
    body = {"max_tokens": 20, "stop": stop, "include_stop_str_in_output": include}

    async def scenario(app: App) -> None:
        for first in range(0, NUM_SPLITS, PROMPTS_AT_ONCE):
            asked = body | {"prompt": [[PROMPT_ID] * (1 + n) for n in range(PROMPTS_AT_ONCE)], "seed": first}
            choices = (await app.post("/v1/completions", asked)).json()["choices"]
            assert [choice["text"] for choice in choices] == [expected] * PROMPTS_AT_ONCE
            events = (await app.post("/v1/completions", asked | {"stream": True})).events
            streamed = dict.fromkeys(range(PROMPTS_AT_ONCE), "")
            for choice in (choice for one in events for choice in one["choices"]):
                assert "\ufffd" not in choice["text"]
                streamed[choice["index"]] += choice["text"]
            assert list(streamed.values()) == [expected] * PROMPTS_AT_ONCE

    run_served(scenario, engine(), tokenizer())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_chats_and_responses(path: str) -> None:
    """Oracle: the text, for every third split, streamed or not."""
    body: dict[str, Any] = {"stop": ["c"], "input": "x", "messages": [{"role": "user", "content": "x"}]}

    async def scenario(app: App) -> None:
        for number in range(0, NUM_SPLITS, 3):
            whole = (await app.post(path, body | {"seed": number})).json()
            events = (await app.post(path, body | {"seed": number, "stream": True})).events
            if path == "/v1/responses":
                text = whole["output"][0]["content"][0]["text"]
                deltas = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
            else:
                text = whole["choices"][0]["message"]["content"]
                deltas = [choice["delta"].get("content", "") for one in events for choice in one["choices"]]
            assert text == "".join(deltas) == TEXT[:-1] and "\ufffd" not in text

    run_served(scenario, engine(), tokenizer())
