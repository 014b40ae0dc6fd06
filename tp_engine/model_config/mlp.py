"""What a layer's MLP is: dense, or a router and experts.  No torch."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

from tp_engine.system.units import round_up

ActivationKind: TypeAlias = Literal["silu", "gelu_tanh", "swiglu_clamped", "relu2", "silu_clamped"]

_CODES: dict[str, int] = {kind: code for code, kind in enumerate(get_args(ActivationKind))}

_LARGEST_BLOCK = 32
INNER_UNIT = 8

RouterScores: TypeAlias = Literal["softmax", "softmax_of_chosen", "sigmoid", "sqrt_softplus"]


@dataclass(frozen=True, slots=True)
class Activation:
    """How an MLP joins its gate and up, or of ``relu2``, which has no gate, what it makes of up
    (kernels/layer_ops.py has the formulas).

    ``alpha`` and ``limit`` are for ``swiglu_clamped``: the slope of its sigmoid, and the bound of both halves, which
    ``silu_clamped`` has too.
    """

    kind: ActivationKind
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def code(self) -> int:
        """The kind's number in C and Triton: 0 to 4, in the order of ``ActivationKind``."""
        return _CODES[self.kind]

    @property
    def num_parts(self) -> int:
        """What it reads: 2, gate and up, or 1, up alone."""
        return 1 if self.kind == "relu2" else 2


SILU = Activation("silu")
"""The activation of SwiGLU (https://arxiv.org/abs/2002.05202)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MlpSpec:
    """``down(activation(gate(x), up(x)))``, or without a gate ``down(activation(up(x)))``.

    ``name`` is the module's in the checkpoint, below its layer.  ``fused_name``: the one stored tensor that holds gate
    and up rows.
    """

    inner_size: int
    activation: Activation = SILU
    bias: bool = False
    fused_name: str | None = None
    name: str = "mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRule:
    """How a token's router logits become ``top_k`` experts and their weights; ``kernels/experts/routing.py`` has the
    formulas.

    ``scores`` are the softmax of all logits, the sigmoid of each, the root of its softplus, or the logits, of which the
    chosen ones go through a softmax.  With ``num_groups`` above 1 only the experts of the best ``top_groups`` groups
    can be chosen; a group is worth its ``group_best`` best scores, 1 or 2.  If ``renormalises``, weights are divided by
    the sum of theirs and ``sum_eps``.  Then they are multiplied by ``factor``.
    """

    top_k: int
    scores: RouterScores = "softmax"
    renormalises: bool = False
    sum_eps: float = 0.0
    factor: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_best: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperts:
    """Names and order of a checkpoint's experts, below the MLP's module.

    Experts without a gate have no tensors and no rows of it::

        each         gate, up (I, H) and down (H, I), a tensor for each expert: the names have {} for its number
        fused        gate = up (E, 2 I, H), gate rows first; down (E, H, I)
        transposed   gate = up (E, H, 2 I), gate columns first, or every other one if ``interleaved``; down (E, I, H)

    A bias has the name of its weight, with ``bias_suffix`` in the place of ``weight_suffix``.
    """

    kind: Literal["each", "fused", "transposed"]
    gate: str
    up: str
    down: str
    interleaved: bool = False
    weight_suffix: str = ".weight"
    bias_suffix: str = ".bias"

    def inputs(self, activation: Activation) -> tuple[str, ...]:
        """Return the modules that read an expert's input: gate and up, or up."""
        return (self.gate, self.up)[-activation.num_parts :]


EACH = StoredExperts(kind="each", gate="experts.{}.gate_proj", up="experts.{}.up_proj", down="experts.{}.down_proj")
NUMBERED = StoredExperts(kind="each", gate="experts.{}.w1", up="experts.{}.w3", down="experts.{}.w2")
FUSED = StoredExperts(
    kind="fused",
    gate="experts.gate_up_proj",
    up="experts.gate_up_proj",
    down="experts.down_proj",
    weight_suffix="",
    bias_suffix="_bias",
)
TRANSPOSED = replace(FUSED, kind="transposed")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLatentSpec:
    """Experts that read and make rows of ``size`` instead of the stream's: ``up(experts(down(x)))``.  The router and
    the shared MLP read ``x``.  ``down`` and ``up`` are the names of the two modules, which no rank divides."""

    size: int
    down: str
    up: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """``num_experts`` MLPs of ``inner_size``, of which a router picks some for each token.

    The output is the sum of the chosen ones' outputs, each times its weight, and of the output of ``shared``, which all
    tokens go through, times the sigmoid of ``shared_gate`` if there is one.  ``correction`` is added to the experts'
    scores for the choice alone; ``correction_rows``: its tensor has one more dimension, of that size.  An expert's
    weight is multiplied by its element of ``expert_scale`` at last.  ``router``, ``correction``, ``expert_scale``,
    ``shared_gate`` and the name of ``shared`` stand below ``name`` in the checkpoint, which may be empty.  ``stored``
    are the ways in which checkpoints keep the experts; the first one that a checkpoint has is read.  ``router_cap`` c
    bounds a router's logit l to ``c tanh(l / c)``.

    ``by_id``: a table (``vocab_size``, top_k) has the experts of each token id, and the scores only weigh them.

    ``router_scale``: the router does not read what the experts read, but the residual stream, divided by its root mean
    square (with ``router_eps``) and by the root of its width, times this tensor (hidden,).
    """

    num_experts: int
    inner_size: int
    rule: RoutingRule
    activation: Activation = SILU
    bias: bool = False
    router: str = "gate"
    router_bias: bool = False
    router_cap: float | None = None
    routes_in_float32: bool = False
    router_scale: str | None = None
    router_eps: float = 0.0
    correction: str | None = None
    correction_rows: int | None = None
    by_id: str | None = None
    vocab_size: int = 0
    expert_scale: str | None = None
    shared: MlpSpec | None = None
    shared_gate: str | None = None
    latent: ExpertLatentSpec | None = None
    stored: tuple[StoredExperts, ...] = (EACH, FUSED)
    name: str = "mlp"

    @property
    def named_by_rules(self) -> StoredExperts:
        """How a quantised checkpoint's configuration names the experts: each by itself, if it may store them so."""
        return next((one for one in self.stored if one.kind == "each"), self.stored[0])


def block_bounds(size: int, num_parts: int, *, block: int = 1) -> list[int]:
    """``num_parts + 1`` bounds of parts that are whole blocks of ``block``, and as equal as can be.

    Equal parts where that is possible; else in blocks of the largest power of two from ``block`` to 32 that divides
    ``size`` into at least ``num_parts`` blocks: with blocks of 32, 2,880 in 4 parts is 704, 736, 704 and 736.
    """
    if size % (num_parts * block) == 0:
        return [size // num_parts * part for part in range(num_parts + 1)]
    unit = max(block, _LARGEST_BLOCK)
    while unit > block and (size % unit or size // unit < num_parts):
        unit //= 2
    return [size // unit * part // num_parts * unit for part in range(num_parts + 1)]


def local_inner_size(inner_size: int, world_size: int, *, block: int = 1) -> int:
    """Room for an expert's inner elements on each rank: the largest part, up to a multiple of ``INNER_UNIT``."""
    bounds = block_bounds(inner_size, world_size, block=block)
    return round_up(max(end - start for start, end in pairwise(bounds)), INNER_UNIT)
