"""Which attention backend runs: ``auto`` is resolved and a named one is checked before any device is touched."""

from __future__ import annotations

from collections.abc import Callable

from tp_engine.attention import flash_attn, native_backend, triton_backend
from tp_engine.attention.base import AttentionBackend
from tp_engine.attention.flash_attn import FlashAttnBackend
from tp_engine.attention.native_backend import NativeBackend
from tp_engine.attention.needs import AttentionNeeds
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.errors import ConfigError
from tp_engine.log import get_logger

_logger = get_logger(__name__)

# In the order in which ``auto`` tries them; torch runs everywhere and is last.
_WHY_NOT: dict[str, Callable[[AttentionNeeds], str | None]] = {
    "flash_attn": flash_attn.why_not,
    "triton": triton_backend.why_not,
    "native": native_backend.why_not,
    "torch": lambda needs: None,
}
_BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "flash_attn": FlashAttnBackend,
    "triton": TritonBackend,
    "native": NativeBackend,
    "torch": TorchBackend,
}


def check_backend(name: str, needs: AttentionNeeds) -> str:
    """The name of the backend to use: ``name``, or for ``auto`` the fastest usable one.

    Raises ``ConfigError`` where a named backend can not be used.
    """
    if name == "auto":
        return _choose(needs)
    if name not in _WHY_NOT:
        raise ConfigError(f"attention_backend is {name!r}; choose auto or one of {', '.join(_WHY_NOT)}")
    obstacle = _WHY_NOT[name](needs)
    if obstacle is not None:
        raise ConfigError(f"attention_backend is {name}: {obstacle}")
    return name


def _choose(needs: AttentionNeeds) -> str:
    """The first usable backend; says why the faster ones are not."""
    obstacles: list[str] = []
    for name, why_not in _WHY_NOT.items():
        obstacle = why_not(needs)
        if obstacle is None:
            reason = "; ".join(obstacles) or "the fastest, and all its rules hold"
            _logger.info("attention backend: %s (%s)", name, reason)
            return name
        obstacles.append(f"{name}: {obstacle}")
    raise AssertionError("the torch backend is always usable")


def select_backend(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """A new backend of the kind that ``check_backend`` answers for the same arguments."""
    return _BACKENDS[check_backend(name, needs)]()
