"""``tp-engine COMMAND``: finds the command and runs it; each command imports only what it needs."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tp_engine.errors import ConfigError, EngineDeadError, RequestError, did_you_mean, printable
from tp_engine.system.importing import without_collections
from tp_engine.system.version import __version__

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Command(NamedTuple):
    """The place of a command (``module:function``, called with its arguments) and its summary in one line."""

    place: str
    summary: str

    def load(self) -> Callable[[Sequence[str]], int]:
        """Return the command's function."""
        module, _, function = self.place.partition(":")
        with without_collections():
            run: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
        return run


COMMANDS = {
    "serve": Command("tp_engine.cli.serve:main", "serve a model over HTTP, as OpenAI's API"),
    "run-batch": Command("tp_engine.apps.batch.command:main", "run a file of OpenAI batch requests"),
    "chat": Command("tp_engine.apps.chat.command:chat_command", "talk to a model in the terminal"),
    "complete": Command("tp_engine.apps.chat.command:complete_command", "continue a text"),
    "bench": Command("tp_engine.apps.bench.command:main", "measure: serve, offline, latency, throughput"),
    "recommend": Command("tp_engine.apps.advice.command:main", "what fits on a device, and which options to use"),
    "check": Command("tp_engine.apps.check.command:main", "whether what this machine answers is right"),
    "eval": Command("tp_engine.apps.eval.command:main", "whether a model answers as many questions right as it must"),
    "tune": Command("tp_engine.apps.tune.command:main", "prove and time a model's kernels on this device"),
    "steps": Command("tp_engine.job.flight_recorder.__main__:main", "what happened in the steps of a flight record"),
    "doctor": Command("tp_engine.apps.doctor.command:main", "what this machine has, and what would be chosen on it"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 done, 1 failed, 2 used wrongly, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else EXIT_USAGE
    name, *rest = arguments
    if name in ("--version", "-V"):
        print(f"tp-engine {__version__}")
        return 0
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        return _refuse(f"unknown {kind} {name}{did_you_mean(name, [*COMMANDS, '--version', '--help'])}", "tp-engine")
    return _run(COMMANDS[name], rest, f"tp-engine {name}")


def usage() -> str:
    lines = [f"  {name:<12}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        (
            "usage: tp-engine COMMAND [options]",
            "",
            *lines,
            "",
            "tp-engine COMMAND --help tells its options; tp-engine --version the version.",
        )
    )


def _run(command: Command, arguments: Sequence[str], name: str) -> int:
    try:
        return command.load()(arguments)
    except (ConfigError, RequestError) as error:
        return _refuse(str(error), name)
    except (OSError, RuntimeError, EngineDeadError) as error:
        return _refuse(str(error), name, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _refuse(message: str, name: str, code: int = EXIT_USAGE) -> int:
    print(printable(f"{name}: error: {message}"), file=sys.stderr, flush=True)
    return code
