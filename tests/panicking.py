"""A real tokenizer whose library panics over one text, as those of Qwen and Llama do over megabytes of white space."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tp_engine.config import DEMO_MODEL

PANIC_TEXT = "a" * 24 + "!"
_PATTERN = {"Regex": "(a+)+$"}  # the library panics after too many attempts


def panicking_model(folder: Path) -> Path:
    """Copy the demo model with such a tokenizer, which treats other texts as the model's own does."""
    shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
    path = folder / "tokenizer.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    split = {"type": "Split", "pattern": _PATTERN, "behavior": "Isolated", "invert": False}
    written["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, written["pre_tokenizer"]]}
    path.write_text(json.dumps(written), encoding="utf-8")
    return folder
