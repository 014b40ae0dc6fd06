"""What users send: the lengths from which blocks, sequences and concurrency follow."""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.errors import ConfigError
from tp_engine.options.cli import did_you_mean


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Mean lengths in tokens; ``longest`` is the longest prompt plus output that must be served.

    ``shared_prefix`` tokens at the beginning (a system prompt, the same files) are the same in all requests.
    ``step_tokens`` is how many tokens a step should hold: long prompts want large chunks.
    """

    name: str
    prompt: int
    output: int
    longest: int
    shared_prefix: int = 0
    step_tokens: int = 2048

    def __post_init__(self) -> None:
        for name in ("prompt", "output", "longest", "step_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"the workload's {name} is {getattr(self, name)}; it must be at least 1")
        if self.longest < self.prompt + self.output:
            raise ConfigError(
                f"the workload's longest is {self.longest}; it must hold the mean prompt and output, "
                f"{self.prompt + self.output} tokens"
            )
        if not 0 <= self.shared_prefix <= self.prompt:
            raise ConfigError(
                f"the workload's shared_prefix is {self.shared_prefix}; it must be from 0 to its prompt, {self.prompt}"
            )

    @property
    def live_tokens(self) -> int:
        """Tokens that a request holds on the average over its life: its prompt and half of its output."""
        return self.prompt + self.output // 2


WORKLOADS = {
    "chat": Workload(name="chat", prompt=512, output=256, longest=4096, shared_prefix=128),
    "code": Workload(name="code", prompt=2048, output=512, longest=8192, shared_prefix=1024, step_tokens=4096),
    "long-doc": Workload(name="long-doc", prompt=12_000, output=500, longest=32_768, step_tokens=8192),
}


def find_workload(name: str) -> Workload:
    """One of ``WORKLOADS``; ``ConfigError`` for an unknown name."""
    if name not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise ConfigError(f"workload is {name!r}; choose one of {known}{did_you_mean(name, WORKLOADS)}")
    return WORKLOADS[name]
