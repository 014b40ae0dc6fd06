"""tp_engine: a multi-GPU tensor-parallel LLM inference runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp_engine.errors import ConfigError, EngineDeadError, RequestError
from tp_engine.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from tp_engine.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from tp_engine.api.async_llm import AsyncLLM
    from tp_engine.api.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "ConfigError",
    "EngineDeadError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
]

_LAZY = {"LLM": "tp_engine.api.llm", "AsyncLLM": "tp_engine.api.async_llm"}


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, only when it is asked for: the frontend process needs neither."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
