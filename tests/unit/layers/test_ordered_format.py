"""Weights whose columns are in groups by their activations (``desc_act``, ``actorder``), on one rank and on several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.quantised.checkpoints import compress
from tests.quantised.formats import FORMATS
from tests.tiers import slow_but
from tests.unit.layers.test_quantised_formats import EXPERTS, SHAPE, load
from tp_engine.errors import ConfigError
from tp_engine.kernels.layer_ops import gate
from tp_engine.layers.experts import Experts
from tp_engine.layers.linear import LocalLinear
from tp_engine.layers.quantization.base import GatedProduct
from tp_engine.layers.quantization.ordered import Ordered, sort_columns
from tp_engine.model_config.quantization import WeightScheme

ORDERED = [name for name, how in FORMATS.items() if how.ordered]


@pytest.fixture
def make(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """``make(format, architecture)`` -> a quantised checkpoint, in groups of 32 columns, and its twin."""

    def write(name: str, architecture: str = "qwen3", **settings: Any) -> tuple[Path, Path]:
        compress(checkpoint(architecture, **{**SHAPE, **settings}), tmp_path / "own", tmp_path / "twin", name, group=32)
        return tmp_path / "own", tmp_path / "twin"

    return write


@pytest.mark.parametrize("world_size", slow_but([2, 8], [1, 2, 4, 8]))
@pytest.mark.parametrize("name", ORDERED)
def test_products_of_shards(name: str, world_size: int, make: Callable[..., tuple[Path, Path]]) -> None:
    """Oracle: the same rank's product with the twin's weight; of o_proj and down_proj a rank has some columns of each
    group: 48 or 12, and 96 or 24."""
    own, twin = make(name, num_layers=1)
    rng, num_seen = torch.Generator().manual_seed(3), 0
    for rank in {0, world_size - 1}:
        found, expected = load(own, rank, world_size), load(twin, rank, world_size)
        for (_, module), (path, other) in zip(found.named_modules(), expected.named_modules(), strict=True):
            if not isinstance(module, LocalLinear) or not isinstance(module.format, Ordered):
                continue
            assert isinstance(other, LocalLinear)
            parameters = dict(module.named_parameters(recurse=False))
            product = module.format.finish(parameters, module.shape, torch.float32)
            x = torch.randn(5, module.shape.columns.size, generator=rng)
            wanted = x @ dict(other.named_parameters(recurse=False))["weight"].T
            if module.shape.activation is not None:
                assert isinstance(product, GatedProduct)
                torch.testing.assert_close(product.before_activation(x, None), wanted, rtol=1e-4, atol=1e-4, msg=path)
                wanted = gate(wanted, module.shape.activation)
            torch.testing.assert_close(product(x, None), wanted, rtol=1e-4, atol=1e-4, msg=path)
            num_seen += 1
    assert num_seen == 4 * len({0, world_size - 1})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("order", "group"),
    [
        (torch.arange(96) // 32, 32),
        (torch.randperm(96, generator=torch.Generator().manual_seed(1)) // 32, 32),
        (torch.randperm(256, generator=torch.Generator().manual_seed(2))[:120] // 64, 64),
        (torch.tensor([3, 3, 1, 0, 3]), 128),  # no column of one group
        (torch.tensor([2, 1, 0, 1]), 4),
        (torch.zeros(40, dtype=torch.long), 16),
    ],
)
def test_columns_are_sorted_by_their_groups(order: torch.Tensor, group: int, bits: int) -> None:
    """Oracle: by definition: each column once, each unit of one group, in the order of groups and columns."""
    found = sort_columns(order, group, bits)
    assert len(found.columns) == len(found.groups) * found.unit and group % found.unit == 0
    of_places = found.groups.repeat_interleave(found.unit)
    here = found.columns < len(order)
    assert sorted(found.columns[here].tolist()) == list(range(len(order)))
    assert torch.equal(order[found.columns[here]], of_places[here])
    pairs = list(zip(of_places[here].tolist(), found.columns[here].tolist(), strict=True))
    assert pairs == sorted(pairs)
    assert found.is_sorted == (order.tolist() == sorted(order.tolist()) and bool(here.all()))


def test_parts_in_different_orders_are_refused(make: Callable[..., tuple[Path, Path]]) -> None:
    """Oracle: the rule that a product has one input: the error names the parts and the remedy."""
    own, _ = make("gptq-ordered", num_layers=1)
    stored = load_file(own / "model.safetensors")
    stored["model.layers.0.self_attn.k_proj.g_idx"] = stored["model.layers.0.self_attn.k_proj.g_idx"].flip(0).clone()
    save_file(stored, own / "model.safetensors")
    modules = [one for one in load(own, 0, 1).modules() if isinstance(one, LocalLinear)]
    module = next(one for one in modules if len(one.shape.parts) == 3)
    with pytest.raises(ConfigError, match=r"q_proj, .*k_proj, .*without desc_act"):
        module.format.finish(dict(module.named_parameters(recurse=False)), module.shape, torch.float32)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("world_size", [1, 2])
def test_experts(world_size: int, splits: bool, make: Callable[..., tuple[Path, Path]]) -> None:
    """Oracle: the same rank's experts of the twin, which are split or whole; each has an order of its own."""
    own, twin = make("gptq-ordered", "qwen3-moe", **EXPERTS, num_layers=2)
    stored, plain = load_file(own / "model.safetensors"), load_file(twin / "model.safetensors")
    turned = torch.randperm(128, generator=torch.Generator().manual_seed(5))  # columns of expert 1 in another order
    for name in ("gate_proj", "up_proj"):
        path = f"model.layers.0.mlp.experts.1.{name}"
        groups = stored[f"{path}.g_idx"].long()[turned]
        stored[f"{path}.g_idx"] = groups.int()
        plain[f"{path}.weight"] = regrouped(stored, path, groups)
    save_file(stored, own / "model.safetensors")
    save_file(plain, twin / "model.safetensors")
    x = torch.randn(7, 128, generator=torch.Generator().manual_seed(6))
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0], [2, 1], [0, 1]], dtype=torch.int32)
    weights = torch.rand(7, 2, generator=torch.Generator().manual_seed(7))
    for rank in range(world_size):
        models = (load(one, rank, world_size, enable_expert_parallel=not splits) for one in (own, twin))
        found, expected = (next(one for one in model.modules() if isinstance(one, Experts)) for model in models)
        assert isinstance(found.format, Ordered)
        results = [
            one.format.finish_experts(dict(one.named_parameters(recurse=False)), one.shape, torch.float32)(
                x, ids, weights
            )
            for one in (found, expected)
        ]
        assert results[0].abs().max() > 0.01
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def regrouped(stored: dict[str, torch.Tensor], path: str, groups: torch.Tensor) -> torch.Tensor:
    """The weight of GPTQ's tensors with other groups of columns, by the formula of the format."""
    shifts = torch.arange(0, 32, 4)
    codes = (stored[f"{path}.qweight"].unsqueeze(1) >> shifts[:, None] & 15).flatten(0, 1)
    zeros = (stored[f"{path}.qzeros"].unsqueeze(-1) >> shifts & 15).flatten(1) + 1
    return ((codes - zeros[groups]) * stored[f"{path}.scales"].float()[groups]).T.contiguous()


def test_experts_with_biases_are_refused() -> None:
    """Oracle: the error names the layer and the remedy."""
    shape = SimpleNamespace(spec=SimpleNamespace(bias=True), path="model.layers.0.mlp")
    with pytest.raises(ConfigError, match=r"layers\.0\.mlp has experts with biases.*desc_act.*without it"):
        Ordered(WeightScheme(packing="gptq", kind="int4", order_name="g_idx")).create_experts(
            None,  # type: ignore[arg-type]
            shape,  # type: ignore[arg-type]
        )


def test_the_usual_order_costs_nothing(make: Callable[..., tuple[Path, Path]]) -> None:
    """Oracle: no input is sorted where the groups are in order, as with ``static_groups``."""
    own, _ = make("gptq-ordered", num_layers=1)
    stored = load_file(own / "model.safetensors")
    stored |= {name: value.sort().values for name, value in stored.items() if name.endswith("g_idx")}
    save_file(stored, own / "model.safetensors")
    for module in load(own, 1, 2).modules():
        if isinstance(module, LocalLinear) and isinstance(module.format, Ordered):
            shape = replace(module.shape, activation=None)
            product = module.format.finish(dict(module.named_parameters(recurse=False)), shape, torch.float32)
            assert type(product).__name__ != "SortedProduct"
