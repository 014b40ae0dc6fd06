"""Asks a class of transformers what it computes, in a process of its own.

``models/recognition/`` runs there: it imports transformers, and runs what a stranger's config.json makes of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

import msgspec

from tp_engine.errors import shown
from tp_engine.model_config.asked_decoder import ClassAnswer
from tp_engine.model_config.kept_answers import kept
from tp_engine.system.child_process import start_child
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

_CHILD = "tp_engine.models.recognition.child"
_DEADLINE_S = 600.0
_LARGEST_ANSWER = 64 << 20
# Keys that tell nothing of the decoder: checkpoints that differ in them alone have one answer.
UNASKED_KEYS = ("transformers_version", "_name_or_path", "_commit_hash", "auto_map", "quantization_config")


def ask(values: Mapping[str, Any]) -> ClassAnswer:
    """Return what the class says that a config.json of these ``values`` names.

    A file of the cache tells it, or a child process, which takes some seconds; for that, other processes that ask the
    same wait.
    """
    asked = {name: value for name, value in values.items() if name not in UNASKED_KEYS}
    return kept(asked, lambda: _ask_child(asked))


def _ask_child(values: Mapping[str, Any]) -> ClassAnswer:
    """The answer; a child that ended without one may do better the next time."""
    logger.info("transformers' class %s is asked what it computes; this takes some seconds", values["architectures"][0])
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as words:
        settings = json.dumps([output.fileno(), os.getpid(), values]).encode()
        child = start_child(_CHILD, settings, pass_fds=[output.fileno()], output=words)
        try:
            code = child.wait(timeout=_DEADLINE_S)
        except subprocess.TimeoutExpired:
            return ClassAnswer(problem=f"it gave no answer within {_DEADLINE_S:.0f} s", is_lasting=False)
        finally:
            child.kill()
            child.wait()
        data = os.pread(output.fileno(), _LARGEST_ANSWER, 0)
        said = os.pread(words.fileno(), _LARGEST_ANSWER, 0).decode(errors="replace").strip().rpartition("\n")[2]
    if code != 0:
        return ClassAnswer(problem=f"the process that asked it ended with code {code}: {shown(said)}", is_lasting=False)
    try:
        return msgspec.json.decode(data, type=ClassAnswer)
    except msgspec.DecodeError as error:
        problem = f"the process that asked it gave no answer that can be read ({error})"
        return ClassAnswer(problem=problem, is_lasting=False)
