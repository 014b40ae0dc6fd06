"""Hosts whose GPUs torch cannot use, and the threads of a rank, with stand-ins for torch's answers."""

from __future__ import annotations

import ast
import logging
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.fake_gpus import FakeGpus
from tp_engine.apps.doctor import machine
from tp_engine.apps.doctor.findings import Status
from tp_engine.distributed import device_threads, groups
from tp_engine.distributed.collectives import SingleRank
from tp_engine.errors import ConfigError
from tp_engine.job.progress import RankProgress
from tp_engine.worker import gpu_host
from tp_engine.worker.device import CudaDevice
from tp_engine.worker.gpu_host import choose_device_type, why_no_gpus

PACKAGE = Path(__file__).parents[3] / "tp_engine"


TOO_OLD = "The NVIDIA driver on your system is too old"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpus:
    """A GPU host with driver 535 (CUDA 12.2) and a torch built for CUDA 13.2 that counts 8 GPUs."""
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Mon Feb 26 2024\nGCC version:  gcc 12.3.0\n"
    )
    gpus = FakeGpus(count=8, driver=(12, 2), error=TOO_OLD).install(monkeypatch)
    gpus.has_files(monkeypatch, tmp_path / "version", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("tp_engine.system.log._said", set())
    return gpus


def test_a_driver_that_is_too_old_is_refused_with_both_versions(host: FakeGpus) -> None:
    """Oracle: NVIDIA's table (CUDA 13 needs 580), the kernel's file and the driver's answer, in one error; the CPU
    stays usable."""
    for asked in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"CUDA 13\.2.*driver 535\.161\.08.*12\.2.*580 or newer.*--device cpu"):
            choose_device_type(asked)
    assert choose_device_type("cpu") == "cpu"


def test_another_error_of_cuda_is_told(host: FakeGpus) -> None:
    """Oracle: torch's own first line, where the driver is new enough."""
    host.driver, host.error = (13, 0), "Error 802: system not yet initialized\nmore"
    with pytest.raises(ConfigError, match=r"counts 8 GPUs and can use none.*Error 802: system not yet initialized\. L"):
        choose_device_type("auto")


def test_rocm_is_refused_with_both_versions(host: FakeGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: torch's version and HIP's in the error, also where torch says that its GPUs are available."""
    monkeypatch.setattr(torch.version, "hip", "7.1.2")
    host.error = ""
    with pytest.raises(ConfigError, match=rf"torch {torch.__version__.split('+')[0]}.*HIP 7\.1\.2.*NVIDIA GPUs"):
        choose_device_type("auto")
    host.count = 0
    assert why_no_gpus() is None


@pytest.mark.parametrize(
    ("cuda", "visible", "told"),
    [
        (None, None, "it is built without CUDA; install a torch built for CUDA"),
        ("13.2", None, r"built for CUDA 13\.2.*--gpus all"),
        ("13.2", "9", "CUDA_VISIBLE_DEVICES is '9'"),
        ("13.2", "", None),
        ("13.2", "-1", None),
    ],
)
def test_a_gpu_host_without_a_visible_gpu_warns(
    host: FakeGpus,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    cuda: str | None,
    visible: str | None,
    told: str | None,
) -> None:
    """Oracle: one warning with the reason, an error under torchrun, and neither where the user hides the GPUs."""
    host.count = 0
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with caplog.at_level(logging.WARNING):
        assert [choose_device_type("auto") for _ in range(2)] == ["cpu", "cpu"]
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (told is not None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    if told is None:
        assert choose_device_type("auto") == "cpu"
        return
    with pytest.raises(ConfigError, match=told):
        choose_device_type("auto")
    caplog.clear()
    assert choose_device_type("cpu") == "cpu" and not caplog.records


def test_a_host_without_gpus_says_nothing(
    host: FakeGpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Oracle: no warning."""
    host.count = 0
    host.has_files(monkeypatch, Path("/no/such/file"), Path("/no/such/folder"))
    assert choose_device_type("auto") == "cpu" and not caplog.records


def test_the_driver_tells_its_cuda(host: FakeGpus) -> None:
    """Oracle: the driver's number, 12080; without a driver there is no answer."""
    host.driver = (12, 8)
    assert gpu_host.cuda_of_driver() == (12, 8)
    host.driver = None
    assert gpu_host.cuda_of_driver() is None


def test_the_doctor_goes_on_where_cuda_does_not(host: FakeGpus) -> None:
    """Oracle: one missing thing, with both versions, and the engine would not run on these GPUs."""
    (finding,) = machine.check_devices()
    assert finding.status is Status.MISSING and "535.161.08" in finding.detail and not machine.has_gpu()


def test_the_doctor_asks_for_access_and_atomics(host: FakeGpus) -> None:
    """Oracle: two GPUs with access to each other and atomics in one direction, by hand."""
    host.count, host.error, host.atomics = 2, "", frozenset({(0, 1)})
    found = {finding.topic: finding for finding in machine.check_devices()}
    assert found["peer access"].status is Status.OK
    assert found["peer atomics"].status is Status.NOTE and "none between 1-0:" in found["peer atomics"].detail


def test_threads_of_a_rank_have_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: what a stand-in for torch was told in each thread, before the thread did anything else."""
    told: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3 if told else 0)
    gpu = torch.device("cuda", 3)
    with device_threads.device_pool(gpu, 1, name="x") as pool:
        pool.submit(told.append, "work").result(20)
    thread = device_threads.device_thread(gpu, lambda: told.append("body"), name="y")
    thread.start()
    thread.join(20)
    assert told == [gpu, "work", gpu, "body"]
    told.clear()
    device = CudaDevice(3, 1)
    device.enter_thread()
    device.enter_thread()
    assert told == [gpu]
    device_threads.use_device(torch.device("cpu"))
    assert told == [gpu]


def test_an_abort_from_another_thread_uses_the_ranks_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the order of the calls; torch asks CUDA's events in that thread, where GPU 0 is the current one."""
    told: list[object] = []
    for module, name in ((groups, "use_device"), (groups, "_abort_process_group")):
        monkeypatch.setattr(module, name, lambda *arguments, name=name: told.append((name, *arguments)))
    monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
    communicator, group = SingleRank(), cast(Any, "group")
    host = groups.HostGroup(communicator.info, None)
    joined = groups.RankGroups(communicator.info, communicator, host, RankProgress(), made=[group], device_group=group)
    joined.device = torch.device("cuda", 3)
    joined.abort()
    assert told == [("use_device", torch.device("cuda", 3)), ("_abort_process_group", "group")]


def test_ranks_start_threads_in_one_place() -> None:
    """Oracle: the rule, read from the source; threads that close or read files, those of the compiler, and ranks that
    are threads on CPUs touch no device."""
    allowed = {"features/tiers/rank_disk.py", "cpu/compiling/cache.py", "weights/read_ahead.py"}
    allowed |= {f"distributed/{name}.py" for name in ("device_threads", "groups", "thread_ranks")}
    parts = ("attention", "kernels", "layers", "models", "distributed", "sampling", "weights", "worker")
    for path in sorted(path for part in parts for path in (PACKAGE / part).rglob("*.py")):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        names |= {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        if {"Thread", "ThreadPoolExecutor", "Timer"} & names:
            assert path.relative_to(PACKAGE).as_posix() in allowed, f"{path}: use device_threads"
