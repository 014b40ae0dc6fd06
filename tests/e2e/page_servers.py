"""Servers as the pages start them: one for each program and model, with the options of all lines that start it."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.doc_commands import BLOCK, ROOT, Command
from tests.e2e.serving import Server, follow, wait_until_ready

_LINE = re.compile(r"(tp-engine serve|\./scripts/serve|(torchrun) .*-m tp_engine serve)\b(.*)")
_SMALL = ("--port", "0", "--device", "cpu", "--num-gpu-blocks-override", "256")
_CURL_S, _ASK_S, _BATCH_S = 60, 400.0, 120.0
_ENDED_BATCHES = {"completed", "failed", "expired", "cancelled"}
# The fields that pages, or the APIs that they name, promise of an answer.
FIELDS = {
    "/v1/chat/completions": ["choices"],
    "/classify": ["label", "probs", "num_classes"],
    "/pooling": ["data"],
    "/v1/embeddings": ["embedding", "usage"],
    "/rerank": ["index", "relevance_score", "document"],
    "/score": ["score"],
    "/v1/files": ["id", "purpose", "bytes"],
    r"/v1/batches(/\S+)?": ["status", "request_counts", "output_file_id"],
    "/content": ["custom_id", "response", "error"],
    "/update_weights_from_disk": ["success", "message"],
}


@dataclass
class PageServer:
    """The lines of pages that start it, as one command, and what those pages ask of it."""

    program: str
    model: str
    options: dict[str, list[str]] = field(default_factory=dict)
    asked: list[Command] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its program and model, as they are in the tests."""
        return f"{self.program.split()[0]} {self.model.strip('{}')}"

    def command(self, values: Mapping[str, str]) -> list[str]:
        """The words of its command, on a free port and a CPU."""
        options = [word for flag, rest in self.options.items() for word in (flag, *rest)]
        words = [*self.program.split(), *options, "--model", self.model, *_SMALL]
        return [re.sub(r"\{(\w+)\}", lambda name: values.get(name[1], name[0]), word) for word in words]


def page_servers(commands: list[Command]) -> dict[str, PageServer]:
    """Return the servers by name, with what is asked.  A page asks the server that its last line has started, the demo
    model's if it starts none."""
    servers: dict[str, PageServer] = {}
    of_page: dict[str, str] = {}
    for command in (one for one in commands if one.kind in ("serve", "ask")):
        if command.kind == "ask":
            asked = servers[of_page.get(command.page, "tp-engine demo")].asked
            if command.text.startswith("curl ") or command.runnable({}) not in (one.runnable({}) for one in asked):
                asked.append(command)
            continue
        match = _LINE.match(command.runnable({}))
        assert match is not None, command
        words = [word for word in shlex.split(match[3]) if word != "&"]
        model = next((word for word in words if re.fullmatch(r"\{\w+\}", word)), "{demo}")
        server = PageServer(match[1], model)
        server = servers.setdefault(server.name, server)
        for flag, values in options_of([word for word in words if word not in (model, "--model")]):
            server.options.setdefault(flag, values)
        of_page[command.page] = server.name
    return servers


def options_of(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each option with its values."""
    begins = [place for place, word in enumerate(words) if word.startswith("-")]
    for begin, end in zip(begins, [*begins[1:], len(words)], strict=False):
        yield words[begin], words[begin + 1 : end]


@contextmanager
def running(
    server: PageServer, values: Mapping[str, str], folder: Path, variables: Mapping[str, str]
) -> Iterator[Server]:
    """The server, ready; at the end it gets SIGTERM, and the exit code must be 0, or torchrun's own."""
    process = subprocess.Popen(
        server.command(values), cwd=folder, env=dict(variables), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    started = follow(process)
    try:
        wait_until_ready(started)
        yield started
    finally:
        code = started.stop()
    assert code == (1 if server.program.startswith("torchrun") else 0), started.text()[-3000:]


class Asker:
    """Runs the commands of pages that ask a server, and knows the identifiers that its answers have told."""

    def __init__(self, values: Mapping[str, str], url: str, folder: Path, variables: Mapping[str, str]) -> None:
        (folder / ".curlrc").write_text(f"silent\nshow-error\nfail-with-body\nmax-time = {_CURL_S}\n")
        self._values = {**values, "url": url}
        self._folder, self._variables = folder, dict(variables)

    def ask(self, command: Command) -> str:
        """Return the answer; a batch is asked for until it has ended."""
        deadline = time.monotonic() + _BATCH_S
        settings = {"CURL_HOME": str(self._folder)} if command.text.startswith("curl ") else {}
        while True:
            done = subprocess.run(
                ["bash", "-c", command.runnable(self._values)], cwd=self._folder, env={**self._variables, **settings},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S,
            )  # fmt: skip
            assert done.returncode == 0, (str(command), done.stdout[-2000:], done.stderr[-2000:])
            if "{batch}" not in command.runnable({}) or self._learn(done.stdout) or time.monotonic() > deadline:
                self._learn(done.stdout)
                break
            time.sleep(0.1)
        fields = next((names for route, names in FIELDS.items() if re.search(rf"{route}(?= |$)", command.text)), [])
        assert [name for name in fields if f'"{name}"' not in done.stdout] == [], (str(command), done.stdout)
        return done.stdout

    def _learn(self, text: str) -> bool:
        """Note the identifiers of a file, a batch and its results; True unless it is a batch that still runs."""
        if not re.match(r'\{"id": ?"(file-|batch_(?!req_))', text):
            return True
        answer = json.loads(text)
        self._values["file" if answer["id"].startswith("file-") else "batch"] = answer["id"]
        self._values["results"] = answer.get("output_file_id") or ""
        return answer["object"] != "batch" or answer["status"] in _ENDED_BATCHES


def write_batch_files(folder: Path) -> None:
    """Write the files of docs/batch.md that its commands read."""
    text = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8")
    (lines,) = (block for _, language, block in BLOCK.findall(text) if language == "jsonl")
    (folder / "in.jsonl").write_text(lines, encoding="utf-8")
    (folder / "in.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
