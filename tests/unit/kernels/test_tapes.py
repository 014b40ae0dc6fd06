"""Decode steps on tapes, against the same steps without tapes; skipped where the native kernels cannot be built."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.families import FAMILIES
from tests.paged_batches import make_batch
from tests.tiers import fast_first
from tp_engine import LLM, SamplingParams
from tp_engine.attention.base import AttentionBackend, AttentionShape
from tp_engine.attention.mla import MLABackend
from tp_engine.attention.native_backend import NativeBackend
from tp_engine.cpu.library import native_library
from tp_engine.cpu.linear import PackedWeight
from tp_engine.cpu.ops import best_tokens
from tp_engine.cpu.tape import Tape, call, naming_calls, recording
from tp_engine.distributed.collectives import SingleRank
from tp_engine.job.topology import RankInfo
from tp_engine.kernels.attention.heads import HeadNorm, Rotation
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import op
from tp_engine.layers.quantization import dense
from tp_engine.model_config import load_model_config
from tp_engine.model_config.mlp import Activation, ActivationKind
from tp_engine.models.causal_lm import CausalLM, build_model
from tp_engine.plan import Admission, IntArray, RowSampling, StepPlan
from tp_engine.sampling.ranking import row_argmax
from tp_engine.sampling.sampler import Sampler
from tp_engine.sampling.state import SamplingState
from tp_engine.weights.loader import load_weights
from tp_engine.worker.batch.input_batch import InputBatch
from tp_engine.worker.batch.recurrent_states import RecurrentStatePool
from tp_engine.worker.graphs.captured_steps import CapturedSteps, DecodeShape, StepParts
from tp_engine.worker.graphs.recorder import keep_nothing
from tp_engine.worker.graphs.tape_recorder import TapeMemory, TapeRecorder, TapeRecording
from tp_engine.worker.memory.kv_cache import KvBlocks, KvCacheShape

LIBRARY = native_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native kernels cannot be built here")

CPU = torch.device("cpu")
NUM_ROWS, MAX_LEN, BLOCK_SIZE = 4, 600, 4
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"architecture": "qwen2", "tie": True},
    "qwen3": {"architecture": "qwen3", "head_dim": 24, "tie": True},
    "window": {"architecture": "mistral", "sliding_window": 9, "head_dim": 12},
    "groups": {
        "architecture": "qwen2", "num_layers": 3, "use_sliding_window": True, "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    **{f"table-{name}": {"architecture": name} for name in FAMILIES},
}  # fmt: skip
# Families whose steps no tape holds yet: streams of the residual and compressed attention are PyTorch's.
WITHOUT_TAPES = {"table-deepseek-v4"}


class Rows:
    """Rows that decode a model with random K/V behind them, on tapes."""

    def __init__(self, folder: Path, dtype: torch.dtype, lengths: tuple[int, ...] = (3, 4, 250, 17)) -> None:
        assert LIBRARY is not None
        config, folder = load_model_config(str(folder))
        config = config.within(MAX_LEN)
        layout, alone = config.kv_layout, SingleRank()
        num_groups = len(layout.groups)
        has_latents = any(one.latent is not None for one in config.attentions)
        backends: list[AttentionBackend] = [
            MLABackend(NativeBackend(), config.index_topk) if has_latents else NativeBackend() for _ in layout.groups
        ]
        self.model = build_model(
            config, communicator=alone, dtype=dtype, device=CPU, backends=backends, max_model_len=MAX_LEN
        )
        load_weights(dict(self.model.named_parameters()), config, folder, info=RankInfo())
        with patch.object(dense, "_packed", lambda weight: None):  # C, on any processor
            self.model.finish_loading()
        columns = MAX_LEN // BLOCK_SIZE
        shape = KvCacheShape(layout=layout, block_size=BLOCK_SIZE, dtype=dtype)
        num_blocks = columns * NUM_ROWS * num_groups
        pool = KvBlocks.allocate(shape, num_blocks, CPU)
        self.cache = pool.raw.view(dtype).normal_()
        pool.bind(self.model.attention_layers)
        self.states = None if layout.states is None else RecurrentStatePool(layout.states, NUM_ROWS, CPU)
        if self.states is not None:
            self.states.raw.normal_()
            self.states.bind(self.model.state_layers)
        self.batch = InputBatch(
            max_num_seqs=NUM_ROWS, max_model_len=MAX_LEN, block_size=BLOCK_SIZE, num_groups=num_groups, device=CPU
        )
        blocks = torch.randperm(num_blocks).view(NUM_ROWS, -1).to(torch.int32).numpy()
        self.batch.apply(StepPlan(step_id=1, admitted=tuple(map(admission, range(NUM_ROWS), lengths, blocks))))
        state = SamplingState(max_num_seqs=NUM_ROWS, vocab_size=config.vocab_size, device=CPU, info=RankInfo())
        sizes = range(1, NUM_ROWS + 1)
        parts = StepParts(
            model=self.model,
            backends=backends,
            sampler=Sampler(state, alone),
            state_room=lambda _: None,
            keep_rows=(lambda _: keep_nothing()) if self.states is None else self.states.keep_rows,
        )
        self.captured = CapturedSteps(DecodeShape(self.batch.decodes, sizes), parts)
        self.captured.capture(sizes[::-1], TapeRecorder(LIBRARY, alone))

    @property
    def memory(self) -> list[torch.Tensor]:
        """The cache, and the recurrent states if there are some."""
        return [self.cache, *(() if self.states is None else (self.states.raw,))]

    def expected(self, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Hidden states, greedy tokens, cache and states of the next step of ``rows``, without a tape."""
        before = [one.clone() for one in self.memory]
        self.batch.decodes.set_rows(StepPlan(step_id=1, decode_rows=rows), len(rows))
        with torch.inference_mode():
            hidden = self.captured._run_model(len(rows)).clone()
            tokens = row_argmax(self.model.compute_local_logits(hidden))
        after = [one.clone() for one in self.memory]
        for one, old in zip(self.memory, before, strict=True):
            one.copy_(old)
        return hidden, tokens, after

    def check_step(self, rows: IntArray) -> None:
        """Check one step of ``rows``, and the state that it leaves."""
        hidden, tokens, memory = self.expected(rows)
        computed = self.batch.num_computed.copy()
        with torch.inference_mode():
            found, _ = self.captured.run(StepPlan(step_id=1, decode_rows=rows), len(rows), self.batch.num_computed)
        assert torch.equal(self.captured.forward[len(rows)].output, hidden)
        assert found is not None and torch.equal(found, tokens)
        assert all(torch.equal(one, other) for one, other in zip(self.memory, memory, strict=True))
        computed[rows] += 1
        np.testing.assert_array_equal(self.batch.num_computed, computed)
        for row, token in zip(rows, tokens.tolist(), strict=True):
            assert self.batch.following_tokens(int(row), int(computed[row]), 1).tolist() == [token]

    def recordings(self, num_rows: int) -> list[Any]:
        """The recordings of the forward pass and of the sampling."""
        sampling = [one for (_, count), one in self.captured.sampling.items() if count == num_rows]
        return [self.captured.forward[num_rows], *sampling]


def admission(row: int, length: int, blocks: IntArray) -> Admission:
    return Admission(
        row=row,
        token_ids=np.arange(length, dtype=np.int32) % 90,
        num_prompt_tokens=length,
        num_computed_tokens=length - 1,
        block_ids=blocks,
        sampling=RowSampling(),
    )


@pytest.mark.parametrize("dtype", fast_first(1, [torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_steps_equal_those_without_a_tape(name: str, dtype: torch.dtype, checkpoint: Callable[..., Path]) -> None:
    """Oracle: the same step without a tape, bit by bit: beyond the ends of blocks and ranges, rows mixed.  All but
    the families that have none run on tapes."""
    rows = Rows(checkpoint(**MODELS[name]), dtype)
    for step in range(7):
        for count in range(1, NUM_ROWS + 1):
            order = np.random.default_rng(step).permutation(NUM_ROWS)[:count].astype(np.int32)
            rows.check_step(order)
    for count in range(1, NUM_ROWS + 1):
        if name in WITHOUT_TAPES:
            assert not rows.recordings(count)[0].is_settled
        else:
            assert all(one.is_settled and one.run_count == 2 for one in rows.recordings(count))


def test_a_step_with_an_operation_of_torch_is_not_recorded(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: the step without a tape; the log names the operation once for all numbers of rows."""
    rows = Rows(checkpoint(**MODELS["llama"]), torch.float32)
    assert isinstance(rows.model, CausalLM)
    join, plain = rows.model._joins[-1], rows.model.norm._norm
    with patch.object(join, "_add_norm", lambda x, residual, rule, *_: plain(residual.add_(x), rule)):
        for chosen in ([2, 0], [2, 0], [1], [3, 0, 1], [2, 0], [3, 2, 1, 0]):
            rows.check_step(np.array(chosen, dtype=np.int32))
    for count in range(1, NUM_ROWS + 1):
        forward, finish = rows.recordings(count)
        assert not forward.is_settled and finish.run_count == 0
    assert [record.message for record in caplog.records if "not recorded" in record.message] == [
        "decode steps are not recorded, so they are slower: aten.add_.Tensor is no compiled kernel"
    ]


class EveryOperation:
    """A step that uses each operation of the layers, on three requests, from ``ids`` to the best tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        assert LIBRARY is not None

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape) / 4).to(dtype)

        heads, kv_heads, head_dim, hidden, inner = 4, 2, 24, 40, 36
        self.shape = AttentionShape(
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=0.3, softcap=2.0, sinks=torch.randn(heads)
        )
        batch = make_batch([(1, 40), (1, 3), (1, 300)], self.shape, dtype=dtype)
        self.backend, self.metadata = NativeBackend(), batch.metadata
        self.kv = LayerKv(batch.cache_for(self.backend).nan_to_num_(0.5))
        self.ids, self.counts = torch.zeros(3, dtype=torch.int32), (heads, kv_heads)
        self.embedding, self.weights = random(50, hidden), random(heads + kv_heads, head_dim)
        self.rule = NormRule(random(hidden), 1e-5, offset=1.0, is_centred=True)
        self.head_norm = HeadNorm(
            q_weight=self.weights[0], k_weight=self.weights[-1], weights=self.weights, eps=1e-5, offset=1.0
        )
        self.rotation = Rotation(random(400, 10), torch.tensor([39, 2, 299]), torch.rand(400))
        widths = (heads + 2 * kv_heads) * head_dim
        self.qkv, self.out = PackedWeight(LIBRARY, random(widths, hidden)), PackedWeight(LIBRARY, random(hidden, 96))
        self.logits = PackedWeight(LIBRARY, random(50, hidden))
        self.ups = [
            PackedWeight(LIBRARY, random(rule.num_parts * inner, hidden), activation=rule)
            for rule in map(Activation, get_args(ActivationKind))
        ]
        self.up, self.down = (PackedWeight(LIBRARY, random(*size)) for size in ((2 * inner, hidden), (hidden, inner)))
        self.metadata.is_padded = False
        self.backend.prepare(self.metadata)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Heads normalised together and one by one, rotated in part, attention with a softcap and sinks."""
        heads = self.qkv(x, None).view(len(x), -1, self.shape.head_dim)
        squares = op("head_squares", "cpu")(heads, *self.counts)
        widths = tuple(count * self.shape.head_dim for count in self.counts)
        op("norm_width", "cpu")(heads, *self.counts, squares, self.weights, widths, 1e-5)
        query, key, value = op("qk_norm_rope_store", "cpu")(
            heads, self.counts[1], self.head_norm, self.rotation, self.kv, self.metadata.slot_mapping
        )
        attended = self.backend.forward(query, KeyValue(key, value), self.kv, self.metadata, self.shape)
        return self.out(attended.view(len(x), -1), None)

    def __call__(self) -> torch.Tensor:
        assert LIBRARY is not None
        residual = op("embed", "cpu")(self.ids, self.embedding, 0, 3)
        op("add", "cpu")(self.logits.rows(self.ids, None, 2), residual, 0.5)
        x = op("add_norm", "cpu")(self.attend(op("norm", "cpu")(residual, self.rule)), residual, self.rule, 0.25)
        for up in self.ups:
            x = op("add_norm", "cpu")(self.down(up(x, None), None), residual, self.rule)
        gated = op("gate", "cpu")(self.up(x, None), Activation("swiglu_clamped", limit=1))
        logits = self.logits(self.down(gated, None), None)
        op("cap_logits", "cpu")(logits, 2, 3)
        return logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_operation_of_the_layers_goes_on_a_tape(dtype: torch.dtype) -> None:
    """Oracle: the same step without a tape, bit by bit, with other tokens each time; C gets whole numbers as floats."""
    assert LIBRARY is not None
    step = EveryOperation(dtype)
    recorded = TapeRecorder(LIBRARY, SingleRank()).record(step)
    with torch.inference_mode():
        for run in range(5):
            step.ids.copy_(torch.randint(50, (3,), generator=torch.Generator().manual_seed(run)))
            expected = step().clone()
            assert torch.equal(recorded.run(), expected)
            assert not expected.isnan().any()
    assert recorded.is_settled and recorded.run_count == 2


def test_a_recording_with_another_result_is_thrown_away(caplog: pytest.LogCaptureFixture) -> None:
    """A step whose input moves, so that the tape reads the old address.  Oracle: the step itself."""
    assert LIBRARY is not None
    scores = [torch.eye(7)[i : i + 1] for i in range(5)]
    turns = iter(scores)
    recording_ = TapeRecorder(LIBRARY, SingleRank()).record(lambda: best_tokens(LIBRARY, next(turns)))
    found = [recording_.run().item() for _ in range(3)]
    assert found == [0, 2, 3]  # in the second run the step is made twice
    assert not recording_.is_settled and "its recording gave another result" in caplog.text


def test_python_between_the_kernels() -> None:
    """A tape runs the function given to ``call`` again in its place, and does not record its inner calls.  Oracle: the
    sums; while calls are named, the names in their order."""
    assert LIBRARY is not None
    ids, out = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    rows, token_ids, computed = (torch.zeros(1, dtype=torch.int32) for _ in range(3))
    advance = partial(
        LIBRARY.advance_decodes, rows.data_ptr(), ids.data_ptr(), out.data_ptr(), 1, token_ids.data_ptr(), 1
    )

    def increase() -> None:
        ids.add_(1)
        advance(computed.data_ptr())

    tape, seen = Tape(LIBRARY), torch.zeros(1, dtype=torch.int32)
    with recording(tape):
        advance(computed.data_ptr())
        call(increase)
        advance(seen.data_ptr())
    assert (len(tape._parts), seen.item()) == (3, 1)
    for turn in range(2, 5):
        tape.run()
        assert (ids.item(), seen.item(), computed.item()) == (turn, turn, turn)
    names: list[str] = []

    def naming(name: str) -> AbstractContextManager[None]:
        names.append(name)
        return nullcontext()

    with naming_calls(naming):
        tape.run()
        advance(seen.data_ptr())
    tape.run()
    assert names == ["advance_decodes", "collective", "advance_decodes", "advance_decodes", "advance_decodes"]
    assert (ids.item(), computed.item()) == (6, 6)


def test_memory_is_used_again_and_never_twice() -> None:
    """Random allocations.  Oracle: a set of bytes in use."""
    memory, rng = TapeMemory(), np.random.default_rng(0)
    held: list[torch.Tensor] = []
    for _ in range(500):
        if held and rng.random() < 0.5:
            held.pop(int(rng.integers(len(held))))
        made = memory.allocate(torch.Size((int(rng.integers(1, 3000)), 2)), torch.float32)
        assert made.data_ptr() % 64 == 0 and made.is_contiguous()
        spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in held)
        assert all(made.data_ptr() >= end or made.data_ptr() + made.nbytes <= start for start, end in spans)
        held.append(made.view(-1)[: int(made.numel())])
        del made
        if len(held) > 20:
            held.clear()
    del held
    gc.collect()
    assert sum(end - first for _, first, end in memory._free) == memory.num_bytes
    assert len(memory._free) == len(memory._slabs) <= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_best_tokens(dtype: torch.dtype) -> None:
    """Oracle: ``row_argmax``: the first of equal values, NaN above all, rows by themselves, infinities."""
    assert LIBRARY is not None
    for width in (1, 5, 16, 17, 1000):
        scores = torch.randn(12, width + 3).to(dtype)[:, :width]
        scores[1] = 3.0
        scores[2] = float("-inf")
        scores[3, width // 2] = float("inf")
        scores[4, width // 2 :] = float("nan")
        scores[5] = scores[5].sort().values
        scores[6, :] = 0.0
        scores[6, width // 3] = -0.0
        assert torch.equal(best_tokens(LIBRARY, scores), row_argmax(scores.contiguous()).to(torch.int32))


def test_an_engine_with_tapes_says_the_same(checkpoint: Callable[..., Path]) -> None:
    """Oracle: ``enforce_eager``.  Greedy and sampled rows of different lengths, more than any tape holds."""
    folder = str(checkpoint("qwen3"))
    prompts = [[3 + i, 9, 4 + 2 * i] * (1 + i) for i in range(10)]
    params = [
        SamplingParams(temperature=0.8 * (i % 3 == 2), seed=i, max_tokens=9 + 3 * i, ignore_eos=True) for i in range(10)
    ]
    options: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "block_size": 4, "max_model_len": 96, "num_gpu_blocks_override": 90,
    }  # fmt: skip
    found, used = [], []
    compare = TapeRecording._compare

    def noted(self: TapeRecording, tape: Any) -> Any:
        used.append(self)
        return compare(self, tape)

    for is_eager in (True, False):
        with (
            patch.object(TapeRecording, "_compare", noted),
            LLM(folder, enforce_eager=is_eager, **options) as llm,
        ):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append([output.outputs[0].token_ids for output in outputs])
        assert bool(used) != is_eager
    assert found[0] == found[1]
    assert all(one.is_settled for one in used)
