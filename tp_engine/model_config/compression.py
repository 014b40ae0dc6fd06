"""Attention to one row per token that is key and value, and to rows that stand for many tokens.  No torch.

DeepSeek V4.  A layer attends to the rows of a window, and one with compression also to an *entry* for each ``rate``
tokens before, which is made of what the layer projects of them::

    tokens     | 0 1 2 3 | 4 5 6 7 | 8 9 ...                rate 4
    entries    |    0    |    1    |  (not complete)        softmax of gates x values, per element; norm; rotation
    overlapping       [0 first series, 1 second series]     entry 1 is made of tokens 0 to 7

With an index the entries that a query attends to are chosen, by entries of their own.
"""

from dataclasses import dataclass

from tp_engine.model_config.kv_layout import KvKind, StateKind
from tp_engine.model_config.mla import IndexSpec

_PARTS = 3  # of the softmax that goes on: largest gate, sum of weights, weighted sum


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionSpec:
    """One entry of ``dim`` per ``rate`` tokens; if it ``overlaps``, of two series; ``index`` chooses among entries."""

    rate: int
    dim: int
    overlaps: bool
    index: IndexSpec | None = None

    @property
    def index_dim(self) -> int:
        """Elements of an entry of the index; 0 without."""
        return 0 if self.index is None else self.index.dim

    @property
    def width(self) -> int:
        """Elements of an entry and of its entry of the index."""
        return self.dim + self.index_dim

    @property
    def num_series(self) -> int:
        """What is projected of a token: as many values, and gates."""
        return 2 if self.overlaps else 1

    @property
    def kv_kind(self) -> KvKind:
        """The entries in the cache."""
        return KvKind(
            window=None, num_kv_heads=1, head_dim=self.dim, num_parts=1, index_dim=self.index_dim, rate=self.rate
        )

    @property
    def num_sums(self) -> int:
        """Softmaxes that go on from token to token: with two series also that of the first one before."""
        return 3 if self.overlaps else 1

    @property
    def state_kind(self) -> StateKind:
        """What a row keeps of the tokens since the last entry: numbers without matrices, the same on all ranks."""
        return StateKind(
            num_key_heads=1,
            num_value_heads=self.num_sums * _PARTS * self.width,
            key_dim=0,
            value_dim=1,
            taps=2,
            is_repeated=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRowSpec:
    """``query_rank``: of the normalised latent that queries are made of.  The last ``rope_dim`` elements of a head
    turn, pairs being neighbours; outputs are turned back.  ``num_groups`` groups of heads are each projected to
    ``group_rank`` elements, then all together to the stream.  ``eps`` is that of all norms."""

    query_rank: int
    rope_dim: int
    num_groups: int
    group_rank: int
    eps: float
    compression: CompressionSpec | None = None
