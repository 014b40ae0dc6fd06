"""The Python API's names: keywords of the engine, sampling parameters, and what tab completion shows."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import tp_engine
from tests.e2e.frontend import new_engine
from tests.services import FakeLLM
from tp_engine import (
    LLM,
    AsyncLLM,
    ConfigError,
    RequestError,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from tp_engine.api.engine_options import read_options
from tp_engine.api.keywords import EngineOptions
from tp_engine.api.openai.chat.options import TemplateOptions
from tp_engine.api.pooling import PoolingParams
from tp_engine.api.sampling_defaults import SamplingDefaultOptions
from tp_engine.apps.batch.config import BatchConfig
from tp_engine.apps.batch.keywords import BatchOptions
from tp_engine.config import EngineConfig

AS_WRITTEN: Mapping[str, object] = {"str": str, "bool": bool, "int": int, "float": float}


def keyword_type(spec: dataclasses.Field[Any]) -> object:
    """What a caller may give for a field: more than what the field holds."""
    optional = str(spec.type).endswith(" | None")
    base = str(spec.type).removesuffix(" | None")
    kind: Any = Sequence[str] | str if base.startswith("tuple") else AS_WRITTEN.get(base)
    if spec.metadata.get("several"):
        kind = Sequence[Mapping[str, Any] | str] | str
    if spec.metadata.get("json"):
        kind = Mapping[str, Any] | str
    elif spec.metadata.get("numbers"):
        kind = Sequence[int] | str
    elif spec.metadata.get("size") or spec.metadata.get("count"):
        kind = int | str
    return kind | None if optional else kind


def keywords(*kinds: type[Any], without: tuple[str, ...] = ()) -> dict[str, object]:
    specs = [spec for kind in kinds for spec in dataclasses.fields(kind)]
    return {spec.name: keyword_type(spec) for spec in specs if spec.name not in without}


def test_the_keywords_are_the_fields() -> None:
    """Oracle: the configuration dataclasses.  ``scripts/generate`` writes the keywords."""
    of_engine = keywords(EngineConfig, SamplingDefaultOptions, TemplateOptions, without=("model",))
    assert typing.get_type_hints(EngineOptions) == of_engine
    of_batch = of_engine | keywords(BatchConfig, without=("input_file", "output_file"))
    assert typing.get_type_hints(BatchOptions) == of_batch


def test_every_keyword_is_taken() -> None:
    """Oracle: the defaults, given one by one."""
    for spec in dataclasses.fields(EngineConfig):
        if spec.name != "model":
            assert read_options("LLM", "m", {spec.name: spec.default}).engine == EngineConfig(model="m"), spec.name
    options = {
        "generation_config": "vllm",
        "override_generation_config": {"top_k": 3},
        "chat_template": "{{ messages }}",
    }
    found = read_options("LLM", "m", options)
    assert found.sampling.params("m") == SamplingParams(top_k=3)
    assert found.chats.template_text == "{{ messages }}"


def test_values_of_numpy_and_torch_are_taken() -> None:
    """Oracle: the same options in Python's numbers."""
    given = {
        "max_model_len": torch.tensor(64), "max_num_seqs": np.int32(4), "gpu_memory_utilization": np.float32(0.5),
        "enable_prefix_caching": np.bool_(False), "served_model_name": np.array(["a", "b"]), "dtype": torch.float32,
        "hf_overrides": {"rope_theta": np.float64(1e4)}, "limit_mm_per_prompt": {"image": np.int64(3)},
    }  # fmt: skip
    plain = {
        "max_model_len": 64, "max_num_seqs": 4, "gpu_memory_utilization": 0.5, "enable_prefix_caching": False,
        "served_model_name": ["a", "b"], "dtype": "float32", "hf_overrides": {"rope_theta": 1e4},
        "limit_mm_per_prompt": {"image": 3},
    }  # fmt: skip
    assert read_options("LLM", "m", given).engine == read_options("LLM", "m", plain).engine
    with pytest.raises(ConfigError, match=r"hf_overrides cannot be written as JSON: .* is of type object"):
        read_options("LLM", "m", {"hf_overrides": {"rope_theta": object()}})


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (None, {}, "LLM: model is None; give a folder"),
        ("m", {"max_modl_len": 5}, "LLM: unknown option max_modl_len; did you mean max_model_len"),
        ("m", {"tool_call_parser": "hermes"}, "unknown option tool_call_parser"),
        ("m", {"chat_template": "{{ open"}, "template"),
        ("m", {"hf_overrides": print}, "it must be a JSON object, as a mapping or as text"),
    ],
)
def test_wrong_keywords_are_named(model: Any, options: dict[str, Any], words: str) -> None:
    """Oracle: the words of the error."""
    with pytest.raises(ConfigError, match=words):
        read_options("LLM", model, options)


# What only one of the two has: ``LLM`` runs many prompts to their end, ``AsyncLLM`` one as a stream.
OF_MANY = {
    "prompts", "use_tqdm", "concurrency_limit", "on_error", "timeout_s", "stream", "tokenization_kwargs",
    "prompt_token_ids",
}  # fmt: skip
OF_ONE = {"prompt", "request_id", "address", "abort_running", "timeout_s"}
POOLED = ("embed", "classify", "reward", "encode", "score", "beam_search")


@pytest.mark.parametrize("name", sorted({*vars(LLM)} & {*dir(AsyncLLM)} - {*dir(object)} | {"__init__"}))
def test_llm_and_async_llm_have_the_same_keywords(name: str) -> None:
    """Oracle: each other's parameters."""
    one, other = getattr(LLM, name), getattr(AsyncLLM, name)
    if not inspect.isfunction(one):
        return
    of_llm, of_async = set(inspect.signature(one).parameters), set(inspect.signature(other).parameters)
    assert of_llm - of_async <= OF_MANY
    assert of_async - of_llm <= OF_ONE | ({"priority"} if name in POOLED else set())


def test_completion_shows_the_public_names() -> None:
    """Oracle: ``__all__``, each of which can be imported."""
    assert set(tp_engine.__all__) <= set(dir(tp_engine))
    assert all(getattr(tp_engine, name) is not None for name in tp_engine.__all__)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temp": 0.8}, "SamplingParams: unknown option temp; did you mean temperature?"),
        ({"max_token": 5}, "did you mean max_tokens?"),
        ({"temperature": "0.8"}, "temperature is '0.8' of type str; it must be a number between 0 "),
        ({"temperature": 101}, "temperature is 101; it must be between 0 "),
        ({"temperature": float("nan")}, "temperature is nan; it must be between"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5 of type float; it must be a whole number of at least 1, or None"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids contains 'a'; token ids are whole numbers"),
        ({"stop": 3}, "stop is 3 of type int; it must be a list"),
        ({"logit_bias": [1]}, "logit_bias is .1. of type list; it must be a mapping"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no' of type str; it must be True or False"),
        ({"output_kind": "delta"}, "it must be a RequestOutputKind"),
        ({"detokenize": False, "stop": "x"}, "stop strings are found in the text"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; it must be -1"),
        ({"best_of": 3}, "set n, or call beam_search"),
        ({"use_beam_search": True}, "call beam_search with BeamSearchParams"),
        ({"logits_processors": [print]}, "the engine has no such function"),
        ({"max_new_tokens": 5, "max_tokens": 6}, "max_new_tokens sets max_tokens to 5, and it is given as 6"),
    ],
)
def test_wrong_sampling_parameters_are_named(given: dict[str, Any], words: str) -> None:
    """Oracle: the words of the error."""
    with pytest.raises(RequestError, match=words):
        SamplingParams(**given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"max_new_tokens": 5, "min_new_tokens": 2}, {"max_tokens": 5, "min_tokens": 2}),
        ({"no_stop_trim": True, "stop": "x"}, {"include_stop_str_in_output": True, "stop": ["x"]}),
        ({"regex": "[1]"}, {"structured_outputs": StructuredOutputsParams(regex="[1]")}),
        ({"json_schema": '{"type": "object"}'}, {"structured_outputs": {"json": {"type": "object"}}}),
        ({"spaces_between_special_tokens": False, "skip_clone": True, "best_of": 1, "logits_processors": None}, {}),
        (
            {"temperature": np.float32(0.5), "max_tokens": np.int64(7), "stop_token_ids": np.array([1, 2])},
            {"temperature": 0.5, "max_tokens": 7, "stop_token_ids": [1, 2]},
        ),
        (
            {"allowed_token_ids": list(np.arange(3)), "stop_token_ids": range(1, 3), "stop": {"x"}},
            {"allowed_token_ids": [0, 1, 2], "stop_token_ids": [1, 2], "stop": ["x"]},
        ),
        (
            {"allowed_token_ids": {"a": 5}.values(), "bad_words": (one for one in "xy")},
            {"allowed_token_ids": [5], "bad_words": ["x", "y"]},
        ),
        ({"logit_bias": {np.int64(5): np.float32(1)}, "stop": deque("x")}, {"logit_bias": {5: 1.0}, "stop": ["x"]}),
        (
            {"structured_outputs": {"choice": np.array(["yes", "no"])}},
            {"structured_outputs": {"choice": ["yes", "no"]}},
        ),
        ({"structured_outputs": {"choice": {"yes": 1}.keys()}}, {"structured_outputs": {"choice": ["yes"]}}),
    ],
)
def test_names_and_values_of_other_libraries(given: dict[str, Any], expected: dict[str, Any]) -> None:
    """Oracle: the same parameters in this library's words, by hand."""
    assert SamplingParams(**given) == SamplingParams(**expected)


def test_from_optional_and_clone() -> None:
    """Oracle: vLLM's rules: None leaves the default, except for max_tokens; JSON's keys are texts."""
    params = SamplingParams.from_optional(n=None, temperature=None, max_tokens=None, logit_bias={"5": 1.0}, seed=None)
    assert params == SamplingParams(max_tokens=None, logit_bias={5: 1.0})
    assert params.clone() == params and params.clone(seed=3) == SamplingParams(
        max_tokens=None, logit_bias={5: 1.0}, seed=3
    )


def test_llm_takes_the_defaults_of_the_models_file() -> None:
    """Oracle: the demo model's generation_config.json, which says do_sample false, and the parameters that arrive."""
    engine = new_engine()
    with FakeLLM(engine) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0)
        llm.generate(["12+3"] * 2, use_tqdm=False)
        llm.generate("12+3", [None], use_tqdm=False)
        llm.generate("12+3", {"max_tokens": 2}, use_tqdm=False)
        params = [request.params for request in engine.added]
        assert params == [SamplingParams(temperature=0.0)] * 3 + [SamplingParams(max_tokens=2)]
        assert llm.get_tokenizer() is not None
        for wrong, words in (
            ({"prompts": None}, "prompts is missing"),
            ({"prompts": "a", "lora_request": "x"}, "lora_request is of type str; it must be a LoRARequest"),
            ({"prompts": {"prompt": "a", "prompt_token_ids": [1]}}, "give either 'prompt' or 'prompt_token_ids'"),
            ({"prompts": {"prompt": "a", "multi_modal_data": 1}}, "is served as text alone; leave multi_modal_data"),
        ):
            with pytest.raises(RequestError, match=words):
                llm.generate(**wrong)
        for options in ({"chat_template_kwargs": 3}, {"chat_template_content_format": "openai"}):
            with pytest.raises(RequestError, match="chat_template_"):
                llm.chat([{"role": "user", "content": "x"}], **options)
        assert llm.generate("12+3", {"detokenize": False, "max_tokens": 3}, use_tqdm=False)[0].outputs[0].text == ""
    with FakeLLM(new_engine(), generation_config="vllm", trust_remote_code=True) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
    with FakeLLM(new_engine(), override_generation_config={"max_new_tokens": 3, "top_k": 5}) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3, top_k=5)


def test_parameters_may_be_mappings() -> None:
    """Oracle: the dataclass with the same fields; None is the default that is given."""
    default = SamplingParams(top_k=3)
    assert SamplingParams.of(None, default) is default
    assert SamplingParams.of({"temperature": 0, "output_kind": RequestOutputKind.DELTA}, default) == SamplingParams(
        temperature=0, output_kind=RequestOutputKind.DELTA
    )
    with pytest.raises(RequestError, match=r"sampling_params is .* of type float; it must be SamplingParams, or a map"):
        SamplingParams.of(0.5, default)
    assert PoolingParams.of({"dimensions": 4}) == PoolingParams(dimensions=4)
    assert PoolingParams.of({"normalize": False}) == PoolingParams(use_activation=False)
    with pytest.raises(RequestError, match="PoolingParams: unknown option dimension; did you mean dimensions"):
        PoolingParams.of({"dimension": 4})
