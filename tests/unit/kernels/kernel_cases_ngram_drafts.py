"""Prompt lookup by Triton: interpreted (``main``), on CUDA (``CASES``), and the engine's launches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.unit.kernels.kernel_harness import AGREEMENT
from tp_engine.kernels.ops import Kind, has_triton, implementation
from tp_engine.sched.guesses.guesses import NgramSource

NO_SEQUENCE: Any = SimpleNamespace()  # the source reads its tokens only


def check(device: str, kind: Kind, vocab_size: int, width: int, shortest: int, longest: int, count: int) -> None:
    """Texts of random tokens and lengths, in some of the rows of a wider table.  Oracle: rank 0's ``NgramSource``."""
    rng = np.random.default_rng(vocab_size + width)
    tokens = rng.integers(0, vocab_size, (9, width + 3)).astype(np.int32)
    rows = rng.permutation(9)[:7]
    lengths = rng.integers(1, width + 1, 7).astype(np.int32)
    lengths[:4] = (1, 2, width, width - 1)
    tokens[rows[2], width // 2 : width] = tokens[rows[2], : width - width // 2]  # the longest match, far from the end
    tokens[rows[3]] = 1  # every place matches, and the last one is the end's neighbour
    table, on_rows, on_lengths = (torch.from_numpy(array).to(device) for array in (tokens, rows, lengths))
    look_up = implementation("ngram_drafts", kind)
    drafts, matched = look_up(table[:, :width], on_rows, on_lengths, shortest, longest, count)
    assert drafts.shape == (7, count) and drafts.dtype == matched.dtype == torch.int32
    source, num_found = NgramSource(shortest, longest), 0
    for row, length, own, own_matched in zip(rows, lengths, drafts.tolist(), matched.tolist(), strict=True):
        guess = source.guess(NO_SEQUENCE, tokens[row, :length], count)
        assert own == (guess.tokens.tolist() or [-1] * count), (row, length)
        assert own_matched == guess.matched, (row, length)
        num_found += len(guess.tokens) > 0
    assert num_found >= 2


def make_cases(kind: Kind) -> dict[str, Callable[[str], None]]:
    """Name -> check on a device; texts of 2,500 tokens are longer than what the kernel looks at at once."""
    cases: dict[str, Callable[[str], None]] = {}
    for vocab_size, width in ((2, 40), (3, 300), (20, 300), (5, 2500)):
        for shortest, longest, count in ((1, 1, 1), (2, 5, 4), (3, 3, 7), (1, 40, 16)):
            cases[f"{vocab_size}-{width}-{shortest}-{longest}-{count}"] = partial(
                check, kind=kind, vocab_size=vocab_size, width=width, shortest=shortest, longest=longest, count=count
            )
    return cases


TWIN_CASES = make_cases("twin")
CASES = make_cases("triton") if has_triton() else {}


def launch_all() -> None:
    """Tables of a short and of a long context, the default matches, and another number of drafts."""
    for max_len, count in ((4096, 4), (40960, 7)):
        empty = partial(torch.empty, device="meta")
        table = empty((32, max_len + 1), dtype=torch.int32)
        rows, lengths = empty(16, dtype=torch.int64), empty(16, dtype=torch.int32)
        implementation("ngram_drafts", "triton")(table[:, :1000], rows, lengths, 2, 5, count)


def main() -> None:
    for check_case in CASES.values():
        check_case("cpu")
    print(AGREEMENT)


if __name__ == "__main__":
    main()
