"""The maps of latent attention on a GPU: PyTorch's batched products, or one kernel each.

::

    absorb_w_uk     queries as queries of the cached rows      torch: a product and a copy; triton: one launch
    project_w_uv    means of latents as means of values        torch; triton: one launch, set up early

PyTorch is the code's own choice until a kernel has proven itself.
"""

from __future__ import annotations

from functools import partial

import torch

from tp_engine.kernels.attention.paged_trials import dtype_of, name_of
from tp_engine.kernels.candidates import MANY, Candidate, Inputs, Operation, Run, Shape, normal, why_no_triton
from tp_engine.kernels.ops import Kind, implementation

ABSORB, PROJECT = "absorb_w_uk", "project_w_uv"


def shape_of(*, num_heads: int, nope_dim: int, rope_dim: int, rank: int, value_dim: int, dtype: torch.dtype) -> Shape:
    """The shape of the maps of one layer's heads on this rank."""
    return {
        "heads": num_heads, "nope": nope_dim, "rope": rope_dim, "rank": rank, "value": value_dim,
        "type": name_of(dtype),
    }  # fmt: skip


def _build(name: str, kind: Kind, weights: None, shape: Shape) -> Run:
    """Called with rows (n, heads, ...), the maps (heads, nope + value, rank), and nope."""
    return implementation(name, kind)


def _inputs(name: str, shape: Shape, num_rows: int, device: torch.device, generator: torch.Generator) -> Inputs:
    heads, nope, rope, rank, value = (int(shape[one]) for one in ("heads", "nope", "rope", "rank", "value"))
    width, dtype = nope + rope if name == ABSORB else rank, dtype_of(shape)
    x, up = (normal(size, device, generator) for size in ((num_rows, heads, width), (heads, nope + value, rank)))
    return x.to(dtype), (up * rank**-0.5).to(dtype), nope


def _twin(name: str, weights: None, shape: Shape, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    run, (x, up, nope) = implementation(name, "twin"), inputs
    return run(x.double(), up.double(), nope), run(*inputs)


def _num_bytes(name: str, shape: Shape) -> int:
    width = int(shape["nope" if name == ABSORB else "value"])
    return int(shape["heads"]) * width * int(shape["rank"]) * dtype_of(shape).itemsize


def _operation(name: str) -> Operation:
    return Operation(
        candidates=(
            Candidate(name="torch", build=partial(_build, name, "twin")),
            Candidate(name="triton", build=partial(_build, name, "triton"), why_not=why_no_triton),
        ),
        default=lambda shape, device: ((MANY, "torch"),),
        inputs=partial(_inputs, name),
        twin=partial(_twin, name),
        num_bytes=partial(_num_bytes, name),
        sources=("kernels/attention/latent*.py",),
        most_rows=512,
        copies_inputs=True,
    )


ABSORB_OPERATION, PROJECT_OPERATION = _operation(ABSORB), _operation(PROJECT)
