"""The pytest plugin: ``tp_server``, ``tp_llm``, gates of accuracy and speed, and markers for numbers of ranks and GPUs.

::

    tp_options   the options of both: --tp-serve, or what conftest.py returns               session
    tp_ranks     their number of ranks: the marker tp_ranks, or tensor_parallel_size        session, by marker
    tp_server    a server on a free port; its log is in the report of a failed test         session
    tp_llm       an LLM in the process of the tests                                         session
    tp_eval      asks the server questions, and fails the test if too few are right         function
    tp_bench     measures the server, and fails the test if it is slower than a baseline    function

Every run of pytest loads this module where the package is installed, so imports are local to their uses.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from tp_engine.apps.testing.server import TpServer, llm_options, started

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tp_engine.api.llm import LLM
    from tp_engine.apps.gates.report import GateReport

_SERVER = pytest.StashKey[TpServer]()
_LLM = pytest.StashKey["LLM"]()
_PARAM = pytest.StashKey[int | None]()  # of tp_ranks, for the server and the LLM that are there now
_LOG_SIZE = pytest.StashKey[int]()
_NUM_GPUS = pytest.StashKey[int]()
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
_MEMORY = {"gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_memory_bytes"}
_MARKERS = (
    "tp_ranks(number, ...): tp_server and tp_llm have this number of ranks; once per number",
    "tp_gpus(number): needs GPUs; fails without them where --tp-gpus promises as many, and is skipped elsewhere",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tp_engine")
    group.addoption(
        "--tp-serve",
        metavar="OPTIONS",
        default="",
        help="tp_server and tp_llm: options of tp-engine serve, such as 'MODEL -tp 2'",
    )
    group.addoption(
        "--tp-record",
        action="store_true",
        help="tp_eval and tp_bench: write the files of 'against' anew instead of comparing with them",
    )
    group.addoption(
        "--tp-gpus", metavar="N", type=int, default=0, help="the job has N GPUs: tests fail if they are not there"
    )


def pytest_configure(config: pytest.Config) -> None:
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    if config.option.tp_gpus < 0:
        raise pytest.UsageError(f"--tp-gpus is {config.option.tp_gpus}; it must be a number of GPUs")


def pytest_report_header(config: pytest.Config) -> str | None:
    if not config.option.tp_gpus:
        return None
    return f"tp_engine: the job promises {config.option.tp_gpus} GPUs; torch finds {_num_gpus(config)}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Turn a marker of ranks into a session parameter, so that tests with equal ranks share a server."""
    marker = metafunc.definition.get_closest_marker("tp_ranks")
    if marker is not None and "tp_ranks" in metafunc.fixturenames:
        numbers = _numbers(marker, metafunc.definition.nodeid)
        metafunc.parametrize("tp_ranks", numbers, indirect=True, scope="session", ids=[f"tp{one}" for one in numbers])


def pytest_runtest_setup(item: pytest.Item) -> None:
    stash = item.config.stash
    if (server := stash.get(_SERVER, None)) is not None:
        item.stash[_LOG_SIZE] = server.log_size()
        if _will_have(item, "tp_server") and (end := server.end()) is not None:
            how, cause = end
            pytest.fail(f"{server} {how} in a test before this one{f': {cause}' if cause else ''}", pytrace=False)
    if (llm := stash.get(_LLM, None)) is not None and _will_have(item, "tp_llm"):
        _fail_if_dead(llm)
    if (marker := item.get_closest_marker("tp_gpus")) is not None:
        needed, found = max(_numbers(marker, item.nodeid)), _num_gpus(item.config)
        promised: int = item.config.option.tp_gpus
        if found < needed <= promised:
            pytest.fail(
                f"the test needs {needed} GPUs, the job promised {promised} (--tp-gpus), torch finds {found}",
                pytrace=False,
            )
        if found < needed:
            pytest.skip(f"needs {needed} GPUs, torch finds {found}, and the job promised {promised} (--tp-gpus)")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Add to the reports of a failed test what the server logged meanwhile; in JUnit with junit_logging=all."""
    server = item.config.stash.get(_SERVER, None)
    if call.excinfo is None or server is None or "tp_server" not in getattr(item, "fixturenames", ()):
        return
    end = "" if server.exit_code is None else f"the server has ended with exit code {server.exit_code}\n"
    text = f"{server.log}:\n{server.log_since(item.stash.get(_LOG_SIZE, 0))}{end}"
    item.add_report_section(call.when, "log of tp_server", text)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a job without the promised GPUs, also if none of its tests asks for them."""
    config = session.config
    if _num_gpus_missing(config) and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if missing := _num_gpus_missing(config):
        terminalreporter.write_line(
            f"the job promised {config.option.tp_gpus} GPUs (--tp-gpus), and {missing} of them are missing", red=True
        )


@pytest.fixture(scope="session")
def tp_options(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The options of ``tp_server`` and ``tp_llm`` under their names in Python: those of ``--tp-serve``, unless
    conftest.py has a fixture of this name."""
    given = request.config.option.tp_serve
    if not given:
        return {}
    from shlex import split

    from tp_engine.options import parse_options
    from tp_engine.server.config import SERVE_TABLES

    options = parse_options("--tp-serve", "", SERVE_TABLES, split(given))
    return options.given["engine"] | options.given["server"]


@pytest.fixture(scope="session")
def tp_ranks(request: pytest.FixtureRequest, tp_options: dict[str, Any]) -> int:
    """The number of ranks."""
    request.config.stash[_PARAM] = getattr(request, "param", None)
    return int(getattr(request, "param", tp_options.get("tensor_parallel_size", 1)))


@pytest.fixture(scope="session")
def tp_server(
    request: pytest.FixtureRequest, tp_options: dict[str, Any], tp_ranks: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TpServer]:
    """Start a server with ``tp_options``, the demo model by default; with pytest-xdist each worker has its own."""
    log_file = tmp_path_factory.mktemp("tp_server") / "log"
    stash = request.config.stash
    with started(_for_ranks(request.config, tp_options, tp_ranks), log_file) as server:
        stash[_SERVER] = server
        try:
            yield server
        finally:
            del stash[_SERVER]


@pytest.fixture(scope="session")
def tp_llm(request: pytest.FixtureRequest, tp_options: dict[str, Any], tp_ranks: int) -> Iterator[LLM]:
    """Start an ``LLM`` with ``tp_options``; options of the server alone are left out."""
    from tp_engine import LLM

    stash = request.config.stash
    with LLM(**llm_options(_for_ranks(request.config, tp_options, tp_ranks))) as llm:
        stash[_LLM] = llm
        try:
            yield llm
        finally:
            del stash[_LLM]


def _will_have(item: pytest.Item, fixture: str) -> bool:
    """Whether the test has the server or the ``LLM`` that is there now, and not one with another number of ranks."""
    params: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    has_this = params.get("tp_ranks") == item.config.stash.get(_PARAM, None)
    return has_this and fixture in getattr(item, "fixturenames", ())


def _fail_if_dead(llm: LLM) -> None:
    try:
        llm.engine.stats()
    except RuntimeError as error:
        pytest.fail(f"tp_llm stopped in a test before this one: {error}", pytrace=False)


@pytest.fixture
def tp_eval(request: pytest.FixtureRequest, tp_server: TpServer) -> Callable[..., GateReport]:
    """A function that asks ``tp_server`` the questions of tasks, and fails the test if too few answers are right:
    ``tp_eval("sums", threshold="90%")``."""
    from tp_engine.apps.testing.gates import ask_tasks

    def ask(*tasks: str, **options: Any) -> GateReport:
        return _held(ask_tasks(tp_server, *tasks, **_recorded(request.config, options)), request.node)

    return ask


@pytest.fixture
def tp_bench(request: pytest.FixtureRequest, tp_server: TpServer) -> Callable[..., GateReport]:
    """A function that measures ``tp_server`` under load, and fails the test if it is slower than a baseline:
    ``tp_bench(against="baseline.json", tolerance="5%")``."""
    from tp_engine.apps.testing.gates import measure_speed

    def measure(**options: Any) -> GateReport:
        return _held(measure_speed(tp_server, **_recorded(request.config, options)), request.node)

    return measure


def _recorded(config: pytest.Config, options: dict[str, Any]) -> dict[str, Any]:
    """The options; with ``--tp-record`` what they compare with is written instead."""
    if not config.option.tp_record or options.get("against") is None:
        return options
    comparing = ("against", "tolerance", "force")
    return {name: value for name, value in options.items() if name not in comparing} | {"record": options["against"]}


def _held(report: GateReport, item: pytest.Item) -> GateReport:
    """The report, whose figures JUnit's file gets; fails the test unless it passed."""
    item.user_properties += [(line.name, line.measured) for line in report.lines]
    if report.exit_code:
        pytest.fail(report.as_text(), pytrace=False)
    return report


def _numbers(marker: pytest.Mark, test: str) -> tuple[int, ...]:
    """The whole numbers, at least 1, that a marker names."""
    numbers = marker.args
    if not numbers or marker.kwargs or not all(type(one) is int and one > 0 for one in numbers):
        raise pytest.UsageError(f"{test}: {marker.name}{numbers} must name whole numbers of at least 1, as in (2)")
    return numbers


def _for_ranks(config: pytest.Config, options: dict[str, Any], num_ranks: int) -> dict[str, Any]:
    """``options`` with the number of ranks, and the device: GPUs where the job promised enough, so that an engine that
    finds none fails; CPUs where a machine has fewer GPUs than ranks."""
    found = dict(options, tensor_parallel_size=num_ranks)
    if "device" not in options and num_ranks <= config.option.tp_gpus:
        found["device"] = "cuda"
    elif "device" not in options and num_ranks > 1 and _num_gpus(config) < num_ranks:
        found["device"] = "cpu"
    # The workers of pytest-xdist share the GPUs; what a CPU's cache does not use takes no memory.
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if num_workers > 1 and found.get("device") != "cpu" and _num_gpus(config) and not found.keys() & _MEMORY:
        found["gpu_memory_utilization"] = round(0.9 / num_workers, 3)
    return found


def _num_gpus(config: pytest.Config) -> int:
    if _NUM_GPUS not in config.stash:
        config.stash[_NUM_GPUS] = 0
        if any(map(os.path.exists, _DRIVERS)):  # importing torch takes seconds
            import torch

            config.stash[_NUM_GPUS] = torch.cuda.device_count()
    return config.stash[_NUM_GPUS]


def _num_gpus_missing(config: pytest.Config) -> int:
    """How many of the promised GPUs are not there; 0 without a promise."""
    promised: int = config.option.tp_gpus
    return max(0, promised - _num_gpus(config)) if promised else 0
