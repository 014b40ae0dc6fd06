"""tp_engine: a multi-GPU tensor-parallel LLM inference runtime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tp_engine.system.version import __version__ as __version__

if TYPE_CHECKING:
    from tp_engine.api.async_llm import AsyncLLM
    from tp_engine.api.keywords import EngineOptions
    from tp_engine.api.llm import LLM
    from tp_engine.api.pooling import PoolingParams
    from tp_engine.apps.advice.recommend import recommend
    from tp_engine.apps.batch.run import run_batch
    from tp_engine.apps.batch.summary import BatchSummary
    from tp_engine.errors import ConfigError, EngineDeadError, RequestError
    from tp_engine.features.lora.options import LoRARequest
    from tp_engine.requests.outputs import (
        BeamSearchOutput,
        BeamSearchSequence,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from tp_engine.requests.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from tp_engine.requests.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BatchSummary",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingRequestOutput",
    "EngineDeadError",
    "EngineOptions",
    "LoRARequest",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestError",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "recommend",
    "run_batch",
]

# Module -> the public names in it.
_PLACES = {
    "tp_engine.api.async_llm": ("AsyncLLM",),
    "tp_engine.apps.batch.run": ("run_batch",),
    "tp_engine.apps.batch.summary": ("BatchSummary",),
    "tp_engine.api.keywords": ("EngineOptions",),
    "tp_engine.api.llm": ("LLM",),
    "tp_engine.api.pooling": ("PoolingParams",),
    "tp_engine.apps.advice.recommend": ("recommend",),
    "tp_engine.errors": ("ConfigError", "EngineDeadError", "RequestError"),
    "tp_engine.features.lora.options": ("LoRARequest",),
    "tp_engine.requests.outputs": (
        "BeamSearchOutput", "BeamSearchSequence", "ClassificationRequestOutput", "CompletionOutput",
        "EmbeddingRequestOutput", "PoolingRequestOutput", "RequestOutput", "ScoringRequestOutput",
    ),
    "tp_engine.requests.sampling_params": ("BeamSearchParams", "RequestOutputKind", "SamplingParams"),
    "tp_engine.requests.structured_outputs": ("StructuredOutputsParams",),
}  # fmt: skip
_LAZY = {name: place for place, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name's module at first use.  Every process of an engine, and every run of pytest with the plugin
    of ``tp_engine.apps.testing``, imports this package; few of them need torch, or even the options."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """The public names, also those that are not imported yet."""
    return sorted({*globals(), *__all__})
