"""The LM head for ``bench_few_rows``: Triton's choice of tokens beside the library's product and ``best_tokens``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch

from tp_engine.kernels.linear.few_rows_linear_triton import Tiles
from tp_engine.plan import RowSampling
from tp_engine.ranks.collectives import SingleRank
from tp_engine.sampling.device_sampler import DeviceSampler, StepKind
from tp_engine.sampling.state import SamplingState

_TOKENS = np.arange(4, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A head of ``num_out`` tokens, whose rows all have ``temperature``."""

    table: ClassVar[str] = "HEAD_MOST_ROWS"
    name: str
    num_in: int
    num_out: int
    temperature: float

    @property
    def num_bytes(self) -> int:
        """Of its weight in bfloat16."""
        return 2 * self.num_in * self.num_out

    def takes(self, tiles: Tiles) -> bool:
        """Whether ``tiles`` are a candidate: columns are not split."""
        return tiles.most_splits == 1

    def tensors(self, num_rows: int, device: str = "cuda") -> dict[str, Any]:
        """One set of what the kernels read and write."""
        state = SamplingState(
            max_num_seqs=num_rows, vocab_size=self.num_out, device=torch.device(device), has_tables=True
        )
        for row in range(num_rows):
            state.admit(row, RowSampling(temperature=self.temperature, seed=row), _TOKENS, len(_TOKENS))
        weight = torch.randn(self.num_out, self.num_in, device=device).mul_(self.num_in**-0.5)
        return {
            "hidden": torch.randn(num_rows, self.num_in, device=device).to(torch.bfloat16),
            "weight": weight.to(torch.bfloat16),
            "rows": torch.arange(num_rows, dtype=torch.int32, device=device),
            "positions": torch.full((num_rows,), 3, device=device),
            "sampler": DeviceSampler(state, SingleRank()),
        }

    def library(self, one: dict[str, Any]) -> Callable[[], torch.Tensor]:
        """The product, which writes the logits, and the kernel that reads them."""
        sampler, place = one["sampler"], (one["rows"], one["positions"])

        def run() -> torch.Tensor:
            tokens: torch.Tensor = sampler.sample(
                StepKind(), torch.nn.functional.linear(one["hidden"], one["weight"]), *place
            )
            return tokens

        return run

    def triton(self, one: dict[str, Any], tiles: Tiles | None = None) -> Callable[[], torch.Tensor]:
        """The product that chooses, with ``tiles`` instead of those of ``TILES``."""
        from tp_engine.kernels.linear.head_choice_triton import head_choice_triton, head_sizes

        weight, tables = one["weight"], one["sampler"]._tables
        sizes = head_sizes(weight, len(one["hidden"]), tiles)

        def run() -> torch.Tensor:
            best = head_choice_triton(
                one["hidden"], weight, one["rows"], one["positions"], tables,
                first_id=0, num_ids=self.num_out, sizes=sizes,
            )  # fmt: skip
            return best.token_ids

        return run


def heads(num_in: int, num_out: int) -> list[Head]:
    """Greedy rows, and rows that draw."""
    greedy = Head(name="head, greedy", num_in=num_in, num_out=num_out, temperature=0.0)
    return [greedy, replace(greedy, name="head, temperature", temperature=0.8)]
