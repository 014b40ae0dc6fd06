"""The indexer of DeepSeek sparse attention (``kernels/attention/index_keys.py``); every rank has all of it.

::

    x -> wk -> k_norm -> index key (dim)                      cached, one per token
    query latent -> wq_b -> index queries (heads, dim)        the first rope_dim elements of both turn
    x -> weights_proj -> a weight per head, in float32
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from tp_engine.kernels.attention.heads import Rotation
from tp_engine.kernels.attention.index_keys import ChosenKeys, KeyNorm, choose
from tp_engine.kernels.kv_cache.layer_kv import KeyValue, LayerKv
from tp_engine.layers.context import Layer, LayerContext
from tp_engine.layers.linear import LocalLinear, whole_linear
from tp_engine.layers.quantization.dense import Dense
from tp_engine.model_config.mla import IndexSpec
from tp_engine.weights.source import vector_source

_EPS = 1e-6


class Indexer(Layer):
    """The projections, and the choice of this step's keys, which other layers may share: ``num_layers`` in all."""

    def __init__(self, spec: IndexSpec, hidden_size: int, query_rank: int, *, context: LayerContext) -> None:
        super().__init__()
        self._spec, self.top_k = spec, spec.top_k
        width = spec.num_heads * spec.dim
        self.wq_b = whole_linear("wq_b", query_rank, width, context)
        self.wk = whole_linear("wk", hidden_size, spec.dim, context)
        # Never quantised, whatever config.json says.
        exact = replace(context, dtype=torch.float32, format_of=lambda names: Dense(choices=context.choices))
        self.weights_proj = whole_linear("weights_proj", hidden_size, spec.num_heads, exact)
        path = context.at("k_norm").path
        self.norm, self.norm_bias = (
            context.parameter((spec.dim,), (vector_source(f"{path}.{name}", spec.dim, init=init),))
            for name, init in (("weight", 1.0), ("bias", 0.0))
        )
        self._prepare, self._widen, self._choose_keys, self._store = (
            context.op(name) for name in ("prepare_index", "to_float32", "choose_keys", "store_kv")
        )
        self.is_recordable = context.can_record("prepare_index", "to_float32", "choose_keys")
        self._scale = (spec.num_heads * spec.dim) ** -0.5
        self._queries = self._weights = torch.empty(0, dtype=torch.float32, device="cpu")
        self._chosen: dict[int, torch.Tensor] = {}
        self._of_rows: dict[int, ChosenKeys] = {}
        self.index_kv: LayerKv | None = None
        self.num_layers, self._num_waiting = 1, 0

    @property
    def readers(self) -> list[LocalLinear]:
        """The layers that read the stream."""
        return [self.wk, self.weights_proj]

    def forward(self, x: torch.Tensor, latent: torch.Tensor, rotation: Rotation, slots: torch.Tensor) -> None:
        """Make the index keys, queries and weights of a step: ``x`` (N, hidden), ``latent`` (N, query_rank),
        normalised.

        Keys go to the ``slots`` (N,) of the cache, because later steps choose among them.
        """
        spec = self._spec
        queries, keys = self._prepare(
            self.wq_b(latent).view(len(x), spec.num_heads, spec.dim), self.wk(x),
            KeyNorm(self.norm, self.norm_bias, _EPS), rotation, spec.is_interleaved, self.index_kv, slots,
        )  # fmt: skip
        if keys is not None:
            self._store(KeyValue(keys.unsqueeze(1), keys.unsqueeze(1)), self.index_kv, slots)
        self._queries, self._weights = queries, self.weights_proj(self._widen(x))
        self._chosen, self._of_rows, self._num_waiting = {}, {}, self.num_layers

    def leave(self) -> None:
        """Count one more layer that has attended; after the last one, this step's tensors are dropped."""
        self._num_waiting -= 1
        if not self._num_waiting:
            self._queries = self._weights = self._queries.new_empty(0)
            self._chosen, self._of_rows = {}, {}

    def chosen(self, start: int, length: int, keys: Callable[[], torch.Tensor]) -> torch.Tensor:
        found = self._chosen.get(start)
        if found is None:
            own = slice(start, start + length)
            found = self._chosen[start] = choose(
                self._queries[own], self._weights[own] * self._scale, keys(), self.top_k
            )
        return found

    def of_rows(self, start: int, block_table: torch.Tensor, seq_lens: torch.Tensor) -> ChosenKeys:
        """Choose once for all layers; see ``Chooser``."""
        found = self._of_rows.get(start)
        if found is None:
            assert self.index_kv is not None, "a step with a cache"
            own = slice(start, start + len(seq_lens))
            found = self._of_rows[start] = self._choose_keys(
                self._queries[own], self._weights[own], self._scale, self.index_kv, block_table, seq_lens, self.top_k
            )
        return found
