"""The tables that the sampling kernels read for every row of the batch; without Triton.

::

    floats  (rows, NUM_FLOATS) float32   temperature | top_p | log min_p | repetition | frequency | presence penalty
    top_k   (rows,) int32                the vocabulary's size for all tokens
    seeds   (rows,) int64                the bits of the unsigned seed
    arrivals (places,) int32             programs of each row of a step that have arrived; zeros between launches
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NUM_FLOATS = 6
_MAX_PADDING = 512  # the most places that a padded step has beyond the number of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingTables:
    """Parameters by row, on the device, at addresses that never change."""

    floats: torch.Tensor
    top_k: torch.Tensor
    seeds: torch.Tensor
    arrivals: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.floats.nbytes + self.top_k.nbytes + self.seeds.nbytes + self.arrivals.nbytes

    @staticmethod
    def empty(num_rows: int, device: torch.device) -> SamplingTables:
        """Tables of ``num_rows`` greedy rows."""
        return SamplingTables(
            floats=torch.zeros((num_rows, NUM_FLOATS), dtype=torch.float32, device=device),
            top_k=torch.zeros(num_rows, dtype=torch.int32, device=device),
            seeds=torch.zeros(num_rows, dtype=torch.int64, device=device),
            arrivals=torch.zeros(num_rows + _MAX_PADDING, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTables:
    """What penalties need: ``output_counts`` (rows, width) int32, and ``in_prompt`` (rows, width) bool."""

    output_counts: torch.Tensor
    in_prompt: torch.Tensor
