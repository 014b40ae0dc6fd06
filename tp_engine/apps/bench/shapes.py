"""Model shapes of the offline benchmark; each becomes a folder with a checkpoint, or just with a config.json."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tp_engine.config import DEMO_MODEL

# Small shapes: a random checkpoint is written, for every engine to load.  "architecture" is transformers' class, the
# others are settings of its configuration.
SHAPES: dict[str, dict[str, Any]] = {
    "A": {
        "architecture": "Qwen3ForCausalLM", "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072, "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
    "B": {
        "architecture": "LlamaForCausalLM", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000, "tie_word_embeddings": False,
    },
    "C": {
        "architecture": "LlamaForCausalLM", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "intermediate_size": 688, "vocab_size": 4096, "tie_word_embeddings": False,
    },
    "M": {
        "architecture": "Qwen3MoeForCausalLM", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 2048, "moe_intermediate_size": 384,
        "num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "D": {
        "architecture": "DeepseekV3ForCausalLM", "hidden_size": 640, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 8, "q_lora_rank": 384, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 1792, "moe_intermediate_size": 256,
        "n_routed_experts": 12, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc",
        "first_k_dense_replace": 1, "vocab_size": 32000, "tie_word_embeddings": False,
    },
    "G": {
        "architecture": "Gemma4ForCausalLM", "hidden_size": 640, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "sliding_window": 512, "intermediate_size": 2560, "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 0, "vocab_size": 32000, "tie_word_embeddings": True,
    },
    "Q": {
        "architecture": "Qwen3_5ForCausalLM", "hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "intermediate_size": 2304, "vocab_size": 32000,
        "tie_word_embeddings": True,
    },
    "N": {
        "architecture": "NemotronHForCausalLM", "hidden_size": 768, "hybrid_override_pattern": "MEMEM*EMEMEM*",
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 24,
        "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "time_step_min": 1e-30,
        "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 768, "n_routed_experts": 16,
        "num_experts_per_tok": 3, "vocab_size": 32000, "tie_word_embeddings": False,
    },
}  # fmt: skip
# Shapes whose model repeats its last token, because no block adds to the stream, and whose head for multi-token
# prediction does likewise: the best case of drafts, in which all layers run.  Q has three times its layers, so that
# output head and layer of a draft are 14 % of a step's weights, as in large models.  B is GLM's layer of B's sizes; its
# head's layer has experts.
SHAPES |= {
    "Q-mtp": {**SHAPES["Q"], "num_hidden_layers": 24},
    "B-mtp": {
        **SHAPES["B"], "architecture": "Glm4MoeForCausalLM", "head_dim": 64, "first_k_dense_replace": 12,
        "n_routed_experts": 4, "num_experts_per_tok": 1, "n_shared_experts": 1, "moe_intermediate_size": 1024,
        "num_nextn_predict_layers": 1,
    },
}  # fmt: skip

# The published config.json of Qwen3: the shared settings, and each size's (hidden, intermediate, layers, heads, tied).
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "attention_dropout": 0.0,
    "head_dim": 128, "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 40960,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-6, "rope_theta": 1000000, "rope_scaling": None,
    "sliding_window": None, "use_sliding_window": False, "use_cache": True, "vocab_size": 151936,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
_QWEN3_SIZES = {
    "qwen3-0.6b": (1024, 3072, 28, 16, True),
    "qwen3-8b": (4096, 12288, 36, 32, False),
    "qwen3-14b": (5120, 17408, 40, 40, False),
    "qwen3-32b": (5120, 25600, 64, 64, False),
}
# Qwen3-30B-A3B: the further settings of its config.json.
_QWEN3_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "num_key_value_heads": 4,
}  # fmt: skip
_QWEN3_MOE_SIZES = {"qwen3-30b-a3b": (2048, 6144, 48, 32, False)}
DUMMY_SHAPES = (*_QWEN3_SIZES, *_QWEN3_MOE_SIZES)


def qwen3_config(shape: str, dtype: str) -> dict[str, Any]:
    """The config.json of one of ``DUMMY_SHAPES``."""
    hidden, intermediate, layers, heads, tied = (_QWEN3_SIZES | _QWEN3_MOE_SIZES)[shape]
    experts = _QWEN3_MOE if shape in _QWEN3_MOE_SIZES else {}
    return (
        _QWEN3
        | experts
        | {
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "num_hidden_layers": layers,
            "max_window_layers": layers,
            "num_attention_heads": heads,
            "tie_word_embeddings": tied,
            "dtype": dtype,
        }
    )


def make_folder(folder: Path, shape: str, dtype: str) -> Path:
    """A model folder of ``shape``: with random weights for ``SHAPES``, without weights for ``DUMMY_SHAPES``."""
    if shape in SHAPES:
        return make_checkpoint(folder, shape, dtype)
    (folder / "config.json").write_text(json.dumps(qwen3_config(shape, dtype)), encoding="utf-8")
    return folder


def make_checkpoint(folder: Path, shape: str, dtype: str) -> Path:
    """Save a random checkpoint of ``shape`` with transformers, for every engine to load."""
    import torch

    torch.manual_seed(0)
    random_model(shape).to(getattr(torch, dtype)).save_pretrained(folder)
    if shape in _HEADS:
        _add_head(folder, shape)
    return folder


def _add_head(folder: Path, shape: str) -> None:
    """Make all blocks add nothing, and add a head that passes the embedding on, with a layer of the model's kind."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding.copy_(torch.randint(2, embedding.shape, dtype=torch.int64, device="cpu") * 2.0 - 1)
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = embedding.clone()
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensor.zero_()
    projection = torch.eye(embedding.shape[1], 2 * embedding.shape[1], dtype=embedding.dtype, device="cpu")
    tensors |= _HEADS[shape](tensors, SHAPES[shape]["num_hidden_layers"], projection)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _qwen_head(tensors: dict[str, Any], num_layers: int, projection: Any) -> dict[str, Any]:
    """Qwen3.5's head: a copy of the last layer, and norms that add 1."""
    path = f"model.layers.{num_layers - 1}."
    own = {name.removeprefix(path): tensor for name, tensor in tensors.items() if name.startswith(path)}
    none = projection.new_zeros(projection.shape[0])
    head = {f"mtp.layers.0.{name}": tensor.clone() for name, tensor in own.items()}
    head |= {f"mtp.{name}.weight": none.clone() for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    return head | {"mtp.fc.weight": projection}


def _glm_head(_tensors: dict[str, Any], num_layers: int, projection: Any) -> dict[str, Any]:
    """GLM's head: the layer after the last, with experts, of a model that has only this layer."""
    from safetensors.torch import load_file

    path, ones = f"model.layers.{num_layers}.", projection.new_ones(projection.shape[0])
    with tempfile.TemporaryDirectory() as folder:
        one_layer = random_model("B-mtp", num_hidden_layers=1, first_k_dense_replace=0)
        one_layer.to(projection.dtype).save_pretrained(folder)
        stored = load_file(Path(folder) / "model.safetensors")
    head = {name.replace("model.layers.0.", path): tensor for name, tensor in stored.items() if ".layers.0." in name}
    for name, tensor in head.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    head |= {f"{path}{norm}.weight": ones.clone() for norm in ("enorm", "hnorm", "shared_head.norm")}
    return head | {f"{path}eh_proj.weight": projection}


_HEADS = {"Q-mtp": _qwen_head, "B-mtp": _glm_head}


def random_model(shape: str, **changes: Any) -> Any:
    """transformers' model of one of ``SHAPES``, with weights drawn from torch's generator, in float32."""
    import transformers

    options = SHAPES[shape] | changes
    make_model = getattr(transformers, options.pop("architecture"))
    return make_model(
        make_model.config_class(
            **options, max_position_embeddings=2048, initializer_range=0.02, eos_token_id=2, bos_token_id=1
        )
    )


def add_tokenizer(folder: Path) -> None:
    """Give ``folder`` the demo model's tokenizer, for engines that do not start without one."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder / name)
