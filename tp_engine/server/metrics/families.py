"""The name, meaning, labels and buckets of every metric, and its samples in the form of Prometheus's client.

Names, units and buckets are vLLM's where vLLM has the metric, with the prefixes of ``--metrics-prefix``; every metric
also has the label ``model_name``.  The names of a counter's samples end in ``_total``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily

from tp_engine.engine.report import PLAN_BYTES, STEP_TIME_S, STEP_TOKENS, WAIT_S
from tp_engine.features.metric import MetricFamily
from tp_engine.features.registry import features

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


def _counter(name: str, text: str, *labels: str) -> MetricFamily:
    return MetricFamily("counter", name, text, labels)


def _gauge(name: str, text: str, *labels: str) -> MetricFamily:
    return MetricFamily("gauge", name, text, labels)


def _summary(name: str, text: str, *labels: str) -> MetricFamily:
    return MetricFamily("summary", name, text, labels)


def _histogram(name: str, text: str, buckets: tuple[float, ...] | None, *labels: str) -> MetricFamily:
    return MetricFamily("histogram", name, text, labels, buckets)


# Counted by the server.
PROMPT_TOKENS = _counter("prompt_tokens", "prompt tokens of accepted requests")
GENERATION_TOKENS = _counter("generation_tokens", "tokens generated")
SUCCESS = _counter("request_success", "finished sequences, by reason", "finished_reason")
IMAGES = _counter("images", "images of accepted requests")
IMAGE_TOKENS = _counter("image_tokens", "prompt tokens of these images")
IMAGE_LOAD = _histogram("image_load_seconds", "a request's images: decoded, resized, handed over", _NEXT_TOKEN_S)
FIRST_TOKEN = _histogram("time_to_first_token_seconds", "arrival to first token", _FIRST_TOKEN_S)
NEXT_TOKEN = _histogram("inter_token_latency_seconds", "between two tokens of a sequence", _NEXT_TOKEN_S)
PER_TOKEN = _histogram(
    "request_time_per_output_token_seconds", "mean time between two tokens of a finished sequence", _NEXT_TOKEN_S
)
E2E = _histogram("e2e_request_latency_seconds", "arrival to last token", _REQUEST_S)
QUEUE = _histogram("request_queue_time_seconds", "arrival to the start of the prefill", _REQUEST_S)
PREFILL = _histogram("request_prefill_time_seconds", "start of the prefill to the first token", _REQUEST_S)
DECODE = _histogram("request_decode_time_seconds", "first token to last token", _REQUEST_S)
INFERENCE = _histogram("request_inference_time_seconds", "prefill to last token", _REQUEST_S)
REQUEST_PROMPT = _histogram("request_prompt_tokens", "prompt tokens of finished requests", None)
REQUEST_GENERATION = _histogram("request_generation_tokens", "tokens of finished sequences", None)
PARAMS_N = _histogram("request_params_n", "n of finished requests", _N)
PARAMS_MAX_TOKENS = _histogram("request_params_max_tokens", "max_tokens of finished requests", None)

HTTP_REQUESTS = _counter("http_requests", "answers by route and status class", "handler", "method", "status")
HTTP_SECONDS = _histogram("http_request_duration_seconds", "whole exchanges by route", _HTTP_S, "handler", "method")
HTTP_FINE_SECONDS = _histogram("http_request_duration_highr_seconds", "whole exchanges", _HTTP_FINE_S)
HTTP_REQUEST_BYTES = _summary("http_request_size_bytes", "content-length of requests", "handler")
HTTP_RESPONSE_BYTES = _summary("http_response_size_bytes", "bytes of answers' bodies", "handler")

BATCHES = _gauge("batches", "batches in the folder of files and batches, by state", "status")
BATCH_LINES = _counter("batch_lines", "lines of batches that have ended, with an answer or an error", "result")
BATCH_LINES_WAITING = _gauge("batch_lines_waiting", "lines of batches that have not ended, and have no result yet")

# From the engine's report.
RUNNING = _gauge("num_requests_running", "sequences in the running batch")
WAITING = _gauge("num_requests_waiting", "sequences that wait for a place in the batch")
KV_USAGE = _gauge("kv_cache_usage_perc", "share of the KV blocks that requests hold, 0 to 1")
QUERIES = _counter("prefix_cache_queries", "prompt tokens looked up in the prefix cache")
HITS = _counter("prefix_cache_hits", "prompt tokens found in the prefix cache")
PREEMPTIONS = _counter("num_preemptions", "preemptions of running sequences")
ITERATION_TOKENS = _histogram("iteration_tokens_total", "tokens per step", STEP_TOKENS)
CACHE_CONFIG = _gauge(
    "cache_config_info",
    "the KV cache's settings, in labels",
    "block_size",
    "num_gpu_blocks",
    "max_model_len",
    "max_num_seqs",
    "dtype",
    "device",
    "tensor_parallel_size",
)
BUILD = _gauge("build_info", "the version of tp_engine, in a label", "version")
FREE_BLOCKS = _gauge("num_free_blocks", "KV blocks that hold nothing")
CACHED_BLOCKS = _gauge("num_cached_blocks", "KV blocks that hold only cached prefixes")
USED_BLOCKS = _gauge("num_used_blocks", "KV blocks of running requests")
LIVE_TOKENS = _gauge("num_live_tokens", "tokens with K/V in used blocks, those of shared blocks once")
FRAGMENTATION = _gauge("kv_fragmentation", "share of the used blocks' slots that holds no token, 0 to 1")
PEAK_USAGE = _gauge("kv_cache_usage_peak_perc", "largest kv_cache_usage_perc of the last ten minutes")
RECOMPUTED = _counter("recomputed_tokens", "tokens computed again after a preemption")
ENCODE_SECONDS = _counter("image_encode_seconds", "rank 0's time for these images, and in sums over ranks")
MOVED_BYTES = _counter(
    "kv_offload_bytes", "bytes that rank 0 moved to its host tier (store) and from it (load)", "direction"
)
MOVE_SECONDS = _counter("kv_offload_seconds", "rank 0's time for these moves", "direction")
DISK_BYTES = _counter("kv_disk_bytes", "bytes that rank 0 read from disk and wrote to it", "direction")
DISK_SECONDS = _counter("kv_disk_seconds", "rank 0's time for these reads and writes", "direction")
MOVE_WAIT = _counter("kv_offload_wait_seconds", "time that steps of rank 0 waited for moves")

EXPERT_BALANCE = _gauge(
    "experts_by_load",
    "experts of all layers in each range of loads: an expert's tokens over its layer's mean, since the start",
    "over",
    "up_to",
)
EXPERT_LARGEST = _gauge("expert_load_max_over_mean", "the largest of these loads; 1 is even")

STEP_SKEW = _histogram("step_skew_seconds", "between the first and the last rank's begin of a step", WAIT_S)
PLAN_SIZE = _histogram("plan_size_bytes", "bytes of a step plan", PLAN_BYTES)
MISSED = _counter("step_samples_dropped", "steps in none of the distributions: too many since the last look")
PLAN_WAIT = _histogram("rank_idle_seconds", "a rank's wait for a plan with work to do", WAIT_S, "rank")
STEP_TIME = _histogram("rank_step_time_seconds", "time of a step on a rank", STEP_TIME_S, "rank")
COLLECTIVE_WAIT = _histogram(
    "rank_collective_wait_seconds",
    "least wait in a step's first collective: until the last rank has begun the step",
    WAIT_S,
    "rank",
)
COLLECTIVE_TIME = _counter("rank_collective_seconds", "time in collectives, waits included (CPU)", "rank")
RANK_STEPS = _counter("rank_steps", "steps that a rank has ended", "rank")
RANK_LAST = _counter("straggler_rank", "steps that this rank began last", "rank")
RANK_CPU = _counter("rank_cpu_seconds", "CPU time of a rank's process", "rank")
RANK_SILENCE = _gauge("rank_heartbeat_age_seconds", "time since a rank's last sign of life", "rank")
RANK_RESIDENT = _gauge("rank_resident_memory_bytes", "host memory of a rank's process", "rank")
RANK_MEMORY = _gauge("rank_memory_bytes", "a line of a rank's memory ledger", "rank", "line")
STARTUP = _gauge("startup_phase_seconds", "a phase of a rank's start", "rank", "phase")

# Former names of vLLM's metrics, which routers made for vLLM still read with its prefix.
VLLM_PREFIX = "vllm"
OLDER_NAMES = {
    KV_USAGE.name: "gpu_cache_usage_perc",
    QUERIES.name: "gpu_prefix_cache_queries",
    HITS.name: "gpu_prefix_cache_hits",
}

FAMILIES: dict[str, MetricFamily] = {
    one.name: one
    for one in (*globals().values(), *(metric.family for feature in features() for metric in feature.metrics))
    if isinstance(one, MetricFamily)
}
"""All metrics, those of features too, by name."""


_KINDS: dict[str, type[Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "summary": SummaryMetricFamily,
    "histogram": HistogramMetricFamily,
}


def samples(family: MetricFamily, model_name: str, rows: Iterable[tuple[Any, ...]]) -> Metric:
    """A metric with its samples, rows of label values and a number; for a summary, count and sum."""
    metric = _KINDS[family.kind](family.name, family.text, labels=("model_name", *family.labels))
    for labels, *values in rows:
        metric.add_metric((model_name, *labels), *values)
    found: Metric = metric
    return found


def number(family: MetricFamily, model_name: str, value: float) -> Metric:
    """A counter or a gauge of one number."""
    return samples(family, model_name, [((), value)])


def histograms(
    family: MetricFamily,
    model_name: str,
    rows: Iterable[tuple[tuple[str, ...], Sequence[float], Sequence[int], float]],
) -> Metric:
    """A histogram with its samples: label values, bounds, counts by bucket, sum."""
    found = []
    for labels, bounds, counts, total in rows:
        names = (*map(repr, map(float, bounds)), "+Inf")
        found.append((labels, list(zip(names, accumulate(counts), strict=True)), total))
    return samples(family, model_name, found)


def prefixed(metrics: Iterable[Metric], prefix: str) -> Iterator[Metric]:
    """The metrics as ``prefix:NAME``; with vLLM's prefix, some of them also under their former names."""
    for metric in metrics:
        yield _renamed(metric, f"{prefix}:{metric.name}")
        if prefix == VLLM_PREFIX and metric.name in OLDER_NAMES:
            yield _renamed(metric, f"{prefix}:{OLDER_NAMES[metric.name]}")


def _renamed(metric: Metric, name: str) -> Metric:
    renamed = Metric(name, metric.documentation, metric.type)
    renamed.samples = [one._replace(name=name + one.name.removeprefix(metric.name)) for one in metric.samples]
    return renamed
