"""The pytest plugin on a stranger's tests: servers, logs, numbers of ranks, promised GPUs, and its price."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.pytest_runs import CLIENT, COMMAND, ROOT, Run, environment, run_pytest

SMALL = """
    import pytest
    @pytest.fixture(scope="session")
    def tp_options():
        return {"device": "cpu", "num_gpu_blocks_override": 64, "max_model_len": 128}
"""
HAS_GPUS = any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run with a server: a test that passes, one that fails, one that ends the server, one after it."""
    tests = CLIENT + (
        "def test_a_passes(tp_server):\n    assert ask(tp_server, '12+34=') == '46'\n"
        "def test_b_fails(tp_server):\n    assert ask(tp_server, '7+8=') == '16'\n"
        "@pytest.fixture(scope='session')\n"
        "def client(tp_server):\n    return lambda text: ask(tp_server, text)\n"
        "def test_c_shares_it(client):\n    assert client('7+8=') == '15'\n"
        "def test_d_kills_it(tp_server):\n"
        "    os.kill(tp_server._process.pid, 9)\n"
        "    tp_server._process.wait(20)\n"
        "    ask(tp_server, '7+8=')\n"
        "def test_e_comes_later(tp_server):\n    pass\n"
        "def test_f_needs_none():\n    pass\n"
    )
    return run_pytest(tmp_path_factory.mktemp("stranger"), tests, conftest=SMALL)


def test_a_client_is_answered(stranger: Run) -> None:
    """Oracle: arithmetic, by the demo model; a fixture of the session may depend on the server."""
    assert stranger.outcome("test_a_passes") == stranger.outcome("test_c_shares_it") == "passed", stranger.text
    assert stranger.code == 1


def test_a_failure_has_the_server_s_log(stranger: Run) -> None:
    """Oracle: one finished request in the section, that of the failed test, on the terminal and in JUnit's file."""
    assert stranger.outcome("test_b_fails") == "failure"
    section = stranger.text.split("Captured log of tp_server call")[1].split("______")[0]
    assert section.count(" finished: stop") == 1 and "'16'" not in section
    texts = "".join(stranger.cases["test_b_fails"].itertext())
    assert texts.count(" finished: stop") == 1
    assert "finished" not in "".join(stranger.cases["test_a_passes"].itertext())


def test_a_server_that_dies_is_named(stranger: Run) -> None:
    """Oracle: the signal; later tests fail at once with that reason, and those without the server pass."""
    assert stranger.outcome("test_d_kills_it") == "failure"
    assert "has ended with exit code -9" in "".join(stranger.cases["test_d_kills_it"].itertext())
    assert stranger.outcome("test_e_comes_later") == "error"
    assert "ended with exit code -9 in a test before" in stranger.text
    assert stranger.outcome("test_f_needs_none") == "passed"


@pytest.mark.slow
def test_a_rank_that_dies_is_the_reason_of_later_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: rank 1 of the server, and of the ``LLM``, is killed in its fourth step; the test meanwhile fails by its
    own call, and the next ones before their first line, with rank and signal.  Other tests and other servers go on."""
    tests = CLIENT + (
        "@pytest.mark.tp_ranks(2)\n"
        "def test_a_is_asked(tp_server):\n    ask(tp_server, '12+34='), ask(tp_server, '12+35=')\n"
        "@pytest.mark.tp_ranks(2)\n"
        "def test_b_comes_later(tp_server):\n    print('BEGUN')\n"
        "@pytest.mark.tp_ranks(2)\n"
        "def test_c_in_process(tp_llm):\n"
        "    for _ in range(4):\n        tp_llm.chat([{'role': 'user', 'content': '7+8='}])\n"
        "@pytest.mark.tp_ranks(2)\n"
        "def test_d_comes_later(tp_llm):\n    print('BEGUN')\n"
        "def test_e_has_another_server(tp_server):\n    assert ask(tp_server, '12+34=') == '46'\n"
        "def test_f_needs_none():\n    pass\n"
    )
    monkeypatch.setenv("TP_ENGINE_FAULT", "1:step_begin@4:kill")
    run = run_pytest(tmp_path, tests, conftest=SMALL)
    assert [run.outcome(name) for name in sorted(run.cases)] == [
        "failure", "error", "failure", "error", "passed", "passed",
    ], run.text  # fmt: skip
    for name in ("test_b_comes_later[tp2]", "test_d_comes_later[tp2]"):
        told = "".join(run.cases[name].itertext())
        assert "in a test before this one" in told and "BEGUN" not in told
        assert re.search(r"rank 1: process \d+ ended with signal 9, in step_begin of step \d", told), told


@pytest.mark.slow
def test_the_gates_of_the_page(tmp_path: Path) -> None:
    """Oracle: the example of docs/ci.md as it stands, which records its baseline; one a thousand times as fast is a
    regression, and no model of this size knows all sums: these fail, with the report in JUnit's file."""
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    example = page.split("## Accuracy and speed")[1].split("```python\n")[1].split("```")[0]
    tests = example + (
        "def test_too_few(tp_eval):\n    tp_eval('sums', threshold='100%', limit=100, concurrency=8)\n"
        "def test_too_slow(tp_server, tmp_path):\n"
        "    import json, pathlib\n"
        "    from tp_engine.apps.testing.gates import measure_speed\n"
        "    found = json.loads(pathlib.Path('baseline.json').read_text())\n"
        "    name = 'rate inf, output_throughput'\n"
        "    assert len(found['figures'][name]) == 5\n"
        "    found['figures'] = {name: [1000 * value for value in found['figures'][name]]}\n"
        "    (tmp_path / 'b.json').write_text(json.dumps(found))\n"
        "    load = {'num_prompts': 20, 'input_len': 32, 'output_len': 16, 'repeats': 3}\n"
        "    load |= {'against': tmp_path / 'b.json', 'tolerance': '50%'}\n"
        "    assert measure_speed(tp_server, **load).exit_code == 1\n"
    )
    run = run_pytest(tmp_path, tests, "--tp-record", conftest=SMALL)
    outcomes = {name: run.outcome(name) for name in run.cases}
    assert outcomes == {
        "test_accuracy": "passed", "test_speed": "passed", "test_too_few": "failure", "test_too_slow": "passed",
    }, run.text  # fmt: skip
    assert "at least 100 %" in "".join(run.cases["test_too_few"].itertext())
    properties = {one.attrib["name"]: one.attrib["value"] for one in run.cases["test_accuracy"].iter("property")}
    assert " of 100 right" in properties["sums"]


@pytest.mark.slow
def test_ranks_come_from_the_marker(tmp_path: Path) -> None:
    """Oracle: the number of ranks that the engine reports; one server, and one LLM, for each number."""
    tests = CLIENT + (
        "@pytest.mark.tp_ranks(1, 2)\n"
        "def test_served(tp_server, tp_ranks):\n    assert ask(tp_server, '12+34=') == '46'\n"
        "@pytest.mark.tp_ranks(2)\n"
        "def test_in_process(tp_llm, tp_ranks):\n"
        "    assert tp_llm.engine.model_info.tensor_parallel_size == tp_ranks == 2\n"
    )
    run = run_pytest(tmp_path, tests, conftest=SMALL)
    assert {name: run.outcome(name) for name in run.cases} == dict.fromkeys(
        ("test_served[tp1]", "test_served[tp2]", "test_in_process[tp2]"), "passed"
    ), run.text
    logs = sorted((tmp_path / "tmp").glob("tp_server[0-9]*/log"))
    assert ["; 2 ranks, at most" in log.read_text(encoding="utf-8") for log in logs] == [False, True]


@pytest.mark.slow
def test_workers_of_xdist_do_not_meet(tmp_path: Path) -> None:
    """Oracle: two workers, so two servers with a port each; all tests pass and nothing is left."""
    tests = CLIENT + (
        "@pytest.mark.parametrize('number', range(4))\n"
        "def test_sum(tp_server, number):\n    assert ask(tp_server, f'{number}+10=') == str(number + 10)\n"
    )
    run = run_pytest(tmp_path, tests, "-p", "xdist", "-n", "2", "--dist", "each", conftest=SMALL)
    assert run.code == 0, run.text
    assert len(list((tmp_path / "tmp").rglob("tp_server[0-9]*/log"))) == 2


@pytest.mark.slow
def test_a_killed_session_leaves_no_server(tmp_path: Path) -> None:
    """Oracle: the processes below pytest's, some seconds after SIGKILL."""
    (tmp_path / "conftest.py").write_text(SMALL.replace("\n    ", "\n"), encoding="utf-8")
    waits = "def test_waits(tp_server):\n    open('ready', 'w').close()\n    time.sleep(1000)\n"
    (tmp_path / "test_waits.py").write_text(CLIENT + waits, encoding="utf-8")
    session = psutil.Popen([*COMMAND, "-q"], cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL)
    try:
        deadline_s = time.monotonic() + 120
        while not (tmp_path / "ready").exists():
            assert session.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.1)
        below = session.children(recursive=True)
        assert len(below) >= 2  # the server's rank 0 and its frontend
    finally:
        session.send_signal(signal.SIGKILL)
        session.wait(100)
    _, alive = psutil.wait_procs(below, timeout=100)
    assert not alive


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_sise": 8}, "block_sise"),
        ({"model": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"port": 8000}, "leave it out: tp_server takes a free port"),
    ],
    ids=str,
)
def test_options_that_can_not_work(tmp_path: Path, options: dict[str, object], message: str) -> None:
    """Oracle: an error of the fixture that names the value."""
    conftest = f"""
        import pytest
        @pytest.fixture(scope="session")
        def tp_options():
            return {options!r}
    """
    run = run_pytest(tmp_path, "def test_it(tp_server): pass", conftest=conftest)
    assert run.outcome("test_it") == "error" and message in run.text


@pytest.mark.slow
@pytest.mark.skipif(HAS_GPUS, reason="the machine has the driver of GPUs")
def test_promised_gpus_that_are_missing_fail_the_run(tmp_path: Path) -> None:
    """Oracle: no GPU here: a promised one is an error, a larger need than the promise a skip, and without a promise the
    same need is a skip that says so."""
    tests = """
        import pytest
        @pytest.mark.tp_gpus(2)
        def test_two(): pass
        @pytest.mark.tp_gpus(8)
        def test_eight(): pass
        def test_none(): pass
        def test_served(tp_server): pass
    """
    promised = run_pytest(tmp_path, tests, "--tp-gpus", "2")
    outcomes = [promised.outcome(f"test_{name}") for name in ("two", "eight", "none", "served")]
    assert outcomes == ["error", "skipped", "passed", "error"]  # the server would have run on CPUs
    assert "needs 2 GPUs, the job promised 2 (--tp-gpus), torch finds 0" in promised.text
    assert promised.code == 1
    free = run_pytest(tmp_path, tests, "-k", "not served")
    assert [free.outcome(f"test_{name}") for name in ("two", "eight", "none")] == ["skipped", "skipped", "passed"]
    assert free.code == 0
    unmarked = run_pytest(tmp_path, tests, "--tp-gpus", "2", "-k", "none")
    assert unmarked.code == 1 and "promised 2 GPUs (--tp-gpus), and 2 of them are missing" in unmarked.text


@pytest.mark.parametrize("marker", ["tp_ranks()", "tp_ranks('2')", "tp_gpus(True)"])
def test_a_marker_without_a_number_is_refused(tmp_path: Path, marker: str) -> None:
    """Oracle: the error names the test, the marker and the rule."""
    run = run_pytest(tmp_path, f"import pytest\n@pytest.mark.{marker}\ndef test_it(tp_ranks): pass")
    assert run.code != 0
    assert f"test_it: {marker.partition('(')[0]}" in run.text and "whole numbers of at least 1" in run.text


def test_other_runs_pay_little(tmp_path: Path) -> None:
    """Oracle: the modules of a run that uses none of it: of tp_engine five, none of torch's or of the engine's."""
    (tmp_path / "test_it.py").write_text(
        "import sys\n"
        "def test_it():\n"
        "    print('LOADED', sorted(name for name in sys.modules if name.partition('.')[0] in\n"
        "        ('tp_engine', 'torch', 'numpy', 'transformers', 'msgspec', 'zmq', 'pydantic')))\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [*COMMAND, "-q", "-s"], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=340
    )
    found = re.search(r"LOADED (\[.*\])", done.stdout)
    assert found is not None, done.stdout + done.stderr
    assert found[1] == str(
        [
            "tp_engine",
            "tp_engine.apps",
            "tp_engine.apps.testing",
            "tp_engine.apps.testing.plugin",
            "tp_engine.apps.testing.server",
            "tp_engine.system",
            "tp_engine.system.version",
        ]
    )


def test_pytest_is_no_dependency() -> None:
    """Oracle: the package without the plugin, in an interpreter that has no pytest."""
    code = "import sys; sys.modules['pytest'] = None; import tp_engine.apps.testing as kit; print(kit.TpServer)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=340,
    )  # fmt: skip
    assert "TpServer" in done.stdout, done.stderr
