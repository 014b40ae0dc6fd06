"""Tiny models for embeddings and for ranking, in the form of Qwen3-Embedding and Qwen3-Reranker."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.text_tokenizers import byte_level_tokenizer
from tests.tiny_models import make_checkpoint

VOCAB = 384
SHAPE: dict[str, Any] = {"vocab_size": VOCAB, "num_heads": 8, "num_kv_heads": 4, "max_position": 1024, "tie": False}


@cache
def yes_no_tokenizer() -> Any:
    """The byte-level tokenizer, in which yes and no are single tokens."""
    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.add_tokens(["yes", "no"])
    return tokenizer


@cache
def eos_tokenizer() -> Any:
    """The byte-level tokenizer, which ends every text with its EOS, as that of Qwen3-Embedding."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(byte_level_tokenizer())
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.eos_token_id)]
    )
    return tokenizer


def make_embedding_model(folder: Path) -> Path:
    """A decoder without output head, whose tensors have no prefix, with the files of sentence-transformers."""
    from safetensors.torch import load_file, save_file

    make_checkpoint(folder, **SHAPE)
    eos_tokenizer().save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = {name.removeprefix("model."): values for name, values in load_file(path).items()}
    del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    change_config(folder, is_matryoshka=True)
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": ""}]))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def make_reranker(folder: Path) -> Path:
    """A whole language model in a folder below ``folder`` whose name says what it is."""
    folder = make_checkpoint(folder / "tiny-reranker", **SHAPE)
    yes_no_tokenizer().save_pretrained(folder)
    return folder


def change_config(folder: Path, **values: object) -> None:
    """Set keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
