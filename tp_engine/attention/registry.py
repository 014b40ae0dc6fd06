"""Which attention backend runs: ``auto`` is resolved and a named one is checked before any device is touched.

``PREFILL:DECODE`` names two backends, one for prompt chunks and one for decodes, that share the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.attention import flash_attn, flashinfer, native_backend, torch_varlen, triton_backend
from tp_engine.attention.base import AttentionBackend
from tp_engine.attention.flashinfer import FlashInferBackend
from tp_engine.attention.native_backend import NativeBackend
from tp_engine.attention.needs import AttentionNeeds
from tp_engine.attention.pair_backend import PairBackend
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.attention.torch_varlen import TorchVarlenBackend
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.errors import ConfigError
from tp_engine.log import get_logger

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Kind:
    """What keeps a backend from being used, with the remedy, or None; and how to make one."""

    why_not: Callable[[AttentionNeeds], str | None]
    make: Callable[[AttentionNeeds], AttentionBackend]


# In the order in which ``auto`` tries them: on GPUs our own kernels, which this project's tests run, come before those
# of packages; torch runs everywhere and is last.
_KINDS: dict[str, _Kind] = {
    "triton": _Kind(triton_backend.why_not, lambda needs: TritonBackend()),
    "flash_attn": _Kind(flash_attn.why_not, flash_attn.make_backend),
    "flashinfer": _Kind(flashinfer.why_not, lambda needs: FlashInferBackend()),
    "torch_varlen": _Kind(torch_varlen.why_not, lambda needs: TorchVarlenBackend()),
    "native": _Kind(native_backend.why_not, lambda needs: NativeBackend()),
    "torch": _Kind(lambda needs: None, lambda needs: TorchBackend()),
}


def check_backend(name: str, needs: AttentionNeeds) -> str:
    """The name of the backend to use: ``name``, or for ``auto`` the first usable one in its order.

    Raises ``ConfigError`` where a named backend, or one of a pair, can not be used.
    """
    if name == "auto":
        return _choose(needs)
    for part in name.split(":", 1):
        if part not in _KINDS:
            raise ConfigError(
                f"attention_backend is {name!r}; choose auto or one of {', '.join(_KINDS)}, or two of them as "
                f"PREFILL:DECODE"
            )
        obstacle = _KINDS[part].why_not(needs)
        if obstacle is not None:
            raise ConfigError(f"attention_backend is {part}: {obstacle}")
    return name


def obstacles(needs: AttentionNeeds) -> dict[str, str | None]:
    """Every backend in the order in which ``auto`` tries them: what keeps it from being used, or None."""
    return {name: kind.why_not(needs) for name, kind in _KINDS.items()}


def _choose(needs: AttentionNeeds) -> str:
    """The first usable backend; the log says why those before it are not, and which later ones are usable if named."""
    found = obstacles(needs)
    chosen = next(name for name, obstacle in found.items() if obstacle is None)  # torch, if no other
    before = list(found)[: list(found).index(chosen)]
    reason = "; ".join(f"{name}: {found[name]}" for name in before) or "the first choice, and all its rules hold"
    others = [name for name, obstacle in found.items() if obstacle is None and name not in (chosen, "torch")]
    if others:
        reason += f"; usable too, but only where attention_backend names it: {', '.join(others)}"
    _logger.info("attention backend: %s (%s)", chosen, reason)
    return chosen


def select_backend(name: str, needs: AttentionNeeds) -> AttentionBackend:
    """A new backend of the kind that ``check_backend`` answers for the same arguments."""
    prefill, _, decode = check_backend(name, needs).partition(":")
    if not decode or decode == prefill:
        return _KINDS[prefill].make(needs)
    return PairBackend(_KINDS[prefill].make(needs), _KINDS[decode].make(needs))
