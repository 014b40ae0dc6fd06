"""How products with quantised weights are computed.

On a CPU by C, with codes in panels, for any number of rows; without the compiled kernels, by plain PyTorch.  On a GPU
it depends on the number of rows:

==========  ===================================  ===================================================================
rows        weights                              by
==========  ===================================  ===================================================================
1           of whole words                       Triton: the row kernel, codes widened in registers
up to 64    any                                  Triton: matrix units, codes widened in registers
more        e4m3, activations are quantised,     PyTorch's scaled products of 8-bit floats
            bfloat16, units for 8-bit floats
up to 128   any other                            Triton: matrix units, codes widened in registers
more        any other                            Triton makes the values, PyTorch's library the product
==========  ===================================  ===================================================================

These are candidates (``kernels/quantization/linear_candidates.py``), of which a device may have others; products of
8-bit floats begin at other numbers of rows then, or are Triton's.

Where ``down`` of a gated MLP is a scaled product, the activation and the rounding of its result to 8 bits are one pass
over memory (``GatedPair``).  Where all products that read a norm are scaled ones, the norm and its rounding are one
pass, too (``wanted_codes``).  Experts on a GPU are Triton's grouped products, and for many pairs PyTorch's
(``kernels/experts/grouped.py``).

Weights stay packed: no copy of the values is kept.  Activations are rounded to 8 bits only if the format quantises
them, and only where that makes the product faster; elsewhere they stay as they are, which is more exact.  Where
they are rounded in blocks (``--round-activations``), they are on every device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tp_engine.cpu import QuantisedPanels, native_library
from tp_engine.kernels.candidates import DEFAULTS, MANY, Choices, build, pick
from tp_engine.kernels.experts.experts import ExpertWeights, add_up
from tp_engine.kernels.experts.pairs import pair_up
from tp_engine.kernels.ops import has_triton, op
from tp_engine.kernels.quantization.block_rows import round_rows
from tp_engine.kernels.quantization.linear_candidates import FEW_ROWS_BESIDE_CODES, NAME, CodesProduct, shape_of
from tp_engine.kernels.quantization.row_codes import PRODUCT_DTYPE, CodeRule, Rows
from tp_engine.kernels.quantization.scaled_products import ScaledProduct, has_fp8_units, scaled_product
from tp_engine.kernels.quantization.weights import QuantisedWeight, RowBlocks, multiply_quantised
from tp_engine.layers.quantization.base import Product
from tp_engine.layers.quantization.dense import runs_triton
from tp_engine.model_config.mlp import Activation


class PlainQuantised:
    """``multiply_quantised``.  ``made_by`` is for ``tp-engine doctor``, as in the other products."""

    made_by = "PyTorch"

    def __init__(self, weight: QuantisedWeight, activation: Activation | None) -> None:
        self._weight, self._activation = weight, activation
        self.is_recordable = weight.codes.device.type == "cuda"

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply_quantised(x, self._weight, bias, self._activation)

    def before_activation(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return multiply_quantised(x, self._weight, bias)


class RoundedRows:
    """A ``product`` of rows that are rounded in blocks first."""

    is_recordable = False

    def __init__(self, product: PlainQuantised | QuantisedPanels, rows: RowBlocks) -> None:
        self._product, self._rows, self.made_by = product, rows, product.made_by

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._product(round_rows(x, self._rows.kind, self._rows.scale), bias)

    def before_activation(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._product.before_activation(round_rows(x, self._rows.kind, self._rows.scale), bias)


class TritonQuantised:
    """The products of the table above; an ``activation`` is applied to gate and up.

    ``scaled``: the product of codes for many rows, if there is one; it takes rows that are codes already, too.  It is
    that of ``choices``, if rows may be rounded (``rounds_rows``), unless another one is given.
    """

    is_recordable = True

    def __init__(
        self,
        weight: QuantisedWeight,
        activation: Activation | None,
        scaled: ScaledProduct | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        rounds_rows: bool = False,
        choices: Choices = DEFAULTS,
    ) -> None:
        """``dtype`` is that of rows, ``choices`` of kernels are those of the device."""
        weight = weight.map(torch.Tensor.contiguous)
        shape = shape_of(weight, dtype, activation, rounds_rows=rounds_rows)
        self._parts = build(NAME, weight, shape, choices.of(NAME, shape, weight.codes.device))
        few_rows, last = FEW_ROWS_BESIDE_CODES, self._parts[-1][1]
        if scaled is None and isinstance(last, CodesProduct):
            few_rows, scaled = ([0] + [most for most, _ in self._parts])[-2], last.scaled
        self.activation, self.scaled = activation, scaled
        self.few_rows = MANY if scaled is None else few_rows
        self._gate = op("gate", weight.codes.device.type)
        self.made_by = "Triton" if scaled is None else f"Triton, above {few_rows} rows products of 8-bit floats"

    def __call__(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        return self._multiply(x, bias, self.activation)

    def before_activation(self, x: Rows, bias: torch.Tensor | None) -> torch.Tensor:
        return self._multiply(x, bias, None)

    def _multiply(self, x: Rows, bias: torch.Tensor | None, activation: Activation | None) -> torch.Tensor:
        if self.scaled is None or (isinstance(x, torch.Tensor) and len(x) <= self.few_rows):
            assert isinstance(x, torch.Tensor), "without a product of codes, rows are values"
            return pick(self._parts, len(x))(x, bias, activation)
        out = self.scaled(x, bias)
        return out if activation is None else self._gate(out, activation)


class GatedPair:
    """The products of a gated MLP, gate and up, then down, for more than ``more_than`` rows.

    The activation's result becomes down's codes in one pass over memory, and is never stored itself.
    """

    def __init__(self, gate_up: TritonQuantised, down: TritonQuantised, scaled: ScaledProduct) -> None:
        self._gate_up, self._down, self._activation = gate_up.before_activation, scaled, gate_up.activation
        self.more_than = max(gate_up.few_rows, down.few_rows)

    def __call__(self, x: Rows, gate_up_bias: torch.Tensor | None, down_bias: torch.Tensor | None) -> torch.Tensor:
        """``x`` (N, in) -> (N, out), bitwise equal to the two products."""
        return self._down(self._gate_up(x, gate_up_bias), down_bias, self._activation)


@dataclass(frozen=True, slots=True, eq=False)
class WantedCodes:
    """The codes that products read instead of rows, if there are more than ``more_than`` rows."""

    rule: CodeRule
    more_than: int


def choose_quantised_product(
    weight: QuantisedWeight,
    *,
    dtype: torch.dtype,
    activation: Activation | None,
    input_scale: torch.Tensor | None = None,
    quantises_activations: bool,
    choices: Choices = DEFAULTS,
) -> Product:
    """The fastest product for ``x`` of type ``dtype``.  Call it once the weight's values are final.

    With an ``activation``, the weight is gate rows, then up rows, and the product applies it to both.
    ``quantises_activations``: rows of ``x`` may be rounded to 8 bits, each by its largest value, or all by
    ``input_scale``, a float32 scalar, if the checkpoint has one.
    """
    device = weight.codes.device
    library = native_library() if device.type == "cpu" else None
    if library is not None or not (runs_triton(device.type) and has_triton()):
        product: PlainQuantised | QuantisedPanels = PlainQuantised(weight, activation)
        if library is not None:
            product = QuantisedPanels(library, weight, dtype, activation)
        return product if weight.rows is None else RoundedRows(product, weight.rows)
    scaled = None
    if input_scale is not None and quantises_activations and dtype == PRODUCT_DTYPE and has_fp8_units(device):
        scaled = scaled_product(weight, input_scale)
    rounds_rows = quantises_activations and input_scale is None
    return TritonQuantised(weight, activation, scaled, dtype=dtype, rounds_rows=rounds_rows, choices=choices)


class RoundedExperts:
    """``kernels.experts.mix_experts`` of ``weights`` whose rows are rounded in blocks, on CPUs.

    An expert is two dense products, each of which rounds by its own scale.
    """

    is_recordable = False

    def __init__(self, weights: ExpertWeights[QuantisedWeight], dtype: torch.dtype) -> None:
        """``dtype`` is that of rows."""

        def product(stack: QuantisedWeight, index: int, activation: Activation | None) -> Product:
            own = stack.expert(index)
            return choose_quantised_product(own, dtype=dtype, activation=activation, quantises_activations=False)

        def biases(stack: torch.Tensor | None) -> list[torch.Tensor | None]:
            return [None] * num_experts if stack is None else list(stack.detach().to(dtype))

        num_experts = weights.down.shape[0]
        self._first = weights.first
        self._gate_up = [product(weights.gate_up, index, weights.activation) for index in range(num_experts)]
        self._down = [product(weights.down, index, None) for index in range(num_experts)]
        self._gate_up_biases, self._down_biases = biases(weights.gate_up_bias), biases(weights.down_bias)

    def __call__(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs = pair_up(expert_ids.numpy() - self._first, len(self._down))
        top_k, order = expert_ids.shape[1], torch.from_numpy(pairs.order)
        outputs = x.new_zeros((len(x) * top_k, x.shape[1]))
        for expert, first, count in pairs.runs:
            numbers = order[first : first + count]
            inner = self._gate_up[expert](x[numbers // top_k], self._gate_up_biases[expert])
            outputs[numbers] = self._down[expert](inner, self._down_biases[expert])
        return add_up(outputs.view(len(x), top_k, -1), weights).to(x.dtype)


def gated_pair(gate_up: Product, down: Product) -> GatedPair | None:
    """Both products as one, if ``down`` multiplies codes; else None."""
    if not (isinstance(gate_up, TritonQuantised) and isinstance(down, TritonQuantised)) or down.scaled is None:
        return None
    return GatedPair(gate_up, down, down.scaled)


def wanted_codes(products: Sequence[Product]) -> WantedCodes | None:
    """The codes that all ``products`` read; None if one multiplies values, or if they round differently."""
    scaled: list[ScaledProduct] = []
    more_than = 0
    for product in products:
        if not isinstance(product, TritonQuantised) or product.scaled is None:
            return None
        scaled.append(product.scaled)
        more_than = max(more_than, product.few_rows)
    if not scaled or not all(one.rule.is_same(scaled[0].rule) for one in scaled):
        return None
    return WantedCodes(scaled[0].rule, more_than)
