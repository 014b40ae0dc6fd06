"""What an operator may ask of a running engine, by name: one table.

An act runs on rank 0 between two steps.  What all ranks must do is an order (``worker/orders.py``), which an act sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

from tp_engine.errors import RequestError
from tp_engine.request import StepOutput


class Actor(Protocol):
    """What acts need of ``Engine``, or of a stand-in; see there."""

    def order(self, kind: str, arguments: Mapping[str, Any]) -> dict[str, Any]: ...
    def drained(self) -> list[StepOutput]: ...
    def reset_prefix_cache(self) -> bool: ...
    def configuration(self) -> dict[str, Any]: ...


Arguments: TypeAlias = Mapping[str, Any]
"""By name; msgpack's types, checked by the act."""

Act: TypeAlias = Callable[[Actor, Arguments], dict[str, Any]]
"""Returns what the operator is told; ``RequestError`` if the engine refuses, and then nothing has changed."""


def describe(engine: Actor, _arguments: Arguments) -> dict[str, Any]:
    """The effective ``EngineConfig``, by field."""
    return engine.configuration()


def reset_prefix_cache(engine: Actor, _arguments: Arguments) -> dict[str, Any]:
    """Forget all cached prefixes; refused while requests hold blocks."""
    if not engine.reset_prefix_cache():
        raise RequestError("requests are running; the prefix cache can be reset when none is")
    return {}


def start_profile(engine: Actor, _arguments: Arguments) -> dict[str, Any]:
    """Record the steps of all ranks from now on; the ``folder`` of the traces."""
    return _trace(engine, "start_profile")


def stop_profile(engine: Actor, _arguments: Arguments) -> dict[str, Any]:
    """End the record; the traces are written when this returns."""
    return _trace(engine, "stop_profile")


def _trace(engine: Actor, order: str) -> dict[str, Any]:
    folder = engine.configuration()["profile"]
    if folder is None:
        raise RequestError("there is no folder for traces; start the engine with --profile FOLDER")
    engine.order(order, {})
    return {"folder": folder}


ACTS: dict[str, Act] = {
    "describe": describe,
    "reset_prefix_cache": reset_prefix_cache,
    "start_profile": start_profile,
    "stop_profile": stop_profile,
}


def act(engine: Actor, name: str, arguments: Arguments) -> dict[str, Any]:
    """Do what ``ACTS`` has under ``name``."""
    if name not in ACTS:
        raise RequestError(f"{name!r} is nothing that an engine can do; it can {', '.join(ACTS)}")
    return ACTS[name](engine, arguments)
