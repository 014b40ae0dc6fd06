"""A residual of several streams, as data: how each block reads one mixture of them and writes to all.  No torch.

::

    embedding -> the same in all streams
    streams -> read: one mixture -> norm -> block -> write: to each stream, with a weight of its own
    streams -> read: one mixture -> final norm

A rule is a subclass, and a reader in ``READERS`` (``layers/streams.py``).  Every rank has all streams and all weights
of their mixtures.
"""

from dataclasses import dataclass

from tp_engine.system.units import round_up

_UNIT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """``count`` streams, each as wide as the model.

    ``attention`` and ``mlp`` name the modules that read for a layer's blocks, below the layer, and ``end`` the one
    after the last layer, below the model.  Without an ``end`` the mean of the streams is read there.  ``eps`` is that
    of the norm before a mixture's weights are made.
    """

    count: int
    attention: str
    mlp: str
    end: str | None
    eps: float

    @property
    def num_weights(self) -> int:
        """With how many numbers of a token the output of a block is written: one for each stream."""
        return self.count

    def row_size(self, hidden_size: int) -> int:
        """Return a token's elements between two blocks: its streams, then the weights of the next output."""
        return self.count * hidden_size + round_up(self.num_weights, _UNIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnectionSpec(StreamSpec):
    """Manifold-constrained hyper-connections (https://arxiv.org/abs/2512.24880), as in DeepSeek V4.

    A block's output is added to a mixture of the streams, whose matrix is made doubly stochastic by ``num_steps`` of
    Sinkhorn's; ``floor`` is added to weights and divisors.
    """

    num_steps: int
    floor: float

    @property
    def num_weights(self) -> int:
        """One for each stream of the output, and the matrix."""
        return self.count * (1 + self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedStreamSpec(StreamSpec):
    """Gated streams, as in Qwen4-Exp: each element of each normalised stream has a gate, made in ``rank`` dimensions;
    the mixture needs no further norm, and the streams are not mixed with each other."""

    rank: int
