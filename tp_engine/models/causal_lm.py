"""A language model on one rank: token ids in, hidden states out, then this rank's slice of the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tp_engine.attention.base import Backends
from tp_engine.distributed.collectives import Communicator
from tp_engine.kernels.candidates import DEFAULTS, Choices
from tp_engine.layers.attention import Attention, only
from tp_engine.layers.context import AdapterLimits, Layer, LayerContext
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_engine.layers.image_rows import images_of_step
from tp_engine.layers.norm import Norm
from tp_engine.layers.quantization import choose_formats
from tp_engine.layers.residual import Join
from tp_engine.layers.rotary import RotaryEmbedding
from tp_engine.layers.score_head import ScoreHead
from tp_engine.layers.streams import StreamJoin, make_reader
from tp_engine.model_config.spec import AttentionSpec, ModelSpec
from tp_engine.models.decoder import AttentionBlock, DecoderLayer
from tp_engine.models.joins import make_joins, make_stream_joins
from tp_engine.models.language_model import LanguageModel
from tp_engine.models.layer_embeddings import LayerEmbeddings
from tp_engine.models.mtp_head import MtpHead
from tp_engine.models.one_block import OneBlockLayer
from tp_engine.models.shared_row_attention import CompressedRows
from tp_engine.models.vision_tower import VisionTower, build_tower


class CausalLM(LanguageModel):
    """The decoder that ``spec`` describes; ``backends`` has one attention backend for each of its KV groups.

    A draft head reads the inputs of ``state_layers``, or without such layers, like the model's own (``mtp``), the
    normalised outputs of the last layer.  ``vision`` is its tower, if it sees images; those of a step come through
    ``layers/image_rows.py``.

    Weights are allocated but not set: load them, then call ``finish_loading``, then bind the KV cache.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        backends: Backends,
        max_model_len: int,
        context: LayerContext,
        state_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        model, layout = context.at("model"), spec.kv_layout_on(context.world_size)
        sizes = (spec.vocab_size, spec.hidden_size)
        self.embed_tokens = VocabParallelEmbedding(
            *sizes, context=model.at("embed_tokens"), scale=spec.embedding_scale, eps=spec.embedding_eps
        )
        self.ropes = nn.ModuleList(
            RotaryEmbedding(rope, max_model_len, dtype=context.dtype, device=context.device) for rope in spec.ropes
        )
        group_of = {index: layout.place_of(index)[0] for index in layout.layers}
        self._sources = {
            index: one.source
            for index, one in enumerate(layer.attention for layer in spec.layers)
            if isinstance(one, AttentionSpec) and one.source is not None
        }
        entries = iter(spec.compressions)
        layers: list[DecoderLayer | OneBlockLayer] = []
        for index, layer in enumerate(spec.layers):
            source = self._sources.get(index)
            group = group_of.get(index) if source is None else group_of.get(index, group_of[source])
            layers.append(
                (OneBlockLayer if layer.has_one_block else DecoderLayer)(
                    layer,
                    spec.hidden_size,
                    spec.ropes,
                    backend=None if group is None else backends[group],
                    group=group,
                    context=model.at("layers").at(str(index)),
                    source=None if source is None else layers[source].self_attn,
                    **({} if layer.compression is None else {"entries_group": group_of[next(entries)]}),
                )
            )
        embeddings = spec.layer_embedding
        self.layer_embeddings = (
            None
            if embeddings is None
            else LayerEmbeddings(embeddings, spec.num_layers, spec.hidden_size, context=model)
        )
        self.layers = nn.ModuleList(layers)
        assert spec.final_norm is not None, "native layers end with a norm"
        self.norm = Norm(spec.final_norm, spec.hidden_size, context=model.at(spec.final_norm.name))
        self.lm_head = ParallelLMHead(
            *sizes,
            context=context.at("lm_head"),
            tied=self.embed_tokens if spec.is_tied else None,
            scale=spec.logit_scale,
            softcap=spec.logit_softcap,
        )
        linears = () if spec.classifier is None else spec.classifier.linears
        self.score_head = ScoreHead(linears, spec.hidden_size, context=context) if linears else None
        self._specs, self.hidden_size, self.dtype = spec.layers, spec.hidden_size, context.dtype
        self._joins: Sequence[Join | StreamJoin]
        if (streams := spec.streams) is None:
            self._joins = make_joins(layers, self.norm, context)
        else:
            self.end_mixture = make_reader(streams, streams.end, spec.hidden_size, context=model)
            self._joins = make_stream_joins(streams, layers, self.end_mixture, self.norm, context)
        self._run: Sequence[int] = range(spec.num_layers)
        self._state_layers = state_layers
        self.vision: VisionTower | None = None
        if spec.vision is not None and spec.vision.is_served:
            self.vision = build_tower(spec.vision, dtype=context.dtype, device=context.device)
        self.mtp: MtpHead | None = None
        if spec.mtp is not None:
            group, _ = layout.place_of(spec.num_layers)
            self.mtp = MtpHead(
                spec.mtp,
                spec.hidden_size,
                spec.ropes,
                ropes=self.ropes,
                embed_tokens=self.embed_tokens,
                lm_head=self.lm_head,
                backend=backends[group],
                group=group,
                context=context,
            )
        self._copy_rows = context.op("copy_rows")

    @property
    def attention_layers(self) -> list[Attention]:
        """One per layer with K/V of its own, in order, then one per layer with compressed entries."""
        return sorted(super().attention_layers, key=lambda one: isinstance(one, CompressedRows))

    @property
    def attention_of(self) -> dict[int, Attention]:
        """That of each layer that attends."""
        found = ((index, getattr(layer, "self_attn", None)) for index, layer in enumerate(self.layers))
        return {index: block.attention for index, block in found if isinstance(block, AttentionBlock)}

    @property
    def is_recordable(self) -> bool:
        """Whether recordings of steps can hold all that the model runs; known after ``finish_loading``."""
        parts = [module for module in self.modules() if isinstance(module, Layer)]
        return all(part.is_recordable for part in parts) and all(join.is_recordable for join in self._joins)

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Within this context only one layer of each kind runs, with those that it reads, and the
        second: the others need no further memory.

        Before the second layer, unlike the first, a part waits to be added to the residual stream.
        """
        first_of_kind = {spec: index for index, spec in reversed(list(enumerate(self._specs)))}
        chosen = {*first_of_kind.values(), *range(min(2, len(self._specs)))}
        chosen |= {self._sources[index] for index in chosen & self._sources.keys()}
        run, self._run = self._run, sorted(chosen)
        try:
            yield
        finally:
            self._run = run

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``input_ids`` and ``positions`` (N,) -> (N, hidden), normalised.  Call it inside of ``forward_context``.

        With ``wanted`` (n,) int64, the tokens whose outputs are read: (n, hidden), only theirs.  For the other tokens
        the last layer only stores keys and values, and attends, unless a head reads their outputs too.

        ``states`` (N, layers * hidden) takes the inputs of the ``state_layers``, of all tokens, or their outputs.
        """
        given, is_output = wanted, states is not None and not self._state_layers
        wanted = None if is_output else given
        residual, part, last = self.embed_tokens(input_ids), None, self._run[-1]
        if (images := images_of_step()) is not None:
            images.put_into(residual)
            positions = positions if images.rotary_positions is None else images.rotary_positions
        rotations = [rope(positions) for rope in self.ropes]
        embeddings = None if self.layer_embeddings is None else self.layer_embeddings(input_ids, residual)
        residual = self._joins[0].begin(residual)
        for index in self._run:
            layer: Any = self.layers[index]
            join, own = self._joins[index], wanted if index == last else None
            x = join(part, residual) if own is not None else join.for_readers(part, residual)
            if states is not None and index in self._state_layers:
                first = self._state_layers.index(index) * residual.shape[1]
                self._copy_rows(residual, states[:, first : first + residual.shape[1]])
            more = layer.own_inputs(input_ids) if embeddings is None else (embeddings[index],)
            part, residual = layer(x, residual, rotations, own, *more)
            if images is not None and index != last:
                images.add_behind(index, residual)
        hidden = self._joins[-1](part, residual)
        if is_output:
            self._copy_rows(hidden, states)
            hidden = only(given, hidden)
        return hidden


def build_model(  # noqa: PLR0913 (one keyword per part)
    spec: ModelSpec,
    *,
    communicator: Communicator,
    dtype: torch.dtype,
    device: torch.device,
    backends: Backends,
    max_model_len: int,
    quantization: str | None = None,
    enable_expert_parallel: bool = False,
    tp_invariant: bool = False,
    state_layers: Sequence[int] = (),
    adapters: AdapterLimits | None = None,
    choices: Choices = DEFAULTS,
) -> LanguageModel:
    """Return this rank's part of the model, its weights allocated on ``device`` but not yet set.  ``adapters``: if any.

    ``quantization`` and the two after it are ``EngineConfig``'s; the model's ``finish_loading`` quantises.  ``choices``
    of kernels are those of the device.
    """
    context = LayerContext(
        communicator=communicator,
        dtype=dtype,
        device=device,
        format_of=choose_formats(quantization, spec, tp_invariant=tp_invariant, choices=choices),
        splits_experts=not enable_expert_parallel,
        tp_invariant=tp_invariant,
        adapters=adapters,
        choices=choices,
    )
    options: dict[str, Any] = {"backends": backends, "max_model_len": max_model_len, "state_layers": state_layers}
    return _kind_of(spec)(spec, context=context, **options).eval()


def _kind_of(spec: ModelSpec) -> Callable[..., LanguageModel]:
    """What runs it: native layers, or modules of a transformers class, which import transformers."""
    if spec.modules is None:
        return CausalLM
    from tp_engine.models.class_model.decoder import ClassDecoder

    return ClassDecoder
