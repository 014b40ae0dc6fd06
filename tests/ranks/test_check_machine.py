"""``torchrun -m tp_engine check --only machine`` on CPU ranks: its findings, its exit code, and a rank that stops."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.ranks.launch import torchrun
from tests.ranks.warm_ranks import warm_ranks
from tests.tiny_models import make_checkpoint
from tp_engine.apps.check.launched import main

pytestmark = pytest.mark.slow
MACHINE = ("--only", "machine", "--device", "cpu")
MODEL = ("--quick", "--device", "cpu", "--num-gpu-blocks-override", "200")


def check(arguments: Sequence[str]) -> None:
    """A rank of a check."""
    sys.exit(main(arguments))


def test_a_machine_that_is_right(tmp_path: Path) -> None:
    """Oracle: every row of the table for CPUs is right, and what needs GPUs is skipped with the reason."""
    junit = tmp_path / "new" / "machine.xml"
    printed = warm_ranks(3, check, (*MACHINE, "--json", "--junit", str(junit)))
    report = json.loads(printed[printed.index("\n{\n") :])
    ways = {one["name"]: one["status"] for one in report["findings"]}
    kinds = ("all_reduce", "tree_reduce", "all_gather", "gather", "speed")
    assert ways == {f"{kind}, {way}": "right" for way in ("shm", "gloo") for kind in kinds} | {"peer copies": "skipped"}
    cases = {case.attrib["name"]: case for case in ElementTree.parse(junit).iter("testcase")}
    assert cases.keys() == ways.keys() and cases["peer copies"].find("skipped") is not None


@pytest.mark.parametrize(("fault", "rank"), [("1:profile:stop", 1), ("0:profile:kill", 0)])
def test_a_rank_that_stops_or_dies_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, rank: int
) -> None:
    """Oracle: the rank of the fault, in JUnit's file and on the terminal; torchrun's exit code is 1."""
    junit = tmp_path / "machine.xml"
    monkeypatch.setenv("TP_ENGINE_FAULT", fault)
    limits = ("--limit-s", "6", "--flight-recorder-dir", str(tmp_path))
    job = torchrun(2, ["-m", "tp_engine", "check", *MACHINE, *limits, "--junit", str(junit)])
    assert job.returncode == 1
    (case,) = ElementTree.parse(junit).iter("testcase")
    failure = case.find("failure")
    assert failure is not None and failure.attrib["message"].startswith(f"rank {rank}: ")
    assert "the others were at: " in failure.attrib["message"]
    assert f"where: rank {rank}" in job.stdout


def test_the_model_comes_after_the_machine(tmp_path: Path) -> None:
    """Oracle: one report with findings on both, all right, of a tiny model on the ranks that the machine has."""
    folder, junit = make_checkpoint(tmp_path / "model", num_layers=2, max_position=256), tmp_path / "both.xml"
    warm_ranks(2, check, (*MODEL, str(folder), "--junit", str(junit)))
    names = {case.attrib["name"] for case in ElementTree.parse(junit).iter("testcase")}
    assert names >= {"all_reduce, shm", "speed, gloo", "hidden states", "alone", "one rank"}
