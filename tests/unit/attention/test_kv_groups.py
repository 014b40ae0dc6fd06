"""A model whose layers have windows, run with a block table for each group of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kv_tiers import moves
from tests.repeating_recorder import RepeatingRecorder
from tp_engine.attention.base import AttentionBackend
from tp_engine.attention.native_backend import NativeBackend
from tp_engine.attention.torch_backend import TorchBackend
from tp_engine.config import EngineConfig
from tp_engine.cpu.library import native_library
from tp_engine.distributed.collectives import SingleRank
from tp_engine.features.tiers.codecs.base import BlockCopy
from tp_engine.features.tiers.rank_host import HostTierWorker
from tp_engine.job.progress import RankProgress
from tp_engine.job.topology import RankInfo
from tp_engine.model_config import kv_layout, load_model_config
from tp_engine.model_config.kv_layout import TILE_TOKENS
from tp_engine.models.causal_lm import build_model
from tp_engine.plan import Admission, IntArray, RowSampling, StepPlan, StepResult
from tp_engine.sampling.state import SamplingState
from tp_engine.weights.loader import load_weights
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.input_digests import digest_inputs
from tp_engine.worker.memory.kv_cache import KvBlocks, KvCacheShape
from tp_engine.worker.model_runner import ModelRunner
from tp_engine.worker.trial_steps import warm_up

CPU = torch.device("cpu")
NUM_ROWS, MAX_LEN, BLOCK_SIZE, NUM_BLOCKS = 4, 256, 4, 400
WINDOWED: dict[str, Any] = {
    "architecture": "qwen2", "num_layers": 4, "use_sliding_window": True, "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
}  # fmt: skip
BACKENDS = [TorchBackend, *([NativeBackend] if native_library() else [])]


class Engine:
    """A runner with plans made by hand: blocks behind a window return to the pool at once."""

    def __init__(self, folder: Path, make_backend: Callable[[], AttentionBackend]) -> None:
        spec, path = load_model_config(str(folder))
        layout, alone = spec.kv_layout, SingleRank()
        self.windows, self.backends = layout.windows, [make_backend() for _ in layout.groups]
        model = build_model(
            spec, communicator=alone, dtype=torch.float32, device=CPU, backends=self.backends, max_model_len=MAX_LEN
        )
        load_weights(dict(model.named_parameters()), spec, path, info=RankInfo())
        model.finish_loading()
        shape = KvCacheShape(layout=layout, block_size=BLOCK_SIZE, dtype=torch.float32)
        blocks = KvBlocks.allocate(shape, NUM_BLOCKS, CPU)
        self.cache = blocks.raw.view(torch.float32).fill_(torch.nan)  # no row may read another slot
        blocks.bind(model.attention_layers)
        self.runner = ModelRunner(
            model=model,
            backends=self.backends,
            batch=InputBatch(
                max_num_seqs=NUM_ROWS,
                max_model_len=MAX_LEN,
                block_size=BLOCK_SIZE,
                num_groups=len(layout.groups),
                device=CPU,
            ),
            blocks=blocks,
            features=[HostTierWorker(blocks.raw, NUM_BLOCKS, BlockCopy(blocks.raw.shape[1], "any"))],
            communicator=alone,
            sampling=SamplingState(max_num_seqs=NUM_ROWS, vocab_size=spec.vocab_size, device=CPU, info=RankInfo()),
            progress=RankProgress(),
        )
        self.free = [*range(1, NUM_BLOCKS, 2), *range(2, NUM_BLOCKS, 2)]  # two blocks of a row are never neighbours
        self.tokens: dict[int, list[int]] = {}
        self.computed: dict[int, int] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.freed = 0

    def enter(self, row: int, tokens: Sequence[int], like: int | None = None) -> Admission:
        """A new row; with ``like``, it takes the blocks of that row, which leaves, and all but its last token."""
        self.tokens[row] = list(tokens)
        self.computed[row] = 0 if like is None else len(tokens) - 1
        self.tables[row] = [] if like is None else self.tables.pop(like)
        return Admission(
            row=row,
            token_ids=np.array(tokens, dtype=np.int32),
            num_prompt_tokens=len(tokens),
            num_computed_tokens=self.computed[row],
            block_ids=np.array(self.tables[row], dtype=np.int32).reshape(-1),
            sampling=RowSampling(logprobs=3),
        )

    def step(
        self, decodes: Sequence[int], chunks: dict[int, int], admitted: tuple[Admission, ...] = (), **options: Any
    ) -> StepResult:
        counts = dict.fromkeys(decodes, 1) | chunks
        grown = [(row, blocks) for row, count in counts.items() for blocks in self._grow(row, count)]
        ends = [self.computed[row] == len(self.tokens[row]) for row in chunks]
        plan = StepPlan(
            step_id=1,
            admitted=admitted,
            block_rows=_ints(row for row, _ in grown),
            block_ids=_ints(block for _, blocks in grown for block in blocks),
            decode_rows=_ints(decodes),
            prefill_rows=_ints(chunks),
            prefill_tokens=_ints(chunks.values()),
            prefill_samples=np.array(ends, dtype=np.bool_),
            **options,
        )
        result = self.runner.run(plan).result()
        for row, token in zip(plan.sampled_rows.tolist(), result.token_ids.tolist(), strict=True):
            self.tokens[row].append(token)
        for row in counts:
            self._expire(row)
        return result

    def _grow(self, row: int, count: int) -> list[list[int]]:
        self.computed[row] += count
        missing = -(-self.computed[row] // BLOCK_SIZE) - len(self.tables[row])
        new = [[self.free.pop(0) for _ in self.windows] for _ in range(missing)]
        self.tables[row] += new
        return new

    def _expire(self, row: int) -> None:
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            for blocks in self.tables[row][: max(0, self.computed[row] + 1 - window - TILE_TOKENS) // BLOCK_SIZE]:
                if blocks[group]:
                    self.cache[blocks[group]] = torch.nan
                    self.free.append(blocks[group])
                    blocks[group] = 0
                    self.freed += 1


def _ints(values: Any) -> IntArray:
    return np.fromiter(values, dtype=np.int32)


def serve(engine: Engine, num_decodes: int = 40) -> list[StepResult]:
    """Chunks, mixed steps, decodes, and a row that continues with the blocks of another."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 200, length).tolist() for length in (150, 30)]
    results = [engine.step([], {0: 100}, (engine.enter(0, prompts[0]),), released=_ints(range(NUM_ROWS)))]
    results.append(engine.step([], {0: 50, 1: 20}, (engine.enter(1, prompts[1]),)))
    results.append(engine.step([0], {1: 10}))
    results += [engine.step([0, 1], {}) for _ in range(num_decodes)]
    moved = engine.enter(3, engine.tokens[0], like=0)
    results.append(engine.step([1], {3: 1}, (moved,), released=_ints([0])))
    results += [engine.step([3, 1], {}) for _ in range(5)]
    return results


def compare(grouped: list[StepResult], single: list[StepResult]) -> None:
    """Results are equal bit by bit."""
    for found, expected in zip(grouped, single, strict=True):
        np.testing.assert_array_equal(found.token_ids, expected.token_ids)
        if found.logprobs is None or expected.logprobs is None:
            assert found.logprobs is expected.logprobs
            continue
        np.testing.assert_array_equal(found.logprobs.token_ids, expected.logprobs.token_ids)
        np.testing.assert_array_equal(found.logprobs.logprobs, expected.logprobs.logprobs)
        assert np.isfinite(found.logprobs.logprobs).all()


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("make_backend", BACKENDS)
def test_groups_compute_what_one_group_does(
    make_backend: Callable[[], AttentionBackend],
    is_recorded: bool,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows 8, none, 8, 8.  Oracle: the same model with one table for all layers, which keeps all blocks: tokens and
    log-probabilities, bit by bit.  Slots of no row, or behind a window, hold NaN."""
    folder = checkpoint(**WINDOWED)
    engines = [Engine(folder, make_backend)]
    monkeypatch.setattr(kv_layout, "MAX_GROUPS", 1)
    engines.append(Engine(folder, make_backend))
    assert [len(engine.windows) for engine in engines] == [4, 1]
    found = []
    for engine in engines:
        if is_recorded:
            engine.runner.graphs.capture_decodes((1, 2, 4), RepeatingRecorder(), (4, 2, 1))
        found.append(serve(engine))
    compare(*found)
    assert engines[0].freed > 30 and engines[1].freed == 0


def test_a_copy_is_of_all_layers_of_a_block(checkpoint: Callable[..., Path]) -> None:
    """Oracle: the block's bytes before."""
    engine = Engine(checkpoint(**WINDOWED), TorchBackend)
    engine.cache.normal_()
    before = engine.cache.clone()
    engine.runner.run(StepPlan(step_id=1, copies=np.array([[5, 9], [6, 2]], dtype=np.int32)))
    before[[9, 2]] = before[[5, 6]]
    assert torch.equal(engine.cache, before)


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("make_backend", BACKENDS)
def test_blocks_that_were_on_the_host_are_as_before(
    make_backend: Callable[[], AttentionBackend], is_recorded: bool, checkpoint: Callable[..., Path]
) -> None:
    """Blocks of both rows go to slots, are overwritten, and come back with the step that needs them, three times.
    Oracle: the same steps without moves, bit by bit."""
    folder = checkpoint(**WINDOWED)
    found = []
    for has_moves in (True, False):
        engine = Engine(folder, make_backend)
        if is_recorded:
            engine.runner.graphs.capture_decodes((1, 2, 4), RepeatingRecorder(), (4, 2, 1))
        results = serve(engine, 3)
        for batch in (2, 4, 6):
            held = sorted({block for row in (1, 3) for blocks in engine.tables[row] for block in blocks if block})
            pairs = np.stack((held, np.random.default_rng(batch).permutation(NUM_BLOCKS)[: len(held)]), 1)
            options: dict[str, Any] = {}
            if has_moves:
                engine.runner.run(StepPlan(step_id=1, extensions=moves(stores=pairs.astype(np.int32))))
                engine.cache[held] = torch.nan
                options["extensions"] = moves(loads=pairs[::-1, ::-1].astype(np.int32), wait_load=batch)
            results.append(engine.step([3, 1], {}, **options))
        found.append(results)
    compare(*found)


def test_moves_come_before_copies(checkpoint: Callable[..., Path]) -> None:
    """Oracle: bytes by hand, of a plan that stores a block, loads it into another one, and copies that."""
    engine = Engine(checkpoint(**WINDOWED), TorchBackend)
    engine.cache.normal_()
    before = engine.cache.clone()
    store, load, copy = (np.array([pair], dtype=np.int32) for pair in ((5, 1), (1, 6), (6, 2)))
    engine.runner.run(StepPlan(step_id=1, extensions=moves(stores=store, loads=load, wait_load=1), copies=copy))
    before[[6, 2]] = before[[5, 5]]
    assert torch.equal(engine.cache, before)


def test_first_steps_leave_no_trace(checkpoint: Callable[..., Path]) -> None:
    """Oracle: an engine without a warm-up."""
    folder = checkpoint(**WINDOWED)
    warm, cold = (Engine(folder, TorchBackend) for _ in range(2))
    warm_up(warm.runner, EngineConfig(max_num_seqs=NUM_ROWS, max_num_batched_tokens=16, block_size=BLOCK_SIZE))
    compare(serve(warm, 5), serve(cold, 5))


def test_digests_tell_groups_apart() -> None:
    """Oracle: equal inputs have equal digests; another block in the last group alone gives another digest."""
    digests = []
    for last in (6, 6, 7):
        batch = InputBatch(max_num_seqs=1, max_model_len=8, block_size=BLOCK_SIZE, num_groups=2, device=CPU)
        entered = Admission(
            row=0,
            token_ids=_ints([5, 9]),
            num_prompt_tokens=2,
            num_computed_tokens=0,
            block_ids=_ints([3, last]),
            sampling=RowSampling(),
        )
        chunk: dict[str, Any] = {"prefill_tokens": _ints([2]), "prefill_samples": np.array([True])}
        plan = StepPlan(step_id=1, admitted=(entered,), prefill_rows=_ints([0]), **chunk)
        batch.apply(plan)
        digests.append(digest_inputs(batch.prepare(plan)))
    assert digests[0] == digests[1] != digests[2]
