"""The recommendation: its numbers, its text for people, and the command that follows from it."""

import dataclasses
import shlex
from dataclasses import dataclass
from typing import Any

from tp_engine.model_config.kv_layout import kv_cache_lines
from tp_engine.system.units import format_gib

_OPTIONS = (
    "model",
    "tensor_parallel_size",
    "gpu_memory_utilization",
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
)


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """Options for one model, device and workload, with the arithmetic behind them.

    ``weight_format`` is how linear weights are kept: ``quantization`` (online), the checkpoint's method, or ``dtype``.
    Bytes are those of one rank; ``state_bytes`` are those of recurrent states and their snapshots, ``image_bytes``
    those of images' embeddings, and ``active_weight_bytes`` those of the weights that one token needs, which are fewer
    if the model has experts.  If ``fits`` is False, ``problems`` say why, ``remedies`` say what to change, and
    ``command`` is None.  ``expected_concurrency`` is the number of the workload's mean requests that the KV cache holds
    at once; ``max_num_seqs`` follows from it.  ``longest_request`` is the longest request that the KV cache holds, up
    to ``max_model_len``.  ``reasons`` explain each choice; ``notes`` are what the model's files say, or do not say.
    """

    model: str
    device: str
    workload: str
    tensor_parallel_size: int
    dtype: str
    quantization: str | None
    weight_format: str
    kv_cache_dtype: str
    gpu_memory_utilization: float
    total_bytes: int
    requested_bytes: int
    weight_bytes: int
    active_weight_bytes: int
    activation_bytes: int
    overhead_bytes: int
    image_bytes: int
    state_bytes: int
    kv_cache_bytes: int
    block_size: int
    block_bytes: int
    bytes_per_token: int
    num_blocks: int
    num_tokens: int
    longest_request: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    expected_concurrency: float
    fits: bool
    speculative_config: str | None = None
    notes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """Options of ``EngineConfig`` (keywords of ``LLM``); empty if it does not fit."""
        if not self.fits:
            return {}
        given = {name: getattr(self, name) for name in _OPTIONS}
        if self.quantization is not None:
            given["quantization"] = self.quantization
        if self.speculative_config is not None:
            given["speculative_config"] = self.speculative_config
        return given if self.kv_cache_dtype == self.dtype else given | {"kv_cache_dtype": self.kv_cache_dtype}

    @property
    def command(self) -> str | None:
        """The command line of the server; None if it does not fit."""
        if not self.fits:
            return None
        flags = [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in self.options.items()]
        return " ".join(("tp-engine serve", *flags))

    def as_dict(self) -> dict[str, Any]:
        """All fields, options and command as plain data."""
        return {**dataclasses.asdict(self), "options": self.options, "command": self.command}

    def explain(self) -> str:
        """The recommendation as text for people."""
        ranks = f", {self.tensor_parallel_size} ranks" if self.tensor_parallel_size > 1 else ""
        lines = [f"{self.model} for {self.workload} on {self.device}{ranks}", "", *self._memory(), ""]
        lines += [*_bullets(self.notes), ""] if self.notes else []
        if self.fits:
            lines += ["It fits.", *self._capacity(), "", *_bullets(self.reasons), "", f"  {self.command}"]
        else:
            lines += ["It does not fit:", *_bullets(self.problems)]
            lines += ["What helps:", *_bullets(self.remedies)] if self.remedies else []
        return "\n".join(lines)

    def _memory(self) -> list[str]:
        rows = {
            "memory of a device": self.total_bytes,
            f"of it used ({self.gpu_memory_utilization:g})": self.requested_bytes,
            f"weights ({self.weight_format})": self.weight_bytes,
            "largest step (estimate)": self.activation_bytes,
            "runtime (estimate)": self.overhead_bytes,
            **({"embeddings of images": self.image_bytes} if self.image_bytes else {}),
            **({"recurrent states": self.state_bytes} if self.state_bytes else {}),
            "left for the KV cache": self.kv_cache_bytes,
        }
        lines = [f"  {name:<28}{format_gib(value):>12}" for name, value in rows.items()]
        if self.active_weight_bytes < self.weight_bytes:
            lines[2] += f"  ({format_gib(self.active_weight_bytes)} for one token: the experts that it goes to)"
        return lines

    def _capacity(self) -> list[str]:
        blocks = f"{self.num_blocks:,} blocks of {self.block_size} tokens, {self.block_bytes:,} bytes each"
        lines = kv_cache_lines(
            num_bytes=self.num_blocks * self.block_bytes, num_tokens=self.num_tokens, max_model_len=self.max_model_len
        )
        expected = f"Expected concurrency for this workload: {self.expected_concurrency:.1f} requests"
        return [f"  {line}" for line in (blocks, *lines, expected)]


def _bullets(lines: tuple[str, ...]) -> list[str]:
    return [f"  * {line}" for line in lines]
