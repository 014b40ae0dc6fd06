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
    """Return the first kernel of ``library`` with a wrong result, as a sentence, or None.  Takes 0.05 s on one core.

    One thread computes: on a busy machine several wait for each other at the end of every loop, for seconds in all.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype in DTYPE_CODES:
            if found := _disagreement(_AllChecks(library, dtype).all(), dtype):
                return found
    finally:
        torch.set_num_threads(threads)
    return _disagreement(_AllChecks(library, torch.float32).shared_by_threads(), torch.float32)


def _disagreement(checks: Iterator[Check], dtype: torch.dtype) -> str | None:
    tolerance = 16 * torch.finfo(dtype).eps
    for name, found, expected in checks:
        if not torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance):
            return f"{name} in {dtype} differs from PyTorch"
    return None


class _AllChecks(RowChecks, WeightChecks, AttentionChecks):
    def all(self) -> Iterator[Check]:
        """Yield every check.  New ones come last, so that the others draw the same numbers as before."""
        for checks in (
            self.rows, self.recurrent, self.heads, self.linear, self.quantised, self.experts, self.attention,
            self.latents, self.chosen_keys, self.block_codes, self.adapters, self.int8_rows, self.index,
            self.steps, self.blocks, self.kimi_delta,
        ):  # fmt: skip
            yield from checks()

    def shared_by_threads(self) -> Iterator[Check]:
        """Yield one check of each way in which threads share work: loops of all schedules, one for all, waits."""
        for checks in (self.attention, self.experts):
            yield from checks()
