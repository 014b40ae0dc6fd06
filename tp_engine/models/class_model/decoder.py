"""A model on one rank whose layers are modules of a transformers class."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tp_engine.attention.base import Backends
from tp_engine.layers.attention import Attention, only
from tp_engine.layers.context import LayerContext
from tp_engine.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from tp_engine.layers.score_head import ScoreHead
from tp_engine.model_config.spec import AttentionSpec, ModelSpec
from tp_engine.models.class_model.attention import NAME, Place, place_calls, register
from tp_engine.models.class_model.body import make_body
from tp_engine.models.language_model import LanguageModel
from tp_engine.models.recognition.model_class import ModelClass


class ClassDecoder(LanguageModel):
    """The decoder of ``spec.modules``."""

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
        modules, layout = spec.modules, spec.kv_layout_on(context.world_size)
        assert modules is not None and not state_layers
        register()
        sizes = (spec.vocab_size, spec.hidden_size)
        self.embed_tokens = VocabParallelEmbedding(
            *sizes, context=context.at("model").at("embed_tokens"), scale=spec.embedding_scale
        )
        made = ModelClass(json.loads(modules.config)).without_memory(NAME, context.dtype)
        body = make_body(made, spec, self.embed_tokens, context)
        places = []
        for index, layer in enumerate(spec.layers):
            assert isinstance(layer.attention, AttentionSpec)
            group, _ = layout.place_of(index)
            places.append(Place(layer.attention, backends[group], group, context))
        self._calls = place_calls(body, modules.places, places)
        self.places = nn.ModuleList(place.attention for place in places)
        self.body = body
        self.lm_head = ParallelLMHead(
            *sizes,
            context=context.at("lm_head"),
            tied=self.embed_tokens if spec.is_tied else None,
            scale=spec.logit_scale,
            softcap=spec.logit_softcap,
            bias=modules.head_bias,
        )
        linears = () if spec.classifier is None else spec.classifier.linears
        self.score_head = ScoreHead(linears, spec.hidden_size, context=context) if linears else None
        self.hidden_size, self.dtype = spec.hidden_size, context.dtype
        self.layer_embeddings = self.vision = self.mtp = None
        self._copy_rows = context.op("copy_rows")

    @property
    def is_recordable(self) -> bool:
        """No: the class's modules are not compiled."""
        return False

    @property
    def attention_of(self) -> dict[int, Attention]:
        """That of each call."""
        return dict(enumerate(self.attention_layers))

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """All of it runs: which of a class's layers are alike is not known."""
        yield

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As that of ``CausalLM``, of which ``states`` takes the outputs."""
        for one in self._calls:
            one.begin_step()
        given: dict[str, Any] = {"input_ids": input_ids[None], "position_ids": positions[None], "use_cache": False}
        hidden: torch.Tensor = self.body(**given).last_hidden_state[0].to(self.dtype)
        if states is not None:
            self._copy_rows(hidden, states)
        return only(wanted, hidden)
