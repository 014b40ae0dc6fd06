"""Which causal classes the installed transformers has; it is not imported for that."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path


def transformers_version() -> str:
    """Return that of the installed transformers."""
    return importlib.metadata.version("transformers")


def has_class(architecture: str) -> bool:
    """Return whether the installed transformers has a causal class of this name."""
    found = importlib.util.find_spec("transformers")
    if found is None or not found.submodule_search_locations:
        return False
    listed = Path(found.submodule_search_locations[0]) / "models" / "auto" / "modeling_auto.py"
    try:
        text = listed.read_text(encoding="utf-8")
    except OSError:
        return False
    table = text.partition("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")[2].partition("MAPPING_NAMES =")[0]
    return re.fullmatch(r"\w{1,100}", architecture) is not None and f'", "{architecture}")' in table
