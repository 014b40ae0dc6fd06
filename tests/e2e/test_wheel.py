"""The release as users install it: wheel and sdist, each in a clean virtual environment, used outside of the checkout.

The wheel is built with the compiled kernels of this processor's level alone, which other tests have compiled, too.
Nothing that is installed finds a compiler.  A line in a .pth file gives the environment the libraries of the tests'
environment, so that nothing is downloaded.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import yaml

from tp_engine.cpu.compiling.levels import best_level, processor_flags
from tp_engine.cpu.compiling.shipped import file_name
from tp_engine.system.version import __version__

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NAME = f"tp_engine-{__version__}"
LICENCES = {"LICENSE", "THIRD_PARTY.md"}
# What is in no commit, beside a folder that a build would have left.
IGNORED = (".*", "__pycache__", "*.egg-info", "build", "dist", "dist-packages", "gpu_check_results", "*.log")
LEVEL = best_level(processor_flags()) if shutil.which("gcc") else None
PLATFORM = "any" if LEVEL is None else f"linux_{platform.machine()}"
SMALL = ("--device", "cpu", "--num-gpu-blocks-override", "256", "--max-num-seqs", "4")
TORCHRUN = ("python", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
SUMS = {"one": ("12+34=", "46"), "two": ("7+8=", "15")}


def outside(**others: str) -> dict[str, str]:
    """The environment variables of a shell that does not know the checkout; ``others`` in their place."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")} | others


class Release(NamedTuple):
    """Both files of a release, and ``folder``, in which they were made."""

    folder: Path
    wheel: Path
    sdist: Path

    def install(self, archive: Path, folder: Path) -> Installation:
        """Install ``archive`` into a new environment in ``folder``, without the index and a compiler."""
        venv = folder / "venv"
        quietly: dict[str, Any] = {"check": True, "timeout": 300, "stdout": subprocess.DEVNULL, "env": outside(PATH="")}
        # The pip of the tests' environment installs: an own one would take longer than the installation.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], **quietly)
        pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin" / "python"), "--disable-pip-version-check"]
        (packages,) = venv.glob("lib/python*/site-packages")
        libraries = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (packages / "libraries.pth").write_text("\n".join(libraries) + "\n", encoding="utf-8")
        # An editable installation of the checkout lies behind in the libraries: it must not count as installed.
        alone = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")
        subprocess.run([*pip, "install", "--quiet", *alone, str(archive)], cwd=folder, **quietly)
        return Installation(folder, venv)


class Installation(NamedTuple):
    """An installed release in the environment ``venv``; jobs run in ``folder``."""

    folder: Path
    venv: Path

    def command(self, *words: str) -> list[str]:
        """``words``, with the path of the environment's program for the first one."""
        return [str(self.venv / "bin" / words[0]), *words[1:]]

    def run(self, *words: str, timeout_s: float = 300) -> str:
        """Standard output of a command that must succeed."""
        done = subprocess.run(
            self.command(*words), cwd=self.folder, env=outside(), capture_output=True, text=True,
            timeout=timeout_s, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    @contextmanager
    def serving(
        self, *words: str, exit_code: int = 0, timeout_s: float = 300, **variables: str
    ) -> Iterator[httpx.Client]:
        """Start a server with ``words``; yield its client once it is ready; check ``exit_code`` after SIGTERM."""
        socket, log = self.folder / "socket", self.folder / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                self.command(*words, "--uds", str(socket), *SMALL),
                cwd=self.folder, env=outside(**variables), stdout=output, stderr=output, start_new_session=True,
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
            assert process.wait(200) == exit_code, log.read_text()[-5000:]
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
def release(tmp_path_factory: pytest.TempPathFactory) -> Release:
    """Built as the publishing workflow does, but without isolation, and from a copy that keeps the checkout clean."""
    folder = tmp_path_factory.mktemp("release")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*IGNORED))
    for left in ("tp_engine/__pycache__/left.cpython-311.pyc", "tests/__pycache__/left.pyc", ".pytest_cache/left"):
        (source / left).parent.mkdir(exist_ok=True)
        (source / left).write_text("left by a run")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    environment = outside(TP_ENGINE_BUILD="none" if LEVEL is None else LEVEL.name)
    done = subprocess.run(build, cwd=folder, env=environment, capture_output=True, text=True, timeout=340)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    shutil.rmtree(source)
    return Release(folder, folder / f"{NAME}-py3-none-{PLATFORM}.whl", folder / f"{NAME}.tar.gz")


@pytest.fixture(scope="module")
def installed(release: Release) -> Installation:
    return release.install(release.wheel, release.folder)


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


def package_files() -> dict[str, bytes]:
    """The files of the package in the checkout."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_bytes()
        for path in (ROOT / "tp_engine").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_has_the_package_and_nothing_else(release: Release, installed: Installation) -> None:
    """Oracle: the package's folder in the checkout; the imported package is the installed copy."""
    about, expected = f"{NAME}.dist-info", package_files()
    for name in ("tp_engine/py.typed", "tp_engine/server/page/index.html", "tp_engine/cpu/attention.c"):
        assert name in expected
    assert (ROOT / "tp_engine" / "models" / "demo_model" / "model.safetensors").read_bytes() in expected.values()
    others = {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")}
    with zipfile.ZipFile(release.wheel) as wheel:
        found = {name: wheel.read(name) for name in wheel.namelist()}
    licences = {f"{about}/licenses/{name}": (ROOT / name).read_bytes() for name in LICENCES}
    built = set() if LEVEL is None else {f"tp_engine/cpu/built/{file_name(LEVEL)}"}
    assert found.keys() == expected.keys() | licences.keys() | others | built
    assert f"Tag: py3-none-{PLATFORM}\n".encode() in found[f"{about}/WHEEL"]
    assert found.items() >= expected.items() and found.items() >= licences.items()
    where = installed.run("python", "-c", "import tp_engine; print(tp_engine.__file__)")
    assert Path(where.strip()).is_relative_to(installed.venv)


def test_the_sdist_has_what_a_wheel_is_built_from_and_nothing_else(release: Release) -> None:
    """Oracle: the package's folder in the checkout, and the files that its pyproject.toml names."""
    about = {"LICENSE", "THIRD_PARTY.md", "README.md", "pyproject.toml", "setup.cfg", "setup.py", "PKG-INFO"}
    with tarfile.open(release.sdist) as sdist:
        names = {one.name.removeprefix(f"{NAME}/") for one in sdist.getmembers() if one.isfile()}
    generated = {name for name in names if name.startswith("tp_engine.egg-info/")}
    assert names - generated == package_files().keys() | about


def test_the_package_index_would_take_both(release: Release) -> None:
    """Oracle: twine's own check, which also renders the README; its links lead to the repository."""
    check = [sys.executable, "-m", "twine", "check", "--strict", str(release.wheel), str(release.sdist)]
    done = subprocess.run(check, env=outside(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    with zipfile.ZipFile(release.wheel) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        page = wheel.read(metadata).decode()
    assert (
        "\nDescription-Content-Type: text/markdown\n" in page and "](docs/" not in page and "/docs/models.md)" in page
    )


def test_an_installed_sdist_serves(release: Release, tmp_path: Path) -> None:
    """Oracle: the version that the release was built with, which its metadata has too; arithmetic.  Without a compiler
    it has installed no compiled kernels."""
    installed = release.install(release.sdist, tmp_path)
    assert installed.run("tp-engine", "--version") == f"tp-engine {__version__}\n"
    metadata = "from importlib import metadata as m; print(m.version('tp-engine'), m.metadata('tp-engine')['Author'])"
    assert installed.run("python", "-c", metadata) == f"{__version__} The tp_engine authors\n"
    assert not list(installed.venv.glob("lib/python*/site-packages/tp_engine/cpu/built"))
    with installed.serving("tp-engine", "serve", "-tp", "1") as client:
        assert ask(client, "12+34=") == "46"
        assert client.get("/version").json() == {"version": __version__}


def test_the_command_of_the_wheel(installed: Installation) -> None:
    """Oracle: arithmetic; the page's own file; the log names the wheel's level, and nothing was compiled."""
    assert installed.run("tp-engine", "--version") == f"tp-engine {__version__}\n"
    cache = installed.folder / "cache"
    with installed.serving("tp-engine", "serve", "-tp", "2", TP_ENGINE_CACHE_DIR=str(cache), PATH="") as client:
        assert ask(client, "12+34=") == "46"
        assert "<title>" in client.get("/").text
    log = (installed.folder / "log").read_text(encoding="utf-8")
    assert f"tp_engine {__version__} starts" in log.splitlines()[0]
    if LEVEL is not None:
        assert f"kernels {LEVEL.name})" in log
        assert not list(cache.glob("code-*"))
    prompt = "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"
    answer = installed.run("tp-engine", "complete", "--quick", prompt, "--temperature", "0", *SMALL)
    assert answer.strip() == "46"
    source, target = installed.folder / "in.jsonl", installed.folder / "out.jsonl"
    write_batch(source)
    installed.run("tp-engine", "run-batch", "-i", str(source), "-o", str(target), *SMALL)
    check_batch(target)


def test_a_benchmark_without_the_checkout(installed: Installation) -> None:
    """Oracle: the last line's JSON; every request got the tokens that it asked for, from an engine without a model."""
    options = ("--num-prompts", "4", "--num-warmups", "1", "--input-len", "8", "--output-len", "4")
    printed = installed.run("tp-engine", "bench", "frontend", *options)
    (result,) = json.loads(printed.strip().splitlines()[-1])["results"]
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (4, 0, 16)


def test_an_evaluation_without_the_checkout(installed: Installation) -> None:
    """Oracle: exit code 0; the demo model knows nine of ten sums, and the wheel has the questions."""
    printed = installed.run("tp-engine", "eval", "--threshold", "60%", "--limit", "20", "--json", *SMALL)
    (line,) = json.loads(printed)["lines"]
    assert line["numbers"]["asked"] == 20 and line["verdict"] == "passed"


def test_torchrun_without_the_checkout(installed: Installation) -> None:
    """Oracle: arithmetic, through HTTP and in a batch job; torchrun itself ends with 1 after a signal."""
    with installed.serving(*TORCHRUN, "2", "-m", "tp_engine", "serve", exit_code=1) as client:
        assert ask(client, "12+34=") == "46"
    source, target = installed.folder / "two.jsonl", installed.folder / "two_out.jsonl"
    write_batch(source)  # one rank: ``test_batch_job`` has two
    installed.run(*TORCHRUN, "1", "-m", "tp_engine", "run-batch", "-i", str(source), "-o", str(target), *SMALL)
    check_batch(target)


def test_a_stranger_s_tests_after_pip_install(installed: Installation) -> None:
    """Oracle: both tests of deploy/ci/example pass, run by the script of GitHub's action, and then by GitLab's, which
    also runs both gates; all leave JUnit's files."""
    shutil.copytree(ROOT / "deploy" / "ci" / "example", installed.folder / "tests")
    action = yaml.safe_load((ROOT / "deploy" / "ci" / "action" / "action.yml").read_text(encoding="utf-8"))
    inputs = {name: one["default"] for name, one in action["inputs"].items()}
    step = next(one for one in action["runs"]["steps"] if one["name"] == "test")
    variables = {name: inputs[value[len("${{ inputs.") : -len(" }}")]] for name, value in step["env"].items()}
    template = yaml.safe_load((ROOT / "deploy" / "ci" / "gitlab.yml").read_text(encoding="utf-8"))[".tp-engine"]
    gates = {
        "TP_EVAL": f"--threshold 60% --limit 10 {' '.join(SMALL)}",
        "TP_BENCH": "--fake-engine --num-prompts 4 --input-len 8 --output-len 4 --repeats 3 --record results/base.json",
    }
    for script, values in (
        (step["run"], variables),
        ("\n".join(template["script"]), template["variables"] | gates),
    ):
        path = f"{installed.venv / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-e", "-c", script], cwd=installed.folder, env={**outside(), **values, "PATH": path},
            capture_output=True, text=True, timeout=340,
        )  # fmt: skip
        assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr
    logs = [installed.folder / name / "tmp" / "tp_server0" / "log" for name in (inputs["results"], "results")]
    assert all("finished: stop" in log.read_text(encoding="utf-8") for log in logs)
    for name in ("tests", "eval", "speed"):
        assert "<testcase" in (installed.folder / "results" / f"{name}.xml").read_text(encoding="utf-8")
