"""Draw rows with top_k from the candidates of all ranks: by PyTorch in about 100 launches, or by a kernel in one.

The kernel is a candidate (``kernels/candidates.py``): on a GPU it is used once it has drawn the same tokens as PyTorch
there.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch

from tp_engine.kernels.candidates import (
    MANY,
    Candidate,
    Choice,
    Choices,
    Inputs,
    Operation,
    Run,
    Shape,
    chosen,
    why_no_triton,
)
from tp_engine.kernels.sampling.tables import NUM_FLOATS, SamplingTables
from tp_engine.sampling import vocab_parallel
from tp_engine.sampling.groups import RowGroup, SamplingMethod
from tp_engine.sampling.noise import device_noise_keys
from tp_engine.sampling.ranking import LOWEST_KEY, top_keys

Draw: TypeAlias = Callable[..., torch.Tensor]
"""Called as ``draw_by_torch``."""

NAME = "draw_of_shares"
_VOCAB_OF_RANK = 500


def draw_by_torch(
    token_ids: torch.Tensor,
    shares: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    tables: SamplingTables,
    vocab_size: int,
) -> torch.Tensor:
    """Write the draws of rows with top_k to ``token_ids`` (n,) int32, and return it; from the ranks' ``shares``
    (world size, n, c) int64, their rank keys.  Other arguments as for ``draw_of_shares_triton``."""
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
    return token_ids.copy_(torch.where(is_ranked, drawn, token_ids))


def shape_of(world_size: int, width: int) -> Shape:
    """The shape of draws from ``width`` keys of each of ``world_size`` ranks."""
    return {"ranks": world_size, "width": width}


def choose_draw(device: torch.device, world_size: int, width: int, choices: Choices) -> Draw:
    """The draw that ``choices`` have for ``device``, from ``width`` keys of each of ``world_size`` ranks."""
    return chosen(NAME, shape_of(world_size, width), device, choices)


def _build(draw: Callable[[], Draw]) -> Callable[[None, Shape], Run]:
    """A candidate of ``draw``."""
    return lambda weights, shape: draw()


def _kernel() -> Draw:
    from tp_engine.kernels.sampling.ranked_ranks_triton import draw_of_shares_triton

    return draw_of_shares_triton


def _default(shape: Shape, device: torch.device) -> Choice:
    """Triton's interpreter, in tests, takes the kernel."""
    return ((MANY, "torch" if device.type == "cuda" else "triton"),)


def _inputs(shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    """Peaked and flat logits, with ties and masked tokens, all filters, padding, greedy rows, others without top_k."""
    world_size, width = int(shape["ranks"]), int(shape["width"])
    count, vocab_size = num_rows, world_size * _VOCAB_OF_RANK

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(count, generator=generator, dtype=torch.float32, device="cpu") * (high - low) + low

    # A single row is one that draws, by one filter.
    every = torch.arange(1, count + 1, dtype=torch.int64, device="cpu")
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
    rows = torch.where(every % 11 == 10, -1, every - 1).to(device, torch.int32)
    token_ids = torch.full((count,), 7, dtype=torch.int32, device=device)
    positions = torch.arange(count, device=device, dtype=torch.int64)
    shares = _shares_of(logits.to(device), top_k.to(device), world_size, width)
    return token_ids, shares, rows, positions, tables, vocab_size


def _shares_of(logits: torch.Tensor, top_k: torch.Tensor, world_size: int, width: int) -> torch.Tensor:
    """The ranks' keys of ``logits`` (n, vocabulary), in the order of an exchange."""
    beyond = torch.arange(width, device=logits.device, dtype=torch.int64) >= top_k[:, None]
    shares = torch.stack(
        [
            top_keys(part, width, rank * _VOCAB_OF_RANK).masked_fill_(beyond, LOWEST_KEY)
            for rank, part in enumerate(logits.split(_VOCAB_OF_RANK, dim=1))
        ]
    )
    by_id = shares.masked_fill(shares == LOWEST_KEY, torch.iinfo(torch.int64).max)
    order = torch.where(shares == LOWEST_KEY, logits.shape[1], (-by_id) & 0xFFFFFFFF).argsort(-1)
    return shares.gather(-1, order)


def _twin(weights: None, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = draw_by_torch(*inputs)
    return drawn, drawn


OPERATION = Operation(
    candidates=(
        Candidate(name="torch", build=_build(lambda: draw_by_torch)),
        Candidate(name="triton", build=_build(_kernel), why_not=why_no_triton),
    ),
    default=_default,
    inputs=_inputs,
    twin=_twin,
    num_bytes=lambda shape: 8 * int(shape["ranks"]) * int(shape["width"]),
    sources=("sampling/*.py", "kernels/sampling/*.py"),
    rows_of=None,
    least_rows=1,
    most_rows=256,
    comes_first=True,
)
