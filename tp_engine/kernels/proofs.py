"""Kernels that must be proven on a GPU: before an operation takes one there, it is compared with its twin, and timed.

::

    error of a result = rms(kernel - exact)     exact: the twin in float64
    bound             = 2 * rms(twin - exact) + 2**-20 * rms(exact)

A kernel that does not run, is wrong by this rule or slower than its twin is named in the log, and the twin is taken.
One product in tf32 instead of float32 has 500 times the error allowed.  A proof takes some hundredths of a second on a
GPU, and the time to compile, which a step would need anyway.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from tp_engine.kernels.gated_delta_net import DeltaRule
from tp_engine.kernels.mamba2 import Mamba2Rule
from tp_engine.kernels.recurrent import Chunk, LayerStates
from tp_engine.kernels.short_conv import ShortConvRule
from tp_engine.model_config.kv_layout import StateKind

Implementation: TypeAlias = Callable[..., Any]
Results: TypeAlias = Sequence[torch.Tensor]
"""What an implementation returns, and what it has changed."""

Trial: TypeAlias = Callable[[Implementation, torch.dtype], Results]
"""Runs an implementation on inputs of a type, which are the same each time."""

_ROUNDING = 2.0**-20
_TIMED_RUNS = 3
_NUM_SLOTS = 4
# After a state and without one; shorter than a tile, as long, and longer; and one whose state is not kept.
_CHUNKS = [Chunk(0, 1, 1, False), Chunk(1, 200, 0, False), Chunk(201, 64, 2, True), Chunk(265, 70, None, False)]
_NUM_TOKENS = 335


def why_not(candidate: Implementation, twin: Implementation, trial: Trial, clock: Callable[[], float]) -> str | None:
    """Why ``candidate`` is not taken on the device of ``trial``; None if it is right and not slower than ``twin``.
    ``clock`` gives seconds, after all launched work."""
    try:
        found = trial(candidate, torch.float32)
        plain, exact = trial(twin, torch.float32), trial(twin, torch.float64)
        for one, other, wide in zip(found, plain, exact, strict=True):
            error, bound = _rms(one.double() - wide), 2 * _rms(other.double() - wide) + _ROUNDING * _rms(wide)
            if not error <= bound:  # or if it is NaN
                return f"its error is {error:.3g}, where {bound:.3g} is allowed"
        of_candidate, of_twin = (_seconds(one, trial, clock) for one in (candidate, twin))
    except Exception as error:  # whatever a compiler or a driver says
        return f"{type(error).__name__}: {error}"
    if of_candidate > of_twin:
        return f"it takes {of_candidate * 1e3:.2f} ms, and PyTorch {of_twin * 1e3:.2f} ms"
    return None


def _seconds(one: Implementation, trial: Trial, clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(_TIMED_RUNS):
        begun = clock()
        trial(one, torch.float32)
        taken.append(clock() - begun)
    return min(taken)


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt()) if values.numel() else 0.0


def gpu_clock() -> float:
    """Seconds, after all launched work of the current GPU."""
    torch.cuda.synchronize()
    return time.perf_counter()


class _Numbers:
    """Random numbers, the same each time, on ``device`` in ``dtype``."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator(device="cpu").manual_seed(0)

    def __call__(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")
        return drawn.to(self._device, self._dtype)

    def states(self, kind: StateKind) -> LayerStates:
        """States for the slots of ``_CHUNKS``, and one more."""
        matrices = (_NUM_SLOTS, kind.num_value_heads, kind.key_dim, kind.value_dim)
        return LayerStates(self(_NUM_SLOTS, kind.taps - 1, kind.num_channels), self(*matrices))


def delta_trial(device: torch.device) -> Trial:
    """``gated_delta_net_prefill``: slow to fast decays, and repeated tokens, whose keys are alike."""
    kind = StateKind(num_key_heads=2, num_value_heads=4, key_dim=128, value_dim=128, taps=4)

    def run(one: Implementation, dtype: torch.dtype) -> Results:
        draw = _Numbers(device, dtype)
        decay = -torch.logspace(-4, 1, 4, dtype=torch.float64, device="cpu").to(device, dtype)
        rule = DeltaRule(kind, draw(4, kind.num_channels), decay, draw(4), draw(128), 1e-6)
        states, mixed, gates = draw.states(kind), draw(_NUM_TOKENS, kind.num_channels + 512), 3 * draw(_NUM_TOKENS, 8)
        mixed[20:150] = mixed[20]
        return [one(mixed, gates, rule, states, _CHUNKS), *states]

    return run


def mamba2_trial(device: torch.device) -> Trial:
    """``mamba2_prefill``."""
    kind = StateKind(num_key_heads=2, num_value_heads=4, key_dim=128, value_dim=64, taps=4)

    def run(one: Implementation, dtype: torch.dtype) -> Results:
        draw = _Numbers(device, dtype)
        decay = -torch.logspace(-4, 1, 4, dtype=torch.float64, device="cpu").to(device, dtype)
        rule = Mamba2Rule(kind, draw(4, kind.num_channels), draw(kind.num_channels), decay, draw(4), draw(4))
        states, mixed = draw.states(kind), draw(_NUM_TOKENS, kind.num_channels + 4 * 65)
        return [one(mixed, rule, states, _CHUNKS), *states]

    return run


def short_conv_trial(device: torch.device) -> Trial:
    """``short_conv_prefill``."""
    kind = StateKind(num_key_heads=1, num_value_heads=1, key_dim=0, value_dim=300, taps=3)

    def run(one: Implementation, dtype: torch.dtype) -> Results:
        draw = _Numbers(device, dtype)
        states = draw.states(kind)
        return [one(draw(_NUM_TOKENS, 900), ShortConvRule(kind, draw(3, 300)), states, _CHUNKS), *states]

    return run


TRIALS: dict[str, Callable[[torch.device], Trial]] = {
    "gated_delta_net_prefill": delta_trial,
    "mamba2_prefill": mamba2_trial,
    "short_conv_prefill": short_conv_trial,
}
"""By operation; these have a kernel that no GPU of ours has run yet."""
