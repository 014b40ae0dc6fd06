"""Tiny checkpoints with a head for multi-token prediction, and the oracle: transformers' ``MtpModel`` over whole texts.

For ERNIE's head transformers has only the parts, a dense layer of ERNIE 4.5 and no norm after it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

from tests.image_models import Insides

_QWEN = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "post_norm": "norm",
    "mtp_block": "layers.0",
}
_DEEPSEEK = {"post_norm": "shared_head.norm"}
_ERNIE = {
    "enorm": "mtp_emb_norm.0",
    "hnorm": "mtp_hidden_norm.0",
    "eh_proj": "mtp_linear_proj.0",
    "mtp_block": "mtp_block.0",
}
_LAST_ATTENDS = {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3.5": _LAST_ATTENDS,
    "qwen3.5-moe": {},
    "qwen3-next": _LAST_ATTENDS,
    "deepseek-v3": {},
    "glm4-moe": {},
    "glm4-moe-lite": {},
    "deepseek-v3.2": {},
    "ernie4.5-moe": {},
}
"""Families with such a head, and what transformers needs to make one; it takes the class of the norms from the last
layer."""


def make_mtp(folder: Path, target_folder: Path) -> Path:
    """Copy the checkpoint of ``target_folder`` to ``folder``, with the tensors of a random head beside its own."""
    shutil.copytree(target_folder, folder)
    head, name = _new_head(_load(target_folder), seed=5)
    found = load_file(folder / "model.safetensors")
    for key, tensor in _stored(head).items():
        found[name(key)] = tensor.contiguous().clone()
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_mtp_cycle(folder: Path, target_folder: Path, *, seed: int = 0) -> Path:
    """Make a model of ``target_folder``, a tiny hybrid, whose blocks add nothing, and a head that predicts exactly its
    distribution: the next token of a cycle through the vocabulary is likeliest, but others are likely, too."""
    make_mtp(folder, target_folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    signs = torch.randint(2, embedding.shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "norm.weight")) or "norm_" in name:
            tensor.zero_()  # norms add 1
    hidden = embedding.shape[1]
    tensors |= {"model.embed_tokens.weight": signs, "lm_head.weight": 0.06 * signs.roll(1, 0)}
    tensors["mtp.fc.weight"] = torch.cat((torch.eye(hidden), torch.zeros(hidden, hidden)), 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _load(folder: Path) -> Any:
    import transformers

    (name,) = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def _new_head(model: Any, seed: int) -> tuple[Any, Callable[[str], str]]:
    """A random head of ``model``, and what the checkpoint calls its tensors."""
    from transformers.modeling_layers import MtpModel

    config, kind = model.config.get_text_config(), model.config.model_type
    config.num_mtp_layers, config.mtp_layer_types, config.mtp_mlp_layer_types = 1, ["full_attention"], ["sparse"]
    is_ernie = kind == "ernie4_5_moe"
    if is_ernie:
        config.moe_layer_start_index, config.chain_hidden_post_norm = config.num_hidden_layers, False
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = MtpModel(model, 1).eval()
        for tensor in head.layers.parameters():
            torch.nn.init.normal_(tensor, std=0.2)
            if tensor.dim() == 1 and not kind.startswith("qwen3_"):
                tensor.data += 1.0
        for key, tensor in head.layers.state_dict().items():
            if key.endswith("e_score_correction_bias"):  # no parameter, and 0 at first
                torch.nn.init.normal_(tensor, std=0.1)
    last = config.num_hidden_layers

    def name(key: str) -> str:
        part, rest = key.split(".", 1)
        if kind.startswith("qwen3_"):
            return f"mtp.{_QWEN[part]}.{rest}"
        if is_ernie:
            return f"model.{_ERNIE[part]}.{rest}"
        path = _DEEPSEEK.get(part, part)
        return f"model.layers.{last}.{rest if part == 'mtp_block' else f'{path}.{rest}'}"

    return head, name


def _stored(head: Any) -> dict[str, torch.Tensor]:
    """The layer's tensors, experts one by one, as checkpoints have them."""
    found: dict[str, torch.Tensor] = {}
    for key, tensor in head.layers[0].state_dict().items():
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[key] = tensor
            continue
        path, _, kind = key.rpartition(".")
        for index, one in enumerate(tensor):
            if kind == "down_proj":
                found[f"{path}.{index}.down_proj.weight"] = one
            else:
                gate, up = one.chunk(2)
                found[f"{path}.{index}.gate_proj.weight"], found[f"{path}.{index}.up_proj.weight"] = gate, up
    return found


class ReferenceMtp:
    """The head in ``folder``, by transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = _load(folder)
        self._head, name = _new_head(self._model, seed=0)
        self.tensors = {name(key): own for key, own in _stored(self._head).items()}
        """Views of the head's tensors, by their names in the checkpoint."""
        found = load_file(folder / "model.safetensors")
        for key, own in self.tensors.items():
            own.copy_(found[key])

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits (n, vocabulary) after each position of ``tokens`` (n + 1,) but the last."""
        logits: torch.Tensor = self._head.shared_head(self._run(self._states(tokens[:-1]), self._embed(tokens[1:])))
        return logits

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int, seen: Insides | None = None) -> list[int]:
        """Greedy drafts after ``tokens``; with images from the states of ``seen``."""
        hidden = self._states(tokens[:-1]) if seen is None else seen.out[:-1]
        embeddings = self._embed(tokens[1:]) if seen is None else seen.embeddings[1:]
        turns, found = None if seen is None else seen.positions[:, None, :-1], list[int]()
        for _ in range(count):
            out = self._run(hidden, embeddings, turns)
            found.append(int(self._head.shared_head(out[-1]).argmax()))
            hidden, embeddings = torch.cat((hidden, out[-1:])), torch.cat((embeddings, self._embed(found[-1:])))
            turns = None if turns is None else torch.cat((turns, turns[..., -1:] + 1), -1)
        return found

    def _states(self, tokens: list[int]) -> torch.Tensor:
        hidden: torch.Tensor = self._model.get_decoder()(input_ids=torch.tensor([tokens])).last_hidden_state[0]
        return hidden

    def _embed(self, ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = self._head.embed_tokens(torch.tensor(ids))
        return found

    def _run(self, hidden: torch.Tensor, embeddings: torch.Tensor, turns: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs (n, hidden); tokens turn by their places, or by ``turns`` (3, 1, n), of which transformers' masks
        know nothing."""
        positions = torch.arange(len(hidden))[None]  # of the states: positions count as differences alone
        rotary: Any = self._head.rotary_emb
        turn = rotary.forward
        own = patch.object(rotary, "forward", lambda x, position_ids: turn(x, position_ids=turns))
        with nullcontext() if turns is None else own:
            given = {"inputs_embeds": embeddings[None]}
            out: torch.Tensor = self._head.forward_layer(0, hidden[None], positions, None, **given)
        return out[0]
