"""The ``tp-engine`` command, in this process: dispatch, errors, benchmarks, and the doctor's findings."""

from __future__ import annotations

import importlib
import json
import os
import re
import resource
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

import tp_engine
from tp_engine.apps.bench.command import BENCHMARKS
from tp_engine.apps.doctor import machine
from tp_engine.apps.doctor.findings import Finding, Speed, Status, as_screen
from tp_engine.cli.main import COMMANDS, main


def test_every_command_is_listed_and_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the table of commands; each names an existing function."""
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in printed and callable(command.load())
    assert main([]) == 2


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the package's version."""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tp-engine {tp_engine.__version__}\n"


def test_the_console_script_is_this_command() -> None:
    """Oracle: the project's own entry point."""
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'tp-engine = "tp_engine.cli.main:main"' in text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["sreve"], "unknown command sreve; did you mean serve?"),
        (["--versoin"], "unknown option --versoin; did you mean --version?"),
        (["serve", "--blok-size", "16"], "unknown option --blok-size; did you mean --block-size?"),
        (["serve", "--block-size", "17"], "block_size is 17; it must be a power of two"),
        (["run-batch"], "--input-file"),
        (["chat", "--ulr", "http://x"], "unknown option --ulr; did you mean --url?"),
        (["chat", "--url", "localhost:8000"], "url is 'localhost:8000'; it must be like http://localhost:8000"),
        (["complete", "--url", "http://127.0.0.1:1", "--block-size", "16"], "--block-size is for a model"),
        (["chat", "--block-size", "17", "-q", "hi"], "block_size is 17; it must be a power of two"),
        (["bench", "latncy"], "did you mean latency?"),
        (["recommend", "--gpu", "h10"], "did you mean h100?"),
        (["doctor", "--jsn"], "unknown option --jsn; did you mean --json?"),
    ],
)
def test_wrong_use_is_told_with_a_remedy(arguments: list[str], told: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: exit code 2, one line on standard error that names the command, the value and the nearest right one."""
    assert main(arguments) == 2
    printed = capfd.readouterr()
    assert told in printed.err and printed.err.startswith("tp-engine")


def test_print_config_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the effective configuration of a server that would start two ranks by itself."""
    assert main(["serve", "--tensor-parallel-size", "2", "--port", "0", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert "[engine]" in printed and "[server]" in printed and "tensor_parallel_size = 2" in printed


@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmarks_are_called_with_their_arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a stand-in for the benchmark gets the arguments of the table, then the user's; its exit code counts."""
    folder, arguments, _ = BENCHMARKS[name]
    stand_in = Mock(return_value=3)
    monkeypatch.setattr(importlib.import_module(f"tp_engine.apps.bench.{folder}.command"), "main", stand_in)
    assert main(["bench", name, "--rounds", "5"]) == 3
    stand_in.assert_called_once_with([*arguments, "--rounds", "5"])


def test_the_doctor_finds_this_machine_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the tests run here, so no requirement is missing; one of the usable backends is chosen."""
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] and report["version"] == tp_engine.__version__
    by_topic = {finding["topic"]: finding for finding in report["findings"]}
    chosen = dict(pair.split(" ", 1) for pair in by_topic["would be chosen"]["detail"].split(", "))["attention_backend"]
    usable = {name: finding["detail"] for name, finding in by_topic.items() if finding["detail"].startswith("usable")}
    named_only = dict.fromkeys(usable, "usable where attention_backend names it")
    assert "attention torch" in usable and usable == {**named_only, f"attention {chosen}": "usable"}
    attention = {name: one["status"] for name, one in by_topic.items() if name.startswith("attention ")}
    assert attention == {name: "ok" if name in usable else "note" for name in attention}
    assert {"python", "packages", "processor", "memory", "shared memory", "open files", "malloc"} <= by_topic.keys()
    assert all(finding["status"] in ("ok", "note") for finding in report["findings"])
    for name in ("int4", "int8", "int8 of w8a8", "fp8", "fp4"):
        assert re.search(rf"\b{name}\b", by_topic["quantised weights"]["detail"])
    assert {"kernel choices", "native kernels", "attention"} <= by_topic.keys()
    assert by_topic["kernel choices"]["detail"].startswith("own: ") and by_topic["attention"]["speed"] == "fast"


def test_the_doctor_s_screen(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: 24 lines of 100 columns; what is fast and what slow, and a way to all the rest."""
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100 and lines[-1] == "nothing needed is missing"
    words = {line.split()[0] for line in lines[2:-2] if not line.startswith(" ")}
    assert words <= {"slow", "fast", "note"} and "fast" in words
    assert "--verbose" in lines[-2]
    assert main(["doctor", "--verbose"]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 24


def test_a_screen_has_the_worst_first() -> None:
    """Oracle: by hand, of sixty findings of which some are slow and one is missing: no line is wider or lower than the
    screen, and no remedy stands without its subject."""
    found = [Finding(f"part {number}", Status.OK, "good " * 60, speed=Speed.FAST) for number in range(40)]
    found += [Finding(f"slow {number}", Status.NOTE, "a\nb", "do it", Speed.SLOW) for number in range(3)]
    found += [Finding(f"plain {number}", Status.OK, "fine") for number in range(16)]
    found.append(Finding("gone", Status.MISSING, "not there", "install it", Speed.FAST))
    lines = as_screen(found).splitlines()
    assert len(lines) <= 22 and max(map(len, lines)) <= 100
    assert lines[1].split() == ["missing", "gone", "not", "there"] and lines[2].split() == ["->", "install", "it"]
    assert [line.split()[0] for line in lines[3:10]] == ["slow", "->", "slow", "->", "slow", "->", "fast"]
    assert lines[-1].startswith(f"{60 - 1 - 3 - (len(lines) - 10)} more findings")


def test_the_doctor_s_exit_code_tells_of_missing_things(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: a missing and an outdated package: exit code 1 and the command that installs them."""
    real = metadata.version

    def version(name: str) -> str:
        if name == "xxhash":
            raise metadata.PackageNotFoundError(name)
        return "1.9" if name == "numpy" else real(name)

    monkeypatch.setattr(metadata, "version", version)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "xxhash is not installed" in printed and "pip install 'numpy>=2.0' 'xxhash>=3.5'" in printed


def test_a_model_that_is_not_there_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: exit code 1, with the reason of the engine's own check."""
    assert main(["doctor", "--model", "/no/such/folder"]) == 1
    assert "there is no such folder" in capsys.readouterr().out


@pytest.mark.parametrize(("free_bytes", "status"), [(1 << 20, Status.MISSING), (1 << 30, Status.OK)])
def test_small_shared_memory_is_missing(monkeypatch: pytest.MonkeyPatch, free_bytes: int, status: Status) -> None:
    """Oracle: a file system of that size."""
    stat = SimpleNamespace(f_blocks=free_bytes, f_bavail=free_bytes, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda folder: stat)
    finding = machine.shared_memory(Path("/dev/shm"), 1, on_cpu=True)
    assert finding.status is status and (finding.remedy is None) == (status is Status.OK)


@pytest.mark.parametrize(("num_ranks", "option"), [(1, "64m"), (2, "64m"), (4, "256m"), (8, "1024m")])
def test_the_size_of_shared_memory_follows_the_ranks(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, option: str
) -> None:
    """Oracle: 16 MiB, and 10 MiB for each ordered pair of GPUs, as the next power of two, by hand."""
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_blocks=1, f_bavail=1, f_frsize=1 << 20))
    finding = machine.shared_memory(Path("/dev/shm"), num_ranks, on_cpu=False)
    assert finding.status is Status.MISSING and f"--shm-size={option}," in str(finding.remedy)


@pytest.mark.parametrize(("limit", "status"), [(1024, Status.NOTE), (65_536, Status.OK)])
def test_few_open_files_are_noted(monkeypatch: pytest.MonkeyPatch, limit: int, status: Status) -> None:
    """Oracle: the limit."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, 65_536))
    finding = machine.open_files()
    assert finding.status is status and (status is Status.OK or finding.remedy == "ulimit -n 65536")


def test_another_malloc_is_suggested_on_cpus_alone() -> None:
    """Oracle: the libraries that are loaded, and that models run on."""
    assert machine.allocator("", on_cpu=True).status is Status.NOTE
    assert machine.allocator("", on_cpu=False).status is Status.OK
    assert machine.allocator("/usr/lib/libtcmalloc_minimal.so.4", on_cpu=True).detail == "tcmalloc is loaded"


def test_huge_pages_are_suggested_where_nobody_gets_them(tmp_path: Path) -> None:
    """Oracle: the kernel's own notation; a kernel without huge pages."""
    setting = tmp_path / "enabled"
    assert machine.huge_pages(setting).detail.startswith("missing")
    for line, status in (("always [madvise] never", Status.OK), ("always madvise [never]", Status.NOTE)):
        setting.write_text(line + "\n")
        assert machine.huge_pages(setting).status is status
    assert machine.huge_pages(setting).remedy == f"echo madvise > {setting}"


def test_a_folder_that_can_not_be_written_to_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the system's figure for the nearest folder that exists."""
    assert machine.writable("x", tmp_path / "a" / "b", "remedy").status is Status.OK
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert machine.writable("x", tmp_path / "a", "remedy").status is Status.NOTE
