"""Layers with a recurrent state in the place of attention, as data.  No torch."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from tp_engine.model_config.kv_layout import StateKind


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentSpec(ABC):
    """What a row keeps of a layer is of one size, however long its sequence; sizes are the model's.

    ``name`` is the module's in the checkpoint.  A kind of layer is a subclass, and a mixer in ``MIXERS``
    (``models/decoder.py``).
    """

    name: str

    @property
    @abstractmethod
    def heads(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """Name and number of those that are divided among the ranks, and of those that are divided or repeated."""

    @property
    @abstractmethod
    def kv_kind(self) -> StateKind:
        """What a row keeps of the layer."""

    @property
    def out_size(self) -> int:
        """Elements of a token that the output projection reads."""
        return self.kv_kind.num_value_heads * self.kv_kind.value_dim

    def split_problem(self, world_size: int) -> str | None:
        """Return what forbids this world size beside the number of ``heads``."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNetSpec(RecurrentSpec):
    """A layer with the gated delta rule (``kernels/gated_delta_net.py``) in the place of attention; sizes are the
    model's.

    Every key head serves ``num_value_heads / num_key_heads`` value heads.  The convolution has ``taps``; each head's
    output is normalised with ``eps``.  Its projections are::

        in_proj_qkv, in_proj_z, in_proj_b, in_proj_a    q, k, v of all heads; z; b; a
        in_proj_qkvz, in_proj_ba, if is_fused           q, k, v, z of a key head, then of the next one; b, a
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    is_fused: bool = False
    name: str = "linear_attn"

    @property
    def heads(self) -> tuple[tuple[str, int], tuple[str, int]]:
        values, keys = self.num_value_heads, self.num_key_heads
        return ("linear-attention value heads", values), ("linear-attention key heads", keys)

    @property
    def kv_kind(self) -> StateKind:
        return StateKind(
            num_key_heads=self.num_key_heads,
            num_value_heads=self.num_value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            taps=self.taps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec(RecurrentSpec):
    """A layer with Kimi delta attention (``kernels/kda.py``); sizes are the model's.

    Queries, keys and values have ``num_heads`` of ``head_dim``, each a convolution of ``taps``; each head's output is
    normalised with ``eps``.  Logarithms of decays are above ``lower_bound``, unless it is 0.  Its modules are q_proj,
    k_proj, v_proj, q_conv1d, k_conv1d, v_conv1d, b_proj; f_a_proj and f_b_proj, which make decays; g_a_proj and
    g_b_proj, which make the output's gates; o_norm; o_proj.
    """

    num_heads: int
    head_dim: int
    taps: int
    eps: float
    lower_bound: float = 0.0
    name: str = "self_attn"

    @property
    def heads(self) -> tuple[tuple[str, int], tuple[str, int]]:
        heads = "linear-attention heads", self.num_heads
        return heads, heads

    @property
    def kv_kind(self) -> StateKind:
        heads, dim = self.num_heads, self.head_dim
        return StateKind(num_key_heads=heads, num_value_heads=heads, key_dim=dim, value_dim=dim, taps=self.taps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec(RecurrentSpec):
    """A layer with a gated causal convolution of few ``taps`` (``kernels/short_conv.py``); its state has no matrices.

    Its modules are in_proj, whose rows are the input's gate, the output's gate and the input; conv; out_proj.
    """

    num_channels: int
    taps: int
    name: str = "conv"

    @property
    def heads(self) -> tuple[tuple[str, int], tuple[str, int]]:
        channels = "channels of short convolutions", self.num_channels
        return channels, channels

    @property
    def kv_kind(self) -> StateKind:
        return StateKind(num_key_heads=1, num_value_heads=self.num_channels, key_dim=0, value_dim=1, taps=self.taps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Spec(RecurrentSpec):
    """A state space layer (``kernels/mamba2.py``); sizes are the model's.

    Each of ``num_groups`` has keys and queries (B and C) of ``state_size`` for its ``num_heads / num_groups`` heads of
    ``head_dim``, and their outputs are normalised together, with ``eps``.  The convolution has ``taps``, and a bias if
    it ``has_conv_bias``.  Its modules are in_proj, whose rows are z, x, B, C, dt; conv1d of x, B, C; norm; out_proj.
    """

    num_groups: int
    num_heads: int
    state_size: int
    head_dim: int
    taps: int
    eps: float
    has_conv_bias: bool = True
    name: str = "mamba"

    @property
    def heads(self) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("Mamba2 heads", self.num_heads), ("Mamba2 groups", self.num_groups)

    @property
    def kv_kind(self) -> StateKind:
        return StateKind(
            num_key_heads=self.num_groups,
            num_value_heads=self.num_heads,
            key_dim=self.state_size,
            value_dim=self.head_dim,
            taps=self.taps,
        )

    def split_problem(self, world_size: int) -> str | None:
        """Only one group that spans all ranks is normalised by an all-reduce."""
        if 1 < self.num_groups < world_size:
            return f"the {self.num_groups} Mamba2 groups, each of which is normalised alone, are fewer than the ranks"
        return None
