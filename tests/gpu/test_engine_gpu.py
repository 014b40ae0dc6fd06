"""The whole engine on one GPU, compared: with transformers, recorded with eager, several ranks with one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.pooling_models import make_classifier, token_scores
from tp_engine import LLM, PoolingParams, SamplingParams
from tp_engine.plan import StepPlan
from tp_engine.worker.batch.padded_batch import StepSize
from tp_engine.worker.graphs.step_runner import Captured, StepRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# What the first plan of scripts/gpu_check does not run: a kind of engine that is new is in it without a word.
later = pytest.mark.later

SIZES = {"hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 64, "intermediate_size": 512}
# Engines that are compared have the same kernels; kernel_cases_candidates.py has the proofs of others.
OPTIONS: dict[str, Any] = {
    "device": "cuda", "max_model_len": 512, "num_gpu_blocks_override": 2048, "max_num_seqs": 16, "tune": "off",
}  # fmt: skip
Checkpoint = Callable[..., Path]


@pytest.fixture
def folder(checkpoint: Checkpoint) -> Path:
    """Wide weights, so that the greedy choice is far from a tie."""
    return checkpoint("qwen3", vocab_size=1000, max_position=1024, **SIZES)


@pytest.fixture(autouse=True)
def memory_comes_back() -> Iterator[None]:
    """Check that a closed engine frees its memory; its KV cache is over 60 MB.  cuBLAS keeps a workspace per stream."""
    before = allocated_without_workspaces()
    yield
    assert allocated_without_workspaces() - before < 16 << 20


def allocated_without_workspaces() -> int:
    """Bytes of tensors on the GPU, without those of closed engines: their objects refer to one another."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def prompts() -> list[list[int]]:
    """12 prompts of 1 to 200 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 1000, size).tolist() for size in (1, 2, 200, 17, 64, 33, 5, 150, 16, 48, 90, 7)]


def generated(folder: Path, params: SamplingParams, num_prompts: int = 12, **options: Any) -> list[list[int]]:
    """The token ids of the first prompts; closes the engine."""
    with LLM(str(folder), **(OPTIONS | options)) as llm:
        outputs = llm.generate(prompts()[:num_prompts], params, use_tqdm=False)
        llm.engine.check_integrity()
    return [output.outputs[0].token_ids for output in outputs]


GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)
TOP_P = SamplingParams(temperature=0.6, top_p=0.9, seed=8, max_tokens=24, ignore_eos=True)
TOP_K = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=7, max_tokens=24, ignore_eos=True)
PENALISED = SamplingParams(temperature=0.9, presence_penalty=0.5, seed=7, max_tokens=24, ignore_eos=True)


@later
def test_greedy_tokens_equal_transformers(folder: Path) -> None:
    """Oracle: transformers on the same GPU in fp32, one prompt at a time; the engine chunks, batches and records."""
    from transformers import AutoModelForCausalLM

    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda().eval()
    expected = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device="cuda")
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40, min_new_tokens=40,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        expected.append(out[0, len(prompt) :].tolist())
    del model
    assert generated(folder, GREEDY, dtype="float32", max_num_batched_tokens=64) == expected


@pytest.mark.parametrize("params", [GREEDY, SEEDED, TOP_K], ids=["greedy", "seeded", "top_k"])
@pytest.mark.parametrize(
    ("dtype", "num_prompts"),
    [("float32", 12), pytest.param("bfloat16", 8, marks=later), pytest.param("float16", 8, marks=later)],
)
def test_recorded_steps_give_the_tokens_of_eager_ones(
    folder: Path, dtype: str, num_prompts: int, params: SamplingParams
) -> None:
    """Oracle: the same engine with ``enforce_eager``.

    12 rows run in a recording of 16.  8 rows need no padding; padding may make a library choose another product, which
    rounds differently.
    """
    recorded, eager = (
        generated(folder, params, num_prompts, dtype=dtype, enforce_eager=flag) for flag in (False, True)
    )
    assert recorded == eager


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["recorded", "eager"])
def test_quantised_weights(folder: Path, quantization: str, enforce_eager: bool) -> None:
    """Oracle: the same weights on the CPU, in fp32, where activations are not quantised."""
    options: dict[str, Any] = {"dtype": "float32", "quantization": quantization}
    on_cpu = generated(folder, GREEDY, device="cpu", **options)
    assert generated(folder, GREEDY, enforce_eager=enforce_eager, max_num_batched_tokens=256, **options) == on_cpu


@later
@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3", "ForSequenceClassification"), ("qwen2", "ForProcessRewardModel")]
)
def test_scores_of_heads_equal_transformers(family: str, kind: str, tmp_path: Path) -> None:
    """Oracle: transformers on the same GPU in fp32, one prompt at a time: scores of last tokens and of all tokens."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = make_classifier(tmp_path, family, kind, vocab_size=1000, **SIZES).cuda()
    expected = [token_scores(model, prompt) for prompt in prompts()]
    del model
    plain = PoolingParams(use_activation=False)
    with LLM(str(tmp_path), **(OPTIONS | {"dtype": "float32", "max_num_batched_tokens": 64})) as llm:
        every = llm.encode(prompts(), plain, pooling_task="token_classify", use_tqdm=False)
        last = [] if "Process" in kind else llm.classify(prompts(), plain, use_tqdm=False)
        llm.engine.check_integrity()
    for found, scores in zip(every, expected, strict=True):
        np.testing.assert_allclose(found.outputs.data, scores, rtol=0, atol=1e-4)
    for one, scores in zip(last, expected, strict=False):
        np.testing.assert_allclose(one.outputs.probs, scores[-1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["recorded", "eager"])
@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v3.2"])
def test_latent_attention(family: str, checkpoint: Checkpoint, enforce_eager: bool) -> None:
    """Oracle: the same model on the CPU, in fp32; prompts of 200 and 150 tokens are expanded, others are absorbed.
    Those of V3.2 attend to the keys that an indexer chooses."""
    folder = checkpoint(family, vocab_size=1000, max_position=1024)
    on_cpu = generated(folder, GREEDY, device="cpu", dtype="float32")
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": enforce_eager, "max_num_batched_tokens": 256}
    assert generated(folder, GREEDY, **options) == on_cpu


@later
@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["recorded", "eager"])
def test_nothing_is_compiled_while_serving(
    folder: Path, enforce_eager: bool, quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: Triton's own hook, which Triton calls for every newly compiled kernel."""
    knobs = pytest.importorskip("triton").knobs
    compiled: list[str] = []
    options = OPTIONS | {"dtype": "bfloat16", "enforce_eager": enforce_eager, "max_num_batched_tokens": 256}
    options["quantization"] = quantization
    with LLM(str(folder), **options) as llm:
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **call: compiled.append(call["repr"]))
        for params in (GREEDY, SEEDED, TOP_K, PENALISED):
            llm.generate(prompts(), params, use_tqdm=False)
    assert not compiled


def recorded_sizes(monkeypatch: pytest.MonkeyPatch) -> list[StepSize]:
    """The sizes of the recordings with prompts that run from now on."""
    sizes: list[StepSize] = []
    replay = StepRunner.replay

    def note_and_replay(graphs: StepRunner, found: Captured, plan: StepPlan) -> Any:
        if isinstance(found.size, StepSize):
            sizes.append(found.size)
        return replay(graphs, found, plan)

    monkeypatch.setattr(StepRunner, "replay", note_and_replay)
    return sizes


@pytest.mark.parametrize("windowed", [False, pytest.param(True, marks=later)], ids=["one_table", "windows"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED, TOP_K, PENALISED], ids=["greedy", "seeded", "top_k", "penalised"])
def test_prompt_graphs_give_the_tokens_of_launched_steps(
    checkpoint: Checkpoint, folder: Path, params: SamplingParams, windowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the same engine that launches steps with prompts, in fp32, because padding may make a library choose
    another product; prompts come in chunks beside decodes, twice, so that the second ones find their prefix."""
    if windowed:
        kinds = ["sliding_attention", "full_attention"]
        window = {"use_sliding_window": True, "sliding_window": 32, "num_layers": 2, "layer_types": kinds}
        folder = checkpoint("qwen2", vocab_size=1000, max_position=1024, **SIZES | window)
    sizes, found = recorded_sizes(monkeypatch), []
    for asked in ("auto", "none"):
        options = OPTIONS | {
            "dtype": "float32",
            "max_num_batched_tokens": 128,
            "cudagraph_prefill_capture_sizes": asked,
        }
        with LLM(str(folder), **options) as llm:
            outputs = [llm.generate(prompts(), params, use_tqdm=False) for _ in range(2)]
            llm.engine.check_integrity()
        found.append([[output.outputs[0].token_ids for output in batch] for batch in outputs])
        if asked == "auto":
            assert len({size.tokens for size in sizes}) > 1 and len({size.decodes for size in sizes}) > 1, sizes
            sizes.clear()
    assert found[0] == found[1] and not sizes


@later
def test_prompt_graphs_compile_nothing_while_serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: Triton's own hook, which Triton calls for every newly compiled kernel."""
    knobs = pytest.importorskip("triton").knobs
    compiled: list[str] = []
    with LLM(str(folder), **OPTIONS, dtype="bfloat16", cudagraph_prefill_capture_sizes="auto") as llm:
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **call: compiled.append(call["repr"]))
        for params in (GREEDY, SEEDED, TOP_K, PENALISED):
            llm.generate(prompts(), params, use_tqdm=False)
    assert not compiled


@later
def test_the_same_run_twice_is_identical(folder: Path) -> None:
    """Oracle: the first run, in another engine."""
    first, second = (generated(folder, SEEDED, dtype="bfloat16") for _ in range(2))
    assert first == second


@later
def test_preempted_requests_get_their_tokens(folder: Path) -> None:
    """Oracle: the same engine with room for all; with 60 blocks some requests must wait or start again."""
    roomy = generated(folder, GREEDY, dtype="float32")
    assert generated(folder, GREEDY, dtype="float32", num_gpu_blocks_override=60) == roomy


def on_one_gpu(size: int, all_reduce: str) -> dict[str, Any]:
    """Options of ``size`` ranks on the first GPU."""
    return {"tensor_parallel_size": size, "device_ids": ",".join("0" * size), "all_reduce_backend": all_reduce}


@pytest.mark.parametrize("all_reduce", ["auto", "symm_mem"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=later)])
def test_ranks_on_one_gpu_give_the_tokens_of_one_rank(folder: Path, size: int, all_reduce: str) -> None:
    """Oracle: one rank, in fp32; the ranks exchange tensors on the host, or in shared memory on the GPU."""
    one = generated(folder, GREEDY, dtype="float32")
    options = on_one_gpu(size, all_reduce)
    assert generated(folder, GREEDY, dtype="float32", enforce_eager=True, **options) == one


@later
@pytest.mark.parametrize("params", [GREEDY, TOP_K, TOP_P], ids=["greedy", "top_k", "top_p"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_on_one_gpu_record_their_decodes(
    folder: Path, size: int, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: one rank, in fp32; every step of decodes runs from recordings on rank 0, which is this process, and so
    does what follows it: tokens are chosen from keys that are gathered in shared memory."""
    one = generated(folder, params, dtype="float32")
    num_rows: list[int] = []
    replay = StepRunner.replay

    def note_and_replay(graphs: StepRunner, found: Captured, plan: StepPlan) -> Any:
        num_rows.append(len(plan.decode_rows))
        return replay(graphs, found, plan)

    monkeypatch.setattr(StepRunner, "replay", note_and_replay)
    assert generated(folder, params, dtype="float32", **on_one_gpu(size, "symm_mem")) == one
    assert params.max_tokens is not None and len(num_rows) >= params.max_tokens - 1
