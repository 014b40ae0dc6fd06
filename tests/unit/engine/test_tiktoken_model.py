"""Tokenizers of Kimi models against the library tiktoken, with ranks that the test makes."""

from __future__ import annotations

import base64
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import tiktoken

from tp_engine.engine.tiktoken_model import PATTERN, bpe, read_ranks
from tp_engine.engine.tokenizer import TokenDecoder, load_tokenizer, tokenizer_eos_ids
from tp_engine.errors import ConfigError

TEXTS = [
    "Hello, world! I'll say it's 12345 times.",
    "HELLO helloWorld DON'T don'T",
    "你好世界hello 世界",
    "  a\n\n b \t\r\nc  ",
    "naïve café e\u0301 \uff41\uff42\uff43 Ω≠ω",
    "😀😀 \U0001f469\u200d\U0001f469\u200d\U0001f467 \u200b",
    "x = {'a': [1, 22, 333, 4444]}\n\tif y: pass",
    "",
    " ",
    "漢字かな交じり文 123漢字",
]


def ranks_of(texts: list[str], num_merges: int = 300) -> dict[bytes, int]:
    """All bytes, and byte pairs that are frequent in the texts, merged one after the other."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    parts = [[bytes([byte]) for byte in text.encode()] for text in texts]
    for _ in range(num_merges):
        counts: dict[bytes, int] = {}
        for part in parts:
            for left, right in itertools.pairwise(part):
                counts[left + right] = counts.get(left + right, 0) + 1
        counts = {pair: count for pair, count in counts.items() if pair not in ranks}
        if not counts:
            break
        best = max(sorted(counts), key=counts.__getitem__)
        ranks[best] = len(ranks)
        for part in parts:
            place = 0
            while place + 1 < len(part):
                if part[place] + part[place + 1] == best:
                    part[place : place + 2] = [best]
                place += 1
    return ranks


RANKS = ranks_of(TEXTS * 2 + ["the then there hello world 世界你好"])


def random_texts() -> list[str]:
    rng = random.Random(3)
    letters = "aBcéΩ漢字你好 \n\t'sS1239!?{}😀\u0301\uff41"
    return ["".join(rng.choices(letters, k=rng.randrange(1, 60))) for _ in range(400)]


def test_ids_are_tiktokens() -> None:
    """Oracle: tiktoken with the same ranks and pattern."""
    oracle = tiktoken.Encoding("test", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={})
    ours = bpe(RANKS)
    for text in [*TEXTS, *random_texts()]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == oracle.encode(text), text
        assert ours.decode(ids) == text


def folder_with(folder: Path, **settings: Any) -> Path:
    """A folder as Kimi's repositories are, without their code."""
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in RANKS.items()]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    first = len(RANKS)
    added = {
        str(first): {"content": "[BOS]", "special": True},
        str(first + 1): {"content": "[EOS]", "special": True},
        str(first + 3): {"content": "<|tool_call_begin|>", "special": False},
    }
    named = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": {"content": "[EOS]"},
        "chat_template": "{{ 1 }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(named | settings))
    (folder / "config.json").write_text('{"model_type": "kimi_k2"}')
    return folder


def test_a_folder_loads_without_its_code(tmp_path: Path) -> None:
    """Oracle: the ids of tokenizer_config.json; names of the others; no code is there that could run."""
    tokenizer = load_tokenizer(str(folder_with(tmp_path)))
    assert tokenizer is not None
    first = len(RANKS)
    assert tokenizer.encode("[BOS]hello<|tool_call_begin|>[EOS]") == [
        first, *bpe(RANKS).encode("hello").ids, first + 3, first + 1,
    ]  # fmt: skip
    assert tokenizer.convert_ids_to_tokens(first + 2) == f"<|reserved_token_{first + 2}|>"
    assert len(tokenizer) == first + 256 and tokenizer.chat_template == "{{ 1 }}"
    assert tokenizer.decode([first + 3, first], skip_special_tokens=True) == "<|tool_call_begin|>"
    assert tokenizer_eos_ids(str(tmp_path)) == (first + 1,)
    assert TokenDecoder(tokenizer).token_bytes(255) == b"\xff"


@pytest.mark.parametrize("text", ["aGk= 0\nnonsense\n", "aGk= 1\n", "*** 0\n", "aGk= 0\naGk= 1\n", "A" * 1372 + " 0\n"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    """Oracle: the file and the line."""
    path = folder_with(tmp_path) / "tiktoken.model"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"tiktoken\.model has a line [12]"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="a line"):
        read_ranks(path)


def test_a_token_far_behind_the_others_is_refused(tmp_path: Path) -> None:
    """Oracle: an error at once, and no loop over a billion ids."""
    folder_with(tmp_path, added_tokens_decoder={"1000000000": {"content": "[FAR]"}})
    with pytest.raises(ConfigError, match="id 1000000000"):
        load_tokenizer(str(tmp_path))
