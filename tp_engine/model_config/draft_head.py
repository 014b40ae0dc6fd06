"""An EAGLE-3 draft head: one decoder layer that drafts tokens from a model's states (arXiv 2503.01840).  No torch.

::

    states of the model, the inputs of some of its layers at position p   -> fc -> hidden_norm -+
    token p + 1                                              -> embedding -> input_layernorm ---+-> attention, MLP, norm
                                                                                                     -> token p + 2

The first of several draft tokens is made of the model's states; each further one has the head's own output in their
place.

Two spellings of its config.json are in use: that of the authors (``LlamaForCausalLMEagle3``), and that of the project
speculators (``Eagle3Speculator``), with the layer's keys in ``transformer_layer_config``.  The names of keys and
their defaults are as vLLM reads them.
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tp_engine.errors import ConfigError, shown
from tp_engine.model_config.assistant import ARCHITECTURES as ASSISTANTS
from tp_engine.model_config.assistant import AssistantSpec, read_assistant, serves_assistants
from tp_engine.model_config.checkpoint_files import CheckpointHeaders
from tp_engine.model_config.config_json import ConfigJson
from tp_engine.model_config.decoder import DecoderReader
from tp_engine.model_config.kv_layout import KvKind
from tp_engine.model_config.names import CheckpointNames
from tp_engine.model_config.rope import RopeRules
from tp_engine.model_config.source import CONFIG_FILE, MODEL_FILES, read_json, resolve_model_folder
from tp_engine.model_config.spec import ModelSpec, NormSpec, QkNormSpec

_AUTHORS = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
_LAYER_PATHS = ("midlayer", "layers.0")
_NOT_READ = ("t2d", "verifier_norm.", "verifier_lm_head.")
_TRANSFORMER_LAYERS = ("llama", "qwen3")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHeadSpec:
    """A head for one model.

    ``model`` is the head as a model of one layer: its vocabulary is that of the drafts, ``vocab_size`` the served
    model's.  ``layer_path`` is the layer's name in the checkpoint.

    The head reads the inputs of the model's layers ``state_layers``, rising, of ``state_size`` elements together; they
    are normalised as one by ``states_norm``, or each by its own of ``state_norms``, if there are such norms.

    ``norm_before_residual``: the residual stream begins with what ``hidden_norm`` makes; ``norm_output``: what is fed
    back is normalised.  ``has_embedding``: the head has one of its own, otherwise it uses the model's.  ``has_map``:
    its tokens are others than the model's, and the checkpoint says which (``d2t``).
    """

    model: ModelSpec
    vocab_size: int
    layer_path: str
    state_layers: tuple[int, ...]
    state_size: int
    hidden_norm: NormSpec
    states_norm: NormSpec | None
    state_norms: tuple[NormSpec, ...]
    norm_before_residual: bool
    norm_output: bool
    has_embedding: bool
    has_map: bool

    @property
    def kv_kind(self) -> KvKind:
        """What its layer keeps in the cache."""
        (attention,) = self.model.attentions
        return attention.kv_kind


def load_draft_head(name: str, target: ModelSpec) -> tuple[DraftHeadSpec | AssistantSpec, Path]:
    """Return the head in folder or hub repository ``name``, which must fit the model ``target``, and its local folder.

    Raises ``ConfigError`` for anything that is missing, wrong or not supported.
    """
    folder = resolve_model_folder(name, None, MODEL_FILES)
    try:
        values = read_json(folder / CONFIG_FILE)
        if serves_assistants(target) and ConfigJson(values).architecture in ASSISTANTS:
            return read_assistant(values, target), folder
        return read_draft_head(values, CheckpointHeaders(folder).names, target), folder
    except ConfigError as error:
        raise ConfigError(f"the draft head {name!r}: {error}") from error


def read_draft_head(values: Mapping[str, Any], stored: Set[str], target: ModelSpec) -> DraftHeadSpec:
    """Parse a head's config.json; ``stored`` are the names of its tensors."""
    whole = ConfigJson(values, can_override=False)
    name, is_authors = whole.architecture, whole.architecture in _AUTHORS
    if not is_authors and name not in _SPECULATORS:
        raise whole.refusal(
            "architectures",
            [name],
            f"a draft head is one of {', '.join(_AUTHORS + _SPECULATORS)}, and for Gemma 4 {ASSISTANTS[0]}",
            "use such a head, set the method ngram or suffix without a model, or leave speculative_config out",
        )
    if target.streams is not None:
        raise ConfigError(
            f"a draft head reads a residual of one stream, and {target.architecture} has {target.streams.count}; set "
            "the method ngram or suffix without a model, or leave speculative_config out"
        )
    reader, is_qwen3 = (DecoderReader(whole), False) if is_authors else _open_speculators(whole, values)
    head = _read(_Options(whole, reader, norm_before_residual=not is_authors), is_qwen3, stored, target)
    ignored = tuple(sorted(whole.unread.ignored))
    return replace(head, model=replace(head.model, ignored_keys=ignored, warnings=whole.unread.warnings))


def _open_speculators(whole: ConfigJson, values: Mapping[str, Any]) -> tuple[DecoderReader, bool]:
    """The reader of the layer's part, and whether it is Qwen3's layer."""
    whole.expect("speculators_model_type", str, "eagle3")
    whole.skip("architectures", "speculators_config", "speculators_version", "embed_requires_grad")
    whole.skip("has_no_defaults_at_init", "dtype", "torch_dtype", "tie_word_embeddings", "transformer_layer_config")
    inner = dict(ConfigJson(values).require("transformer_layer_config", dict))
    kind = inner.get("model_type", "llama")
    if kind not in _TRANSFORMER_LAYERS:
        raise whole.refusal(
            "transformer_layer_config.model_type",
            kind,
            f"this engine runs {' and '.join(_TRANSFORMER_LAYERS)}",
            "use one",
        )
    types = {name: values[name] for name in ("dtype", "torch_dtype") if values.get(name)}
    part = {**inner, **types, "architectures": [whole.architecture]}
    return DecoderReader(whole.below(part, "transformer_layer_config")), kind == "qwen3"


class _Options:
    """The keys that only heads have: of the ``whole`` config.json, and of ``eagle_config`` in it.

    ``norm_before_residual`` is the default of that key."""

    def __init__(self, whole: ConfigJson, reader: DecoderReader, *, norm_before_residual: bool) -> None:
        self.whole, self.reader = whole, reader
        self._nested = whole.take_object("eagle_config") or whole.below({}, "eagle_config")
        self._nested.expect("use_aux_hidden_state", bool, True)
        whole.expect("parallel_drafting", bool, False)
        whole.expect("decoder_sparse_step", int, 1)
        whole.skip("target_model_type")
        self.vocab_size = whole.take_positive("draft_vocab_size", reader.vocab_size)
        self.state_width = whole.take_positive("target_hidden_size", reader.hidden_size)
        self.norm_before_residual = whole.take("norm_before_residual", bool, norm_before_residual)
        self.norm_before_fc = self._nested.take("norm_before_fc", bool) or whole.take("norm_before_fc", bool)
        self.fc_norm = whole.take("fc_norm", bool)
        self.norm_output = whole.take("norm_output", bool)

    def layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers whose inputs the head reads; rising, because their states are side by side in this
        order."""
        name = "eagle_aux_hidden_state_layer_ids"
        found = self._nested.take(name, list) or self.whole.take(name, list)
        self.whole.skip(name)
        asked = [2, num_layers // 2, num_layers - 3] if found is None else found
        layers = tuple(sorted(set(asked))) if all(type(one) is int for one in asked) else ()
        if len(layers) != len(asked) or not layers or layers[0] < 0 or layers[-1] >= num_layers:
            origin = f"it is {shown(found)}" if found is not None else f"it is absent, which means {shown(asked)}"
            raise ConfigError(
                f"config.json: {name} must be different layers of the model, from 0 to {num_layers - 1}, and {origin}: "
                "use a head for this model"
            )
        return layers

    def finish(self) -> None:
        """Refuse what was not taken, unless it asks for nothing."""
        self._nested.finish()
        if self.whole is not self.reader.config:
            self.whole.finish()


def _read(options: _Options, is_qwen3: bool, stored: Set[str], target: ModelSpec) -> DraftHeadSpec:
    reader, path = options.reader, _layer_path(stored)
    state_layers = options.layers(target.num_layers)
    _check_sizes(options, "embed_tokens.weight" in stored, target)
    norms = [
        reader.norm("input_norm") if options.norm_before_fc else None,
        *(reader.norm(f"fc_norm.{index}") if options.fc_norm else None for index in range(len(state_layers))),
    ]
    options.finish()
    model = _read_layer(reader, is_qwen3, options.vocab_size)
    return DraftHeadSpec(
        model=model,
        vocab_size=target.vocab_size,
        layer_path=path,
        state_layers=state_layers,
        state_size=len(state_layers) * options.state_width,
        hidden_norm=reader.norm("hidden_norm"),
        states_norm=norms[0],
        state_norms=tuple(norm for norm in norms[1:] if norm is not None),
        norm_before_residual=bool(options.norm_before_residual),
        norm_output=bool(options.norm_output),
        has_embedding="embed_tokens.weight" in stored,
        has_map="d2t" in stored or options.vocab_size != target.vocab_size,
    )


def _read_layer(reader: DecoderReader, is_qwen3: bool, vocab_size: int) -> ModelSpec:
    """The head as a model of one layer."""
    config = reader.config
    bias = reader.flag("attention_bias")
    out_bias = bias or (not is_qwen3 and reader.flag("bias"))
    if reader.flag("use_sliding_window"):
        raise config.refusal("use_sliding_window", True, "heads of this engine see all tokens", "use another head")
    config.skip("sliding_window", "max_window_layers")
    reader.windows(None, lambda index: False, is_free=False)
    layer = reader.pre_norm_layer(
        reader.attention(qkv_bias=bias, out_bias=out_bias, qk_norm=QkNormSpec(eps=reader.eps) if is_qwen3 else None),
        reader.mlp(bias=reader.flag("mlp_bias")),
    )
    rope, names = reader.rope(RopeRules(is_multimodal=True)), CheckpointNames(skipped=_NOT_READ)
    if len(rope.axes) not in (0, rope.num_pairs):
        raise config.refusal("mrope_section", list(rope.sections), f"{rope.num_pairs} pairs turn", "use another head")
    model = reader.model((layer,), (rope,), names=names, tie_word_embeddings=False, vocab_size=vocab_size)
    if reader.num_layers != 1:
        raise config.refusal("num_hidden_layers", reader.num_layers, "a head of this engine has 1 layer", "use another")
    if model.quantization is not None:
        raise ConfigError("config.json: quantization_config: a head of this engine is not quantised; use another one")
    return model


def _layer_path(stored: Set[str]) -> str:
    """What the checkpoint calls the layer."""
    found = (path for path in _LAYER_PATHS if any(name.startswith(f"{path}.") for name in stored))
    return next(found, _LAYER_PATHS[0])


def _check_sizes(options: _Options, has_embedding: bool, target: ModelSpec) -> None:
    """Raise ``ConfigError`` for a head of another model."""
    reader = options.reader
    pairs = [
        ("vocab_size", reader.vocab_size, target.vocab_size),
        ("target_hidden_size", options.state_width, target.hidden_size),
    ]
    if not has_embedding:
        pairs.append(("hidden_size", reader.hidden_size, target.hidden_size))
    for name, own, wanted in pairs:
        if own != wanted:
            raise ConfigError(
                f"config.json: {name} is {own}, but that of the model is {wanted}: use a head for this model"
            )
    if options.vocab_size > target.vocab_size:
        raise ConfigError(
            f"config.json: draft_vocab_size is {options.vocab_size}; the model has a vocabulary of {target.vocab_size}"
        )
