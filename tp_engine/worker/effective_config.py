"""The configuration with nothing left open: every ``auto`` resolved, everything checked that needs no device."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import torch

from tp_engine.attention.registry import check_backend
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.model_config import ModelConfig, check_tensor_parallel, load_model_config, resolve_max_model_len

_DEFAULT_UTILIZATION = {"cuda": 0.9, "cpu": 0.3}
_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class EffectiveConfig:
    """``config`` without any ``auto``, the parsed ``model`` and the local folder it came from."""

    config: EngineConfig
    model: ModelConfig
    model_path: Path

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output in tokens."""
        assert self.config.max_model_len is not None
        return self.config.max_model_len

    @property
    def gpu_memory_utilization(self) -> float:
        """Share of the device memory that this engine may use."""
        assert self.config.gpu_memory_utilization is not None
        return self.config.gpu_memory_utilization

    @property
    def dtype(self) -> torch.dtype:
        """Type of weights, activations and KV cache."""
        return _TORCH_DTYPES[self.config.dtype]


def resolve(config: EngineConfig) -> EffectiveConfig:
    """Resolve and check; raises ``ConfigError`` and touches no device."""
    model, path = load_model_config(config.model, config.revision)
    check_tensor_parallel(model, config.tensor_parallel_size)
    device = _resolve_device(config)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    effective = dataclasses.replace(
        config,
        model=str(path),
        tokenizer=config.tokenizer,
        device=device,
        dtype=dtype,
        kv_cache_dtype=_resolve_kv_cache_dtype(config, dtype),
        gpu_memory_utilization=config.gpu_memory_utilization or _DEFAULT_UTILIZATION[device],
        max_model_len=resolve_max_model_len(model, config.max_model_len),
        attention_backend=check_backend(
            config.attention_backend,
            device_type=device,
            dtype=_TORCH_DTYPES[dtype],
            block_size=config.block_size,
            head_dim=model.head_dim,
        ),
    )
    return EffectiveConfig(config=effective, model=model, model_path=path)


def _resolve_device(config: EngineConfig) -> str:
    found = torch.cuda.device_count()
    device = ("cuda" if found else "cpu") if config.device == "auto" else config.device
    if device == "cuda" and config.tensor_parallel_size > found:
        raise ConfigError(
            f"tensor_parallel_size is {config.tensor_parallel_size} but this host has {found} CUDA devices; one rank "
            f"needs one device: lower tensor_parallel_size, or use --device cpu"
        )
    return device


def _resolve_kv_cache_dtype(config: EngineConfig, dtype: str) -> str:
    if config.kv_cache_dtype not in ("auto", dtype):
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype} but dtype is {dtype}; a KV cache of another type is not "
            f"supported: leave kv_cache_dtype at auto"
        )
    return dtype
