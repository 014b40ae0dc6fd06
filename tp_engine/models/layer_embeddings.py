"""Embeddings of their own for each layer (Gemma 4 E2B and E4B), which every rank computes whole.

::

    token ids -> embed_tokens_per_layer -----------------------------------------------+
    the model's embeddings -> per_layer_model_projection -> norm of each layer's part -(+)-> times 2^-0.5

    in a layer   stream -> per_layer_input_gate -> activation -> times its part -> per_layer_projection -> norm -(+)->
"""

from dataclasses import replace

import torch

from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.embedding import VocabParallelEmbedding
from tp_engine.layers.image_rows import images_of_step
from tp_engine.layers.linear import whole_linear
from tp_engine.layers.norm import Norm
from tp_engine.model_config.spec import LayerEmbeddingSpec


class LayerEmbeddings(Layer):
    """All layers' embeddings of a step's tokens; the table is split over the ranks as the vocabulary is."""

    def __init__(self, spec: LayerEmbeddingSpec, num_layers: int, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self._size, width = spec.size, num_layers * spec.size
        self._image_token_id = spec.image_token_id
        self.table = VocabParallelEmbedding(
            spec.vocab_size, width, context=context.at("embed_tokens_per_layer"), scale=spec.size**0.5
        )
        self.projection = whole_linear("per_layer_model_projection", hidden_size, width, context)
        # What is projected is divided by the root of the width first, which only its epsilon shows.
        rule = replace(spec.norm, eps=spec.norm.eps * hidden_size)
        self.norm = Norm(rule, spec.size, context=context.at(rule.name))
        self._add = context.op("add")
        self.is_recordable = context.can_record("add")

    def forward(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> list[torch.Tensor]:
        """``token_ids`` (N,) and the model's embeddings of them (N, hidden) -> for each layer (N, size), a view."""
        if (images := images_of_step()) is not None:
            token_ids = token_ids.index_fill(0, images.places, self._image_token_id)
        rows: torch.Tensor = self.table(token_ids)
        projected: torch.Tensor = self.projection(embedded)
        parts = self.norm(projected.view(-1, self._size))
        self._add(parts, rows.view(-1, self._size), 1.0, 0.5**0.5)
        return list(rows.split(self._size, 1))


class LayerEmbedding(Layer):
    """What a layer adds to the stream after its MLP, before the norm of it."""

    def __init__(self, spec: LayerEmbeddingSpec, hidden_size: int, *, context: LayerContext) -> None:
        super().__init__()
        self._size, self._activation = spec.size, spec.activation
        self.gate = whole_linear("per_layer_input_gate", hidden_size, spec.size, context)
        self.projection = whole_linear("per_layer_projection", spec.size, hidden_size, context)
        self._copy_rows, self._gate = context.op("copy_rows"), context.op("gate")
        self.is_recordable = context.can_record("copy_rows", "gate")

    def forward(self, stream: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """``stream`` (N, hidden) and the layer's ``embedding`` (N, size) -> (N, hidden), the same on all ranks."""
        pair = stream.new_empty(len(stream), 2 * self._size)
        self._copy_rows(self.gate(stream), pair[:, : self._size])
        self._copy_rows(embedding, pair[:, self._size :])
        added: torch.Tensor = self.projection(self._gate(pair, self._activation))
        return added
