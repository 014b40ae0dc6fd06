"""What the engine knows of a model before it reads a weight: its config.json, parsed and checked.  No torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.kv_layout import KvKind, KvLayout, lay_out
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.families import FAMILIES, read_architecture, read_windows
from tp_engine.model_config.rope import RopeConfig, read_rope
from tp_engine.model_config.source import MODEL_FILES, resolve_model_folder

MAX_WORLD_SIZE = 64
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One decoder-only model.  All sizes are those of the whole model; ``local_`` shares are worked out per rank.

    ``sliding_windows`` has one entry per layer: the number of visible keys, self included, or None for all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    dtype: str
    eos_token_ids: tuple[int, ...]

    @staticmethod
    def from_dict(config: Mapping[str, Any]) -> ModelConfig:
        """Parse a config.json.  Raises ``ConfigError`` for anything that is missing, wrong or not supported."""
        reader = ConfigJson(config)
        architecture = read_architecture(reader)
        family = FAMILIES[architecture]
        sizes = _read_sizes(reader)
        attention_bias = reader.take("attention_bias", bool, False) if family.qkv_bias is None else False
        model = ModelConfig(
            architecture=architecture,
            **sizes,
            rms_norm_eps=reader.take("rms_norm_eps", float, 1e-6) or 0.0,
            rope=read_rope(reader, sizes["max_position"]),
            tie_word_embeddings=bool(reader.take("tie_word_embeddings", bool, False)),
            qkv_bias=bool(attention_bias) if family.qkv_bias is None else family.qkv_bias,
            out_bias=bool(attention_bias),
            mlp_bias=bool(reader.take("mlp_bias", bool, False)) if family.mlp_bias_option else False,
            qk_norm=family.qk_norm,
            sliding_windows=read_windows(reader, family, sizes["num_layers"]),
            dtype=_read_dtype(reader),
            eos_token_ids=reader.take_token_ids("eos_token_id"),
        )
        reader.expect("hidden_act", str, "silu")
        reader.expect("pretraining_tp", int, 1)
        reader.finish()
        _check_heads(model)
        return model


def _read_sizes(reader: ConfigJson) -> dict[str, int]:
    hidden_size, num_heads = reader.require_positive("hidden_size"), reader.require_positive("num_attention_heads")
    head_dim = reader.take_positive("head_dim", hidden_size // num_heads)
    if reader.take("head_dim", int) is None and hidden_size % num_heads:
        raise ConfigError(
            f"config.json: hidden_size is {hidden_size}; without a head_dim it must be a multiple of "
            f"num_attention_heads, {num_heads}"
        )
    return {
        "vocab_size": reader.require_positive("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": reader.require_positive("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": reader.take_positive("num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "intermediate_size": reader.require_positive("intermediate_size"),
        "max_position": reader.require_positive("max_position_embeddings"),
    }


def _read_dtype(reader: ConfigJson) -> str:
    """The checkpoint's type: ``dtype`` (transformers 5) or ``torch_dtype``; float32 where neither is given."""
    classic = reader.take("torch_dtype", str, "float32")
    name = str(reader.take("dtype", str, classic)).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"config.json: dtype is {name!r}; this engine loads {', '.join(DTYPES)}")
    return name


def _check_heads(model: ModelConfig) -> None:
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads is {model.num_heads}; it must be a multiple of num_key_value_heads, "
            f"{model.num_kv_heads}"
        )
    if model.head_dim % 2:
        raise ConfigError(f"config.json: head_dim is {model.head_dim}; rotary embeddings need an even one")


def load_model_config(
    model: str, revision: str | None = None, files: Sequence[str] = MODEL_FILES
) -> tuple[ModelConfig, Path]:
    """Find ``model`` (a folder or a hub name) and parse its config.json and generation_config.json.

    Returns the configuration and the local folder with the model's files, of which a hub name brings ``files``.  Raises
    ``ConfigError``.
    """
    folder = resolve_model_folder(model, revision, files)
    config = ModelConfig.from_dict(_read_json(folder / "config.json"))
    generation = folder / "generation_config.json"
    if generation.is_file():
        extra = ConfigJson(_read_json(generation), "generation_config.json").take_token_ids("eos_token_id")
        config = dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys(config.eos_token_ids + extra)))
    return config, folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can not be read as JSON: {error}; is the model complete?") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds {type(values).__name__}; it must be a JSON object")
    return values


def resolve_max_model_len(config: ModelConfig, requested: int | None) -> int:
    """The longest prompt plus output in tokens: ``requested``, or all positions that the model was made for."""
    if requested is None:
        return config.max_position
    if requested > config.max_position:
        raise ConfigError(
            f"max_model_len is {requested}; the model has {config.max_position} positions "
            f"(max_position_embeddings): ask for at most {config.max_position}, or leave max_model_len out"
        )
    return requested


def check_tensor_parallel(config: ModelConfig, world_size: int) -> None:
    """Raise ``ConfigError``, with the legal sizes, if the model can not be split over ``world_size`` ranks."""
    problem = _split_problem(config, world_size)
    if problem is None:
        return
    legal = [str(size) for size in range(1, MAX_WORLD_SIZE + 1) if _split_problem(config, size) is None]
    raise ConfigError(
        f"tensor_parallel_size is {world_size}; {problem}. Legal sizes for this {config.architecture}: "
        f"{', '.join(legal)}"
    )


def _split_problem(config: ModelConfig, world_size: int) -> str | None:
    """What forbids this world size.  The vocabulary never does: it is padded."""
    if world_size < 1:
        return "it must be at least 1"
    if config.num_heads % world_size:
        return f"the {config.num_heads} attention heads can not be divided equally"
    if config.intermediate_size % world_size:
        return f"the intermediate size of {config.intermediate_size} can not be divided equally"
    if config.num_kv_heads % world_size and world_size % config.num_kv_heads:
        return f"the {config.num_kv_heads} KV heads can be neither divided equally nor repeated equally often"
    return None


def kv_layout_of(model: ModelConfig) -> KvLayout:
    """Which of the model's layers share block tables."""
    return lay_out(
        [
            KvKind(window=window, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
            for window in model.sliding_windows
        ]
    )


def local_num_kv_heads(config: ModelConfig, world_size: int) -> int:
    """KV heads that each rank holds, where ``K`` is their number and ``W`` the world size.

    ::

        K % W == 0   each rank holds K / W heads         K=4, W=2:  rank 0 [0 1]  rank 1 [2 3]
        W % K == 0   each head is held by W / K ranks    K=2, W=4:  rank 0 [0]  rank 1 [0]  rank 2 [1]  rank 3 [1]
    """
    return max(1, config.num_kv_heads // world_size)
