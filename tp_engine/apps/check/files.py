"""The files of the weights, compared with the checksums in the hub's cache."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tp_engine.apps.check.report import CheckFinding
from tp_engine.errors import ConfigError, WeightError
from tp_engine.model_config.checkpoint_files import weight_files

_SHA256 = re.compile(r"[0-9a-f]{64}")


def check_files(folder: Path) -> CheckFinding:
    """Compare each file with the SHA-256 that the hub gave for it; only the hub's own folders have them."""
    name = "files"
    try:
        paths = weight_files(folder)
    except (ConfigError, WeightError) as error:
        return CheckFinding.wrong(name, str(error), remedy="download the model again")
    known = {path: checksum for path in paths if (checksum := _known_checksum(folder, path)) is not None}
    if not known:
        return CheckFinding.skipped(name, f"no checksums are known of {folder}")
    wrong = [path.name for path, checksum in known.items() if sha256(path) != checksum]
    if not wrong:
        return CheckFinding.right(name, f"{len(known)} of {len(paths)} files have the hub's SHA-256")
    return CheckFinding.wrong(
        name,
        f"{len(wrong)} of {len(known)} files differ from what the hub has",
        place=", ".join(wrong),
        meaning="the weights on this disk are not those of the model: a download that broke, or a disk that fails",
        remedy="delete the files and download them again",
    )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _known_checksum(folder: Path, path: Path) -> str | None:
    """The checksum in the name of the file that a link of the hub's cache points to, or in a local folder's notes."""
    target = path.resolve().name
    if _SHA256.fullmatch(target):
        return target
    note = folder / ".cache" / "huggingface" / "download" / f"{path.name}.metadata"
    try:
        lines = note.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line for line in lines[1:2] if _SHA256.fullmatch(line)), None)
