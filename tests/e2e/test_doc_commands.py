"""Every shell command of README.md, CONTRIBUTING.md and docs/ runs in the environment that README's commands make.

``tests/doc_commands.py`` reads the commands, and has a row for each that runs nowhere here, with the reason.  Servers
of one program and model are one, with the options of all lines; test_doc_examples.py has the demo model's.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.doc_commands import (
    CHECKOUTS,
    FOR_DEVELOPERS,
    NOT_RUN,
    OF_A_CHECKOUT,
    ROOT,
    STAND_INS,
    own_arguments,
    read_commands,
)
from tests.e2e.page_packages import make_packages
from tests.e2e.page_programs import Programs, programs
from tests.e2e.page_servers import Asker, page_servers, running, write_batch_files
from tests.e2e.serving import free_port
from tests.unit.job.test_flight_steps import LATE
from tp_engine.config import DEMO_MODEL

COMMANDS = read_commands()
SERVERS = page_servers(COMMANDS)
ENDING = {command.runnable({}): command for command in COMMANDS if command.kind == "end"}  # each once
MOST_NOT_RUN = 63  # of 188 commands: other programs, jobs of CI, GPUs, networks, and models of the hub
# config.json of models of the hub, of which ``recommend`` reads the sizes.
QWEN3_32B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151_936, "hidden_size": 5_120,
    "intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_2_13B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32_000, "hidden_size": 5_120,
    "intermediate_size": 13_824, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40,
    "max_position_embeddings": 4_096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "float16",
}  # fmt: skip
# Reads the options of each command (program, arguments) as the program does, and prints what it refuses.  ``tp_engine``
# is a module that torchrun starts.
READER = """
import contextlib, importlib, io, json, os, sys
from tp_engine.apps.bench.command import BENCHMARKS
from tp_engine.cli.main import main
TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

def read(program, arguments):
    if arguments[0] == "bench":
        benchmark = BENCHMARKS[arguments[1]]
        place = "command" if benchmark.folder == "startup" else "options"
        parse = importlib.import_module(f"tp_engine.apps.bench.{benchmark.folder}.{place}").parse_arguments
        parse(*([None] if benchmark.folder == "serving" else []), [*benchmark.arguments, *arguments[2:]])
        return 0
    for name, value in TORCHRUN.items():
        os.environ.pop(name, None) if program != "tp_engine" else os.environ.setdefault(name, value)
    return main([*(["serve"] if program == "scripts/serve" else []), *arguments, "--print-config"])

for program, arguments in json.load(sys.stdin):
    shown = io.StringIO()
    try:
        with contextlib.redirect_stderr(shown), contextlib.redirect_stdout(io.StringIO()):
            code = read(program, arguments)
    except SystemExit as ending:
        code = ending.code
    except Exception as error:
        code = repr(error)
    if code:
        print(program, *arguments, "->", code, shown.getvalue())
"""


def test_every_command_is_known() -> None:
    """Oracle: a command is of a kind that runs, or has a row in the table of those that do not."""
    assert len(COMMANDS) > 120
    assert [str(command) for command in COMMANDS if command.kind == "unknown"] == []


def test_users_commands_need_no_checkout() -> None:
    """Oracle: what a wheel installs; README tells how a checkout is used, and developers have one."""
    needed = [
        command
        for command in COMMANDS
        if not command.page.startswith(FOR_DEVELOPERS) and OF_A_CHECKOUT.search(command.text)
    ]
    assert [str(one) for one in needed if not any(re.match(row, one.text) for row in CHECKOUTS)] == []
    assert [row for row in CHECKOUTS if not any(re.match(row, one.text) for one in needed)] == []


def test_no_row_is_stale() -> None:
    """Oracle: each row of both tables means a command of a page."""
    assert [row for row in NOT_RUN if not any(re.match(row, command.text) for command in COMMANDS)] == []
    assert [row for row in STAND_INS if not any(re.search(row, command.text) for command in COMMANDS)] == []


def test_scripts_are_there() -> None:
    """Oracle: the checkout: scripts and paths of tests that a command names, and the extras of ``pip install``."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for command in COMMANDS:
        for path in re.findall(r"(?<![\w/.-])(?:\./)?((?:scripts|tests|launch|deploy|\.ci)/[\w/.-]+)", command.text):
            assert (ROOT / path).exists(), str(command)
        for extra in re.findall(r"pip install '?tp-engine\[(\w+)\]", command.text):
            assert f"\n{extra} = [" in project, str(command)


def test_options_are_read(tmp_path: Path, plain_environment: dict[str, str]) -> None:
    """Oracle: the program's own reader of each command's options, in README's environment, also of those that do not
    run here."""
    write_batch_files(tmp_path)
    found = (own_arguments(command.text.replace("-tp N", "-tp 2")) for command in COMMANDS)
    read = [one for one in found if one is not None and one[1]]
    assert len(read) > 50
    done = subprocess.run(
        ["python", "-c", READER], input=json.dumps(read), capture_output=True, text=True, timeout=300, cwd=tmp_path,
        env=plain_environment,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), (done.stdout, done.stderr[-3000:])


def test_what_does_not_run_is_read() -> None:
    """Oracle: the shell's reader, torchrun's reader of its own options, and the tests and scripts that reasons name."""
    from torch.distributed.run import parse_args

    for command in COMMANDS:
        if command.text.startswith("torchrun "):
            parse_args(shlex.split(command.text.replace(" N ", " 2 "))[1:])
    left = [command.text for command in COMMANDS if command.reason is not None]
    assert len(left) <= MOST_NOT_RUN
    done = subprocess.run(["bash", "-n"], input="\n".join(left), capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    named = {path for reason in NOT_RUN.values() for path in re.findall(r"(?:tests|scripts)/[\w/.]+\w", reason)}
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@pytest.fixture
def values(tmp_path: Path) -> dict[str, str]:
    """What stands in for the names of a page."""
    write_batch_files(tmp_path)
    for name, config in (("qwen3", QWEN3_32B), ("llama2", LLAMA_2_13B)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "record.json").write_bytes(msgspec.json.encode(LATE))
    names = {name: str(tmp_path / name) for name in ("qwen3", "llama2", "record.json")}
    names["record"] = names.pop("record.json")
    return {"demo": str(DEMO_MODEL), "port": str(free_port()), **names}


def make_model(name: str, folder: Path) -> Path:
    """A tiny model of the kind that a page serves."""
    from tests import pooling_models

    folder = folder / name
    match name:
        case "embedding":
            return pooling_models.make_embedding_model(folder)
        case "reranker":
            return pooling_models.make_reranker(folder)
    pooling_models.make_classifier(folder, "qwen2", num_labels=2)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name in SERVERS if name != "tp-engine demo"])
def test_a_server_is_asked(
    name: str, values: dict[str, str], tmp_path: Path, plain_environment: dict[str, str]
) -> None:
    """Oracle: the server is ready and ends without an error, and each question of its pages has the status 200."""
    server = SERVERS[name]
    if server.model != "{demo}":
        kind = server.model.strip("{}")
        values[kind] = str(make_model(kind, tmp_path))
    folder = ROOT if server.program.startswith("./") else tmp_path
    with running(server, values, folder, plain_environment) as job:
        asker = Asker(values, job.url, tmp_path, plain_environment)
        assert server.asked
        for command in server.asked:
            assert asker.ask(command) or command.text.startswith("until"), str(command)


@pytest.fixture(scope="module")
def ending(plain_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """What runs the commands that end by themselves."""
    with programs(plain_environment, tmp_path_factory.mktemp("ending")) as made:
        yield made


@pytest.fixture(scope="module")
def packages(plain_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What pip finds."""
    return make_packages(tmp_path_factory.mktemp("packages"), plain_environment)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", sorted({command.page for command in ENDING.values()}))
def test_programs_end(
    page: str, values: dict[str, str], tmp_path: Path, ending: Programs, packages: dict[str, str]
) -> None:
    """Oracle: exit code 0, or 1 where the page shows that a model does not fit; what the page shows is printed; pip
    knows the extras."""
    for text, command in ENDING.items():
        if command.page != page:
            continue
        (tmp_path / "out.jsonl").unlink(missing_ok=True)  # a batch job goes on with the results that it finds
        shown = [line for one in COMMANDS if one.runnable({}) == text for line in one.shown]
        place = ROOT if re.search(r"scripts/|^ls ", text) else tmp_path
        done = ending.run(command.runnable({**values, **packages}), place)
        assert done.code == ("It does not fit:" in shown), (text, done.output[-2000:], done.errors[-3000:])
        printed = [line.strip() for line in done.output.splitlines()]
        assert [line for line in printed if line in shown] == shown, (text, done.output)
        assert "does not provide the extra" not in done.errors, (text, done.errors)
