"""Which keys a query of DeepSeek sparse attention attends to, and attention to these alone."""

import numpy as np
import pytest
import torch

from tp_engine.attention.selection import attend_chosen
from tp_engine.kernels.attention.index_keys import choose


def best(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, top_k: int) -> list[list[int]]:
    """The same positions by sorting: by score, then by position."""
    products = np.maximum(np.einsum("thd,nd->thn", queries.double().numpy(), keys.double().numpy()), 0)
    scores = np.einsum("thn,th->tn", products, weights.double().numpy())
    first = len(keys) - len(queries)
    return [sorted(sorted(range(first + t + 1), key=lambda n: (-row[n], n))[:top_k]) for t, row in enumerate(scores)]


@pytest.mark.parametrize("top_k", [1, 7, 64])
def test_the_best_keys_are_chosen_and_of_equal_ones_the_earlier(top_k: int) -> None:
    """Oracle: sorting by score and position; small whole numbers make many scores equal, among them 0."""
    generator = torch.Generator().manual_seed(3)
    queries, keys = (torch.randint(-2, 3, (50, *shape), generator=generator).float() for shape in ((4, 3), (3,)))
    weights = torch.randint(-1, 3, (50, 4), generator=generator).float()
    expected = best(queries, weights, keys, top_k)
    found = choose(queries, weights, keys, top_k)
    assert [[one for one in row if one >= 0] for row in found.tolist()] == expected
    for first, end in ((0, 9), (9, 10), (10, 50)):  # chunks see the keys so far
        part = choose(queries[first:end], weights[first:end], keys[:end], top_k)
        assert torch.equal(part, found[first:end])


def test_a_needle_in_20000_keys_is_chosen() -> None:
    """Oracle: the one key that looks like the query, wherever it is; many more scores than are worked on at once."""
    generator = torch.Generator().manual_seed(4)
    keys = torch.randn(20_000, 32, generator=generator)
    queries = torch.randn(12, 16, 32, generator=generator)
    places = torch.randint(0, 19_980, (12,), generator=generator)
    keys[places] = 4.0 * queries.mean(1)
    found = choose(queries, torch.ones(12, 16), keys, 64)
    assert all(place in row for place, row in zip(places.tolist(), found.tolist(), strict=True))
    assert (found.diff(dim=1) > 0).all()


def test_attention_to_chosen_rows() -> None:
    """Oracle: the softmax over all rows with a mask, in float64; -1 stands for no row."""
    generator = torch.Generator().manual_seed(5)
    query, rows = torch.randn(9, 4, 24, generator=generator), torch.randn(40, 24, generator=generator)
    chosen = torch.stack([torch.randperm(40, generator=generator)[:6].sort().values for _ in range(9)])
    chosen[0, 2:] = -1
    is_visible = torch.zeros(9, 41, dtype=torch.bool).scatter_(1, chosen + 1, True)[:, 1:]
    scores = torch.einsum("thd,nd->thn", query.double(), rows.double()) * 0.3
    scores.masked_fill_(~is_visible.unsqueeze(1), -torch.inf)
    expected = torch.einsum("thn,nd->thd", scores.softmax(-1), rows[:, :20].double())
    found = attend_chosen(query, chosen, lambda ids: rows[ids], rank=20, scale=0.3)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
