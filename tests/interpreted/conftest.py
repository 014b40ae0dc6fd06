"""The tests of this folder run Triton's kernels in its interpreter, on a CPU.

Triton reads TRITON_INTERPRET when it is imported, so they have a session of their own, ``pytest tests/interpreted``;
``pytest`` without a path leaves them out, and ``scripts/test`` runs both sessions.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]
os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a session that has other tests too, or one whose plugins have imported Triton."""
    paths = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    others = [path for path in paths if HERE not in (path, *path.parents)]
    if others or "triton" in sys.modules:
        cause = f"not beside {others[0]}" if others else "before anything has imported triton"
        raise pytest.UsageError(f"tests/interpreted runs in a session of its own, {cause}: pytest tests/interpreted")


@pytest.fixture(scope="session", autouse=True)
def interpreter_of_a_device() -> None:
    """Round as a device does, and leave out needless work; skip where Triton's interpreter does not work."""
    if _version("triton") < (3, 7) and _version("numpy") >= (2, 4):
        pytest.skip("the interpreter of Triton before 3.7 cannot loop with numpy from 2.4 on: update one of them")
    from tests.interpreted.interpreter import mend_interpreter

    mend_interpreter()


def _version(package: str) -> tuple[int, int]:
    """Major and minor version of an installed package."""
    major, minor, *_ = metadata.version(package).split(".")
    return int(major), int(minor)
