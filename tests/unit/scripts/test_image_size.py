"""The size of the image for CPUs: how its Dockerfile is read, and how a folder is counted."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from lib.image_size import DOCKERFILE, STAGES, sizes_mb, steps_of

from tests.deployed import dockerfile


def test_the_steps_are_those_of_the_dockerfile() -> None:
    """Oracle: the other reader of the file; both stages that make the packages have steps to run."""
    steps = steps_of(DOCKERFILE.read_text(encoding="utf-8"))
    assert [(step.word, step.arguments) for step in steps] == dockerfile()
    for stage in STAGES:
        assert any("pip" in step.arguments for step in steps if (step.stage, step.word) == (stage, "RUN"))


def test_a_folder_is_counted_as_a_layer(tmp_path: Path) -> None:
    """Oracle: tarfile and gzip; a link has no size of its own, and noise does not become smaller."""
    (tmp_path / "noise").write_bytes(os.urandom(1 << 20))
    (tmp_path / "zeros").write_bytes(bytes(1 << 20))
    (tmp_path / "link").symlink_to("noise")
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        archive.add(tmp_path, arcname="x")
    disk, download = sizes_mb(tmp_path)
    assert 1.04 < disk < 2.2
    assert download == pytest.approx(len(gzip.compress(whole.getvalue(), 6)) / 1e6, rel=0.01)
