"""A model as data: what each layer is made of, what all share, and how the checkpoint names it.  No torch.

A family's reader (``families/``) writes a ``ModelSpec``; the decoder, the weights, the KV layout, the attention
backends, the measurement of memory, the advice and the rules of divisibility read it::

    residual -> input_norm -> attention -> attention_out_norm -(+)-> mlp_norm -> mlp -> mlp_out_norm -(+)->

A norm may be None: absent.  In a *parallel* layer attention and MLP read the same normalised input, and both outputs
are added at once.  A layer of *one block* has either attention or an MLP, after its ``input_norm``.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self

from tp_engine.model_config.class_modules import ClassModules
from tp_engine.model_config.classifier import ClassifierSpec
from tp_engine.model_config.compression import CompressionSpec, SharedRowSpec
from tp_engine.model_config.head_gate import HeadGateSpec
from tp_engine.model_config.kv_layout import KvKind, KvLayout, StateKind, lay_out
from tp_engine.model_config.mla import MLASpec
from tp_engine.model_config.mlp import Activation, ExpertsSpec, MlpSpec
from tp_engine.model_config.names import USUAL_NAMES, CheckpointNames
from tp_engine.model_config.quantization import QuantizationSpec, WeightScheme
from tp_engine.model_config.recurrent import RecurrentSpec
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.streams import StreamSpec
from tp_engine.model_config.vision import VisionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """``x / sqrt(mean(x^2) + eps) * (weight + offset)``; kind ``layer`` subtracts the mean first.

    ``name`` is the module's in the checkpoint, below its layer, and ``tensor`` the weight's in it; as it is loaded, the
    weight is multiplied by ``factor``.
    """

    name: str
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    tensor: str = "weight"
    factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNormSpec:
    """Queries and keys are normalised before they turn: each head alone, or (``spans_heads``) all heads together.

    With ``includes_values``, each value head is normalised too, without a weight.  With ``has_weights`` False no head
    has one.
    """

    eps: float
    offset: float = 0.0
    has_weights: bool = True
    spans_heads: bool = False
    includes_values: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """One layer's attention; sizes are the whole model's.

    ``window`` counts the visible keys, self included; None: all.  ``softcap`` c bounds a score s to ``c tanh(s / c)``.
    ``has_sinks``: one more score per head, a weight, takes part in the softmax and has no value.  ``rope`` is an index
    into ``ModelSpec.ropes``, None: queries and keys do not turn.  ``fused_name``: the one stored tensor that holds
    query, key and value rows.  ``values_from_keys``: the key projection makes the values too, which are neither turned
    nor normalised as keys are.  ``latent``: keys and values are made of latents; then ``num_kv_heads`` is 1, the cached
    row, and ``head_dim`` that of queries.  ``gate`` multiplies the heads' outputs.  ``kv_source``: the layer makes
    queries alone, and reads the keys and values of that layer before it.  ``sees_whole_images``: a token of an image
    sees those after it in the image too, within the window.  ``shared_row``: one row of a token is key and value of all
    heads.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    qk_norm: QkNormSpec | None = None
    rope: int | None = 0
    qkv_bias: bool = False
    out_bias: bool = False
    fused_name: str | None = None
    values_from_keys: bool = False
    latent: MLASpec | None = None
    gate: HeadGateSpec | None = None
    kv_source: int | None = None
    sees_whole_images: bool = False
    shared_row: SharedRowSpec | None = None

    @property
    def heads(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Name and number of those that are divided among the ranks, and of those that are divided or repeated."""
        divided = ("attention heads", self.num_heads)
        if self.shared_row is not None:  # a group is whole heads
            divided = ("groups of attention heads", self.shared_row.num_groups)
        return divided, ("KV heads", self.num_kv_heads)

    @property
    def kv_kind(self) -> KvKind:
        """What it keeps in the cache."""
        if self.latent is not None:
            index = self.latent.index
            dim = 0 if index is None or index.source is not None else index.dim
            return KvKind(window=self.window, num_kv_heads=1, head_dim=self.latent.row_dim, num_parts=1, index_dim=dim)
        parts = 2 if self.shared_row is None else 1
        return KvKind(window=self.window, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, num_parts=parts)

    @property
    def compression(self) -> CompressionSpec | None:
        """How older tokens are compressed, if they are."""
        return None if self.shared_row is None else self.shared_row.compression

    @property
    def source(self) -> int | None:
        """The layer before it whose keys and values it reads, or whose choice of keys."""
        index = None if self.latent is None else self.latent.index
        return self.kv_source if index is None else index.source

    @property
    def value_dim(self) -> int:
        """Elements of a head's output."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def out_size(self) -> int:
        """Elements of a token that the output projection reads."""
        return self.num_heads * self.value_dim

    @property
    def gate_dim(self) -> int:
        """Elements of a head's gate."""
        return 0 if self.gate is None else 1 if self.gate.is_per_head else self.value_dim

    @property
    def projections(self) -> tuple[str, ...]:
        """The modules that make queries, keys and values, unless they are fused; of queries alone with a
        ``kv_source``."""
        if self.kv_source is not None:
            return ("q_proj",)
        return "q_proj", "k_proj", "k_proj" if self.values_from_keys else "v_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSpec:
    """Experts beside a layer's dense MLP, within its MLP block::

    stream -> mlp_norm -> mlp     -> mlp_out_norm (this one) -+
                                                             (+) -> mlp_out_norm of the layer
    stream -> norm     -> experts -> out_norm                -+
    """

    experts: ExpertsSpec
    norm: NormSpec
    out_norm: NormSpec
    mlp_out_norm: NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerEmbeddingSpec:
    """Embeddings of their own for each layer, of ``size`` (``models/layer_embeddings.py`` draws them); ``vocab_size``
    tokens have some, and those of images have that of ``image_token_id``.

    ``norm`` is that of what is projected from the model's embeddings, ``out_norm`` that of what a layer adds.
    """

    size: int
    vocab_size: int
    activation: Activation
    norm: NormSpec
    out_norm: NormSpec
    image_token_id: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer; the module's text draws it.  Each block's output is multiplied by ``residual_scale`` when added.

    ``embedding``: the layer has an embedding of its own, and adds what it makes of that after the MLP.
    ``stream_scale`` is the name of a stored number, by which the stream is multiplied at the layer's end.  ``streams``:
    the residual is several streams, by the same rule in all layers; None: one, to which outputs are added.
    """

    attention: AttentionSpec | RecurrentSpec | None
    mlp: MlpSpec | ExpertsSpec | None
    beside: BesideSpec | None = None
    input_norm: NormSpec | None = None
    attention_out_norm: NormSpec | None = None
    mlp_norm: NormSpec | None = None
    mlp_out_norm: NormSpec | None = None
    is_parallel: bool = False
    residual_scale: float = 1.0
    embedding: LayerEmbeddingSpec | None = None
    stream_scale: str | None = None
    streams: StreamSpec | None = None

    @property
    def norms(self) -> Iterator[NormSpec]:
        """The norms that are present."""
        own, beside = [self.input_norm, self.attention_out_norm, self.mlp_norm, self.mlp_out_norm], self.beside
        own += [] if beside is None else [beside.norm, beside.out_norm, beside.mlp_out_norm]
        own += [] if self.embedding is None else [self.embedding.out_norm]
        for norm in own:
            if norm is not None:
                yield norm

    @property
    def mlps(self) -> tuple[MlpSpec | ExpertsSpec, ...]:
        """What its MLP block runs: an MLP or experts, or both."""
        beside = None if self.beside is None else self.beside.experts
        return tuple(one for one in (self.mlp, beside) if one is not None)

    @property
    def compression(self) -> CompressionSpec | None:
        """How its attention compresses older tokens, if it does."""
        return self.attention.compression if isinstance(self.attention, AttentionSpec) else None

    @property
    def has_one_block(self) -> bool:
        """Whether it is attention alone, or an MLP alone."""
        return self.attention is None or self.mlp is None

    @property
    def experts(self) -> ExpertsSpec | None:
        """The layer's experts, if it has some."""
        return next((one for one in self.mlps if isinstance(one, ExpertsSpec)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec:
    """A model's own head for multi-token prediction (https://arxiv.org/abs/2412.19437, section 2.2)::

        state of the model at p, final-normed -> hidden_norm -+
        token p + 1              -> embedding -> embed_norm --+-> projection -> layer -> final_norm -> token p + 2

    The projection reads both side by side, the embedding first.  Embedding and output head are the model's.  Of several
    draft tokens each further one has the head's own output in the place of the model's state.

    ``path`` is the ``layer``'s name in the checkpoint and ``projection`` that of its module; the names of norms are
    whole.  ``plain_modules`` are those of its modules that a quantised checkpoint stores plainly.
    """

    path: str
    layer: LayerSpec
    projection: str
    embed_norm: NormSpec
    hidden_norm: NormSpec
    final_norm: NormSpec | None
    plain_modules: tuple[str, ...] = ()

    @property
    def kv_kind(self) -> KvKind:
        """What its layer keeps in the cache."""
        assert isinstance(self.layer.attention, AttentionSpec), "the layer of a head attends"
        return self.layer.attention.kv_kind


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One decoder-only model.  With an ``embedding_eps``, each token's embedding is normalised, without a weight: x /
    sqrt(mean(x^2) + eps).  Logits are multiplied by ``logit_scale``, then bounded by ``logit_softcap``.

    With ``tie_word_embeddings`` a checkpoint without an output head uses the embedding; if it ``has_own_head``, another
    one, it uses that.  A ``classifier`` makes scores in place of text.  ``max_position_key`` is what bounds its
    positions, ``max_position``, in config.json.  It is ``described_by`` a family of this engine, or by what a class of
    transformers says of itself.  With ``modules`` those of that class run it: each of its ``layers`` is one call of
    attention, and there is no ``final_norm``.  ``beside`` is what a draft head keeps in the cache, as one more layer
    after the model's.  ``stored_mtp`` is the model's own head, if the checkpoint has one, and ``mtp`` that if the
    engine runs it.  ``vision`` is how it sees images; None: the engine runs text alone.  ``notes`` and ``warnings`` are
    what the operator should know of the checkpoint's files, ``ignored_keys`` those of config.json that have no effect.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    final_norm: NormSpec | None
    tie_word_embeddings: bool
    has_own_head: bool = False
    max_position: int
    max_position_key: str = "max_position_embeddings"
    dtype: str
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    embedding_eps: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    names: CheckpointNames = USUAL_NAMES
    quantization: QuantizationSpec | None = None
    classifier: ClassifierSpec | None = None
    beside: KvKind | None = None
    mtp: MtpSpec | None = None
    stored_mtp: MtpSpec | None = field(default=None, compare=False)
    modules: ClassModules | None = None
    described_by: Literal["native", "transformers"] = field(default="native", compare=False)
    vision: VisionSpec | None = field(default=None, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)
    ignored_keys: tuple[str, ...] = field(default=(), compare=False)
    warnings: tuple[str, ...] = field(default=(), compare=False)

    def drafting_with(self, head: MtpSpec) -> Self:
        """Return the model that drafts with its own ``head``, which only then is a part of it."""
        quantization = None if self.quantization is None else self.quantization.without(head.plain_modules)
        return replace(self, mtp=head, beside=head.kv_kind, quantization=quantization)

    def within(self, max_model_len: int) -> Self:
        """Return what runs for contexts of up to ``max_model_len`` positions: an indexer that would choose all keys
        does not.  One that does gets a warning."""

        def of(layer: LayerSpec) -> LayerSpec:
            attention = layer.attention
            if not isinstance(attention, AttentionSpec) or (latent := attention.latent) is None:
                return layer
            if latent.index is None or latent.index.top_k < max_model_len:
                return layer
            return replace(layer, attention=replace(attention, latent=replace(latent, index=None)))

        if self.index_topk is None:
            return self
        found, head = replace(self, layers=tuple(map(of, self.layers))), self.stored_mtp
        if head is not None:
            head = replace(head, layer=of(head.layer))
            found = replace(found if self.mtp is None else found.drafting_with(head), stored_mtp=head)
        if found.index_topk is None:
            return found
        costs = (
            f"requests of more than {self.index_topk:,} tokens attend to the {self.index_topk:,} keys that an indexer "
            f"finds best: if no request is longer, max_model_len {self.index_topk} spares the indexer and its memory"
        )
        return replace(found, warnings=(*self.warnings, costs))

    @property
    def index_topk(self) -> int | None:
        """How many keys a query attends to at most; None: all that it sees."""
        found = [one.latent.index for one in self.attentions if one.latent is not None]
        return next((one.top_k for one in found if one is not None), None)

    def scheme_of(self, *modules: str) -> WeightScheme | None:
        """Return how the checkpoint stores ``modules``, the parts of one product, named in the usual spelling.

        None: not quantised.  Raises ``ConfigError`` if two differ.
        """
        if self.quantization is None:
            return None
        return self.quantization.scheme_of_parts([self.names.spell(module) for module in modules])

    @property
    def turns_by_place(self) -> bool:
        """Whether an image's tokens turn by their row and column."""
        return self.vision is not None and self.vision.turns_by_place

    def mtp_names(self, names: Collection[str]) -> set[str]:
        """Return the tensors of multi-token prediction among ``names``, a checkpoint's tensors."""
        return self.names.mtp_names(names, self.num_layers)

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the output head."""
        return self.tie_word_embeddings and not self.has_own_head

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layers_by_path(self) -> dict[str, LayerSpec]:
        """The layers by their names in a checkpoint, the head's last."""
        found = {f"model.layers.{index}": layer for index, layer in enumerate(self.layers)}
        return found if self.mtp is None else found | {self.mtp.path: self.mtp.layer}

    @property
    def distinct_layers(self) -> dict[LayerSpec, int]:
        """Each kind of layer and how many there are, that of a head included, in order of first occurrence."""
        counts: dict[LayerSpec, int] = {}
        for layer in self.layers_by_path.values():
            counts[layer] = counts.get(layer, 0) + 1
        return counts

    def kv_layout_on(self, world_size: int) -> KvLayout:
        """Return which layers share block tables, on each of ``world_size`` ranks."""
        kinds: list[KvKind | StateKind | None] = [
            None if one is None or (isinstance(one, AttentionSpec) and one.kv_source is not None) else one.kv_kind
            for one in (layer.attention for layer in self.layers)
        ]
        more = [kind for one in self.compressions.values() for kind in (one.kv_kind, one.state_kind)]
        assert not more or self.beside is None, "no draft head reads compressed entries"
        return lay_out([*kinds, *more], world_size, self.beside)

    @property
    def compressions(self) -> dict[int, CompressionSpec]:
        """Those of layers that compress, by the place of their entries in the KV layout; their states come after."""
        found = [one.compression for one in self.attentions if one.compression is not None]
        return {self.num_layers + 2 * index: one for index, one in enumerate(found)}

    @property
    def layer_embedding(self) -> LayerEmbeddingSpec | None:
        """That of all layers, if they have embeddings of their own."""
        return self.layers[0].embedding

    @property
    def streams(self) -> StreamSpec | None:
        """Those of the residual, if it has several."""
        return self.layers[0].streams

    @property
    def attentions(self) -> list[AttentionSpec]:
        """Those of the layers that attend, in order."""
        return [layer.attention for layer in self.layers if isinstance(layer.attention, AttentionSpec)]

    @cached_property
    def kv_layout(self) -> KvLayout:
        """The layout on a single rank."""
        return self.kv_layout_on(1)
