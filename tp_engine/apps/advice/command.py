"""``tp-engine recommend``: what fits on a device, and the command that serves it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tp_engine.apps.advice.question import GPU_GIB, WORKLOADS, Workload, find_workload
from tp_engine.apps.advice.recommend import recommend
from tp_engine.config import DEMO_MODEL, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS
from tp_engine.errors import ConfigError
from tp_engine.features.speculation.options import SpeculativeConfig
from tp_engine.options import parse_options
from tp_engine.options.fields import checked, option
from tp_engine.options.hf_overrides import parse_overrides

DOES_NOT_FIT = 1
# Options that are keywords of ``recommend`` too.
_ASKED = ("tensor_parallel_size", "gpu", "device_memory", "dtype", "quantization", "kv_cache_dtype",
          "gpu_memory_utilization", "max_model_len", "block_size", "revision", "hf_overrides",
          "speculative_config")  # fmt: skip


@checked()
@dataclass(frozen=True, kw_only=True)
class RecommendConfig:
    """The options.  Of the model, only config.json is read."""

    model: str = option(
        str(DEMO_MODEL), "model folder or hub name (default: the demo model of this project)", positional=True
    )
    revision: str | None = option(None, "hub revision of the model")
    hf_overrides: Mapping[str, Any] | None = option(
        None, "JSON object that changes keys of the model's config.json (default: none)", json=parse_overrides
    )
    workload: str = option("chat", "what users send", choices=tuple(WORKLOADS))
    input_len: int | None = option(None, "mean tokens of a prompt (default: the workload's)", positive=True)
    output_len: int | None = option(None, "mean tokens of an answer (default: the workload's)", positive=True)
    shared_prefix_len: int | None = option(None, "tokens that all prompts begin with (default: the workload's)")
    tensor_parallel_size: int | None = option(
        None, "number of ranks (default: the smallest that fits)", positive=True, flags=("-tp", "--tp-size")
    )
    gpu: str | None = option(None, f"device by name (default: this machine's): {', '.join(GPU_GIB)}")
    device_memory: int | None = option(
        None, "memory of the device, such as 24GiB, instead of a name", size=True, positive=True
    )
    dtype: str = option("auto", "type of weights and activations; auto takes the checkpoint's", choices=DTYPES)
    quantization: str | None = option(
        None, "format of linear weights (default: the checkpoint's own)", choices=QUANTIZATIONS, flags=("-q",)
    )
    kv_cache_dtype: str = option("auto", "type of the KV cache; auto takes dtype", choices=KV_CACHE_DTYPES)
    gpu_memory_utilization: float | None = option(
        None, "share of the device's memory that may be used (default: 0.9 on GPUs, 0.3 on CPUs)", positive=True, most=1
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output (default: the workload's longest)", positive=True
    )
    block_size: int | None = option(None, "tokens per KV block (default: by the workload's lengths)", positive=True)
    speculative_config: SpeculativeConfig | None = option(
        None,
        "JSON object, as of serve: what drafts tokens (default: nothing)",
        json=SpeculativeConfig.of,
        flags=("-sc",),
    )
    json: bool = option(False, "print JSON")

    def __post_init__(self) -> None:
        if self.gpu is not None and self.device_memory is not None:
            raise ConfigError("gpu and device_memory are both given; give one of them")

    def lengths(self) -> Workload:
        """The named workload with the lengths that were given."""
        base = find_workload(self.workload)
        prompt, output = self.input_len or base.prompt, self.output_len or base.output
        shared = base.shared_prefix if self.shared_prefix_len is None else self.shared_prefix_len
        longest = max(base.longest, prompt + output)
        if self.max_model_len is not None:
            longest = max(prompt + output, self.max_model_len)
        return dataclasses.replace(
            base, prompt=prompt, output=output, longest=longest, shared_prefix=min(shared, prompt)
        )


def main(argv: Sequence[str]) -> int:
    """Print the recommendation; 1 if it does not fit."""
    options = parse_options("tp-engine recommend", "What fits on a device.", {"recommend": RecommendConfig}, argv)
    config = options.build("recommend", RecommendConfig)
    if options.print_config:
        print(options.effective_toml(), end="")
        return 0
    asked = {name: getattr(config, name) for name in _ASKED}
    found = recommend(config.model, workload=config.lengths(), **asked)
    print(json.dumps(found.as_dict(), indent=2) if config.json else found.explain())
    return 0 if found.fits else DOES_NOT_FIT
