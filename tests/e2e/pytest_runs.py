"""Run pytest on a stranger's tests in a separate folder, with the plugin and nothing of this repository's."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "pytest", "-p", "tp_engine.apps.testing.plugin", "-p", "no:cacheprovider")
# What a client of a stranger does, with nothing but the standard library.
CLIENT = dedent("""
    import json, os, time, urllib.request
    import pytest

    def ask(server, text):
        body = {"model": server.model, "messages": [{"role": "user", "content": text}], "temperature": 0}
        headers = {"Authorization": "Bearer " + server.api_key, "Content-Type": "application/json"}
        request = urllib.request.Request(server.base_url + "/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]
""")


class Run(NamedTuple):
    """A finished run: its exit code, what it printed, and the test cases of its JUnit file by name."""

    code: int
    text: str
    cases: dict[str, ElementTree.Element]

    def outcome(self, name: str) -> str:
        """``passed``, or the kind of element that JUnit has for it."""
        kinds = [child.tag for child in self.cases[name] if child.tag in ("failure", "error", "skipped")]
        return kinds[0] if kinds else "passed"


def environment() -> dict[str, str]:
    """Without other plugins, and without what this session tells pytest."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return kept | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def run_pytest(folder: Path, tests: str, *arguments: str, conftest: str = "", timeout_s: float = 340.0) -> Run:
    """Run ``tests``, the text of a module, with the plugin."""
    (folder / "test_stranger.py").write_text(dedent(tests), encoding="utf-8")
    (folder / "conftest.py").write_text(dedent(conftest), encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\njunit_logging = all\n", encoding="utf-8")
    done = subprocess.run(
        [*COMMAND, "--junitxml", "junit.xml", "--basetemp", str(folder / "tmp"), *arguments],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=timeout_s,
    )  # fmt: skip
    junit = folder / "junit.xml"
    found = ElementTree.parse(junit).iter("testcase") if junit.exists() else ()
    return Run(done.returncode, done.stdout + done.stderr, {case.attrib["name"]: case for case in found})
