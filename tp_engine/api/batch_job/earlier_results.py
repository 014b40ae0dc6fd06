"""What earlier runs of a job wrote: enough to skip what is done, in little memory."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec

from tp_engine.api.batch_job.custom_ids import CustomIds
from tp_engine.api.batch_job.lines import line_number
from tp_engine.errors import ConfigError


class _Response(msgspec.Struct):
    status_code: int


class _Error(msgspec.Struct):
    message: str


class _WrittenLine(msgspec.Struct):
    """What must be known of a result; the rest of it is skipped."""

    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


class EarlierResults:
    """What earlier runs wrote, at about 17 bytes per line.

    ``answered`` are requests with a result, ``failed`` tells for each whether it is an error; ``refused_lines`` are
    the numbers of lines that were no requests, in no order.
    """

    def __init__(self) -> None:
        self.answered = CustomIds()
        self.failed = bytearray()
        self.refused_lines = array("q")

    def __len__(self) -> int:
        return len(self.failed) + len(self.refused_lines)

    def add(self, path: Path, number: int, text: bytes) -> None:
        """Remember line ``number`` of ``path``; raises ``ConfigError`` unless it is a result.

        The refusal of a duplicate says nothing of the request that came first.
        """
        try:
            line = msgspec.json.decode(text, type=_WrittenLine)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"{str(path)!r} has a line {number} that is no batch result ({error}); give another file"
            ) from None
        if line.response is not None and line.custom_id is not None:
            self.answered.add(line.custom_id)
            self.failed.append(line.error is not None)
        else:
            self.refused_lines.append(line_number(line.id) or 0)
