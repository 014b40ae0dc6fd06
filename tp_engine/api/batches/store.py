"""The folder of files and batches, which outlive the server.

::

    FOLDER/tp_engine.lock                  held by the server that uses the folder; without it, a folder must be empty
    FOLDER/files/FILE/meta.json, content
    FOLDER/batches/BATCH/batch.json        replaced as a whole whenever the state changes
    FOLDER/batches/BATCH/input             a hard link to the content of the input file, which may be deleted
    FOLDER/batches/BATCH/output, errors    result lines, appended; at the end they get names among the files
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from tp_engine.api.batches.objects import Batch, StoredEntry, StoredFile, new_id
from tp_engine.api.openai.errors import HttpError
from tp_engine.errors import ConfigError, RequestError, shown
from tp_engine.system.closing import Closing
from tp_engine.system.files import sync_folder
from tp_engine.system.log import get_logger

logger = get_logger(__name__)

Stored = TypeVar("Stored", bound=StoredEntry)
MaySee = Callable[[str | None], bool]
"""Whether the caller may see what an owner has stored."""
MAX_ENTRIES = 10_000
_LOCK = "tp_engine.lock"
_TEMPORARY = "tp_engine-batches-"
_META, _CONTENT, _BATCH = "meta.json", "content", "batch.json"
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{32}(?:-output|-errors)?")
_NS = 1_000_000_000
RESULTS = {"output": "output_file_id", "errors": "error_file_id"}


class BatchStore(Closing):
    """Files and batches of one folder, which no other server may use.

    ``folder`` None is a temporary one, made for the first file and deleted with the server's end.
    ``retention_s``: how long files are kept by default.  ``max_bytes`` bounds all files together.
    For one thread at a time, but for ``add_file``.
    """

    def __init__(self, folder: Path | None, *, retention_s: int, max_bytes: int) -> None:
        self.retention_s = retention_s
        self.arriving_bytes = 0
        """Bytes of files that have begun to arrive, in ``incoming``."""
        self.files: dict[str, StoredFile] = {}
        self.batches: dict[str, Batch] = {}
        self._writing = threading.Lock()
        self._max_bytes = max_bytes
        self._is_temporary = folder is None
        self._lock: IO[str] | None = None
        self._last_order = 0
        if folder is not None:
            self._open(folder)

    def _open(self, folder: Path) -> None:
        lock = folder / _LOCK
        try:
            if folder.is_dir() and not lock.exists() and any(folder.iterdir()):
                raise ConfigError(
                    f"batch_storage_dir is {str(folder)!r}, which has other files; give an empty or a new folder"
                )
            for name in ("files", "batches", "incoming"):
                (folder / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock.open("w")
        except OSError as error:
            raise ConfigError(f"batch_storage_dir is {str(folder)!r}, which cannot be used: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                f"batch_storage_dir is {str(folder)!r}, which another server uses; give another folder"
            ) from None
        for left in (folder / "incoming").iterdir():
            left.unlink()
        self.files |= _read(folder / "files", _META, StoredFile)
        self.batches |= _read(folder / "batches", _BATCH, Batch)
        self._last_order = max((_order(one) for one in (*self.files.values(), *self.batches.values())), default=0)
        self._folder = folder

    def close(self) -> None:
        """Unlock the folder for other servers; delete a temporary one."""
        if self._lock is not None:
            if self._is_temporary:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()

    @property
    def free_bytes(self) -> int:
        """How many more bytes may be stored, or arrive."""
        return self._max_bytes - self.arriving_bytes - sum(file.bytes for file in self.files.values())

    def check_room(self) -> None:
        """Raise ``HttpError`` 429 if no further file or batch may be stored."""
        for name, entries in (("files", self.files), ("batches", self.batches)):
            if len(entries) >= MAX_ENTRIES:
                raise HttpError(429, f"{MAX_ENTRIES} {name} are stored; delete files", code=f"too_many_{name}")

    def incoming(self) -> IO[bytes]:
        """A new file in the folder, for ``add_file``; deleted when it is closed.  ``HttpError`` 503 if there is
        no folder, and none can be made."""
        with self._writing:
            if self._lock is None:
                try:
                    self._open(_new_temporary_folder())
                except (OSError, ConfigError) as error:
                    text = f"no temporary folder can be made for files ({error}); serve with --batch-storage-dir"
                    raise HttpError(503, text, code="no_storage") from error
        return tempfile.NamedTemporaryFile(dir=self._folder / "incoming")

    def add_file(
        self, content: IO[bytes], filename: str, purpose: str, expires_s: int | None, owner: str | None = None
    ) -> StoredFile:
        """Store a file of ``incoming``, synced to the disk; ``HttpError`` 413 if all files together get too large."""
        content.flush()
        if os.fstat(content.fileno()).st_size > self.free_bytes:
            raise HttpError(413, f"only {self.free_bytes} bytes are free for files; delete some", code="storage_full")
        os.fsync(content.fileno())
        now = int(time.time())
        file = StoredFile(
            id=new_id("file-"),
            bytes=os.fstat(content.fileno()).st_size,
            created_at=now,
            expires_at=now + (self.retention_s if expires_s is None else expires_s),
            filename=filename,
            purpose=purpose,
            owner=owner,
        )
        self._link(file, Path(content.name))
        return file

    def content(self, file: StoredFile) -> Path:
        """The path of a file's content."""
        return self._folder / "files" / file.id / _CONTENT

    def file(self, file_id: str, may_see: MaySee) -> StoredFile:
        """A file; raises ``HttpError`` 404, with the same words for one that the caller may not see."""
        return _found(self.files, file_id, "file", may_see)

    def batch(self, batch_id: str, may_see: MaySee) -> Batch:
        """A batch; raises ``HttpError`` 404 as ``file`` does."""
        return _found(self.batches, batch_id, "batch", may_see)

    def delete_file(self, file: StoredFile) -> None:
        """Delete a file.  Batches that read it keep their link to the content."""
        with contextlib.suppress(FileNotFoundError):  # another request was faster
            shutil.rmtree(self.content(file).parent)
        self.files.pop(file.id, None)

    def add_batch(self, batch: Batch, source: StoredFile) -> None:
        """Store a new batch, whose lines are those of ``source``."""
        batch.order, folder = self._next_order(), self.batch_folder(batch)
        folder.mkdir(mode=0o700)
        os.link(self.content(source), folder / "input")
        self.save(batch)
        self.batches[batch.id] = batch

    def batch_folder(self, batch: Batch) -> Path:
        """The folder of a batch's input and results."""
        return self._folder / "batches" / batch.id

    def save(self, batch: Batch) -> None:
        """Sync the batch's present state to the disk; safe to call from several threads."""
        with self._writing:
            _write_json(self.batch_folder(batch) / _BATCH, batch)

    def keep_results(self, batch: Batch) -> None:
        """Turn a batch's results into files; repeating it, after a kill, changes nothing."""
        now = int(time.time())
        for name, field in RESULTS.items():
            path = self.batch_folder(batch) / name
            if not path.exists() or not (size := path.stat().st_size):
                continue
            file = StoredFile(
                id=f"file-{batch.id.removeprefix('batch_')}-{name}",
                bytes=size,
                created_at=now,
                expires_at=now + batch.retention_s,
                filename=f"{batch.id}_{name}.jsonl",
                purpose="batch_output",
                owner=batch.owner,
            )
            if file.id not in self.files:
                self._link(file, path)
            setattr(batch, field, file.id)

    def forget_expired(self) -> None:
        """Delete expired files, and batches that ended before the retention time."""
        now = time.time()
        for file in [one for one in self.files.values() if one.expires_at is not None and one.expires_at < now]:
            self.delete_file(file)
        for batch in [one for one in self.batches.values() if not one.is_active]:
            if batch.created_at + max(batch.retention_s, self.retention_s) < now:
                shutil.rmtree(self.batch_folder(batch))
                del self.batches[batch.id]

    def _next_order(self) -> int:
        """A number above all earlier ones, also after the clock has been set back."""
        with self._writing:
            self._last_order = max(time.time_ns(), self._last_order + 1)
            return self._last_order

    def _link(self, file: StoredFile, content: Path) -> None:
        file.order = self._next_order()
        folder = self._folder / "files" / file.id
        folder.mkdir(mode=0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):  # after a kill
            os.link(content, folder / _CONTENT)
        _write_json(folder / _META, file)
        self.files[file.id] = file


def _new_temporary_folder() -> Path:
    """A new private folder among the temporary files; deletes those of servers that were killed, whose locks
    nobody holds."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):  # of another user, or in use
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / _LOCK).open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
    return Path(tempfile.mkdtemp(prefix=_TEMPORARY))


def page(entries: Iterable[Stored], *, after: str | None, limit: int, newest_first: bool = True) -> dict[str, object]:
    """A list of ``limit`` entries after the one with the id ``after``, in the form of OpenAI's lists."""
    ordered = sorted(entries, key=_order, reverse=newest_first)
    ids = [one.id for one in ordered]
    if after is not None and after not in ids:
        raise RequestError(f"after is {shown(after)}, which is no id of this list", param="after")
    start = 0 if after is None else ids.index(after) + 1
    data = ordered[start : start + limit]
    return {
        "object": "list",
        "data": [one.shown() for one in data],
        "first_id": data[0].id if data else None,
        "last_id": data[-1].id if data else None,
        "has_more": start + limit < len(ordered),
    }


def _order(entry: StoredEntry) -> int:
    """The place in lists; earlier versions stored only seconds."""
    return entry.order or entry.created_at * _NS


def _found(entries: dict[str, Stored], entry_id: str, kind: str, may_see: MaySee) -> Stored:
    entry = entries.get(entry_id)
    if entry is None or not may_see(entry.owner):
        raise HttpError(404, f"there is no {kind} {shown(entry_id)}", code=f"{kind}_not_found")
    return entry


def _read(folder: Path, name: str, kind: type[Stored]) -> dict[str, Stored]:
    """The entries below ``folder`` by id; one that a kill left without its description is deleted."""
    found = {}
    for place in sorted(folder.iterdir()):
        try:
            found[place.name] = msgspec.json.decode((place / name).read_bytes(), type=kind)
        except FileNotFoundError:
            if _ID.fullmatch(place.name):
                shutil.rmtree(place)
        except (OSError, msgspec.DecodeError) as error:
            logger.error("%s cannot be read (%s); it is left as it is, and not offered", place / name, error)
    return found


def _write_json(path: Path, value: object) -> None:
    """Replace a file atomically, and sync it to the disk."""
    new = path.with_suffix(".new")
    with new.open("wb") as stream:
        stream.write(msgspec.json.encode(value))
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)
    sync_folder(path.parent)
