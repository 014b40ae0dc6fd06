"""A layer of one block, as in Nemotron-H: attention, what runs in its place, or an MLP, after a norm."""

from collections.abc import Sequence
from typing import Any

import torch

from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.quantization.row_codes import Rows
from tp_engine.layers.attention import only
from tp_engine.layers.context import LayerContext
from tp_engine.layers.norm import Norm
from tp_engine.model_config.rope import RopeSpec
from tp_engine.model_config.spec import LayerSpec
from tp_engine.models.decoder import MixerLayer
from tp_engine.models.mlp import make_mlp


class OneBlockLayer(MixerLayer):
    """One layer; the model joins it to its neighbours as it joins a ``DecoderLayer``."""

    out_norm, stream_scale, returns_sum = None, None, False

    def __init__(
        self, spec: LayerSpec, hidden_size: int, ropes: Sequence[RopeSpec], *, context: LayerContext, **places: Any
    ) -> None:
        super().__init__()
        assert spec.has_one_block and spec.input_norm is not None
        assert list(spec.norms) == [spec.input_norm] and not spec.is_parallel
        self.input_norm = Norm(spec.input_norm, hidden_size, context=context.at(spec.input_norm.name))
        self.mlp = make_mlp(spec, hidden_size, context=context) if spec.attention is None else None
        if spec.attention is not None:
            self.readers = self._make_mixer(spec.attention, hidden_size, ropes, context=context, **places)
        elif self.mlp is not None:
            self.readers = self.mlp.readers
        self.out_scale = spec.residual_scale

    def forward(
        self, x: Rows, residual: torch.Tensor, rotations: Sequence[Rotation], wanted: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.mlp is None:
            return self._mix(x, rotations, wanted), only(wanted, residual)
        if wanted is not None:
            assert isinstance(x, torch.Tensor), "codes are of all tokens"
            x = only(wanted, x)
        part: torch.Tensor = self.mlp(x)
        return part, only(wanted, residual)
