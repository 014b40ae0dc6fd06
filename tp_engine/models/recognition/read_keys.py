"""The keys of a config.json that a class reads, as its code shows."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from typing import Any

_READERS = ("pop", "get", "setdefault")


def read_keys(model_kind: type[Any], config_kind: type[Any]) -> set[str]:
    """Return those that its configuration has, that this takes of what else it is given, and that code asks a
    configuration for.

    A word elsewhere, as the name of a variable or in a docstring, reads nothing.
    """
    from transformers import modeling_rope_utils

    plain = config_kind()
    found = {*plain.to_dict(), *getattr(plain, "attribute_map", {}), *vars(plain)}
    sources = {
        sys.modules[model_kind.__module__]: {"config"},
        sys.modules[config_kind.__module__]: {"config", "self", "kwargs"},
        modeling_rope_utils: {"config", "self", "kwargs"},
    }
    for module, owners in sources.items():
        found.update(_asked_of(owners, ast.parse(inspect.getsource(module))))
    return found


def _asked_of(owners: set[str], tree: ast.AST) -> Iterator[str]:
    """What is read of variables or attributes of these names: ``config.key``, ``getattr(config, "key")``,
    ``kwargs.pop("key")``, ``kwargs["key"]``, ``"key" in kwargs``."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=key) if _name(owner) in owners:
                yield key
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[owner, ast.Constant(value=str(key)), *_]) if (
                _name(owner) in owners
            ):
                yield key
            case ast.Call(func=ast.Attribute(value=owner, attr=reader), args=[ast.Constant(value=str(key)), *_]) if (
                reader in _READERS and _name(owner) in owners
            ):
                yield key
            case ast.Subscript(value=owner, slice=ast.Constant(value=str(key))) if _name(owner) in owners:
                yield key
            case ast.Compare(left=ast.Constant(value=str(key)), ops=[ast.In() | ast.NotIn()], comparators=[owner]) if (
                _name(owner) in owners
            ):
                yield key


def _name(owner: ast.expr) -> str:
    """The last word of ``config`` or ``self.config``."""
    return owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
