"""What guards do with inputs: parts of wider tensors stay parts, and what lies between their rows may not change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tp_engine.kernels.attention.paged_trials import tables
from tp_engine.kernels.candidates import Inputs, Shape
from tp_engine.kernels.kv_cache.layer_kv import LayerKv
from tp_engine.worker.tuning.guards import Guards, clone, copied, memory_of
from tp_engine.worker.tuning.proof import ProofQuestion

CPU = torch.device("cpu")
PAIRS: Shape = {"kv_heads": 2, "dim": 8, "type": "bfloat16", "cache": "bfloat16", "block": 4}
ROWS: Shape = {"dim": 8, "rank": 6, "type": "float32", "cache": "int8", "block": 4}


def cache_of(shape: Shape) -> LayerKv:
    """A cache for 10 and 3 tokens."""
    return tables(shape, [10, 3], CPU, torch.Generator().manual_seed(0))[0]


@pytest.mark.parametrize("shape", [PAIRS, ROWS], ids=["keys and values", "rows, quantised"])
@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_layer_of_a_cache_stays_among_others(shape: Shape, is_guarded: bool) -> None:
    """Oracle: the cache; a copy has its strides, its rows by token, and what others have between its blocks."""
    kv = cache_of(shape)
    own = copied((kv,), Guards(CPU).copy if is_guarded else clone)[0]
    assert own.block_stride == kv.block_stride > kv.cache[0, 0].numel() * len(kv.cache)
    assert own.cache.data_ptr() != kv.cache.data_ptr() and torch.equal(own.cache, kv.cache)
    assert torch.equal(memory_of(own.cache).view(torch.uint8), memory_of(kv.cache).view(torch.uint8))
    for mine, theirs in zip(own.token_rows, kv.token_rows, strict=True):
        assert mine.stride() == theirs.stride() and torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        assert mine.data_ptr() in {part.data_ptr() for part in own.cache}


def between(kv: LayerKv) -> None:
    """Write behind a block's values, where another layer's keys are."""
    kv.cache.as_strided((1,), (1,), kv.cache.storage_offset() + kv.block_stride - 1).fill_(3)


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [(between, True), (lambda kv: kv.cache[0, 0, 0].zero_(), True), (lambda kv: kv.cache.clone().zero_(), False)],
    ids=["another layer's", "a key", "a copy"],
)
def test_what_others_have_between_blocks_may_not_change(change: Callable[[LayerKv], object], is_seen: bool) -> None:
    """Oracle: by hand: a byte of the part that the cache does not own, and one that it does."""
    inputs: Inputs = (torch.ones(2, 3), cache_of(PAIRS))
    question, held = ProofQuestion(inputs, ()), copied(inputs, Guards(CPU).copy)
    change(held[1])
    if is_seen:
        with pytest.raises(ValueError, match="changes its inputs"):
            question.check_inputs(held, ())
    else:
        question.check_inputs(held, ())
