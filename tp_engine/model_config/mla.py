"""Latent attention: the keys and values of all heads are made of one small vector per token.  No torch.

DeepSeek-V2 (https://arxiv.org/abs/2405.04434, section 2.1) calls it multi-head latent attention.  Per token::

    query of a head   [ nope_dim                      | rope_dim, turned ]
    cached row        [ rank: the latent, normalised  | rope_dim, turned ]       the same row for all heads
    key of a head     [ nope_dim, made of the latent  | rope_dim of the row ]
    value of a head   value_dim, made of the latent

A head's map from the latent to its key and value is a matrix (nope_dim + value_dim, rank), so a score can be taken in
two ways: from keys that are made of all latents, or from the latents, with the query multiplied by the matrix first.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """What chooses the ``top_k`` keys that a query attends to (``attention/selection.py``): ``num_heads`` index queries
    and one index key of ``dim`` per token.

    ``is_interleaved``: the elements of a pair that turns are neighbours, as ``RopeSpec`` has it for the main rotation.
    ``source``: the layer has no indexer, and attends to what that layer before it has chosen.
    """

    num_heads: int
    dim: int
    top_k: int
    is_interleaved: bool
    source: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """The sizes in the module's text; ``query_rank``: queries are made of a normalised latent of their own, None: of
    the stream.  ``eps`` is that of the latents' norms.  ``index``: queries attend to some keys only."""

    rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    query_rank: int | None = None
    eps: float = 1e-6
    index: IndexSpec | None = None

    @property
    def row_dim(self) -> int:
        """Elements of a cached row."""
        return self.rank + self.rope_dim

    @property
    def query_dim(self) -> int:
        """Elements of a head's query and key."""
        return self.nope_dim + self.rope_dim

    @property
    def up_dim(self) -> int:
        """Elements of a head that are made of a latent."""
        return self.nope_dim + self.value_dim

    def down_rows(self, num_heads: int) -> int:
        """Return what ``num_heads`` queries, or their latent, take of a token's first projection, beside the cached
        row."""
        return num_heads * self.query_dim if self.query_rank is None else self.query_rank
