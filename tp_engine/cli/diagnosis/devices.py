"""GPUs, how they talk to each other, compiled kernels, and what the engine would choose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tp_engine.attention.registry import obstacles
from tp_engine.cli.diagnosis.finding import Finding, Status
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.kernels.native.library import native_library
from tp_engine.units import format_gib
from tp_engine.worker.effective_config import EffectiveConfig, resolve

_MAX_LISTED = 8


def has_gpu() -> bool:
    """Whether the engine would run on GPUs."""
    return torch.cuda.device_count() > 0


def check_devices() -> Iterator[Finding]:
    """The GPUs and their links; none is no fault."""
    count = torch.cuda.device_count()
    if count == 0:
        built = f"torch {torch.__version__} for CUDA {torch.version.cuda}" if torch.version.cuda else "torch for CPUs"
        yield Finding(topic="GPUs", status=Status.OK, detail=f"none ({built}); models run on the processor")
        return
    for index in range(min(count, _MAX_LISTED)):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        detail = f"{properties.name}, {format_gib(properties.total_memory)}, {capability}"
        yield Finding(topic=f"GPU {index}", status=Status.OK, detail=detail)
    yield Finding(topic="CUDA", status=Status.OK, detail=f"{torch.version.cuda}, NCCL {_nccl_version()}")
    if count > 1:
        yield _peer_access(count)


def _nccl_version() -> str:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    except (RuntimeError, AttributeError, TypeError):
        return "is not there"


def _peer_access(count: int) -> Finding:
    apart = [
        f"{one}-{other}"
        for one, other in itertools.combinations(range(count), 2)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if not apart:
        return Finding(topic="peer access", status=Status.OK, detail="every GPU reads every other's memory")
    shown = ", ".join(apart[:_MAX_LISTED])
    detail = f"none between {shown}: their sums go through the host, and symmetric memory is not used"
    return Finding(topic="peer access", status=Status.NOTE, detail=detail)


def check_kernels(*, on_cpu: bool) -> Iterator[Finding]:
    """The compiled kernels of CPUs, built now if they are not."""
    if not on_cpu:
        return
    if native_library() is not None:
        yield Finding(
            topic="native kernels", status=Status.OK, detail="compiled, and equal to PyTorch's on small inputs"
        )
        return
    yield Finding(
        topic="native kernels",
        status=Status.NOTE,
        detail="there are none (the log line above says why); PyTorch computes, several times slower",
        remedy="install gcc, and let TP_ENGINE_CACHE_DIR be a folder that can be written to",
    )


def check_choice(config: EngineConfig) -> Iterator[Finding]:
    """What ``auto`` comes to for one model on this machine, and why."""
    try:
        effective = resolve(config)
    except ConfigError as error:
        yield Finding(topic="model", status=Status.MISSING, detail=str(error))
        return
    yield Finding(topic="model", status=Status.OK, detail=f"{effective.model.architecture} at {effective.model_path}")
    yield from _backends(effective)
    chosen = effective.config
    plain = {
        "device": chosen.device,
        "dtype": chosen.dtype,
        "kv_cache_dtype": chosen.kv_cache_dtype,
        "attention_backend": chosen.attention_backend,
        "gpu_memory_utilization": effective.gpu_memory_utilization,
        "max_model_len": effective.max_model_len,
        "block_size": chosen.block_size,
    }
    yield Finding(
        topic="would be chosen", status=Status.OK, detail=", ".join(f"{name} {value}" for name, value in plain.items())
    )


def _backends(effective: EffectiveConfig) -> Iterator[Finding]:
    chosen = effective.config.attention_backend.split(":")
    for name, obstacle in obstacles(effective.attention_needs).items():
        usable = "usable" if name in chosen else "usable where attention_backend names it"
        yield Finding(topic=f"attention {name}", status=Status.OK, detail=obstacle or usable)
