"""A PEFT adapter's file: the pair of matrices of each module, checked against its configuration.

The file is read whole before anything is made of it: a trainer may write a new one meanwhile, and reading a mapped file
that becomes shorter ends the process.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from tp_engine.errors import ConfigError, WeightError
from tp_engine.model_config.lora import ADAPTER_WEIGHTS, EXPERT_PARAMETERS, AdapterSpec, read_adapter_config
from tp_engine.system.files import read_bytes

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>A|B)\.weight")
_KINDS = {
    "lora_embedding_": "adapters of an embedding cannot be served",
    "lora_magnitude_vector": "DoRA cannot be served",
    ".lora_B.bias": "biases of B cannot be served",
    ".base_layer.": "adapters of embeddings and output heads cannot be served",
}
_STACK = re.compile(r"(?P<experts>.+\.experts)(\.base_layer)?")
_MAX_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPair:
    """``a`` (r, in) and ``b`` (out, r) of one module, as stored: it adds ``scale * b @ a @ x``.

    Those of a stack of experts are (experts * r, in) and (out, r * experts): expert by expert, and rank by rank.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    rank: int


def read_adapter(folder: Path, max_rank: int, max_bytes: int = 1 << 40) -> dict[str, AdapterPair]:
    """Return the pairs of the adapter in ``folder``, by the name of their module; no tensor of the file is left out.

    A file of more than ``max_bytes`` is not read.

    ``ConfigError`` or ``WeightError`` names what is missing, malformed or not supported.
    """
    spec, path = read_adapter_config(folder), folder / ADAPTER_WEIGHTS
    modules = _by_module(path, _tensors(path, max_bytes))
    if not modules:
        raise WeightError(f"{path} holds no tensor")
    return {module: _pair(path, module, sides, spec, max_rank) for module, sides in modules.items()}


def _tensors(path: Path, max_bytes: int) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load(read_bytes(path, max_bytes))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); save the adapter with safe_serialization=True, on every host"
        ) from error
    except SafetensorError as error:
        raise WeightError(f"{path} is not a whole safetensors file: {error}") from error
    return tensors


def _by_module(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Both sides of each module; every tensor is one of them."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
        if match is None:
            reason = next(
                (why for part, why in _KINDS.items() if part in name), f"names are {_PREFIX}MODULE.lora_A.weight"
            )
            raise WeightError(f"{path} holds {name}: {reason}")
        if tensor.dtype not in _FLOATS or tensor.dim() != 2:
            raise WeightError(f"{path} holds {name} of shape {tuple(tensor.shape)} in {tensor.dtype}, not a matrix")
        found.setdefault(match["module"], {})[match["side"]] = tensor
    return found


def _pair(path: Path, module: str, sides: dict[str, torch.Tensor], spec: AdapterSpec, max_rank: int) -> AdapterPair:
    if missing := {"A", "B"} - sides.keys():
        raise WeightError(f"{path} lacks lora_{missing.pop()} of {module}")
    stack = _STACK.fullmatch(module)
    # The file does not name the parameter that a stack's pair is of.
    names = [module] if stack is None else [f"{stack['experts']}.{name}" for name in EXPERT_PARAMETERS]
    rank, scale = spec.rank_of(names[0]), spec.scale_of(names[0])
    if (rank, scale) != (spec.rank_of(names[-1]), spec.scale_of(names[-1])):
        raise ConfigError(f"{path}: the parameters of {names[0]} and {names[-1]} have other ranks or scales; give one")
    found = sides["A"].shape[0], sides["B"].shape[1]
    if found[0] != found[1] or found[0] % rank or (stack is None and found[0] != rank):
        raise WeightError(f"{path}: A and B of {module} have the ranks {found[0]} and {found[1]}, not {rank}")
    if rank > max_rank:
        raise ConfigError(f"{path}: {module} has rank {rank}, above max_lora_rank {max_rank}: raise max_lora_rank")
    return AdapterPair(a=sides["A"], b=sides["B"], scale=scale, rank=rank)


def check_all_used(folder: Path, pairs: Iterable[str], used: Iterable[str]) -> None:
    """``WeightError`` unless every module of an adapter is one that the model adapts: another would change nothing, and
    the answers would be wrong in silence."""
    unused = sorted(set(pairs) - set(used))
    if unused:
        more = f" and {len(unused) - _MAX_NAMED} more" if len(unused) > _MAX_NAMED else ""
        raise WeightError(
            f"{folder} adapts {', '.join(unused[:_MAX_NAMED])}{more}, which the model lacks, or which cannot be "
            "adapted: attention and MLP projections can, embeddings, output heads and routers cannot; routed "
            "experts can with lora_experts, if PEFT adapted their stacks (target_parameters), of the model's sizes"
        )
