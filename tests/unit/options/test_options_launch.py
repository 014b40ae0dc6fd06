"""Exit codes and messages of launched processes."""

from __future__ import annotations

import json

import pytest

from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError, MemoryBudgetError, RankError
from tp_engine.options import Options
from tp_engine.options import launch as options_launch
from tp_engine.options.launch import run_launched

TABLES = {"engine": EngineConfig}


@pytest.fixture(params=[0, 1], ids=["rank 0", "rank 1"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """This process as a rank of a torchrun job of two."""
    monkeypatch.setattr(options_launch, "_RANK0_REPORTS_S", 0.0)
    names = {"RANK": request.param, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    return int(request.param)


def run(*argv: str, error: Exception | None = None) -> int:
    def job(options: Options) -> int:
        options.build("engine", EngineConfig)
        if error is not None:
            raise error
        return 0

    return run_launched("serve.py", "Serve.", TABLES, job, argv)


def test_world_size_becomes_tensor_parallel_size(rank: int) -> None:
    """Oracle: torchrun's world size."""
    sizes = []

    def job(options: Options) -> int:
        sizes.append(options.build("engine", EngineConfig).tensor_parallel_size)
        return 0

    assert run_launched("serve.py", "", TABLES, job, []) == 0
    assert sizes == [2]


def test_the_log_is_json_if_asked_for(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: the one line of the error that ended the job, with the process that wrote it."""
    assert run("--log-format", "json", error=RankError(1, "it died")) == 1
    line = json.loads(capfd.readouterr().err)
    assert (line["level"], line["process"], line["message"]) == ("ERROR", f"rank {rank}", "rank 1: it died")


def test_rank_0_says_what_became_of_foreign_options(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: one line from rank 0 and none from the other, in the format of the log."""
    assert run("--log-format", "json", "--trust-remote-code") == 0
    lines = [json.loads(line)["message"] for line in capfd.readouterr().err.splitlines()]
    told = "--trust-remote-code: no code of a model is run: its family is built in, and its tokenizer is data"
    assert lines == ([told] if rank == 0 else [])


@pytest.mark.parametrize(
    "argv", [["--blok-size", "3"], ["--block-size", "3"], ["--tensor-parallel-size", "4"], ["--config", "/none"]]
)
def test_configuration_errors_are_reported_once(rank: int, argv: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: exit code 2 on every rank, one message from rank 0 and no traceback."""
    assert run(*argv) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert err.count("serve.py: error:") == (1 if rank == 0 else 0)


@pytest.mark.parametrize("port", ["0", "-1", "65536", "", "port"])
def test_a_port_at_which_no_ranks_can_meet_is_refused(
    rank: int, port: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Oracle: exit code 2 on every rank, and one message with the value and the remedy, from rank 0."""
    monkeypatch.setenv("MASTER_PORT", port)
    assert run() == 2
    err = capfd.readouterr().err
    assert err.count("\n") == (1 if rank == 0 else 0)
    if rank == 0:
        assert f"{port}" in err and "torchrun" in err
    if rank == 0 and port.lstrip("-").isdecimal():
        assert f"MASTER_PORT is {port};" in err and "1 to 65535" in err and "--standalone" in err


def test_one_rank_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: a world of one has no other rank to meet, so it starts with any port."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert run() == 0


@pytest.mark.parametrize(
    ("error", "code", "traceback"),
    [
        (ConfigError("the model has 3 heads"), 2, False),
        (RankError(1, "died"), 1, False),
        (MemoryBudgetError("too little"), 1, False),
        (OSError("127.0.0.1:8000 is in use"), 1, False),
        (TypeError("a bug"), 1, True),
        (RuntimeError("from a kernel"), 1, True),
    ],
)
def test_failures_of_the_job(error: Exception, code: int, traceback: bool, capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: the code table; errors that explain themselves take one line."""
    assert run(error=error) == code
    err = capfd.readouterr().err
    assert str(error) in err
    assert ("Traceback" in err) == traceback
    assert traceback or err.count("\n") == 1


def test_help_and_configuration_are_printed_once(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: rank 0's output, and no other rank's."""
    with pytest.raises(SystemExit) as ended:
        run("--help")
    assert ended.value.code == 0
    assert ("--block-size" in capfd.readouterr().out) == (rank == 0)
    assert run("--print-config", "--block-size", "64") == 0
    out = capfd.readouterr().out
    assert ("block_size = 64" in out and "tensor_parallel_size = 2" in out) == (rank == 0)


def test_a_plain_script_may_ask_for_several_ranks(capfd: pytest.CaptureFixture[str]) -> None:
    """Oracle: the requested number; the engine starts them itself, as ``LLM`` does."""
    assert run("--tensor-parallel-size", "4", "--print-config") == 0
    assert "tensor_parallel_size = 4" in capfd.readouterr().out
