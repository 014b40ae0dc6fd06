"""Fixtures of the whole suite: small checkpoints, one thread per process, checks for leaks."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.covers import unmade
from tests.leaks import footprint, leaked_since
from tests.plain_environment import make_plain_environment
from tests.skip_list import pytest_addoption, pytest_configure  # noqa: F401 - the hooks of a plugin
from tests.tiny_models import make_checkpoint
from tp_engine.system.importing import without_collections
from tp_engine.system.isolation.process import end_isolated_processes, needed_by

# Set before torch is imported, here and in every process that a test starts, because several ranks share a few cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads of tests that have two sleep between two kernels
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Hypothesis draws the same examples in every run, and a busy machine may take its time over them.
hypothesis.settings.register_profile(
    "same each time", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("same each time")

FEW_MODULES = 40
RANKS = Path(__file__).parent / "ranks"

# scripts/test_multi_gpu runs these on every rank of a torchrun job, scripts/test_fake_gpus those with torch for CUDA.
collect_ignore = [
    "interpreted",
    *([] if "RANK" in os.environ else ["multi_gpu"]),
    *([] if "TP_ENGINE_FAKE_GPUS" in os.environ else ["fake_cuda"]),
]


@pytest.fixture(scope="session", autouse=True)
def session_leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the run if fixtures of any scope left a process or a shared-memory segment.  Processes of isolated calls are
    kept from test to test."""
    before = footprint()
    needed_by(request.session)
    yield
    end_isolated_processes()
    if leaks := leaked_since(before):
        pytest.fail("the test session left behind:\n  " + "\n  ".join(leaks))


@pytest.fixture(autouse=True)
def leaves_nothing(session_leaves_nothing: None) -> Iterator[None]:
    """Fail a test that leaves a process or a shared-memory segment."""
    before = footprint()
    yield
    if leaks := leaked_since(before, engines_go_on=True):
        pytest.fail("the test left behind:\n  " + "\n  ".join(leaks))


@pytest.fixture(autouse=True)
def covers_what_it_made(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that names a model in ``@covers`` whose configuration no test has made."""
    yield
    missing = unmade(request.node) if request.node.get_closest_marker("covers") else []
    assert not missing, f"it names models that it does not run: {', '.join(missing)}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put jobs of several ranks first: beside short tests they leave no core idle, and the run does not end with a few
    long ones."""
    items.sort(key=lambda item: RANKS not in item.path.parents)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What exists then lives to the end: it is not searched for garbage while it is made, nor do engines search it,
    which collect garbage when they start, or change what is excluded from garbage collection."""
    with without_collections():
        return (yield)


@pytest.fixture(autouse=True)
def libraries_are_not_searched(kept_modules: list[int]) -> Iterator[None]:
    """Exclude from garbage collection the libraries that the previous test has imported."""
    if len(sys.modules) > kept_modules[0] + FEW_MODULES:
        gc.collect()
        gc.freeze()
        kept_modules[0] = len(sys.modules)
    yield


@pytest.fixture(scope="session")
def kept_modules() -> list[int]:
    """The number of modules whose objects are excluded from garbage collection."""
    return [0]


@pytest.fixture(autouse=True)
def same_numbers_each_time(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seed the global generators with the test's name, so that each run draws the same numbers; restore the number of
    torch's threads."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if torch := sys.modules.get("torch"):
        # Not torch.manual_seed: it formats the stack for a CUDA that is not there, which costs more than most tests.
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Restore the library's logger and its level in the environment, which commands and launched processes change."""
    logger, level = logging.getLogger("tp_engine"), os.environ.get("TP_ENGINE_LOG_LEVEL")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before
    if level is None:
        os.environ.pop("TP_ENGINE_LOG_LEVEL", None)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``checkpoint("llama", num_layers=3, ...)`` -> folder; made once per session for each set of parameters.

    Parameters are those of ``tests.tiny_models.make_checkpoint``; never write into the folder.
    """
    made: dict[str, Path] = {}

    def get(architecture: str = "qwen3", **parameters: Any) -> Path:
        key = repr((architecture, sorted(parameters.items())))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **parameters)
        return made[key]

    return get


@pytest.fixture(scope="session")
def plain_environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The variables of a shell in which the environment that README's commands make is active."""
    return make_plain_environment(tmp_path_factory.mktemp("plain") / "venv")


@pytest.fixture(scope="session", autouse=True)
def engines_in_threads() -> Iterator[None]:
    """Run the engine of an ``LLM`` in this process; ``tests.services.services()`` gives it a process of its own."""
    from tests.services import services, start_in_thread

    with services(start_in_thread):
        yield


@pytest.fixture(scope="module")
def own_processes() -> Iterator[None]:
    """Run a module's engines as users' engines run, in separate processes."""
    from tests.services import services

    with services():
        yield


@pytest.fixture(scope="module")
def warm_children() -> Iterator[None]:
    """Fork ranks and HTTP processes of this process's engines, for a module that is not about how they start."""
    from tests.ranks.warm_children import warm_start

    with warm_start():
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the parity table: the families that equalled transformers, with the ranks and settings of this run."""
    found: dict[str, dict[str, dict[int, bool]]] = {}
    for report in (report for reports in terminalreporter.stats.values() for report in reports):
        for key, value in getattr(report, "user_properties", ()):
            if key == "parity":
                family, world_size, setting, is_equal = value
                found.setdefault(family, {}).setdefault(setting, {})[world_size] = is_equal
    if not found:
        return
    settings = list(dict.fromkeys(setting for row in found.values() for setting in row))
    terminalreporter.section("parity with transformers: numbers of ranks with equal tokens, by setting")
    width = max(len(family) for family in found) + 2
    terminalreporter.line(f"{'family':<{width}}" + "".join(f"{setting:<14}" for setting in settings))
    for family, row in sorted(found.items()):
        cells = (row.get(setting, {}) for setting in settings)
        texts = (" ".join(f"{size}{'' if cell[size] else '!'}" for size in sorted(cell)) for cell in cells)
        terminalreporter.line(f"{family:<{width}}" + "".join(f"{text:<14}" for text in texts))
