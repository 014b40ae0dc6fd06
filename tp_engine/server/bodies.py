"""The body of a request, read within its limits, and prepared in a thread if it is large."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from tp_engine.api.bodies import forces_calls, has_image
from tp_engine.api.openai.errors import HttpError
from tp_engine.api.openai.protocol import parse_body
from tp_engine.api.preparing import LARGE
from tp_engine.errors import shown
from tp_engine.server.access import current_caller
from tp_engine.server.body_budget import BODY_ROOM, BodyRoom
from tp_engine.server.replies import until_disconnect
from tp_engine.server.state import ServerState
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

Body = TypeVar("Body", bound=BaseModel)
Result = TypeVar("Result")
_NUM_BYTES = "num_body_bytes"  # of the request, in its scope's state


async def read_body(kind: type[Body], request: Request, state: ServerState) -> Body:
    """The whole body, parsed; raises ``RequestError`` for a bad one, and what ``read_data`` raises."""
    return await parsed(kind, await read_data(request, state), request, state)


async def parsed(kind: type[Body], data: bytearray, request: Request, state: ServerState) -> Body:
    """``parse_body`` of ``data``, in a thread if it is large."""
    request.scope["state"][_NUM_BYTES] = len(data)
    return await parsed_by(partial(parse_body, kind), data, request, state)


async def parsed_by(
    parse: Callable[[bytearray], Result], data: bytearray, request: Request, state: ServerState
) -> Result:
    """``parse(data)``, in a thread if ``data`` is large."""
    if len(data) <= LARGE:
        return parse(data)
    return await until_disconnect(request.receive, state.preparing.parse(len(data), parse, data))


async def in_thread(
    request: Request, state: ServerState, function: Callable[..., Result], *arguments: Any, **named: Any
) -> Result:
    """Call ``function`` in a thread for requests of this size; raises ``ClientGoneError`` if the client leaves first.

    A call whose client leaves before its turn is dropped.  A request whose body, one of the ``arguments``, has images
    waits only for others with images, and one that forces calls only for others that do.
    """
    size: int = request.scope["state"][_NUM_BYTES]
    has_images = state.takes_images and any(map(has_image, arguments))
    forced, client = any(map(forces_calls, arguments)), current_caller().client
    work = state.preparing.run(
        size, function, *arguments, has_images=has_images, forces_calls=forced, client=client, **named
    )
    return await until_disconnect(request.receive, work)


async def read_data(request: Request, state: ServerState) -> bytearray:
    """The whole body, which holds its room until the request ends.

    Raises ``HttpError`` 413 as soon as it is known to be too large, 503 if the bodies of others leave no room, 408 if
    it does not come in time, 415 if it is compressed.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise HttpError(
            415,
            f"the body has the Content-Encoding {shown(encoding)}; send it as plain JSON, without that header",
            code="unsupported_encoding",
        )
    room: BodyRoom = request.scope["state"][BODY_ROOM]
    timeout_s = state.config.body_timeout_s
    try:
        async with room.arriving(timeout_s):
            return await _read(request, room, state.config.max_body_bytes)
    except TimeoutError:
        raise late_body(timeout_s, gave_way=room.gave_way) from None


def late_body(timeout_s: float, *, gave_way: bool = False) -> HttpError:
    """The error for a body that has not come within ``timeout_s``, or that had to give way to others."""
    text = f"the body did not arrive within {timeout_s:g} s"
    if gave_way:
        text = "the body stood still while the bodies of other requests needed room; send it again"
    return HttpError(408, text, code="request_timeout")


async def _read(request: Request, room: BodyRoom, max_body_bytes: int) -> bytearray:
    too_large = HttpError(413, f"the body is larger than {max_body_bytes} bytes", code="body_too_large")
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit():
        if len(announced) > 18 or int(announced) > max_body_bytes:
            raise too_large
        room.announce(int(announced))
    data = bytearray()  # grows in place; joining parts would need their memory twice
    async for part in request.stream():
        if len(data) + len(part) > max_body_bytes:
            raise too_large
        room.grow(len(part))
        data += part
    return data
