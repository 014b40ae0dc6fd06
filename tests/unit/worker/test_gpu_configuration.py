"""The resolved configuration refuses what a GPU, a package or a kernel does not support, without touching a device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from tests.fake_gpus import FakeGpus
from tp_engine.attention import flash_attn, triton_backend
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.worker.effective_config import EffectiveConfig, resolve

Checkpoint = Callable[..., Path]
TURING, AMPERE, ADA, HOPPER = (7, 5), (8, 6), (8, 9), (9, 0)


@pytest.fixture
def resolved(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Callable[..., EffectiveConfig]:
    """``resolved(capability, packages, **options)`` on a host with one such GPU and these packages."""

    def resolve_there(
        capability: tuple[int, int], packages: tuple[str, ...] = ("triton",), **options: Any
    ) -> EffectiveConfig:
        FakeGpus(capability=capability).install(monkeypatch)
        monkeypatch.setattr(flash_attn, "find_spec", lambda name: ModuleSpec(name, None) if name in packages else None)
        monkeypatch.setattr(triton_backend, "has_triton", lambda: "triton" in packages)
        return resolve(EngineConfig(model=str(checkpoint("qwen3", dtype="bfloat16", max_position=64)), **options))

    return resolve_there


@pytest.mark.parametrize(
    ("capability", "options", "message"),
    [
        (TURING, {}, r"dtype is bfloat16, .* before compute capability 8\.0 .* of 7\.5; set dtype=float16"),
        (TURING, {"dtype": "bfloat16"}, r"this one is of 7\.5; set dtype=float16"),
        (
            TURING,
            {"dtype": "float16", "attention_backend": "triton"},
            r"attention_backend is triton: it needs .* 8\.0, and this one is of 7\.5; use attention_backend=torch",
        ),
        (AMPERE, {"kv_cache_dtype": "fp8"}, r"kv_cache_dtype is fp8, .* of 8\.6; set kv_cache_dtype=int8"),
        (HOPPER, {"attention_backend": "flash_attn"}, "flash-attn package is not installed; `pip install flash-attn`"),
        (HOPPER, {"attention_backend": "native"}, "attention_backend is native: it runs on CPUs"),
        (HOPPER, {"cudagraph_capture_sizes": "1,257"}, "contains 257; sizes go from 1 to max_num_seqs, which is 256"),
        (HOPPER, {"cudagraph_capture_sizes": "all"}, "batch sizes separated by commas, such as 1,2,4,8"),
        (HOPPER, {"block_size": 24}, "block_size is 24; it must be a power of two, such as 16"),
        (HOPPER, {"tensor_parallel_size": 2}, "tensor_parallel_size is 2 but this host has 1 CUDA devices"),
    ],
)
def test_what_can_not_be_is_refused(
    resolved: Callable[..., EffectiveConfig], capability: tuple[int, int], options: dict[str, Any], message: str
) -> None:
    """Oracle: the value, the rule and the remedy."""
    with pytest.raises(ConfigError, match=message):
        resolved(capability, **options)


@pytest.mark.parametrize(
    ("capability", "packages", "options", "message"),
    [
        (HOPPER, ("flash_attn",), {}, "block_size is 16; it needs a multiple of 256: set block_size=256"),
        (TURING, ("flash_attn",), {"block_size": 256, "dtype": "float16"}, r"8\.0, and this one is of 7\.5"),
        (HOPPER, ("flash_attn",), {"block_size": 256, "kv_cache_dtype": "int8"}, "set kv_cache_dtype=auto, or use"),
    ],
)
def test_a_block_size_or_gpu_that_the_package_can_not_take(
    resolved: Callable[..., EffectiveConfig],
    capability: tuple[int, int],
    packages: tuple[str, ...],
    options: dict[str, Any],
    message: str,
) -> None:
    """Oracle: the rules of flash-attn 2."""
    with pytest.raises(ConfigError, match=f"attention_backend is flash_attn: .*{message}"):
        resolved(capability, packages, attention_backend="flash_attn", **options)


@pytest.mark.parametrize(
    ("capability", "packages", "options", "backend"),
    [
        (HOPPER, ("triton", "flash_attn"), {}, "triton"),
        (HOPPER, ("triton", "flash_attn"), {"block_size": 256}, "triton"),
        (HOPPER, ("triton", "flash_attn_interface"), {}, "triton"),
        (HOPPER, ("flash_attn",), {"block_size": 256}, "flash_attn"),
        (TURING, ("triton", "flash_attn"), {"block_size": 256, "dtype": "float16"}, "torch"),
        (ADA, ("triton",), {"kv_cache_dtype": "fp8"}, "triton"),
        (AMPERE, ("triton",), {"kv_cache_dtype": "int8"}, "triton"),
    ],
)
def test_auto_takes_what_works(
    resolved: Callable[..., EffectiveConfig],
    capability: tuple[int, int],
    packages: tuple[str, ...],
    options: dict[str, Any],
    backend: str,
) -> None:
    """Oracle: the table of backends in docs/design/attention.md."""
    assert resolved(capability, packages, **options).config.attention_backend == backend
