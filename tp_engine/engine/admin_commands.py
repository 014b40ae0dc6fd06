"""What an operator may ask of a running engine, by name: one table.

An act runs on rank 0 between two steps, with arguments by name.  It returns what the operator is told; ``RequestError``
if the engine refuses, and then nothing has changed.  What all ranks must do is an order (``worker/orders.py``), which
an act sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tp_engine.errors import RequestError, shown
from tp_engine.features.registry import commands

if TYPE_CHECKING:
    from tp_engine.engine.admin import EngineAdmin

PAUSE_MODES = ("keep", "abort")
SLEEP_LEVELS = (0, 1)
WAKE_TAGS = ("weights", "kv_cache", "scheduling")
FIRST_VERSION = "default"
"""What the weights of the start are called."""


def describe(engine: EngineAdmin) -> dict[str, Any]:
    """Return the effective ``EngineConfig``, by field."""
    return engine.configuration()


def reset_prefix_cache(
    engine: EngineAdmin, *, reset_running_requests: bool = False, reset_external: bool = True
) -> dict[str, Any]:
    """Forget all cached prefixes; refused while requests hold blocks, unless these are to be computed again, and where
    a host tier would have to keep its own."""
    was_paused = engine.is_paused
    if not reset_external and engine.configuration()["kv_offloading_size"]:
        raise RequestError("reset_external is false; the prefixes of the host tier are forgotten too: leave it out")
    if reset_running_requests:
        engine.pause(abort_running=False)
    was_reset = engine.reset_prefix_cache()
    if reset_running_requests and not was_paused:
        engine.resume()
    if not was_reset:
        raise RequestError("requests are running; the prefix cache can be reset when none is")
    return {}


def reset_mm_cache(engine: EngineAdmin) -> dict[str, Any]:
    """Forget all embeddings of images, while requests run too: those that they need are encoded again."""
    engine.reset_mm_cache()
    return {}


def start_profile(engine: EngineAdmin) -> dict[str, Any]:
    """Record the steps of all ranks from now on; returns the ``folder`` of the traces."""
    return _trace(engine, "start_profile")


def stop_profile(engine: EngineAdmin) -> dict[str, Any]:
    """End the record; the traces are written when this returns."""
    return _trace(engine, "stop_profile")


def _trace(engine: EngineAdmin, order: str) -> dict[str, Any]:
    folder = engine.configuration()["profile"]
    if folder is None:
        raise RequestError("there is no folder for traces; start the engine with --profile FOLDER")
    engine.order(order, {})
    return {"folder": folder}


def pause(engine: EngineAdmin, mode: str = "keep") -> dict[str, Any]:
    """Run nothing until ``resume``.  ``mode`` ``keep``: requests wait, and are computed again; ``abort``: they end."""
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode is {mode!r}; it must be one of {', '.join(PAUSE_MODES)}", param="mode")
    engine.pause(abort_running=mode == "abort")
    return {"is_paused": True}


def resume(engine: EngineAdmin) -> dict[str, Any]:
    """Go on after ``pause``."""
    if engine.is_asleep:
        raise RequestError("the engine sleeps and has no KV cache: resume is not enough, wake it up with wake_up")
    engine.resume()
    return {"is_paused": False}


def weight_info(engine: EngineAdmin) -> dict[str, Any]:
    """Return which weights and kernels the engine has, and whether it is paused."""
    return {
        "weight_version": engine.weight_version or FIRST_VERSION,
        "kernel_choices": engine.kernel_choices,
        "is_paused": engine.is_paused,
        "is_sleeping": engine.is_asleep,
    }


def sleep(engine: EngineAdmin, level: int = 1) -> dict[str, Any]:
    """``pause`` with ``keep``; at ``level`` 1 also forget all cached prefixes, and free the KV cache on all ranks."""
    was_paused = engine.is_paused
    if level not in SLEEP_LEVELS:
        raise RequestError(
            f"level is {level!r}; it must be 0 or 1: the weights stay, and update_weights replaces them", param="level"
        )
    engine.pause(abort_running=False)
    if level == 1 and not engine.is_asleep:
        try:
            engine.order("sleep", {})
        except RequestError:
            if not was_paused:
                engine.resume()
            raise
        engine.reset_prefix_cache()
        engine.is_asleep = True
    return {"is_sleeping": True}


def wake_up(engine: EngineAdmin, tags: Sequence[str] | None = None) -> dict[str, Any]:
    """Take the memory of the KV cache again, and go on; with ``tags`` only what they name.

    The weights have not slept, so the engine goes on when ``kv_cache`` is among them; ``scheduling`` alone is for a
    sleep at level 0.
    """
    named = WAKE_TAGS if tags is None else tuple(tags)
    if wrong := [tag for tag in named if tag not in WAKE_TAGS]:
        raise RequestError(f"tags has {shown(wrong[0])}; it must be some of {', '.join(WAKE_TAGS)}", param="tags")
    if engine.is_asleep and "kv_cache" not in named:
        if "scheduling" in named:
            raise RequestError("the KV cache sleeps; nothing can run without it: add kv_cache to tags", param="tags")
        return {"is_sleeping": True}
    if engine.is_asleep:
        engine.order("wake_up", {})
        engine.is_asleep = False
    if {"kv_cache", "scheduling"} & {*named}:
        engine.resume()
    return {"is_sleeping": False}


def update_weights(
    engine: EngineAdmin,
    *,
    abort_all_requests: bool = False,
    weight_version: str | None = None,
    flush_cache: bool = False,
    **source: Any,
) -> dict[str, Any]:
    """New weights on all ranks or on none (``worker/weight_update.py``), from a ``folder`` or from shared ``files``.
    Refused while requests run or wait, unless the engine is paused; ``abort_all_requests`` ends them first.
    ``flush_cache`` frees the blocks of the old weights, which are not found any more anyway."""
    was_paused = engine.is_paused
    if abort_all_requests:
        engine.pause(abort_running=True)
    elif engine.has_requests and not was_paused:
        raise RequestError(
            "requests are running, and their K/V belong to the old weights; pause the engine before the update, or "
            "let it abort all requests"
        )
    try:
        engine.order("update_weights", {name: given for name, given in source.items() if given})
    finally:
        if not was_paused:
            engine.resume()
    engine.weights_changed(weight_version)
    if flush_cache:
        engine.reset_prefix_cache()
    return {"weight_version": engine.weight_version}


def check_integrity(engine: EngineAdmin) -> dict[str, Any]:
    """Assert that all blocks of the KV pool are accounted for."""
    engine.check_integrity()
    return {}


def memory_growth(engine: EngineAdmin) -> dict[str, Any]:
    """Return the ``num_bytes`` of device memory that rank 0 has taken since it became ready, without the KV cache."""
    return {"num_bytes": engine.memory_growth_bytes()}


def watch_layers(engine: EngineAdmin, folder: str | None = None) -> dict[str, Any]:
    """Make all ranks keep what their layers compute from now on; with ``folder``, write there what they have kept."""
    return engine.order("watch_layers", {} if folder is None else {"folder": folder})


def flight_record(engine: EngineAdmin) -> dict[str, Any]:
    """Return what a flight record would say now, with the last steps of all ranks."""
    return engine.record()


ADMIN_COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    act.__name__: act
    for act in (
        describe, pause, resume, sleep, wake_up, update_weights, weight_info, reset_prefix_cache, reset_mm_cache,
        start_profile, stop_profile, check_integrity, memory_growth, watch_layers, flight_record,
    )
}  # fmt: skip


def act(engine: EngineAdmin, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Run the command ``name`` of ``ADMIN_COMMANDS``, or of a feature."""
    known = ADMIN_COMMANDS if name in ADMIN_COMMANDS else ADMIN_COMMANDS | commands()
    if name not in known:
        raise RequestError(f"{name!r} is nothing that an engine can do; it can {', '.join(known)}")
    return known[name](engine, **arguments)
