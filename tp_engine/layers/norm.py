"""RMS norm (https://arxiv.org/abs/1910.07467) and layer norm."""

import torch

from tp_engine.kernels.attention.heads import HeadNorm
from tp_engine.kernels.layer_ops import NormRule
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.model_config.spec import AttentionSpec, NormSpec, QkNormSpec
from tp_engine.weights.source import Decode, Span, as_stored, equal_share, kv_head_share, times, vector_source


class Norm(Layer):
    """Normalises the last dimension, of ``size``, by ``spec``; computes in float32."""

    def __init__(self, spec: NormSpec, size: int, *, context: LayerContext) -> None:
        super().__init__()
        decode = as_stored if spec.factor == 1.0 else lambda values: values.float() * spec.factor
        source = vector_source(f"{context.path}.{spec.tensor}", size, decode=decode, init=1.0 - spec.offset)
        self.weight = context.parameter((size,), (source,))
        self.rule = NormRule(self.weight, spec.eps, spec.offset, spec.kind == "layer")
        self.is_recordable = context.can_record("norm")
        self._norm = context.op("norm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, size) -> (N, size)."""
        normalised: torch.Tensor = self._norm(x, self.rule)
        return normalised


class QKNorm(Layer):
    """Normalises the query and key heads of a layer before they are rotated, and its value heads if the spec says so.

    ``qk_norm_rope_store`` normalises each head alone; with ``spans_heads``, ``normalise`` normalises all heads of all
    ranks together.  ``order`` is the order of a head's elements, as in the projections.
    """

    def __init__(self, spec: QkNormSpec, attention: AttentionSpec, order: Decode, *, context: LayerContext) -> None:
        super().__init__()
        self._spec, self._attention, self._communicator = spec, attention, context.communicator
        heads = equal_share(attention.num_heads, context.rank, context.world_size)
        kv_heads = kv_head_share(attention.num_kv_heads, context.rank, context.world_size)
        has_keys = attention.kv_source is None
        self._counts = heads.size, kv_heads.size if has_keys else 0
        self.q_weight = self._weight("q_norm", attention.num_heads, heads, order, context)
        self.k_weight = (
            self._weight("k_norm", attention.num_kv_heads, kv_heads, order, context) if has_keys else self.q_weight
        )
        self._weights: torch.Tensor | None = None
        self._head_norm: HeadNorm | None = None
        self._squares, self._normalise = context.op("head_squares"), context.op("norm_width")
        self.is_recordable = not spec.spans_heads or context.can_record("head_squares", "norm_width")

    def _weight(self, name: str, num_heads: int, own: Span, order: Decode, context: LayerContext) -> torch.Tensor:
        dim = self._attention.head_dim
        if not self._spec.has_weights:
            return torch.full((dim,), 1.0 - self._spec.offset, dtype=context.dtype, device=context.device)
        stored = num_heads * dim if self._spec.spans_heads else dim
        taken = times(own, dim) if self._spec.spans_heads else Span(0, dim)
        source = vector_source(
            f"{context.at(name).path}.weight", stored, taken, decode=order, init=1.0 - self._spec.offset
        )
        return context.parameter((taken.size,), (source,))

    def finish_loading(self) -> None:
        """Repeat the weights for each head."""
        num_heads, num_kv_heads = self._counts
        dim = self._attention.head_dim
        of_query, of_key = self.q_weight.view(-1, dim), self.k_weight.view(-1, dim)
        weights = [of_query.expand(num_heads, -1), of_key.expand(num_kv_heads, -1)]
        if self._spec.includes_values:
            weights.append(torch.full_like(of_key, 1.0 - self._spec.offset).expand(num_kv_heads, -1))
        self._weights = torch.cat(weights)
        if not self._spec.spans_heads:
            self._head_norm = HeadNorm(
                q_weight=self.q_weight,
                k_weight=self.k_weight,
                weights=self._weights,
                eps=self._spec.eps,
                offset=self._spec.offset,
                includes_values=self._spec.includes_values,
            )

    @property
    def head_norm(self) -> HeadNorm | None:
        """The norm of single heads; None if all heads are normalised together."""
        assert self._weights is not None, "finish_loading comes first"
        return self._head_norm

    @property
    def reduced_bytes(self) -> int:
        """Bytes of each token that ``normalise`` all-reduces; 0 if each head is normalised alone."""
        return 2 * torch.float32.itemsize if self._spec.spans_heads else 0

    def normalise(self, heads: torch.Tensor) -> None:
        """Normalise queries and keys of ``heads`` (N, H + 2 KV, head_dim) in place, over all ranks; a collective.

        Each rank that has a shared KV head counts it, and so does the width of the sum.
        """
        attention, (num_heads, num_kv_heads) = self._attention, self._counts
        squares = self._squares(heads, num_heads, num_kv_heads)
        info = self._communicator.info
        if info.world_size > 1:
            squares = self._communicator.all_reduce(squares)
        dim = attention.head_dim
        widths = (attention.num_heads * dim, num_kv_heads * info.world_size * dim)
        self._normalise(heads, num_heads, num_kv_heads, squares, self._weights, widths, self._spec.eps)
