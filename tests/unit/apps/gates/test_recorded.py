"""What ``--against`` reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from tp_engine.apps.gates.recorded import read_recorded
from tp_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"{", "--record did not write"),
        (b"\xff", "did not write"),
        (b'"', "did not write"),
        (b"[" * 999, "not write"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_something_else_is_refused(content: bytes | None, told: str, tmp_path: Path) -> None:
    """Oracle: the file by hand; None: there is none."""
    path = tmp_path / "run.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        read_recorded(str(path), dict[str, int], max_bytes=1000)


def test_what_is_no_file_or_too_long_is_refused(tmp_path: Path) -> None:
    """Oracle: a device without an end has size 0; a file of 1,001 bytes is longer than 1,000."""
    with pytest.raises(ConfigError, match=r"'/dev/zero', which cannot be read: it is a (character )?device"):
        read_recorded("/dev/zero", dict[str, int], max_bytes=1000)
    (tmp_path / "run.json").write_bytes(b" " * 1001)
    with pytest.raises(ConfigError, match=r"it has 1,001 bytes, more than 1,000"):
        read_recorded(str(tmp_path / "run.json"), dict[str, int], max_bytes=1000)


def test_a_run_is_read(tmp_path: Path) -> None:
    """Oracle: the file by hand."""
    (tmp_path / "run.json").write_text('{"a": 1}')
    assert read_recorded(str(tmp_path / "run.json"), dict[str, int], max_bytes=1000) == {"a": 1}
