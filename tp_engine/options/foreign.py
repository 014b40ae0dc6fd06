"""Flags of other servers: those that say what is always so here, and those that mean nothing here, with the reason."""

from __future__ import annotations

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
    "--nnodes": "the ranks of one engine share a host; leave it out",
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

#: Accepted, without a value, and without an effect.
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
