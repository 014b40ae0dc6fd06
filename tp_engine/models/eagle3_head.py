"""An EAGLE-3 head on one rank: a model's states and the next tokens in, draft tokens for those after them out.

It is split over the ranks as the model is (``model_config/draft_head.py`` draws it)::

    fc            this rank's columns of the states; one all-reduce
    attention     this rank's heads, whose K/V are one more layer of the KV cache
    lm_head       this rank's part of the drafts' vocabulary
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from tp_engine.attention.base import Backends
from tp_engine.errors import WeightError
from tp_engine.layers.attention import Attention, only
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_engine.layers.linear import RowParallelLinear
from tp_engine.layers.norm import Norm
from tp_engine.layers.residual import Join
from tp_engine.layers.rotary import RotaryEmbedding
from tp_engine.model_config.draft_head import DraftHeadSpec
from tp_engine.model_config.spec import AttentionSpec
from tp_engine.models.causal_lm import CausalLM
from tp_engine.models.decoder import SelfAttention
from tp_engine.models.draft_head import DraftHead
from tp_engine.models.mlp import make_mlp
from tp_engine.weights.source import Span, equal_share, vector_source


class Eagle3Head(DraftHead):
    """The head that ``spec`` describes, of a ``model``, whose embedding it uses if it has none.

    ``backend`` attends for its layer, whose blocks are in KV ``group``.  Weights are allocated but not set: load them,
    then call ``finish_loading``.
    """

    def __init__(
        self,
        spec: DraftHeadSpec,
        model: CausalLM,
        *,
        backends: Backends,
        group: int,
        max_model_len: int,
        context: LayerContext,
    ) -> None:
        super().__init__(spec.state_size, spec.model.hidden_size, spec.model.hidden_size, context)
        self._spec, self.has_map, head = spec, spec.has_map, spec.model
        (layer,) = head.layers
        attention, layer_context, hidden = layer.attention, context.at(spec.layer_path), head.hidden_size
        assert isinstance(attention, AttentionSpec) and layer.input_norm is not None and layer.mlp_norm is not None
        self.fc = RowParallelLinear(spec.state_size, hidden, bias=False, context=context.at("fc"))
        self._columns = equal_share(spec.state_size, context.rank, context.world_size)
        width = spec.state_size // len(spec.state_layers)
        states, parts = spec.states_norm, spec.state_norms
        self.states_norm = None if states is None else Norm(states, spec.state_size, context=context.at(states.name))
        self.state_norms = nn.ModuleList(Norm(one, width, context=context.at(one.name)) for one in parts)
        self.own_embedding = (
            VocabParallelEmbedding(spec.vocab_size, hidden, context=context.at("embed_tokens"))
            if spec.has_embedding
            else None
        )
        self.serve(model.embed_tokens, model.attention_of)
        self.input_norm = Norm(layer.input_norm, hidden, context=layer_context.at(layer.input_norm.name))
        self.hidden_norm = Norm(spec.hidden_norm, hidden, context=layer_context.at(spec.hidden_norm.name))
        self.rope = RotaryEmbedding(head.ropes[0], max_model_len, dtype=context.dtype, device=context.device)
        self.self_attn = SelfAttention(
            attention,
            hidden,
            head.ropes[0],
            backend=backends[group],
            group=group,
            context=layer_context.at("self_attn"),
            in_size=2 * hidden,
        )
        self.mlp_norm = Norm(layer.mlp_norm, hidden, context=layer_context.at(layer.mlp_norm.name))
        self.mlp = make_mlp(layer, hidden, context=layer_context)
        assert head.final_norm is not None, "native layers end with a norm"
        self.norm = Norm(head.final_norm, hidden, context=context.at(head.final_norm.name))
        self.lm_head = ParallelLMHead(head.vocab_size, hidden, context=context.at("lm_head"))
        self.d2t: nn.Parameter | None = None
        if spec.has_map:
            source = vector_source("d2t", head.vocab_size, dtype=torch.int64, init=0.0)
            self.d2t = context.parameter((head.vocab_size,), (source,), dtype=torch.int64)
        self._joins = (Join(None, self.mlp_norm, 1.0, context=context), Join(None, self.norm, 1.0, context=context))

    def serve(self, embedding: VocabParallelEmbedding, attention: Mapping[int, Attention]) -> None:
        own = embedding if self.own_embedding is None else self.own_embedding
        self._embed: Callable[[torch.Tensor], torch.Tensor] = own.__call__  # no module of the head

    @property
    def own_attention(self) -> list[Attention]:
        return [self.self_attn.attention]

    def finish_loading(self) -> None:
        for module in self.modules():
            if isinstance(module, Layer):
                module.finish_loading()
        if self.d2t is not None:
            targets, size = (
                self.tokens_of(torch.arange(len(self.d2t), device=self.d2t.device, dtype=torch.int64)),
                self._spec.vocab_size,
            )
            if not bool(((targets >= 0) & (targets < size)).all()):
                raise WeightError(f"d2t of the draft head leads to tokens outside of the vocabulary of {size}")

    def combine(self, states: torch.Tensor) -> torch.Tensor:
        if self.states_norm is not None:
            states = self.states_norm(states)
        parts = [states]
        if len(self.state_norms):
            chunks = states.chunk(len(self.state_norms), dim=1)
            parts = [norm(chunk) for norm, chunk in zip(self.state_norms, chunks, strict=True)]
        own: torch.Tensor = self.fc(self.columns_of(parts, self._columns))
        return own

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normalised = self.hidden_norm(hidden)
        residual = normalised if self._spec.norm_before_residual else hidden
        part = self.self_attn(self._beside(input_ids, normalised), self.rope(positions), wanted)
        residual = only(wanted, residual)
        part = self.mlp(self._joins[0](part, residual))
        out = self._joins[1](part, residual)
        return out, out if self._spec.norm_output else residual

    def store(self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        self.self_attn.store(self._beside(input_ids, self.hidden_norm(hidden)), self.rope(positions))

    def _beside(self, input_ids: torch.Tensor, normalised: torch.Tensor) -> torch.Tensor:
        """The tokens' embeddings and the states (N, hidden), side by side."""
        return self.columns_of((self.input_norm(self._embed(input_ids)), normalised), Span(0, 2 * self.fed_size))

    def tokens_of(self, drafts: torch.Tensor) -> torch.Tensor:
        return drafts if self.d2t is None else drafts + self.d2t[drafts].to(drafts.dtype)
