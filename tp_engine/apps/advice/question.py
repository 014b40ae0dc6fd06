"""The question that a recommendation answers: a model, a device, and a workload with its lengths."""

from collections.abc import Callable
from dataclasses import dataclass

from tp_engine.errors import ConfigError, did_you_mean
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.model_config.block_size import Lengths
from tp_engine.model_config.spec import ModelSpec
from tp_engine.system.units import GIB

# GiB as torch.cuda.mem_get_info reports them; less than the number in the name.
GPU_GIB = {
    "t4": 14.6,
    "l4": 22.0,
    "rtx3090": 23.6,
    "rtx4090": 23.5,
    "rtx5090": 31.4,
    "v100-32g": 31.7,
    "a100-40g": 39.4,
    "l40s": 44.4,
    "a100-80g": 79.2,
    "h100": 79.2,
    "h200": 139.8,
    "b200": 178.4,
}


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One rank's device and its memory in bytes."""

    name: str
    memory: int
    is_gpu: bool = True

    @property
    def utilization(self) -> float:
        """The default of ``gpu_memory_utilization``: the share of the memory that the engine may use."""
        return 0.9 if self.is_gpu else 0.3


def find_gpu(name: str) -> Hardware:
    """The GPU of that name in ``GPU_GIB``.  Raises ``ConfigError`` for an unknown name."""
    key = name.lower()
    if key not in GPU_GIB:
        known = ", ".join(GPU_GIB)
        raise ConfigError(
            f"gpu is {name!r}; choose one of {known}{did_you_mean(key, GPU_GIB)}, or give device_memory instead"
        )
    return Hardware(name=key, memory=int(GPU_GIB[key] * GIB))


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Mean lengths in tokens.  ``longest`` is the longest prompt plus output that must be served.

    All requests begin with the same ``shared_prefix`` tokens, such as a system prompt.  ``step_tokens`` is the number
    of tokens that a step should hold: long prompts want large chunks.
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
        """Tokens that a request holds on average during its life: its prompt and half of its output."""
        return self.prompt + self.output // 2

    @property
    def lengths(self) -> Lengths:
        """The lengths in the form for the choice of a block size."""
        return Lengths(prompt=self.prompt, output=self.output, prefixes={self.shared_prefix: 1})


WORKLOADS = {
    "chat": Workload(name="chat", prompt=512, output=256, longest=4096, shared_prefix=128),
    "code": Workload(name="code", prompt=2048, output=512, longest=8192, shared_prefix=1024, step_tokens=4096),
    "long-doc": Workload(name="long-doc", prompt=12_000, output=500, longest=32_768, step_tokens=8192),
}


def find_workload(name: str) -> Workload:
    """The workload of that name in ``WORKLOADS``.  Raises ``ConfigError`` for an unknown name."""
    if name not in WORKLOADS:
        known = ", ".join(WORKLOADS)
        raise ConfigError(f"workload is {name!r}; choose one of {known}{did_you_mean(name, WORKLOADS)}")
    return WORKLOADS[name]


@dataclass(frozen=True, kw_only=True)
class Question:
    """The question.  Fields that are None are chosen; ``tensor_parallel_size`` becomes the smallest one that fits.

    ``weight_bytes`` is ``local_weight_bytes`` (``models/weight_sizes.py``), which needs torch.
    """

    name: str
    model: ModelSpec
    weight_bytes: Callable[..., int]
    hardware: Hardware
    workload: Workload
    tensor_parallel_size: int | None = None
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    speculative_config: SpeculativeConfig | None = None

    def num_draft_rows(self, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        """How many rows after those of a batch of ``max_num_seqs`` are for draft tokens."""
        speculation = self.speculative_config
        return 0 if speculation is None else speculation.num_draft_rows(max_num_seqs, max_num_batched_tokens)
