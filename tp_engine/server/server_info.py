"""What a server tells of itself: its configuration without secrets, and the versions of what it is made of."""

from __future__ import annotations

import dataclasses
import platform
from importlib import metadata
from typing import Any

from tp_engine import __version__

_PARTS = ("torch", "transformers", "tokenizers", "safetensors", "triton", "fastapi", "uvicorn", "pydantic")


def public_fields(config: Any) -> dict[str, Any]:
    """A configuration by field; a secret shows only whether it is set."""
    fields = {}
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        fields[spec.name] = ("hidden" if value else None) if spec.metadata.get("secret") else value
    return fields


def versions() -> dict[str, str | None]:
    """Of this project, Python, and the libraries that decide what a model computes; None for one that is not there."""
    return {"tp_engine": __version__, "python": platform.python_version(), **{part: _version(part) for part in _PARTS}}


def _version(part: str) -> str | None:
    try:
        return metadata.version(part)
    except metadata.PackageNotFoundError:
        return None
