"""Features in a list: optional parts, each of which attaches its functions to the hooks of what it is a part of."""

from collections.abc import Iterable
from typing import TypeVar

Feature = TypeVar("Feature")


def find_feature(features: Iterable[object], kind: type[Feature]) -> Feature | None:
    """Return the feature of this kind; None if it is switched off."""
    return next((one for one in features if isinstance(one, kind)), None)
