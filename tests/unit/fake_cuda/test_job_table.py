"""The table of jobs on fake GPUs, as far as it can be checked without torch's CUDA build."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

from tests.fake_cuda.cuda_lines import PACKAGE, cuda_lines, lines_of
from tests.fake_cuda.jobs import FAULTS, JOBS, LAUNCHED_OPTIONS, REFUSALS, Job
from tests.families import FAMILIES
from tp_engine.config import EngineConfig
from tp_engine.job.faults import parse_faults

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "design" / "fake_gpus.md").read_text()
NODE = (ROOT / "tests" / "fake_cuda" / "node.py").read_text()


@pytest.mark.parametrize("job", JOBS, ids=[job.name for job in JOBS])
def test_a_job_can_start(job: Job) -> None:
    """Its options, model and program exist; the CPU's options have nothing that only GPUs have."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    assert names >= {*job.all_options(), *job.oracle_options()}
    EngineConfig(model="a folder", **job.all_options())
    EngineConfig(model="a folder", **job.oracle_options())
    assert job.model["architecture"] in FAMILIES
    programs = ast.parse((ROOT / "tests" / "fake_cuda" / "programs.py").read_text())
    assert job.program in {node.name for node in programs.body if isinstance(node, ast.FunctionDef)}


def test_the_page_has_every_job() -> None:
    """Its table is this one: in the same order, with the same words."""
    rows = [f"| {row.name} | {row.covers} |" for row in (*JOBS, *REFUSALS, *FAULTS)]
    found = [line for line in PAGE.splitlines() if line in rows]
    assert found == rows, "copy the rows that are missing"


def test_names_variables_and_messages() -> None:
    """Names are different, variables are those of the runtime, messages are patterns, faults can be read."""
    rows = (*JOBS, *REFUSALS, *FAULTS)
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        for name, value in row.node.items():
            assert re.search(rf"^{name} ", NODE, re.MULTILINE) or f"{name}:" in NODE, name
            assert name != "FAULTS" or re.fullmatch(r"((alloc|hang|lost|start)@\d+:\d+ ?)+", value)
    for row in (*REFUSALS, *FAULTS):
        re.compile(row.message)
    for fault in FAULTS:
        assert bool(parse_faults(fault.fault)) != bool(fault.node), "a fault of a rank, or one of its GPU"
    EngineConfig(model="a folder", **LAUNCHED_OPTIONS)


def test_the_lines_of_the_cuda_path() -> None:
    """By hand: functions that name CUDA, without their branches for CPUs."""
    source = '''
def elsewhere():
    return 1

def upload(device):
    """Text."""
    if device.type != "cuda":
        return None
    room = pin()
    if device.type == "cuda":
        return room
    return 2

class Reader:
    def start(self):
        if self._is_cuda:
            copy()
        else:
            view()
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            stop()
'''
    assert cuda_lines(source) == {7, 9, 10, 11, 16, 17, 20, 21, 23}
    kernels = """
@jit
def add(a):
    store(a)

def launch(a):
    add[(1,)](a)

class CudaMover:
    def wait(self):
        self.stream.wait()
"""
    assert cuda_lines(kernels) == {11} and cuda_lines(kernels, launches=True) == {7, 11}


def test_every_file_with_cuda_counts() -> None:
    """By hand: files in which most is for CUDA, wherever they lie; the number of all lines, to its order."""
    of = {str(path.relative_to(PACKAGE)): len(lines_of(path)) for path in PACKAGE.rglob("*.py")}
    named = ("weights/transfer.py", "layers/upload.py", "features/tiers/block_moves.py", "apps/check/machine.py")
    launches = ("kernels/attention/paged_decode_triton.py", "kernels/distributed/gather_triton.py")
    assert all(of[name] > 5 for name in (*named, *launches)) and of["kernels/short_conv.py"] == 0
    assert sum(of.values()) > 1000
