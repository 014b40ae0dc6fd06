"""scripts/gpu_check: its sections, how it treats those that fail, hang or lack something, and its table."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from bench_kernels import parse as parse_kernels
from gpu import check, wheels
from gpu.figures import Figure, figures_of
from gpu.run import Outcome, why_not
from gpu.sections import PLAN_S, PLANS, Section, all_sections
from gpu.slices import WHOLES

from tp_engine.apps.bench.offline.options import parse_arguments as parse_offline
from tp_engine.apps.bench.serving.options import parse_arguments as parse_serve
from tp_engine.model_config import load_model_config

ROOT = Path(__file__).parents[3]


def section(name: str, code: str, limit_s: float = 30.0, **options: object) -> Section:
    return Section(name=name, what="", command=("-c", code), limit_s=limit_s, **options)  # type: ignore[arg-type]


def sections() -> list[Section]:
    return all_sections(check.parse_arguments(["--nano-vllm-path", "."]))


def test_without_a_gpu_it_says_so() -> None:
    """Oracle: exit code 2 and the remedy; no file is written."""
    done = subprocess.run(
        ["scripts/gpu_check", "--out", "never-made"], cwd=ROOT, env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode != 2:
        pytest.skip("this host has a GPU")
    assert "needs a CUDA GPU" in done.stderr and "--dry-run" in done.stderr and not (ROOT / "never-made").exists()


def test_dry_run_shows_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the sections; every script and test file in them exists."""
    assert check.main(["--dry-run"]) == 0
    shown = capsys.readouterr().out
    for one in sections():
        assert one.name in shown and one.limit_s <= 600
        paths = [part for part in one.command if part.startswith(("scripts/", "tests/"))]
        assert all((ROOT / path).exists() for path in paths), one
        assert paths or one.command[:3] == ("-m", "tp_engine", "bench"), one
    assert shown.count(sys.executable) == len(sections())


def test_benchmarks_are_called_as_they_want_it() -> None:
    """Oracle: the benchmarks' own parsers."""
    parsers: dict[str, Callable[[list[str]], object]]
    parsers = {"offline": parse_offline, "serve": partial(parse_serve, ""), "bench_kernels.py": parse_kernels}
    seen = set()
    for one in sections():
        is_command = one.command[:3] == ("-m", "tp_engine", "bench")
        name, *arguments = one.command[3:] if is_command else (Path(one.command[0]).name, *one.command[1:])
        if name in parsers and "--nano-vllm-path" not in arguments:
            parsers[name](arguments)
            seen.add(name)
    assert seen == parsers.keys()


def test_plans_fit_in_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: 560 s, the most that a call of a plan may take; each plan shows its own sections, in order."""
    names: list[str] = []
    for plan in PLANS:
        assert check.main(["--dry-run", "--plan", str(plan)]) == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
        names += [line.split()[0] for line in shown]
        assert sum(int(line.split()[1]) for line in shown) <= PLAN_S == 560
    assert names == [one.name for one in sections() if one.plan]


def test_peers_take_turns_where_they_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: the benchmark's own parser; without a peer the section measures this engine alone."""
    named = check.parse_arguments(["--peer-python", "vllm=/x/python", "--plan", "2"])
    for one in check.chosen(named):
        args = parse_offline(list(one.command[4:]))
        assert args.together and args.peer == ["vllm"] and args.peer_python["vllm"] == "/x/python"
    both = check.parse_arguments(["--peer-python", "vllm=/x/python", "--nano-vllm-path", "here", "--plan", "2"])
    command = check.chosen(both)[0].command
    assert command[command.index("--peer") :][:3] == ("--peer", "vllm", "nano-vllm")
    assert command[command.index("--workloads") + 1] == "latency,batch32,batch256"
    alone = parse_offline(list(check.chosen(check.parse_arguments(["--plan", "2"]))[0].command[4:]))
    assert alone.peer == [] and not alone.together
    with pytest.raises(SystemExit):
        check.parse_arguments(["--peer-python", "/x/python"])
    assert "it must be NAME=PATH with NAME vllm or nano-vllm" in capsys.readouterr().err


def test_the_page_has_the_saved_figures(tmp_path: Path) -> None:
    """Oracle: the table of docs/benchmarks/gpu.md is what ``--document`` makes of the file beside it."""
    page, figures = tmp_path / "gpu.md", json.loads((check.PAGE.parent / "gpu.json").read_text(encoding="utf-8"))
    page.write_text(check.PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    check.update(page, figures)
    assert page.read_text(encoding="utf-8") == check.PAGE.read_text(encoding="utf-8")
    check.update(page, [{"name": "steps", "figures": [asdict(Figure("gap", 1234.5, "us", 50.0, lower=True))]}])
    assert "| gap | 1,234 us | below 50 | steps |" in page.read_text(encoding="utf-8")
    page.write_text("no marks", encoding="utf-8")
    with pytest.raises(SystemExit, match="between which the table belongs"):
        check.update(page, figures)


def test_sections_can_be_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: their own order; the error for an unknown name lists the known ones."""
    args = check.parse_arguments(["--sections", "kernels,environment,engine", "--skip", "engine"])
    assert [one.name for one in check.chosen(args)] == ["environment", "kernels"]
    with pytest.raises(SystemExit):
        check.parse_arguments(["--sections", "grafs"])
    assert "no section is called grafs; there are bench_kernels" in capsys.readouterr().err


def test_it_goes_on_after_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Oracle: every section's end is reported; the files hold the output; the children of a hanging section are
    ended."""
    hang = "import subprocess, time; subprocess.Popen(['sleep', '50']); print('waiting', flush=True); time.sleep(50)"
    chosen = [
        section("fails", "print('{\"a\": 1}'); raise SystemExit(3)"),
        section("hangs", hang, limit_s=2.0),
        section("lacks", "", modules=("no_such_module",)),
        section("many", "", min_gpus=8),
        section("works", "print('= 3 passed in 1.0s ='); print('{\"benchmark\": \"steps\"')"),
        section("judges", 'print(\'{"verdict": "turn on"}\')'),
    ]
    with (tmp_path / "gpu_check.log").open("w") as log:
        outcomes = check.run_all(chosen, 1, 600.0, log, tmp_path)
    assert [outcome.status for outcome in outcomes] == ["failed", "timeout", "skipped", "skipped", "passed", "passed"]
    assert outcomes[0].report == {"a": 1} and outcomes[0].note == "exit code 3"
    assert [outcome.is_bad for outcome in outcomes] == [True, True, False, False, False, False]
    assert outcomes[2].note == "not installed: no_such_module" and "needs 8 GPUs, found 1" in outcomes[3].note
    assert "3 passed in 1.0s" in outcomes[4].note
    late = why_not(section("late", ""), 1, remaining_s=3.0)
    assert late is not None and late.status == "skipped" and "--budget-s" in late.note
    assert "waiting" in (tmp_path / "gpu_check.log").read_text()
    saved = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [one["name"] for one in saved] == [one.name for one in chosen]
    shown = capsys.readouterr().out
    assert (tmp_path / "gpu_check.txt").read_text() in shown
    for verdict in ("fails: failed exit code 3", "works: passed 3 passed in 1.0s", "judges: turn on"):
        assert f"== verdict: {verdict}" in shown
    assert [one["verdict"] for one in saved][-1] == "turn on" and saved[0]["figures"] == []


def test_figures_and_goals() -> None:
    """Oracle: the issue's goals, by hand: 26,000 tokens/s and 60 % missed and met, 80 % of a copy, 50 us."""
    batch, single = {"tokens_per_s": 25e3, "share_of_roofline": 0.7}, {"ms_per_token": 0.4, "share_of_roofline": 0.7}
    offline = {
        "shape": "qwen3-0.6b", "decode_roofline_ms": 0.28, "copy_gb_per_s": 4300.0, "matmul_tflops": 790.0,
        "workloads": [
            {"workload": "256 requests", "engines": {"tp_engine TP 1": batch}},
            {"workload": "latency", "engines": {"tp_engine TP 1": single}},
        ],
    }  # fmt: skip
    verdicts = {(figure.unit, figure.verdict) for figure in figures_of(offline)}
    assert ("tokens/s", "missed") in verdicts and ("of the roofline", "met") in verdicts
    rows = [{"kernel": "decode attention (bf16)", "size": size, "share_of_copy": 0.7} for size in ("1 x 9", "64 x 9")]
    rows.append(
        {"kernel": "prefill attention (bf16)", "size": "9 tokens", "share_of_copy": 0.1, "share_of_matmul": 0.5}
    )
    rows.append({"kernel": "x", "size": "1", "error": "y"})
    kernels = figures_of({"benchmark": "kernels", "copy_gb_per_s": 1.0, "results": rows})
    assert [figure.verdict for figure in kernels] == ["", "", "missed", ""] and kernels[-1].value == 0.5
    decodes: dict[str, object] = {"step_ms": 1.0, "share_of_roofline": 0.5, "gap_us_median": 40.0}
    decodes |= {"ms_to_first_token": 9.0, "mixed_step_ms": 2.0}
    steps = {"benchmark": "steps", "shape": "C", "batch_size": 256, "prompt_len": 8, "results": [decodes]}
    found = figures_of(steps)
    assert found[2] == Figure("C, 256 rows, prompts of 8, gap", 40.0, "us", 50.0, lower=True)
    assert found[2].verdict == "met" and figures_of({"benchmark": "unknown"}) == []
    assert "      50  met" in check.table([Outcome(name="steps", status="passed", report=steps)])


def run_main(monkeypatch: pytest.MonkeyPatch, out: Path, chosen: list[Section], *arguments: str) -> int:
    """The exit code on a host with one GPU, with these sections and nothing to bring along."""
    monkeypatch.setattr(check, "count_gpus", lambda: 1)
    monkeypatch.setattr(check, "chosen", lambda _args: chosen)
    monkeypatch.setattr(wheels, "CARRY", out / "carry")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(out / "triton"))
    return check.main(["--out", str(out), *arguments])


@pytest.mark.parametrize(
    ("chosen", "code"),
    [
        ([section("works", "")], 0),
        ([section("works", ""), section("lacks", "", modules=("zmq_of_nobody",))], 3),
        ([section("fails", "raise SystemExit(1)"), section("lacks", "", modules=("zmq_of_nobody",))], 1),
        ([section("lacks", "", prefix=("no-such-sanitizer",))], 3),
    ],
    ids=["all ran", "one lacks", "one failed", "no program"],
)
def test_what_did_not_run_is_no_success(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chosen: list[Section],
    code: int,
) -> None:
    """By hand: the exit code, and a line in front that says what to bring."""
    assert run_main(monkeypatch, tmp_path, chosen) == code
    first = capsys.readouterr().out.splitlines()[0]
    assert ("this machine lacks zmq_of_nobody" in first and "--pack" in first) == any(one.modules for one in chosen)


def test_failed_tests_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Oracle: the names that pytest printed; --again runs those alone, the first one at length."""
    printed = "print('FAILED tests/gpu/test_x.py::test_a[1 2] - E'); print('ERROR tests/gpu/test_y.py::test_b')"
    assert run_main(monkeypatch, tmp_path, [section("kernels", printed + "; raise SystemExit(1)")]) == 1
    saved = json.loads((tmp_path / "gpu_check.json").read_text())
    assert saved[0]["failed_tests"] == ["tests/gpu/test_x.py::test_a[1 2]", "tests/gpu/test_y.py::test_b"]
    capsys.readouterr()
    assert check.main(["--again", str(tmp_path / "gpu_check.json"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "kernels" in shown and " 200 s" in shown
    assert "-x --tb=long 'tests/gpu/test_x.py::test_a[1 2]' tests/gpu/test_y.py::test_b" in shown


def test_wheels_travel_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: what is missing becomes importable, here and in children; what is there stays as it is."""
    carry = tmp_path / "carry"
    carry.mkdir()
    for name in ("brought_along", "numpy"):
        with zipfile.ZipFile(carry / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "x = 5")
    monkeypatch.setattr(wheels, "CARRY", carry)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("PYTHONPATH", "")
    assert wheels.missing(("brought_along", "json")) == ["brought_along"]
    assert wheels.unpack() == ["brought_along"] and wheels.missing(("brought_along",)) == []
    done = subprocess.run([sys.executable, "-c", "import brought_along; print(brought_along.x)"], capture_output=True)
    assert done.stdout == b"5\n"


def test_packed_wheels_are_those_of_the_sections(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: the sections' modules; what a machine with PyTorch has is not downloaded."""
    there = {"torch", "triton", "transformers", "safetensors", "pytest", "jinja2"}
    assert {name for one in sections() for name in one.modules} - there <= wheels.PACKAGES.keys()
    called: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        called.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(wheels, "CARRY", tmp_path / "carry")
    monkeypatch.setattr(subprocess, "run", run)
    assert wheels.pack() == 0
    assert {"msgspec", "pydantic-core", "--no-deps"} <= set(called[0]) and str(ROOT / "constraints.txt") in called[0]


def test_compiled_kernels_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the files that were in the cache."""
    monkeypatch.setattr(wheels, "CARRY", tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "first"))
    (wheels.bring_kernels() / "kernel").mkdir()
    (tmp_path / "first" / "kernel" / "x.cubin").write_bytes(b"code")
    assert "compiled kernels: " in wheels.keep_kernels(tmp_path / "first", tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "second"))
    assert (wheels.bring_kernels() / "kernel" / "x.cubin").read_bytes() == b"code"


@pytest.mark.parametrize("name", WHOLES)
def test_slices_are_shares_of_models_that_are_served(name: str, tmp_path: Path) -> None:
    """Oracle: the reader of config.json; heads, or experts' sizes, times the ranks are those of the whole model."""
    whole = WHOLES[name]
    (tmp_path / "config.json").write_text(json.dumps(whole.slice()))
    spec, _ = load_model_config(str(tmp_path))
    assert len(spec.layers) == (whole.num_layers or whole.sizes["num_hidden_layers"])
    assert whole.slice()["num_attention_heads"] * whole.world_size == whole.sizes["num_attention_heads"]
    for size in ("intermediate_size", "moe_intermediate_size", "vocab_size"):
        if size in whole.sizes:
            assert whole.slice()[size] * whole.world_size == whole.sizes[size]
