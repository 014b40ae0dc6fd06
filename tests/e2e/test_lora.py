"""Adapters in engines: bits, reloads under load, speculation, quantised bases, batch lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.covers import covers
from tests.lora_adapters import ADAPTERS, EXPERT_ADAPTERS, greedy_by_peft, make_adapter, merge_adapter, needs_peft
from tests.services import stepping
from tests.tiny_models import make_checkpoint
from tp_engine import LLM, BeamSearchParams, ConfigError, LoRARequest, RequestError, SamplingParams, run_batch
from tp_engine.engine.admin_commands import act
from tp_engine.requests.outputs import RequestOutput

pytestmark = [needs_peft, pytest.mark.usefixtures("warm_children")]

SIZES: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 4,
    "num_gpu_blocks_override": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 16,
}
OPTIONS: dict[str, Any] = {**SIZES, "enable_lora": True, "max_loras": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=10, logprobs=0, ignore_eos=True)


@dataclass(frozen=True)
class Files:
    """A checkpoint, its adapters by name, and prompts."""

    folder: Path
    checkpoint: Path
    adapters: dict[str, Path]
    prompts: list[list[int]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("lora")
    checkpoint = make_checkpoint(folder / "model", "qwen3")
    adapters = {
        name: make_adapter(folder / name, checkpoint, seed=seed, **config)
        for seed, (name, config) in enumerate(ADAPTERS.items())
    }
    draw = np.random.default_rng(1)
    return Files(folder, checkpoint, adapters, [draw.integers(3, 200, length).tolist() for length in (5, 40, 21, 9)])


@pytest.fixture(scope="module")
def llm(files: Files) -> Iterator[LLM]:
    with LLM(str(files.checkpoint), **OPTIONS) as made:
        for name, folder in files.adapters.items():
            made.load_lora_adapter(name, str(folder))
        yield made


def run(llm: LLM, prompts: list[list[int]], adapters: list[str | None]) -> list[RequestOutput]:
    """Greedy answers; the blocks, slots and requests add up afterwards."""
    wanted = [None if name is None else LoRARequest(name) for name in adapters]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=wanted)
    llm.engine.check_integrity()
    return outputs


def answer(output: RequestOutput) -> tuple[list[int], list[float]]:
    sample = output.outputs[0]
    found = zip(sample.token_ids, sample.logprobs or (), strict=True)
    return list(sample.token_ids), [at[token].logprob for token, at in found]


@covers("LoRA", lambda: [("qwen3", 1)])
def test_merged_weights_give_the_same(files: Files, llm: LLM) -> None:
    """Oracle: PEFT's ``merge_and_unload``, served as a checkpoint without adapters."""
    merged = merge_adapter(files.folder / "merged", files.checkpoint, files.adapters["stabilised"])
    found = [answer(output) for output in run(llm, files.prompts, ["stabilised"] * 4)]
    with LLM(str(merged), **SIZES) as plain:
        expected = [answer(output) for output in run(plain, files.prompts, [None] * 4)]
    for (tokens, logprobs), (known, known_logprobs) in zip(found, expected, strict=True):
        assert tokens == known
        np.testing.assert_allclose(logprobs, known_logprobs, rtol=0, atol=1e-4)


def test_neighbours_do_not_change_a_rows_bits(files: Files, llm: LLM) -> None:
    """Oracle: each request alone, bit by bit, and those of the model alone in an engine without adapters; in other
    chunks too, because the batch's share a step."""
    names: list[str | None] = ["attention", "linears", None, "attention"]
    together = [answer(output) for output in run(llm, files.prompts, names)]
    for prompt, name, expected in zip(files.prompts, names, together, strict=True):
        llm.reset_prefix_cache()
        assert answer(run(llm, [prompt], [name])[0]) == expected
    others: list[str | None] = ["attention", None, "linears", "linears"]
    assert answer(run(llm, files.prompts, others)[0]) == together[0]
    with LLM(str(files.checkpoint), **SIZES) as plain:
        assert answer(run(plain, files.prompts[2:3], [None])[0]) == together[2]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_slots_without_adapters_change_no_bit(files: Files, dtype: str, quantization: str | None) -> None:
    """Oracle: an engine without slots, bit by bit: prompts in chunks, and decodes, by tapes where there are some."""
    kind = {"dtype": dtype, "quantization": quantization}
    found = []
    for options in (SIZES, OPTIONS):
        with LLM(str(files.checkpoint), **(options | kind)) as made:
            found.append([answer(output) for output in run(made, files.prompts, [None] * 4)])
    assert found[0] == found[1]


def test_reload_in_place_while_requests_run(files: Files, llm: LLM) -> None:
    """Oracle: PEFT with each of both adapters: a request that runs during the reload ends with the old one, later ones
    have the new one although the same folder's K/V of their whole prompt is cached, and then find their own."""
    changing, prompt = files.folder / "changing", files.prompts[1]
    expected = [greedy_by_peft(files.checkpoint, files.adapters[name], prompt, 10) for name in ("linears", "patterns")]
    shutil.copytree(files.adapters["linears"], changing)
    llm.load_lora_adapter("changing", str(changing))
    with pytest.raises(RequestError, match="has already been loaded"):
        llm.load_lora_adapter("changing", str(changing))
    assert answer(run(llm, [prompt], ["changing"])[0])[0] == expected[0][0]
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    running = llm.input_processor.process(prompt, params, request_id="running", adapter="changing")
    with stepping(llm) as engine:
        engine.add_request(running)
        tokens = [token for _ in range(3) for delta in engine.step() for token in delta.new_token_ids]
        shutil.copytree(files.adapters["patterns"], changing, dirs_exist_ok=True)
        loaded = {"name": "changing", "path": str(changing), "replaces": True}
        act(engine.operator, "load_lora_adapter", loaded)
        while engine.has_unfinished:
            tokens += [token for delta in engine.step() for token in delta.new_token_ids]
    assert tokens == expected[0][0]
    after = [run(llm, [prompt], ["changing"])[0] for _ in range(2)]
    for output in after:
        assert output.outputs[0].token_ids == expected[1][0]
    assert [output.num_cached_tokens for output in after] == [0, 36]
    llm.unload_lora_adapter("changing")
    for use in (lambda: llm.unload_lora_adapter("changing"), lambda: run(llm, [prompt], ["changing"])):
        with pytest.raises(RequestError, match="no adapter is loaded under the name 'changing'"):
            use()


def test_what_can_not_be_served_changes_nothing(files: Files, llm: LLM) -> None:
    """Oracle: the reason, and the answers before: an adapter of the embedding, of another model, of a larger rank."""
    before = answer(run(llm, files.prompts[:1], ["linears"])[0])
    other = make_checkpoint(files.folder / "other", "qwen3", hidden_size=32)
    for name, checkpoint, config, message in (
        ("embedding", files.checkpoint, {"target_modules": ["embed_tokens"]}, "embed_tokens.* cannot be served"),
        ("head", files.checkpoint, {"target_modules": ["lm_head"]}, "lm_head.* cannot be served"),
        ("narrow", other, {"target_modules": ["q_proj"]}, "belongs to another model"),
        ("wide", files.checkpoint, {"target_modules": ["q_proj"], "r": 17}, "above max_lora_rank 16"),
        ("dora", files.checkpoint, {"target_modules": ["q_proj"], "use_dora": True}, "DoRA cannot be served"),
    ):
        folder = make_adapter(files.folder / f"bad-{name}", checkpoint, **config)
        with pytest.raises(RequestError, match=message):
            llm.load_lora_adapter("linears", str(folder), load_inplace=True)
    with pytest.raises(RequestError, match="has half a surrogate pair"):  # os.fsdecode makes such
        llm.load_lora_adapter("linears", "/adapter\udcff", load_inplace=True)
    assert answer(run(llm, files.prompts[:1], ["linears"])[0]) == before


def test_beams_and_samples_of_an_adapter(files: Files, llm: LLM) -> None:
    """Oracle: PEFT for the first of greedy beams of width 1; forks of one prompt equal the first sample."""
    beams = llm.beam_search(
        files.prompts[:1],
        BeamSearchParams(beam_width=1, max_tokens=6, ignore_eos=True),
        lora_request=LoRARequest("linears"),
    )
    expected, _ = greedy_by_peft(files.checkpoint, files.adapters["linears"], files.prompts[0], 6)
    assert beams[0].sequences[0].tokens[-6:] == expected
    params = SamplingParams(n=3, temperature=0, max_tokens=6, ignore_eos=True)
    forked = llm.generate(files.prompts[:1], params, use_tqdm=False, lora_request=LoRARequest("linears"))
    assert [list(one.token_ids) for one in forked[0].outputs] == [expected] * 3


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_adapters_stay_when_the_weights_are_others(
    files: Files, checkpoint: Callable[..., Path], tensor_parallel_size: int
) -> None:
    """Oracle: an engine that starts with the new weights and loads the adapter, bit for bit, with
    a request without one beside; then, after a sleep, the answers before."""
    other = checkpoint("qwen3", seed=77)
    options = {**OPTIONS, "tensor_parallel_size": tensor_parallel_size}
    wanted: list[str | None] = ["linears", None]
    prompts = files.prompts[:2]
    with LLM(str(other), **options) as fresh:
        fresh.load_lora_adapter("linears", str(files.adapters["linears"]))
        expected = [answer(one) for one in run(fresh, prompts, wanted)]
    with LLM(str(files.checkpoint), **options) as llm:
        llm.load_lora_adapter("linears", str(files.adapters["linears"]))
        before = [answer(one) for one in run(llm, prompts, wanted)]
        llm.update_weights_from_disk(other)
        assert [answer(one) for one in run(llm, prompts, wanted)] == expected != before
        llm.sleep()
        llm.update_weights_from_disk(files.checkpoint)
        llm.wake_up()
        assert [answer(one) for one in run(llm, prompts, wanted)] == before


@pytest.mark.slow
def test_speculation_changes_no_token(files: Files, llm: LLM) -> None:
    """Oracle: the same requests without speculation, bit by bit; some draft tokens were right."""
    prompts = [files.prompts[0] * 4, files.prompts[3] * 3]
    long = SamplingParams(temperature=0, max_tokens=40, logprobs=0, ignore_eos=True)
    wanted = [LoRARequest("linears"), LoRARequest("attention")]
    expected = [answer(one) for one in llm.generate(prompts, long, use_tqdm=False, lora_request=wanted)]
    config = '{"method": "suffix", "num_speculative_tokens": 3, "max_step_rows": 8}'
    with LLM(str(files.checkpoint), speculative_config=config, **OPTIONS) as guessing:
        for name in ("linears", "attention"):
            guessing.load_lora_adapter(name, str(files.adapters[name]))
        for _ in range(2):
            outputs = guessing.generate(prompts, long, use_tqdm=False, lora_request=wanted)
            assert [answer(one) for one in outputs] == expected
        assert sum(one.num_accepted_tokens for one in outputs[0].outputs) > 0


@pytest.mark.slow
def test_new_weights_of_the_base(files: Files) -> None:
    """Oracle: PEFT on the new base: the adapter stays loaded and in its slot."""
    other = make_checkpoint(files.folder / "newer", "qwen3", seed=7)
    prompt, adapted = files.prompts[0], LoRARequest("linears", 1, str(files.adapters["linears"]))
    with LLM(str(files.checkpoint), **OPTIONS) as made:
        for base in (files.checkpoint, other):
            if base is other:
                made.update_weights_from_disk(str(other))
            tokens, _ = answer(made.generate(prompt, GREEDY, use_tqdm=False, lora_request=adapted)[0])
            assert tokens == greedy_by_peft(base, files.adapters["linears"], prompt, 10)[0]


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_quantised_bases(files: Files, quantization: str) -> None:
    """Oracle: PEFT on the float32 base: what the adapter adds to the log-probability of each token is what it adds
    there, to within the base's own error."""
    prompt = files.prompts[1]
    with LLM(str(files.checkpoint), quantization=quantization, **OPTIONS) as quantised:
        quantised.load_lora_adapter("linears", str(files.adapters["linears"]))
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        found = [
            quantised.generate(prompt, params, use_tqdm=False, lora_request=lora)[0]
            for lora in (None, LoRARequest("linears"))
        ]
    base, adapted = (
        np.array(
            [at[token].logprob for token, at in zip(prompt[1:], (one.prompt_logprobs or [])[1:], strict=True) if at]
        )
        for one in found
    )
    exact_base, exact = (scores_by_peft(files.checkpoint, one, prompt) for one in (None, files.adapters["linears"]))
    error, added = np.abs(base - exact_base), np.abs(exact - exact_base)
    assert np.median(added) > 4 * np.median(error), "the adapter does not show above the base's error"
    assert np.median(np.abs((adapted - base) - (exact - exact_base))) < 3 * np.median(error) + 0.01


def scores_by_peft(checkpoint: Path, adapter: Path | None, prompt: list[int]) -> Any:
    """Log-probabilities of the prompt's tokens but the first."""
    import peft
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, str(adapter))
    with torch.inference_mode():
        scores = model.eval()(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    return scores.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("phi3", "all-linear"),
        ("gemma4", r".*\.(q_proj|k_proj|o_proj|up_proj)"),
        ("qwen3-next", r".*\.(q_proj|k_proj|in_proj_\w+|out_proj)"),
        ("nemotron-h", r".*\.(q_proj|o_proj|in_proj|up_proj|down_proj)"),
        ("lfm2", r".*\.(q_proj|w1|w2|in_proj|out_proj)"),
        ("deepseek-v3", r".*\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|o_proj)"),
        ("qwen2-moe", r".*\.shared_expert\.(up|down)_proj"),
    ],
)
@covers("LoRA", lambda family: [(family, 1)])
def test_families(family: str, targets: str, tmp_path: Path) -> None:
    """Oracle: PEFT: modules stored fused, keys that are values too, the delta rule, names of a family's own, latents,
    shared experts."""
    checkpoint = make_checkpoint(tmp_path / "model", family)
    adapter = make_adapter(tmp_path / "adapter", checkpoint, target_modules=targets)
    prompt = np.random.default_rng(0).integers(3, 200, 13).tolist()
    with LLM(str(checkpoint), **{**OPTIONS, "max_num_batched_tokens": 64}) as made:
        adapted = LoRARequest("one", 1, str(adapter))
        tokens, logprobs = answer(made.generate(prompt, GREEDY, use_tqdm=False, lora_request=adapted)[0])
    expected, expected_logprobs = greedy_by_peft(checkpoint, adapter, prompt, 10)
    assert tokens == expected
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=0, atol=1e-4)


@pytest.mark.slow
def test_bits_of_adapted_experts(tmp_path: Path) -> None:
    """Oracle: the same engine's answers to each prompt alone, bit for bit, with adapters of experts and without; and
    one without slots for experts, which gives the answers without an adapter, and refuses an adapter of experts."""
    checkpoint = make_checkpoint(tmp_path / "model", "mixtral")
    options = {**OPTIONS, "dtype": "bfloat16", "enable_prefix_caching": False}
    wanted: list[str | None] = ["both", None, "down", "both"]
    draw = np.random.default_rng(2)
    prompts = [draw.integers(3, 200, length).tolist() for length in (5, 21, 9, 13)]
    folders = {
        name: make_adapter(tmp_path / name, checkpoint, seed=seed, **EXPERT_ADAPTERS[name])
        for seed, name in enumerate(("both", "down"))
    }
    with LLM(str(checkpoint), **options, lora_experts=True) as made:
        for name, folder in folders.items():
            made.load_lora_adapter(name, str(folder))
        together = [answer(one) for one in run(made, prompts, wanted)]
        alone = [answer(run(made, [prompt], [name])[0]) for prompt, name in zip(prompts, wanted, strict=True)]
    assert together == alone
    with LLM(str(checkpoint), **options) as plain:
        assert answer(run(plain, prompts[1:2], [None])[0]) == together[1]
        with pytest.raises(RequestError, match="routed experts can with lora_experts"):
            plain.load_lora_adapter("both", str(folders["both"]))


@pytest.mark.slow
def test_batch_lines(files: Files, tmp_path: Path) -> None:
    """Oracle: PEFT; an unknown name is an error of its line; a name of the model itself is refused at the start."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompt = files.prompts[0]
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": {
            "model": model, "prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }}
        for model in ("linears", "model", "nothing")
    ]  # fmt: skip
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    options = {**OPTIONS, "lora_modules": (f"linears={files.adapters['linears']}",)}
    run_batch(source, target, str(files.checkpoint), **options)
    results = {one["custom_id"]: one["response"] for one in map(json.loads, target.read_text().splitlines())}
    for model, adapter in (("linears", files.adapters["linears"]), ("model", None)):
        choice = results[model]["body"]["choices"][0]
        assert choice["token_ids"] == greedy_by_peft(files.checkpoint, adapter, prompt, 6)[0]
    assert results["nothing"]["status_code"] == 404
    with pytest.raises(ConfigError, match="'model', which names the model itself"):
        run_batch(source, target, str(files.checkpoint), **{**options, "lora_modules": (f"model={files.folder}",)})


def test_starts_that_are_refused(files: Files) -> None:
    """Oracle: errors that name the adapter, before the model is loaded or, for what only its tensors show, after."""
    torn = files.folder / "torn"
    shutil.copytree(files.adapters["linears"], torn)
    (torn / "adapter_model.safetensors").write_bytes(b"torn")
    for modules, message in (
        (("a=" + str(files.folder / "nowhere"),), "give the folder of a PEFT adapter"),
        ((f"a={torn}",), "lora_modules has a=.*is not a whole safetensors file"),
    ):
        with pytest.raises(ConfigError, match=message):
            LLM(str(files.checkpoint), **OPTIONS, lora_modules=modules)
    head = '{"method": "eagle3", "model": "some/head"}'
    with pytest.raises(ConfigError, match="a draft head, which does not know of adapters"):
        LLM(str(files.checkpoint), **OPTIONS, speculative_config=head)
    with LLM(str(files.checkpoint), **SIZES) as plain, pytest.raises(RequestError, match="--enable-lora"):
        plain.load_lora_adapter("a", str(files.adapters["linears"]))
