"""Qwen2, Qwen2.5 and Qwen3 (dense); the text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.names import USUAL_NAMES, CheckpointNames
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.spec import AttentionSpec, ModelSpec, QkNormSpec

_QWEN2 = ("Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
_QWEN3 = ("Qwen3ForCausalLM", "Qwen3VLForConditionalGeneration")
ARCHITECTURES = _QWEN2 + _QWEN3
_ROPE, _CONSECUTIVE = RopeRules(), RopeRules(theta=1e6, is_multimodal=True, sections=(16, 24, 24))
MULTIMODAL = RopeRules(theta=5e5, is_multimodal=True, sections=(24, 20, 20), are_sections_mixed=True)
WRAPPED = CheckpointNames(
    spellings=(("model.", "lm_head."), ("model.language_model.", "lm_head.")), skipped=("visual.", "model.visual.")
)


def read(config: ConfigJson) -> ModelSpec:
    """Qwen2 has biases on query, key and value; Qwen3 normalises every query and key head before it turns.

    Qwen3 has biases only with ``attention_bias``, and its ``head_dim`` is free.
    """
    is_qwen3, is_wrapped = config.architecture in _QWEN3, not config.architecture.endswith("ForCausalLM")
    eps = 1e-5 if is_wrapped and not is_qwen3 else 1e-6
    reader = DecoderReader(config.text_part() if is_wrapped else config, eps=eps)
    bias = reader.flag("attention_bias") if is_qwen3 else True

    def attention(window: int | None) -> AttentionSpec:
        qk_norm = QkNormSpec(eps=reader.eps) if is_qwen3 else None
        return reader.attention(qkv_bias=bias, out_bias=is_qwen3 and bias, qk_norm=qk_norm, window=window)

    layers = (reader.pre_norm_layer(attention(window), reader.mlp()) for window in take_windows(reader))
    rope = reader.rope(_ROPE if not is_wrapped else MULTIMODAL if is_qwen3 else _CONSECUTIVE)
    names, eos = (WRAPPED, () if is_qwen3 else (151645,)) if is_wrapped else (USUAL_NAMES, ())
    return reader.model(tuple(layers), (rope,), names=names, eos=eos, **reader.take_dual_chunks())


def take_windows(reader: DecoderReader) -> tuple[int | None, ...]:
    """Return each layer's window: with ``use_sliding_window`` those from ``max_window_layers`` on have one.  Defaults
    are transformers'."""
    window = reader.take_window(4096)
    enabled = reader.flag("use_sliding_window")
    first = reader.config.take("max_window_layers", int, 28) or 0
    return reader.windows(window if enabled else None, lambda index: index >= first)
