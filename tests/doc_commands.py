"""The shell commands of README.md, CONTRIBUTING.md and docs/, with replacements for what a test does not have.

A command is a line of a shell block, a line after ``$`` of an output, or code between words that has a program and
arguments.  ``STAND_INS`` makes it runnable on a machine without GPUs and internet.  Commands that these tests never run
have a row in ``NOT_RUN``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
# The beginnings of commands: programs of this project, then others that the pages use.
PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*"
    r"(?:tp-engine|python -[mc]|torchrun|pytest|\.?/?scripts/\w+(?:\.py)?|\.ci/\w+|launch/\w+\.py"
    r"|curl|pip|docker|kubectl|npm|git|uv|vllm|claude|codex|open-webui|ray)(?= |$)"
)

# Written in a page -> what a test writes instead.  ``{name}`` is a value of the run: a path, a port, an identifier.
STAND_INS = {
    r"Qwen/Qwen3-Embedding-0\.6B": "{embedding}",
    r"Qwen/Qwen3-Reranker-0\.6B": "{reranker}",
    r"jason9693/Qwen2\.5-1\.5B-apeach": "{classifier}",
    r"(?<=recommend --model )Qwen/Qwen3-[0-9.]+B": "{qwen3}",
    r"(?<=recommend --model )meta-llama/Llama-2-13b-hf": "{llama2}",
    r"Qwen/Qwen3-[0-9.]+B|/checkpoints/step-7|\./demo_model|\bMODEL\b": "{demo}",
    r"(run-batch .*) -tp 8": r"\1 -tp 1",
    r"(--nproc-per-node|-tp|--tensor-parallel-size) (8|N)\b": r"\1 2",
    r"http://(127\.0\.0\.1|localhost):8000|\bURL\b": "{url}",
    r"--port \d+": "--port 0",
    r"--nnodes 2 (--node-rank 0 --master-addr HEAD --master-port 29500 )?": "",
    r"--rdzv-backend c10d --rdzv-endpoint HEAD:29500 ": "",
    r"torchrun ": "torchrun --standalone ",
    r"--host 0\.0\.0\.0": "--host 127.0.0.1",
    r"tcp://\*:5557": "tcp://127.0.0.1:{port}",
    r"--kv-offloading-size 4 --kv-disk-path \S+ --kv-disk-size 100":
        "--kv-offloading-size 0.01 --kv-disk-path kv --kv-disk-size 0.01",
    r'"dimensions": 256': '"dimensions": 16',
    r"(scripts/gpu_check --(plan|sections) (1|start,nccl))": r"\1 --dry-run",
    r"--kv-offloading-size 4(?! )": "--kv-offloading-size 0.01",
    r"/data/batches": "batches",
    r"file-\.\.\.(?=/content)": "{results}",
    r"file-\.\.\.": "{file}",
    r"batch_\.\.\.": "{batch}",
    r"\bFILE$|(?<=steps )record\.json": "{record}",
    # Sizes, so that what takes minutes takes seconds.
    r"(bench .*)--cells (?!B-mtp)\S+": r"\1--cells C:float32",
    r"(bench .*)--threads 2": r"\1--threads 1",
    r"(bench .*)--rounds \d": r"\1--rounds 1",
    r"--workloads latency,throughput": "--workloads latency",
    r"(bench offline (?!.*--workloads).*)": r"\1 --workloads latency",
    r"(bench startup .*)": r"\1 --cells C:float32 --contenders llm",
    r"--request-rate 1,2,4,8,inf --input-len 512 --output-len 128":
        "--request-rate 8,inf --input-len 16 --output-len 4 --num-prompts 4 --vocab-size 64",
    r"(bench serve) --model \S+ (.*baseline\.json)":
        r"\1 --base-url {url} \2 --request-rate inf --input-len 16 --output-len 4 --num-prompts 4 --vocab-size 64",
    r"--tolerance 5%": "--tolerance 99%",
    r"(bench frontend .*)": r"\1 --num-prompts 64 --output-len 4",
    r"(tp-engine eval (?!.*--limit).*)": r"\1 --limit 2",
    r"word_problems=80% facts=90%": "word_problems=0% facts=0%",
    r"(check \S+ --quick)$": r"\1 --record golden.json",
    r"(tp-engine check (?!.*--quick).*)": r"\1 --quick",
    # What would change the machine.
    r"^pip install (-e )?\.$": r"pip install --dry-run --no-index --no-deps --no-build-isolation \1{tree}",
    r"^pip install (?='?tp-engine)": "pip install --dry-run --no-index --no-deps --find-links {wheels} ",
    r"^pip install dist/": "pip install --dry-run --no-index --no-deps {wheels}/",
    r"^(git tag .*)":
        r"git init -q --bare origin && git clone -q origin clone && cd clone && git config user.name T "
        r"&& git config user.email t@example.invalid && git commit -q --allow-empty -m first && \1",
    r"^\$EDITOR": "ls",
}  # fmt: skip

# The beginning of a command -> why no test runs it here.  Options of this project's programs are read all the same.
NOT_RUN = {
    r"\./scripts/(check|docs|test)\b": "is a job of CI",
    r"\.ci/run": "is CI",
    r"scripts/gpu_check --document": "writes a document",
    r"\./scripts/(generate|screenshots)": "writes files of the repository; tests compare what it writes",
    r"(\./)?scripts/test_\w+": "runs tests for minutes, with what it installs first, GPUs or several hosts",
    r"scripts/soak": "runs for minutes",
    r"FAKE_GPUS_ENVIRONMENT=|python -m tests\.fake_cuda": "needs torch for CUDA, of 5.5 GB",
    r"\./scripts/serve --model \"\$\(scripts/fetch_smollm2": "downloads a model; tests/real_model has it",
    r"tp-engine bench offline --cells [MQ]:": "is the page's first command with other sizes, which runs",
    r"tp-engine bench offline .*--mtp": "draws 250 MB; tests/unit/apps/bench/test_bench_offline.py has its like",
    r"tp-engine eval .*gsm8k": "needs the extra eval and a data set; scripts/test_clients runs lm-eval",
    r"torchrun .*-m tp_engine check": "is a process per GPU; tests/ranks/test_check_machine.py has its like",
    r"python -m lib\.class_table": "writes a file of the repository; tests/unit/scripts/test_class_table.py asks some",
    r"scripts/readme_figures": "is a benchmark of minutes, beside other engines",
    r"docker build": "needs docker; tests/e2e/test_container.py runs the container's commands",
    r"pip install (peft|pre-commit|--upgrade torch)": "downloads packages of others",
    r"\.ci/release|TP_ENGINE_BUILD=": "compiles and builds for minutes; tests/e2e/test_wheel.py builds one level",
    r"claude|codex|open-webui": "is for other programs, of which scripts/test_clients runs some",
    r"python -m (sglang_router|dynamo)|vllm ": "needs a program of others; scripts/test_routers runs SGLang's router",
    r"pytest": "is a run of a stranger's tests; tests/e2e/test_pytest_plugin.py has their like",
    r"ip netns": "needs root and network namespaces; tests/faults makes them",
    r"tp-engine serve (Qwen/Qwen3\.5|google/gemma-4|Qwen/Qwen3-8B --spec)": "needs a draft model that fits the model",
    r"torchrun .*-m tp_engine run-batch": "runs installed, in tests/e2e/test_wheel.py",
    r"tp-engine check \./(original|broken)": "needs wrong checkpoints; tests/e2e/test_check.py has their like",
    r"tp-engine serve --api-key": "would refuse what the other pages ask; tests/unit/server/test_access.py has keys",
    r"tp-engine serve MODEL --tuned": "needs a file of the machine; tests/e2e/test_tuning.py makes one",
}  # fmt: skip
# What a wheel does not install; the pages that need a checkout; and the commands of other pages that do -> why.
OF_A_CHECKOUT = re.compile(
    r"(?:^|[\s/(])(?:scripts|tests|launch|configs|deploy|\.ci)/|\btests\.\w|pip install (?:-e )?'?\."
)
FOR_DEVELOPERS = (
    "README.md", "CONTRIBUTING.md", "docs/architecture.md", "docs/design/", "docs/benchmarks", "docs/releasing"
)  # fmt: skip
CHECKOUTS = {
    r"pip install (-e )?\.": "is how a checkout is installed",
    r"scripts/(test_faults|soak)": "is how the engine's own faults are tested",
}
# The kind of a runnable command, by its form.
KINDS = {
    "serve": r"(tp-engine serve|\./scripts/serve|torchrun .*-m tp_engine serve)\b",
    "ask": r"curl |until curl |tp-engine bench serve |.* --url ",
    "end": r"([A-Z_]+=\S+ )*tp-engine |torchrun .*-m tp_engine |python -c |(\./)?scripts/gpu_check"
    r"|export |pip install |git tag |\$EDITOR ",
}
# Names in sentences, which have the form of a command.
NAMES = re.compile(r"tp-engine (bench )?[a-z-]+|python -m (tp_engine|torch\.distributed\.run)|curl -d|\S+")


@dataclass(frozen=True)
class Command:
    """A command of a page.  ``text`` is as written, without a comment after it; ``shown`` are the lines of its output
    below it, except those that the page leaves out (``...``)."""

    page: str
    text: str
    shown: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"

    def runnable(self, values: Mapping[str, str]) -> str:
        """The command with its stand-ins, for a shell."""
        text = self.text
        for written, instead in STAND_INS.items():
            text = re.sub(written, instead, text)
        return re.sub(r"\{(\w+)\}", lambda name: values.get(name[1], name[0]), text)

    @property
    def reason(self) -> str | None:
        """Why no test runs it."""
        return next((reason for start, reason in NOT_RUN.items() if re.match(start, self.text)), None)

    @property
    def kind(self) -> str:
        """``not run``; ``serve`` for a server; ``ask`` for what needs one; ``end`` for a program that ends by itself;
        ``unknown``."""
        if self.reason is not None:
            return "not run"
        return next((kind for kind, form in KINDS.items() if re.match(form, self.text)), "unknown")


def read_commands() -> list[Command]:
    """The commands of all pages, in the order of the pages, each once per page."""
    return list(dict.fromkeys(command for page in PAGES for command in commands_of(page)))


def commands_of(page: Path) -> Iterator[Command]:
    """Yield the commands of a page from top to bottom."""
    name, text = str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")
    blocks = {match.start(): match for match in BLOCK.finditer(text)}
    words = BLOCK.sub(lambda match: " " * len(match[0]), text)
    spans = {match.start(): match for match in SPAN.finditer(words)}
    for place, match in sorted({**blocks, **spans}.items()):
        if place not in blocks:
            yield from (Command(name, line) for line in span_lines(match[1]))
        elif match[2] == "text":
            yield from (Command(name, line, shown) for line, shown in output_lines(match[3]))
        elif match[2] in ("", "sh"):
            yield from (Command(name, line) for line in shell_lines(match[3]))


def shell_lines(text: str) -> Iterator[str]:
    """Yield the commands of a shell's block: its lines, or all of it if it is a script."""
    whole = re.sub(r"\\\n\s*", "", text)
    if "() {" in whole:
        yield whole.strip()
        return
    yield from filter(None, (re.sub(r"(^|\s+)# .*$", "", line.strip()) for line in whole.splitlines()))


def output_lines(text: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the commands of an output, which follow ``$`` or are separate lines, with the lines below."""
    for part in re.split(r"(?m)^\$ ", text):
        command, *shown = part.splitlines() or [""]
        if PROGRAM.match(command):
            bare = (line.strip() for line in shown)
            yield re.sub(r"\s+# .*$", "", command), tuple(line for line in bare if line not in ("", "..."))


def span_lines(text: str) -> Iterator[str]:
    """Yield the command between backquotes, if it is one: a program with arguments."""
    text = " ".join(text.split())
    match = PROGRAM.match(text)
    if match and (text == "tp-engine doctor" or not NAMES.fullmatch(text)):
        yield text


def own_arguments(text: str) -> tuple[str, list[str]] | None:
    """The program of this project that a command starts, and its arguments; None for scripts and other programs."""
    if "\n" in text or text.startswith("pip "):
        return None
    words = [word for word in shlex.split(text) if word != "&"]
    words = words[: next((place for place, word in enumerate(words) if word.startswith(">")), len(words))]
    for place, word in enumerate(words):
        if match := re.fullmatch(r"tp[-_]engine|(?:\./)?scripts/serve", word):
            return match[0].removeprefix("./"), words[place + 1 :]
    return None
