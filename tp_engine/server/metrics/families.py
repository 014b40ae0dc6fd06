"""The name, meaning, labels and buckets of every metric, each once.

Names, units and buckets are vLLM's where vLLM has the metric, below our own prefix; every metric also has the label
``model_name``.  A counter's samples end in ``_total``.
"""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.engine.report import PLAN_BYTES, STEP_TIME_S, STEP_TOKENS, WAIT_S

PREFIX = "tp_engine:"

_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
_NEXT_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_HTTP_S = (0.1, 0.5, 1.0)
_HTTP_FINE_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0,
)  # fmt: skip
_N = (1, 2, 5, 10, 20)


def token_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to ``max_model_len``."""
    steps = (digit * 10**exponent for exponent in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= max_model_len)


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric.  ``kind`` is ``counter``, ``gauge``, ``histogram`` or ``summary`` (count and sum alone).

    ``buckets`` of None follow from the model's greatest length, by ``token_buckets``.
    """

    kind: str
    name: str
    text: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = ()

    def bounds(self, max_model_len: int) -> tuple[float, ...]:
        """The upper bounds of the buckets."""
        return token_buckets(max_model_len) if self.buckets is None else self.buckets


# What the server counts by itself.
PROMPT_TOKENS = Family("counter", "prompt_tokens", "prompt tokens of accepted requests")
GENERATION_TOKENS = Family("counter", "generation_tokens", "tokens generated")
SUCCESS = Family("counter", "request_success", "finished sequences, by reason", ("finished_reason",))
FIRST_TOKEN = Family("histogram", "time_to_first_token_seconds", "arrival to first token", (), _FIRST_TOKEN_S)
NEXT_TOKEN = Family("histogram", "inter_token_latency_seconds", "between two tokens of a sequence", (), _NEXT_TOKEN_S)
PER_TOKEN = Family(
    "histogram",
    "request_time_per_output_token_seconds",
    "mean time between two tokens of a finished sequence",
    (),
    _NEXT_TOKEN_S,
)
E2E = Family("histogram", "e2e_request_latency_seconds", "arrival to last token", (), _REQUEST_S)
QUEUE = Family("histogram", "request_queue_time_seconds", "arrival to the begin of the prefill", (), _REQUEST_S)
PREFILL = Family("histogram", "request_prefill_time_seconds", "begin of the prefill to first token", (), _REQUEST_S)
DECODE = Family("histogram", "request_decode_time_seconds", "first token to last token", (), _REQUEST_S)
INFERENCE = Family("histogram", "request_inference_time_seconds", "prefill to last token", (), _REQUEST_S)
REQUEST_PROMPT = Family("histogram", "request_prompt_tokens", "prompt tokens of finished requests", (), None)
REQUEST_GENERATION = Family("histogram", "request_generation_tokens", "tokens of finished sequences", (), None)
PARAMS_N = Family("histogram", "request_params_n", "n of finished requests", (), _N)
PARAMS_MAX_TOKENS = Family("histogram", "request_params_max_tokens", "max_tokens of finished requests", (), None)

HTTP_REQUESTS = Family("counter", "http_requests", "answers by route and status class", ("handler", "method", "status"))
HTTP_SECONDS = Family(
    "histogram", "http_request_duration_seconds", "whole exchanges by route", ("handler", "method"), _HTTP_S
)
HTTP_FINE_SECONDS = Family("histogram", "http_request_duration_highr_seconds", "whole exchanges", (), _HTTP_FINE_S)
HTTP_REQUEST_BYTES = Family("summary", "http_request_size_bytes", "content-length of requests", ("handler",))
HTTP_RESPONSE_BYTES = Family("summary", "http_response_size_bytes", "bytes of answers' bodies", ("handler",))

# What the engine answers when it is asked.
RUNNING = Family("gauge", "num_requests_running", "sequences in the running batch")
WAITING = Family("gauge", "num_requests_waiting", "sequences that wait for a place in the batch")
KV_USAGE = Family("gauge", "kv_cache_usage_perc", "share of the KV blocks that requests hold, 0 to 1")
QUERIES = Family("counter", "prefix_cache_queries", "prompt tokens looked up in the prefix cache")
HITS = Family("counter", "prefix_cache_hits", "prompt tokens found in the prefix cache")
PREEMPTIONS = Family("counter", "num_preemptions", "preemptions of running sequences")
ITERATION_TOKENS = Family("histogram", "iteration_tokens_total", "tokens per step", (), STEP_TOKENS)
CACHE_CONFIG = Family(
    "gauge",
    "cache_config_info",
    "the KV cache's settings, in labels",
    ("block_size", "num_gpu_blocks", "max_model_len", "max_num_seqs", "dtype", "device", "tensor_parallel_size"),
)
FREE_BLOCKS = Family("gauge", "num_free_blocks", "KV blocks that hold nothing")
CACHED_BLOCKS = Family("gauge", "num_cached_blocks", "KV blocks that hold only cached prefixes")
USED_BLOCKS = Family("gauge", "num_used_blocks", "KV blocks of running requests")
LIVE_TOKENS = Family("gauge", "num_live_tokens", "tokens with K/V in used blocks, those of shared blocks once")
FRAGMENTATION = Family("gauge", "kv_fragmentation", "share of the used blocks' slots that holds no token, 0 to 1")
PEAK_USAGE = Family("gauge", "kv_cache_usage_peak_perc", "largest kv_cache_usage_perc of the last ten minutes")
RECOMPUTED = Family("counter", "recomputed_tokens", "tokens computed again after a preemption")

_RANK = ("rank",)
STEP_SKEW = Family(
    "histogram", "step_skew_seconds", "between the first and the last rank's begin of a step", (), WAIT_S
)
PLAN_SIZE = Family("histogram", "plan_size_bytes", "bytes of a step plan", (), PLAN_BYTES)
MISSED = Family("counter", "steps_not_observed", "steps in none of the distributions: too many since the last look")
PLAN_WAIT = Family("histogram", "rank_plan_wait_seconds", "a rank's wait for a plan with work to do", _RANK, WAIT_S)
STEP_TIME = Family("histogram", "rank_step_time_seconds", "time of a step on a rank", _RANK, STEP_TIME_S)
COLLECTIVE_WAIT = Family(
    "histogram",
    "rank_collective_wait_seconds",
    "least wait in a step's first collective: until the last rank has begun the step",
    _RANK,
    WAIT_S,
)
COLLECTIVE_TIME = Family("counter", "rank_collective_seconds", "time in collectives, waits included (CPU)", _RANK)
RANK_STEPS = Family("counter", "rank_steps", "steps that a rank has ended", _RANK)
RANK_LAST = Family("counter", "rank_last_to_begin", "steps that this rank began last", _RANK)
RANK_CPU = Family("counter", "rank_cpu_seconds", "CPU time of a rank's process", _RANK)
RANK_SILENCE = Family("gauge", "rank_heartbeat_age_seconds", "time since a rank's last sign of life", _RANK)
RANK_RESIDENT = Family("gauge", "rank_resident_memory_bytes", "host memory of a rank's process", _RANK)
RANK_MEMORY = Family("gauge", "rank_memory_bytes", "a line of a rank's memory ledger", ("rank", "line"))
STARTUP = Family("gauge", "startup_phase_seconds", "a phase of a rank's start", ("rank", "phase"))

FAMILIES: dict[str, Family] = {one.name: one for one in tuple(globals().values()) if isinstance(one, Family)}
