"""Which rank is wrong: products, inputs of row-parallel layers, and slices of the vocabulary, by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tp_engine.apps.check.answers import Answer
from tp_engine.apps.check.linears import Linears
from tp_engine.apps.check.oracle import EXACT
from tp_engine.apps.check.passes import _own_part
from tp_engine.apps.check.prompts import CheckPrompt
from tp_engine.apps.check.ranks import rank_apart, rank_of_slice
from tp_engine.apps.check.stored import StoredWeights
from tp_engine.apps.check.watched import Watched, positions_of

HIDDEN, INNER, ROWS = 6, 8, 5
RNG = np.random.default_rng(0)


def values(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def part(name: str, rows: range, stored: int) -> dict[str, Any]:
    return {"name": f"model.layers.1.mlp.{name}", "rows": list(rows), "room": len(rows), "stored_rows": stored}


def watched_of(arrays: list[dict[str, Any]], layouts: list[dict[str, Any]]) -> Watched:
    nothing = np.zeros((ROWS, 1), np.int64), np.zeros((ROWS, 1), np.float32)
    answer = Answer(CheckPrompt("p", tuple(range(ROWS))), (), *nothing)
    return Watched(answer, arrays, layouts, np.arange(ROWS))


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("is_swapped", [False, True])
def test_gate_and_up_have_the_order_of_the_checkpoint(is_fused: bool, is_swapped: bool, tmp_path: Path) -> None:
    """Oracle: silu(gate) * up; a rank that says and computes the other order is named, with its layer."""
    gate, up = values(INNER, HIDDEN), values(INNER, HIDDEN)
    tensors = {"gate_proj": gate, "up_proj": up} if not is_fused else {"gate_up_proj": np.concatenate((gate, up))}
    save_file(
        {f"model.layers.1.mlp.{name}.weight": torch.from_numpy(one) for name, one in tensors.items()},
        tmp_path / "model.safetensors",
    )
    arrays, layouts = list[dict[str, Any]](), list[dict[str, Any]]()
    for rank in range(2):
        own = range(rank * INNER // 2, (rank + 1) * INNER // 2)
        parts = [part("gate_proj", own, INNER), part("up_proj", own, INNER)]
        if is_fused:
            behind = range(own.start + INNER, own.stop + INNER)
            parts = [part("gate_up_proj", own, 2 * INNER), part("gate_up_proj", behind, 2 * INNER)]
        x = values(ROWS, HIDDEN)
        first, second = torch.from_numpy(x @ gate[own].T), torch.from_numpy(x @ up[own].T)
        if is_swapped and rank == 1:
            parts, first, second = parts[::-1], second, first
        y = (torch.nn.functional.silu(first) * second).numpy()
        arrays.append({"linears.layers.1.mlp.in.x": x, "linears.layers.1.mlp.in.y": y})
        layout = {"parts": parts, "columns": [0, HIDDEN], "stored_columns": HIDDEN, "is_activated": True}
        layouts.append({"layers.1.mlp.in": layout})
    with StoredWeights(tmp_path, None) as stored:
        linears = Linears(stored, activation=torch.nn.functional.silu, rounding=EXACT, floor=1e-5)
        faults = list(linears.faults(watched_of(arrays, layouts)))
    assert [(one.layer, one.rank) for one in faults] == ([(1, 1)] if is_swapped else [])


@pytest.mark.parametrize("wrong", [(), (1,), (0, 2), (0, 1, 2, 3)])
def test_the_rank_whose_input_is_another_is_named(wrong: tuple[int, ...]) -> None:
    """Oracle: by hand: the ranks whose columns were changed, unless all or none were."""
    exact, name = values(ROWS, 4 * INNER), "model.layers.1.mlp.down_proj"
    arrays, layouts = list[dict[str, Any]](), list[dict[str, Any]]()
    for rank in range(4):
        begin, end = rank * INNER, (rank + 1) * INNER
        x = exact[:, begin:end] * (1 + 1e-7) + (0.1 if rank in wrong else 0.0)
        arrays.append({"linears.a.x": x.astype(np.float32)})
        layout = {"parts": [{"name": name}], "columns": [begin, end], "stored_columns": 4 * INNER}
        layouts.append({"a": layout})
    watched, reads = watched_of(arrays, layouts), {"1.mlp.down_proj": exact}
    found = rank_apart(watched, reads, {}, 1, in_mlp=True)
    named = " and ".join(map(str, wrong)) if 0 < len(wrong) < 4 else None
    assert found == (None if named is None else (named, "what mlp.down_proj reads"))
    assert rank_apart(watched, reads, {}, 1, in_mlp=False) is rank_apart(watched, reads, {}, 0, in_mlp=True) is None


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_rank_whose_experts_are_others_is_named(splits: bool, is_transposed: bool) -> None:
    """Oracle: by hand: parts of second weights, of all experts or of some, sum up to the whole; the rank whose part of
    the output was changed is named."""
    weight, bias = torch.from_numpy(values(4, HIDDEN, INNER)), torch.from_numpy(values(4, HIDDEN))
    if is_transposed:
        weight = weight.transpose(1, 2)
    halves = [[0, INNER // 2], [INNER // 2, INNER]] if splits else [[0, INNER]] * 2
    some = [[0, 4]] * 2 if splits else [[0, 2], [2, 4]]
    layouts = [
        {"experts": here, "inner": inner, "inner_size": INNER, "adds_bias": not splits or not rank}
        for rank, (here, inner) in enumerate(zip(some, halves, strict=True))
    ]
    module = torch.nn.Module()
    parts = [_own_part(weight, one, module) for one in layouts]
    assert torch.equal(parts[0] + parts[1], weight) and all((weight - one).abs().max() > 0 for one in parts)
    assert torch.equal(torch.stack([_own_part(bias, one, module) for one in layouts]).sum(0), bias)
    exact, name = [values(ROWS, HIDDEN) for _ in range(2)], "layers.1.mlp.experts"
    arrays = [{f"experts.{name}.y": exact[0]}, {f"experts.{name}.y": exact[1] + 0.1}]
    watched = replace(watched_of(arrays, [{}, {}]), experts=[{name: layouts[0]}, {name: layouts[1]}])
    assert rank_apart(watched, {}, {1: exact}, 1, in_mlp=True) == ("1", "its part of the experts' output")
    assert rank_apart(watched, {}, {1: exact}, 1, in_mlp=False) is rank_apart(watched, {}, {}, 1, in_mlp=True) is None


def test_the_rank_of_a_wrong_slice_is_named() -> None:
    """Oracle: by hand: the tokens of rank 2 are wrong, and all others off by the sum over all tokens."""
    ranks = RNG.integers(0, 4, (40, 5))
    differences = np.where(ranks == 2, values(40, 5), 0.0) + values(40, 1)
    assert rank_of_slice(differences, ranks, 4, 1e-4) == 2
    assert rank_of_slice(values(40, 5), ranks, 4, 1e-4) is None
    assert rank_of_slice(np.zeros((40, 5), np.float32), ranks, 4, 1e-4) is None


def test_rows_of_draft_tokens_that_never_came_have_no_position() -> None:
    """Oracle: by hand: a prompt of three tokens in two steps, then two steps with draft tokens: one right and one
    wrong; then two wrong, of which the second one is the sequence's by chance."""
    sequence = (7, 8, 9, 20, 21, 22, 23)
    steps = np.array([1, 1, 2, 3, 3, 3, 4, 4, 4])
    places = np.array([0, 1, 2, 3, 4, 5, 5, 6, 7])
    tokens = np.array([7, 8, 9, 20, 21, 99, 22, 98, 97])
    assert positions_of(sequence, steps, tokens, places).tolist() == [0, 1, 2, 3, 4, -1, 5, -1, -1]
    assert positions_of(sequence, steps[:6], np.array([7, 8, 9, 20, 99, 22]), places[:6]).tolist()[3:] == [3, -1, -1]
