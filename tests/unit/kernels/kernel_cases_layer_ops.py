"""The layers' small operations by Triton against their PyTorch twins: interpreted and on CUDA (``CASES``), and
the launches of real models (``launch_all``).  ``kernel_cases_heads`` has those of queries and keys.

``with_kernels_of`` turns these cases, and those of other modules that ask ``both`` for their kernel, to its form in C.

The rule (``allowed_error``): against float32 (for float32: float64), the error is at most twice that of the twin in
the same precision, and a unit of float32 of the largest result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from tp_engine.kernels.layer_ops import NormRule
from tp_engine.kernels.ops import Kind, implementation
from tp_engine.model_config.head_gate import GateFunction
from tp_engine.model_config.mlp import SILU, Activation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = 1e-6
GELU, CLAMPED, RELU2 = Activation("gelu_tanh"), Activation("swiglu_clamped"), Activation("relu2")
SILU_CLAMPED = Activation("silu_clamped", limit=0.5)
ACTIVATIONS = (SILU, GELU, CLAMPED, Activation("swiglu_clamped", alpha=1.5, limit=0.5), RELU2, SILU_CLAMPED)
Case = Callable[[str], None]


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Normal values, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


_tested: Kind = "triton"


@contextmanager
def with_kernels_of(kind: Kind) -> Iterator[None]:
    """Let the cases test operations of this kind, in place of Triton's."""
    global _tested
    before, _tested = _tested, kind
    try:
        yield
    finally:
        _tested = before


def both(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The operation in the kind that is tested, and its twin."""
    return implementation(name, _tested), implementation(name, "twin")


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference; 0 without elements."""
    return (found.double() - exact).abs().max().item() if exact.numel() else 0.0


def allowed_error(twin_error: float, exact: torch.Tensor) -> float:
    """Twice the twin's error, and a unit of float32 of the largest result.

    The twin's error is a draw: the order of its sums is the processor's, and so is how often it happens to round well.
    In float32 a result is rounded twice at least on either side, by half a unit each, and that much is no one's fault.
    """
    largest = exact.abs().max().item() if exact.numel() else 0.0
    return 2 * twin_error + torch.finfo(torch.float32).eps * largest


def assert_close_enough(found: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor, granted: float = 1e-2) -> None:
    """Errors against ``exact``; ``granted`` units of the type are allowed too, for when the twin happens to be
    exact."""
    assert found.dtype == twin.dtype and found.shape == twin.shape
    allowed = allowed_error(error_of(twin, exact), exact) + torch.finfo(found.dtype).eps * granted
    error = error_of(found, exact)
    assert error <= allowed, f"error {error} above {allowed} for {found.dtype}, {tuple(found.shape)}"


def granted_for(exact: torch.Tensor, dtype: torch.dtype) -> float:
    """For operations that round several times: one unit of the largest result in float32, where this shows."""
    return exact.abs().max().item() if dtype == torch.float32 else 1e-2


def norm_exactly(rows: torch.Tensor, rule: NormRule) -> torch.Tensor:
    """In float64."""
    wide = rows.double()
    if rule.is_centred:
        wide = wide - wide.mean(-1, keepdim=True)
    return wide * (wide.square().mean(-1, keepdim=True) + rule.eps).rsqrt() * (rule.weight.double() + rule.offset)


def check_norm(
    device: str, size: int, dtype: torch.dtype, offset: float, is_centred: bool, scale: float, stream_scale: float = 1.0
) -> None:
    """Rows that are slices of wider rows, with a mean other than zero; then with a residual that is added to in
    place."""
    x = random((5, size + 24), dtype, device)[:, 8 : 8 + size].add_(0.5)
    residual = random((5, size + 8), dtype, device, 2)[:, :size]
    rule = NormRule(random((size,), dtype, device, 1), EPS, offset, is_centred)
    norm, twin = both("norm")
    exact = norm_exactly(x, rule)
    granted = granted_for(exact, dtype) if is_centred else 1e-2
    assert_close_enough(norm(x, rule), twin(x, rule), exact, granted)
    by_add, by_twin, by_add_norm = (residual.clone() for _ in range(3))
    add, plain_add = both("add")
    add(x, by_add, scale, stream_scale)
    plain_add(x, by_twin, scale, stream_scale)
    found = both("add_norm")[0](x, by_add_norm, rule, scale, stream_scale)
    assert torch.equal(by_add, by_add_norm)
    assert_close_enough(by_add, by_twin, (residual.double() + x.double() * scale) * stream_scale)
    assert scale * stream_scale != 1.0 or torch.equal(by_add, by_twin), (
        "a plain sum is rounded once, whichever way it is made"
    )
    assert_close_enough(found, twin(by_add_norm, rule), norm_exactly(by_add_norm, rule), granted)


def gate_exactly(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """In float64, by the activations' formulas."""
    if activation.kind == "relu2":
        return F.relu(gate_up.double()) ** 2
    gate, up = gate_up.double().chunk(2, -1)
    if activation.kind == "silu":
        return gate * gate.sigmoid() * up
    if activation.kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    return (up + 1) * gate * (activation.alpha * gate).sigmoid()


def check_gate(device: str, size: int, dtype: torch.dtype, activation: Activation) -> None:
    """Gates far from zero too, where an exponential overflows; NaN stays."""
    width = activation.num_parts * size
    gate_up = random((4, width + 16), dtype, device)[:, :width]
    gate_up[0, :size] *= 10 if activation.kind == "relu2" else 100
    gate, twin = both("gate")
    assert_close_enough(gate(gate_up, activation), twin(gate_up, activation), gate_exactly(gate_up, activation))
    gate_up[1, 3], gate_up[2, width - size + 4] = float("nan"), float("nan")
    assert gate(gate_up, activation).isnan().nonzero().tolist() == [[1, 3], [2, 4]]


def check_gate_heads(device: str, size: int, dtype: torch.dtype, dim: int, function: GateFunction) -> None:
    """Gates that are slices of wider rows, some where an exponential overflows; what lies beside stays, and NaN too."""
    count = size // dim
    x, wide = random((4, size + 8), dtype, device), random((4, count + 16), dtype, device, 1)
    wide[0] *= 100
    gate, (gate_heads, twin) = wide[:, 16:], both("gate_heads")
    found, expected, exact = x.clone(), x.clone(), gate.double()
    factor = exact.sigmoid() if function == "sigmoid" else torch.where(exact > 40, exact, (exact.exp() + 1).log())
    gate_heads(found[:, :size], gate, function)
    twin(expected[:, :size], gate, function)
    exact = x[:, :size].double() * factor.repeat_interleave(dim, 1)
    assert_close_enough(found[:, :size], expected[:, :size], exact)
    assert torch.equal(found[:, size:], x[:, size:])
    gate[1, 3] = float("nan")
    gate_heads(found[:, :size], gate, function)
    assert found.isnan().nonzero().tolist() == [[1, 3 * dim + place] for place in range(dim)]


def check_embed(device: str, size: int, dtype: torch.dtype, first_id: int | None, scale: float) -> None:
    """Ids of other ranks below and above this rank's; the result is the twin's bit for bit."""
    embed, twin = both("embed")
    weight, ids = random((9, size), dtype, device), torch.tensor([20, 28, 0, 19, 29, 24, 500], device=device)
    ids = ids if first_id is not None else ids % 9
    for own in (ids, ids.int(), ids[:0]):
        assert torch.equal(embed(own, weight, first_id, scale), twin(own, weight, first_id, scale))


def check_cap_logits(device: str, width: int, dtype: torch.dtype, scale: float, cap: float | None) -> None:
    """Rows that are slices of wider rows; logits that are tiny or far above the cap; NaN stays."""
    cap_logits, twin = both("cap_logits")
    wide = random((4, width + 8), dtype, device)
    wide[0] *= 1e-3
    wide[1] *= 1e4
    exact = wide[:, :width].double() * scale
    exact = exact if cap is None else cap * (exact / cap).tanh()
    found, expected = wide.clone(), wide.clone()
    cap_logits(found[:, :width], scale, cap)
    twin(expected[:, :width], scale, cap)
    for rows in ([0], [1], [2, 3]):
        granted = granted_for(exact[rows], dtype)
        assert_close_enough(found[rows, :width], expected[rows, :width], exact[rows], granted)
    assert torch.equal(found[:, width:], wide[:, width:]), "something behind the rows was changed"
    found[2, 5] = float("nan")
    cap_logits(found[:, :width], scale, cap)
    assert found.isnan().nonzero().tolist() == [[2, 5]]


def make_cases() -> dict[str, Case]:
    """Name -> check on a device."""
    cases: dict[str, Case] = {}
    rules = ((0.0, False, 1.0), (1.0, False, 1.0), (0.0, True, 0.22), (0.5, True, 2.0))
    for dtype in DTYPES:
        for size, (offset, is_centred, scale) in [*product((48, 1000), rules), (512, rules[0])]:
            name = f"norm-{size}-{dtype}-offset-{offset}{'-centred' * is_centred}-scale-{scale}"
            cases[name] = partial(check_norm, size=size, dtype=dtype, offset=offset, is_centred=is_centred, scale=scale)
        cases[f"norm-1000-{dtype}-scaled-stream"] = partial(
            check_norm, size=1000, dtype=dtype, offset=0.0, is_centred=False, scale=1.0, stream_scale=0.37
        )
        for size, activation in product((24, 1500), ACTIVATIONS):
            name = f"gate-{size}-{dtype}-{activation.kind}-{activation.limit}"
            cases[name] = partial(check_gate, size=size, dtype=dtype, activation=activation)
        gates: tuple[tuple[int, int, GateFunction], ...] = (
            (24, 1, "sigmoid"), (1500, 1, "sigmoid"), (24, 4, "softplus"), (1500, 1, "softplus")
        )  # fmt: skip
        for size, dim, function in gates:
            name = f"gate-heads-{size}-{dim}-{function}-{dtype}"
            cases[name] = partial(check_gate_heads, size=size, dtype=dtype, dim=dim, function=function)
        for size, first_id, scale in ((40, None, 1.0), (1500, 20, 1.0), (1500, None, 38.75), (64, 20, 0.3)):
            name = f"embed-{size}-{dtype}-from-{first_id}-scale-{scale}"
            cases[name] = partial(check_embed, size=size, dtype=dtype, first_id=first_id, scale=scale)
        for width, scale, cap in ((101, 1.0, 30.0), (2000, 0.5, 5.0), (1024, 0.25, None)):
            name = f"cap-logits-{width}-{dtype}-{scale}-{cap}"
            cases[name] = partial(check_cap_logits, width=width, dtype=dtype, scale=scale, cap=cap)
    return cases


CASES = make_cases()


def launch_all() -> None:
    """The launches of a layer of Qwen3-0.6B and 32B, Gemma 2 9B, Granite, Command A and gpt-oss, and of a model with
    odd sizes in every type."""
    launch_model(torch.bfloat16, 1024, 3072)
    launch_model(torch.bfloat16, 5120, 25600)
    launch_model(torch.bfloat16, 3584, 14336, offset=1.0, activation=GELU, embedding_scale=59.75, cap=30.0)
    launch_model(torch.bfloat16, 4096, 12800, scale=0.22, embedding_scale=12.0, logits_scale=1 / 16)
    launch_model(torch.bfloat16, 12288, 36864, is_centred=True, logits_scale=0.25)
    launch_model(torch.bfloat16, 2880, 2880, activation=CLAMPED)
    for dtype in DTYPES:
        launch_model(dtype, 576, 1536, activation=RELU2, cap=15.0)


def launch_model(
    dtype: torch.dtype,
    hidden: int,
    inner: int,
    *,
    offset: float = 0.0,
    is_centred: bool = False,
    scale: float = 1.0,
    activation: Activation = SILU,
    embedding_scale: float = 1.0,
    logits_scale: float = 1.0,
    cap: float | None = None,
) -> None:
    """Each operation of a model once, on one rank's part of a vocabulary."""

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def run(name: str, *arguments: Any) -> None:
        implementation(name, "triton")(*arguments)

    x, residual, rule = empty(7, hidden), empty(7, hidden), NormRule(empty(hidden), EPS, offset, is_centred)
    run("norm", x, rule)
    run("add_norm", x, residual, rule, scale)
    run("add", x, residual, scale)
    run("add_norm", x, residual, rule, scale, 0.7)
    run("gate", empty(7, 2 * inner), activation)
    run("gate_heads", empty(7, inner), empty(7, 2 * inner)[:, inner:])
    run("embed", empty(7, dtype=torch.int64), empty(4000, hidden), 4000, embedding_scale)
    run("cap_logits", empty(7, 4000), logits_scale, cap)


def check_compiled(kernel: Any, capability: int) -> None:
    """Dependent launch where the GPU has it."""
    assert ("griddepcontrol.wait" in kernel.asm["ptx"]) == (capability >= 90)
