"""Tiny models for embeddings and for ranking, in the form of Qwen3-Embedding and Qwen3-Reranker."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

from tests.families import FAMILIES
from tests.text_tokenizers import byte_level_tokenizer
from tests.tiny_models import make_checkpoint, make_config, randomise_vectors

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
    """A whole language model, in a folder below ``folder`` that is named as a reranker."""
    folder = make_checkpoint(folder / "tiny-reranker", **SHAPE)
    yes_no_tokenizer().save_pretrained(folder)
    return folder


def change_config(folder: Path, **values: object) -> None:
    """Set keys of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def make_classifier(folder: Path, architecture: str, kind: str = "ForSequenceClassification", **settings: Any) -> Any:
    """Write a tiny classifier in the form of transformers, and return transformers' model of it.

    ``kind`` is the end of its class's name; Qwen2's reward models, which transformers does not have, are its decoder
    with two more layers.
    """
    import torch
    import transformers

    family, is_reward = FAMILIES[architecture], "Reward" in kind
    config = make_config(architecture, **{"vocab_size": VOCAB, "max_position": 1024, **settings})
    name = family.model.replace("ForConditionalGeneration", kind).replace("ForCausalLM", kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(family.seed)
        if is_reward:
            model: Any = torch.nn.Module()
            model.model = transformers.Qwen2Model(config)
            size, labels = config.hidden_size, 2 if "Process" in kind else 1
            model.score = torch.nn.Sequential(
                torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, labels)
            )
        else:
            text_only = name.replace("For", "TextFor", 1)
            has_own = family.vision is None and hasattr(transformers, text_only)
            model = getattr(transformers, text_only if has_own else name)(config)
        randomise_vectors(model)
    model.eval()
    folder.mkdir(parents=True, exist_ok=True)
    if is_reward:
        from safetensors.torch import save_model

        config.save_pretrained(folder)
        save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
        change_config(folder, architectures=[name])
    else:
        model.save_pretrained(folder)
    eos_tokenizer().save_pretrained(folder)
    return model


def token_scores(model: Any, token_ids: list[int]) -> Any:
    """The scores (tokens, labels) that transformers' layers of ``make_classifier``'s model give each token."""
    import torch

    inputs = torch.tensor([token_ids], device=next(model.parameters()).device)
    with torch.inference_mode():
        return model.score(model.model(inputs).last_hidden_state)[0].cpu().numpy()
