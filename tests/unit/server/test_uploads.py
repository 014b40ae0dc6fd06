"""Files that are sent: where they arrive, and what bounds them together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from tests.asgi import App, Reply
from tests.unit.server.test_server_api import error_of, serve
from tp_engine.api.batches.store import BatchStore
from tp_engine.server.config import ServerConfig

CONTENT = b"x" * 5000


async def send(app: App, store: BatchStore, content: bytes = CONTENT) -> Reply:
    app.app.state.batches = SimpleNamespace(store=store)
    parts = (b'name="purpose"\r\n\r\nbatch', b'name="file"; filename="f"\r\n\r\n' + content)
    body = b"".join(b"--cut\r\nContent-Disposition: form-data; " + part + b"\r\n" for part in parts) + b"--cut--\r\n"
    return await app.post("/v1/files", body, **{"content-type": "multipart/form-data; boundary=cut"})


@contextlib.contextmanager
def opened(folder: Path, max_bytes: int) -> Iterator[tuple[BatchStore, ServerConfig]]:
    """A store; nothing is left of what arrived in it."""
    with BatchStore(folder, retention_s=9, max_bytes=max_bytes) as store:
        yield store, ServerConfig(batch_storage_dir=str(folder))
        assert store.arriving_bytes == 0 and not list((folder / "incoming").iterdir())


def test_a_file_arrives_in_the_folder_that_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: its content; the system's temporary folder is not used, which may be memory."""

    async def scenario(app: App) -> None:
        content = CONTENT * 1000
        file = (await send(app, store, content)).json()
        assert file["bytes"] == len(content) and store.content(store.files[file["id"]]).read_bytes() == content

    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("a file of its own")

    with opened(tmp_path, 10**8) as (store, config):
        monkeypatch.setattr("tempfile.SpooledTemporaryFile.rollover", refuse)
        serve(scenario, config=config)


@pytest.mark.parametrize(
    ("asked", "status"), [("bytes=9000-", 416), ("bytes=x-y", 400), ("bytes=4998-", 206), ("lines=1-2", 400), ("", 200)]
)
def test_a_range_that_is_none_is_an_error_as_all_others(tmp_path: Path, asked: str, status: int) -> None:
    """Oracle: RFC 9110: the part, or the error with the file's size; in the form of OpenAI's errors."""

    async def scenario(app: App) -> None:
        file = (await send(app, store)).json()
        reply = await app.start("GET", f"/v1/files/{file['id']}/content", range=asked).reply()
        assert reply.status == status
        if status >= 400:
            assert error_of(reply)["code"] == "invalid_range" and repr(asked) in error_of(reply)["message"]
            assert reply.headers.get("content-range") == ("bytes */5000" if status == 416 else None)
        else:
            assert reply.content == CONTENT[4998 if asked else 0 :]

    with opened(tmp_path, 10**6) as (store, config):
        serve(scenario, config=config)


def test_files_that_arrive_count_together(tmp_path: Path) -> None:
    """Oracle: 429 while others hold what is free, 413 for one that never fits; a smaller one passes."""

    async def scenario(app: App) -> None:
        store.arriving_bytes = 6000
        refused = await send(app, store)
        assert refused.status == 429 and error_of(refused)["code"] == "too_many_uploads"
        assert int(refused.headers["retry-after"]) > 0
        assert (await send(app, store, b"x")).status == 200
        store.arriving_bytes = 0
        assert (await send(app, store)).status == 200
        assert error_of(await send(app, store))["code"] == "file_too_large"

    with opened(tmp_path, 10_000) as (store, config):
        serve(scenario, config=config)


def test_a_full_disk_is_no_fault_of_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: 503 with Retry-After; ``/dev/full`` is a disk that is always full."""

    def full() -> IO[bytes]:
        return open("/dev/full", "r+b", buffering=0)

    async def scenario(app: App) -> None:
        refused = await send(app, store)
        assert refused.status == 503 and error_of(refused)["code"] == "disk_full"
        assert int(refused.headers["retry-after"]) > 0

    with opened(tmp_path, 10**6) as (store, config):
        monkeypatch.setattr(store, "incoming", full)
        serve(scenario, config=config)
