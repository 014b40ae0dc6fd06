"""scripts/gpu_check: its sections, how it treats those that fail, hang or lack something, and its table."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from bench_kernels import parse as parse_kernels
from gpu import check, slices, wheels
from gpu.figures import Figure, figures_of
from gpu.run import STOP_S, Outcome, why_not
from gpu.sections import PLAN_S, PLANS, Section, all_sections
from gpu.slices import STEPS, WHOLES

from tp_engine.apps.bench.offline.options import parse_arguments as parse_offline
from tp_engine.apps.bench.serving.options import parse_arguments as parse_serve
from tp_engine.cli import main as cli
from tp_engine.model_config import load_model_config, read_model
from tp_engine.model_config.kv_layout import KvLayout

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
    """Oracle: 560 s, the most that a call of a plan may take; each plan shows its own sections, in order.  What runs
    beside others takes no time of its own, and ends before those that measure begin."""
    names: list[str] = []
    by_name = {one.name: one for one in sections()}
    for plan in PLANS:
        assert check.main(["--dry-run", "--plan", str(plan)]) == 0
        shown = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
        names += [line.split()[0] for line in shown]
        limits = {line.split()[0]: int(line.split()[1]) for line in shown}
        in_turn = sum(limit_s for name, limit_s in limits.items() if not by_name[name].beside)
        assert in_turn <= (PLAN_S - STOP_S if plan == 1 else PLAN_S)
        assert sum(limits.values()) == sum(one.limit_s for one in by_name.values() if one.plan == plan)
    assert names == [one.name for one in sections() if one.plan] and PLAN_S == 560
    first = [one for one in sections() if one.plan == 1]
    place = next(i for i, one in enumerate(first) if one.beside)
    covered = sum(one.limit_s for one in first[place + 1 :] if not one.alone)
    assert first[place].name == "compile" and first[place].limit_s <= covered


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
    hang = (
        "import subprocess, time; subprocess.Popen(['sleep', '50']); print('waiting', flush=True)\n"
        "try: time.sleep(50)\n"
        "except KeyboardInterrupt: print('FAILED tests/gpu/test_x.py::test_a - E')"
    )
    chosen = [
        section("fails", "print('{\"a\": 1}'); raise SystemExit(3)"),
        section("hangs", hang, limit_s=6.0),
        section("lacks", "", modules=("no_such_module",)),
        section("many", "", min_gpus=8),
        section("works", "print('= 3 passed in 1.0s ='); print('{\"benchmark\": \"steps\"')"),
        section("judges", 'print(\'{"verdict": "turn on"}\')'),
    ]
    with (tmp_path / "gpu_check.log").open("w") as log:
        outcomes = check.run_all(chosen, 1, time.monotonic() + 600.0, log, tmp_path)
    assert [outcome.status for outcome in outcomes] == ["failed", "timeout", "skipped", "skipped", "passed", "passed"]
    assert outcomes[0].report == {"a": 1} and outcomes[0].note == "exit code 3"
    assert outcomes[1].failed_tests == ["tests/gpu/test_x.py::test_a"]
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


def test_what_measures_is_alone(tmp_path: Path) -> None:
    """By hand: a section beside others ends after the next one has begun, and before one that is to be alone; it is
    saved as the others are."""
    files = f"import pathlib, time; here = pathlib.Path({str(tmp_path)!r})\n"
    wait = "while not (here / '{}').exists(): time.sleep(0.01)\n"
    touch = "(here / '{}').touch()\n"
    chosen = [
        section("compiles", files + wait.format("begun") + touch.format("ended"), beside=True),
        section("tests", files + touch.format("begun")),
        section("measures", files + "raise SystemExit(not (here / 'ended').exists())", alone=True),
    ]
    with (tmp_path / "gpu_check.log").open("w") as log:
        outcomes = check.run_all(chosen, 1, time.monotonic() + 600.0, log, tmp_path)
    assert {one.name: one.status for one in outcomes} == dict.fromkeys(("compiles", "tests", "measures"), "passed")
    assert outcomes[-1].name == "measures"
    assert len(json.loads((tmp_path / "gpu_check.json").read_text())) == 3


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
    """Oracle: the names that pytest printed; --again runs those alone, the first one at length, and the whole of what
    failed otherwise or did not run; nothing that has passed."""
    printed = "print('FAILED tests/gpu/test_x.py::test_a[1 2] - E'); print('ERROR tests/gpu/test_y.py::test_b')"
    ends = [
        section("kernels", printed + "; raise SystemExit(1)"),
        section("llama-70b_1", "raise SystemExit(1)"),
        section("memory", "", modules=("zmq_of_nobody",)),
        section("environment", ""),
        section("compile", "raise SystemExit(1)"),
    ]
    assert run_main(monkeypatch, tmp_path, ends) == 1
    saved = json.loads((tmp_path / "gpu_check.json").read_text())
    assert saved[0]["failed_tests"] == ["tests/gpu/test_x.py::test_a[1 2]", "tests/gpu/test_y.py::test_b"]
    capsys.readouterr()
    assert check.main(["--again", str(tmp_path / "gpu_check.json"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[::2]] == ["memory", "llama-70b_1", "kernels"]
    assert shown.count("   67 s") == 3 and "scripts/gpu/slices.py llama-70b-tp8" in shown
    assert "-x --tb=long 'tests/gpu/test_x.py::test_a[1 2]' tests/gpu/test_y.py::test_b" in shown
    saved[:3] = []
    (tmp_path / "gpu_check.json").write_text(json.dumps(saved))
    assert check.main(["--again", str(tmp_path / "gpu_check.json")]) == 0
    assert "nothing of" in capsys.readouterr().err


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


def test_packed_wheels_have_what_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By hand: what the wheels' descriptions ask for, but for extras, older Pythons, and what is there."""
    needs = ("Other_Name>=2", 'old; python_version < "3.11"', 'more; extra == "all"', "anyio")

    def download(name: str, *lines: str) -> SimpleNamespace:
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            text = "\n".join(["Metadata-Version: 2.1", *(f"Requires-Dist: {one}" for one in lines), "", ""])
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", text)
        return SimpleNamespace(returncode=0)

    download("first", *needs)
    download("other.name")
    assert wheels.not_packed(tmp_path) == set()
    monkeypatch.setattr(wheels, "CARRY", tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: download("first", *needs))
    assert wheels.pack() == 1 and "need other-name, too" in capsys.readouterr().err  # the other one was of another day


def test_compiled_kernels_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: Triton, which finds its kernel in another folder with another name, and compiles nothing."""
    triton = pytest.importorskip("triton")
    target = pytest.importorskip("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    monkeypatch.setattr(wheels, "CARRY", tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    code = "import triton.language as tl\ndef add(a, b): tl.store(b, tl.load(a) + 1.0)\n"
    kernel = triton.jit(import_file(tmp_path / "kernel.py", code).add)
    source, codes = triton.compiler.ASTSource(kernel, {"a": "*fp32", "b": "*fp32"}), set()
    for name in ("first", "second"):
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / name))
        assert wheels.bring_kernels() == tmp_path / name
        codes.add(triton.compile(source, target=target).asm["cubin"])
        assert "1 of 1 compiled kernels: 0.0 MiB" in wheels.keep_kernels(tmp_path / name, tmp_path)
        (tmp_path / name).rename(tmp_path / f"{name} machine")
    assert hits == [False, True] and len(codes) == 1
    assert [len(list(tmp_path.glob(f"{name} machine/*/*.ttir"))) for name in ("first", "second")] == [1, 0]


def import_file(path: Path, code: str) -> ModuleType:
    """A module of ``code``, in a file where Triton reads it."""
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_that_come_back_have_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the limit of a file that comes back; the small ones are in it, and it is written while sections run."""
    monkeypatch.setattr(wheels, "_MOST_BYTES", 3000)
    for number, size in enumerate((1000, 1500, 9000)):
        (tmp_path / "cache" / f"kernel{number}").mkdir(parents=True)
        (tmp_path / "cache" / f"kernel{number}" / "x.cubin").write_bytes(random.Random(number).randbytes(size))
    with wheels.Keeper(tmp_path / "cache", tmp_path) as keeper:
        keeper.keep()
        keeper._thread.join(60)
        assert (tmp_path / wheels.CACHE).exists()
    assert keeper.said.startswith("2 of 3 compiled kernels")
    with tarfile.open(tmp_path / wheels.CACHE) as archive:
        assert archive.getnames() == ["kernel0/x.cubin", "kernel1/x.cubin"]


@pytest.mark.parametrize("name", WHOLES)
def test_slices_are_compiled_with_few_layers(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Oracle: the reader of config.json, the benchmark's parser; all kinds of layers of the slice are there, and the
    shape of its step; its cache's blocks lie as far apart; a small share of the GPU."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(KvLayout, "block_bytes", KvLayout.block_bytes)  # put back at the end
    whole = read_model(WHOLES[name].slice())
    block_bytes = whole.kv_layout.block_bytes(16, 2)
    given: list[str] = []

    def keep(command: list[str]) -> int:
        given.extend(command)
        return 0

    monkeypatch.setattr(cli, "main", keep)
    monkeypatch.setattr(sys, "argv", ["slices.py", name, "--few"])
    assert slices.main() == 0
    args = parse_offline(given[given.index("offline") + 1 :])
    few = load_model_config(str(args.model))[0]
    assert len(few.layers) <= 4 and {repr(one) for one in few.layers} == {repr(one) for one in whole.layers}
    assert few.kv_layout.block_bytes(16, 2) == block_bytes
    measured = slices.steps_of(name, STEPS[name], WHOLES[name].slice(), is_rehearsal=False)
    assert given[given.index("--dtype") : -1] == measured[measured.index("--dtype") : -1]
    options, wanted = json.loads(given[-1]), json.loads(measured[-1])
    assert options.items() > wanted.items() and options["gpu_memory_utilization"] * len(WHOLES) < 0.6


def test_all_slices_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the table of slices; a rehearsal has one."""
    given: dict[str, list[str]] = {}
    monkeypatch.setattr(slices, "compile_all", lambda commands: given.update(commands) or 0)
    for more, names in ((["--rehearse"], [*WHOLES][:1]), ([], [*WHOLES])):
        monkeypatch.setattr(sys, "argv", ["slices.py", "--compile", *more])
        assert slices.main() == 0 and list(given) == names
        assert all(command[2:] == [name, "--few", *more] for name, command in given.items())
        given.clear()


def test_compiling_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: the number of slices that ran, the names and the output of others."""
    ends = {"good": [sys.executable, "-c", ""], "bad": [sys.executable, "-c", "raise SystemExit('no room')"]}
    assert slices.compile_all(ends) == 1
    shown = capsys.readouterr().out
    assert "bad:\nno room" in shown and "1 of 2 slices ran after" in shown and "; failed: bad" in shown


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
