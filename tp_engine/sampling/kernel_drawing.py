"""A group's draw under top_k and top_p by one kernel, which needs no sort; the twin of ``filters.draw``."""

from __future__ import annotations

from functools import cache

import torch

from tp_engine.kernels.sampling_tables import SamplingTables
from tp_engine.kernels.triton_support import has_triton
from tp_engine.sampling.groups import RowGroup


@cache
def draws_by_kernel(device_type: str) -> bool:
    """Whether groups on such a device draw in this way."""
    return device_type == "cuda" and has_triton()


def draw_filtered(logits: torch.Tensor, group: RowGroup, keys: torch.Tensor) -> torch.Tensor:
    """Draw (m,) int32 from ``logits`` (m, vocab) of a group that has top_k or top_p; ``keys`` (m, 2) are for noise."""
    from tp_engine.kernels.sampling_candidates_triton import draw_filtered_triton

    num_rows = logits.shape[0]
    unused = torch.zeros_like(group.temperature)
    columns = (group.temperature, group.top_p.to(torch.float32), group.log_min_p, unused, unused, unused)
    tables = SamplingTables(
        floats=torch.cat(columns, dim=1),
        top_k=group.top_k[:, 0].to(torch.int32),
        seeds=torch.zeros(num_rows, dtype=torch.int64, device=logits.device),
    )
    tokens = torch.zeros(num_rows, dtype=torch.int32, device=logits.device)
    rows = torch.arange(num_rows, device=logits.device)
    draw_filtered_triton(logits, rows, None, tables, tokens, noise_keys=keys.contiguous())
    return tokens
