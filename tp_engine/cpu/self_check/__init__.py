"""Compare the compiled kernels with their PyTorch twins on small inputs, before anything depends on them."""

import ctypes
from collections.abc import Iterator

import torch

from tp_engine.cpu.layout import DTYPE_CODES
from tp_engine.cpu.self_check.attention import AttentionChecks
from tp_engine.cpu.self_check.base import Check
from tp_engine.cpu.self_check.rows import RowChecks
from tp_engine.cpu.self_check.weights import WeightChecks


def disagreement(library: ctypes.CDLL) -> str | None:
    """Return the first kernel of ``library`` with a wrong result, as a sentence, or None.  Takes 0.05 s on one core."""
    for dtype in DTYPE_CODES:
        tolerance, checks = 16 * torch.finfo(dtype).eps, _AllChecks(library, dtype)
        for name, found, expected in checks.all():
            if not torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance):
                return f"{name} in {dtype} differs from PyTorch"
    return None


class _AllChecks(RowChecks, WeightChecks, AttentionChecks):
    def all(self) -> Iterator[Check]:
        """Yield every check.  New ones come last, so that the others draw the same numbers as before."""
        for checks in (
            self.rows, self.recurrent, self.heads, self.linear, self.quantised, self.experts, self.attention,
            self.latents, self.chosen_keys, self.block_codes, self.adapters, self.int8_rows, self.index,
            self.steps, self.blocks,
        ):  # fmt: skip
            yield from checks()
