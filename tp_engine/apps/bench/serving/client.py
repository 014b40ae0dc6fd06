"""A light client for streamed completions: HTTP/1.1 over asyncio's streams, one connection per request.

What a server sends is read up to the limits of ``ServerClient``, and checked before it is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from tp_engine.api.server_client import MOST_BYTES, MOST_LINE_BYTES, MOST_STREAM_BYTES, ModelCards, ServerError
from tp_engine.apps.bench.serving.traffic import Request
from tp_engine.errors import shown

# What reading a server's answer may raise.
_WRONG_ANSWERS = (
    *(OSError, ValueError, RecursionError, msgspec.MsgspecError),
    *(asyncio.IncompleteReadError, asyncio.LimitOverrunError),
)
_QUICK_S = 10.0


class _ServerInfo(msgspec.Struct, frozen=True):
    kernel_choices: str


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


_decoded = msgspec.json.Decoder(_Chunk).decode


@dataclass(kw_only=True)
class TimedAnswer:
    """Times in seconds; ``start_time`` is on this process's clock.  ``itl`` are the gaps between chunks."""

    prompt_len: int
    start_time: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_tokens: int = 0
    success: bool = False
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The address of the requests, and the fields of every body besides its prompt."""

    base_url: str
    endpoint: str
    model: str
    api_key: str | None = None
    timeout_s: float = 600.0
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def body(self, request: Request) -> dict[str, Any]:
        """The JSON of one request."""
        common = {"model": self.model, "max_tokens": request.max_tokens, "stream": True, **self.extra_body}
        common["stream_options"] = {"include_usage": True}
        if not self.endpoint.endswith("/chat/completions"):
            return common | {"prompt": request.prompt}
        if not isinstance(request.prompt, str):
            raise SystemExit("the chat endpoint takes text; give --dataset-path, or use /v1/completions")
        return common | {"messages": [{"role": "user", "content": request.prompt}]}


async def send_all(
    target: Target, requests: Sequence[Request], times: Sequence[float], max_concurrency: int | None
) -> tuple[list[TimedAnswer], float]:
    """Send each request at its time, even if earlier ones still run; returns the answers and the total time."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    started = time.perf_counter()

    async def one(request: Request, at_s: float) -> TimedAnswer:
        await asyncio.sleep(max(0.0, started + at_s - time.perf_counter()))
        async with gate:
            return await ask(target, request)

    answers = await asyncio.gather(*(one(request, at_s) for request, at_s in zip(requests, times, strict=True)))
    return answers, time.perf_counter() - started


async def ask(target: Target, request: Request) -> TimedAnswer:
    """Send one request; the answer holds the error, if any."""
    prompt_len = len(request.prompt) if isinstance(request.prompt, list) else 0
    answer = TimedAnswer(prompt_len=prompt_len, start_time=time.perf_counter())
    try:
        async with asyncio.timeout(target.timeout_s):
            await _ask(target, target.body(request), answer)
        answer.success = answer.ttft > 0.0
        answer.error = "" if answer.success else "no token came"
    except TimeoutError:
        answer.error = f"no end within {target.timeout_s:g} s"
    except _WRONG_ANSWERS as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def first_model(target: Target) -> str:
    """The name of the server's first model; raises ``ServerError``."""
    path = "/v1/models"
    try:
        async with asyncio.timeout(target.timeout_s), _exchange(target, "GET", path, b"") as (status, body):
            text = b"".join([part async for part in body])
        if status != 200:
            raise ServerError(f"HTTP {status} for {path}: {text[:200].decode(errors='replace')}", status)
        cards = msgspec.json.decode(text, type=ModelCards).data
    except _WRONG_ANSWERS as error:
        raise ServerError(f"{target.base_url}{path} cannot be read: {error or type(error).__name__}") from error
    if not cards:
        raise ServerError(f"{target.base_url} has no model")
    return cards[0].id


async def kernel_choices(target: Target) -> str | None:
    """The word for the server's choices of kernels; None if it says none, as other engines' do."""
    try:
        async with asyncio.timeout(_QUICK_S), _exchange(target, "GET", "/server_info", b"") as (_, body):
            return msgspec.json.decode(b"".join([part async for part in body]), type=_ServerInfo).kernel_choices
    except (TimeoutError, *_WRONG_ANSWERS):
        return None


async def _ask(target: Target, body: dict[str, Any], answer: TimedAnswer) -> None:
    payload = json.dumps(body).encode()
    async with _exchange(target, "POST", target.endpoint, payload) as (status, parts):
        if status != 200:
            text = b"".join([part async for part in parts])
            raise ValueError(f"HTTP {status}: {text[:200].decode(errors='replace')}")
        last = answer.start_time
        async for event in _events(parts):
            if event == "[DONE]":
                continue
            chunk = _decoded(event)
            if chunk.error is not None:
                raise ValueError(f"error in the stream: {shown(chunk.error, 200)}")
            if chunk.usage is not None:
                answer.output_tokens = chunk.usage.completion_tokens
                answer.prompt_len = chunk.usage.prompt_tokens
            if _has_token(chunk):
                now = time.perf_counter()
                if answer.ttft:
                    answer.itl.append(now - last)
                else:
                    answer.ttft = now - answer.start_time
                last = now
        answer.latency = last - answer.start_time
        answer.output_tokens = answer.output_tokens or len(answer.itl) + 1


def _has_token(chunk: _Chunk) -> bool:
    """Whether a chunk holds a part of the answer; the final usage and a chat's first role do not count."""
    if not chunk.choices:
        return False
    first = chunk.choices[0]
    return first.delta is None or bool(first.delta.content or first.token_ids or first.finish_reason)


async def _events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of server-sent events; comments are left out."""
    rest = b""
    async for part in parts:
        if len(rest) > MOST_LINE_BYTES:
            raise ValueError(f"a line has more than {MOST_LINE_BYTES:,} bytes")
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode()


@contextlib.asynccontextmanager
async def _exchange(
    target: Target, method: str, path: str, payload: bytes
) -> AsyncIterator[tuple[int, AsyncIterator[bytes]]]:
    """Send one request on a new connection; yields the status and the parts of the body."""
    url = urlsplit(target.base_url)
    tls = url.scheme == "https"
    port = url.port or (443 if tls else 80)
    reader, writer = await asyncio.open_connection(url.hostname, port, ssl=tls or None)
    try:
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        writer.write(
            f"{method} {url.path.rstrip('/')}{path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n{key}"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        yield int(head[0].partition(" ")[2][:3]), _body(reader, headers)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
    """The body as it arrives: chunked, of a known length, or up to the end of the connection."""
    num_bytes = 0
    if headers.get("transfer-encoding") == "chunked":
        while size := int((await reader.readline()).split(b";")[0], 16):
            num_bytes += _checked_size(size, MOST_LINE_BYTES)
            _checked_size(num_bytes, MOST_STREAM_BYTES)
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in headers:
        yield await reader.readexactly(_checked_size(int(headers["content-length"]), MOST_BYTES))
    else:
        while part := await reader.read(1 << 16):
            num_bytes = _checked_size(num_bytes + len(part), MOST_STREAM_BYTES)
            yield part


def _checked_size(num_bytes: int, most: int) -> int:
    if num_bytes > most:
        raise ValueError(f"the answer has more than {most:,} bytes")
    return num_bytes
