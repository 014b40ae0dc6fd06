"""Mistral's tekken.json against the library tiktoken, and chat templates of folders whose tokenizer has none."""

from __future__ import annotations

import base64
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiktoken
from transformers import AutoTokenizer

from tests.text_tokenizers import byte_level_tokenizer
from tests.unit.engine.test_tiktoken_model import RANKS, TEXTS, random_texts
from tp_engine.engine.tokenizer import load_tokenizer, load_tokenizer_json, tokenizer_eos_ids
from tp_engine.errors import ConfigError

PATTERN = r" ?\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+"
SPECIALS = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
NUM_SPECIAL = 9
MAKER = "mistral_common.integrations.chat_templates.chat_templates"


def content(**fields: Any) -> dict[str, Any]:
    """A file as Mistral's are; it has more tokens than it speaks of, as theirs do."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in RANKS.items()
    ]
    return {
        "config": {
            "pattern": PATTERN,
            "num_vocab_tokens": len(RANKS),
            "default_vocab_size": NUM_SPECIAL + len(RANKS) - 3,
            "default_num_special_tokens": NUM_SPECIAL,
            "version": "v3",
        },
        "vocab": vocab,
        "special_tokens": [
            {"rank": rank, "token_str": text, "is_control": text != "[INST]"} for rank, text in enumerate(SPECIALS)
        ],
    } | fields


def folder_with(folder: Path, **fields: Any) -> Path:
    (folder / "tekken.json").write_text(json.dumps(content(**fields)))
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    return folder


def load(source: str | Path) -> Any:
    tokenizer = load_tokenizer(str(source))
    assert tokenizer is not None
    return tokenizer


def test_ids_are_tiktokens(tmp_path: Path) -> None:
    """Oracle: tiktoken with the same ranks and pattern; the ranks begin behind the special tokens."""
    kept = dict(list(RANKS.items())[:-3])
    oracle = tiktoken.Encoding("test", pat_str=PATTERN, mergeable_ranks=kept, special_tokens={})
    tokenizer = load(folder_with(tmp_path))
    assert len(tokenizer) == NUM_SPECIAL + len(kept)
    for text in [*TEXTS, *random_texts()]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == [NUM_SPECIAL + rank for rank in oracle.encode(text)], text
        assert tokenizer.decode(ids) == text and tokenizer.encode(text) == [1, *ids]


def test_special_tokens(tmp_path: Path) -> None:
    """Oracle: the file; those that it does not name have Mistral's names; texts leave out those that control."""
    tokenizer = load(folder_with(tmp_path))
    assert tokenizer.convert_tokens_to_ids([*SPECIALS, "<SPECIAL_6>", "<SPECIAL_8>"]) == [0, 1, 2, 3, 4, 5, 6, 8]
    assert tokenizer.encode("[INST]</s>", add_special_tokens=False) == [3, 2]
    assert tokenizer.decode([1, 3, 4, 8], skip_special_tokens=True) == "[INST]"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 5)
    assert tokenizer_eos_ids(str(tmp_path)) == (2,)
    assert "[/INST]" in str(load_tokenizer_json(str(tmp_path)))


def test_a_file_that_names_no_special_tokens(tmp_path: Path) -> None:
    """Oracle: the ids of the first version, by hand."""
    config = content()["config"] | {"default_num_special_tokens": 30, "default_vocab_size": 30 + len(RANKS)}
    tokenizer = load(folder_with(tmp_path, config=config, special_tokens=None))
    names = ["<s>", "[INST]", "[TOOL_CALLS]", "[SYSTEM_PROMPT]", "[TOOL_CONTENT]", "<SPECIAL_20>", "<SPECIAL_29>"]
    assert tokenizer.convert_tokens_to_ids(names) == [1, 3, 9, 17, 19, 20, 29]


def wrong(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    found = content()
    change(found)
    return found


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ({}, "there is no 'config'"),
        ([], "cannot be read"),
        (content(config={}), "there is no 'default_vocab_size'"),
        (wrong(lambda one: one["config"].update(default_vocab_size="9")), "default_vocab_size is '9'"),
        (wrong(lambda one: one["config"].update(default_vocab_size=True)), "default_vocab_size is True"),
        (wrong(lambda one: one["config"].update(default_vocab_size=10**9)), "1000000000 tokens"),
        (wrong(lambda one: one["config"].update(default_num_special_tokens=10**9)), "1000000000 of"),
        (wrong(lambda one: one["config"].update(default_num_special_tokens=-1)), "tokens is -1"),
        (
            wrong(lambda one: one["config"].update(default_num_special_tokens=3, default_vocab_size=300)),
            "more than the 3",
        ),
        (wrong(lambda one: one["config"].update(pattern="(")), r"'\(' is not a regular expression"),
        (wrong(lambda one: one["config"].update(pattern="a" * 5000)), "of ordinary length"),
        (wrong(lambda one: one["vocab"][7].update(rank=8)), "an entry 7 in vocab"),
        (wrong(lambda one: one["vocab"][7].update(token_bytes="*")), "an entry 7 in vocab"),
        (wrong(lambda one: one["vocab"][7].update(token_bytes=7)), "an entry 7 in vocab"),
        (wrong(lambda one: one["vocab"][7].update(token_bytes="")), "an entry 7 in vocab"),
        (wrong(lambda one: one["vocab"].__setitem__(7, None)), "cannot be read"),
        (wrong(lambda one: one["special_tokens"][3].update(rank=4)), "in the order of their ids"),
        (wrong(lambda one: one["special_tokens"][3].update(token_str="<s>")), "come twice"),
        (wrong(lambda one: one["special_tokens"][3].update(token_str="a")), "'a' is a special token and another one"),
    ],
)
def test_a_damaged_file_is_named(file: Any, words: str, tmp_path: Path) -> None:
    """Oracle: an error at once, with the place in the file."""
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    with pytest.raises(ConfigError, match=words):
        load_tokenizer(str(tmp_path))


def test_tokens_of_too_many_bytes_are_refused(tmp_path: Path) -> None:
    """Oracle: an error before the splits of each token are looked at: there would be 16 million."""
    long = [bytes([*divmod(number, 256)]) * 500 for number in range(16_000)]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(one).decode()} for rank, one in enumerate(long)]
    config = content()["config"] | {"default_vocab_size": NUM_SPECIAL + len(vocab)}
    with pytest.raises(ConfigError, match="8,388,608 bytes in all"):
        load_tokenizer(str(folder_with(tmp_path, vocab=vocab, config=config)))


def test_a_tokenizer_json_goes_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: transformers' own tokenizer of the folder; it is asked for no other, whatever is installed."""
    byte_level_tokenizer().save_pretrained(folder_with(tmp_path))
    asked: dict[str, Any] = {}
    original = AutoTokenizer.from_pretrained

    def record(*arguments: Any, **fields: Any) -> Any:
        asked.update(fields)
        return original(*arguments, **fields)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", record)
    assert load(tmp_path).get_vocab() == byte_level_tokenizer().get_vocab()
    assert asked["mistral_format"] is False


def test_the_template_is_made_by_mistral_common(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: by hand: the folder's own template, else the package's, else a warning with both remedies."""
    monkeypatch.setitem(sys.modules, MAKER, None)
    folder = folder_with(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load(folder).chat_template is None
    assert "--chat-template" in caplog.text and "tp-engine[mistral]" in caplog.text
    maker: Any = ModuleType(MAKER)
    for name in ("mistral_common", "mistral_common.integrations", "mistral_common.integrations.chat_templates"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, MAKER, maker)
    maker.convert_tokenizer_to_chat_template = lambda path: f"{{# {Path(path).name} #}}"
    assert load(folder).chat_template == "{# tekken.json #}"

    def refuse(path: Path) -> str:
        raise AssertionError("no version")

    maker.convert_tokenizer_to_chat_template = refuse
    with caplog.at_level(logging.WARNING):
        assert load(folder).chat_template is None
    assert "no version" in caplog.text
    (folder / "chat_template.jinja").write_text("{{ 7 }}")
    assert load(folder).chat_template == "{{ 7 }}"


def test_a_hub_name_is_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the same tokenizer as from the folder in the hub's cache, for files that only we can read too."""
    asked = []

    def download(name: str, **fields: Any) -> str:
        asked.append((name, fields["revision"]))
        return str(folder_with(tmp_path))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load("some/model").encode("a") == load(tmp_path).encode("a")
    assert asked == [("some/model", None)]
