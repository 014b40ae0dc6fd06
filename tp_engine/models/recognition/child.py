"""The process that asks a class: a config.json comes in, a ``ClassAnswer`` goes out."""

from __future__ import annotations

import json
import os
import resource
import sys
import warnings
from dataclasses import replace
from typing import Any

import msgspec

from tp_engine.errors import shown
from tp_engine.model_config.asked_decoder import ClassAnswer
from tp_engine.system import env
from tp_engine.system.child_process import ignore_stop_signals

_MEMORY_BYTES, _CPU_S = 32 << 30, 300


def main() -> int:
    """ClassAnswer into the descriptor that the settings name."""
    ignore_stop_signals()
    env.without_native_kernels()
    descriptor, values = json.loads(sys.stdin.buffer.read())
    for kind, most in ((resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_CPU, _CPU_S)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    os.write(descriptor, msgspec.json.encode(answer(values)))
    return 0


def answer(values: dict[str, Any]) -> ClassAnswer:
    """Ask the class that ``values``, a config.json, names."""
    import torch
    import transformers

    from tp_engine.models.class_model.guard import served_by_modules
    from tp_engine.models.recognition.model_class import ModelClass
    from tp_engine.models.recognition.twin import verify
    from tp_engine.models.recognition.whole import describe

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    try:
        model_class = ModelClass(values)
    except Exception as error:
        return ClassAnswer(problem=_reason(error))
    try:
        found = describe(model_class)
        verify(model_class, found)
        return ClassAnswer(decoder=found.published)
    except Exception as error:  # whatever the class raises when it is run, too
        not_native = _reason(error)
    try:
        return ClassAnswer(modules=replace(served_by_modules(model_class), reason=not_native))
    except Exception as error:
        return ClassAnswer(problem=_reason(error))


def _reason(error: Exception) -> str:
    """Why a class is not served in one of the ways."""
    from tp_engine.models.recognition.record import NAME
    from tp_engine.models.recognition.refusal import RefusalError

    if isinstance(error, RefusalError):
        return str(error)
    if isinstance(error, KeyError) and error.args == (NAME,):
        return "its attention is its own, and not by transformers' attention interface"
    return f"it could not be run without its weights: {type(error).__name__}: {shown(str(error))}"
