"""The codec pca: its basis, its bound, what it refuses and when, and how ranks report that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.kv_tiers import moves
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.features.tiers.block_moves import BlockGroups, BlockMover, StoreReports
from tp_engine.features.tiers.codecs.pca import TOKENS_PER_DIM, Pca
from tp_engine.job.tier_progress import CHANNEL_WORDS, TierProgress, TierProgressReader
from tp_engine.kernels.kv_cache.block_codes import BlockForm
from tp_engine.plan import NO_PAIRS, Admission, IntArray, RowSampling, StepPlan
from tp_engine.worker.effective_config import resolve

DIM, BLOCK_SIZE, PARTS, HEADS = 24, 8, 4, 2
NUM_CALIBRATION = TOKENS_PER_DIM * DIM // BLOCK_SIZE
LANES = pytest.mark.parametrize("simd_width", [0, 8])


def form_of(heads: int = HEADS, dtype: torch.dtype = torch.float32, simd_width: int = 0) -> BlockForm:
    return BlockForm(
        num_parts=PARTS, block_size=BLOCK_SIZE, num_kv_heads=heads, head_dim=DIM, dtype=dtype, simd_width=simd_width
    )


def pool_of(states: torch.Tensor, form: BlockForm) -> torch.Tensor:
    """Blocks (n, block_bytes) of ``states`` (n, parts, block_size, heads, head_dim)."""
    vectors = states.transpose(2, 3) if form.simd_width else states
    return form.blocks_of(vectors.reshape(len(states), PARTS, -1, DIM).to(form.dtype))


def states_of(pool: torch.Tensor, form: BlockForm) -> torch.Tensor:
    """The inverse of ``pool_of``, float64."""
    vectors = form.vectors_of(pool).double()
    if form.simd_width:
        return vectors.view(len(pool), -1, form.num_kv_heads, BLOCK_SIZE, DIM).transpose(2, 3)
    return vectors.view(len(pool), -1, BLOCK_SIZE, form.num_kv_heads, DIM)


def random_states(num_blocks: int, seed: int = 0, *, heads: int = HEADS, decay: float = 2.0) -> torch.Tensor:
    """States whose directions fall off over ``decay`` decades, in axes of each head's own."""
    generator = torch.Generator().manual_seed(7)
    axes = torch.linalg.qr(torch.randn(PARTS, heads, DIM, DIM, generator=generator))[0]
    generator.manual_seed(seed)
    states = torch.randn(num_blocks, PARTS, BLOCK_SIZE, heads, DIM, generator=generator)
    return torch.einsum("npbhd,phde->npbhe", states * torch.logspace(0, -decay, DIM), axes)


def pairs_of(first: int, end: int) -> IntArray:
    """Each block and the place of its number."""
    return np.repeat(np.arange(first, end, dtype=np.int32)[:, None], 2, axis=1)


def ids(*listed: int) -> IntArray:
    return np.array(listed, dtype=np.int32)


def pairs(*listed: tuple[int, int]) -> IntArray:
    return np.array(listed, dtype=np.int32)


def errors_of(found: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
    """(n, parts, heads): by head, over the tokens of a block."""
    missed, whole = ((one.square().sum(dim=(2, 4))).sqrt() for one in (found - given, given))
    return (missed / whole).nan_to_num(0.0)


def calibrated(codec: Pca, states: torch.Tensor, form: BlockForm) -> None:
    """``codec`` after blocks of ``states``, all of them refused."""
    pool, blobs = pool_of(states, form), torch.zeros(len(states), codec.blob_bytes, dtype=torch.uint8)
    assert bool(codec.encode(pool, blobs, pairs_of(0, len(pool))).all()) and not blobs.any()


@LANES
@pytest.mark.parametrize("rank", [1, 6, 16, DIM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_refused_is_what_misses_the_bound(dtype: torch.dtype, rank: int, simd_width: int) -> None:
    """Oracle: the error of each head of the blocks that come back, in float64; bytes of a blob by hand; the squares of
    the singular values that numpy's SVD of all calibration's states leaves out, which no basis of that rank can keep
    (to 2 %: other blocks are encoded than those that calibrate)."""
    form, bound = form_of(dtype=dtype, simd_width=simd_width), 0.2
    codec = Pca(form, rank, bound)
    assert codec.blob_bytes == PARTS * HEADS * BLOCK_SIZE * (rank + 2)
    first = random_states(NUM_CALIBRATION, seed=1)
    calibrated(codec, first, form)
    states = random_states(40, seed=2)
    states[::2] += 0.3 * torch.randn(states[::2].shape, generator=torch.Generator().manual_seed(3))
    pool = pool_of(states, form)
    blobs, back = torch.zeros(40, codec.blob_bytes, dtype=torch.uint8), torch.zeros_like(pool)
    refused = codec.encode(pool, blobs, pairs_of(0, 40))
    codec.decode(blobs, back, pairs_of(0, 40))
    errors = errors_of(states_of(back, form), states_of(pool, form))
    worst = errors.flatten(1).amax(1)
    is_sure = (worst - bound).abs() > 1e-4
    assert torch.equal(refused[is_sure], (worst > bound)[is_sure])
    assert bool(refused.all()) if rank == 1 else bool(refused.any()) if rank < DIM else not refused.any()
    given = first.to(dtype).double()[:, 1, :, 1].reshape(-1, DIM).numpy()
    values = np.linalg.svd(given, compute_uv=False) ** 2
    least = np.sqrt(values[rank:].sum() / values.sum())
    found = float(errors[1::2, 1, 1].square().mean().sqrt())
    assert 0.9 * least - 0.02 <= found <= 1.1 * least + 0.02


@LANES
def test_order_and_batches_of_stores_do_not_matter(simd_width: int) -> None:
    """Oracle: the blobs of one batch, bit by bit, after the same calibration in several; blocks come back in any order
    and place; places that no pair names keep their bytes."""
    form, states = form_of(simd_width=simd_width), random_states(NUM_CALIBRATION + 12)
    pool, size = pool_of(states, form), len(states)
    one, several = Pca(form, 16, 0.5), Pca(form, 16, 0.5)
    blobs = [torch.full((size, one.blob_bytes), 7, dtype=torch.uint8) for _ in range(2)]
    assert bool(one.encode(pool, blobs[0], pairs_of(0, NUM_CALIBRATION)).all())
    for first in range(0, NUM_CALIBRATION, 5):
        found = several.encode(pool, blobs[1], pairs_of(first, min(first + 5, NUM_CALIBRATION)))
        assert bool(found.all())
    assert not one.encode(pool, blobs[0], pairs_of(NUM_CALIBRATION, size)).any()
    for first in range(NUM_CALIBRATION, size, 4):
        assert not several.encode(pool, blobs[1], pairs_of(first, first + 4)).any()
    # Sums of other batches differ in their last bits.
    assert bool(((blobs[0].view(torch.int8).int() - blobs[1].view(torch.int8).int()).abs() <= 1).all())
    assert bool((blobs[0][:NUM_CALIBRATION] == 7).all())
    moves = pairs_of(NUM_CALIBRATION, size)[::-1].copy()
    moves[:, 1] -= NUM_CALIBRATION
    back = torch.zeros_like(pool)
    one.decode(blobs[0], back, moves)
    found = states_of(back, form)
    assert not found[12:].any()
    assert float(errors_of(found[:12], states[NUM_CALIBRATION:].double()).max()) < 0.1


def test_portions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: all blocks at once, to the last bit of a code."""
    form, states = form_of(), random_states(NUM_CALIBRATION + 9)
    pool, found = pool_of(states, form), []
    for portion in (1 << 30, 4 * form.num_vectors * DIM * 4):
        monkeypatch.setattr("tp_engine.features.tiers.codecs.pca._PORTION_BYTES", portion)
        codec = Pca(form, 12, 0.5)
        blobs, back = torch.zeros(9, codec.blob_bytes, dtype=torch.uint8), torch.zeros_like(pool[:9])
        codec.encode(pool, blobs, pairs_of(0, NUM_CALIBRATION))
        moves = pairs_of(0, 9)
        moves[:, 0] += NUM_CALIBRATION
        assert codec.encode(pool, blobs, moves).shape == (9,)
        codec.decode(blobs, back, pairs_of(0, 9))
        found.append(states_of(back, form))
    assert float(errors_of(found[0], found[1]).max()) < 1e-3


def test_what_is_no_number_or_nothing() -> None:
    """Oracle: a block with an infinite element, or NaN, is refused, in calibration too, and changes no other; zeros
    come back as zeros, also in a head that had nothing else."""
    form, states = form_of(), random_states(NUM_CALIBRATION + 4)
    states[:, 3, :, 1] = 0
    states[3, 0, 0, 0, 0], states[4, 1, 0, 1] = float("inf"), float("nan")
    states[-1, 2, 1, 1, 5], states[-2] = float("nan"), 0
    pool, codec = pool_of(states, form), Pca(form, 16, 0.5)
    blobs, back = torch.zeros(4, codec.blob_bytes, dtype=torch.uint8), torch.zeros_like(pool[:4])
    calibrated(codec, states[:NUM_CALIBRATION], form)
    moves = pairs_of(0, 4)
    moves[:, 0] += NUM_CALIBRATION
    assert codec.encode(pool, blobs, moves).tolist() == [False, False, False, True]
    codec.decode(blobs, back, pairs_of(0, 4))
    found = states_of(back, form)
    assert not found[2].any() and not found[:2, 3, :, 1].any()
    assert float(errors_of(found[:2], states[NUM_CALIBRATION : NUM_CALIBRATION + 2].double()).max()) < 0.07


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_refuse_together_what_one_refuses(num_ranks: int) -> None:
    """Oracle: the decision of one rank with all heads: a block is refused if any of the ranks refuses it."""
    heads, bound = 4, 0.2
    form, own = form_of(heads), form_of(heads // num_ranks)
    first, states = (random_states(count, seed, heads=heads) for count, seed in ((NUM_CALIBRATION, 1), (60, 2)))
    states[::3] += 0.15 * torch.randn(states[::3].shape, generator=torch.Generator().manual_seed(3))
    whole = Pca(form, 12, bound)
    calibrated(whole, first, form)
    expected = whole.encode(
        pool_of(states, form), torch.zeros(60, whole.blob_bytes, dtype=torch.uint8), pairs_of(0, 60)
    )
    found = torch.zeros(60, dtype=torch.bool)
    for part, other in zip(first.chunk(num_ranks, 3), states.chunk(num_ranks, 3), strict=True):
        codec = Pca(own, 12, bound)
        calibrated(codec, part, own)
        found |= codec.encode(
            pool_of(other, own), torch.zeros(60, codec.blob_bytes, dtype=torch.uint8), pairs_of(0, 60)
        )
    assert torch.equal(found, expected) and 5 < int(found.sum()) < 40


@LANES
def test_groups_have_bases_of_their_own(simd_width: int) -> None:
    """Oracle: the blobs that a codec of each group alone makes; the second group is ready later, and has half of the
    layers, so that the rest of its blocks says nothing, and comes back as zeros."""
    form, small = form_of(simd_width=simd_width), replace(form_of(simd_width=simd_width), num_parts=PARTS // 2)
    states = [random_states(NUM_CALIBRATION + 4, seed) for seed in (1, 2)]
    states[1] = states[1].roll(1, -1)
    pool = torch.cat([pool_of(one, form) for one in states])
    moves = np.column_stack((pairs_of(0, len(pool)), np.repeat((0, 1), len(states[0])))).astype(np.int32)
    own = np.concatenate([part[NUM_CALIBRATION:] for part in np.split(moves, 2)])
    both = Pca(form, 16, 0.3, [PARTS, PARTS // 2])
    blobs = torch.zeros(len(pool), both.blob_bytes, dtype=torch.uint8)
    assert bool(both.encode(pool, blobs, moves[:NUM_CALIBRATION]).all())
    found = both.encode(pool, blobs, own[::-1])
    assert found.tolist() == [True] * 4 + [False] * 4
    assert bool(both.encode(pool, blobs, moves[len(states[0]) :][: NUM_CALIBRATION - 4]).all())
    assert not both.encode(pool, blobs, own).any()
    unknown = np.concatenate((own[:1], own[1:2] - np.array([0, 0, 1], dtype=np.int32)))
    assert both.encode(pool, torch.zeros_like(blobs), unknown).tolist() == [False, True]
    back, size = torch.zeros_like(pool), small.block_bytes
    both.decode(blobs, back, own[::-1])
    for number, (one, given) in enumerate(zip((form, small), states, strict=True)):
        blocks = pool[moves[:, 2] == number][:, : one.block_bytes].contiguous()
        alone, other = Pca(one, 16, 0.3), torch.zeros(4, Pca(one, 16, 0.3).blob_bytes, dtype=torch.uint8)
        last = pairs_of(NUM_CALIBRATION, len(given)) - np.array([0, NUM_CALIBRATION], dtype=np.int32)
        calibrating = pairs_of(0, NUM_CALIBRATION)
        if number:  # the last four calibrated once more, in place of others
            calibrating = np.concatenate((pairs_of(0, NUM_CALIBRATION - 4), pairs_of(NUM_CALIBRATION, len(given))))
        alone.encode(blocks, torch.zeros(len(blocks), alone.blob_bytes, dtype=torch.uint8), calibrating)
        assert not alone.encode(blocks, other, last).any()
        expected = torch.zeros(4, one.block_bytes, dtype=torch.uint8)
        alone.decode(other, expected, pairs_of(0, 4))
        loaded = back[own[own[:, 2] == number, 1]]
        errors = errors_of(*(states_of(blocks, one) for blocks in (loaded[:, : one.block_bytes], expected)))
        assert float(errors.max()) < 0.02
        assert number == 0 or not loaded[:, size:].any()


def test_groups_of_blocks_and_slots() -> None:
    """Oracle: by hand, three groups: stores see the groups before their plan; slots keep them until other blocks come
    in, and hand them to the blocks that are loaded; block 0 is unknown after an admission with a 0, which may be what
    a window left behind."""
    groups = BlockGroups(12, 4, 3)
    sampling = RowSampling()
    admission = Admission(
        row=0, token_ids=ids(1), num_prompt_tokens=1, num_computed_tokens=0,
        block_ids=ids(0, 3, 4, 5, 6, 7), sampling=sampling,
    )  # fmt: skip
    first = StepPlan(step_id=1, admitted=(admission,), block_ids=ids(9, 1, 2))
    assert [len(part) for part in groups.moves(first)] == [0, 0]
    groups.note(first)
    second = StepPlan(
        step_id=2,
        block_ids=ids(7, 8, 3),
        extensions=moves(stores=pairs((3, 0), (7, 1)), loads=pairs((1, 9), (0, 10)), wait_load=1),
    )
    stores, loads = groups.moves(second)
    assert stores.tolist() == [[3, 0, 1], [7, 1, 2]] and loads.tolist() == [[1, 9, 2], [0, 10, 1]]
    groups.note(second)
    third = StepPlan(step_id=3, extensions=moves(stores=pairs((7, 0), (3, 2), (10, 3), (0, 1))))
    assert groups.moves(third)[0].tolist() == [[7, 0, 0], [3, 2, 2], [10, 3, 1], [0, 1, -1]]
    groups.note(StepPlan(step_id=4, block_ids=ids(5, 0, 6)))
    assert groups.moves(StepPlan(step_id=5, extensions=moves(stores=pairs((0, 2)))))[0].tolist() == [[0, 2, 1]]


def test_reports_of_stores() -> None:
    """Oracle: numbers by hand: calibration fails, then what misses the bound; without stores there is no news."""
    form = form_of()
    codec = Pca(form, 16, 0.3)
    pool = pool_of(random_states(NUM_CALIBRATION + 6), form)
    pool[NUM_CALIBRATION + 2] = pool_of(torch.randn(1, PARTS, BLOCK_SIZE, HEADS, DIM), form)[0]
    words = memoryview(bytearray(8 * CHANNEL_WORDS)).cast("q")
    reader, reports = TierProgressReader([words]), StoreReports(TierProgress(words))
    mover = BlockMover(pool, torch.zeros(len(pool), codec.blob_bytes, dtype=torch.uint8), codec, reports)
    mover.move(pairs_of(0, NUM_CALIBRATION), NO_PAIRS)
    assert reader.poll().ended == 0
    reports.send()
    assert reader.poll() == (NUM_CALIBRATION, tuple(range(1, NUM_CALIBRATION + 1)))
    mover.move(pairs_of(NUM_CALIBRATION, len(pool)), NO_PAIRS)
    mover.move(NO_PAIRS, pairs_of(NUM_CALIBRATION, NUM_CALIBRATION + 1))
    reports.send()
    assert reader.poll() == (NUM_CALIBRATION + 6, (NUM_CALIBRATION + 3,))
    reports.send()
    assert reader.poll() == (NUM_CALIBRATION + 6, ())


@pytest.mark.parametrize("text", ["pca:0", "pca:8:0", "pca:8:1", "pca:8:1.5", "pca:8:.0"])
def test_settings_out_of_range_are_refused(text: str) -> None:
    """Oracle: the value and the rules."""
    with pytest.raises(ConfigError, match=rf"is '{text}': the rank must be at least 1, and the bound, a share of"):
        EngineConfig(kv_offloading_size=1, kv_offloading_codec=text)


def test_rank_is_at_most_head_dim(checkpoint: Any) -> None:
    """Oracle: the value, the rule with the model's number, and the largest rank, which is taken."""
    options: dict[str, Any] = {"model": str(checkpoint("qwen3")), "device": "cpu", "kv_offloading_size": 1}
    head_dim = resolve(EngineConfig(**options)).model.kv_layout.groups[0].head_dim
    with pytest.raises(ConfigError, match=rf"is pca:{head_dim + 1}, but heads of this Qwen3\w+ have {head_dim} dim"):
        resolve(EngineConfig(**options, kv_offloading_codec=f"pca:{head_dim + 1}"))
    resolve(EngineConfig(**options, kv_offloading_codec=f"pca:{head_dim}:0.01"))


def test_memory_that_it_counts_is_what_it_keeps() -> None:
    """Oracle: by hand: moments and two matrices of the basis in float32, for each head of each part, beside what a
    portion takes."""
    work = Pca(form_of(), 6, 0.1).work_bytes - (64 << 20)
    assert work == PARTS * HEADS * DIM * (DIM + 2 * 6) * 4
