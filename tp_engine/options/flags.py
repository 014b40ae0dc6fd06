"""Command-line flags from configuration dataclasses, and the flags of other servers that are refused or ignored."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from tp_engine.errors import ConfigError
from tp_engine.log import get_logger
from tp_engine.units import parse_bytes, parse_count

logger = get_logger(__name__)

MODEL_TAG = "model_tag"


class OptionsParser(argparse.ArgumentParser):
    """An argparse parser that raises ``ConfigError`` and names the flag nearest to an unknown one."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Like argparse's method, but every refusal has a remedy."""
        parsed, unknown = self.parse_known_args(args, namespace)
        for word in unknown:
            flag = word.partition("=")[0]
            if word in REDUNDANT_FLAGS:
                logger.info("%s is always in effect", word)
                continue
            if flag in REFUSED_FLAGS:
                self.error(f"{flag} is not an option here: {REFUSED_FLAGS[flag]}")
            if flag.startswith("-"):
                self.error(f"unknown option {flag}{did_you_mean(flag, self._option_string_actions)}")
            self.error(f"unexpected argument {word!r}; options are written --name value")
        return parsed

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting: the launcher reports the error and chooses the exit code."""
        raise ConfigError(f"{message} (all options: --help)")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``'; did you mean X?'`` with the nearest known name, or an empty string if none is near."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def make_parser(prog: str, description: str, tables: Mapping[str, type[Any]]) -> OptionsParser:
    """A parser whose namespace holds only the given values, keyed by field name, ``config`` and ``print_config``."""
    # A later table overrides a flag of the same name: the -q of ``tp-engine chat`` overrides the engine's.
    parser = OptionsParser(
        prog=prog,
        description=description,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        conflict_handler="resolve",
    )
    files = ", ".join(f"[{name}]" for name in tables)
    parser.add_argument("--config", metavar="FILE", help=f"TOML file with any of the tables {files}")
    if any(spec.metadata.get("positional") for kind in tables.values() for spec in dataclasses.fields(kind)):
        parser.add_argument(MODEL_TAG, metavar="MODEL", nargs="?", help="the model, as with --model")
    parser.add_argument("--print-config", action="store_true", help="print the effective configuration and exit")
    for name, kind in tables.items():
        group = parser.add_argument_group(name)
        for spec in dataclasses.fields(kind):
            _add_flag(group, spec)
    return parser


def _add_flag(group: argparse._ArgumentGroup, spec: dataclasses.Field[Any]) -> None:
    names = (*spec.metadata.get("flags", ()), "--" + spec.name.replace("_", "-"))
    if negatives := spec.metadata.get("negative_flags"):
        text = f"as --no-{spec.name.replace('_', '-')}"
        group.add_argument(*negatives, dest=spec.name, action="store_false", default=argparse.SUPPRESS, help=text)
    settings: dict[str, Any] = {"dest": spec.name, "help": _help(spec)}
    if spec.type == "bool":
        settings["action"] = argparse.BooleanOptionalAction
    else:
        settings |= _value_settings(spec)
    group.add_argument(*names, **settings)


def _value_settings(spec: dataclasses.Field[Any]) -> dict[str, Any]:
    base = str(spec.type).partition(" | ")[0]
    if spec.metadata.get("choices"):
        return {"choices": spec.metadata["choices"], "type": int if base == "int" else str}
    if spec.metadata.get("size"):
        return {"type": _size, "metavar": "SIZE"}
    if spec.metadata.get("count"):
        return {"type": _count, "metavar": "N"}
    if base.startswith("tuple"):
        return {"nargs": "+", "metavar": "NAME"}
    return {
        "type": {"int": int, "float": float}.get(base, str),
        "metavar": {"int": "N", "float": "X"}.get(base, "TEXT"),
    }


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _count(text: str) -> int:
    try:
        return parse_count(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _help(spec: dataclasses.Field[Any]) -> str:
    text = str(spec.metadata.get("help", ""))
    if spec.default not in (None, "", ()) and "(default:" not in text:
        text += f" (default: {spec.default})"
    return text.replace("%", "%%")


# Flags of other servers, with the reason for the refusal.
_NO_OTHER_PARALLELISM = "a model is shared by tensor parallelism alone; leave it out, and see --tensor-parallel-size"
_ORDER = "requests run in order of (priority, arrival), and no other; leave it out"
_NO_LORA = "adapters are not supported; merge them into the weights"

REFUSED_FLAGS = {
    "--schedule-policy": _ORDER,
    "--schedule-conservativeness": _ORDER,
    "--scheduling-policy": _ORDER,
    "--pipeline-parallel-size": _NO_OTHER_PARALLELISM,
    "-pp": _NO_OTHER_PARALLELISM,
    "--pp-size": _NO_OTHER_PARALLELISM,
    "--data-parallel-size": _NO_OTHER_PARALLELISM,
    "-dp": _NO_OTHER_PARALLELISM,
    "--dp-size": _NO_OTHER_PARALLELISM,
    "--ep-size": _NO_OTHER_PARALLELISM,
    "--enable-expert-parallel": _NO_OTHER_PARALLELISM,
    "--nnodes": "it is an option of torchrun, before the script: torchrun --nnodes 2 ... launch/serve.py",
    "--node-rank": "it is an option of torchrun, before the script: torchrun --nnodes 2 --node-rank 0 ...",
    "--trust-remote-code": "code that comes with a model is never run; leave it out",
    "--enable-lora": _NO_LORA,
    "--lora-modules": _NO_LORA,
    "--lora-paths": _NO_LORA,
    "--speculative-config": "speculative decoding is not supported; leave it out",
    "--speculative-algorithm": "speculative decoding is not supported; leave it out",
    "--swap-space": "preempted requests are computed again, not swapped; leave it out",
    "--max-total-tokens": "the size of the cache is given in blocks, with --num-gpu-blocks-override",
    "--max-prefill-tokens": "see --max-num-batched-tokens",
    "--watchdog-timeout": "see --hang-soft-limit-s and --hang-hard-limit-s",
    "--download-dir": "hub models lie where the environment variable HF_HOME says",
    "--distributed-executor-backend": "ranks are processes, of torchrun or of rank 0; leave it out",
    "--cpu-offload-gb": "weights stay on the device; leave it out, or raise --tensor-parallel-size",
    "--task": "models generate text, and nothing else; leave it out",
    "--grammar-backend": "structured output has one library; leave it out",
    "--guided-decoding-backend": "structured output has one library; leave it out",
    "--constrained-json-whitespace-pattern": "see --structured-outputs-config, whitespace_pattern",
    "--constrained-json-disable-any-whitespace": "see --structured-outputs-config, disable_any_whitespace",
    "--runner": "models generate text, and nothing else; leave it out",
}

# Flags that are accepted without a value and change nothing, because they are always in effect.
REDUNDANT_FLAGS = frozenset(
    {
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        "--enable-chunked-prefill",
        "--enable-metrics",
        "--enable-prompt-tokens-details",
        "--enable-request-id-headers",
        "--enable-server-load-tracking",
    }
)
