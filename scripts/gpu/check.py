"""Check a GPU host (scripts/gpu_check): run sections, each a separate command, and print one table at the end.

Every section has a time limit and ends with a verdict.  After a failure the next section still runs.  --out keeps
gpu_check.log (all output), gpu_check.json (reports, figures, verdicts) and gpu_check.txt (the table), written anew
after each section, those of a plan in a separate folder; --document FILE ... writes the figures of such JSON files into
docs/benchmarks/gpu.md.  --pack downloads what a machine without a package index lacks, and says what to call there;
--again FILE runs what failed or did not run according to the gpu_check.json of an earlier call.  Exit code 0: all
passed; 1: something failed; 2: no GPU here; 3: something did not run.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from gpu.figures import figures_of, kernel_times
from gpu.run import ROOT, STOP_S, Outcome, run_section, why_not
from gpu.sections import AGAIN_S, GPU_PEERS, PLAN_S, PLANS, Section, again, all_sections
from gpu.wheels import CARRY, PACKAGES, Keeper, bring_kernels, missing, pack, unpack

PAGE = ROOT / "docs" / "benchmarks" / "gpu.md"
_BEGIN, _END = "<!-- figures of scripts/gpu_check -->", "<!-- end of the figures -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen sections; returns the exit code."""
    began_s = time.monotonic()
    args = parse_arguments(arguments)
    if args.document:
        update(PAGE, [section for file in args.document for section in json.loads(file.read_text(encoding="utf-8"))])
        return 0
    if args.pack:
        return pack()
    if args.again:
        saved = json.loads(args.again.read_text(encoding="utf-8"))
        failed = {one["name"]: one["failed_tests"] for one in saved if one["status"] != "passed"}
        sections = again(all_sections(args), failed)
        if not sections:
            print(f"nothing of {args.again} is to run again", file=sys.stderr)
            return 0
    else:
        sections = chosen(args)
    if args.list or args.dry_run:
        for section in sections:
            print(f"{section.name:<16}{section.limit_s:>5.0f} s  {section.what}")
            if args.dry_run:
                print("    " + shlex.join(section.argv()))
        return 0
    num_gpus = count_gpus()
    if num_gpus == 0:
        print(
            "gpu_check needs a CUDA GPU, and torch finds none here. scripts/gpu_check --dry-run shows what it would "
            "run; scripts/test runs what needs no GPU.",
            file=sys.stderr,
        )
        return 2
    out, budget_s = args.out, args.budget_s
    if names := unpack():
        print(f"brought along: {', '.join(names)}")
    lacking = missing(tuple(dict.fromkeys(name for section in sections for name in section.modules)))
    if lacking:
        wheels = [wheel for name in lacking for wheel in PACKAGES.get(name, (name,))]
        print(
            f"this machine lacks {', '.join(lacking)}: sections that need them are skipped. Where there is a package "
            f"index, scripts/gpu_check --pack downloads the wheels of {', '.join(wheels)} into {CARRY.name}/, which "
            "then travels along"
        )
    if args.again:
        out, budget_s = out / "again", min(budget_s, AGAIN_S)
    elif args.plan is not None:
        out, budget_s = out / f"plan_{args.plan}", budget_s if args.rehearse else min(budget_s, PLAN_S)
    out.mkdir(parents=True, exist_ok=True)
    deadline_s = began_s + budget_s - STOP_S
    with (out / "gpu_check.log").open("w", encoding="utf-8") as log, Keeper(bring_kernels(), out) as keeper:
        outcomes = run_all(sections, num_gpus, deadline_s, log, out, keeper)
    print(keeper.said)
    if any(outcome.is_bad for outcome in outcomes):
        return 1
    return 3 if any(outcome.status == "skipped" for outcome in outcomes) else 0


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    plans = "; ".join(f"{number} {what}" for number, what in PLANS.items())
    parser.add_argument("--plan", type=int, choices=PLANS, help=f"the sections of a call of {PLAN_S} s: {plans}")
    parser.add_argument("--sections", help="comma-separated names (default: all); --list shows them")
    parser.add_argument("--skip", default="", help="comma-separated names of sections to leave out")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="seconds for everything together")
    default = Path(os.environ.get("OUT") or "gpu_check_results")
    parser.add_argument("--out", type=Path, default=default, help="folder for the results (default: %(default)s)")
    parser.add_argument(
        "--document", type=Path, nargs="+", metavar="FILE", help="write their figures into docs/benchmarks/gpu.md"
    )
    parser.add_argument("--pack", action="store_true", help="download what a GPU machine lacks, and say what to call")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help=f"run its failed tests once more, for at most {AGAIN_S} s"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="plan 1 with tiny models and without its time limits, on a fake GPU"
    )
    parser.add_argument("--nano-vllm-path", help="also measure the nano-vllm in this folder")
    peers = " or ".join(GPU_PEERS)
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help=f"also measure this peer, {peers}, with an interpreter that has it",
    )
    parser.add_argument("--list", action="store_true", help="show the sections")
    parser.add_argument("--dry-run", action="store_true", help="show the commands, without running them")
    args = parser.parse_args(arguments)
    if wrong := [pair for pair in args.peer_python if pair.partition("=")[0] not in GPU_PEERS or "=" not in pair]:
        parser.error(f"--peer-python is {', '.join(wrong)}; it must be NAME=PATH with NAME {peers}")
    known = {section.name for section in all_sections(args)}
    named = set(filter(None, [*(args.sections or "").split(","), *args.skip.split(",")]))
    if unknown := named - known:
        parser.error(f"no section is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    return args


def chosen(args: argparse.Namespace) -> list[Section]:
    """The sections to run, in their own order."""
    wanted, unwanted = set((args.sections or "").split(",")), set(args.skip.split(","))
    return [
        section
        for section in all_sections(args)
        if (args.sections is None or section.name in wanted) and section.name not in unwanted
        if args.plan is None or section.plan == args.plan
    ]


def count_gpus() -> int:
    """The number of GPUs that torch sees; 0 without torch."""
    try:
        import torch
    except ImportError:
        return 0
    return torch.cuda.device_count()


def run_all(
    sections: Sequence[Section], num_gpus: int, deadline_s: float, log: IO[str], out: Path, keeper: Keeper | None = None
) -> list[Outcome]:
    """Run the sections in order; save after each one, so that a kill loses no finished section."""
    outcomes: list[Outcome] = []
    saving = threading.Lock()

    def run(section: Section) -> None:
        remaining_s = deadline_s - time.monotonic()
        title = f"== {section.name}: {shlex.join(section.argv())}"
        print(title, flush=True)
        log.write(title + "\n")
        outcome = why_not(section, num_gpus, remaining_s)
        if outcome is None:
            outcome = run_section(section, log, min(section.limit_s, remaining_s))
        with saving:
            print(f"== {section.name}: {outcome.status} {outcome.note}", flush=True)
            print(f"== verdict: {section.name}: {outcome.verdict}", flush=True)
            outcomes.append(outcome)
            save(outcomes, out)

    with ThreadPoolExecutor() as beside:
        running = []
        for section in sections:
            if section.beside:
                running.append(beside.submit(run, section))
                continue
            if section.alone:
                wait(running)
            run(section)
            if keeper is not None:
                keeper.keep()
    for one in running:
        one.result()
    print("\n" + table(outcomes))
    print(json.dumps({"gpu_check": {outcome.name: outcome.status for outcome in outcomes}}))
    return outcomes


def save(outcomes: Sequence[Outcome], out: Path) -> None:
    """Write the table, and for each section how it ended, its verdict, its figures and its report."""
    (out / "gpu_check.txt").write_text(table(outcomes), encoding="utf-8")
    content = [
        vars(one) | {"verdict": one.verdict, "figures": [asdict(figure) for figure in figures_of(one.report)]}
        for one in outcomes
    ]
    (out / "gpu_check.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def table(outcomes: Sequence[Outcome]) -> str:
    """How each section ended, then its figures beside their goals, then the kernels of each slice's step."""
    lines = [f"{'section':<16}{'status':<12}{'seconds':>8}  verdict"]
    lines += [f"{o.name:<16}{o.status:<12}{o.seconds:>8.1f}  {o.verdict}" for o in outcomes]
    lines += ["", f"{'figure':<72}{'measured':>12} {'unit':<24}{'goal':>8}"]
    for outcome in outcomes:
        for figure in figures_of(outcome.report):
            goal = "" if figure.goal is None else f"{figure.goal:>8g}  {figure.verdict}"
            lines.append(f"{figure.label:<72}{figure.value:>12,.3f} {figure.unit:<24}{goal}")
    for outcome in outcomes:
        if times := kernel_times(outcome.report):
            lines += ["", f"{outcome.name}, a step's kernels and copies"]
            lines += [f"{name:<84}{us:>12,.1f} us" for name, us in times]
    return "\n".join(lines) + "\n"


def update(page: Path, sections: Sequence[dict[str, Any]]) -> None:
    """Write the figures of ``sections``, as in gpu_check.json, into the table of the page between its marks."""
    rows = ["| what | measured | goal | section |", "| --- | --- | --- | --- |"]
    for section in sections:
        for one in section["figures"]:
            goal = "" if one["goal"] is None else f"{'below' if one['lower'] else 'at least'} {one['goal']:,g}"
            value = f"{one['value']:,.0f}" if one["value"] >= 1000 else f"{one['value']:.3g}"
            rows.append(f"| {one['label']} | {value} {one['unit']} | {goal} | {section['name']} |")
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, mark, after = rest.partition(_END)
    if not mark:
        raise SystemExit(f"{page} has no lines {_BEGIN} and {_END}, between which the table belongs")
    page.write_text(before + "\n".join([_BEGIN, "", *rows, "", _END]) + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
