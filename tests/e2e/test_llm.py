"""The Python API on one rank, compared with transformers where possible, else with itself."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tests.ranks.launch import ROOT
from tests.services import engine_of, stepping
from tp_engine import LLM, ConfigError, RequestError, SamplingParams
from tp_engine.engine.engine import Engine
from tp_engine.errors import EngineDeadError

VOCAB = 203
PROMPTS = [[5, 9, 13, 7], list(range(20, 50)), [100, 3, 50], [7] * 17]


@pytest.fixture(scope="module")
def folder(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("qwen3", vocab_size=VOCAB)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    options: dict[str, Any] = {
        "max_model_len": 128,
        "num_gpu_blocks_override": 128,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 16,
    }
    with LLM(str(folder), device="cpu", dtype="float32", **options) as engine:
        yield engine
        engine.engine.check_integrity()
        assert engine.engine.stats().num_used_blocks == 0


def tokens(llm: LLM, prompts: list[list[int]], **params: object) -> list[list[int]]:
    """Token ids of the first sequence of each prompt."""
    outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False)  # type: ignore[arg-type]
    return [output.outputs[0].token_ids for output in outputs]


def reference_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """transformers' log-softmax (len, vocab) in fp32: row i scores token i + 1."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    """Oracle: each prompt run alone, with its own parameters."""
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 2, 5, 1)]
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for prompt, one, output in zip(PROMPTS, params, outputs, strict=True):
        assert llm.generate([prompt], one, use_tqdm=False)[0].outputs[0].token_ids == output.outputs[0].token_ids
        assert output.outputs[0].finish_reason == "length" and output.finished
        assert output.metrics is not None and output.metrics.ttft_s > 0


def test_prompt_forms_are_equivalent(llm: LLM) -> None:
    """Oracle: a list of lists; a flat list and a mapping mean the same prompt."""
    params = SamplingParams(temperature=0, max_tokens=4)
    expected = llm.generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].token_ids
    for form in (PROMPTS[0], {"prompt_token_ids": PROMPTS[0]}, [{"prompt_token_ids": PROMPTS[0]}]):
        assert llm.generate(form, params, use_tqdm=False)[0].outputs[0].token_ids == expected


def test_sampling_parameters_as_mappings_and_for_each_prompt(llm: LLM) -> None:
    """Oracle: the same parameters as SamplingParams; one for each prompt, and errors that say so."""
    one = SamplingParams(temperature=0, max_tokens=4)
    expected = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, one, False)]
    for params in ({"temperature": 0, "max_tokens": 4}, [{"temperature": 0, "max_new_tokens": 4}] * len(PROMPTS)):
        outputs = llm.generate(PROMPTS, params, use_tqdm=False, priority=list(range(len(PROMPTS))))
        assert [output.outputs[0].token_ids for output in outputs] == expected
    for wrong, words in (
        ([one] * 2, "2 sampling_params for 4 prompts"),
        ({"temp": 0}, "did you mean temperature"),
        ("greedy", "must be SamplingParams, or a mapping"),
        ([one, None, 3, one], "sampling_params is 3 of type int"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.generate(PROMPTS, wrong, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="1 priority for 4 prompts"):
        llm.generate(PROMPTS, one, use_tqdm=False, priority=[1])


def test_a_prompt_is_truncated_from_the_left(llm: LLM) -> None:
    """Oracle: the prompt's last tokens, alone."""
    params = SamplingParams(temperature=0, max_tokens=4)
    cut = llm.generate([PROMPTS[0] * 3], params.clone(truncate_prompt_tokens=2), use_tqdm=False)[0]
    assert cut.prompt_token_ids == (PROMPTS[0] * 3)[-2:]
    alone = llm.generate([cut.prompt_token_ids], params, use_tqdm=False)[0]
    assert cut.outputs[0].token_ids == alone.outputs[0].token_ids


def test_what_a_sleeping_engine_needs(llm: LLM) -> None:
    """Oracle: the words of the errors; the tokens before the sleep."""
    params = SamplingParams(temperature=0, max_tokens=4)
    before = llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs[0].token_ids
    llm.sleep()
    with pytest.raises(RequestError, match=r"the engine sleeps.*wake_up\(\)"):
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
    with pytest.raises(RequestError, match="wake_up"):
        llm.resume()
    llm.wake_up()
    assert llm.generate(PROMPTS[:1], params, use_tqdm=False)[0].outputs[0].token_ids == before
    llm.pause()
    with pytest.raises(RequestError, match=r"resume\(\)"):
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
    llm.resume()


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([5, VOCAB], {}, ("203", "202")),
        ([], {}, ("empty",)),
        ([3] * 128, {}, ("128",)),
        ([5], {"stop_token_ids": [VOCAB]}, ("stop_token_ids", "202")),
        ([5], {"logit_bias": {999: 1.0}}, ("logit_bias", "999")),
        ([5], {"logprobs": 1000}, ("logprobs", "1000")),
        ("text", {}, ("tokenizer",)),
    ],
)
def test_one_bad_prompt_raises_before_anything_runs(
    llm: LLM, prompt: object, params: dict[str, object], words: tuple[str, ...]
) -> None:
    """Oracle: the error names the value and the rule; no request is left behind."""
    before = llm.engine.stats()
    with pytest.raises(RequestError) as error:
        llm.generate([PROMPTS[0], prompt], SamplingParams(**params), use_tqdm=False)  # type: ignore[arg-type]
    for word in words:
        assert word in str(error.value)
    assert not llm.engine.has_unfinished
    assert llm.engine.stats().num_prefix_query_tokens == before.num_prefix_query_tokens


def test_a_seed_gives_the_same_sample_whatever_else_is_in_the_batch(llm: LLM) -> None:
    """Oracle: the request run alone."""
    params = {"temperature": 1.3, "top_p": 0.95, "seed": 11, "max_tokens": 12, "ignore_eos": True}
    alone = tokens(llm, [PROMPTS[1]], **params)[0]
    batch = [PROMPTS[0], PROMPTS[2], PROMPTS[1], PROMPTS[3]]
    assert tokens(llm, batch, **params)[2] == alone
    assert tokens(llm, [PROMPTS[1]], **{**params, "seed": 12})[0] != alone


def test_n_samples_share_the_prompt_and_differ(llm: LLM) -> None:
    """Oracle: sample i of a seed is the single sample of seed + i; every greedy sample equals the single one."""
    params = {"temperature": 1.2, "seed": 5, "max_tokens": 10, "ignore_eos": True}
    output = llm.generate([PROMPTS[1]], SamplingParams(n=4, **params), use_tqdm=False)[0]  # type: ignore[arg-type]
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    single = [tokens(llm, [PROMPTS[1]], **{**params, "seed": 5 + i})[0] for i in range(4)]
    assert [sample.token_ids for sample in output.outputs] == single
    greedy = llm.generate([PROMPTS[3]], SamplingParams(n=3, temperature=0, max_tokens=6), use_tqdm=False)[0]
    assert len({tuple(sample.token_ids) for sample in greedy.outputs}) == 1


def test_logprobs_equal_transformers(llm: LLM, folder: Path) -> None:
    """Oracle: transformers' log-softmax at every position of the prompt and of the answer."""
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    output = llm.generate([PROMPTS[1]], params, use_tqdm=False)[0]
    prompt, generated = PROMPTS[1], output.outputs[0].token_ids
    expected = reference_logprobs(folder, prompt + generated)
    logprobs, prompt_logprobs = output.outputs[0].logprobs, output.prompt_logprobs
    assert logprobs is not None and prompt_logprobs is not None
    assert len(logprobs) == 6 and len(prompt_logprobs) == len(prompt) and prompt_logprobs[0] is None
    found = [*(entry for entry in prompt_logprobs[1:] if entry is not None), *logprobs]
    for position, (entry, token_id) in enumerate(zip(found, prompt[1:] + generated, strict=True)):
        assert entry[token_id].logprob == pytest.approx(float(expected[position, token_id]), abs=2e-3)
        top = expected[position].topk(2).indices.tolist()
        assert set(top) <= set(entry)


def test_processors_steer_the_choice(llm: LLM) -> None:
    """Oracle: by hand.  A bias of 100 forces a token; allowed ids limit the choice; min_tokens delays a stop."""
    assert tokens(llm, [PROMPTS[0]], temperature=0, max_tokens=3, logit_bias={77: 100.0})[0] == [77, 77, 77]
    allowed = tokens(llm, [PROMPTS[0]], temperature=1.5, max_tokens=20, allowed_token_ids=[8, 9], ignore_eos=True)[0]
    assert set(allowed) <= {8, 9}
    free = tokens(llm, [PROMPTS[0]], temperature=0, max_tokens=8, ignore_eos=True)[0]
    stopped = llm.generate(
        [PROMPTS[0]], SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[free[2]]), use_tqdm=False
    )[0].outputs[0]
    first = free.index(free[2])
    assert (stopped.token_ids, stopped.finish_reason, stopped.stop_reason) == (free[: first + 1], "stop", free[2])
    held = tokens(llm, [PROMPTS[0]], temperature=0, max_tokens=8, stop_token_ids=[free[2]], min_tokens=5)[0]
    assert len(held) >= 6 or held[-1] != free[2]
    assert free[2] not in held[:5]


def test_prefix_cache_and_salt(llm: LLM) -> None:
    """Oracle: the second run finds all full blocks but the last; with another salt, or after a reset of the cache, it
    finds none; the answer is always the same."""
    prompt = [(17 * i) % 200 + 3 for i in range(64)]
    params = {"temperature": 0, "max_tokens": 5}
    first, second, salted, salted_again = (
        llm.generate([prompt], SamplingParams(cache_salt=salt, **params), use_tqdm=False)[0]  # type: ignore[arg-type]
        for salt in (None, None, "tenant", "tenant")
    )
    assert [o.num_cached_tokens for o in (first, second, salted, salted_again)] == [0, 48, 0, 48]
    assert len({tuple(o.outputs[0].token_ids) for o in (first, second, salted, salted_again)}) == 1
    assert llm.reset_prefix_cache()
    again = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0]  # type: ignore[arg-type]
    assert again.num_cached_tokens == 0 and again.outputs[0].token_ids == first.outputs[0].token_ids


def test_a_request_larger_than_the_pool_is_refused_and_one_that_grows_ends_with_length(folder: Path) -> None:
    """Oracle: arithmetic.  In four blocks of 4 tokens, 17 never fit; a sequence that grows ends at 16 + 1 tokens."""
    with LLM(
        str(folder), device="cpu", dtype="float32", block_size=4, num_gpu_blocks_override=4, max_model_len=64
    ) as small:
        with pytest.raises(RequestError, match="17"):
            small.generate([[5] * 17], SamplingParams(max_tokens=1), use_tqdm=False)
        output = small.generate(
            [[5] * 6], SamplingParams(temperature=0, max_tokens=50, ignore_eos=True), use_tqdm=False
        )[0]
        assert output.outputs[0].finish_reason == "length"
        assert 10 <= len(output.outputs[0].token_ids) <= 11


@pytest.mark.slow
def test_five_engines_one_after_another(folder: Path) -> None:
    """Oracle: the first engine's answer; one process creates and closes five engines (promise 7)."""
    answers = set()
    for _ in range(5):
        with LLM(str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=16, max_model_len=64) as engine:
            answers.add(tuple(tokens(engine, [PROMPTS[0]], temperature=0, max_tokens=4)[0]))
        engine.close()
        for use in (engine.reset_prefix_cache, engine.reset_mm_cache, engine.pause):
            with pytest.raises(EngineDeadError, match="closed"):
                use()
    assert len(answers) == 1


@pytest.mark.slow
def test_the_same_run_twice_is_identical(folder: Path) -> None:
    """Oracle: the first engine's tokens; two fresh engines, requests without a seed, mixed lengths, preemptions."""
    runs = []
    for _ in range(2):
        options: dict[str, Any] = {
            "num_gpu_blocks_override": 14,
            "block_size": 4,
            "max_model_len": 48,
            "max_num_batched_tokens": 32,
        }
        with LLM(str(folder), device="cpu", dtype="float32", max_num_seqs=8, seed=3, **options) as engine:
            params = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=12, n=2)
            outputs = engine.generate(PROMPTS, params, use_tqdm=False)
            assert engine.engine.stats().num_preemptions > 0
            runs.append([[sample.token_ids for sample in output.outputs] for output in outputs])
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.03)])
def test_half_precision(folder: Path, dtype: str, tolerance: float) -> None:
    """Oracle: transformers' fp32 log-probabilities of the tokens that half precision chose."""
    with LLM(str(folder), device="cpu", dtype=dtype, num_gpu_blocks_override=16, max_model_len=64) as engine:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
        output = engine.generate([PROMPTS[1]], params, use_tqdm=False)[0].outputs[0]
    expected = reference_logprobs(folder, PROMPTS[1] + output.token_ids)
    assert output.logprobs is not None
    for i, (entry, token_id) in enumerate(zip(output.logprobs, output.token_ids, strict=True)):
        reference = float(expected[len(PROMPTS[1]) + i - 1, token_id])
        assert entry[token_id].logprob == pytest.approx(reference, abs=tolerance, rel=tolerance)


@pytest.mark.slow
def test_memory_does_not_grow_once_warm(llm: LLM) -> None:
    """Oracle: the process's size after the first rounds of the same load (row A10)."""
    params = SamplingParams(temperature=0.7, max_tokens=10, logprobs=2, ignore_eos=True)

    def rounds(count: int) -> int:
        for _ in range(count):
            llm.generate(PROMPTS * 3, params, use_tqdm=False)
        return llm.engine.memory_growth_bytes()

    warm = rounds(10)
    assert rounds(10) - warm < 2 << 20


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 5}, ("5", "1, 2, 4, 8")),
        ({"max_model_len": 4096}, ("4096", "512")),
        ({"blok_size": 16}, ("blok_size", "block_size")),
        ({"block_size": 24}, ("24", "power of two")),
        ({"dtype": "int8"}, ("int8", "float32")),
        ({"model": "/no/such/folder"}, ("/no/such/folder",)),
        ({"num_gpu_blocks_override": 8, "kv_cache_memory_bytes": 4096}, ("num_gpu_blocks_override",)),
    ],
)
def test_configuration_errors_name_value_and_remedy(folder: Path, options: dict[str, object], words: list[str]) -> None:
    """Oracle: the message's words; the refusal comes before any device or process is used."""
    with pytest.raises(ConfigError) as error:
        LLM(**{"model": str(folder), "device": "cpu", **options})  # type: ignore[arg-type]
    for word in words:
        assert word in str(error.value)


def test_calls_of_several_threads_run_together(llm: LLM) -> None:
    """Oracle: the same calls, one after the other."""
    alone = [tokens(llm, [prompt] * 2, temperature=0, max_tokens=8) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        calls = [pool.submit(tokens, llm, [prompt] * 2, temperature=0, max_tokens=8) for prompt in PROMPTS]
    assert [call.result() for call in calls] == alone


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, also where a shell has started the tests in its background, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_within_a_step_ends_the_call_and_not_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while rank 0 runs its model, as in a notebook."""
    before, execute = tokens(llm, PROMPTS, temperature=0, max_tokens=8), engine_of(llm).worker.execute

    def interrupted(plan: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return execute(plan)

    monkeypatch.setattr(engine_of(llm).worker, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokens(llm, PROMPTS, temperature=0, max_tokens=8)
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens(llm, PROMPTS, temperature=0, max_tokens=8) == before


def test_what_a_program_excluded_from_garbage_collection_stays_excluded(folder: Path) -> None:
    """Oracle: the number of excluded objects before an engine in this process; conftest.py has excluded them."""
    before = gc.get_freeze_count()
    with LLM(str(folder), device="cpu", max_model_len=32, num_gpu_blocks_override=8):
        beside = gc.get_freeze_count()
    assert before > 10_000 and 0.9 * before < beside <= before and 0.9 * before < gc.get_freeze_count() <= before


_SCRIPT = """
import gc
from tp_engine import LLM
with LLM({folder!r}, device="cpu", max_model_len=32, num_gpu_blocks_override=8):
    print(gc.get_freeze_count())
print(gc.get_freeze_count())
"""


@pytest.mark.slow
def test_an_engine_leaves_the_programs_garbage_collection_alone(folder: Path) -> None:
    """Oracle: the number of excluded objects, beside the engine and afterwards."""
    script = _SCRIPT.format(folder=str(folder))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=90, cwd=ROOT)
    beside, after = map(int, done.stdout.split())
    assert beside < 1000 and after < 1000


def test_a_steady_step_is_a_few_calls(llm: LLM) -> None:
    """Oracle: counted calls of the package's functions in the shortest step: 77, and 2 for each further request."""
    package, counts = str(ROOT / "tp_engine"), [0]

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            if frame.f_code is Engine.step.__code__:
                counts.append(0)
            counts[-1] += 1

    def shortest(num_requests: int) -> int:
        counts[:] = [0]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        requests = [llm.input_processor.process([5, 9], params, request_id=str(one)) for one in range(num_requests)]
        with stepping(llm) as engine:
            for request in requests:
                engine.add_request(request)
            sys.setprofile(count)
            try:
                while engine.has_unfinished:
                    engine.step()
            finally:
                sys.setprofile(None)
        return min(counts[1:-1])

    alone = shortest(1)
    assert alone <= 85
    assert shortest(9) - alone <= 2 * 8
