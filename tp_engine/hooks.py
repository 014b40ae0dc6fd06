"""Hooks: methods of a base class that do nothing, which optional features override.

A caller keeps the overridden ones alone, so that what is switched off costs nothing.
"""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Feature = TypeVar("Feature")


def find_feature(features: Iterable[object], kind: type[Feature]) -> Feature | None:
    """Return the feature of this kind; None if it is switched off."""
    return next((one for one in features if isinstance(one, kind)), None)


def hooks(features: Iterable[object], name: str) -> list[Callable[..., Any]]:
    """Return the methods ``name`` of those features that override their base's, in order."""
    return [getattr(one, name) for one in features if _overrides(type(one), name)]


def _overrides(kind: type, name: str) -> bool:
    base = next(one for one in reversed(kind.__mro__) if name in vars(one))
    return getattr(kind, name) is not vars(base)[name]


class Hooks:
    """The hooks of ``features``: each attribute is what ``hooks`` gives for its name."""

    def __init__(self, features: Iterable[object]) -> None:
        self._features = features

    def __getattr__(self, name: str) -> list[Callable[..., Any]]:
        found = hooks(self._features, name)
        setattr(self, name, found)
        return found
