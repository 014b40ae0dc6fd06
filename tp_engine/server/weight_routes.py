"""Routes for trainers: new weights, their version, and pauses, in vLLM's and SGLang's spellings."""

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from tp_engine.api.openai.protocol import RequestBody
from tp_engine.errors import RequestError
from tp_engine.server.bodies import read_body
from tp_engine.server.openapi import ANSWERS, takes
from tp_engine.server.query import SWITCH, query_choice
from tp_engine.server.replies import json_reply
from tp_engine.server.state import ServerState

_SLEEP_LEVELS = {"0": 0, "1": 1}


class UpdateFromDiskBody(RequestBody):
    """``POST /update_weights_from_disk``, by SGLang's names."""

    model_path: str = Field(min_length=1)
    load_format: Literal["auto", "safetensors"] | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    weight_version: str | None = Field(None, min_length=1, max_length=256)


class PauseBody(RequestBody):
    """``POST /pause_generation``, by SGLang's names."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


def add_weight_routes(admin: APIRouter, state: ServerState) -> None:
    """Add ``/update_weights_from_disk``, ``/weight_info``, ``/pause``, ``/resume`` and the like."""
    _add_updates(admin, state)
    _add_pauses(admin, state)


def _add_updates(admin: APIRouter, state: ServerState) -> None:
    @admin.post("/update_weights_from_disk", **takes(UpdateFromDiskBody))
    async def update_weights_from_disk(request: Request) -> Response:
        """Replace the weights, on all ranks or on none, from a folder that all ranks can read."""
        body = await read_body(UpdateFromDiskBody, request, state)
        state.model_dirs.check(body.model_path, "model_path")
        version = await state.llm.update_weights_from_disk(
            body.model_path,
            weight_version=body.weight_version,
            flush_cache=body.flush_cache,
            abort_running=body.abort_all_requests,
        )
        message = f"all ranks have the weights of {body.model_path}"
        return json_reply({"success": True, "message": message, "weight_version": version})

    @admin.get("/weight_info", responses=ANSWERS)
    async def weight_info() -> Response:
        """The version of the weights, and whether the engine is paused."""
        return json_reply(await state.llm.weight_info())


def _add_pauses(admin: APIRouter, state: ServerState) -> None:
    async def paused(mode: str, *, clears: bool) -> Response:
        await state.llm.pause(mode)
        if clears:
            await state.llm.engine.act("reset_prefix_cache")
        return json_reply({"status": "paused"})

    @admin.post("/pause", responses=ANSWERS)
    async def pause(request: Request) -> Response:
        """Run nothing until ``/resume``.

        ``?mode=``: running requests are aborted (``abort``), finish first (``wait``), or are computed again later
        (``keep``).  Unless ``clear_cache=false``, cached prefixes are forgotten.  ``wait_for_inflight_requests=true``
        is a former name of ``mode=wait``.
        """
        clears = query_choice(request, "clear_cache", SWITCH, "true")
        waits = query_choice(request, "wait_for_inflight_requests", SWITCH, "false")
        return await paused(request.query_params.get("mode", "wait" if waits else "abort"), clears=clears)

    @admin.post("/pause_generation", **takes(PauseBody))
    async def pause_generation(request: Request) -> Response:
        """Pause, by SGLang's names: ``retract`` is the ``keep`` of ``/pause``."""
        body = await read_body(PauseBody, request, state)
        if body.mode == "in_place":
            raise RequestError(
                "mode is 'in_place', which would go on with K/V of the old weights; send retract, and they are "
                "computed again",
                param="mode",
            )
        return await paused("abort" if body.mode == "abort" else "keep", clears=False)

    @admin.post("/resume", responses=ANSWERS)
    async def resume() -> Response:
        """Resume after a pause."""
        await state.llm.resume()
        return json_reply({"status": "resumed"})

    @admin.post("/continue_generation", responses=ANSWERS)
    async def continue_generation() -> Response:
        """Resume after a pause, by SGLang's name."""
        return await resume()

    @admin.post("/sleep", responses=ANSWERS)
    async def sleep(request: Request) -> Response:
        """Pause with ``mode=keep``; with ``?level=1`` (the default) also free the memory of the KV cache.

        Another ``?mode=`` of ``/pause`` is applied first.
        """
        level = query_choice(request, "level", _SLEEP_LEVELS, "1")
        if (mode := request.query_params.get("mode")) is not None:
            await state.llm.pause(mode)
        await state.llm.sleep(level)
        return json_reply({"is_sleeping": True})

    @admin.post("/wake_up", responses=ANSWERS)
    async def wake_up(request: Request) -> Response:
        """Resume after ``/sleep``: all, or only what ``?tags=`` names; it may be repeated.

        ``weights`` never sleep; ``kv_cache`` takes its memory again and resumes; ``scheduling`` resumes after a sleep
        at level 0.
        """
        tags = request.query_params.getlist("tags") or None
        return json_reply({"is_sleeping": await state.llm.wake_up(tags)})

    @admin.get("/is_sleeping", responses=ANSWERS)
    async def is_sleeping() -> Response:
        """Whether there is no KV cache."""
        return json_reply({"is_sleeping": (await state.llm.weight_info())["is_sleeping"]})

    @admin.get("/is_paused", responses=ANSWERS)
    async def is_paused() -> Response:
        """Whether the engine is paused."""
        return json_reply({"is_paused": (await state.llm.weight_info())["is_paused"]})
