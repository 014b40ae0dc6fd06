"""The package as users install it: a wheel in a clean virtual environment, used outside of the checkout.

A line in a .pth file gives the environment the libraries of the tests' environment, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("pyproject.toml", "setup.cfg", "README.md", "LICENSE", "tp_engine")
SMALL = ("--device", "cpu", "--num-gpu-blocks-override", "256", "--max-num-seqs", "4")
TORCHRUN = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SUMS = {"one": ("12+34=", "46"), "two": ("7+8=", "15")}


def outside() -> dict[str, str]:
    """The environment variables of a shell that does not know the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


class Installation(NamedTuple):
    """``wheel``, installed into the environment ``venv``; jobs run in ``folder``."""

    folder: Path
    wheel: Path
    venv: Path

    def command(self, *words: str) -> list[str]:
        """``words``, with the path of the environment's program for the first one."""
        return [str(self.venv / "bin" / words[0]), *words[1:]]

    def run(self, *words: str, timeout_s: float = 100) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            self.command(*words), cwd=self.folder, env=outside(), capture_output=True, text=True,
            timeout=timeout_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    @contextmanager
    def serving(self, *words: str, exit_code: int = 0, timeout_s: float = 120) -> Iterator[httpx.Client]:
        """Start a server with ``words``; yield its client once it is ready; check ``exit_code`` after SIGTERM."""
        socket, log = self.folder / "socket", self.folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command(*words, "--uds", str(socket), *SMALL),
                cwd=self.folder, env=outside(), stdout=output, stderr=output, start_new_session=True,
            )  # fmt: skip
        try:
            with httpx.Client(
                transport=httpx.HTTPTransport(uds=str(socket)), base_url="http://x", timeout=60
            ) as client:
                deadline = time.monotonic() + timeout_s
                while not is_ready(client):
                    assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-5000:]
                    time.sleep(0.05)
                yield client
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == exit_code, log.read_text()[-5000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


def is_ready(client: httpx.Client) -> bool:
    try:
        return client.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installation:
    """Built from a copy of the sources, so that the checkout stays as it is."""
    folder = tmp_path_factory.mktemp("wheel")
    source, venv = folder / "source", folder / "venv"
    source.mkdir()
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    quietly: dict[str, Any] = {"check": True, "timeout": 100, "stdout": subprocess.DEVNULL, "env": outside()}
    subprocess.run([sys.executable, "-c", build], cwd=source, **quietly)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], **quietly)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], cwd=folder, **quietly)
    (packages,) = venv.glob("lib/python*/site-packages")
    libraries = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
    shutil.rmtree(source)
    return Installation(folder, wheel, venv)


def write_batch(path: Path) -> None:
    """Write one line per sum."""
    lines = []
    for name, (question, _) in SUMS.items():
        body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 8}
        lines.append(json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def check_batch(path: Path) -> None:
    results = {one["custom_id"]: one for one in map(json.loads, path.read_text(encoding="utf-8").splitlines())}
    found = {name: result["response"]["body"]["choices"][0]["message"]["content"] for name, result in results.items()}
    assert found == {name: answer for name, (_, answer) in SUMS.items()}


def ask(client: httpx.Client, question: str) -> str:
    reply = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": question}]})
    return str(reply.raise_for_status().json()["choices"][0]["message"]["content"])


def test_the_wheel_has_every_file_of_the_package(installed: Installation) -> None:
    """Oracle: the package's folder in the checkout; the imported package is the installed copy."""
    expected = {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / "tp_engine").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(installed.wheel) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist() if name.startswith("tp_engine/")}
    assert sorted(found) == sorted(expected) and found == expected
    where = installed.run("python", "-c", "import tp_engine; print(tp_engine.__file__)")
    assert Path(where.strip()).is_relative_to(installed.venv)


@pytest.mark.timeout(300)
def test_the_command_of_the_wheel(installed: Installation) -> None:
    """Oracle: arithmetic; the page's own file; the log reports no failed compilation of the native kernels."""
    with installed.serving("tp-engine", "serve", "-tp", "2") as client:
        assert ask(client, "12+34=") == "46"
        assert "<title>" in client.get("/").text
    assert "no native CPU kernels" not in (installed.folder / "log").read_text(encoding="utf-8")
    prompt = "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"
    answer = installed.run("tp-engine", "complete", "--quick", prompt, "--temperature", "0", *SMALL)
    assert answer.strip() == "46"
    source, target = installed.folder / "in.jsonl", installed.folder / "out.jsonl"
    write_batch(source)
    installed.run("tp-engine", "run-batch", "-i", str(source), "-o", str(target), *SMALL)
    check_batch(target)


@pytest.mark.timeout(300)
def test_torchrun_without_the_checkout(installed: Installation) -> None:
    """Oracle: arithmetic, through HTTP and in a batch job; torchrun itself ends with 1 after a signal."""
    with installed.serving(*TORCHRUN, "-m", "tp_engine.serve", exit_code=1) as client:
        assert ask(client, "12+34=") == "46"
    source, target = installed.folder / "two.jsonl", installed.folder / "two_out.jsonl"
    write_batch(source)
    installed.run(*TORCHRUN, "-m", "tp_engine.batch", "-i", str(source), "-o", str(target), *SMALL)
    check_batch(target)
