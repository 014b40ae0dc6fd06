"""The table of jobs on fake nodes: what each one runs, on which node, and which part of the CUDA path it covers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# One layer of each kind is enough for the path; products are wide enough for Triton's tiles.
_DENSE: dict[str, Any] = {
    "architecture": "qwen3", "num_layers": 1, "vocab_size": 101, "hidden_size": 128, "intermediate_size": 128,
}  # fmt: skip
_SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16,
    "num_gpu_blocks_override": 32, "startup_timeout_s": 240, "collective_timeout_s": 120, "watchdog_timeout_s": 120,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """A program on a node, whose tokens are those of the same program on one CPU rank.

    ``covers`` names parts of the CUDA path.  ``model``: parameters of ``tests.tiny_models.make_checkpoint``; ``node``:
    variables of ``tests.fake_cuda.node``; ``options``: of ``LLM``, beside those of all jobs; ``only_gpu``: those that
    the CPU does not have; ``environment``: other variables.
    """

    name: str
    covers: str
    ranks: int = 1
    program: str = "generate"
    model: Mapping[str, Any] = field(default_factory=lambda: _DENSE)
    node: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    only_gpu: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def all_options(self) -> dict[str, Any]:
        """Options of ``LLM`` on the node, but for the model."""
        return {**_SMALL, **self.options, **self.only_gpu, "device": "cuda", "tensor_parallel_size": self.ranks}

    def oracle_options(self) -> dict[str, Any]:
        """Options of ``LLM`` for the same tokens on one CPU rank."""
        return {**_SMALL, **self.options, "device": "cpu", "attention_backend": "torch"}


JOBS = (
    Job(
        "one rank, work as late as it may",
        "streams, events and pinned readbacks; decode graphs; the device's sampler",
        node={"LAZY": "1"},
    ),
    Job(
        "two ranks, NCCL",
        "process groups; NCCL in decode graphs; ranked sampling over ranks",
        ranks=2,
        only_gpu={"all_reduce_backend": "nccl"},
    ),
)
