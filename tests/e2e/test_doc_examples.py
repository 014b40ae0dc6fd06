"""The examples of the documents: data is parsed, Python runs with the demo model, and so does what asks its server.

The server is the one that the pages start, in the environment that README's commands make, and Python that imports no
package of others runs there too.  Python that does not run stands in ``NOT_RUN``, with the reason; the other commands
are those of test_doc_commands.py.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.doc_commands import BLOCK, read_commands
from tests.e2e.page_servers import Asker, page_servers, running, write_batch_files
from tests.e2e.serving import Server, free_port
from tp_engine.config import DEMO_MODEL

ROOT = Path(__file__).parents[2]
ADDRESS = "http://127.0.0.1:8000"
DEMO_SERVER = page_servers(read_commands())["tp-engine demo"]
OF_THE_README = {"tp_engine", "torch", "transformers", "numpy", "PIL", "safetensors", "pydantic"}
LANGUAGES = {"python", "sh", "json", "jsonl", "toml", "yaml", "text"}  # text: drawings and output
# A document and the beginning of a block -> why the block does not run.
NOT_RUN = {
    ("adapters.md", "from peft"): "runs in the server's fixture, which needs the adapter",
    ("embeddings.md", "from openai"): "needs a model of the hub; tests/e2e/test_pooling.py has tiny ones",
    ("embeddings.md", "from tp_engine"): "needs models of the hub; tests/e2e/test_pooling.py has tiny ones",
    ("classifiers.md", "from tp_engine import LLM, Pool"): "needs a model of the hub; test_classifiers.py has its like",
    ("replicas.md", "from ray"): "needs Ray, which scripts/test_ray installs",
    ("replicas.md", "import ray"): "needs Ray, which scripts/test_ray installs",
    ("design/models.md", "ARCHITECTURES"): "is a file of the package: tp_engine/model_config/families/seed_oss.py",
}
# Examples among the drawings and outputs.
TEXTS_NOT_RUN = {
    ("architecture.md", "{ launch"): "is a drawing of imports",
    ("batch.md", '{"id"'): "is an answer of a job, shortened",
    ("check.md", "$ tp-engine check"): "needs a checkpoint that is broken; tests/e2e/test_check.py has its like",
    ("ci.md", "$ pytest test_sum.py"): "is a test that fails; tests/e2e/test_pytest_plugin.py has its like",
    ("command_line.md", "$ tp-engine recommend"): "needs the config.json of a model of the hub",
    ("eval.md", "$ tp-engine eval"): "is a report, shortened; tests/e2e/test_eval.py has its like",
    ("models.md", "--hf-overrides"): "are values of a flag; test_hf_overrides.py of tests/unit/ has their like",
    ("what_happened.md", "$ tp-engine steps"): "needs a flight record; tests/unit/job/test_flight_steps.py runs them",
    ("structured_output.md", '{"messages"'): "tests/e2e/test_structured_demo.py runs them",
}


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
RUNNABLE = [block for block in BLOCKS if block.language == "python" and not block.is_in(NOT_RUN)]


def test_every_block_names_its_language() -> None:
    """Oracle: the languages that this module knows."""
    assert [block.name for block in BLOCKS if block.language not in LANGUAGES] == []


def test_no_exception_is_stale() -> None:
    """Oracle: the documents."""
    entries = {**NOT_RUN, **TEXTS_NOT_RUN}
    assert [entry for entry in entries if not any(block.is_in({entry: ""}) for block in BLOCKS)] == []


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


@pytest.mark.parametrize("block", [one for one in BLOCKS if one.language == "python"], ids=lambda block: block.name)
def test_python_compiles(block: Block) -> None:
    """Oracle: the compiler, for those too that cannot run here."""
    compile(block.text, block.name, "exec")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the names that examples use, and the adapter of docs/adapters.md."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "tp_engine").symlink_to(ROOT / "tp_engine")
    write_batch_files(folder)
    (adapter,) = (block.text for block in BLOCKS if block.is_in({("adapters.md", "from peft"): ""}))
    run_python(adapter, folder)
    return folder


@pytest.fixture(scope="module")
def server(workplace: Path, plain_environment: dict[str, str]) -> Iterator[Server]:
    """The server with the demo model that the pages start."""
    with running(DEMO_SERVER, {"demo": str(DEMO_MODEL), "port": str(free_port())}, workplace, plain_environment) as job:
        yield job


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_server_is_asked(server: Server, workplace: Path, plain_environment: dict[str, str]) -> None:
    """Oracle: exit code 0, for curl the status 200 too, of every command in the order of the pages; the sums are right
    of those who ask the model without an adapter."""
    asker = Asker({"demo": str(DEMO_MODEL)}, server.url, workplace, plain_environment)
    assert len(DEMO_SERVER.asked) >= 10
    for command in DEMO_SERVER.asked:
        answer = asker.ask(command)
        if "12+34=" in command.text and '"mine"' not in command.text:
            assert sum_of(answer) == "46", (str(command), answer)


def sum_of(answer: str) -> str:
    """The text of a chat's answer, whole or streamed."""
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line not in ("", "data: [DONE]")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join((choice.get("message") or choice["delta"]).get("content") or "" for choice in choices)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_python_runs(server: Server, workplace: Path, plain_environment: dict[str, str]) -> None:
    """Oracle: no example raises, and what it prints is the comment beside its ``print``.

    They run in one process for each environment, one after the other, each with names of its own.  The first engine of
    each has processes of its own, as users' engines have; the others are threads, which need not import torch anew.
    """
    assert len(RUNNABLE) >= 7
    plain = [block for block in RUNNABLE if imports(block) <= OF_THE_README | sys.stdlib_module_names]
    assert len(plain) >= 4
    printed = ""
    for blocks, variables in ((plain, plain_environment), ([one for one in RUNNABLE if one not in plain], None)):
        texts = [(block.name, block.text.replace(ADDRESS, server.url)) for block in blocks]
        program = (
            "import contextlib, sys\n"
            f"sys.path.insert(0, {str(ROOT)!r})  # for the next line alone: examples find what a wheel installs\n"
            "from tests.services import services, start_in_thread\n"
            f"sys.path.remove({str(ROOT)!r})\n"
            "has_started = False\n"
            f"for name, text in {texts!r}:\n"
            "    print(name, flush=True)\n"
            "    with services(start_in_thread) if has_started else contextlib.nullcontext():\n"
            "        exec(compile(text, name, 'exec'), {'__name__': '__main__'})\n"
            "    has_started |= 'LLM(' in text\n"
        )
        printed += run_python(program, workplace, variables)
    for block in RUNNABLE:
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


def run_python(program: str, folder: Path, variables: dict[str, str] | None = None) -> str:
    """What a program prints that runs in the folder, in the environment of the tests or with these ``variables``."""
    job = subprocess.run(
        [sys.executable if variables is None else "python", "-c", program], capture_output=True, text=True,
        timeout=500, cwd=folder, env=variables or {**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert job.returncode == 0, job.stderr[-3000:]
    return job.stdout
