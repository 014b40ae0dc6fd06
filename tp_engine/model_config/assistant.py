"""A Gemma 4 assistant: a small decoder, in a repository of its own, that drafts for one model.  No torch.

::

    the model's embedding of the last token -+
    the model's last output, normalised -----+-> pre_projection -> layers -> norm -+-> lm_head -> draft token
                                      ^                                            |
                                      +------------- post_projection <-------------+   for the next draft token

Its layers make queries alone, and read the keys and values of the model's last layer of their kind.  All draft tokens
of a run are made at one position, that of the last known token, and nothing is stored.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tp_engine.errors import ConfigError
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.families import gemma4
from tp_engine.model_config.spec import AttentionSpec, ModelSpec

ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
_OWN_KEYS = ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
_REMEDY = "use the assistant of this model"


@dataclass(frozen=True, slots=True, kw_only=True)
class AssistantSpec:
    """The assistant as a ``model``, whose layers' ``kv_source`` is a layer of the served model, of ``state_size``."""

    model: ModelSpec
    state_size: int

    state_layers: tuple[int, ...] = ()
    """None: it reads the model's outputs."""
    kv_kind: None = None
    """It keeps nothing in the cache."""


def serves_assistants(target: ModelSpec) -> bool:
    """Return whether there are assistants for models of this architecture."""
    return target.architecture in gemma4.ARCHITECTURES


def read_assistant(values: Mapping[str, Any], target: ModelSpec) -> AssistantSpec:
    """Parse an assistant's config.json; it must fit the model ``target``.  Raises ``ConfigError``.

    Of assistants with centroids, which choose the tokens whose logits are made, all logits are made: its best token is
    among them.
    """
    whole = ConfigJson(values, can_override=False)
    size = whole.require_positive("backbone_hidden_size")
    sources = {
        one.window is None: index
        for index, layer in enumerate(target.layers)
        if isinstance(one := layer.attention, AttentionSpec) and one.kv_source is None
    }
    rest = {name: value for name, value in values.items() if name not in _OWN_KEYS}
    model = gemma4.read_assistant(ConfigJson(rest, can_override=False), sources)
    pairs: list[tuple[str, object, object]] = [
        ("backbone_hidden_size", size, target.hidden_size),
        ("vocab_size", model.vocab_size, target.vocab_size),
    ]
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, AttentionSpec) and attention.kv_source is not None
        source = target.layers[attention.kv_source].attention
        assert isinstance(source, AttentionSpec)
        pairs += [
            (name, getattr(attention, key), getattr(source, key))
            for name, key in (
                ("num_key_value_heads", "num_kv_heads"),
                ("head_dim", "head_dim"),
                ("sliding_window", "window"),
            )
        ]
    for name, own, wanted in pairs:
        if own != wanted:
            raise ConfigError(f"config.json: {name} is {own}, but that of the model is {wanted}: {_REMEDY}")
    if model.ropes != target.ropes:
        raise ConfigError(f"config.json: rope_parameters are others than those of the model: {_REMEDY}")
    names = replace(model.names, skipped=(*model.names.skipped, "masked_embedding."))
    return AssistantSpec(model=replace(model, names=names), state_size=size)
