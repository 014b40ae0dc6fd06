"""New weights for running engines: exact, on all ranks or on none, under load, and in a loop that trains a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.covers import covers
from tests.ranks.launch import TWO_RANKS
from tests.services import engine_of, stepping
from tp_engine import LLM, AsyncLLM, RequestError, SamplingParams
from tp_engine.engine.admin_commands import act
from tp_engine.errors import EngineDeadError, RankError
from tp_engine.requests.outputs import RequestOutput
from tp_engine.worker import weight_update
from tp_engine.worker.memory.kv_cache import resident_bytes
from tp_engine.worker.sleep import drop_memory, take_memory

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_children")]

OPTIONS: dict[str, Any] = {**TWO_RANKS, "num_gpu_blocks_override": 64, "max_model_len": 128, "block_size": 8}
PROMPTS = [list(range(3, 40)), [5, 9, 13, 7] * 6]
PARAMS = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
SCORED = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)

Found = list[tuple[list[int], Any]]


def run(llm: LLM) -> tuple[Found, list[int]]:
    """Tokens and log-probabilities, bit for bit, and the numbers of cached tokens."""
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    found: Found = [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]
    (scored,) = llm.generate([PROMPTS[0]], SCORED, use_tqdm=False)
    found.append(([], scored.prompt_logprobs))
    return found, [one.num_cached_tokens for one in outputs]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("qwen3", {"tensor_parallel_size": 2}),
        ("llama", {"tensor_parallel_size": 1, "tie": True}),
        ("qwen3", {"tensor_parallel_size": 1, "quantization": "int8"}),
        ("qwen3-moe", {"tensor_parallel_size": 1}),
        ("deepseek-v3.2", {"tensor_parallel_size": 1, "index_topk": 256}),
        ("qwen3", {"tensor_parallel_size": 1, "enforce_eager": True, "dtype": "bfloat16", "quantization": "fp8"}),
    ],
    ids=["tp2", "tied", "int8", "experts", "short-contexts-need-no-indexer", "fp8-eager"],
)
@covers("new weights", lambda architecture, options: [(architecture, options["tensor_parallel_size"])])
def test_an_engine_with_new_weights_is_one_that_starts_with_them(
    architecture: str, options: dict[str, Any], checkpoint: Callable[..., Path]
) -> None:
    """Oracle: an engine that starts from the second checkpoint, bit for bit; no cached token of other weights; and the
    first engine's own answers when it gets its weights back.  Old weights are freed."""
    shape = {name: options[name] for name in ("tie", "index_topk") if name in options}
    folders = [checkpoint(architecture, seed=seed, **shape) for seed in (11, 12)]
    settings = {**OPTIONS, **{name: value for name, value in options.items() if name not in shape}}
    with LLM(str(folders[1]), **settings) as llm:
        expected, _ = run(llm)
    with LLM(str(folders[0]), **settings) as llm:
        before, _ = run(llm)
        assert before != expected and llm.weight_version == "default"
        growth = llm.engine.memory_growth_bytes()
        assert llm.update_weights(tensors_of(folders[1]).items()) == "1" == llm.weight_version
        assert run(llm) == (expected, [0, 0])
        assert run(llm) == (expected, [32, 16])
        assert llm.update_weights_from_disk(folders[0], weight_version="step 7", flush_cache=True) == "step 7"
        assert run(llm) == (before, [0, 0])
        assert llm.generate(PROMPTS, PARAMS, use_tqdm=False)[0].weight_version == "step 7"
        for _ in range(3):
            llm.update_weights_from_disk(folders[0])
        assert llm.engine.memory_growth_bytes() < growth + (32 << 20)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_a_wrong_tensor_changes_nothing(
    tensor_parallel_size: int, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the answers before, cached ones; the error names the tensor and what is wrong with it."""
    folders = [checkpoint("qwen3", seed=seed) for seed in (11, 12)]
    good, name = tensors_of(folders[1]), "model.layers.1.mlp.down_proj.weight"
    wrong = {
        f"missing: {name}": {key: tensor for key, tensor in good.items() if key != name},
        r"unexpected: model\.nonsense": good | {"model.nonsense": good[name]},
        rf"wrongly shaped: {name} is \(3, 96\) instead of \(64, 96\)": good | {name: good[name][:3]},
        f"of the wrong type: {name} is stored as torch.int32": good | {name: good[name].to(torch.int32)},
        "there are no tensors": {},
    }
    with LLM(str(folders[0]), **{**OPTIONS, "tensor_parallel_size": tensor_parallel_size}) as llm:
        expected, _ = run(llm)
        for text, tensors in wrong.items():
            with pytest.raises(RequestError, match=text):
                llm.update_weights(tensors.items())
        with pytest.raises(RequestError, match="comes twice"):
            llm.update_weights([*good.items(), *good.items()])
        with pytest.raises(RequestError, match=r"describes another model .*it differs in hidden_size"):
            llm.update_weights_from_disk(checkpoint("qwen3", hidden_size=128))
        with pytest.raises(RequestError, match="no such folder"):
            llm.update_weights_from_disk("./nowhere")
        with monkeypatch.context() as patched, pytest.raises(RequestError, match=r"rank 0: .* 1048576.00 GiB beside"):
            patched.setattr(weight_update, "local_weight_bytes", lambda model, world_size, dtype: 1 << 50)
            llm.update_weights_from_disk(folders[1])
        assert run(llm) == (expected, [32, 16]) and llm.weight_version == "default"


def test_a_rank_that_can_not_prepare_keeps_all_on_the_old_weights(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the answers before, on both ranks; then those of an engine with the new weights."""
    folders = [checkpoint("qwen3", seed=seed) for seed in (11, 12)]
    with LLM(str(folders[1]), **OPTIONS) as llm:
        expected, _ = run(llm)
    monkeypatch.setenv("TP_ENGINE_FAULT", "1:prepare:raise")
    with LLM(str(folders[0]), **OPTIONS) as llm:
        before, _ = run(llm)
        with pytest.raises(RequestError, match=r"^rank 1: RuntimeError: injected"):
            llm.update_weights_from_disk(folders[1])
        assert run(llm) == (before, [32, 16])
        llm.update_weights_from_disk(folders[1])
        assert run(llm) == (expected, [0, 0])


@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_a_rank_that_dies_ends_the_job(
    phase: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: ``RankError`` names the rank; there are no answers from a mixture of weights, because there are none."""
    folders = [checkpoint("qwen3", seed=seed) for seed in (11, 12)]
    monkeypatch.setenv("TP_ENGINE_FAULT", f"1:{phase}:kill")
    with LLM(str(folders[0]), **OPTIONS) as llm:
        with pytest.raises(RankError, match="rank 1"):
            llm.update_weights(tensors_of(folders[1]).items())
        with pytest.raises(EngineDeadError):
            run(llm)


@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 1, "enforce_eager": True}])
def test_an_engine_that_sleeps_has_no_cache_and_wakes_up_unchanged(
    options: dict[str, Any], checkpoint: Callable[..., Path]
) -> None:
    """Oracle: the answers before, and of an engine with the new weights if they come meanwhile; the resident pages of
    the cache; a kept request's tokens of a run without sleep."""
    folders = [checkpoint("qwen3", seed=seed) for seed in (11, 12)]
    settings = {**OPTIONS, **options, "num_gpu_blocks_override": 512}
    with LLM(str(folders[1]), **settings) as llm:
        expected, _ = run(llm)
    with LLM(str(folders[0]), **settings) as llm:
        before, _ = run(llm)
        runner = engine_of(llm).worker.runner
        assert runner is not None and resident_bytes(runner.blocks.raw) > 0
        llm.sleep()
        assert resident_bytes(runner.blocks.raw) == 0
        for refused in (llm.resume, lambda: run(llm)):
            with pytest.raises(RequestError):
                refused()
        with pytest.raises(RequestError, match=r"level is 2; it must be 0 or 1: .* update_weights replaces") as info:
            llm.sleep(level=2)
        assert info.value.param == "level"
        llm.wake_up(["weights"])
        assert resident_bytes(runner.blocks.raw) == 0
        for unknown in (["weight"], ["kv_cache", ""]):
            with pytest.raises(RequestError, match="tags has"):
                llm.wake_up(unknown)
        llm.wake_up(["kv_cache"])
        assert run(llm) == (before, [0, 0])
        llm.sleep()
        llm.update_weights_from_disk(folders[1])
        llm.wake_up()
        assert run(llm) == (expected, [0, 0])
        request = llm.input_processor.process(PROMPTS[0], PARAMS, request_id="kept")
        tokens: list[int] = []
        with stepping(llm) as engine:
            engine.add_request(request)
            for _ in range(6):
                tokens += [token for delta in engine.step() for token in delta.new_token_ids]
            act(engine.operator, "reset_prefix_cache", {"reset_running_requests": True})
            tokens += [token for delta in engine.step() for token in delta.new_token_ids]
            act(engine.operator, "sleep", {})
            act(engine.operator, "wake_up", {})
            while engine.has_unfinished:
                tokens += [token for delta in engine.step() for token in delta.new_token_ids]
        assert tokens == expected[0][0]


def test_memory_of_a_gpu_is_dropped_below_all_views() -> None:
    """Oracle: the storage's size, and zeros in every view afterwards; storages of a CPU are as those of a GPU here."""
    raw = torch.ones(6, 8, dtype=torch.uint8)
    view = raw.view(torch.float32)[:, :1]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "device", property(lambda tensor: torch.device("cuda")))
        drop_memory(raw)
        assert raw.untyped_storage().nbytes() == 0
        take_memory(raw)
        assert raw.untyped_storage().nbytes() == 48
    assert not raw.any() and not view.any()


def scores(model: Any, output: RequestOutput) -> torch.Tensor:
    """The trainer's log-probabilities of the generated tokens, with the graph for a gradient."""
    generated = output.outputs[0].token_ids
    logits = model(torch.tensor([[*output.prompt_token_ids, *generated]])).logits[0].float()
    log_probabilities = logits.log_softmax(-1)[len(output.prompt_token_ids) - 1 : -1]
    chosen: torch.Tensor = log_probabilities.gather(1, torch.tensor(generated)[:, None])[:, 0]
    return chosen


def test_a_policy_gradient(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """REINFORCE with a reward for even tokens, weights pushed after each step.  Oracle: transformers' forward of the
    trainer's own weights (1e-5); in the end an engine that starts from what the trainer saves, bit for bit."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    folder = checkpoint("qwen3", seed=11, tie=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    sampled = SamplingParams(n=1, temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=0)
    rewards = []
    with LLM(str(folder), **OPTIONS) as llm:
        for step in range(4):
            outputs = llm.generate(PROMPTS * 3, sampled, use_tqdm=False)
            losses, mean = [], []
            for output in outputs:
                own = output.outputs[0]
                assert own.logprobs is not None
                engine = torch.tensor(
                    [one[token].logprob for one, token in zip(own.logprobs, own.token_ids, strict=True)]
                )
                trainer = scores(model, output)
                assert (engine - trainer).abs().max() < 1e-5, step
                gain = (torch.tensor(own.token_ids) % 2 == 0).float()
                losses.append(-(trainer * (gain - 0.5)).sum())
                mean.append(gain.mean().item())
                assert output.weight_version == (None if step == 0 else f"step {step}")
            rewards.append(sum(mean) / len(mean))
            optimizer.zero_grad()
            torch.stack(losses).mean().backward()
            optimizer.step()
            llm.update_weights(model.named_parameters(), weight_version=f"step {step + 1}")
        found, _ = run(llm)
    assert rewards[-1] > rewards[0]
    model.save_pretrained(tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert run(llm)[0] == found


def test_requests_that_are_kept_go_on_with_the_new_weights(checkpoint: Callable[..., Path]) -> None:
    """Oracle: an engine with the new weights, asked to continue what each request had when it was paused; requests that
    come in the pause wait.  An update of running requests is refused."""
    folders = [checkpoint("qwen3", seed=seed) for seed in (11, 12)]
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [[*PROMPTS[0], number] for number in range(6)]

    async def ask(llm: AsyncLLM, prompt: list[int], seen: list[list[int]], name: str | None = None) -> RequestOutput:
        async for output in llm.generate(prompt, params, request_id=name):
            seen.append(list(output.outputs[0].token_ids))
        return output

    async def scenario() -> tuple[list[RequestOutput], list[int]]:
        async with AsyncLLM(str(folders[0]), **OPTIONS) as llm:
            seen: list[list[list[int]]] = [[] for _ in prompts]
            tasks = [asyncio.create_task(ask(llm, *both)) for both in zip(prompts, seen, strict=True)]
            while min(map(len, seen)) < 5:
                await asyncio.sleep(0.001)
            with pytest.raises(RequestError, match="pause the engine"):
                await llm.update_weights_from_disk(folders[1])
            await llm.pause("keep")
            for _ in range(50):  # what the engine has sent reaches the streams
                await asyncio.sleep(0.002)
            num_kept = [len(one[-1]) for one in seen]
            late = asyncio.create_task(ask(llm, PROMPTS[1], []))
            assert await llm.update_weights(tensors_of(folders[1]).items()) == "1"
            await asyncio.sleep(0.3)
            assert [len(one[-1]) for one in seen] == num_kept and not any(task.done() for task in (*tasks, late))
            assert await llm.weight_info() == {
                "weight_version": "1", "kernel_choices": "own", "is_paused": True, "is_sleeping": False,
            }  # fmt: skip
            await llm.resume()
            outputs = await asyncio.gather(*tasks, late)
            await llm.pause("wait", timeout_s=10)
            waiting = asyncio.create_task(ask(llm, PROMPTS[1], []))
            named = asyncio.create_task(ask(llm, PROMPTS[1], [], "named"))
            await asyncio.sleep(0.1)
            await llm.abort("named")
            assert (await named).outputs[0].finish_reason == "abort" and not waiting.done()
            await llm.resume()
            assert (await waiting).outputs == outputs[-1].outputs
            running = [asyncio.create_task(ask(llm, prompt, [])) for prompt in prompts]
            await asyncio.sleep(0.1)
            await llm.pause("abort")
            assert {one.outputs[0].finish_reason for one in await asyncio.gather(*running)} <= {"abort", "length"}
            await llm.resume()
            return outputs, num_kept

    outputs, num_kept = asyncio.run(asyncio.wait_for(scenario(), 120))
    assert all(5 <= count < 60 for count in num_kept) and {one.weight_version for one in outputs} == {"1"}
    with LLM(str(folders[1]), **OPTIONS) as llm:
        for prompt, count, output in zip([*prompts, PROMPTS[1]], [*num_kept, 0], outputs, strict=True):
            found = output.outputs[0].token_ids
            rest = SamplingParams(temperature=0, max_tokens=60 - count, ignore_eos=True)
            (expected,) = llm.generate([[*prompt, *found[:count]]], rest, use_tqdm=False)
            assert expected.outputs[0].token_ids == found[count:] and len(found) == 60
