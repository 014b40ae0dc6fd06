"""Print torch's number of threads on each rank, while weights load and while steps run, on a host of six cores.

torchrun --nproc-per-node N -m tests.ranks.threads_job MODEL
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tp_engine import LLM, SamplingParams
from tp_engine.config import EngineConfig
from tp_engine.engine.start import serve_rank
from tp_engine.system import env
from tp_engine.worker import model_loading
from tp_engine.worker.worker import Worker

NUM_CORES = 6


def saying_threads(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        launched = env.launched_rank()
        assert launched is not None
        print(f"rank {launched.rank} {phase}: {torch.get_num_threads()} threads", flush=True)
        return call(*arguments, **named)

    return wrapped


def main(model: str) -> None:
    """Run one short request."""
    os.sched_getaffinity = lambda _pid: set(range(NUM_CORES))
    for owner, name, act in ((model_loading, "load_weights", "loading"), (Worker, "execute", "serving")):
        setattr(owner, name, saying_threads(act, getattr(owner, name)))
    options: dict[str, Any] = {"model": model, "device": "cpu", "num_gpu_blocks_override": 32, "max_model_len": 64}
    launched = env.launched_rank()
    if launched is not None and launched.rank > 0:
        serve_rank(EngineConfig(**options))
        return
    with LLM(**options) as llm:
        llm.generate([[5, 9, 13]], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), use_tqdm=False)


if __name__ == "__main__":
    main(sys.argv[1])
