"""A model's own head for multi-token prediction on one rank (``model_config/spec.py`` draws it).

It is a part of the model: its weights come with the model's and its layer is the last of those with K/V.  It is split
over the ranks as the model is, and reads the model's embedding and output head.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from tp_engine.attention.base import AttentionBackend
from tp_engine.layers.context import LayerContext
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_engine.layers.image_rows import images_of_step
from tp_engine.layers.linear import RowParallelLinear
from tp_engine.layers.norm import Norm
from tp_engine.layers.residual import Join
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import MtpSpec, NormSpec
from tp_engine.models.decoder import DecoderLayer
from tp_engine.models.draft_head import DraftHead
from tp_engine.weights.source import equal_share


class MtpHead(DraftHead):
    """The head that ``spec`` describes, of a model with these modules and ``hidden_size``.

    ``backend`` attends for its layer, whose blocks are in KV ``group``.
    """

    def __init__(
        self,
        spec: MtpSpec,
        hidden_size: int,
        rope_specs: Sequence[RopeSpec],
        *,
        ropes: nn.ModuleList,
        embed_tokens: VocabParallelEmbedding,
        lm_head: ParallelLMHead,
        backend: AttentionBackend,
        group: int,
        context: LayerContext,
    ) -> None:
        super().__init__(hidden_size, hidden_size, hidden_size, context)

        def norm(one: NormSpec) -> Norm:
            return Norm(one, hidden_size, context=context.at(one.name))

        self.embed_norm, self.hidden_norm = norm(spec.embed_norm), norm(spec.hidden_norm)
        self.projection = RowParallelLinear(
            2 * hidden_size, hidden_size, bias=False, context=context.at(spec.projection)
        )
        self.layer = DecoderLayer(
            spec.layer, hidden_size, rope_specs, backend=backend, group=group, context=context.at(spec.path)
        )
        self.final_norm = None if spec.final_norm is None else norm(spec.final_norm)
        self._columns = equal_share(2 * hidden_size, context.rank, context.world_size)
        self._joins = (
            Join(None, self.layer.input_norm, 1.0, self.layer.readers, context=context),
            Join(
                self.layer.out_norm,
                self.final_norm,
                spec.layer.residual_scale,
                stream_scale=self.layer.stream_scale,
                is_summed=self.layer.returns_sum,
                context=context,
            ),
        )
        # The model's, which are not modules of the head.
        self._embed: Callable[[torch.Tensor], torch.Tensor] = embed_tokens.__call__
        self._shared = ropes, lm_head

    @property
    def lm_head(self) -> ParallelLMHead:  # type: ignore[override]  # the model's
        return self._shared[1]

    def forward(
        self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream, (first, last) = self._stream(input_ids, hidden), self._joins
        x = first.for_readers(None, stream) if wanted is None else first(None, stream)
        part, stream = self.layer(x, stream, [rope(positions) for rope in self._shared[0]], wanted)
        out = last(part, stream)
        return out, out

    def store(self, input_ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        x = self._joins[0].for_readers(None, self._stream(input_ids, hidden))
        self.layer.store(x, [rope(positions) for rope in self._shared[0]])

    def _stream(self, input_ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """What the layer reads (N, hidden), before its norm."""
        embeddings = self._embed(input_ids)
        if (images := images_of_step()) is not None:
            images.put_into(embeddings)
        both = self.embed_norm(embeddings), self.hidden_norm(hidden)
        stream: torch.Tensor = self.projection(self.columns_of(both, self._columns))
        return stream
