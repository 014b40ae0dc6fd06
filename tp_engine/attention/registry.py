"""Which attention backend runs: ``auto`` is resolved, and a named one checked, before any device is touched."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.attention import flash_attn, native_backend, triton_backend, triton_mla
from tp_engine.attention.base import AttentionBackend, AttentionNeeds
from tp_engine.attention.mla import MLABackend
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.attention.triton_backend import TritonBackend
from tp_engine.attention.triton_mla import TritonMLABackend
from tp_engine.cpu import native_library, simd_width_of
from tp_engine.errors import ConfigError
from tp_engine.kernels.candidates import DEFAULTS, Choices
from tp_engine.system.log import get_logger

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Backend:
    """The rules of a backend, and how to make one.

    ``rules`` say why it cannot be used, with the remedy, None if it can.  ``takes_latents``: it reads a cache whose
    values are a part of its keys.
    """

    rules: Callable[[AttentionNeeds], str | None]
    make: Callable[[AttentionNeeds, Choices], AttentionBackend]
    takes_latents: bool = False

    def why_not(self, needs: AttentionNeeds) -> str | None:
        """Why it cannot be used, with the remedy; None if it can."""
        if needs.has_latents and not self.takes_latents:
            remedy = " or ".join(name for name, kind in _KINDS.items() if kind.takes_latents)
            return f"the model has latent attention, which it does not; use attention_backend={remedy}"
        return self.rules(needs)


# In the order in which ``auto`` tries them.  On GPUs our own kernels come before those of packages, because this
# project's tests run them; torch runs everywhere and is last.
_KINDS: dict[str, _Backend] = {
    "triton": _Backend(
        lambda needs: (triton_mla.why_not_latents if needs.has_latents else triton_backend.why_not)(needs),
        lambda needs, choices: (
            TritonMLABackend(choices)
            if needs.has_latents
            else TritonBackend(is_invariant=needs.is_invariant, choices=choices)
        ),
        takes_latents=True,
    ),
    "flash_attn": _Backend(
        flash_attn.why_not, lambda needs, _: flash_attn.FlashAttnBackend(flash_attn.best_version(needs) or 2)
    ),
    "native": _Backend(native_backend.why_not, lambda needs, _: native_backend.NativeBackend(), takes_latents=True),
    "torch": _Backend(lambda needs: None, lambda needs, _: TorchBackend(), takes_latents=True),
}


def check_backend(name: str, needs: AttentionNeeds) -> str:
    """Return the name of the backend to use: ``name``, or for ``auto`` the first usable one in its order.

    Raises ``ConfigError`` if a named backend cannot be used.
    """
    if name == "auto":
        return _choose(needs)
    if name not in _KINDS:
        raise ConfigError(f"attention_backend is {name!r}; choose auto or one of {', '.join(_KINDS)}")
    obstacle = _KINDS[name].why_not(needs)
    if obstacle is not None:
        raise ConfigError(f"attention_backend is {name}: {obstacle}")
    return name


def obstacles(needs: AttentionNeeds) -> dict[str, str | None]:
    """Each backend, in the order in which ``auto`` tries them, and why it cannot be used, None if it can."""
    return {name: kind.why_not(needs) for name, kind in _KINDS.items()}


def _choose(needs: AttentionNeeds) -> str:
    """The first usable backend; the log says why earlier ones cannot be used, and which later ones can, if named."""
    found = obstacles(needs)
    chosen = next(name for name, obstacle in found.items() if obstacle is None)  # torch, if no other
    before = list(found)[: list(found).index(chosen)]
    reason = "; ".join(f"{name}: {found[name]}" for name in before) or "the first choice, and all its rules hold"
    others = [name for name, obstacle in found.items() if obstacle is None and name not in (chosen, "torch")]
    if others:
        reason += f"; usable too, but only where attention_backend names it: {', '.join(others)}"
    is_usual = needs.device_type == "cpu" or not before
    _logger.log(logging.DEBUG if is_usual else logging.INFO, "attention backend: %s (%s)", chosen, reason)
    return chosen


def select_backend(name: str, needs: AttentionNeeds, choices: Choices = DEFAULTS) -> AttentionBackend:
    """Return a new backend of the kind that ``check_backend`` returns for the same arguments."""
    backend = _KINDS[check_backend(name, needs)].make(needs, choices)
    return MLABackend(backend, needs.index_topk) if needs.has_latents else backend


def simd_width(backend: AttentionBackend, block_size: int) -> int:
    """Tokens whose keys are side by side, as columns, in ``backend``'s blocks; 0 if keys are rows."""
    is_native = isinstance(backend, native_backend.NativeBackend)
    library = native_library() if is_native else None  # ranks on GPUs compile no C
    return 0 if library is None else simd_width_of(library, block_size)
