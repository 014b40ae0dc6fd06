"""Draw rows with top_k from the candidates of all ranks: by PyTorch, some 100 launches, or by a kernel, one launch.

The kernel is a candidate: on each GPU it is compared with PyTorch once, before a step is recorded, and used if all its
tokens are the same.
"""

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch

from tp_engine.kernels.sampling.tables import NUM_FLOATS, SamplingTables
from tp_engine.sampling import vocab_parallel
from tp_engine.sampling.groups import RowGroup, SamplingMethod
from tp_engine.sampling.noise import device_noise_keys
from tp_engine.sampling.ranking import LOWEST_KEY, top_keys
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

Draw: TypeAlias = Callable[..., None]
"""Called as ``draw_by_torch``."""

_NUM_ROWS = 192
_VOCAB_OF_RANK = 500


def draw_by_torch(
    token_ids: torch.Tensor,
    shares: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: SamplingTables,
    *,
    vocab_size: int,
) -> None:
    """Write the draws of rows with top_k to ``token_ids`` (n,) int32, from the ranks' ``shares`` (world size, n, c)
    int64, keys of their largest top_k.  Other arguments as for ``draw_of_shares_triton``."""
    known = rows.clamp(min=0)
    floats = tables.floats.index_select(0, known)
    top_k = tables.top_k.index_select(0, known)[:, None].to(torch.int64)
    group = RowGroup(
        method=SamplingMethod.RANKED,
        edited=False,
        members=known,
        source=None,
        temperature=floats[:, 0:1],
        top_p=floats[:, 1:2].double(),
        log_min_p=floats[:, 2:3],
        top_k=top_k,
        largest_top_k=shares.shape[2],
        uses_min_p=True,
    )
    keys = device_noise_keys(tables.seeds.index_select(0, known), positions + 1)
    drawn = vocab_parallel.decide_ranked(shares, group, keys)
    is_ranked = (rows >= 0) & (floats[:, 0] > 0.0) & (top_k[:, 0] < vocab_size)
    token_ids.copy_(torch.where(is_ranked, drawn, token_ids))


def choose_draw(device: torch.device, world_size: int, width: int) -> Draw:
    """Return the kernel, if it draws on ``device`` as PyTorch does from ``width`` candidates of each of ``world_size``
    ranks; else ``draw_by_torch``.  Triton's interpreter, of tests, takes the kernel."""
    from tp_engine.kernels.sampling.ranked_ranks_triton import draw_of_shares_triton

    return _proven(draw_of_shares_triton, device, world_size, width) if device.type == "cuda" else draw_of_shares_triton


@cache
def _proven(candidate: Draw, device: torch.device, world_size: int, width: int) -> Draw:
    try:
        num_wrong = count_differences(candidate, device, world_size, width)
        problem = f"{num_wrong} of {_NUM_ROWS} tokens differ from PyTorch's" if num_wrong else None
    except Exception as error:  # whatever a compiler or a driver says
        problem = f"{type(error).__name__}: {error}"
    if problem is None:
        return candidate
    logger.warning("rows with top_k are drawn by PyTorch, in some 100 launches of each step; the kernel: %s", problem)
    return draw_by_torch


def count_differences(candidate: Draw, device: torch.device, world_size: int, width: int) -> int:
    """Return how many rows ``candidate`` draws otherwise than PyTorch: peaked and flat logits, with ties and masked
    tokens, all filters, padding, greedy rows and such without top_k."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    count, vocab_size = _NUM_ROWS, world_size * _VOCAB_OF_RANK

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu") * (high - low) + low

    every = torch.arange(count, dtype=torch.int64, device="cpu")
    logits = (
        torch.randn(count, vocab_size, generator=generator, dtype=torch.float32, device="cpu")
        * uniform(0.1, 8.0)[:, None]
    )
    logits[::3] = (logits[::3] * 2).round() / 2
    logits[::5, 3 * world_size :: 2] = -torch.inf
    top_k = torch.randint(1, width + 1, (count,), generator=generator, dtype=torch.int32, device="cpu")
    floats = torch.zeros(count, NUM_FLOATS, dtype=torch.float32, device="cpu")
    floats[:, 0] = torch.where(every % 8 == 7, 0.0, uniform(0.2, 2.5))
    floats[:, 1] = torch.where(every % 2 == 0, 1.0, uniform(0.01, 1.0))
    floats[:, 2] = torch.where(every % 4 < 2, -torch.inf, uniform(0.001, 0.9).log())
    tables = SamplingTables(
        floats=floats.to(device),
        top_k=torch.where(every % 16 == 15, vocab_size, top_k).to(device, torch.int32),
        seeds=torch.randint(-(2**62), 2**62, (count,), generator=generator, dtype=torch.int64, device="cpu").to(device),
        arrivals=torch.zeros(count, dtype=torch.int32, device=device),
    )
    chosen = torch.arange(width, device=device, dtype=torch.int64) >= top_k.to(device)[:, None]
    shares = torch.stack(
        [
            top_keys(part.to(device), width, rank * _VOCAB_OF_RANK).masked_fill_(chosen, LOWEST_KEY)
            for rank, part in enumerate(logits.split(_VOCAB_OF_RANK, dim=1))
        ]
    )
    by_id = shares.masked_fill(shares == LOWEST_KEY, torch.iinfo(torch.int64).max)
    order = torch.where(shares == LOWEST_KEY, vocab_size, (-by_id) & 0xFFFFFFFF).argsort(-1)
    shares = shares.gather(-1, order)
    rows = torch.where(every % 11 == 10, -1, every).to(device, torch.int32)
    positions = torch.arange(count, device=device, dtype=torch.int64)
    found, expected = (torch.full((count,), 7, dtype=torch.int32, device=device) for _ in range(2))
    candidate(found, shares, rows, positions, tables, vocab_size=vocab_size)
    draw_by_torch(expected, shares, rows, positions, tables, vocab_size=vocab_size)
    return int((found != expected).sum())
