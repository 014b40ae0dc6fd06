"""Which attention backend is chosen, and which are refused."""

from __future__ import annotations

import logging
import sys
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch

from tests import fake_attention_packages as fakes
from tp_engine.attention import flash_attn, native_backend, triton_backend
from tp_engine.attention.base import AttentionNeeds
from tp_engine.attention.registry import check_backend, select_backend
from tp_engine.config import ATTENTION_BACKENDS, EngineConfig
from tp_engine.errors import ConfigError

ON_CPU: dict[str, Any] = {"device_type": "cpu", "dtype": torch.float32, "block_size": 16, "head_dims": (64,)}
FP8 = torch.float8_e4m3fn
ON_CUDA: dict[str, Any] = {"device_type": "cuda", "dtype": torch.bfloat16, "block_size": 256, "head_dims": (128,)}


def needs(facts: dict[str, Any]) -> AttentionNeeds:
    """What a layer needs; the cache has the type of the queries unless ``facts`` say otherwise."""
    return AttentionNeeds(**({"kv_cache_dtype": facts["dtype"]} | facts))


def install(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Make these packages appear installed; ``compiler`` stands for one of C."""

    def find_spec(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name in packages else None

    monkeypatch.setattr(flash_attn, "find_spec", find_spec)
    monkeypatch.setattr(triton_backend, "has_triton", lambda: "triton" in packages)
    monkeypatch.setattr(native_backend, "native_library", lambda: object() if "compiler" in packages else None)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every package but flash-attn 3 is installed."""
    install(monkeypatch, "flash_attn", "triton", "compiler")


@pytest.fixture
def none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package is installed."""
    install(monkeypatch)


@pytest.mark.usefixtures("all_installed")
@pytest.mark.parametrize(
    ("facts", "chosen"),
    [
        (ON_CPU, "native"),
        (ON_CPU | {"dtype": torch.float16, "kv_cache_dtype": torch.bfloat16}, "native"),
        (ON_CPU | {"dtype": torch.float64}, "torch"),
        (ON_CPU | {"head_dims": (576,)}, "torch"),
        (ON_CUDA, "triton"),
        (ON_CUDA | {"block_size": 16}, "triton"),
        (ON_CUDA | {"dtype": torch.float32}, "triton"),
        (ON_CUDA | {"kv_cache_dtype": torch.float16}, "triton"),
        (ON_CUDA | {"kv_cache_dtype": torch.int8, "capability": (8, 0)}, "triton"),
        (ON_CUDA | {"kv_cache_dtype": torch.float8_e4m3fn, "capability": (8, 0)}, "torch"),
        (ON_CUDA | {"kv_cache_dtype": torch.float8_e4m3fn, "capability": (8, 9)}, "triton"),
        (ON_CPU | {"kv_cache_dtype": torch.int8}, "native"),
        (ON_CPU | {"kv_cache_dtype": FP8, "head_dims": (62,)}, "torch"),
        (ON_CUDA | {"head_dims": (576,)}, "torch"),
        (ON_CUDA | {"head_dims": (128, 576)}, "torch"),
        (ON_CUDA | {"head_dims": (256, 512)}, "triton"),
        (ON_CPU | {"head_dims": (256, 512)}, "native"),
        (ON_CUDA | {"head_dims": (256, 128)}, "triton"),
        (ON_CUDA | {"has_sinks": True}, "triton"),
        (ON_CPU | {"has_sinks": True}, "native"),
    ],
)
def test_auto(facts: dict[str, Any], chosen: str, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: triton where its rules hold on CUDA, native on CPUs, otherwise torch.  The log gives the reason."""
    with caplog.at_level(logging.DEBUG, logger="tp_engine"):
        assert check_backend("auto", needs(facts)) == chosen
    assert f"attention backend: {chosen} (" in caplog.text


@pytest.mark.parametrize(
    ("packages", "order"),
    [
        (("flash_attn", "triton"), ["triton", "flash_attn"]),
        (("flash_attn",), ["flash_attn"]),
        (("triton",), ["triton"]),
        ((), ["torch"]),
    ],
)
def test_order_of_auto(
    packages: tuple[str, ...], order: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the order in the documents; the log names the chosen backend, and the others as available by option."""
    install(monkeypatch, *packages)
    with caplog.at_level(logging.DEBUG, logger="tp_engine"):
        assert check_backend("auto", needs(ON_CUDA)) == order[0]
    others = ", ".join(order[1:])
    assert f"attention backend: {order[0]} (" in caplog.text
    assert (f"usable too, but only where attention_backend names it: {others})" in caplog.text) == bool(others)
    assert ("attention_backend names it" in caplog.text) == bool(others)


@pytest.mark.usefixtures("none_installed")
def test_auto_without_packages() -> None:
    """Oracle: torch runs everywhere."""
    assert check_backend("auto", needs(ON_CUDA)) == "torch"
    assert check_backend("auto", needs(ON_CPU)) == "torch"


@pytest.mark.usefixtures("none_installed")
@pytest.mark.parametrize("name", ["triton", "flash_attn"])
def test_named_backend_that_is_not_installed(name: str) -> None:
    """Oracle: a message with the remedy."""
    with pytest.raises(ConfigError, match=f"attention_backend is {name}: .* not installed; `pip install"):
        check_backend(name, needs(ON_CUDA))


@pytest.mark.usefixtures("none_installed")
def test_native_backend_without_a_compiler() -> None:
    """Oracle: a message with the remedy."""
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
        ("native", ON_CPU | {"head_dims": (576,)}, "head_dim is 576"),
        ("native", ON_CPU | {"head_dims": (64, 33)}, "head_dim is 33"),
        ("flash_attn", ON_CUDA | {"has_sinks": True}, "has attention sinks.*use attention_backend=torch"),
        ("flash_attn", ON_CPU, "needs a CUDA device"),
        ("triton", ON_CPU, "needs a CUDA device"),
        ("flash_attn", ON_CUDA | {"block_size": 16}, "block_size is 16; .*set block_size=256"),
        ("flash_attn", ON_CUDA | {"dtype": torch.float32}, "not torch.float32; set dtype"),
        ("flash_attn", ON_CUDA | {"head_dims": (100,)}, "head_dim is 100"),
        ("flash_attn", ON_CUDA | {"kv_cache_dtype": torch.float16}, "both equal"),
        ("flash_attn", ON_CUDA | {"kv_cache_dtype": torch.int8}, "set kv_cache_dtype=auto, or use"),
        (
            "native",
            ON_CPU | {"kv_cache_dtype": torch.int8, "head_dims": (62,)},
            "head_dim is 62; it takes multiples of 4 up to 512: use attention_backend=torch",
        ),
        ("triton", ON_CUDA | {"kv_cache_dtype": FP8, "capability": (8, 0)}, "before compute capability 8.9 .*int8"),
        ("triton", ON_CUDA | {"head_dims": (576,)}, "head_dim is 576; it takes at most 512"),
        ("xformers", ON_CUDA, "choose auto or one of"),
    ],
)
def test_named_backend_that_can_not_work(name: str, facts: dict[str, Any], message: str) -> None:
    """Oracle: the value, the rule and the remedy, before any device is touched."""
    with pytest.raises(ConfigError, match=message):
        check_backend(name, needs(facts))


@pytest.mark.usefixtures("all_installed")
def test_select(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the backend's own name; the code knows every name that the configuration offers."""
    monkeypatch.setitem(sys.modules, "flash_attn", fakes)
    assert select_backend("torch", needs(ON_CPU)).name == "torch"
    for name in ("torch", "flash_attn"):
        assert select_backend(name, needs(ON_CUDA)).name == name
    for name in ATTENTION_BACKENDS:
        facts = ON_CPU if name == "native" else ON_CUDA
        assert check_backend(name, needs(facts)) in ATTENTION_BACKENDS


@pytest.mark.parametrize(
    ("packages", "capability", "version"),
    [
        (("flash_attn", "flash_attn_interface"), (9, 0), 3),
        (("flash_attn_interface",), None, 3),
        (("flash_attn", "flash_attn_interface"), (8, 0), 2),
        (("flash_attn",), (9, 0), 2),
        (("flash_attn_interface",), (10, 0), None),
    ],
)
def test_version_of_flash_attention(
    packages: tuple[str, ...], capability: tuple[int, int] | None, version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: version 3 is only for Hopper, and takes small blocks."""
    install(monkeypatch, *packages)
    small_blocks = needs(ON_CUDA | {"block_size": 16, "capability": capability})
    assert flash_attn.best_version(small_blocks) == version
    assert (flash_attn.why_not(small_blocks) is None) == (version == 3)


@pytest.mark.parametrize("name", ["xformers", "triton:torch", ""])
def test_configuration_refuses_unknown_names(name: str) -> None:
    """Oracle: the names, before anything is imported."""
    with pytest.raises(ConfigError, match=r"attention_backend is .*flash_attn"):
        EngineConfig(attention_backend=name)
