"""Products with weights: dense, quantised, of experts, of adapters."""

from collections.abc import Iterator
from typing import get_args

import numpy as np
import torch
import torch.nn.functional as F

from tp_engine.cpu import experts as native_experts
from tp_engine.cpu import ops
from tp_engine.cpu.experts import NativeExperts
from tp_engine.cpu.linear import NativeInt8Rows, PackedWeight
from tp_engine.cpu.quantised import QuantisedPanels
from tp_engine.cpu.self_check.base import ACTIVATIONS, Check, KernelChecks
from tp_engine.kernels import layer_ops
from tp_engine.kernels.experts import experts, routing
from tp_engine.kernels.experts.experts import ExpertWeights
from tp_engine.kernels.linear import adapters
from tp_engine.kernels.quantization.int8_rows import TorchInt8Rows
from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, multiply_quantised, values_per_byte
from tp_engine.model_config.mlp import RoutingRule

_ROUTING_RULES = (
    RoutingRule(top_k=2, scores="softmax_of_chosen"),
    RoutingRule(top_k=3, scores="sigmoid", renormalises=True, num_groups=4, top_groups=2),
    RoutingRule(top_k=3, num_groups=4, top_groups=2, group_best=1),
    RoutingRule(top_k=3, renormalises=True, factor=2.0),
)
_LARGEST: dict[Codes, float] = {"int4": 16.0, "int8": 136.0, "e4m3": 448.0, "e2m1": 6.0}


class WeightChecks(KernelChecks):
    """Products with weights in each form that C keeps."""

    def linear(self) -> Iterator[Check]:
        """Seven rows times a weight of odd sizes, and the same by PyTorch in float64: on some processors PyTorch's
        float32 is less exact than ours."""
        x, weight, bias = (self.wide(*shape).div(3).to(self.dtype) for shape in ((7, 86), (37, 86), (37,)))
        expected = F.linear(x.double(), weight.double(), bias.double())
        yield "packed_linear", PackedWeight(self.library, weight)(x, bias), expected
        for rule in ACTIVATIONS:
            gated = PackedWeight(self.library, weight[:36], activation=rule)
            yield f"packed_linear with {rule.kind}", gated(x, bias[:36]), layer_ops.gate(expected[:, :36], rule)
            yield "packed_linear of both parts", gated.before_activation(x, bias[:36]), expected[:, :36]
        ids = torch.tensor([36, 0, 50, 17], dtype=torch.int32, device="cpu")
        wanted = torch.where(ids[:, None] < 37, weight[ids.clamp(max=36).long()], 0.0) * 2
        yield "embed_panels", PackedWeight(self.library, weight).rows(ids, None, 2.0), wanted

    def quantised_weight(self, kind: Codes, *shape: int) -> QuantisedWeight:
        """Return one with groups of 8 columns; zeros if the kind may have them."""
        *outer, in_size = shape
        codes = torch.randint(
            256, (*outer, in_size // values_per_byte(kind)), generator=self.generator, dtype=torch.int64, device="cpu"
        )
        codes, groups = codes.to(torch.uint8), (*outer, -(-in_size // 8))
        zeros = torch.randint(-128, 128, groups, generator=self.generator, dtype=torch.int64, device="cpu").to(
            torch.int8
        )
        return QuantisedWeight(
            kind=kind,
            codes=codes.masked_fill(codes & 127 == 127, 1),  # no NaN
            scales=(
                (torch.rand(groups, generator=self.generator, dtype=torch.float32, device="cpu") + 0.5) / _LARGEST[kind]
            ).bfloat16(),
            group=8,
            zeros=zeros if kind.startswith("int") else None,
            factors=torch.rand(outer, generator=self.generator, dtype=torch.float32, device="cpu") + 0.5,
        )

    def quantised(self) -> Iterator[Check]:
        """Two rows, and more than a tile, times a weight of odd sizes."""
        x, bias = (self.wide(*shape).div(3).to(self.dtype) for shape in ((7, 88), (37,)))
        for kind in get_args(Codes):
            weight = self.quantised_weight(kind, 37, 88)
            expected = multiply_quantised(x.double(), weight, bias.double())
            product = QuantisedPanels(self.library, weight, self.dtype)
            for rows in (2, 7):
                yield f"quantised_linear of {kind}", product(x[:rows], bias), expected[:rows]

    def experts(self) -> Iterator[Check]:
        """Routing, and the experts that are routed to."""
        logits, x, correction = self.draw(5, 8), self.draw(5, 24), self.wide(8)
        for rule in _ROUTING_RULES:
            for name, found, expected in self.both(native_experts, routing, "route", logits, rule, correction):
                yield f"{name} by {rule.scores}", found.to(self.dtype), expected.to(self.dtype)
        ids, shares = routing.route(logits, _ROUTING_RULES[-1], correction)
        gate_up, down = self.wide(8, 40, 24) * 0.2, self.wide(8, 24, 20) * 0.2
        biases = self.draw(8, 40), self.draw(8, 24)
        for activation in (ACTIVATIONS[0], ACTIVATIONS[-1]):
            rows = 20 * activation.num_parts
            weights = ExpertWeights(
                gate_up=gate_up[:, :rows].to(self.dtype),
                down=down.to(self.dtype),
                gate_up_bias=biases[0][:, :rows],
                down_bias=biases[1],
                first=0,
                activation=activation,
            )
            expected = experts.mix_experts(x, ids, shares, weights)
            yield "mix_experts", NativeExperts(self.library, weights, 3)(x, ids, shares), expected
        quantised = ExpertWeights(
            gate_up=self.quantised_weight("int4", 8, 40, 24),
            down=self.quantised_weight("e4m3", 8, 24, 20),
            gate_up_bias=biases[0],
            down_bias=biases[1],
            first=0,
            activation=ACTIVATIONS[0],
        )
        mixed = NativeExperts(self.library, quantised, 3, self.dtype)(x, ids, shares)
        yield "mix_experts, quantised", mixed, experts.mix_experts(x, ids, shares, quantised)
        yield from self.both(native_experts, experts, "add_gated", x, x, logits[:, 2:3])
        yield from self.both(native_experts, routing, "to_float32", x)

    def int8_rows(self) -> Iterator[Check]:
        """Rows of numbers that are codes already, so that rounding cannot differ."""
        rows, twin = NativeInt8Rows(self.library), TorchInt8Rows()
        x = torch.randint(-127, 128, (3, 40), generator=self.generator, dtype=torch.int64, device="cpu").to(self.dtype)
        x[:, 7] = -127
        products, bias = self.wide(3, 40), self.draw(40)
        (codes, scales), (expected, expected_scales) = rows.quantise(x), twin.quantise(x)
        yield "quantise_rows", codes, expected
        yield "quantise_rows", scales, expected_scales
        found = rows.scale(products, scales, bias, self.dtype)
        yield "scale_rows", found, twin.scale(products, expected_scales, bias, self.dtype)

    def adapters(self) -> Iterator[Check]:
        """A product of two parts, seven rows of which have one of two adapters, of ranks 5 and 2."""
        ranks, sizes = torch.tensor([5, 2], dtype=torch.int32, device="cpu"), (70, 23)
        weights = adapters.AdapterWeights(
            a=self.draw(2, 10, 37) / 8, b=self.draw(2, 5, 93) / 8, ranks=ranks, part_sizes=sizes
        )
        weights.a[1].view(2, 5, 37)[:, 2:], weights.b[1, 2:] = 0, 0
        rows, tiles = adapters.group_rows(np.array([0, -1, 1, 0, 0, 0, -1, 0, 1]))
        grouped = adapters.AdapterRows(rows=torch.from_numpy(rows), tiles=torch.from_numpy(tiles), host_tiles=tiles)
        yield from self.both(ops, adapters, "add_adapters", self.draw(9, 93), self.draw(9, 37), weights, grouped)
