"""The cases of the modules ``kernel_cases_*`` in C, which Triton's kernels run through in the interpreter and on GPUs.

Modules whose cases take the kind as a parameter, and operations with another interface in C, have tests of their own.
"""

from __future__ import annotations

import importlib

import pytest

from tests.unit.kernels.kernel_cases_layer_ops import with_kernels_of
from tp_engine.cpu.library import native_library

# Module -> how the names of those cases begin whose operations C has too.
MODULES = {
    "block_codes": ("",),
    "delta": ("delta-",),
    "experts": ("route-", "add-gated-"),
    "heads": ("heads-",),
    "index_keys": ("choose-", "order", "scores"),
    "latents": ("maps-", "prepare-"),
    "layer_ops": ("",),
    "mamba": ("mamba-",),
    "short_conv": ("short-conv-",),
}
LEFT_OUT = {"heads": "cache_dtype"}  # C's cache has an order of its own, which test_native_kernels.py tests


@pytest.mark.skipif(native_library() is None, reason="the native kernels cannot be built here")
@pytest.mark.parametrize("module", MODULES)
def test_in_c(module: str) -> None:
    """Oracle: each case's own, mostly the PyTorch twin or float64."""
    cases = importlib.import_module(f"tests.unit.kernels.kernel_cases_{module}").CASES
    left_out = LEFT_OUT.get(module, "none")
    chosen = {name: check for name, check in cases.items() if name.startswith(MODULES[module]) and left_out not in name}
    assert len(chosen) > 5
    with with_kernels_of("native"):
        for name, check in chosen.items():
            try:
                check("cpu")
            except AssertionError as error:
                error.add_note(name)
                raise
