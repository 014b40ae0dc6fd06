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
from tp_engine.system.log import get_logger
from tp_engine.system.units import format_gib

logger = get_logger(__name__)


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
        self._architecture, self._info = modules.architecture, context.communicator.info
        self.layer_embeddings = self.vision = self.mtp = None
        self._copy_rows = context.op("copy_rows")

    @property
    def is_recordable(self) -> bool:
        """No: the class's modules are not compiled."""
        return False

    @property
    def why_not_capture(self) -> str:
        """The class's modules may read values on the host, or choose by them what they run: a graph would keep the
        choice of its recording, and give wrong tokens without an error."""
        return f"the modules of {self._architecture} are transformers' own, which may choose by values what they run"

    def finish_loading(self) -> None:
        """Warn, besides, of experts that no native layers run."""
        super().finish_loading()
        num_bytes = sum(weight.nbytes for weight in self.body.parameters() if weight.dim() == 3 and weight.shape[1] > 1)
        if num_bytes and self._info.is_first:
            logger.warning("%s", _cost_of_experts(self._architecture, num_bytes, self._info.world_size))

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
        for one in self._calls:
            one.end_step()
        if states is not None:
            self._copy_rows(hidden, states)
        return only(wanted, hidden)


def _cost_of_experts(architecture: str, num_bytes: int, world_size: int) -> str:
    """What it costs that stacked experts of ``num_bytes`` on each rank are run by their class."""
    kept = f"{format_gib(num_bytes)} on this rank"
    if world_size > 1:
        kept = f"{format_gib(num_bytes)}, whole on each of {world_size} ranks, each of which computes all of them"
    remedy = "take a model that native layers run (docs/classes.md lists the classes)"
    if world_size > 1:
        remedy += ", or, if one rank has room for it, one engine on each device and a router before them"
    return f"the experts of {architecture} ({kept}) are run by transformers' own code, which is slow: {remedy}"
