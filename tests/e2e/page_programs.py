"""Commands of pages that end by themselves, run one after the other in README's environment.

``tp-engine`` is a fork of a process that has imported torch and the program once, so a command costs its own work; what
it starts is started as ever.  Shells run all others.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_LIMIT_S = 400
_OWN = re.compile(r"((?:[A-Z_]+=\S+ )*)tp-engine ([^|&;<>$`]+)")
# Reads orders, a line of JSON each; a fork runs each, in a session of its own, and a line with its exit code follows.
_FORKS = """
import json, os, signal, sys
import torch
import tp_engine.api.llm
from tp_engine.cli.main import main

for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.alarm(order["limit_s"])
        os.chdir(order["folder"])
        os.environ.update(order["variables"])
        for target, name in ((0, os.devnull), (1, order["output"]), (2, order["errors"])):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), target)
        sys.argv = ["tp-engine", *order["arguments"]]
        raise SystemExit(main(order["arguments"]))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    output: str
    errors: str


class Programs:
    """Runs commands in an environment."""

    def __init__(self, variables: Mapping[str, str], scratch: Path) -> None:
        self._variables, self._scratch = dict(variables), scratch
        self._forks = subprocess.Popen(
            ["python", "-c", _FORKS], env=self._variables, cwd=scratch, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def run(self, command: str, folder: Path) -> Done:
        """Run a shell's command in the folder."""
        if own := _OWN.fullmatch(command):
            return self._fork(dict(one.split("=", 1) for one in own[1].split()), shlex.split(own[2]), folder)
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, timeout=_LIMIT_S, cwd=folder, env=self._variables
        )
        return Done(done.returncode, done.stdout, done.stderr)

    def _fork(self, variables: Mapping[str, str], arguments: list[str], folder: Path) -> Done:
        assert self._forks.stdin is not None and self._forks.stdout is not None
        output, errors = self._scratch / "output", self._scratch / "errors"
        order = {"arguments": arguments, "variables": variables, "folder": str(folder), "limit_s": _LIMIT_S}
        print(json.dumps({**order, "output": str(output), "errors": str(errors)}), file=self._forks.stdin, flush=True)
        code = int(self._forks.stdout.readline())
        return Done(code, output.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8"))

    def close(self) -> None:
        """End the process that forks."""
        self._forks.communicate(timeout=30)


@contextmanager
def programs(variables: Mapping[str, str], scratch: Path) -> Iterator[Programs]:
    """What runs commands in this environment."""
    made = Programs(variables, scratch)
    try:
        yield made
    finally:
        made.close()
