"""A tokenizer loaded without the model's configuration class is the one that transformers chooses with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.text_tokenizers import byte_fallback_tokenizer, byte_level_tokenizer
from tp_engine.engine.tokenizer import _plain_config, load_tokenizer
from tp_engine.errors import ConfigError

CASES = [
    ("byte level", "PreTrainedTokenizerFast", "llama"),
    ("byte level", "LlamaTokenizerFast", "llama"),  # transformers sees that this is not one of Llama's
    ("byte level", "Qwen2Tokenizer", "qwen3"),
    ("byte level", "Qwen2TokenizerFast", "llama"),
    ("byte level", "GPT2Tokenizer", "mistral"),
    ("byte level", "NoSuchTokenizer", "qwen2"),
    ("byte fallback", "LlamaTokenizer", "llama"),
    ("byte fallback", "PreTrainedTokenizerFast", "no_such_model"),
]


def save(folder: Path, kind: str, tokenizer_class: str | None, model_type: str, **fields: Any) -> Path:
    made = byte_level_tokenizer() if kind == "byte level" else byte_fallback_tokenizer()
    made.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": tokenizer_class} | fields
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    config = {"model_type": model_type, "vocab_size": 400, "hidden_size": 8, "num_attention_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("kind", "tokenizer_class", "model_type"), CASES)
def test_the_tokenizer_is_that_of_transformers(
    kind: str, tokenizer_class: str, model_type: str, tmp_path: Path
) -> None:
    """Oracle: AutoTokenizer without our shortcut: the class, the whole of its backend, special tokens, and a
    template."""
    folder = save(tmp_path, kind, tokenizer_class, model_type)
    assert _plain_config(folder) is not None
    loaded, expected = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    expected.encode("")
    assert loaded is not None and type(loaded) is type(expected)
    assert loaded.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert loaded.special_tokens_map == expected.special_tokens_map
    assert loaded.chat_template == expected.chat_template and loaded.name_or_path == expected.name_or_path


def test_the_models_configuration_decides_where_the_tokenizer_does_not_say(tmp_path: Path) -> None:
    """Oracle: the rule: transformers chooses for a tokenizer without a class, or with a model's own code."""
    assert _plain_config(save(tmp_path / "a", "byte level", None, "qwen3")) is None
    auto_map = {"AutoTokenizer": ["code.Slow", "code.Fast"]}
    assert _plain_config(save(tmp_path / "b", "byte level", "Qwen2Tokenizer", "qwen3", auto_map=auto_map)) is None
    assert _plain_config(tmp_path / "c") is None
    (tmp_path / "a" / "tokenizer_config.json").write_text("[]")
    assert _plain_config(tmp_path / "a") is None


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}, ["x.Y", None]])
def test_a_tokenizer_that_is_code_is_named(auto_map: Any, tmp_path: Path) -> None:
    """Oracle: Kimi K2's files: the class and the remedy; beside a tokenizer.json the code is not needed."""
    name = auto_map["AutoTokenizer"][0] if isinstance(auto_map, dict) else auto_map[0]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    (tmp_path / "tiktoken.model").write_text("IQ== 0\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    with pytest.raises(ConfigError, match=rf"code of the model \({name}\).*--tokenizer.*tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    byte_level_tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert load_tokenizer(str(tmp_path)) is not None


@pytest.mark.parametrize("own", [None, "own"])
def test_a_template_in_a_file_of_its_own(own: str | None, tmp_path: Path) -> None:
    """Oracle: the file that older repositories with images have; the tokenizer's own template goes before it."""
    folder = save(tmp_path, "byte fallback", "PreTrainedTokenizerFast", "llama", chat_template=own)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "of the file"}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer is not None and tokenizer.chat_template == (own or "of the file")
    for wrong in ("[]", "{", '{"chat_template": 3}'):
        (folder / "chat_template.json").write_text(wrong)
        tokenizer = load_tokenizer(str(folder))
        assert tokenizer is not None and tokenizer.chat_template == own
