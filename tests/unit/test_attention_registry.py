"""Which attention backend is chosen, and what is refused."""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from tests import fake_flash_attn
from tp_engine.attention import flash_attn, native_backend, triton_backend
from tp_engine.attention.needs import AttentionNeeds
from tp_engine.attention.registry import check_backend, select_backend
from tp_engine.config import ATTENTION_BACKENDS
from tp_engine.errors import ConfigError

ON_CPU: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float32, "block_size": 16, "head_dim": 64}
ON_CUDA: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16, "block_size": 256, "head_dim": 128}


def needs(facts: dict[str, Any]) -> AttentionNeeds:
    """The cache has the type of the queries unless ``facts`` say otherwise."""
    return AttentionNeeds(**({"kv_cache_dtype": facts["dtype"]} | facts))


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with both packages and a compiler."""
    monkeypatch.setattr(flash_attn, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(triton_backend, "has_triton", lambda: True)
    monkeypatch.setattr(native_backend, "native_library", lambda: object())


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with nothing."""
    monkeypatch.setattr(flash_attn, "find_spec", lambda name: None)
    monkeypatch.setattr(triton_backend, "has_triton", lambda: False)
    monkeypatch.setattr(native_backend, "native_library", lambda: None)


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        (ON_CPU, "native"),
        (ON_CPU | {"dtype": torch.float16, "kv_cache_dtype": torch.bfloat16}, "native"),
        (ON_CPU | {"dtype": torch.float64}, "torch"),
        (ON_CPU | {"head_dim": 320}, "torch"),
        (ON_CUDA, "flash_attn"),
        (ON_CUDA | {"block_size": 16}, "triton"),
        (ON_CUDA | {"dtype": torch.float32}, "triton"),
        (ON_CUDA | {"kv_cache_dtype": torch.float16}, "triton"),
        (ON_CUDA | {"head_dim": 512}, "torch"),
    ],
)
def test_auto(facts: dict[str, Any], chosen: str, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: flash_attn where its rules hold, then triton on CUDA; native on CPUs; then torch.  The log says why."""
    with caplog.at_level(logging.INFO, logger="tp_engine"):
        assert check_backend("auto", needs(facts)) == chosen
    assert f"attention backend: {chosen} (" in caplog.text


@pytest.mark.usefixtures("none_installed")
def test_auto_without_packages() -> None:
    """Oracle: torch runs everywhere."""
    assert check_backend("auto", needs(ON_CUDA)) == "torch"
    assert check_backend("auto", needs(ON_CPU)) == "torch"


@pytest.mark.usefixtures("none_installed")
@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_named_backend_that_is_not_installed(name: str) -> None:
    """Oracle: a clear message with the remedy."""
    with pytest.raises(ConfigError, match=f"attention_backend is {name}: .* not installed; `pip install"):
        check_backend(name, needs(ON_CUDA))


@pytest.mark.usefixtures("none_installed")
def test_native_backend_without_a_compiler() -> None:
    """Oracle: a clear message with the remedy."""
    with pytest.raises(
        ConfigError, match=r"attention_backend is native: .* not available here .*; use attention_backend"
    ):
        check_backend("native", needs(ON_CPU))


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("native", ON_CUDA, "runs on CPUs, not cuda"),
        ("native", ON_CPU | {"dtype": torch.float64}, "dtype is torch.float64"),
        ("native", ON_CPU | {"head_dim": 320}, "head_dim is 320"),
        ("flash_attn", ON_CPU, "needs a CUDA device"),
        ("triton", ON_CPU, "needs a CUDA device"),
        ("flash_attn", ON_CUDA | {"block_size": 16}, "block_size is 16; .*set block_size=256"),
        ("flash_attn", ON_CUDA | {"dtype": torch.float32}, "not torch.float32; set dtype"),
        ("flash_attn", ON_CUDA | {"head_dim": 100}, "head_dim is 100"),
        ("flash_attn", ON_CUDA | {"kv_cache_dtype": torch.float16}, "both equal"),
        ("xformers", ON_CUDA, "choose auto or one of"),
    ],
)
def test_named_backend_that_can_not_work(name: str, facts: dict[str, Any], message: str) -> None:
    """Oracle: the value, the rule and the remedy, before any device is touched."""
    with pytest.raises(ConfigError, match=message):
        check_backend(name, needs(facts))


@pytest.mark.usefixtures("all_installed")
def test_select(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the backend's own name; every name that the configuration offers is known."""
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attn)
    assert select_backend("torch", needs(ON_CPU)).name == "torch"
    assert select_backend("torch", needs(ON_CUDA)).name == "torch"
    assert select_backend("flash_attn", needs(ON_CUDA)).name == "flash_attn"
    for name in ATTENTION_BACKENDS:
        facts = ON_CPU if name == "native" else ON_CUDA
        assert check_backend(name, needs(facts)) in ATTENTION_BACKENDS
