"""The least number of tokens of a text, beside the tokenizers themselves."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tp_engine.api.text_measure import TextMeasure
from tp_engine.engine.byte_letters import byte_letters

QWEN: Any = {"Regex": r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"}
BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
LIKE_QWEN: list[dict[str, Any]] = [
    {"type": "Split", "pattern": QWEN, "behavior": "Isolated", "invert": False},
    BYTE_LEVEL,
]
LIKE_LLAMA_2: Any = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ],
}
LONGEST_RUN = 16


def tokenizer(kind: str) -> Any:
    """A tokenizer with tokens for runs of spaces, and one more that takes white space beside it with it."""
    is_byte_level = kind != "llama 2"
    space = byte_letters()[ord(" ")] if is_byte_level else "\u2581"
    names = [*byte_letters()] if is_byte_level else [f"<0x{byte:02X}>" for byte in range(256)] + [space, "a", "b"]
    merges, run = [], 1
    while run < LONGEST_RUN:
        merges.append([space * run, space * run])
        run *= 2
    names += [first + second for first, second in merges]
    pre_tokenizers: Any = {
        "qwen": LIKE_QWEN, "words": [{"type": "WhitespaceSplit"}, BYTE_LEVEL], "llama 2": [], "strip": [BYTE_LEVEL],
    }[kind]  # fmt: skip
    normalizer: Any = LIKE_LLAMA_2 if kind == "llama 2" else None
    if kind == "strip":
        normalizer = {"type": "Strip", "strip_left": True, "strip_right": True}
    added: dict[str, Any] = {"id": len(names), "content": "<|x|>", "single_word": False, "lstrip": True, "rstrip": True}
    written = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": normalizer, "post_processor": None,
        "added_tokens": [added | {"normalized": False, "special": True}], "decoder": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers} if pre_tokenizers else None,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "merges": merges,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": not is_byte_level, "ignore_merges": False,
            "vocab": {name: number for number, name in enumerate(names)},
        },
    }  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(written)))


@pytest.mark.parametrize("kind", ["qwen", "llama 2", "words", "strip"])
def test_no_text_has_fewer_tokens(kind: str) -> None:
    """Oracle: the tokenizer, over texts of words, of white space of each kind, and of the token that takes it along."""
    made, rng = tokenizer(kind), random.Random(3)
    measure = TextMeasure(made)
    pieces = ["a", "b a", " ", "  ", "\n", "\t", "\u3000", "\u2581", "<|x|>", "é", "😀", " " * 40, "\r\n" * 9]
    for _ in range(400):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 12)))
        assert measure.least_tokens(text) <= len(made.encode(text, add_special_tokens=False)), repr(text)


@pytest.mark.parametrize("space", [" ", "\n", "\t", "\u3000", " \n"])
def test_white_space_that_is_kept_counts(space: str) -> None:
    """Oracle: no token is longer than the longest run, in bytes."""
    blank = space * 10_000
    for kind in ("qwen", "llama 2"):
        most_bytes = LONGEST_RUN * (3 if kind == "llama 2" else 1)
        assert TextMeasure(tokenizer(kind)).least_tokens(blank + "a") >= len(blank) // most_bytes
    assert TextMeasure(tokenizer("strip")).least_tokens("a" + blank + "b") >= len(blank) // LONGEST_RUN


def test_white_space_that_disappears_does_not_count() -> None:
    """Oracle: one word, or one token beside the white space."""
    blank = " " * 10_000
    for kind, text in (("words", blank + "a"), ("strip", blank + "a" + blank), ("qwen", f"a{blank}<|x|>{blank}")):
        made = tokenizer(kind)
        assert TextMeasure(made).least_tokens(text) <= len(made.encode(text, add_special_tokens=False)) < 10
