"""The routes of OpenAI's files and batches; those of another key are unknown to the caller."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from pydantic import ValidationError
from starlette.datastructures import FormData, Headers
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from tp_engine.api.batches.objects import (
    PURPOSES,
    Batch,
    BatchBody,
    ExpiresAfter,
    StoredFile,
    check_batch_body,
    new_id,
)
from tp_engine.api.batches.store import BatchStore, Stored, page
from tp_engine.api.openai.errors import HttpError
from tp_engine.api.openai.protocol import request_error
from tp_engine.errors import RequestError, shown
from tp_engine.server.access import current_caller
from tp_engine.server.batch_worker import BatchWorker
from tp_engine.server.bodies import read_body
from tp_engine.server.config import NO_BATCHES
from tp_engine.server.openapi import ANSWERS, takes
from tp_engine.server.replies import error_reply
from tp_engine.server.state import ServerState

_MAX_NAME = 255
_MOST_UPLOADS = 32
_RETRY_AFTER_S = 10
_MOST_FILES, _MOST_BATCHES = 10_000, 100


def add_batch_routes(app: FastAPI, state: ServerState) -> None:
    """Add files and batches; all answer 404 without a folder for them."""
    _add_files(app, state)
    _add_batches(app, state)


def _add_files(app: FastAPI, state: ServerState) -> None:
    uploads = asyncio.Semaphore(_MOST_UPLOADS)

    @app.post("/v1/files", responses=ANSWERS)
    async def upload(request: Request) -> Response:
        """Keep a file: a form with ``file``, ``purpose``, and ``expires_after[seconds]``."""
        store = _worker(request, state).store
        store.check_room()
        limit = min(state.config.batch_max_file_bytes, store.free_bytes + store.arriving_bytes)
        if uploads.locked():
            text = f"{_MOST_UPLOADS} files are being sent; try again later"
            raise HttpError(429, text, code="too_many_uploads", retry_after_s=_RETRY_AFTER_S)
        with contextlib.ExitStack() as arrived, _disk_errors():
            async with uploads:
                form = await _FileForm(request, store, arrived).read(limit, state.config.batch_upload_timeout_s)
            sent, purpose, owner = form.get("file"), form.get("purpose"), current_caller().stored_owner
            if sent is None or isinstance(sent, str):
                raise RequestError("the form has no file; send it as the field 'file', with a name", param="file")
            if purpose not in PURPOSES:
                text = f"purpose is {shown(purpose)}; it must be one of {', '.join(PURPOSES)}"
                raise RequestError(text, param="purpose")
            expires_s, name = _expires_s(form), (sent.filename or "file")[:_MAX_NAME]
            kept = await asyncio.to_thread(store.add_file, sent.file, name, purpose, expires_s, owner)
            return _json(kept.shown())

    @app.get("/v1/files", responses=ANSWERS)
    async def files(request: Request) -> Response:
        """List files, newest first; ``after``, ``limit``, ``order``, ``purpose``."""
        purpose, order = request.query_params.get("purpose"), request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestError(f"order is {shown(order)}; it must be asc or desc", param="order")
        seen = [one for one in _seen(_worker(request, state).store.files) if purpose in (None, one.purpose)]
        after, limit = _place(request, _MOST_FILES, _MOST_FILES)
        return _json(page(seen, after=after, limit=limit, newest_first=order == "desc"))

    @app.get("/v1/files/{file_id}", responses=ANSWERS)
    async def file(request: Request, file_id: str) -> Response:
        """What is known of a file."""
        return _json(_file(_worker(request, state), file_id).shown())

    @app.get("/v1/files/{file_id}/content", responses=ANSWERS)
    async def content(request: Request, file_id: str) -> Response:
        """The bytes of a file."""
        worker = _worker(request, state)
        return _Content(worker.store.content(_file(worker, file_id)), media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}", responses=ANSWERS)
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete a file; a batch that reads it continues."""
        worker = _worker(request, state)
        await asyncio.to_thread(worker.store.delete_file, _file(worker, file_id))
        return _json({"id": file_id, "object": "file", "deleted": True})


def _add_batches(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/batches", **takes(BatchBody))
    async def create(request: Request) -> Response:
        """Run the lines of a file beside other requests, with lower priority."""
        worker = _worker(request, state)
        body = await read_body(BatchBody, request, state)
        window_s, now = check_batch_body(body), int(time.time())
        source = _file(worker, body.input_file_id)
        if source.purpose != "batch":
            raise RequestError(
                f"the file {source.id} has the purpose {source.purpose}; send it with the purpose batch",
                param="input_file_id",
            )
        worker.check_room()
        expires = body.output_expires_after
        batch = Batch(
            id=new_id("batch_"),
            endpoint=body.endpoint,
            input_file_id=source.id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + window_s,
            metadata=body.metadata,
            retention_s=worker.store.retention_s if expires is None else expires.seconds,
            owner=current_caller().stored_owner,
        )
        await worker.add(batch, source)
        return _json(batch.shown())

    @app.get("/v1/batches", responses=ANSWERS)
    async def batches(request: Request) -> Response:
        """List batches, newest first; ``after``, ``limit``."""
        after, limit = _place(request, 20, _MOST_BATCHES)
        return _json(page(_seen(_worker(request, state).store.batches), after=after, limit=limit))

    @app.get("/v1/batches/{batch_id}", responses=ANSWERS)
    async def batch(request: Request, batch_id: str) -> Response:
        """The state of a batch."""
        return _json(_batch(_worker(request, state), batch_id).shown())

    @app.post("/v1/batches/{batch_id}/cancel", responses=ANSWERS)
    async def cancel(request: Request, batch_id: str) -> Response:
        """Stop a batch; finished lines are kept."""
        worker = _worker(request, state)
        return _json((await worker.cancel(_batch(worker, batch_id))).shown())


def _worker(request: Request, state: ServerState) -> BatchWorker:
    """Raises ``HttpError`` 404 if this server keeps no files, 503 while the engine loads."""
    if state.config.batch_storage_dir != NO_BATCHES:
        _ = state.healthy_llm()
    worker: BatchWorker | None = getattr(request.app.state, "batches", None)
    if worker is None:
        raise HttpError(
            404, "this server keeps no files and batches; start it with --batch-storage-dir FOLDER", code="not_found"
        )
    return worker


class _Content(FileResponse):
    """A file, or the part that the header Range names; an invalid header is an error like all others."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused: Message | None = None

        async def sending(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] >= 400:
                refused = message
            if refused is None:
                await send(message)

        await super().__call__(scope, receive, sending)
        if refused is not None:
            asked, status = Headers(scope=scope).get("range", ""), refused["status"]
            text = f"the header Range is {shown(asked)}; it must be bytes=FIRST-LAST, within the file"
            reply = error_reply(HttpError(status, text, code="invalid_range"))
            if content_range := Headers(raw=refused["headers"]).get("content-range"):
                reply.headers["Content-Range"] = content_range
            await reply(scope, receive, send)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _seen(entries: Mapping[str, Stored]) -> list[Stored]:
    """The entries that the caller may see."""
    caller = current_caller()
    return [one for one in list(entries.values()) if caller.may_see(one.owner)]


def _file(worker: BatchWorker, file_id: str) -> StoredFile:
    return worker.store.file(file_id, current_caller().may_see)


def _batch(worker: BatchWorker, batch_id: str) -> Batch:
    return worker.store.batch(batch_id, current_caller().may_see)


def _place(request: Request, default: int, most: int) -> tuple[str | None, int]:
    """``after`` and ``limit`` of a list."""
    given = request.query_params.get("limit", str(default))
    if not (given.isascii() and given.isdigit() and len(given) < 9 and 1 <= int(given) <= most):
        raise RequestError(f"limit is {shown(given)}; it must be from 1 to {most}", param="limit")
    return request.query_params.get("after") or None, int(given)


def _expires_s(form: Any) -> int | None:
    given = {name: form.get(f"expires_after[{name}]") for name in ("anchor", "seconds")}
    if not any(given.values()):
        return None
    try:
        seconds = int(given["seconds"] or "")
        return ExpiresAfter(anchor=given["anchor"] or "created_at", seconds=seconds).seconds
    except ValidationError as error:
        raise RequestError(f"expires_after: {request_error(error)}", param="expires_after") from None
    except ValueError:
        raise RequestError(
            f"expires_after[seconds] is {shown(given['seconds'])}; it must be a whole number", param="expires_after"
        ) from None


class _FileForm(MultiPartParser):
    """The form of a body.  Its file arrives in the store's folder, not in the system's temporary one, which may be in
    memory, and is deleted at the end of ``arrived``; what arrives counts as stored."""

    def __init__(self, request: Request, store: BatchStore, arrived: contextlib.ExitStack) -> None:
        kind = request.headers.get("content-type", "")
        if not kind.lower().startswith("multipart/form-data"):
            raise RequestError(f"the body is of type {shown(kind)}; send a form, multipart/form-data", param="file")
        self._request, self._store, self._arrived = request, store, arrived
        self._limit = self._size = 0
        super().__init__(request.headers, self._pieces(), max_files=1, max_fields=16)

    async def read(self, limit: int, timeout_s: float) -> FormData:
        """Read a form of at most ``limit`` bytes."""
        self._limit = limit
        try:
            async with asyncio.timeout(timeout_s):
                return await self.parse()
        except MultiPartException as error:
            raise RequestError(f"the form cannot be read: {error.message}", param="file") from None
        except TimeoutError:
            text = f"the file did not arrive within {timeout_s:g} s"
            raise HttpError(408, text, code="request_timeout") from None
        finally:
            self._store.arriving_bytes -= self._size

    def on_headers_finished(self) -> None:
        super().on_headers_finished()
        if (sent := self._current_part.file) is not None:
            sent.file.close()
            sent.file = self._arrived.enter_context(self._store.incoming())  # type: ignore[assignment]

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        async for piece in self._request.stream():
            self._size += len(piece)
            self._store.arriving_bytes += len(piece)
            if self._size > self._limit:
                text = f"the file is larger than the {self._limit} bytes that fit"
                raise HttpError(413, text, code="file_too_large")
            if self._store.free_bytes < 0:
                text = "the files that are being sent fill what is free; try again later, or delete files"
                raise HttpError(429, text, code="too_many_uploads", retry_after_s=_RETRY_AFTER_S)
            yield piece


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Turn the error of a full disk into ``HttpError`` 503."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        text = "the disk of the server's files is full; try again later"
        raise HttpError(503, text, code="disk_full", retry_after_s=_RETRY_AFTER_S) from error
