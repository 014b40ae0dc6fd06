"""The list of expected skips: separate pytest runs, with and without xdist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TESTS = """
import pytest

@pytest.mark.skipif(True, reason="needs a GPU")
@pytest.mark.parametrize("number", [1, 2])
def test_gpu(number): pass

def test_odd(): pytest.skip("no odd thing here")

def test_good(): pass
"""
WHOLE_FILE = "import pytest\npytest.importorskip('there_is_no_such_package')\ndef test_it(): pass\n"
EXPECTED = "# a comment\n\ntest_some.py* | needs a GPU | no GPU in CI\n"


def run(folder: Path, expected: str, *arguments: str) -> tuple[int, str]:
    """Exit code and output of pytest with two files of tests."""
    (folder / "test_some.py").write_text(TESTS)
    (folder / "test_whole.py").write_text(WHOLE_FILE)
    (folder / "expected.txt").write_text(expected)
    (folder / "pytest.ini").write_text("[pytest]\n")
    # Plugins that these tests do not need take seconds to load.
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugins = ["-p", "xdist", "-p", "tests.skip_list"]
    command = [sys.executable, "-m", "pytest", *plugins, "--rootdir", str(folder), "-c", "pytest.ini"]
    result = subprocess.run(
        [*command, "--expected-skips", "expected.txt", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "worksteal")], ids=["alone", "xdist"])
def test_only_listed_skips_pass(tmp_path: Path, workers: tuple[str, ...]) -> None:
    """Oracle: by hand; the run fails on the two unlisted skips, and passes once they are listed."""
    code, printed = run(tmp_path, EXPECTED, *workers)
    assert code == 1, printed
    assert "    2  needs a GPU  (no GPU in CI)\n" in printed and "    4  in all\n" in printed
    assert "SKIPPED BUT NOT EXPECTED: test_some.py::test_odd: no odd thing here\n" in printed
    assert "SKIPPED BUT NOT EXPECTED: test_whole.py: could not import 'there_is_no_such_package'" in printed
    listed = (
        EXPECTED + "test_some.py::test_odd | no odd* | it is odd\ntest_whole.py | could not import * | no package\n"
    )
    code, printed = run(tmp_path, listed, *workers)
    assert code == 0 and "NOT EXPECTED" not in printed, printed


def test_a_line_without_three_parts_is_refused(tmp_path: Path) -> None:
    """Oracle: the line's number in the error."""
    code, printed = run(tmp_path, EXPECTED + "test_some.py | needs a GPU\n")
    assert code == 4 and "expected.txt:4: 'test_some.py | needs a GPU'" in printed
