"""What an operator may ask of a running engine, by name: one table.

An act runs on rank 0 between two steps.  What all ranks must do is an order (``worker/orders.py``), which an act sends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from tp_engine.errors import RequestError
from tp_engine.sched.lora import LoRASlots

if TYPE_CHECKING:
    from tp_engine.engine.admin import EngineAdmin

PAUSE_MODES = ("keep", "abort")
SLEEP_LEVELS = (0, 1)
FIRST_VERSION = "default"
"""What the weights of the start are called."""


Arguments: TypeAlias = Mapping[str, Any]
"""By name; msgpack's types, checked by the act."""

Act: TypeAlias = "Callable[[EngineAdmin, Arguments], dict[str, Any]]"
"""Returns what the operator is told; ``RequestError`` if the engine refuses, and then nothing has changed."""


def describe(engine: EngineAdmin, _arguments: Arguments) -> dict[str, Any]:
    """Return the effective ``EngineConfig``, by field."""
    return engine.configuration()


def reset_prefix_cache(engine: EngineAdmin, _arguments: Arguments) -> dict[str, Any]:
    """Forget all cached prefixes; refused while requests hold blocks."""
    if not engine.reset_prefix_cache():
        raise RequestError("requests are running; the prefix cache can be reset when none is")
    return {}


def reset_mm_cache(engine: EngineAdmin, _arguments: Arguments) -> dict[str, Any]:
    """Forget all embeddings of images, while requests run too: those that they need are encoded again."""
    engine.reset_mm_cache()
    return {}


def start_profile(engine: EngineAdmin, _arguments: Arguments) -> dict[str, Any]:
    """Record the steps of all ranks from now on; the ``folder`` of the traces."""
    return _trace(engine, "start_profile")


def stop_profile(engine: EngineAdmin, _arguments: Arguments) -> dict[str, Any]:
    """End the record; the traces are written when this returns."""
    return _trace(engine, "stop_profile")


def _trace(engine: EngineAdmin, order: str) -> dict[str, Any]:
    folder = engine.configuration()["profile"]
    if folder is None:
        raise RequestError("there is no folder for traces; start the engine with --profile FOLDER")
    engine.order(order, {})
    return {"folder": folder}


def pause(engine: EngineAdmin, arguments: Arguments) -> dict[str, Any]:
    """Run nothing until ``resume``.  ``mode`` ``keep``: requests wait, and are computed again; ``abort``: they end."""
    mode = arguments.get("mode", "keep")
    if mode not in PAUSE_MODES:
        raise RequestError(f"mode is {mode!r}; it must be one of {', '.join(PAUSE_MODES)}", param="mode")
    engine.pause(abort_running=mode == "abort")
    return {"is_paused": True}


def resume(engine: EngineAdmin, _arguments: Arguments) -> dict[str, Any]:
    """Go on after ``pause``."""
    if engine.is_asleep:
        raise RequestError("the engine sleeps and has no KV cache: resume is not enough, wake it up with wake_up")
    engine.resume()
    return {"is_paused": False}


def weight_info(engine: EngineAdmin, _arguments: Arguments) -> dict[str, Any]:
    """Return which weights the engine has, and whether it is paused."""
    version = engine.weight_version or FIRST_VERSION
    return {"weight_version": version, "is_paused": engine.is_paused, "is_sleeping": engine.is_asleep}


def sleep(engine: EngineAdmin, arguments: Arguments) -> dict[str, Any]:
    """``pause`` with ``keep``; at ``level`` 1 also forget all cached prefixes, and free the KV cache on all ranks."""
    level, was_paused = arguments.get("level", 1), engine.is_paused
    if level not in SLEEP_LEVELS:
        raise RequestError(f"level is {level!r}; it must be 0 or 1: the weights stay", param="level")
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


def wake_up(engine: EngineAdmin, _arguments: Arguments) -> dict[str, Any]:
    """Take the memory of the KV cache again, and go on."""
    if engine.is_asleep:
        engine.order("wake_up", {})
        engine.is_asleep = False
    engine.resume()
    return {"is_sleeping": False}


def update_weights(engine: EngineAdmin, arguments: Arguments) -> dict[str, Any]:
    """New weights on all ranks or on none (``worker/weight_update.py``), from a ``folder`` or from shared ``files``.
    Refused while requests run or wait, unless the engine is paused; ``abort_all_requests`` ends them first.
    ``flush_cache`` frees the blocks of the old weights, which are not found any more anyway."""
    was_paused = engine.is_paused
    if arguments.get("abort_all_requests"):
        engine.pause(abort_running=True)
    elif engine.has_requests and not was_paused:
        raise RequestError(
            "requests are running, and their K/V belong to the old weights; pause the engine before the update, or "
            "let it abort all requests"
        )
    try:
        engine.order("update_weights", {name: arguments[name] for name in ("folder", "files") if arguments.get(name)})
    finally:
        if not was_paused:
            engine.resume()
    engine.weights_changed(arguments.get("weight_version"))
    if arguments.get("flush_cache"):
        engine.reset_prefix_cache()
    return {"weight_version": engine.weight_version}


def load_lora_adapter(engine: EngineAdmin, arguments: Arguments) -> dict[str, Any]:
    """Load the adapter in the folder ``path`` under ``name``; ``replaces`` one that has the name.  Requests that came
    before keep what they had.  The ``num_bytes`` that rank 0 keeps of it on the host."""
    adapters, name = _adapters(engine), arguments["name"]
    if name in adapters and not arguments.get("replaces"):
        raise RequestError(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True.",
            param="lora_name",
        )
    generation = adapters.new_generation()
    result = engine.order("load_lora_adapter", {"path": arguments["path"], "generation": generation})
    adapters.add(name, generation)
    return result


def unload_lora_adapter(engine: EngineAdmin, arguments: Arguments) -> dict[str, Any]:
    """Forget the adapter ``name``; requests that have it still end with it."""
    adapters, name = _adapters(engine), arguments["name"]
    adapters.check_loaded(name)
    adapters.retire(name)
    return {}


def _adapters(engine: EngineAdmin) -> LoRASlots:
    if engine.adapters is None:
        raise RequestError("this engine takes no adapters; start it with --enable-lora")
    return engine.adapters


ADMIN_COMMANDS: dict[str, Act] = {
    "describe": describe,
    "pause": pause,
    "resume": resume,
    "sleep": sleep,
    "wake_up": wake_up,
    "update_weights": update_weights,
    "weight_info": weight_info,
    "reset_prefix_cache": reset_prefix_cache,
    "reset_mm_cache": reset_mm_cache,
    "start_profile": start_profile,
    "stop_profile": stop_profile,
    "load_lora_adapter": load_lora_adapter,
    "unload_lora_adapter": unload_lora_adapter,
}


def act(engine: EngineAdmin, name: str, arguments: Arguments) -> dict[str, Any]:
    """Do what ``ADMIN_COMMANDS`` has under ``name``."""
    if name not in ADMIN_COMMANDS:
        raise RequestError(f"{name!r} is nothing that an engine can do; it can {', '.join(ADMIN_COMMANDS)}")
    return ADMIN_COMMANDS[name](engine, arguments)
