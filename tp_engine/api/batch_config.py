"""The batch job's own options."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tp_engine.config import check_type, option
from tp_engine.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Which requests to run and where their results go."""

    input_file: str = option("", "OpenAI batch file: one request per line", flags=("-i",))
    output_file: str = option("", "results, one per line as they finish; an existing file is resumed", flags=("-o",))

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            check_type(spec.name, getattr(self, spec.name), str(spec.type))
        if not self.input_file or not self.output_file:
            raise ConfigError("give the requests with --input-file (-i) and the results with --output-file (-o)")
        source, target = Path(self.input_file), Path(self.output_file)
        if not source.is_file():
            raise ConfigError(f"input_file is {self.input_file!r}; there is no such file")
        if not target.parent.is_dir():
            raise ConfigError(f"output_file is {self.output_file!r}; there is no folder {str(target.parent)!r}")
        if target.is_dir() or (target.exists() and target.samefile(source)):
            raise ConfigError(f"output_file is {self.output_file!r}; it must be a file other than the input")
