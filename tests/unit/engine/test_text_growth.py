"""Tokenizers whose steps make gigabytes of a letter are refused before they are made."""

from __future__ import annotations

import base64
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tp_engine.config import DEMO_MODEL
from tp_engine.engine.text_growth import check_growth
from tp_engine.engine.tokenizer import load_tokenizer
from tp_engine.errors import ConfigError


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def several(name: str, steps: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: steps}


def specials(number: int, ids: int) -> dict[str, Any]:
    piece = {"SpecialToken": {"id": "!", "type_id": 0}}
    whole = {"Sequence": {"id": "A", "type_id": 0}}
    token = {"id": "!", "ids": [0] * ids, "tokens": ["!"] * ids}
    return {
        "type": "TemplateProcessing",
        "single": [piece] * number + [whole],
        "pair": [],
        "special_tokens": {"!": token},
    }


def precompiled(text: str) -> dict[str, Any]:
    blob = struct.pack("<I", 8) + bytes(8) + b"a\0" + text.encode() + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


TEN = [replace({"String": "a"}, "a" * 10)] * 10
HOSTILE: dict[str, tuple[str, Any, str]] = {
    "ten times ten": ("normalizer", several("normalizers", TEN), r"up to 1e\+10 characters of one"),
    "lists in lists": ("normalizer", several("normalizers", [several("normalizers", TEN[:5])] * 2), r"1e\+10"),
    "expressions": ("normalizer", several("normalizers", [replace({"Regex": "."}, "a" * 99)] * 2), r"1e\+04"),
    "prepended": ("normalizer", several("normalizers", [{"type": "Prepend", "prepend": "a" * 999}] * 3), r"1e\+09"),
    "a table of characters": ("normalizer", precompiled("x" * 5000), r"5e\+03"),
    "the answer": ("decoder", several("decoders", TEN), r"has a decoder that makes up to 1e\+10"),
    "special tokens": ("post_processor", specials(2000, 2000), "puts up to 4000000 special tokens around a text"),
    "them again": ("post_processor", several("processors", [specials(1, 9000)] * 2), "puts up to 18000"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_explodes_is_refused(name: str, tmp_path: Path) -> None:
    """Oracle: ``ConfigError`` with the figure; the library would end the process at the first letter."""
    part, step, words = HOSTILE[name]
    written = json.loads((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8")) | {part: step}
    (tmp_path / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
        several("normalizers", [{"type": "NFKD"}, {"type": "Lowercase"}, {"type": "StripAccents"}]),
        several("normalizers", [{"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581")]),
        several("normalizers", [precompiled("\ufdfa" * 18), replace({"Regex": " {2,}"}, " ")]),
        {"type": 5, "normalizers": 7},
        [1],
        "no step",
    ],
)
def test_steps_of_real_tokenizers_are_taken(normalizer: Any, tmp_path: Path) -> None:
    """Oracle: BERT's, ALBERT's, Llama's, XLM-R's; what is no step is left to the library."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"normalizer": normalizer, "post_processor": specials(2, 1), "decoder": normalizer}))
    check_growth(path)
    path.write_text("{")
    check_growth(path)
    check_growth(tmp_path / "nothing")
