"""The workflows of .github: what GitHub would refuse, or run with too many rights, is found before a push."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROGRAM = re.compile(r"(?:scripts|\.ci)/[\w./-]+")


def load(path: Path) -> dict[Any, Any]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def commands(job: dict[str, Any]) -> list[str]:
    """What a job's steps run, with each value of a matrix in its place."""
    lines = [step["run"] for step in job.get("steps", []) if "run" in step]
    values = job.get("strategy", {}).get("matrix", {}).get("command", [])
    return [line.replace("${{ matrix.command }}", value) for line in lines for value in values or [""]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_is_bounded_and_has_few_rights(path: Path) -> None:
    """Oracle: read-only rights by default, one run per group, a limit of time per job, a version of each action."""
    workflow = load(path)
    assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]["group"]
    assert True in workflow  # YAML's spelling of "on"
    for name, job in workflow["jobs"].items():
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= workflow["jobs"].keys()
        if "uses" in job:
            assert (ROOT / job["uses"]).is_file()
            continue
        assert 0 < job["timeout-minutes"] <= 90, name
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step), name
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+(\.\d+)*|release/v\d+)", step["uses"])
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False
            assert "${{ github" not in step.get("run", ""), "a text of others in a shell: give it as a variable"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_programs_that_exist(path: Path) -> None:
    """Oracle: the repository's files, which can be executed."""
    for job in load(path)["jobs"].values():
        for line in commands(job):
            for word in shlex.split(line):
                if PROGRAM.fullmatch(word):
                    assert os.access(ROOT / word, os.X_OK), word


def test_only_the_upload_may_publish() -> None:
    """Oracle: trusted publishing: one job has the right to a token of PyPI, and it runs after tests and build."""
    jobs = load(GITHUB / "workflows" / "publish.yml")["jobs"]
    assert [name for name, job in jobs.items() if "id-token" in job.get("permissions", {})] == ["upload"]
    assert set(jobs["upload"]["needs"]) == {"tests", "build"} and jobs["upload"]["environment"]["name"] == "pypi"


@pytest.mark.parametrize("path", sorted(GITHUB.glob("ISSUE_TEMPLATE/*.yml")), ids=lambda path: path.stem)
def test_issue_forms(path: Path) -> None:
    """Oracle: the fields that GitHub's issue forms require, with an id of its own each."""
    form = load(path)
    if path.stem == "config":
        assert all(link.keys() == {"name", "url", "about"} for link in form["contact_links"])
        return
    assert form["name"] and form["description"]
    assert all(part["type"] == "textarea" and part["attributes"]["label"] for part in form["body"])
    names = [part["id"] for part in form["body"]]
    assert len(set(names)) == len(names)
