"""A checkpoint's quantised weights: read from any packing, kept as a ``QuantisedWeight``.

::

    codes      uint8 (out, in) or (out, in / 2)           for experts, all have one more dimension in front
    scales     (out / row_block, in / group)              as stored; of 8 bits as bytes
    zeros      int8 (out, in / group)
    factors    float32 (out, 1)                           of rows, or of a whole stored module
    input_scale float32 (out, 1)                          of each part's inputs, if the checkpoint has fixed ones

Layers round their inputs in blocks where the scheme says so; an expert has its own scale for x, and one for down.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import gcd
from typing import NamedTuple

import torch
from torch import nn

from tp_engine.kernels.candidates import DEFAULTS, Choices, Wanted
from tp_engine.kernels.experts.experts import ExpertWeights
from tp_engine.kernels.experts.experts_candidates import NAME as EXPERTS
from tp_engine.kernels.quantization.int8_products import make_int8_linear, takes_int8_products
from tp_engine.kernels.quantization.linear_candidates import NAME as QUANTISED
from tp_engine.kernels.quantization.linear_candidates import shape_of as quantised_shape
from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, RowBlocks
from tp_engine.layers.quantization.base import ExpertsProduct, ParameterFactory, Product
from tp_engine.layers.quantization.dense import ThenGate, choose_experts, expert_biases, experts_shape, runs_triton
from tp_engine.layers.quantization.experts import ExpertsShape
from tp_engine.layers.quantization.packings import Scalar, Tensors, pack_codes, pack_zeros, tensors_of
from tp_engine.layers.quantization.quantised_products import RoundedExperts, choose_quantised_product
from tp_engine.layers.quantization.stored import LinearShape, StoredTensor, Unit
from tp_engine.model_config.mlp import StoredExperts
from tp_engine.model_config.quantization import WeightScheme
from tp_engine.system.units import ceil_div
from tp_engine.weights.source import Decode, Source, as_stored, keep_stored_type


class WeightLayout(NamedTuple):
    """One way to store a weight: its shape, what its sources become in a stack, and the suffixes of its tensors."""

    shape: LinearShape
    of_all: Callable[[Sequence[Source]], tuple[Source, ...]] = tuple
    suffix: Callable[[str], str] = str

    def sources(self, tensor: StoredTensor, unit: Unit, pack: Decode = as_stored) -> tuple[Source, ...]:
        """The sources of a parameter in ``unit``."""
        return self.of_all(self.shape.sources(replace(tensor, suffix=self.suffix(tensor.suffix)), unit, pack))

    def scalar_sources(self, scalar: Scalar) -> list[tuple[Source, ...]]:
        """The alternative sources of a parameter (rows, 1)."""
        found = self.shape.scalar_sources(self.suffix(scalar.suffix), scalar.decode, init=0.01, divides=scalar.divides)
        return [self.of_all(sources) for sources in found]


class Quantised:
    """Weights of one scheme."""

    def __init__(self, scheme: WeightScheme, choices: Choices = DEFAULTS) -> None:
        self.scheme, self.choices = scheme, choices
        self.experts_block = scheme.experts_block

    def create(self, context: ParameterFactory, shape: LinearShape) -> Mapping[str, nn.Parameter]:
        found = self._create(context, [WeightLayout(shape)])
        if (scale := self._input_scale(shape)) is not None:
            found["input_scale"] = _of_modules(context, [WeightLayout(shape)], (), scale)
        return found

    def _input_scale(self, shape: LinearShape) -> Scalar | None:
        """The stored scale of all inputs, if there is one."""
        if self.scheme.activations == "tensor":
            return Scalar(suffix=f".{self.scheme.input_scale_name}", divides=True)
        return self._block_scale([WeightLayout(shape)]) if shape.rounds_rows else None

    def _block_scale(self, ways: Sequence[WeightLayout]) -> Scalar | None:
        """The stored scale of inputs that are rounded in blocks, if they are and there is one."""
        return None if self.scheme.input_blocks is None else self._tensors(ways).input_factor

    def kept_bytes(self, name: str, weight: torch.Tensor) -> int:
        return weight.nbytes

    def finish(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype) -> Product:
        weight, activation, input_scale = self.weight(parameters, shape), shape.activation, None
        if self._is_of_integers(weight, weight.codes.device.type):
            assert weight.factors is not None
            product = make_int8_linear(weight.codes.view(torch.int8), weight.factors)
            return product if activation is None else ThenGate(product, activation, "cpu")
        if self.scheme.activations == "tensor" and shape.rounds_rows:
            input_scale = parameters["input_scale"].max()
        return choose_quantised_product(
            weight,
            dtype=dtype,
            activation=activation,
            input_scale=input_scale,
            quantises_activations=self._rounds_rows and shape.rounds_rows,
            choices=self.choices,
        )

    def tuned(
        self, parameters: Mapping[str, torch.Tensor], shape: LinearShape, dtype: torch.dtype, device_type: str
    ) -> Wanted | None:
        if device_type != "cuda":
            return None
        # With a scale that is stored for all rows, codes are the library's alone.
        rounds = self._rounds_rows and "input_scale" not in parameters
        return QUANTISED, quantised_shape(self.weight(parameters, shape), dtype, shape.activation, rounds_rows=rounds)

    def _is_of_integers(self, weight: QuantisedWeight, device_type: str) -> bool:
        """Whether weight and activations are integers of 8 bits, whose products are exact on this device.  Such a
        checkpoint asks for rounded activations, so its products are oneDNN's for any number of rows."""
        is_whole = weight.kind == "int8" and weight.scales is None and self.scheme.activations is not None
        return is_whole and takes_int8_products(device_type)

    def create_experts(self, context: ParameterFactory, shape: ExpertsShape) -> Mapping[str, nn.Parameter]:
        found: dict[str, nn.Parameter] = dict(expert_biases(context, shape))
        for side, ways in expert_sides(shape).items():
            stack = (shape.experts.size,)
            made = self._create(context, ways, stack)
            if (scale := self._block_scale(ways)) is not None:
                made["input_scale"] = _of_modules(context, ways, stack, scale)
            found |= {f"{side}_{name}": parameter for name, parameter in made.items()}
        return found

    def finish_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype
    ) -> ExpertsProduct:
        weights = self.experts(parameters, shape)
        if weights.down.rows is not None and not runs_triton(weights.down.codes.device.type):
            return RoundedExperts(weights, dtype)
        return choose_experts(weights, shape.spec, dtype, quantises_activations=self._rounds_rows, choices=self.choices)

    def tuned_experts(
        self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape, dtype: torch.dtype, device_type: str
    ) -> Wanted | None:
        if device_type != "cuda":
            return None
        weights = self.experts(parameters, shape)
        return EXPERTS, experts_shape(weights, shape.spec, dtype, quantises_activations=self._rounds_rows)

    @property
    def _rounds_rows(self) -> bool:
        return self.scheme.activations is not None

    def weight(self, parameters: Mapping[str, torch.Tensor], shape: LinearShape) -> QuantisedWeight:
        """The loaded ``parameters`` as one weight."""
        found = self._weight(parameters, [WeightLayout(shape)])
        return self._with_rows(found, parameters) if shape.rounds_rows else found

    def _with_rows(self, weight: QuantisedWeight, parameters: Mapping[str, torch.Tensor]) -> QuantisedWeight:
        """``weight``, or a stack, whose rows are rounded in blocks if the scheme says so.

        Its parts are one product of one input, so the largest scale of inputs holds for all of them.
        """
        kind, scales = self.scheme.input_blocks, parameters.get("input_scale")
        if kind is None:
            return weight
        return replace(weight, rows=RowBlocks(kind, None if scales is None else scales.detach().amax((-2, -1))))

    def experts(self, parameters: Mapping[str, torch.Tensor], shape: ExpertsShape) -> ExpertWeights[QuantisedWeight]:
        """The loaded ``parameters`` as the weights of experts."""
        sides = {}
        for side, ways in expert_sides(shape).items():
            own = {
                name.removeprefix(f"{side}_"): one for name, one in parameters.items() if name.startswith(f"{side}_")
            }
            sides[side] = self._with_rows(self._weight(own, ways), own)
        return ExpertWeights(gate_up=sides["gate_up"], down=sides["down"], **shape.rest_of(parameters))

    def _create(
        self, context: ParameterFactory, ways: Sequence[WeightLayout], stack: tuple[int, ...] = ()
    ) -> dict[str, nn.Parameter]:
        kind = pack_codes(self.scheme.kind, ways[0].shape.num_columns)[0]
        codes = self._create_codes(context, ways, stack)
        return {"codes": codes, **self._create_numbers(context, ways, stack, kind)}

    def _create_codes(
        self, context: ParameterFactory, ways: Sequence[WeightLayout], stack: tuple[int, ...] = ()
    ) -> nn.Parameter:
        _, per_byte, pack = pack_codes(self.scheme.kind, ways[0].shape.num_columns)
        unit, codes = Unit(1, per_byte), self._tensors(ways).codes
        sources = (way.sources(codes, unit, pack) for way in ways)
        return _parameter(context, ways, stack, unit, torch.uint8, sources)

    def _create_numbers(
        self, context: ParameterFactory, ways: Sequence[WeightLayout], stack: tuple[int, ...], kind: Codes
    ) -> dict[str, nn.Parameter]:
        """Scales, zero points and factors of codes that are kept in ``kind``."""
        tensors, unit, found = self._tensors(ways), self._unit(ways), dict[str, nn.Parameter]()
        parameter = partial(_parameter, context, ways, stack)
        of_rows, of_groups = Unit(1, ways[0].shape.num_columns), Unit(1, unit.columns)
        if tensors.scales is not None:
            alternatives = [way.sources(one, unit) for way in ways for one in (tensors.scales, *tensors.others)]
            made = parameter(unit, torch.uint8 if tensors.scale_type else None, alternatives)
            found["scales"] = made if tensors.scale_type else keep_stored_type(made)
        if tensors.zeros is not None:
            alternatives = [way.sources(tensors.zeros, of_groups, pack_zeros(kind)) for way in ways]
            found["zeros"] = parameter(of_groups, torch.int8, alternatives)
        factors, factor = tensors.factors, tensors.factor
        if factors is not None:
            kept = Unit(1, factors.unit.columns)
            alternatives = [way.sources(one, kept) for way in ways for one in (factors, *tensors.others)]
            found["factors"] = parameter(of_rows, torch.float32, alternatives)
        elif factor is not None:
            found["factors"] = _of_modules(context, ways, stack, factor)
        return found

    def _weight(self, parameters: Mapping[str, torch.Tensor], ways: Sequence[WeightLayout]) -> QuantisedWeight:
        unit, scale_type, scales = self._unit(ways), self._tensors(ways).scale_type, parameters.get("scales")
        factors = parameters.get("factors")
        return QuantisedWeight(
            kind=pack_codes(self.scheme.kind, ways[0].shape.num_columns)[0],
            codes=parameters["codes"].detach(),
            scales=scales if scales is None or scale_type is None else scales.detach().view(scale_type),
            group=unit.columns,
            row_block=unit.rows,
            zeros=parameters.get("zeros"),
            factors=None if factors is None else factors.squeeze(-1),
        )

    def _tensors(self, ways: Sequence[WeightLayout]) -> Tensors:
        return tensors_of(self.scheme, ways[0].shape.stored_columns)

    def _unit(self, ways: Sequence[WeightLayout]) -> Unit:
        """Rows and columns of a scale on this rank: the checkpoint's, or a divisor where a shard cuts a block."""
        scales = self._tensors(ways).scales
        units = [Unit(1, 1) if scales is None else way.shape.refine(scales.unit) for way in ways]
        return Unit(gcd(*(one.rows for one in units)), gcd(*(one.columns for one in units)))


def _parameter(
    context: ParameterFactory,
    ways: Sequence[WeightLayout],
    stack: tuple[int, ...],
    unit: Unit,
    dtype: torch.dtype | None,
    alternatives: Iterable[tuple[Source, ...]],
) -> nn.Parameter:
    """A parameter with an element for each ``unit`` of the weight."""
    shape = ways[0].shape
    size = (*stack, ceil_div(shape.num_rows, unit.rows), ceil_div(shape.num_columns, unit.columns))
    return context.parameter(size, *alternatives, dtype=dtype)


def _of_modules(
    context: ParameterFactory, ways: Sequence[WeightLayout], stack: tuple[int, ...], scalar: Scalar
) -> nn.Parameter:
    """A parameter (rows, 1) of ``scalar``, which each stored module has."""
    alternatives = [sources for way in ways for sources in way.scalar_sources(scalar)]
    return context.parameter((*stack, ways[0].shape.num_rows, 1), *alternatives, dtype=torch.float32)


def expert_sides(shape: ExpertsShape) -> dict[str, list[WeightLayout]]:
    """The ways to store gate and up, and down."""

    def way(stored: StoredExperts, of_one: LinearShape) -> WeightLayout:
        def of_all(sources: Sequence[Source]) -> tuple[Source, ...]:
            return shape.of_all(stored, sources)

        return WeightLayout(of_one, of_all, str if stored.kind == "each" else _stack_suffix)

    return {
        "gate_up": [way(stored, shape.gate_up(stored)) for stored in shape.spec.stored],
        "down": [way(stored, shape.down(stored)) for stored in shape.spec.stored],
    }


def _stack_suffix(suffix: str) -> str:
    """A stack of all experts has its module's name alone, its other tensors an underscore: ``_scale_inv``."""
    name = suffix.removeprefix(".weight")
    return name if name[:1] in ("", "_") else f"_{name[1:]}"
