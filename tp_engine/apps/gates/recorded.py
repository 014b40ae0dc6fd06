"""Files that ``--record`` wrote, and ``--against`` reads."""

from pathlib import Path
from typing import TypeVar

import msgspec

from tp_engine.errors import ConfigError
from tp_engine.system.files import read_bytes

Run = TypeVar("Run")


def read_recorded(path: str, kind: type[Run], *, max_bytes: int) -> Run:
    """Return the run in ``path``, a file of at most ``max_bytes``; raises ``ConfigError``."""
    try:
        return msgspec.json.decode(read_bytes(Path(path), max_bytes), type=kind)
    except OSError as error:
        raise ConfigError(f"against is {path!r}, which cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"against is {path!r}, which --record did not write: {error}") from error
