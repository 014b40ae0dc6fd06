"""Logging on standard error in one format, with the rank in every line, and the request if there is one."""

import contextlib
import datetime
import json
import logging
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, TextIO

from tp_engine.errors import printable
from tp_engine.system import env

LOG_FORMATS = ("text", "json")

_ROOT = "tp_engine"
_MAX_SAID = 256
_said: set[tuple[object, ...]] = set()
_REQUEST: ContextVar[str | None] = ContextVar("request_id", default=None)
_TRACE: ContextVar[str | None] = ContextVar("trace_id", default=None)


def get_logger(name: str) -> logging.Logger:
    """Return the logger of one module; pass ``__name__``."""
    return logging.getLogger(name)


def configure_logging(
    process: str, log_format: str = "text", *, others: Sequence[str] = (), is_first: bool = True
) -> None:
    """Write this library's log to standard error, each line marked with ``process`` (such as ``rank 0``).

    ``log_format`` is one of ``LOG_FORMATS``; ``json`` writes one object per line.  ``others`` are loggers of libraries
    whose warnings and errors get the same format.  ``is_first``: the process speaks for the ranks of its host; the
    others are silent while all goes well, because their lines would be the same, unless the level is ``DEBUG``.  Only
    launchers and the processes that the engine starts call this, because a library must not change the root logger.
    """
    handler = _BesideBars(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else _TextFormatter(process))
    logger = logging.getLogger(_ROOT)
    logger.handlers[:] = [handler]
    level = env.LOG_LEVEL.read().upper()
    logger.setLevel(level if is_first or level != "INFO" else "WARNING")
    logger.propagate = False
    if others:
        beside = _BesideBars(sys.stderr)
        beside.setFormatter(handler.formatter)
        beside.setLevel(logging.WARNING)
        for name in others:
            logging.getLogger(name).handlers[:] = [beside]


def bind_request(request_id: str | None, trace_id: str | None = None) -> None:
    """Let later lines of this asyncio task, and of tasks that it starts, name this request and its trace."""
    _REQUEST.set(request_id)
    if trace_id is not None:
        _TRACE.set(trace_id)


def warn_once(logger: logging.Logger, text: str, *arguments: object) -> None:
    """Log a warning, once per process for the same ``text`` and ``arguments``.  Clients choose arguments, so only the
    first ``_MAX_SAID`` warnings are remembered, and later ones are not logged."""
    if (text, *arguments) not in _said and len(_said) < _MAX_SAID:
        _said.add((text, *arguments))
        logger.warning(text, *arguments)


class _BesideBars(logging.StreamHandler[TextIO]):
    """Standard error; a bar of tqdm that is shown there moves to below the line."""

    def emit(self, record: logging.LogRecord) -> None:
        bars = sys.modules.get("tqdm")
        with contextlib.nullcontext() if bars is None else bars.tqdm.external_write_mode(file=self.stream):
            super().emit(record)


class _TextFormatter(logging.Formatter):
    """``12:34:56 INFO [http] [request abc] message``; no terminal obeys what a client or a library says in it."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s [{process}]%(request)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_of(record)
        record.request = "" if request_id is None else f" [request {request_id}]"
        return printable(super().format(record))


class _JsonFormatter(logging.Formatter):
    """One object per line: ``time``, ``level``, ``process``, ``logger``, ``message``, then, if known,
    ``request_id``, ``trace_id``, ``exception``, and the entries of ``extra={"fields": {...}}``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := _request_of(record)) is not None:
            line["request_id"] = request_id
        if (trace_id := _TRACE.get()) is not None:
            line["trace_id"] = trace_id
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return printable(json.dumps(line | getattr(record, "fields", {}), ensure_ascii=False, default=str))


def _request_of(record: logging.LogRecord) -> str | None:
    """The request that the line names by ``extra={"request_id": ...}``, or else the task's request."""
    named: str | None = getattr(record, "request_id", None)
    return named or _REQUEST.get()
