"""The process that asks a class: a config.json comes in, a ``ClassAnswer`` goes out."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
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
_PR_SET_PDEATHSIG = 1
# What a class's code raises, and raises again; other errors may be the machine's: its disk, memory or packages.
_OF_CODE = (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError)
_OF_MEMORY = ("alloc", "memory", "thread")


def main() -> int:
    """ClassAnswer into the descriptor that the settings name."""
    ignore_stop_signals()
    env.without_native_kernels()
    descriptor, parent_pid, values = json.loads(sys.stdin.buffer.read())
    _end_with(parent_pid)
    limit(resource.RLIMIT_AS, _MEMORY_BYTES)
    limit(resource.RLIMIT_CPU, _CPU_S)
    os.write(descriptor, written(answer(values)))
    return 0


def _end_with(parent_pid: int) -> None:
    """End when the parent's thread ends that waits for this process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


def limit(kind: int, most: int) -> None:
    """Lower this process's limit of that ``kind`` to ``most``; one that is lower stays."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (min(one for one in (most, soft, hard) if one != resource.RLIM_INFINITY), hard))


def written(found: ClassAnswer) -> bytes:
    """``found`` in JSON, which has no infinities and no NaN: a description with one is a problem."""
    data = msgspec.json.encode(found)
    try:
        if msgspec.json.decode(data, type=ClassAnswer) == found:
            return data
    except msgspec.ValidationError:
        pass
    return msgspec.json.encode(ClassAnswer(problem="a number of its description is not finite"))


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
        return ClassAnswer(problem=_reason(error), is_lasting=_is_lasting(error))
    try:
        found = describe(model_class)
        verify(model_class, found)
        return ClassAnswer(decoder=found.published)
    except Exception as error:  # whatever the class raises when it is run, too
        not_native, is_lasting = _reason(error), _is_lasting(error)
    try:
        modules = replace(served_by_modules(model_class), reason=not_native)
        return ClassAnswer(modules=modules, is_lasting=is_lasting)
    except Exception as error:
        return ClassAnswer(problem=_reason(error), is_lasting=is_lasting and _is_lasting(error))


def _is_lasting(error: Exception) -> bool:
    """Whether another start would meet the same error."""
    from tp_engine.models.recognition.refusal import RefusalError

    if type(error) in (RuntimeError, NotImplementedError):  # not their children, as a rank's that waited too long
        return not any(word in str(error).lower() for word in _OF_MEMORY)
    return isinstance(error, (RefusalError, *_OF_CODE))


def _reason(error: Exception) -> str:
    """Why a class is not served in one of the ways."""
    from tp_engine.models.recognition.record import NAME
    from tp_engine.models.recognition.refusal import RefusalError

    if isinstance(error, RefusalError):
        return str(error)
    if isinstance(error, KeyError) and error.args == (NAME,):
        return "its attention is its own, and not by transformers' attention interface"
    return f"it could not be run without its weights: {type(error).__name__}: {shown(str(error))}"
