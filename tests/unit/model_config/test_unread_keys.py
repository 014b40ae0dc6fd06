"""Keys of config.json that no reader takes: harmless ones are ignored and named, all others are refused."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from tests.families import FAMILIES
from tests.tiny_models import make_config
from tests.unit.model_config.test_families import PUBLISHED
from tests.unit.model_config.test_model_config import llama
from tp_engine.errors import ConfigError
from tp_engine.model_config import read_model
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.unread_keys import UnreadKeys

# Mechanisms that change what a model computes, of families that are and that are not served; no weight tells of most:
# positions, scales and caps, what is seen, norms and activations, experts, others.
NAMES = """
    rotary_pct rotary_base rotary_emb_base rope_ratio rope_interleaved rope_theta_local use_dynamic_ntk
    use_logn_attn alibi use_xpos no_rope_layers no_rope_layer_interval nope_layer_interval position_offset
    rope_version mla_use_nope
    logit_scale logits_scaling logits_scale output_multiplier attn_logit_softcapping final_logit_softcapping
    logits_soft_cap embedding_multiplier residual_multiplier attention_multiplier scale_emb scale_depth
    embedding_scale dim_model_base mup_width_multiplier attn_temperature_tuning floor_scale attn_scale
    query_pre_attn_scalar depth_scale normalize_embeddings softmax_scale scale_attn_weights
    sliding_window sliding_window_size attention_window local_attention_window attention_chunk_size window_size
    dual_chunk_attention_config use_bidirectional_attention is_causal prefix_lm layer_types index_topk use_sinks
    attention_sink softmax_off_by_one ssmax causal_attn is_encoder_decoder
    attention_bias qkv_bias mlp_bias lm_head_bias use_qk_norm qk_layernorm qk_norm clip_qkv norm_type
    rms_norm_offset layernorm_zero_centered zero_centered_gamma use_post_norm use_gemma_norm hidden_activation
    activation swiglu_limit swiglu_limits parallel_attn use_parallel_residual
    norm_topk_prob routed_scaling_factor scoring_func n_group topk_group moe_layer_freq use_expert_bias
    moe_router_activation_func use_grouped_topk
    num_kv_shared_layers kv_share_every layer_skip num_loops recurrent_depth hc_mult value_residual
    attention_value_scale attn_output_gate tie_word_embeddings_x kv_quantised token_shift ngram_size
    engram_layers use_cache_quantization dropout_at_inference init_scale_of_logits loss_free_balancing_bias
"""
DANGEROUS = re.findall(r"\w+", NAMES)

# As other programs and older versions of transformers write them.
HARMLESS: dict[str, Any] = {
    "attention_dropout": 0.1, "resid_pdrop": 0.1, "classifier_dropout": 0.1, "hidden_dropout_prob": 0.1,
    "router_aux_loss_coef": 0.001, "z_loss_weight": 1e-4, "aux_loss_alpha": 0.001, "seq_aux": True,
    "initializer_range": 0.02, "mamba_init_std": 0.1, "router_jitter_noise": 0.1, "gradient_checkpointing": True,
    "num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1, "index_share_for_mtp_iteration": True, "use_mtp": True,
    "bos_token_id": 1, "image_token_id": 5, "eoi_token_id": 7, "tokenizer_class": "LlamaTokenizer",
    "transformers_version": "4.57.1", "unsloth_fixed": True, "auto_map": {"AutoConfig": "x.Y"}, "use_cache": True,
    "_attn_implementation": "eager", "output_router_logits": True, "ep_size": 1, "pretraining_tp": 2,
    "chunk_size_feed_forward": 0, "tf_legacy_loss": True, "id2label": {"0": "A"}, "use_flash_attn": "auto",
}  # fmt: skip
OLD_GENERATION = {
    "length_penalty": 1.0, "max_length": 20, "min_length": 0, "num_beams": 1, "num_beam_groups": 1,
    "num_return_sequences": 1, "repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0,
    "typical_p": 1.0, "diversity_penalty": 0.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
}  # fmt: skip


@cache
def config_of(family: str) -> dict[str, Any]:
    """config.json of a tiny model of the family, with all keys that transformers knows."""
    config = make_config(family).to_dict()
    return {**config, "architectures": [FAMILIES[family].model]}


@cache
def keys_taken_by(family: str) -> frozenset[str]:
    """The keys whose values the family's reader asks for."""
    taken: set[str] = set()
    take = ConfigJson.take

    def noting(self: ConfigJson, name: str, *rest: Any) -> Any:
        taken.add(name)
        return take(self, name, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ConfigJson, "take", noting)
        read_model(config_of(family))
    return frozenset(taken)


@pytest.mark.parametrize("family", FAMILIES)
def test_dangerous_keys_are_refused_in_every_family(family: str) -> None:
    """Oracle: each of these names changes what some model computes; a family either reads it, or refuses it by name."""
    config, taken = config_of(family), keys_taken_by(family)
    inner = config.get("text_config")
    planted = [key for key in DANGEROUS if key not in taken]
    assert len(planted) > 60
    for key in planted:
        changed = {**config, "text_config": {**inner, key: 17}} if inner else {**config, key: 17}
        with pytest.raises(ConfigError, match=rf"\b{key}\b"):
            read_model(changed)


def test_every_key_that_a_reader_takes_would_be_refused_without_it() -> None:
    """Oracle: leave one out: a reader takes a key because it matters, so the general rule must not ignore its name."""
    taken = set().union(*map(keys_taken_by, FAMILIES)) - {"model_type"}  # which only a wrapper's reader takes
    taken -= {f"{name}_token_id" for name in ("image", "vision_start", "vision_end", "boi", "eoi", "pad")}  # of images
    taken -= {"model_max_length"}  # the positions of Kimi Linear, and elsewhere a tokenizer's limit
    assert len(taken) > 120
    unread = UnreadKeys()
    assert unread.sort(dict.fromkeys(taken, 3), ()).keys() == taken and not unread.ignored and not unread.of_generation


def test_harmless_keys_are_ignored_and_named() -> None:
    """Oracle: the same model without them; every one of them is named."""
    spec = read_model(llama(**HARMLESS, **OLD_GENERATION))
    assert spec == read_model(llama()) and not spec.warnings
    assert spec.ignored_keys == tuple(sorted((*HARMLESS, *OLD_GENERATION)))
    wrapped = PUBLISHED["gemma-3-4b"]
    spec = read_model({**wrapped, "text_config": {**wrapped["text_config"], "mlp_dropout": 0.1}})
    assert "text_config.mlp_dropout" in spec.ignored_keys


@pytest.mark.parametrize(("name", "value"), [("temperature", 0.6), ("top_k", 20), ("do_sample", True), ("top_p", True)])
def test_generation_options_with_other_values_are_warned_of(name: str, value: Any) -> None:
    """Oracle: they belong into generation_config.json, from where they are read."""
    spec = read_model(llama(**{name: value}))
    assert spec == read_model(llama())
    (warning,) = spec.warnings
    assert name in warning and "generation_config.json" in warning


@pytest.mark.parametrize(("name", "value"), [("is_causal", False), ("use_rope", False), ("causal", False)])
def test_false_is_refused_where_it_takes_away_a_usual_part(name: str, value: Any) -> None:
    """Oracle: an encoder says ``is_causal: false``; for other keys false asks for nothing."""
    with pytest.raises(ConfigError, match=name):
        read_model(llama(**{name: value}))
    assert read_model(llama(use_foo=False)) == read_model(llama())


def test_nested_objects_are_strict() -> None:
    """Oracle: no key of a rotation or of a quantisation is ignored for its name."""
    with pytest.raises(ConfigError, match="attention_dropout"):
        read_model(llama(rope_scaling={"rope_type": "linear", "factor": 2.0, "attention_dropout": 0.1}))
    with pytest.raises(ConfigError, match="pretraining_tp"):
        read_model(llama(quantization_config={"quant_method": "fp8", "pretraining_tp": 2}))


def test_a_refusal_says_how_to_go_on() -> None:
    """Oracle: the option that it names, applied to the file, makes the model load."""
    wrapped = PUBLISHED["gemma-3-4b"]
    planted = {**wrapped, "text_config": {**wrapped["text_config"], "use_foo": 1, "bar": [2]}}
    with pytest.raises(ConfigError, match="use_foo=1") as caught:
        read_model(planted)
    text = str(caught.value).rpartition("--hf-overrides '")[2].removesuffix("'")
    assert json.loads(text) == {"text_config": {"bar": None, "use_foo": None}}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_default_eos_is_that_of_transformers(family: str) -> None:
    """Oracle: the class of the text part of transformers' configuration."""
    import transformers

    config = json.loads(json.dumps(config_of(family)))
    config.pop("eos_token_id", None), config.get("text_config", {}).pop("eos_token_id", None)
    default = getattr(getattr(transformers, FAMILIES[family].config)().get_text_config(), "eos_token_id", None)
    expected = default if isinstance(default, list) else [] if default is None else [default]
    assert read_model(config).eos_token_ids == tuple(expected)
