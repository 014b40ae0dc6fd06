"""Where the tokenizer comes from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tp_engine.errors import ConfigError

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.tiktoken",
    "spiece.model",
)
_TOKENIZER_FIELDS = ("model_type", "model_name", "tokenizer_class")  # of config.json, which choose among tokenizers


def load_tokenizer(source: str, revision: str | None = None) -> Any | None:
    """The tokenizer of a folder or hub name; None for a folder without one.  Raises ``ConfigError`` if it is broken.

    No code that comes with a model is run.
    """
    folder = Path(source).expanduser()
    if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # slow to import, and not needed without a tokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), revision=revision, trust_remote_code=False, config=_plain_config(folder)
        )
        tokenizer.encode("")  # settles truncation and padding, which the first call would change
    except Exception as error:
        raise ConfigError(
            f"tokenizer is {source!r}; it can not be loaded ({type(error).__name__}: {error}): give a folder or hub "
            "name with a tokenizer that needs no code of its own"
        ) from error
    return tokenizer


def _plain_config(folder: Path) -> Any | None:
    """What config.json says of the tokenizer, where the tokenizer's files name its class themselves; else None.

    Given this, ``AutoTokenizer`` does not import the model's configuration class, and with that transformers'
    modelling code and torch's compiler: more than torch itself takes.
    """
    try:
        named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if not isinstance(named.get("tokenizer_class"), str) or "auto_map" in named:
            return None
        fields = {key: model[key] for key in _TOKENIZER_FIELDS if key in model}
    except (OSError, ValueError, AttributeError, TypeError):
        return None  # transformers finds better words for it
    from transformers import PreTrainedConfig

    return PreTrainedConfig(name_or_path=str(folder), **fields)


def load_tokenizer_json(source: str, revision: str | None = None) -> str | None:
    """The text of a fast tokenizer's ``tokenizer.json``; None for a model without a tokenizer, or with a slow one.

    Written by the tokenizer itself where there is no such file.
    """
    path = Path(source).expanduser() / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    backend = getattr(load_tokenizer(source, revision), "backend_tokenizer", None)
    return None if backend is None else str(backend.to_str())
