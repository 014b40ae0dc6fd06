"""The workflows of .github: what GitHub would refuse, or run with too many rights, is found before a push."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
KIT = ROOT / "deploy" / "ci"
OWN_ACTION = "tp-engine/tp_engine/deploy/ci/action"
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


@pytest.mark.parametrize("path", [*WORKFLOWS, KIT / "example.yml"], ids=lambda path: path.stem)
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
                assert re.fullmatch(rf"[\w.-]+/[\w.-]+@(v\d+(\.\d+)*|release/v\d+)|{OWN_ACTION}@main", step["uses"])
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


def test_the_action_s_inputs_reach_its_steps() -> None:
    """Oracle: GitHub's rules of composite actions; inputs are variables, so that no text of others is run as code."""
    action = load(KIT / "action" / "action.yml")
    assert action["runs"]["using"] == "composite" and (ROOT / OWN_ACTION.removeprefix("tp-engine/tp_engine/")).is_dir()
    used = set()
    for step in action["runs"]["steps"]:
        assert step["shell"] == "bash" and "${{" not in step["run"]
        subprocess.run(["bash", "-n"], input=step["run"], text=True, check=True, timeout=20)
        names = {variable: re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value) for variable, value in step["env"].items()}
        assert all(f"${variable}" in step["run"] and name for variable, name in names.items())
        used |= {name[1] for name in names.values() if name}
    assert used == action["inputs"].keys() and all("default" in one for one in action["inputs"].values())
    given = [step["with"] for job in load(KIT / "example.yml")["jobs"].values() for step in job["steps"]
             if step.get("uses", "").startswith(OWN_ACTION)]  # fmt: skip
    assert given and all(one.keys() <= action["inputs"].keys() for one in given)


def test_gitlab_s_template() -> None:
    """Oracle: its variables are those that its scripts use; JUnit is kept of failed jobs too, and time is limited."""
    template = load(KIT / "gitlab.yml")
    base, gpus = template[".tp-engine"], template[".tp-engine-gpus"]
    scripts = "\n".join([*base["before_script"], *base["script"], *gpus["before_script"]])
    subprocess.run(["bash", "-n"], input=scripts, text=True, check=True, timeout=20)
    assert set(re.findall(r"\$(TP_\w+)", scripts)) == {name for name in base["variables"] if name.startswith("TP_")}
    assert base["artifacts"]["when"] == "always" and base["artifacts"]["reports"]["junit"] == "results/*.xml"
    assert (
        gpus["extends"] == ".tp-engine" and gpus["timeout"] and base["timeout"] and gpus["variables"]["TP_GPUS"] == "8"
    )


# Stands in for Python: notes the indexes and the arguments that it is called with, and makes environments.
STUB = """#!/bin/sh
printf '%s|%s\\n' "$(echo $PIP_EXTRA_INDEX_URL)" "$*" >>"$CALLS"
case "$*" in "-m venv .venv") mkdir -p .venv/bin; : >.venv/bin/activate ;; esac
"""


def calls_of(script: str, folder: Path, **variables: str) -> list[tuple[str, str]]:
    """The indexes and the arguments of every Python that ``script`` starts."""
    programs, calls = folder / "bin", folder / "calls"
    programs.mkdir(exist_ok=True)
    calls.write_text("")
    for name in ("python", "python3"):
        (programs / name).write_text(STUB)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(calls), **variables}
    subprocess.run(["bash", "-e", "-c", script], cwd=folder, env=environment, check=True, timeout=20)
    found = [line.partition("|") for line in calls.read_text().splitlines()]
    return [(index, words) for index, _, words in found]


CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Where tp_engine comes from -> what pip gets, in a folder with a wheel.
INSTALLS = {
    "tp-engine": "tp-engine",
    "tp-engine==1.2.3": "tp-engine==1.2.3",
    "dist/*.whl": "dist/tp_engine-1.2.3-py3-none-any.whl",
    "./engine": "./engine",
    "git+https://host/engine@main": "git+https://host/engine@main",
}


@pytest.mark.parametrize(("install", "given"), INSTALLS.items(), ids=list(INSTALLS))
def test_every_line_of_the_action_and_the_template_runs(tmp_path: Path, install: str, given: str) -> None:
    """Oracle: what a Python is started with, by all of the action's steps and by both of GitLab's jobs: installed from
    an index, a path or a repository, with further indexes; gates that are not asked for are not run."""
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / "tp_engine-1.2.3-py3-none-any.whl").touch()
    inputs = {
        "tests": "tests", "eval": "MODEL --threshold 60%", "bench": "--against b.json", "gpus": "0", "serve": "-tp 2",
        "install": install, "index": "https://own/simple", "requirements": "openai", "results": "out",
    }  # fmt: skip
    found = []
    for step in load(KIT / "action" / "action.yml")["runs"]["steps"]:
        variables = {name: inputs[value[len("${{ inputs.") : -len(" }}")]] for name, value in step["env"].items()}
        found += calls_of(step["run"], tmp_path, **variables)
    install_line = (f"https://own/simple {CPU_INDEX}", f"-m pip install --quiet pytest {given} openai")
    assert found == [
        install_line,
        ("", "-m torch.distributed.run --standalone --nproc-per-node 0 -m tp_engine check --device cuda --only machine "
             "--junit out/machine.xml"),
        ("", "-m pytest tests --tp-gpus 0 --tp-serve -tp 2 --junitxml out/tests.xml --basetemp out/tmp "
             "-o junit_logging=all"),
        ("", "-m tp_engine eval MODEL --threshold 60% --junit out/eval.xml"),
        ("", "-m tp_engine bench serve --against b.json --junit out/speed.xml"),
    ]  # fmt: skip
    template = load(KIT / "gitlab.yml")
    base, gpus = template[".tp-engine"], template[".tp-engine-gpus"]
    given_here = {"TP_INSTALL": install, "TP_INDEX": "https://own/simple", "TP_REQUIREMENTS": "openai"}
    scripts = "\n".join([*base["before_script"], *base["script"]])
    assert [words.split()[1] for _, words in calls_of(scripts, tmp_path, **base["variables"])] == ["pip", "pytest"]
    gates = {"TP_EVAL": "--threshold 60%", "TP_BENCH": "--against b.json", "TP_TESTS": ""}
    found = calls_of(scripts, tmp_path, **base["variables"] | given_here | gates)
    assert found == [
        install_line,
        ("", "-m tp_engine eval --threshold 60% --junit results/eval.xml"),
        ("", "-m tp_engine bench serve --against b.json --junit results/speed.xml"),
    ]
    of_gpus = "\n".join([*gpus["before_script"], *base["script"]])
    made, installed, checked, tested = calls_of(of_gpus, tmp_path, **base["variables"] | gpus["variables"] | given_here)
    assert made[1] == "-m venv .venv" and "--nproc-per-node 8" in checked[1] and "--tp-gpus 8" in tested[1]
    assert installed == ("https://own/simple", install_line[1])


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
