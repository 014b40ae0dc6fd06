"""The batch job's own options."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tp_engine.api.batch_file.lines import STANDARD_STREAM
from tp_engine.api.openai.chat.options import ChatOptions
from tp_engine.api.sampling_defaults import SamplingDefaultOptions
from tp_engine.errors import ConfigError
from tp_engine.options.fields import checked, option
from tp_engine.system.units import MIB

OUTPUT_ORDERS = ("finished", "input")

_SHARD = re.compile(r"(\d{1,9})/(\d{1,9})")


@checked()
@dataclass(frozen=True, kw_only=True)
class BatchConfig(ChatOptions, SamplingDefaultOptions):
    """Which requests to run, where their results go, and what counts as success."""

    input_file: str = option(
        "",
        "OpenAI batch file, one request per line; may be gzipped; - reads standard input",
        flags=("-i",),
        section="Batch job",
    )
    output_file: str = option(
        "", "results, one per line; an existing file is continued; - writes standard output", flags=("-o",)
    )
    error_file: str | None = option(None, "results that are errors (default: in the output file with the others)")
    output_order: str = option(
        "finished", "order of the results: as they finish, or that of the input", choices=OUTPUT_ORDERS
    )
    shard: str = option("1/1", "I/N: only lines I, I+N, I+2N, ... of the input, for N jobs that share it")
    resume: bool = option(True, "continue with existing results; --no-resume refuses an output file that has any")
    validate_only: bool = option(False, "check every line with the model's tokenizer and limits, and run nothing")
    strict: bool = option(False, "run nothing if any line is bad, instead of writing an error for it")
    served_model_name: tuple[str, ...] = option(
        (), "names that requests may give as their model (default: --model, or its folder's name)"
    )
    max_in_flight: int | None = option(None, "prompts in the engine at a time (default: twice max_num_seqs)", least=1)
    max_body_bytes: int = option(64 * MIB, "longest line; longer ones are errors", size=True, least=1)
    summary_file: str | None = option(None, "JSON file with counts, tokens and times of the job")
    errors_exit_code: int | None = option(
        None, "exit code of a job whose lines are done, some with errors (default: 3, under torchrun 0)", least=0
    )
    progress_bar: bool = option(True, "show the progress on a terminal, or in the log if there is none")

    def __post_init__(self) -> None:
        self.check_chat_options()
        _ = self.input_shard
        self._check_input()
        self._check_outputs()

    @property
    def input_shard(self) -> tuple[int, int]:
        """``shard`` as two numbers, I and N; raises ``ConfigError``."""
        match = _SHARD.fullmatch(self.shard)
        index, count = (int(match[1]), int(match[2])) if match else (0, 0)
        if not 1 <= index <= count:
            raise ConfigError(f"shard is {self.shard!r}; it must be I/N with I from 1 to N, such as 1/4 to 4/4")
        return index, count

    @property
    def result_paths(self) -> tuple[Path | None, Path | None]:
        """Where results and errors go: None for standard output, and for errors that go to the results."""
        output = None if self.output_file == STANDARD_STREAM else Path(self.output_file)
        return output, None if self.error_file is None else Path(self.error_file)

    def _check_input(self) -> None:
        if not self.input_file or not (self.output_file or self.validate_only):
            raise ConfigError("give the requests with --input-file (-i) and the results with --output-file (-o)")
        for name in ("input_file", "output_file"):
            if getattr(self, name).startswith(("http://", "https://")):
                raise ConfigError(
                    f"{name} is {getattr(self, name)!r}; addresses are not supported, use curl and - (standard input "
                    "and output)"
                )
        source = Path(self.input_file)
        if self.input_file != STANDARD_STREAM and (source.is_dir() or not source.exists()):
            raise ConfigError(f"input_file is {self.input_file!r}; there is no such file")
        if self.input_file != STANDARD_STREAM and not (source.is_file() or source.is_fifo()):
            raise ConfigError(f"input_file is {self.input_file!r}, a device or a socket; give a file, a pipe or -")

    def _check_outputs(self) -> None:
        taken = [("input_file", self.input_file)]
        for name in ("output_file", "error_file", "summary_file"):
            value = getattr(self, name)
            if not value or (value == STANDARD_STREAM and name == "output_file"):
                continue
            path = Path(value)
            if not path.parent.is_dir():
                raise ConfigError(f"{name} is {value!r}; there is no folder {str(path.parent)!r}")
            if path.exists() and not path.is_file():
                raise ConfigError(f"{name} is {value!r}, which is not a regular file; - writes to standard output")
            for other_name, other in taken:
                if other != STANDARD_STREAM and _is_same_file(path, Path(other)):
                    raise ConfigError(f"{name} is {value!r}; it must be a file other than {other_name}")
            if path.suffix == ".gz":
                raise ConfigError(f"{name} is {value!r}; results are plain lines, compress them afterwards")
            taken.append((name, value))


def takes_line(shard: tuple[int, int], number: int) -> bool:
    """Whether line ``number``, counted from 1, belongs to the ``shard`` I/N."""
    return number % shard[1] == shard[0] % shard[1]


def _is_same_file(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()
