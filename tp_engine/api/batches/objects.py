"""Files and batches, as OpenAI's API has them and as they are stored."""

from __future__ import annotations

import re
import secrets
from typing import Any

import msgspec
from pydantic import Field

from tp_engine.api.batch_file.endpoints import ENDPOINTS
from tp_engine.api.openai.protocol import RequestBody
from tp_engine.api.openai.responses_api.protocol import Metadata
from tp_engine.errors import RequestError, shown

MAX_LINES = 50_000
PURPOSES = ("batch", "batch_output", "assistants", "fine-tune", "vision", "user_data", "evals")
SHORTEST_EXPIRY_S, LONGEST_EXPIRY_S = 3600, 30 * 24 * 3600
# States that end by themselves, and final ones.
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
ENDED = ("completed", "failed", "expired", "cancelled")
_KEPT_BACK = ("owner", "order", "retention_s")

_WINDOW = re.compile(r"([1-9]\d{0,3})([hd])")
_SECONDS = {"h": 3600, "d": 24 * 3600}
_LONGEST_WINDOW_S = 30 * 24 * 3600


def new_id(kind: str) -> str:
    """A fresh id: ``file-...`` or ``batch_...``."""
    return f"{kind}{secrets.token_hex(16)}"


class StoredEntry(msgspec.Struct, kw_only=True):
    """A file or a batch; ``created_at`` and other times are seconds since 1970.

    Not shown to clients: ``owner``, the digest of the key that made it, None without one, and ``order``, which grows
    from one entry to the next also within a second.
    """

    id: str
    created_at: int
    owner: str | None = None
    order: int = 0

    def shown(self) -> dict[str, Any]:
        """What clients see."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {name: value for name, value in fields.items() if name not in _KEPT_BACK}


class StoredFile(StoredEntry, kw_only=True):
    """A file that a client sent, or the results of a batch."""

    object: str = "file"
    bytes: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: str | None = None


class RequestCounts(msgspec.Struct, kw_only=True):
    """Lines of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchErrors(msgspec.Struct, kw_only=True):
    """Why nothing of a batch was run."""

    object: str = "list"
    data: list[dict[str, Any]]


class Batch(StoredEntry, kw_only=True):
    """One batch; ``retention_s`` is how long its results are kept."""

    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    retention_s: int

    @property
    def is_active(self) -> bool:
        """Whether its state will change by itself."""
        return self.status in ACTIVE

    def enter(self, status: str, now: int) -> None:
        """Change the state, and note when."""
        self.status = status
        setattr(self, f"{status}_at", now)


class ExpiresAfter(RequestBody):
    """How long a file is kept."""

    anchor: str = "created_at"
    seconds: int = Field(ge=SHORTEST_EXPIRY_S, le=LONGEST_EXPIRY_S)


class BatchBody(RequestBody):
    """``POST /v1/batches``."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


def check_batch_body(body: BatchBody) -> int:
    """Raise ``RequestError`` unless ``body`` can be served; return its window in seconds."""
    if body.endpoint not in ENDPOINTS:
        raise RequestError(
            f"endpoint is {shown(body.endpoint)}; it must be one of {', '.join(ENDPOINTS)}", param="endpoint"
        )
    found = _WINDOW.fullmatch(body.completion_window)
    window_s = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < window_s <= _LONGEST_WINDOW_S:
        raise RequestError(
            f"completion_window is {shown(body.completion_window)}; it must be hours or days, at most 30d, such as 24h",
            param="completion_window",
        )
    return window_s
