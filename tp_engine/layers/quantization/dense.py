"""Weights of the model's own type, and how ``x @ weight.T + bias`` is computed.

On a GPU by a candidate for the number of rows (``kernels/linear/dense_candidates.py``): Triton for one row, PyTorch's
library for more, unless the device has proven others.  On a CPU:

==========  ========================================  ==============================
type        processor                                 by
==========  ========================================  ==============================
float32,    any                                       C, the weight in panels
float16
bfloat16    with instructions for matrices of it      oneDNN, the weight packed
            (AMX; ARM)
bfloat16    any other                                 C, the weight in panels
==========  ========================================  ==============================

Gate and up are one weight, and the result is the activation of both, or of up where there is no gate: C with panels
applies it to its sums, which are never stored; elsewhere it is a separate operation.

The choice is fixed: it follows from times measured side by side (docs/benchmarks.md), not at each start, so that a
model's tokens are the same in every run on a machine; candidates (docs/tuning.md) are timed once per machine, and the
choice is kept.  A weight in panels or packed is a copy in another order; the original is freed.

oneDNN's functions belong to torch's private interface, so their results are compared before they are used.  If C or
oneDNN is missing, the other one is used, or ``F.linear``, which also takes odd sizes of 16 bits.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from tp_engine.cpu import (
    NativeExperts,
    PackedWeight,
    fits_panels,
    multiplies_bfloat16_matrices,
    native_library,
    takes_experts,
)
from tp_engine.kernels.candidates import DEFAULTS, Choices, Run, Shape, Wanted, build, pick
from tp_engine.kernels.experts.experts import ExpertWeights, Weights, mix_experts
from tp_engine.kernels.experts.experts_candidates import NAME as EXPERTS
from tp_engine.kernels.experts.experts_candidates import shape_of as shape_of_experts
from tp_engine.kernels.experts.pairs import ExpertRun, multiply_runs
from tp_engine.kernels.linear.dense_candidates import NAME, shape_of
from tp_engine.kernels.ops import has_triton, is_recordable, op
from tp_engine.kernels.rounding import are_products
from tp_engine.layers.quantization.base import ExpertsProduct, ParameterFactory, Product
from tp_engine.layers.quantization.experts import ExpertsShape
from tp_engine.layers.quantization.stored import LinearShape
from tp_engine.model_config.mlp import Activation, ExpertsSpec, StoredExperts
from tp_engine.weights.source import Source

PACKED_DTYPES = (torch.float32, torch.bfloat16)
_MOST_WIDENED = 1 << 22  # of a weight, in float64 at a time


class Dense:
    """One parameter, ``weight`` (out, in); for experts two, and their biases.

    If it ``is_invariant``, a row's result does not depend on the number of rows or on the number of ranks.
    ``choices`` are those of this device.
    """

    experts_block = 1

    def __init__(self, *, is_invariant: bool = False, choices: Choices = DEFAULTS) -> None:
        self._is_invariant, self.choices = is_invariant, choices

    def create(self, context: ParameterFactory, shape: LinearShape) -> Mapping[str, nn.Parameter]:
        return {"weight": context.parameter((shape.num_rows, shape.columns.size), shape.sources())}

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype) -> Product:
        weight = parameters["weight"]
        if self._is_invariant:
            return invariant_product(weight, shape)
        return choose_product(weight, shape.activation, self.choices)

    def tuned(
        self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype, device_type: str
    ) -> Wanted | None:
        if self._is_invariant or device_type != "cuda":
            return None
        return NAME, shape_of(parameters["weight"], shape.activation)

    def kept_bytes(self, name: str, weight: torch.Tensor) -> int:
        return weight.nbytes

    def create_experts(self, context: ParameterFactory, shape: ExpertsShape) -> Mapping[str, nn.Parameter]:
        num_experts, hidden, room = shape.experts.size, shape.hidden_size, shape.room
        num_parts = shape.spec.activation.num_parts

        def sources(side: Callable[[StoredExperts], LinearShape]) -> list[tuple[Source, ...]]:
            return [shape.weight_sources(one, side(one)) for one in shape.spec.stored]

        found = {
            "gate_up": context.parameter((num_experts, num_parts * room, hidden), *sources(shape.gate_up)),
            "down": context.parameter((num_experts, hidden, room), *sources(shape.down)),
        }
        return found | expert_biases(context, shape)

    def finish_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype
    ) -> ExpertsProduct:
        weights = self._experts(parameters, shape)
        if not self._is_invariant:
            return choose_experts(weights, shape.spec, dtype, choices=self.choices)
        library = native_library()
        assert library is not None and takes_experts(weights), "check_tp_invariant has looked at the sizes"
        top_k, num_shards = shape.spec.rule.top_k, shape.num_shards
        return NativeExperts(library, weights, top_k, num_shards=num_shards, keeps_sums=shape.keeps_sums)

    def tuned_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype, device_type: str
    ) -> Wanted | None:
        if self._is_invariant or device_type != "cuda":
            return None
        return EXPERTS, experts_shape(self._experts(parameters, shape), shape.spec, dtype)

    def _experts(self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape) -> ExpertWeights[Weights]:
        return ExpertWeights(gate_up=parameters["gate_up"], down=parameters["down"], **shape.rest_of(parameters))


def expert_biases(context: ParameterFactory, shape: ExpertsShape) -> dict[str, nn.Parameter]:
    """The parameters of experts' biases, in the model's type: (experts, parts * room) and (experts, hidden)."""
    if not shape.spec.bias:
        return {}
    count, rows = shape.experts.size, shape.spec.activation.num_parts * shape.room

    def sources(side: Callable[[StoredExperts], LinearShape]) -> list[tuple[Source, ...]]:
        return [shape.bias_sources(one, side(one)) for one in shape.spec.stored]

    return {
        "gate_up_bias": context.parameter((count, rows), *sources(shape.gate_up)),
        "down_bias": context.parameter((count, shape.hidden_size), *sources(shape.down)),
    }


class PlainExperts:
    """The experts in plain PyTorch, one after the other."""

    is_recordable = False

    def __init__(self, weights: ExpertWeights[Weights]) -> None:
        self._weights = weights

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return mix_experts(x, expert_ids, weights, self._weights)

    def gate_up(self, x: torch.Tensor, runs: list[ExpertRun]) -> torch.Tensor:
        assert isinstance(self._weights.gate_up, torch.Tensor)
        return multiply_runs(x, self._weights.gate_up, runs)

    def down(self, x: torch.Tensor, runs: list[ExpertRun]) -> torch.Tensor:
        assert isinstance(self._weights.down, torch.Tensor)
        return multiply_runs(x, self._weights.down, runs)


class ExpertsByRows:
    """The experts on a GPU, by the number of rows."""

    is_recordable = True

    def __init__(self, parts: Sequence[tuple[int, Run]]) -> None:
        """``parts``: products, with the most rows of each."""
        self._parts = tuple(parts)

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return pick(self._parts, len(x))(x, expert_ids, weights)


class PlainLinear:
    """``F.linear``."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.is_recordable = weight.device.type == "cuda"

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)


class PackedLinear:
    """oneDNN with the weight in its own blocked order."""

    is_recordable = False

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, bias, "none", [], "")
        return packed


class TreeLinear:
    """Triton's product with one tile for any number of rows, and sums that are a tree over shards of columns."""

    is_recordable = True

    def __init__(self, weight: torch.Tensor, num_shards: int, *, keeps_sums: bool) -> None:
        from tp_engine.kernels.linear.tree_linear_triton import tree_linear_triton

        self._run, self._weight, self._num_shards, self._keeps_sums = tree_linear_triton, weight, num_shards, keeps_sums

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._run(x, self._weight, bias, self._num_shards, keeps_sums=self._keeps_sums)


class DenseByRows:
    """On a GPU: what ``choices`` say, by the number of rows; ``activation`` is applied to gate and up."""

    is_recordable = True

    def __init__(self, weight: torch.Tensor, activation: Activation | None, choices: Choices = DEFAULTS) -> None:
        shape = shape_of(weight, activation)
        self._parts = build(NAME, weight, shape, choices.of(NAME, shape, weight.device))
        self.weight, self._activation = weight, activation

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return pick(self._parts, len(x))(x, bias, self._activation)

    def before_activation(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return pick(self._parts, len(x))(x, bias, None)


class ThenGate:
    """Another product, ``before_activation``, then the activation of its gate and up, on ``device_type``."""

    def __init__(self, product: Product, activation: Activation, device_type: str) -> None:
        self.is_recordable = product.is_recordable and is_recordable("gate", device_type)
        self.before_activation = product
        self._activation, self._gate = activation, op("gate", device_type)

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        gated: torch.Tensor = self._gate(self.before_activation(x, bias), self._activation)
        return gated


_trusted: dict[tuple[torch.dtype, torch.Size], bool] = {}


def choose_product(weight: torch.Tensor, activation: Activation | None = None, choices: Choices = DEFAULTS) -> Product:
    """The fastest product that works for this weight (out, in).  Call it once its values are final.

    With an ``activation``, the weight is gate rows, then up rows, and the product applies it to both.
    """
    if runs_triton(weight.device.type) and has_triton() and weight.is_contiguous():
        return DenseByRows(weight, activation, choices)
    library = _library_for(weight)
    # With matrix instructions of the processor, oneDNN is faster.
    has_matrices = weight.dtype == torch.bfloat16 and multiplies_bfloat16_matrices()
    if library is not None and not has_matrices:
        return PackedWeight(library, weight, activation)
    if activation is not None:
        return ThenGate(choose_product(weight), activation, weight.device.type)
    packed = _packed(weight) if weight.device.type == "cpu" else None
    if packed is not None:
        return packed
    return PlainLinear(weight) if library is None else PackedWeight(library, weight)


def choose_experts(
    weights: ExpertWeights[Weights],
    spec: ExpertsSpec,
    dtype: torch.dtype,
    *,
    quantises_activations: bool = False,
    choices: Choices = DEFAULTS,
) -> ExpertsProduct:
    """The fastest product of a layer's experts for rows of ``dtype``: C on CPUs, on GPUs what ``choices`` say,
    plain PyTorch if there is neither.

    ``quantises_activations``: rows may be rounded to 8 bits, each by its largest value.
    """
    device = (weights.down if isinstance(weights.down, torch.Tensor) else weights.down.codes).device
    if runs_triton(device.type) and has_triton():
        of = experts_shape(weights, spec, dtype, quantises_activations=quantises_activations)
        return ExpertsByRows(build(EXPERTS, weights, of, choices.of(EXPERTS, of, device)))
    library = native_library() if device.type == "cpu" and takes_experts(weights) else None
    return PlainExperts(weights) if library is None else NativeExperts(library, weights, spec.rule.top_k, dtype)


def experts_shape(
    weights: ExpertWeights[Weights], spec: ExpertsSpec, dtype: torch.dtype, *, quantises_activations: bool = False
) -> Shape:
    """The shape of a layer's experts on this rank."""
    return shape_of_experts(weights, spec.rule.top_k, spec.num_experts, dtype, rounds_rows=quantises_activations)


def invariant_product(weight: torch.Tensor, shape: LinearShape) -> Product:
    """The product of ``weight`` for ``shape`` whose rows depend, in every bit, on no other row and not on the number of
    ranks.

    Libraries' results may depend on the number of rows, so C or Triton computes all products.
    """
    if runs_triton(weight.device.type):
        product = TreeLinear(weight, shape.num_shards or 1, keeps_sums=shape.keeps_sums)
        return product if shape.activation is None else ThenGate(product, shape.activation, weight.device.type)
    library = _library_for(weight)
    assert library is not None, "check_tp_invariant has looked for the library and the sizes"
    return PackedWeight(library, weight, shape.activation, num_shards=shape.num_shards, keeps_sums=shape.keeps_sums)


def runs_triton(device_type: str) -> bool:
    """Whether Triton's kernels run on ``device_type``."""
    return device_type == "cuda"


def _library_for(weight: torch.Tensor) -> ctypes.CDLL | None:
    """The compiled kernels, if they support this weight."""
    is_taken = weight.device.type == "cpu" and weight.is_contiguous() and fits_panels(weight)
    return native_library() if is_taken else None


def _packed(weight: torch.Tensor) -> PackedLinear | None:
    """oneDNN's product, unless it is missing or wrong."""
    if weight.dtype not in PACKED_DTYPES:
        return None
    try:
        packed = PackedLinear(weight)
        key = (weight.dtype, weight.shape)
        if key not in _trusted:
            _trusted[key] = _agrees(packed, weight)
    except (AttributeError, RuntimeError):
        return None
    return packed if _trusted[key] else None


def _agrees(packed: PackedLinear, weight: torch.Tensor) -> bool:
    """Whether the packed product equals float64's to within rounding, with a bias, for two rows."""
    out_size, in_size = weight.shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, in_size, generator=generator, dtype=torch.float32, device="cpu").to(weight.dtype)
    bias = torch.randn(out_size, generator=generator, dtype=torch.float32, device="cpu").to(weight.dtype)
    step = max(1, _MOST_WIDENED // max(1, in_size))
    exact = torch.cat([x.double() @ part.double().T for part in weight.split(step)], 1) + bias.double()
    return are_products(packed(x, bias), exact, bias, in_size)
