"""Whether Triton kernels can be used here, asked without importing Triton (which costs each rank 0.2 s)."""

from __future__ import annotations

from importlib.util import find_spec


def has_triton() -> bool:
    """Whether the ``triton`` package is installed."""
    return find_spec("triton") is not None
