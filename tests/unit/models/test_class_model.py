"""Classes of transformers that are run by their own modules: logits, ranks, plans, and what is refused."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from threading import BrokenBarrierError
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
import transformers

from tests.families import FAMILIES
from tests.simulated_ranks import run_ranks
from tests.tiers import slow_but
from tests.tiny_models import make_config, randomise_vectors
from tests.unit.models.test_models import load, oracle_logits, parallel_logits, prompts
from tests.unit.models.test_recognition import SIZES, values_of
from tp_engine.config import EngineConfig
from tp_engine.distributed.collectives import Communicator
from tp_engine.errors import ConfigError
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.model_config import check_tensor_parallel, families, load_model_config, read_model
from tp_engine.model_config.asked_decoder import ClassAnswer
from tp_engine.model_config.drafting import find_head
from tp_engine.model_config.spec import AttentionSpec, ModelSpec
from tp_engine.model_config.tp_invariant import check_tp_invariant
from tp_engine.models.class_model import attention, guard, interview
from tp_engine.models.class_model.guard import served_by_modules
from tp_engine.models.recognition import child
from tp_engine.models.recognition.model_class import ModelClass, layers_path_of
from tp_engine.models.recognition.refusal import RefusalError

_SIZES = SIZES | {"num_hidden_layers": 2}
# Classes that native layers do not run: what each is here for, and its changes.
SERVED: dict[str, dict[str, Any]] = {
    "BioGptForCausalLM": {},  # learned positions, scaled embeddings
    "DiffLlamaForCausalLM": {},  # attends twice in a layer, to values twice as wide as keys
    "GPT2LMHeadModel": {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 512},  # weights lie the other way
    "GPTNeoXForCausalLM": {},  # query, key and value rows in turn; its head is stored by another name
    "GraniteSWAForCausalLM": {  # sinks; logits are divided
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "logits_scaling": 1.5,
    },
    "HrmTextForCausalLM": {"num_hidden_layers": 1},  # layers run several times; stored fused
    "NanoChatForCausalLM": {},  # soft cap of logits, norms without weights
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},  # experts, stored one by one
    "PersimmonForCausalLM": {},
    "PhiForCausalLM": {},  # a head with a bias
    "StableLmForCausalLM": {"use_qkv_bias": True, "qk_layernorm": True},  # a norm for each head
    "Starcoder2ForCausalLM": {"sliding_window": 8},
}
_FAST = ("GPTNeoXForCausalLM", "HrmTextForCausalLM", "StableLmForCausalLM")
# Families that this engine has, as an oracle of the other way: windows, soft caps, norms across heads, experts.
FAMILIES_TOO = ("gemma2", "olmo2", "phi3", "qwen3-moe")


def values(architecture: str, **changes: Any) -> dict[str, Any]:
    kind = getattr(transformers, architecture).config_class
    known = kind().to_dict()
    sizes = {key: value for key, value in _SIZES.items() if key in known or key.endswith("token_id")}
    return values_of(kind(**{**sizes, **SERVED.get(architecture, {}), **changes}), architecture)


def save_model(folder: Path, found: dict[str, Any]) -> Path:
    kind = getattr(transformers, found["architectures"][0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(kind.config_class.from_dict(found))
        randomise_vectors(model)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def by_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask in this process, and never for native layers."""
    monkeypatch.setattr(families, "ask", lambda values: ClassAnswer(modules=served_by_modules(ModelClass(values))))


def check_logits(spec: ModelSpec, folder: Path) -> None:
    assert spec.modules is not None
    expected = oracle_logits(folder, prompts(spec))
    for world_size in (1, 2):
        logits = parallel_logits(spec, folder, world_size)
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("architecture", slow_but(_FAST, SERVED))
def test_a_class_gives_transformers_logits(architecture: str, tmp_path: Path, by_modules: None) -> None:
    """Oracle: transformers in float32, of a checkpoint that it wrote, on one rank and on two."""
    check_logits(*load_model_config(str(save_model(tmp_path, values(architecture)))))


@pytest.mark.parametrize("name", slow_but(["gemma2"], FAMILIES_TOO))
def test_a_family_gives_transformers_logits(name: str, tmp_path: Path, by_modules: None) -> None:
    """Oracle: transformers; and the family's own reader, for the K/V that layers keep and what is done to logits."""
    folder = save_model(tmp_path, values_of(make_config(name), FAMILIES[name].model))
    spec, _ = load_model_config(str(folder), model_impl="transformers")
    check_logits(spec, folder)
    native, _ = load_model_config(str(folder), model_impl="native")
    assert [one.kv_kind for one in spec.attentions] == [one.kv_kind for one in native.attentions]
    assert (spec.logit_scale, spec.logit_softcap) == (native.logit_scale, native.logit_softcap)


def test_few_kv_heads_are_repeated(tmp_path: Path, by_modules: None) -> None:
    """Oracle: transformers; 4 ranks hold 2 KV heads, by the class's plan and where all is gathered."""
    for architecture in ("Starcoder2ForCausalLM", "StableLmForCausalLM"):
        folder = save_model(tmp_path / architecture, values(architecture, num_key_value_heads=2))
        spec, _ = load_model_config(str(folder))
        assert spec.modules is not None and spec.modules.splits == (architecture == "Starcoder2ForCausalLM")
        check_tensor_parallel(spec, 4)
        logits = parallel_logits(spec, folder, 4)
        torch.testing.assert_close(logits, oracle_logits(folder, prompts(spec)), atol=2e-4, rtol=2e-4)


def test_a_wrong_plan_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a plan that exchanges two lines; its ranks would give other logits, so their outputs are gathered."""
    model_class = ModelClass(values("Starcoder2ForCausalLM"))
    assert served_by_modules(model_class).modules.splits
    plan = transformers.Starcoder2Config.base_model_tp_plan
    wrong = {**plan, "layers.*.mlp.c_proj": "colwise"}
    monkeypatch.setattr(transformers.Starcoder2Config, "base_model_tp_plan", wrong)
    assert not served_by_modules(model_class).modules.splits


@pytest.mark.parametrize("error", [BrokenBarrierError, MemoryError, OSError])
def test_a_slow_or_full_machine_decides_nothing(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the error itself, which is not taken for a fault of the class's plan."""
    compare = guard._Oracle.compare

    def failing(self: Any, narrow: Any, world_size: int) -> None:
        if world_size > 1:
            raise error
        compare(self, narrow, world_size)

    monkeypatch.setattr(guard._Oracle, "compare", failing)
    with pytest.raises(error):
        served_by_modules(ModelClass(values("Starcoder2ForCausalLM")))


def test_new_files_of_the_same_model_are_the_same_model(by_modules: None) -> None:
    """Oracle: keys that say who wrote a file change nothing; a size does."""
    found = values("StableLmForCausalLM")
    written = {**found, "transformers_version": "5.0.1", "_name_or_path": "another/place", "torch_dtype": "float32"}
    assert read_model(written).modules == read_model(found).modules
    assert read_model({**found, "intermediate_size": 160}).modules != read_model(found).modules


def test_each_call_of_attention_has_its_place() -> None:
    """Oracle: a module that attends more often than it was asked, less often, or with a mask of its own, is stopped."""
    places = attention.ModulePlaces()
    places.add(Mock(spec=attention.Place))
    places.begin_step()
    with pytest.raises(RuntimeError, match="attended 0 times in a step, and 1 times before"):
        places.end_step()
    places.next_place()
    places.end_step()
    with pytest.raises(RuntimeError, match="more often in a step than the 1 times"):
        places.next_place()
    with pytest.raises(NotImplementedError, match="Linear attends with a mask of its own"):
        attention._attend(torch.nn.Linear(1, 1), None, None, None, torch.ones(1))


def test_layers_are_not_their_experts() -> None:
    """Oracle: two layers with four experts each."""
    model: Any = torch.nn.Module()
    model.layers = torch.nn.ModuleList(torch.nn.ModuleList(torch.nn.Identity() for _ in range(4)) for _ in range(2))
    for said, expected in ((2, "layers"), (9, "layers.0")):
        model.config = Mock(num_hidden_layers=said)
        assert layers_path_of(model) == expected


@pytest.mark.parametrize("lie", ["scale", "window", "softcap", "has_sinks"])
def test_a_wrong_interview_is_refused(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the class's own logits: what the interview says wrongly is found in them."""
    architecture = "GraniteSWAForCausalLM" if lie == "has_sinks" else "Gemma2ForCausalLM"
    changes = {"scale": 0.5, "window": 6, "softcap": None}
    describe = interview.AskedCall

    def lying(path: str, asked: AttentionSpec, chunk: int | None) -> Any:
        if lie == "window" and asked.window is None:
            return describe(path, asked, chunk)
        return describe(path, replaced(asked, **{lie: changes[lie]}), chunk)

    if lie == "has_sinks":  # they come with the call, and would be dropped
        monkeypatch.setattr(attention, "_sinks_of", lambda _named: None)
    else:
        monkeypatch.setattr(interview, "AskedCall", lying)
    found = values(architecture, **({} if lie == "has_sinks" else {"attn_logit_softcapping": 2.0}))
    with pytest.raises(RefusalError, match="give other logits on 1 ranks"):
        served_by_modules(ModelClass(found))


def replaced(attention: AttentionSpec, **changes: Any) -> AttentionSpec:
    from dataclasses import replace

    return replace(attention, **changes)


def test_chunks_bound_the_positions() -> None:
    """Oracle: Llama 4's chunks: a text of one chunk is attended to as by others."""
    found = values("Llama4ForCausalLM", attention_chunk_size=128, num_hidden_layers=4)
    model = served_by_modules(ModelClass(found)).model(dtype="float32")
    assert (model.max_position, model.max_position_key) == (128, "attention_chunk_size")


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("DogeForCausalLM", "mask"),
        ("DeepseekV3ForCausalLM", "latents, which only native layers keep"),
        ("GPTJForCausalLM", "tp_engine_asks"),
    ],
)
def test_what_is_refused(architecture: str, reason: str) -> None:
    """Oracle: what each class does, as its code shows."""
    kind = getattr(transformers, architecture).config_class
    with pytest.raises(Exception, match=reason):
        served_by_modules(ModelClass(values_of(kind(), architecture)))


def test_options_that_need_native_layers_are_refused(by_modules: None) -> None:
    """Oracle: what such a model has no part of: sums by shard, and inputs of layers that a head would read."""
    spec = read_model(values("StableLmForCausalLM"))
    with pytest.raises(ConfigError, match="run by transformers' own modules, which promise no order"):
        check_tp_invariant(EngineConfig(device="cpu", attention_backend="native", tp_invariant=True), spec)
    head = SpeculativeConfig(method="eagle3", model="head", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="do not show a draft head"):
        find_head(spec, head, name="model", folder=None)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("StableLmForCausalLM", None), ("OlmoeForCausalLM", r"0\.00 GiB, whole on each of 2 ranks, .*: take a model")],
)
def test_what_it_costs_is_told(
    architecture: str, words: str | None, tmp_path: Path, by_modules: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: stacked experts alone are warned of, by one rank; no CUDA graph may hold either, whatever they do."""
    spec, folder = load_model_config(str(save_model(tmp_path, values(architecture))))
    caplog.clear()

    def body(communicator: Communicator) -> tuple[bool, str | None]:
        model = load(spec, folder, communicator)
        model.finish_loading()
        return model.is_recordable, model.why_not_capture

    with caplog.at_level(logging.WARNING, logger="tp_engine"):
        found = run_ranks(2, body)
    assert all(not recorded and architecture in str(reason) for recorded, reason in found)
    assert len(caplog.messages) == (words is not None)
    assert all(words is not None and re.search(words, text) for text in caplog.messages)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path, by_modules: None) -> None:
    """Oracle: a file that the checkpoint's own code would write."""
    folder, mark = save_model(tmp_path / "model", values("StableLmForCausalLM")), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {name: f"own.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    spec, _ = load_model_config(str(folder))
    parallel_logits(spec, folder, 1)
    assert not mark.exists()


def test_the_documents_name_the_classes() -> None:
    """Oracle: the classes of this file's table that native layers do not run."""
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    listed = text.split("### Run by transformers' own modules")[1].split("\n\n")[2]
    assert set(re.findall(r"`(\w+)`", listed)) == {*SERVED} - {"GraniteSWAForCausalLM", "OlmoeForCausalLM"}


def test_the_reason_is_told() -> None:
    """Oracle: the way of the class, and its answer before it was written."""
    found = child.answer(values("StableLmForCausalLM", qk_layernorm=False))
    assert found.way == "transformers" and found.modules is not None
    assert "slower than native layers, which do not run it, because" in found.modules.note
    assert msgspec.json.decode(msgspec.json.encode(found), type=ClassAnswer) == found


@pytest.mark.slow
def test_an_engine_serves_a_class(tmp_path: Path) -> None:
    """Oracle: transformers' greedy tokens, on two ranks: chunks, preemption, and prompts that are in the cache."""
    from tp_engine import LLM, SamplingParams

    folder = save_model(tmp_path, values("StableLmForCausalLM"))
    model = transformers.StableLmForCausalLM.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(3)
    given = [torch.randint(3, 200, (length,), generator=generator).tolist() for length in (11, 37, 5, 23)]
    given.append([*given[1][:34], 7, 8])
    how: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    expected = [model.generate(torch.tensor([one]), **how)[0, len(one) :].tolist() for one in given]
    options: dict[str, Any] = {"num_gpu_blocks_override": 12, "max_model_len": 64, "max_num_batched_tokens": 16}
    options |= {"max_num_seqs": 4, "skip_tokenizer_init": True, "dtype": "float32", "tensor_parallel_size": 2}
    with LLM(str(folder), device="cpu", speculative_config={"method": "ngram"}, **options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        runs = [llm.generate(given, sampling, use_tqdm=False) for _ in range(2)]
    for outputs in runs:
        assert [list(one.outputs[0].token_ids) for one in outputs] == expected
    assert any(one.num_cached_tokens for one in runs[1])
