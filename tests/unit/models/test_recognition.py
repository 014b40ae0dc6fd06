"""Decoder classes of transformers that are asked what they compute: the answer, its numbers, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from tests.families import FAMILIES
from tests.tiny_models import make_config, randomise_vectors
from tests.unit.models.test_models import oracle_logits, parallel_logits, prompts
from tp_engine.errors import ConfigError
from tp_engine.layers.rotary import inverse_frequencies
from tp_engine.model_config import families, load_model_config, read_model
from tp_engine.model_config.asked_decoder import AskedDecoder, ClassAnswer
from tp_engine.model_config.mlp import Activation, ExpertsSpec, MlpSpec
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import AttentionSpec, ModelSpec
from tp_engine.models.recognition import child
from tp_engine.models.recognition.model_class import ModelClass
from tp_engine.models.recognition.refusal import RefusalError
from tp_engine.models.recognition.twin import verify
from tp_engine.models.recognition.whole import Recognised, describe

# Families of the engine that consist of what is recognised.
DENSE = (
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3", "olmo2", "olmo3", "granite", "hyperclovax", "glm",
    "glm4", "smollm3", "seed-oss", "exaone4", "cohere2", "qwen2-moe", "qwen3-moe", "mixtral", "granite-moe", "glm4-moe",
    "minimax-m2", "ernie4.5-moe",
)  # fmt: skip
SIZES: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "intermediate_size": 96,
    "vocab_size": 203,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}  # fmt: skip
_WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# Classes that no family of the engine has: the configuration's name and its changes.
SERVED: dict[str, tuple[str, dict[str, Any]]] = {
    "AfmoeForCausalLM": ("AfmoeConfig", {**_WINDOWS, "num_dense_layers": 1, "num_shared_experts": 2}),
    "Cohere2MoeForCausalLM": ("Cohere2MoeConfig", {**_WINDOWS, "expert_selection_fn": "sigmoid"}),
    "Dots1ForCausalLM": (
        "Dots1Config",
        {
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "FlintForCausalLM": ("FlintConfig", {}),
    "GraniteMoeSWAForCausalLM": ("GraniteMoeSWAConfig", {**_WINDOWS, "shared_intermediate_size": 56}),
    "MellumForCausalLM": ("MellumConfig", _WINDOWS),
    "OlmoeForCausalLM": ("OlmoeConfig", {}),
    "ArceeForCausalLM": ("ArceeConfig", {}),
    "CohereForCausalLM": ("CohereConfig", {"logit_scale": 0.25}),
    "CwmForCausalLM": ("CwmConfig", _WINDOWS),
    "Ernie4_5ForCausalLM": ("Ernie4_5Config", {"use_bias": True}),
    "GemmaForCausalLM": ("GemmaConfig", {}),
    "GraniteSWAForCausalLM": ("GraniteSWAConfig", {**_WINDOWS, "logits_scaling": 1.5}),
    "HeliumForCausalLM": ("HeliumConfig", {}),
    "MinistralForCausalLM": ("MinistralConfig", _WINDOWS),
    "VaultGemmaForCausalLM": ("VaultGemmaConfig", {**_WINDOWS, "query_pre_attn_scalar": 24}),
}


def values_of(config: Any, architecture: str) -> dict[str, Any]:
    """The config.json that transformers would write."""
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [architecture]}


def served_values(architecture: str) -> dict[str, Any]:
    name, changes = SERVED[architecture]
    kind = getattr(transformers, name)
    known = kind().to_dict()
    sizes = {key: one for key, one in (SIZES | _EXPERTS).items() if key in known or key.endswith("token_id")}
    return values_of(kind(**{**sizes, **changes}), architecture)


def save_model(folder: Path, architecture: str) -> Path:
    """Write a checkpoint of one of ``SERVED``, with random weights."""
    kind = getattr(transformers, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(kind.config_class.from_dict(served_values(architecture)))
        randomise_vectors(model)
    model.save_pretrained(folder)
    return folder


def family_values(name: str) -> dict[str, Any]:
    return values_of(make_config(name), FAMILIES[name].model)


def plain(spec: ModelSpec) -> tuple[Any, ...]:
    """What a description computes, however it describes its rotations."""

    def rope(one: RopeSpec) -> tuple[Any, ...]:
        return (*inverse_frequencies(one, spec.max_position).tolist(), one.attention_factor, one.is_interleaved)

    layers = []
    for layer in spec.layers:
        attention = layer.attention
        assert isinstance(attention, AttentionSpec)
        turn = None if attention.rope is None else rope(spec.ropes[attention.rope])
        layers.append((replace(layer, attention=replace(attention, rope=None), mlp=plain_mlp(layer.mlp)), turn))
    return (
        layers, spec.final_norm, spec.embedding_scale, spec.logit_scale, spec.logit_softcap, spec.vocab_size,
        spec.hidden_size, spec.tie_word_embeddings, spec.max_position, spec.eos_token_ids, spec.names, spec.dtype,
    )  # fmt: skip


def plain_mlp(mlp: Any) -> Any:
    """Of two rules that choose and weigh alike one, and without the ways in which checkpoints keep experts."""
    if not isinstance(mlp, ExpertsSpec):
        return mlp
    rule = replace(mlp.rule, sum_eps=0.0)
    if rule.scores == "softmax_of_chosen":
        rule = replace(rule, scores="softmax", renormalises=True)
    return replace(mlp, rule=rule, stored=mlp.stored[:1])


@pytest.fixture
def ask_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask in this process, which spares the child's imports."""
    monkeypatch.setattr(families, "ask", child.answer)


@pytest.mark.parametrize("name", DENSE)
def test_a_family_is_described_as_by_its_reader(name: str, ask_here: None) -> None:
    """Oracle: the family's own reader, whose description is compared with transformers elsewhere."""
    values = family_values(name)
    assert plain(read_model(values, "transformers")) == plain(read_model(values, "native"))


@pytest.mark.parametrize("architecture", SERVED)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_class_gives_transformers_logits(architecture: str, world_size: int, tmp_path: Path, ask_here: None) -> None:
    """Oracle: transformers in float32, of a checkpoint that it wrote, at prompts longer than the windows."""
    spec, folder = load_model_config(str(save_model(tmp_path, architecture)))
    assert spec.described_by == "transformers"
    logits = parallel_logits(spec, folder, world_size)
    torch.testing.assert_close(logits, oracle_logits(folder, prompts(spec)), atol=1e-4, rtol=1e-4)


def asked(architecture: str) -> tuple[ModelClass, Recognised]:
    model_class = ModelClass(served_values(architecture))
    return model_class, describe(model_class)


def changed(found: Recognised, **changes: Any) -> Recognised:
    """With lies about all layers, or, by names of ``AskedDecoder``, about the whole."""
    whole = {name: changes.pop(name) for name in [*changes] if name in AskedDecoder.__dataclass_fields__}

    def lie(one: Any) -> Any:
        own = {name: value for name, value in changes.items() if name in type(one.attention).__dataclass_fields__}
        if "window" in own:
            own["window"] = None if one.attention.window is None else own["window"]
        rest = {name: value for name, value in changes.items() if name not in own}
        return replace(one, attention=replace(one.attention, **own), **rest)

    kinds = tuple(map(lie, found.narrow.kinds))
    return replace(found, narrow=replace(found.narrow, kinds=kinds, **whole))


LIES: dict[str, dict[str, Any]] = {
    "a window one too small": {"window": 6},
    "a window one too large": {"window": 8},
    "no windows": {"window": None},
    "a scale doubled": {"scale": 2 * 24**-0.5},
    "no soft cap": {"softcap": None},
    "no turn": {"rope": None},
    "a residual scale": {"residual_scale": 0.99},
    "blocks side by side": {"is_parallel": True, "mlp_norm": None},
    "another activation": {"mlp": MlpSpec(inner_size=96, activation=Activation("silu"))},
    "a norm less": {"mlp_norm": None},
    "no scale of embeddings": {"embedding_scale": 1.0},
    "logits twice as sharp": {"logit_scale": 2.0},
    "no cap of logits": {"logit_softcap": None},
    "layers in another order": {"order": (1, 0, 1)},
}


@pytest.fixture(scope="module")
def gemma() -> tuple[ModelClass, Recognised]:
    """A class with windows, soft caps, scaled embeddings, and norms that add 1 to their weights."""
    found = asked("VaultGemmaForCausalLM")
    verify(*found)
    return found


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_description_is_refused(lie: str, gemma: tuple[ModelClass, Recognised]) -> None:
    """Oracle: the class's own logits, which the true description gives."""
    with pytest.raises(RefusalError):
        verify(gemma[0], changed(gemma[1], **LIES[lie]))


def test_sinks_and_names_count(gemma: tuple[ModelClass, Recognised]) -> None:
    """Oracle: the class's own logits and tensors, of a model with sinks that a description lacks, and of one with a
    tensor that it calls by another name."""
    model_class, found = asked("GraniteSWAForCausalLM")
    assert any(one.attention.has_sinks for one in found.published.kinds)
    with pytest.raises(RefusalError, match=r"unexpected: .*sinks"):
        verify(model_class, changed(found, has_sinks=False))
    names = replace(found.narrow.names, renamed=(("mlp.up_proj", "mlp.w3"),))
    with pytest.raises(RefusalError, match=r"missing: .*w3"):
        verify(model_class, changed(found, names=names))


EXPERT_LIES: dict[str, Callable[[ExpertsSpec], ExpertsSpec]] = {
    "weights twice as large": lambda one: replace(one, rule=replace(one.rule, factor=2 * one.rule.factor)),
    "weights that do not sum to 1": lambda one: replace(one, rule=replace(one.rule, renormalises=False)),
    "an expert less": lambda one: replace(one, rule=replace(one.rule, top_k=one.rule.top_k - 1)),
    "no groups": lambda one: replace(one, rule=replace(one.rule, num_groups=1, top_groups=1)),
    "no correction": lambda one: replace(one, correction=None),
    "no shared MLP": lambda one: replace(one, shared=None),
}


@pytest.fixture(scope="module")
def dots() -> tuple[ModelClass, Recognised]:
    """A class with groups of experts, a correction of their scores, and a shared MLP."""
    return asked("Dots1ForCausalLM")


@pytest.mark.parametrize("lie", EXPERT_LIES)
def test_a_wrong_description_of_experts_is_refused(lie: str, dots: tuple[ModelClass, Recognised]) -> None:
    """Oracle: the class's own logits and tensors, which the true description gives."""
    kinds = tuple(
        one if one.experts is None else replace(one, experts=EXPERT_LIES[lie](one.experts))
        for one in dots[1].narrow.kinds
    )
    with pytest.raises(RefusalError):
        verify(dots[0], replace(dots[1], narrow=replace(dots[1].narrow, kinds=kinds)))


@contextmanager
def replaced(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """With another function of Llama's module, made of its own."""
    from transformers.models.llama import modeling_llama

    owner, _, own = name.rpartition(".")
    place = getattr(modeling_llama, owner) if owner else modeling_llama
    with monkeypatch.context() as patch:
        patch.setattr(place, own, change(getattr(place, own)))
        yield


def _twice(original: Any) -> Any:
    return lambda *given, **named: (original(*given, **named), original(*given, **named))[1]


def _plus(original: Any) -> Any:
    return lambda self, x, *given, **named: original(self, x, *given, **named) + 0.01 * x


def _residuals_by_width(_original: Any) -> Any:
    def forward(self: Any, hidden_states: torch.Tensor, **named: Any) -> Any:
        scale = (hidden_states.shape[-1] / 256) ** -0.5
        middle = hidden_states + scale * self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)[0]
        return middle + scale * self.mlp(self.post_attention_layernorm(middle))

    return forward


def _eps_by_width(original: Any) -> Any:
    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        self.variance_epsilon = 1e-4 / hidden_states.shape[-1]
        return original(self, hidden_states)

    return forward


def _with_logits(original: Any) -> Any:
    def forward(*given: Any, **named: Any) -> Any:
        found = original(*given, **named)
        found.logits = found.logits + 0.1
        return found

    return forward


def _scaled_queries(original: Any) -> Any:
    def turn(query: Any, key: Any, cos: Any, sin: Any, **named: Any) -> Any:
        found = original(query, key, cos, sin, **named)
        return found[0] * torch.arange(1, query.shape[2] + 1, device=query.device)[:, None], found[1]

    return turn


def _chunks(_original: Any) -> Any:
    from transformers.masking_utils import create_chunked_causal_mask

    def make(config: Any, **named: Any) -> Any:
        config.attention_chunk_size = 4
        return create_chunked_causal_mask(config=config, **named)

    return make


CLASSES: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "attends twice": ("LlamaAttention.forward", _twice, "attends 2 times in a step"),
    "something is added": ("LlamaDecoderLayer.forward", _plus, "not simply added"),
    "an MLP does more": ("LlamaMLP.forward", _plus, "not simply added"),
    "an epsilon of the width": ("LlamaRMSNorm.forward", _eps_by_width, "depends on their sizes: .*eps is"),
    "a scale of the width": ("LlamaDecoderLayer.forward", _residuals_by_width, "residual_scale is 2.0"),
    "logits are moved": ("LlamaForCausalLM.forward", _with_logits, "its logits are neither"),
    "queries grow with their position": ("apply_rotary_pos_emb", _scaled_queries, "in a way that no table"),
    "chunks": ("create_causal_mask", _chunks, "its mask"),
}


@pytest.mark.parametrize("case", CLASSES)
def test_a_class_that_does_more_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: worked out by hand: what was added to Llama's class has no description."""
    name, change, reason = CLASSES[case]
    with replaced(monkeypatch, name, change), pytest.raises(RefusalError, match=reason):
        describe(ModelClass(family_values("llama")))


def test_a_window_in_the_mask_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the mask that Llama's class is given here, which its attention is not told of; and its logits."""
    from transformers.masking_utils import create_sliding_window_causal_mask

    def windowed(_original: Any) -> Any:
        def make(config: Any, **named: Any) -> Any:
            config.sliding_window = 5
            return create_sliding_window_causal_mask(config=config, **named)

        return make

    with replaced(monkeypatch, "create_causal_mask", windowed):
        model_class = ModelClass(family_values("llama"))
        found = describe(model_class)
        verify(model_class, found)
    assert {one.attention.window for one in found.published.kinds} == {5}


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("MptForCausalLM", "computes with its mask itself"),
        ("GPTJForCausalLM", "not by transformers' attention interface"),
        ("MambaForCausalLM", "a state other than keys and values"),
        ("BartForCausalLM", "it has an encoder"),
    ],
)
def test_other_classes_are_refused_with_the_reason(architecture: str, reason: str, ask_here: None) -> None:
    """Oracle: what each class does, as its code shows."""
    config = getattr(transformers, architecture).config_class()
    with pytest.raises(ConfigError, match=f"(?s)transformers .* it is not served, because .*{reason}"):
        read_model(values_of(config, architecture))


def test_keys_that_the_class_does_not_read_are_refused(ask_here: None) -> None:
    """Oracle: the rule of every family: a key that no code reads may change what the model computes.  Words of the code
    that ask no configuration for anything are such keys too."""
    values = served_values("ArceeForCausalLM")
    for key in ("attention_mystery", "residual", "hidden_states", "scaling", "Llama"):
        with pytest.raises(ConfigError, match=f"{key}=3"):
            read_model({**values, key: 3})
    with pytest.raises(ConfigError, match="architectures is"):
        read_model(values, "native")


def test_keys_that_a_configuration_takes_by_other_names_are_known() -> None:
    """Oracle: the code of transformers' configurations, read by hand."""
    keys = {
        "llama": ["rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim", "scale", "dim"],
        "gemma3": ["sliding_window_pattern", "rope_local_base_freq", "query_pre_attn_scalar", "window", "factor"],
    }
    for name, listed in keys.items():
        values = {key: one for key, one in family_values(name).items() if key not in listed}
        known = ModelClass({**values, **dict.fromkeys(listed[:2])}).known_keys
        unread = ModelClass(values)
        unread._values |= dict.fromkeys(listed)
        assert {*unread.known_keys} - {*known} == {*listed[2:-2]}


def test_tables_that_are_too_large_are_refused() -> None:
    """Oracle: CodeGen's table of sines and cosines: 64 numbers for each position; and the limit."""
    config = transformers.CodeGenConfig(n_positions=10**8)
    with pytest.raises(RefusalError, match=r"tables has 6400000000 numbers; at most 268435456"):
        ModelClass(values_of(config, "CodeGenForCausalLM")).published()


def test_an_unknown_class_is_told_what_would_help() -> None:
    """Oracle: what the installed transformers has: nothing of the first name, and the second one."""
    with pytest.raises(ConfigError, match=r"\(5\.\d+.*\) has no class of this name either; .*pip install --upgrade"):
        read_model({"architectures": ["DoryForCausalLM"]})
    with pytest.raises(ConfigError, match="has a class ArceeForCausalLM, which --model-impl auto asks"):
        read_model(served_values("ArceeForCausalLM"), "native")


def test_an_answer_survives_its_file(gemma: tuple[ModelClass, Recognised]) -> None:
    """Oracle: the description before it was written."""
    answer = ClassAnswer(decoder=gemma[1].published)
    assert msgspec.json.decode(msgspec.json.encode(answer), type=ClassAnswer) == answer


@pytest.mark.slow
def test_an_engine_serves_a_class(tmp_path: Path) -> None:
    """Oracle: transformers' greedy tokens, by two ranks, each of which finds the answer of one child."""
    from tp_engine import LLM, SamplingParams

    prompt, folder = [5, 9, 33, 70, 12, 99, 101, 40, 3, 77, 150], save_model(tmp_path, "VaultGemmaForCausalLM")
    model = transformers.VaultGemmaForCausalLM.from_pretrained(folder).eval()
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None)
    options: dict[str, Any] = {"num_gpu_blocks_override": 32, "max_model_len": 64, "skip_tokenizer_init": True}
    with LLM(str(folder), device="cpu", tensor_parallel_size=2, dtype="float32", **options) as llm:
        sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == expected[0, len(prompt) :].tolist()


def test_the_documents_name_the_classes() -> None:
    """Oracle: the classes of this file's table."""
    text = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    listed = text.split("## Other classes of transformers")[1].split("\n## ")[0].split("\n\n")[2]
    assert set(re.findall(r"`(\w+ForCausalLM)`", listed)) == set(SERVED)
