"""Tiny draft heads, and the oracle of all of them: an EAGLE-3 head in plain PyTorch, over whole texts in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.image_models import Insides

HIDDEN, HEAD_DIM, EPS, THETA = 64, 8, 1e-6, 10000.0


def make_draft_head(
    folder: Path,
    *,
    vocab_size: int,
    draft_vocab_size: int | None = None,
    spelling: str = "authors",
    num_kv_heads: int = 4,
    has_embedding: bool = False,
    layer: str = "llama",
    state_layers: tuple[int, ...] = (0, 1, 1),
    seed: int = 0,
    tensors: dict[str, torch.Tensor] | None = None,
    **options: Any,
) -> Path:
    """Write a random head of a model with 64 hidden elements into ``folder``; ``tensors`` replace some of its own.

    ``options`` are keys of config.json; of vLLM's names.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.2) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    num_heads, inner, num_drafts = HIDDEN // HEAD_DIM, 96, draft_vocab_size or vocab_size
    path = "midlayer" if spelling == "authors" else "layers.0"
    found = {
        "fc.weight": draw(HIDDEN, len(state_layers) * HIDDEN),
        f"{path}.self_attn.q_proj.weight": draw(num_heads * HEAD_DIM, 2 * HIDDEN),
        f"{path}.self_attn.k_proj.weight": draw(num_kv_heads * HEAD_DIM, 2 * HIDDEN),
        f"{path}.self_attn.v_proj.weight": draw(num_kv_heads * HEAD_DIM, 2 * HIDDEN),
        f"{path}.self_attn.o_proj.weight": draw(HIDDEN, num_heads * HEAD_DIM),
        f"{path}.mlp.gate_proj.weight": draw(inner, HIDDEN),
        f"{path}.mlp.up_proj.weight": draw(inner, HIDDEN),
        f"{path}.mlp.down_proj.weight": draw(HIDDEN, inner),
        "lm_head.weight": draw(num_drafts, HIDDEN),
        "t2d": torch.zeros(vocab_size, dtype=torch.bool),
    }
    norms = [f"{path}.input_layernorm", f"{path}.hidden_norm", f"{path}.post_attention_layernorm", "norm"]
    norms += [f"fc_norm.{index}" for index in range(len(state_layers))] if options.get("fc_norm") else []
    for name in norms:
        found[f"{name}.weight"] = 1 + draw(HIDDEN)
    if options.get("norm_before_fc"):
        found["input_norm.weight"] = 1 + draw(len(state_layers) * HIDDEN)
    if layer == "qwen3":
        found |= {f"{path}.self_attn.{one}_norm.weight": 1 + draw(HEAD_DIM) for one in "qk"}
    if has_embedding:
        found["embed_tokens.weight"] = draw(vocab_size, HIDDEN, scale=0.5)
    if draft_vocab_size is not None:
        targets = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
        found["d2t"] = targets - torch.arange(draft_vocab_size)
    inner_config = {
        "model_type": layer,
        "hidden_size": HIDDEN,
        "intermediate_size": inner,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": vocab_size,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
    }
    own = {"draft_vocab_size": num_drafts, "eagle_aux_hidden_state_layer_ids": list(state_layers), **options}
    config = {**inner_config, "architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False, **own}
    if spelling != "authors":
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "any"}},
            "transformer_layer_config": inner_config,
            **own,
        }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {name: tensor.contiguous() for name, tensor in {**found, **(tensors or {})}.items()},
        folder / "model.safetensors",
    )
    return folder


def make_cycle(folder: Path, target_folder: Path) -> tuple[Path, Path]:
    """Make a model of ``target_folder``, a tiny Llama, that answers every token with the next one of a cycle through
    the vocabulary, and a head that does likewise; returns the head's folder, then the model's.

    The model's blocks add nothing, so the stream is the embedding, of signs; the head's attention sees itself alone, as
    no other token has so large a product with it, and adds much to the stream.
    """
    tensors = load_file(target_folder / "model.safetensors")
    vocab_size = len(tensors["lm_head.weight"])
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (vocab_size, HIDDEN), generator=generator) * 2.0 - 1
    before = signs.roll(1, 0)  # the token after i is i + 1
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name.endswith("norm.weight"):
            tensor.fill_(1.0)
    tensors |= {"model.embed_tokens.weight": signs, "lm_head.weight": before.clone()}
    model = folder / "model"
    shutil.copytree(target_folder, model)
    save_file(tensors, model / "model.safetensors")
    of_token = torch.cat((torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)), 1)
    own = {f"self_attn.{name}_proj.weight": of_token * factor for name, factor in (("q", 4.0), ("k", 4.0), ("v", 1.0))}
    own |= {"self_attn.o_proj.weight": torch.eye(HIDDEN) * 8, "mlp.down_proj.weight": torch.zeros(HIDDEN, 96)}
    norms = dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), torch.ones(HIDDEN))
    own |= {f"{name}.weight": ones for name, ones in norms.items()}
    head = make_draft_head(
        folder / "head",
        vocab_size=vocab_size,
        num_kv_heads=HIDDEN // HEAD_DIM,
        norm_output=True,
        state_layers=(0, 1, 2),
        tensors={
            **{f"midlayer.{name}": tensor.clone() for name, tensor in own.items()},
            "fc.weight": torch.zeros(HIDDEN, 3 * HIDDEN),
            "norm.weight": torch.ones(HIDDEN),
            "lm_head.weight": before.clone(),
        },
    )
    return head, model


class ReferenceHead:
    """The head in ``folder``, of the model in ``target_folder``, whose states transformers makes."""

    def __init__(self, folder: Path, target_folder: Path) -> None:
        import transformers

        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self._is_authors = "transformer_layer_config" not in config
        self._config = config
        self._tensors = load_file(folder / "model.safetensors")
        self._path = "midlayer" if self._is_authors else "layers.0"
        self._state_layers = config["eagle_aux_hidden_state_layer_ids"]
        (name,) = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        self._target = getattr(transformers, name).from_pretrained(target_folder, dtype=torch.float32).eval()
        embedding = self._target.get_input_embeddings().weight
        self._embedding = self._tensors.get("embed_tokens.weight", embedding).detach()

    @torch.inference_mode()
    def states(self, tokens: list[int]) -> torch.Tensor:
        """(n, layers * hidden), the inputs of the layers that the head reads."""
        found = self._target(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return torch.cat([found[layer][0] for layer in self._state_layers], dim=1)

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Logits (n, drafts) after each position of ``tokens`` (n + 1,) but the last."""
        return self._run(self._combine(self.states(tokens)[:-1]), tokens[1:])[0]

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int, seen: Insides | None = None) -> list[int]:
        """Greedy drafts after ``tokens``; with images the states and rotary positions are those of ``seen``."""
        ids, turns = tokens[1:], None
        if seen is None:
            states = self.states(tokens)
        else:
            states = torch.cat([seen.states[layer] for layer in self._state_layers], dim=1)
            sections = self._config.get("rope_scaling", {}).get("mrope_section", (HEAD_DIM // 2, 0, 0))
            turns = torch.cat([seen.positions[axis, :, None].repeat(1, n) for axis, n in enumerate(sections)], 1)[:-1]
        hidden = self._combine(states[:-1])
        found: list[int] = []
        for _ in range(count):
            logits, fed = self._run(hidden, ids, turns)
            if turns is not None:
                turns = torch.cat((turns, turns[-1:] + 1))
            best = int(logits[-1].argmax())
            found.append(best + (int(self._tensors["d2t"][best]) if "d2t" in self._tensors else 0))
            hidden, ids = torch.cat((hidden, fed[-1:])), [*ids, found[-1]]
        return found

    def _combine(self, states: torch.Tensor) -> torch.Tensor:
        if self._config.get("norm_before_fc"):
            states = self._norm(states, "input_norm")
        if self._config.get("fc_norm"):
            parts = torch.split(states, HIDDEN, dim=1)
            states = torch.cat([self._norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=1)
        combined: torch.Tensor = states @ self._tensors["fc.weight"].T
        return combined

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._tensors[f"{name}.weight"]
        normalised: torch.Tensor = F.rms_norm(x, weight.shape, weight, EPS)
        return normalised

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        product: torch.Tensor = x @ self._tensors[f"{self._path}.{name}.weight"].T
        return product

    def _run(
        self, hidden: torch.Tensor, ids: list[int], turns: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and what is fed back; pairs are rotated by their positions ``turns`` (n, pairs), or by the tokens."""
        turns = torch.arange(len(ids))[:, None] if turns is None else turns
        path = self._path
        normalised = self._norm(hidden, f"{path}.hidden_norm")
        before = self._config.get("norm_before_residual", not self._is_authors)
        residual = normalised if before else hidden
        x = torch.cat((self._norm(self._embedding[ids], f"{path}.input_layernorm"), normalised), dim=1)
        q, k, v = (self._linear(x, f"self_attn.{one}_proj").view(len(x), -1, HEAD_DIM) for one in "qkv")
        if f"{path}.self_attn.q_norm.weight" in self._tensors:
            q, k = self._norm(q, f"{path}.self_attn.q_norm"), self._norm(k, f"{path}.self_attn.k_norm")
        q, k, v = (part.transpose(0, 1) for part in (_turn(q, turns), _turn(k, turns), v))
        attended = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        residual = residual + self._linear(attended.transpose(0, 1).flatten(1), "self_attn.o_proj")
        x = self._norm(residual, f"{path}.post_attention_layernorm")
        gated = F.silu(self._linear(x, "mlp.gate_proj")) * self._linear(x, "mlp.up_proj")
        residual = residual + self._linear(gated, "mlp.down_proj")
        out = self._norm(residual, "norm")
        return out @ self._tensors["lm_head.weight"].T, out if self._config.get("norm_output") else residual


def _turn(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``heads`` (n, heads, HEAD_DIM), halves of a head, by ``turns`` (n, pairs or 1)."""
    frequencies = THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (turns * frequencies)[:, None]
    first, second = heads.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
