"""GLM-4.7-Flash and GLM-5: DeepSeek-V3's layers, with other sizes; GLM-5 has indexers, which layers may share."""

from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.families.deepseek import latent_model, latent_reader, read_indexers, take_dense_layers
from tp_engine.model_config.families.glm4_moe import read_experts
from tp_engine.model_config.mla import IndexSpec
from tp_engine.model_config.spec import ModelSpec

ARCHITECTURES = ("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM")

_LITE = {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192, "v_head_dim": 256}


def read(config: ConfigJson) -> ModelSpec:
    """GLM-5's pairs are neighbours in its indexers too."""
    is_lite = config.architecture == "Glm4MoeLiteForCausalLM"
    reader, latent = latent_reader(config, _LITE if is_lite else _LITE | {"q_lora_rank": 2048}, eps=1e-5)
    indexers: list[IndexSpec] | None = None
    if not is_lite:
        config.expect("mlp_bias", bool, False)
        is_shared = _read_sharing(reader)
        indexers = read_indexers(reader, latent, num_heads=32, is_interleaved=True, is_shared=is_shared)
    experts = read_experts(reader, factor=1.8 if is_lite else 2.5, top_k=4 if is_lite else 8)
    is_dense = take_dense_layers(reader, 1 if is_lite else 3)
    return latent_model(reader, latent, experts, is_dense, indexers=indexers)


def _read_sharing(reader: DecoderReader) -> list[bool]:
    """Which layers share the choice of the last one with an indexer: ``indexer_types`` says it, or
    ``index_topk_pattern``, or every ``index_topk_freq``-th has one, as transformers reads them."""
    config, count = reader.config, reader.num_layers
    key = next((name for name in ("indexer_types", "index_topk_pattern") if config.peek(name) is not None), None)
    config.skip("indexer_types", "index_topk_pattern")
    freq, offset = config.take_positive("index_topk_freq", 1), config.take("index_skip_topk_offset", int, 2) or 0
    if key is None:
        return [max(index - offset + 1, 0) % freq != 0 for index in range(count)]
    found = config.peek(key)
    kinds = [{"F": "full", "S": "shared"}.get(str(one), one) for one in found] if isinstance(found, str | list) else []
    if len(kinds) != count or not all(kind in ("full", "shared") for kind in kinds) or kinds[0] != "full":
        rule = f"it must say full or shared for each of {count} layers, and full for the first"
        raise config.refusal(key, found, rule, "correct config.json")
    return [kind == "shared" for kind in kinds]
