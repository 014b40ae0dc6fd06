"""The joins of a model: from each layer to the next, and behind the last one."""

from collections.abc import Sequence

from tp_engine.layers.context import LayerContext
from tp_engine.layers.norm import Norm
from tp_engine.layers.residual import Join
from tp_engine.layers.streams import StreamJoin, StreamReader
from tp_engine.model_config.streams import StreamSpec
from tp_engine.models.decoder import DecoderLayer
from tp_engine.models.one_block import OneBlockLayer


def make_joins(layers: Sequence[DecoderLayer | OneBlockLayer], final_norm: Norm, context: LayerContext) -> list[Join]:
    """Return the joins before each layer and after the last: the output norm of the one before, the next one's norm."""
    next_norms = [*(layer.input_norm for layer in layers), final_norm]
    readers = [*(layer.readers for layer in layers), ()]
    joins = [Join(None, next_norms[0], 1.0, readers[0], context=context)]
    for layer, next_norm, own in zip(layers, next_norms[1:], readers[1:], strict=True):
        places = (layer.out_norm, next_norm, layer.out_scale, own)
        joins.append(Join(*places, stream_scale=layer.stream_scale, is_summed=layer.returns_sum, context=context))
    return joins


def make_stream_joins(
    spec: StreamSpec,
    layers: Sequence[DecoderLayer | OneBlockLayer],
    end: StreamReader,
    final_norm: Norm,
    context: LayerContext,
) -> list[StreamJoin]:
    """The same of a residual of several streams; ``end`` reads them after the last layer."""
    readers, next_norms = [], [*(layer.input_norm for layer in layers), final_norm]
    for layer in layers:
        assert isinstance(layer, DecoderLayer) and layer.mixture is not None, "all layers have both blocks and streams"
        readers.append(layer.mixture)
    out_norms = [None, *(layer.out_norm for layer in layers)]
    return [
        StreamJoin(spec, reader, out_norm, next_norm, context=context)
        for reader, out_norm, next_norm in zip([*readers, end], out_norms, next_norms, strict=True)
    ]
