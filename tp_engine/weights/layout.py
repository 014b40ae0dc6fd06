"""Every tensor of a checkpoint and where this rank keeps it.  No torch.

Names on the left are those of Hugging Face checkpoints, on the right those of our modules; several tensors of a
checkpoint share one parameter, one after the other along its first dimension::

    self_attn.{q,k,v}_proj.weight  ->  self_attn.qkv_proj.weight   [ q rows | k rows | v rows ]
    mlp.{gate,up}_proj.weight      ->  mlp.gate_up_proj.weight     [ gate rows | up rows ]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tp_engine.model_config import ModelConfig
from tp_engine.weights.shard import Shard, Split, shard_of

_NEVER_NEEDED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Checkpoint tensor ``name`` of ``shape``: ``shard`` of it goes to ``parameter``, from row ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    shard: Shard
    parameter: str
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    size: int
    split: Split


class Layout:
    """The placements of one model on one rank; ``vocab_rows`` are the rank's rows of the padded vocabulary."""

    def __init__(self, config: ModelConfig, *, rank: int, world_size: int, vocab_rows: int) -> None:
        self._config = config
        self._rank, self._world_size, self._vocab_rows = rank, world_size, vocab_rows
        self.placements: tuple[Placement, ...] = tuple(self._all())

    def is_harmless(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although no model reads it."""
        return bool(_NEVER_NEEDED.search(name)) or (self._config.tie_word_embeddings and name == "lm_head.weight")

    def _all(self) -> Iterator[Placement]:
        config = self._config
        table = (config.vocab_size, config.hidden_size)
        yield self._place("model.embed_tokens.weight", table, Split.VOCAB, "embed_tokens.weight")
        for index in range(config.num_layers):
            yield from self._layer(f"model.layers.{index}", f"layers.{index}")
        yield self._place("model.norm.weight", (config.hidden_size,), Split.WHOLE, "norm.weight")
        if not config.tie_word_embeddings:
            yield self._place("lm_head.weight", table, Split.VOCAB, "lm_head.weight")

    def _layer(self, source: str, target: str) -> Iterator[Placement]:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield self._place(f"{source}.{norm}.weight", (hidden,), Split.WHOLE, f"{target}.{norm}.weight")
        qkv = (
            _Part("q_proj", query, Split.COLUMN),
            _Part("k_proj", key, Split.KV_HEADS),
            _Part("v_proj", key, Split.KV_HEADS),
        )
        attention, mlp = f"{source}.self_attn", f"{source}.mlp"
        yield from self._merged(attention, qkv, hidden, f"{target}.self_attn.qkv_proj", config.qkv_bias)
        yield from self._row(f"{attention}.o_proj", hidden, query, f"{target}.self_attn.o_proj", config.out_bias)
        if config.qk_norm:
            for letter in "qk":
                norm = f"{target}.self_attn.qk_norm.{letter}_weight"
                yield self._place(f"{attention}.{letter}_norm.weight", (config.head_dim,), Split.WHOLE, norm)
        gate_up = (_Part("gate_proj", inner, Split.COLUMN), _Part("up_proj", inner, Split.COLUMN))
        yield from self._merged(mlp, gate_up, hidden, f"{target}.mlp.gate_up_proj", config.mlp_bias)
        yield from self._row(f"{mlp}.down_proj", hidden, inner, f"{target}.mlp.down_proj", config.mlp_bias)

    def _merged(
        self, source: str, parts: Sequence[_Part], in_size: int, target: str, bias: bool
    ) -> Iterator[Placement]:
        offset = 0
        for part in parts:
            name = f"{source}.{part.name}"
            weight = self._place(f"{name}.weight", (part.size, in_size), part.split, f"{target}.weight", offset)
            yield weight
            if bias:
                yield self._place(f"{name}.bias", (part.size,), part.split, f"{target}.bias", offset)
            offset += weight.shard.room

    def _row(self, source: str, out_size: int, in_size: int, target: str, bias: bool) -> Iterator[Placement]:
        yield self._place(f"{source}.weight", (out_size, in_size), Split.ROW, f"{target}.weight")
        if bias:
            yield self._place(f"{source}.bias", (out_size,), Split.WHOLE, f"{target}.bias")

    def _place(self, name: str, shape: tuple[int, ...], split: Split, parameter: str, offset: int = 0) -> Placement:
        shard = shard_of(
            split,
            shape,
            rank=self._rank,
            world_size=self._world_size,
            num_kv_heads=self._config.num_kv_heads,
            vocab_rows=self._vocab_rows,
        )
        return Placement(name=name, shape=shape, shard=shard, parameter=parameter, offset=offset)
