"""A Gemma 4 assistant on one rank (``model_config/assistant.py`` draws it), split over the ranks as the model is.

Each rank's query heads read the K/V that the model has on this rank, in the model's blocks.
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tp_engine.attention.base import Backends
from tp_engine.layers.attention import Attention
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_engine.layers.linear import RowParallelLinear
from tp_engine.layers.norm import Norm
from tp_engine.layers.rotary import RotaryEmbedding
from tp_engine.model_config.assistant import AssistantSpec
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.models.causal_lm import CausalLM
from tp_engine.models.decoder import DecoderLayer, SelfAttention
from tp_engine.models.draft_head import DraftHead
from tp_engine.models.joins import make_joins
from tp_engine.weights.source import equal_share


class AssistantHead(DraftHead):
    """The assistant that ``spec`` describes, of a ``model``.

    Weights are allocated but not set: load them, then call ``finish_loading``.
    """

    keeps_kv = False

    def __init__(
        self, spec: AssistantSpec, model: CausalLM, *, backends: Backends, max_model_len: int, context: LayerContext
    ) -> None:
        own, below, attention = spec.model, context.at("model"), model.attention_of
        super().__init__(spec.state_size, own.hidden_size, spec.state_size, context)
        sizes = (own.vocab_size, own.hidden_size)
        self._sources = [
            one.kv_source
            for one in (layer.attention for layer in own.layers)
            if isinstance(one, AttentionSpec) and one.kv_source is not None
        ]
        self.groups = tuple(dict.fromkeys(attention[source].group for source in self._sources))
        self.embed_tokens = VocabParallelEmbedding(*sizes, context=below.at("embed_tokens"))  # for the output alone
        self.pre_projection = RowParallelLinear(
            2 * spec.state_size, own.hidden_size, bias=False, context=context.at("pre_projection")
        )
        self.ropes = nn.ModuleList(
            RotaryEmbedding(rope, max_model_len, dtype=context.dtype, device=context.device) for rope in own.ropes
        )
        found = ((index, getattr(layer, "self_attn", None)) for index, layer in enumerate(model.layers))
        blocks = {index: block for index, block in found if isinstance(block, SelfAttention)}
        layers = [
            DecoderLayer(
                layer,
                own.hidden_size,
                own.ropes,
                backend=backends[attention[source].group],
                group=attention[source].group,
                context=below.at("layers").at(str(index)),
                source=blocks[source],
            )
            for index, (layer, source) in enumerate(zip(own.layers, self._sources, strict=True))
        ]
        self.layers = nn.ModuleList(layers)
        assert own.final_norm is not None, "native layers end with a norm"
        self.norm = Norm(own.final_norm, own.hidden_size, context=below.at(own.final_norm.name))
        self.post_projection = RowParallelLinear(
            own.hidden_size, spec.state_size, bias=False, context=context.at("post_projection")
        )
        self.lm_head = ParallelLMHead(
            *sizes, context=context.at("lm_head"), tied=self.embed_tokens if own.is_tied else None
        )
        self._joins = make_joins(layers, self.norm, context)
        self._given = equal_share(2 * spec.state_size, context.rank, context.world_size)
        self._made = equal_share(own.hidden_size, context.rank, context.world_size)
        self.serve(model.embed_tokens, attention)

    def serve(self, embedding: VocabParallelEmbedding, attention: Mapping[int, Attention]) -> None:
        self._embed: Callable[[torch.Tensor], torch.Tensor] = embedding.__call__  # no module of the head
        own = [module for module in self.layers.modules() if isinstance(module, Attention)]
        for one, source in zip(own, self._sources, strict=True):
            one.read(attention[source])

    def finish_loading(self) -> None:
        for module in self.modules():
            if isinstance(module, Layer):
                module.finish_loading()

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert wanted is None, "it computes one token of each request"
        stream = self.pre_projection(self.columns_of((self._embed(input_ids), hidden), self._given))
        rotations, part = [rope(positions) for rope in self.ropes], None
        for join, layer in zip(self._joins, self.layers, strict=False):
            part, stream = layer(join.for_readers(part, stream), stream, rotations, None)
        out = self._joins[-1](part, stream)
        return out, self.post_projection(self.columns_of((out,), self._made))
