"""The examples of the documents: data is parsed, flags are checked, ``curl`` and Python run with the demo model.

Python that imports no package of others, and each program once, run in the environment that README's commands make.
Blocks that do not run stand in ``NOT_RUN``, with the reason.
"""

from __future__ import annotations

import ast
import gzip
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.e2e.serving import Server, serving
from tp_engine.apps.batch.config import BatchConfig
from tp_engine.config import EngineConfig
from tp_engine.options.flags import make_parser
from tp_engine.server.config import ServerConfig

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
BLOCK_OF_README = re.compile(r"^```\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OF_THE_README = {"tp_engine", "torch", "transformers", "numpy", "PIL", "safetensors", "pydantic"}
LANGUAGES = {"python", "sh", "json", "jsonl", "toml", "yaml", "text"}  # text: drawings and output
# A document and the beginning of a block -> why the block does not run.
NOT_RUN = {
    ("adapters.md", "from peft"): "runs in the server's fixture, which needs the adapter",
    ("embeddings.md", "tp-engine serve"): "needs models of the hub; tests/e2e/test_pooling.py has tiny ones",
    ("embeddings.md", "from openai"): "needs a model of the hub; tests/e2e/test_pooling.py has tiny ones",
    ("embeddings.md", "from tp_engine"): "needs models of the hub; tests/e2e/test_pooling.py has tiny ones",
    ("classifiers.md", "tp-engine serve"): "needs a model of the hub; e2e/test_classifiers.py has tiny ones",
    ("classifiers.md", "from tp_engine import LLM, Pool"): "needs a model of the hub; as above",
    ("new_weights.md", "import torch"): "needs a model of the hub",
    ("new_weights.md", "curl"): "needs a checkpoint of a trainer",
    ("replicas.md", "from ray"): "needs Ray, which scripts/test_ray installs",
    ("replicas.md", "import ray"): "needs Ray, which scripts/test_ray installs",
    ("design/models.md", "ARCHITECTURES"): "is a file of the package: tp_engine/model_config/families/seed_oss.py",
}
# The first word of a command -> why it does not run.  Their flags are checked where they are this project's.
COMMANDS_NOT_RUN = {
    "tp-engine": "starts a server or asks for one; the flags are checked",
    "torchrun": "starts ranks on several GPUs or hosts; the flags are checked",
    "python": "starts a server, a benchmark or a router; the flags are checked",
    "./scripts/test": "runs the tests",
    "scripts/gpu_check": "needs a GPU",
    "git": "makes worktrees of earlier commits",
    "TP_ENGINE_FEW_ROWS=triton": "needs a GPU",
    "OMP_NUM_THREADS=1": "is a benchmark",
    "until": "waits for a server on the port of the documents",
    "codex": "needs OpenAI's Codex; scripts/test_clients runs it",
    "pip": "installs packages",
    "pytest": "runs tests of a stranger; tests/e2e/test_pytest_plugin.py has their like",
}
# Blocks whose commands are a script of several hosts.
SCRIPTS_NOT_RUN = {
    ("several_hosts.md", "ip netns"): "needs root and network namespaces; tests/faults makes them",
    ("batches.md", "tp-engine serve"): "needs the ids of a file and a batch; tests/e2e/test_client_batches.py has them",
    ("agents.md", "export ANTHROPIC"): "needs Claude Code; scripts/test_clients runs it",
    ("agents.md", "codex"): "needs OpenAI's Codex; scripts/test_clients runs it",
    ("agents.md", "export OPENAI"): "needs Open WebUI",
}
# Examples among the drawings and outputs.
TEXTS_NOT_RUN = {
    ("batch.md", '{"id"'): "is an answer of a job, shortened",
    ("check.md", "$ tp-engine check"): "needs a checkpoint that is broken; tests/e2e/test_check.py has its like",
    ("ci.md", "$ pytest test_sum.py"): "is a test that fails; tests/e2e/test_pytest_plugin.py has its like",
    ("ci.md", "$ torchrun"): "is a report, shortened; tests/ranks/test_check_machine.py has its like",
    ("command_line.md", "$ tp-engine recommend"): "needs the config.json of a model of the hub",
    ("models.md", "--hf-overrides"): "are values of a flag; tests/unit/models/test_hf_overrides.py has their like",
    ("structured_output.md", '{"messages"'): "tests/e2e/test_structured_demo.py runs them",
}
LAUNCHERS = {
    "serve": {"engine": EngineConfig, "server": ServerConfig},
    "batch": {"engine": EngineConfig, "batch": BatchConfig},
}
LAUNCHER_OF = {
    "serve": "serve", "launch/serve.py": "serve", "./scripts/serve": "serve",
    "run-batch": "batch", "launch/batch.py": "batch",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    page: str
    language: str
    text: str

    @property
    def name(self) -> str:
        """Its document and first line, for messages."""
        return f"{self.page}: {self.text.strip().splitlines()[0][:60]}"

    def is_in(self, table: dict[tuple[str, str], str]) -> bool:
        """Return whether an entry of the table means it."""
        return any(self.page == page and self.text.startswith(beginning) for page, beginning in table)


def read_blocks() -> list[Block]:
    docs = ROOT / "docs"
    return [
        Block(str(path.relative_to(docs)), language, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE))
        for path in sorted(docs.rglob("*.md"))
        for indent, language, text in BLOCK.findall(path.read_text(encoding="utf-8"))
    ]


BLOCKS = read_blocks()
RUNNABLE = [block for block in BLOCKS if not block.is_in(NOT_RUN) and not block.is_in(SCRIPTS_NOT_RUN)]


def commands(block: Block) -> list[list[str]]:
    """The commands of a shell block, as words without comments and redirections."""
    lines = block.text.replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines if line.strip()]
    return [
        [word for before, word in zip(["", *line], line, strict=False) if before != ">" and word not in {"&", ">"}]
        for line in words
        if line
    ]


def curls(block: Block) -> list[list[str]]:
    return [command for command in commands(block) if command[0] == "curl"]


SHELL = [block for block in RUNNABLE if block.language == "sh"]


def test_every_block_names_its_language() -> None:
    """Oracle: the languages that this module knows."""
    assert [block.name for block in BLOCKS if block.language not in LANGUAGES] == []


def test_no_exception_is_stale() -> None:
    """Oracle: the documents."""
    entries = {**NOT_RUN, **SCRIPTS_NOT_RUN, **TEXTS_NOT_RUN}
    unused = [entry for entry in entries if not any(block.is_in({entry: ""}) for block in BLOCKS)]
    assert unused == []
    used = {command[0] for block in SHELL for command in commands(block)}
    assert COMMANDS_NOT_RUN.keys() - used == set()
    assert used - COMMANDS_NOT_RUN.keys() == {"curl"}


def test_no_example_hides_among_drawings() -> None:
    """Oracle: commands, data and flags that begin a text are in the table."""
    texts = [block for block in BLOCKS if block.language == "text" and block.text.lstrip()[0] in "$-{"]
    assert [block.name for block in texts if not block.is_in(TEXTS_NOT_RUN)] == []


@pytest.mark.parametrize(
    "block", [one for one in BLOCKS if one.language in {"json", "jsonl", "toml", "yaml"}], ids=lambda block: block.name
)
def test_data_can_be_read(block: Block) -> None:
    """Oracle: the reader of the language."""
    match block.language:
        case "json":
            json.loads(block.text)
        case "jsonl":
            assert all(isinstance(json.loads(line), dict) for line in block.text.splitlines())
        case "toml":
            tomllib.loads(block.text)
        case _:
            yaml.safe_load(block.text)


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "sh"], ids=lambda block: block.name)
def test_flags_exist(block: Block) -> None:
    """Oracle: the parser of the launchers."""
    for command in [] if block.is_in(SCRIPTS_NOT_RUN) else commands(block):
        known = [(place, LAUNCHER_OF[word]) for place, word in enumerate(command) if word in LAUNCHER_OF]
        if known and (command[0] != "tp-engine" or known[0][0] == 1):
            place, launcher = known[0]
            make_parser("x", "", LAUNCHERS[launcher]).parse_args(command[place + 1 :])


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "python"], ids=lambda block: block.name)
def test_python_compiles(block: Block) -> None:
    """Oracle: the compiler, for those too that can not run here."""
    compile(block.text, block.name, "exec")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the names that examples use, and the adapter of docs/adapters.md."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "tp_engine").symlink_to(ROOT / "tp_engine")
    (line,) = (block.text for block in BLOCKS if block.page == "batch.md" and block.language == "jsonl")
    (folder / "in.jsonl").write_text(line, encoding="utf-8")
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (adapter,) = (block.text for block in BLOCKS if block.is_in({("adapters.md", "from peft"): ""}))
    run_python(adapter, folder)
    return folder


@pytest.fixture(scope="module")
def server(workplace: Path) -> Iterator[Server]:
    """The demo model with the adapter, as in docs/adapters.md."""
    options = ("--device", "cpu", "--num-gpu-blocks-override", "256", "--enable-lora", "--lora-modules")
    with serving(0, *options, "mine=my-adapter", cwd=workplace) as running:
        yield running


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_curl_is_answered(server: Server, workplace: Path) -> None:
    """Oracle: status 200 of every command, in the order of the documents."""
    asked = [(block, command) for block in SHELL for command in curls(block)]
    assert len(asked) >= 5
    for block, command in asked:
        line = [word.replace(ADDRESS, server.url) for word in command]
        answer = subprocess.run(
            [line[0], "-sS", "--fail-with-body", "--max-time", "60", *line[1:]],
            capture_output=True, text=True, cwd=workplace, check=False, timeout=90,
        )  # fmt: skip
        assert answer.returncode == 0, (block.name, answer.stdout[-500:], answer.stderr[-500:])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_python_runs(server: Server, workplace: Path, plain_environment: dict[str, str]) -> None:
    """Oracle: no example raises, and what it prints is the comment beside its ``print``.

    They run in one process for each environment, one after the other, each with names of its own.
    """
    examples = [block for block in RUNNABLE if block.language == "python"]
    assert len(examples) >= 7
    plain = [block for block in examples if imports(block) <= OF_THE_README | sys.stdlib_module_names]
    assert len(plain) >= 4
    printed = ""
    for blocks, variables in ((plain, plain_environment), ([one for one in examples if one not in plain], None)):
        texts = [(block.name, block.text.replace(ADDRESS, server.url)) for block in blocks]
        program = (
            f"for name, text in {texts!r}:\n"
            "    print(name, flush=True)\n"
            "    exec(compile(text, name, 'exec'), {'__name__': '__main__'})\n"
        )
        printed += run_python(program, workplace, variables)
    for block in examples:
        _, _, rest = printed.partition(block.name + "\n")
        for expected in re.findall(r"^ *print\(.*\)  # (.+)$", block.text, re.MULTILINE):
            line, _, rest = rest.partition("\n")
            assert line.strip() == expected, block.name


def imports(block: Block) -> set[str]:
    """The packages that an example imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(block.text)):
        match node:
            case ast.Import(names=names):
                found |= {one.name.partition(".")[0] for one in names}
            case ast.ImportFrom(module=str(module)):
                found.add(module.partition(".")[0])
    return found


def programs() -> list[list[str]]:
    """The first command of README and docs with each program of this project, without what it is told to do."""
    readme = Block("../README.md", "sh", "\n".join(BLOCK_OF_README.findall((ROOT / "README.md").read_text("utf-8"))))
    found: dict[tuple[str, ...], list[str]] = {}
    for command in (command for block in (readme, *SHELL) for command in commands(block)):
        words = tuple(command[:2])
        if words[0] == "./scripts/serve" or words[0] == "tp-engine" or (words[1:] and words[1].startswith("launch/")):
            found.setdefault(words[:1] if words[0] == "./scripts/serve" else words, command)
    return list(found.values())


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("command", programs(), ids=lambda command: " ".join(command[:2]))
def test_programs_start(command: list[str], workplace: Path, plain_environment: dict[str, str]) -> None:
    """Oracle: exit code 0 of the documented command, which prints its configuration instead of running."""
    for name in ("launch", "scripts", "pyproject.toml"):
        if not (workplace / name).exists():
            (workplace / name).symlink_to(ROOT / name)
    done = subprocess.run(
        [*command, "--print-config"], capture_output=True, text=True, cwd=workplace, env=plain_environment, timeout=300
    )
    assert done.returncode == 0 and " = " in done.stdout, done.stderr[-2000:]


def run_python(program: str, folder: Path, variables: dict[str, str] | None = None) -> str:
    """What a program prints that runs in the folder, in the environment of the tests or with these ``variables``."""
    job = subprocess.run(
        [sys.executable if variables is None else "python", "-c", program], capture_output=True, text=True,
        timeout=500, cwd=folder, env=variables or {**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-3000:]
    return job.stdout
