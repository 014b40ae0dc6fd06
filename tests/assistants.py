"""Tiny Gemma 4 assistants, and their oracle: transformers' assistant over the K/V of transformers' model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from tests.tiny_models import randomise_vectors


@contextmanager
def sharing_modes() -> Iterator[None]:
    """Work around transformers 5.23, which knows neither an assistant, all of whose layers read others' keys and
    values, nor a model that only an assistant reads."""
    import transformers

    plain = transformers.Gemma4TextConfig.kv_sharing_modes.fget

    def modes(config: Any) -> list[str | None]:
        count, kinds = config.num_hidden_layers, config.layer_types
        if config.num_kv_shared_layers == count:
            return ["reuse"] * count
        if config.num_kv_shared_layers == 0:
            return [None if kind in kinds[index + 1 :] else "store" for index, kind in enumerate(kinds)]
        found: list[str | None] = plain(config)
        return found

    with patch.object(transformers.Gemma4TextConfig, "kv_sharing_modes", property(modes)):
        yield


def make_assistant(folder: Path, target_folder: Path, *, seed: int = 3, **changes: Any) -> Path:
    """Write a random assistant of the Gemma 4 in ``target_folder`` into ``folder``; ``changes`` are of its config.json,
    the text part."""
    import transformers

    target = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    target = target.get("text_config", target)
    own = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "final_logit_softcapping": None,
        "initializer_range": 0.2,
    }
    shared = (
        "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "sliding_window", "attention_k_eq_v",
        "max_position_embeddings", "rope_parameters",
    )  # fmt: skip
    full = next(iter(target["per_layer_config"].values()))
    own |= {"global_head_dim": full["head_dim"], "num_global_key_value_heads": full.get("num_key_value_heads")}
    text = transformers.Gemma4TextConfig(**{name: target[name] for name in shared if name in target} | own | changes)
    config = transformers.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=target["hidden_size"])
    with torch.random.fork_rng(devices=[]), sharing_modes():
        torch.manual_seed(seed)
        model = transformers.Gemma4AssistantForCausalLM(config)
        randomise_vectors(model)
    model.save_pretrained(folder)
    return folder


class ReferenceAssistant:
    """The assistant in ``folder``, of the model in ``target_folder``, by transformers."""

    def __init__(self, folder: Path, target_folder: Path) -> None:
        import transformers

        (name,) = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        how: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}
        with sharing_modes():
            self._target = getattr(transformers, name).from_pretrained(target_folder, **how).eval()
            self._assistant = transformers.Gemma4AssistantForCausalLM.from_pretrained(folder, **how).eval()

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts after ``tokens``, the last of which the model has not computed."""
        seen = self._target(
            input_ids=torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True
        )
        window = self._target.config.get_text_config().sliding_window  # generate's cache keeps as many keys
        shared = {
            kind: tuple(one[:, :, -window:] if kind.startswith("sliding") else one for one in states)
            for kind, states in seen.shared_kv_states.items()
        }
        hidden, token, found = seen.hidden_states[-1][:, -1:], tokens[-1], list[int]()
        for _ in range(count):
            embedded = self._target.get_input_embeddings()(torch.tensor([[token]]))
            made = self._assistant(
                inputs_embeds=torch.cat((embedded, hidden), dim=-1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=shared,
            )
            hidden, token = made.last_hidden_state, int(made.logits[0, -1].argmax())
            found.append(token)
        return found
