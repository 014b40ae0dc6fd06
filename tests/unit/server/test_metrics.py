"""The exposition as Prometheus reads it: names, labels and buckets as listed here, counts that match the requests."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

import tp_engine
from tests.asgi import App, run_served, until
from tests.fake_engine import FakeEngine, arith
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine.features.metric import token_buckets
from tp_engine.features.tiers.feature import TierStats
from tp_engine.server.config import ServerConfig
from tp_engine.server.metrics import ServerMetrics
from tp_engine.server.metrics.families import FAMILIES, OLDER_NAMES
from tp_engine.server.metrics.figures import Histogram

PREFIX = "tp_engine:"
DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana_dashboard.json"
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"

FIRST = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
NEXT = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
LATENCY = "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
TOKENS = "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0 500.0 1000.0"  # the fake engine has a max_model_len of 1024
HTTP = "0.1 0.5 1.0"
HTTP_FINE = "0.01 0.025 0.05 0.075 0.1 0.25 0.5 0.75 1.0 1.5 2.0 2.5 3.0 3.5 4.0 4.5 5.0 7.5 10.0 30.0 60.0"
WAIT = "1e-05 2e-05 5e-05 0.0001 0.0002 0.0005 0.001 0.002 0.005 0.01 0.02 0.05 0.1 1.0"
STEP = "0.0005 0.001 0.002 0.005 0.01 0.02 0.05 0.1 0.2 0.5 1.0 2.0 5.0 10.0"
PLAN = "128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0 32768.0 65536.0 262144.0 1048576.0"
ITERATION = "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0"

# name, kind, labels beside model_name, buckets
GOLDEN = f"""
batch_lines counter result
batch_lines_waiting gauge
batches gauge status
build_info gauge version
cache_config_info gauge block_size,num_gpu_blocks,max_model_len,max_num_seqs,dtype,device,tensor_parallel_size
e2e_request_latency_seconds histogram - {LATENCY}
expert_load_max_over_mean gauge
experts_by_load gauge over,up_to
generation_tokens counter
http_request_duration_highr_seconds histogram - {HTTP_FINE}
http_request_duration_seconds histogram handler,method {HTTP}
http_request_size_bytes summary handler
http_requests counter handler,method,status
http_response_size_bytes summary handler
image_encode_seconds counter
image_load_seconds histogram - {NEXT}
image_tokens counter
images counter
images_encoded counter
inter_token_latency_seconds histogram - {NEXT}
iteration_tokens_total histogram - {ITERATION}
kv_cache_usage_peak_perc gauge
kv_cache_usage_perc gauge
kv_disk_bytes counter direction
kv_disk_failed_blocks counter
kv_disk_seconds counter direction
kv_disk_usage_perc gauge
kv_dropped_blocks counter
kv_event_batches counter
kv_events_lost_changes counter
kv_fragmentation gauge
kv_host_usage_perc gauge
kv_offload_bytes counter direction
kv_offload_seconds counter direction
kv_offload_wait_seconds counter
kv_refused_blocks counter
lora_requests_info gauge max_lora,running_lora_adapters,waiting_lora_adapters
mm_cache_hits counter
mm_cache_queries counter
mm_cache_rows_used gauge
num_cached_blocks gauge
num_free_blocks gauge
num_live_tokens gauge
num_preemptions counter
num_requests_running gauge
num_requests_waiting gauge
num_used_blocks gauge
plan_size_bytes histogram - {PLAN}
prefix_cache_hits counter
prefix_cache_queries counter
prompt_tokens counter
prompt_tokens_by_source counter source
rank_collective_seconds counter rank
rank_collective_wait_seconds histogram rank {WAIT}
rank_cpu_seconds counter rank
rank_heartbeat_age_seconds gauge rank
rank_idle_seconds histogram rank {WAIT}
rank_memory_bytes gauge rank,line
rank_resident_memory_bytes gauge rank
rank_step_time_seconds histogram rank {STEP}
rank_steps counter rank
recomputed_tokens counter
request_decode_time_seconds histogram - {LATENCY}
request_generation_tokens histogram - {TOKENS}
request_inference_time_seconds histogram - {LATENCY}
request_params_max_tokens histogram - {TOKENS}
request_params_n histogram - 1.0 2.0 5.0 10.0 20.0
request_prefill_time_seconds histogram - {LATENCY}
request_prompt_tokens histogram - {TOKENS}
request_queue_time_seconds histogram - {LATENCY}
request_success counter finished_reason
request_time_per_output_token_seconds histogram - {NEXT}
spec_decode_num_accepted_tokens counter
spec_decode_num_accepted_tokens_per_pos counter position
spec_decode_num_draft_tokens counter
spec_decode_num_drafts counter
spec_decode_source_accepted_tokens counter source
spec_decode_source_draft_tokens counter source
startup_phase_seconds gauge rank,phase
step_samples_dropped counter
step_skew_seconds histogram - {WAIT}
straggler_rank counter rank
time_to_first_token_seconds histogram - {FIRST}
"""


async def scrape(app: App) -> dict[str, Metric]:
    """The families by name, without the prefix."""
    reply = await app.get("/metrics")
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(reply.content.decode()))
    assert all(family.name.startswith(PREFIX) for family in families)
    return {family.name.removeprefix(PREFIX): family for family in families}


def value(family: Metric, suffix: str = "", **labels: str) -> float:
    """The sum of the samples whose name has this suffix and whose labels contain these."""
    return sum(
        sample.value
        for sample in family.samples
        if sample.name == family.name + suffix and labels.items() <= sample.labels.items()
    )


def served(
    scenario: Callable[[App], Awaitable[None]], engine: FakeEngine | None = None, config: ServerConfig | None = None
) -> None:
    run_served(scenario, engine or FakeEngine(arith), byte_level_tokenizer(), config)


def completion(**changes: object) -> dict[str, object]:
    return {"model": "demo", "prompt": [5, 6, 7], "max_tokens": 4, **changes}


def test_names_labels_and_buckets() -> None:
    """Oracle: the list above, which has vLLM's names and buckets where vLLM has the metric."""

    async def scenario(app: App) -> None:
        await app.post("/v1/completions", completion())
        found = []
        for name, family in sorted((await scrape(app)).items()):
            names = {label for sample in family.samples for label in sample.labels} - {"model_name", "le"}
            labels = [label for label in FAMILIES[name].labels if label in names]
            assert len(labels) == len(names)
            bounds = dict.fromkeys(s.labels["le"] for s in family.samples if s.name.endswith("_bucket"))
            assert not bounds or list(bounds)[-1] == "+Inf"
            line = f"{name} {family.type} {','.join(labels) or '-'} {' '.join(list(bounds)[:-1])}"
            found.append(line.strip().removesuffix(" -"))
        assert found == GOLDEN.strip().splitlines()

    served(scenario)


def test_every_sample_has_the_model_and_every_family_a_text() -> None:
    """Oracle: the label model_name is the first served name; the table and the exposition have the same families."""

    async def scenario(app: App) -> None:
        await app.post("/v1/completions", completion())
        families = await scrape(app)
        assert families.keys() == FAMILIES.keys()
        assert {s.labels["model_name"] for family in families.values() for s in family.samples} == {"demo"}
        assert all(family.documentation for family in families.values())

    served(scenario)


def test_counters_after_known_requests() -> None:
    """Oracle: the requests: 3 + 2 + 2 prompt tokens, answers of 4, of 2 times 6, and of 1 token."""

    async def scenario(app: App) -> None:
        await app.post("/v1/completions", completion())
        await app.post("/v1/completions", completion(prompt=[1, 2], n=2, max_tokens=6, stream=True))
        await app.post("/v1/completions", completion(prompt=[[3, 4]], max_tokens=1))
        await app.post("/v1/completions", completion(temperature=-1))
        families = await scrape(app)
        expected = {
            ("prompt_tokens", "_total"): 7,
            ("generation_tokens", "_total"): 17,
            ("request_success", "_total"): 4,
            ("time_to_first_token_seconds", "_count"): 3,
            ("inter_token_latency_seconds", "_count"): 3 + 2 * 5,
            ("request_time_per_output_token_seconds", "_count"): 3,
            ("e2e_request_latency_seconds", "_count"): 4,
            ("request_queue_time_seconds", "_count"): 3,
            ("request_prefill_time_seconds", "_count"): 3,
            ("request_decode_time_seconds", "_count"): 3,
            ("request_inference_time_seconds", "_count"): 3,
            ("request_prompt_tokens", "_sum"): 7,
            ("request_generation_tokens", "_sum"): 17,
            ("request_params_n", "_sum"): 4,
            ("request_params_max_tokens", "_sum"): 11,
        }
        found = {key: value(families[key[0]], key[1]) for key in expected}
        assert found == expected
        assert value(families["request_success"], "_total", finished_reason="length") == 4
        assert value(families["request_prompt_tokens"], "_bucket", le="2.0") == 2
        assert value(families["request_prompt_tokens"], "_bucket", le="+Inf") == 3
        times = [f"request_{part}_time_seconds" for part in ("queue", "prefill", "decode")]
        parts = [value(families[name], "_sum") for name in times]
        assert min(parts) >= 0
        assert parts[1] + parts[2] == pytest.approx(value(families["request_inference_time_seconds"], "_sum"), abs=1e-6)

    served(scenario)


def test_those_who_leave_and_those_who_are_refused() -> None:
    """Oracle: a client that leaves counts as an abort of its two sequences; a refused request does not count."""

    async def scenario(app: App) -> None:
        exchange = app.start("POST", "/v1/completions", completion(stream=True, n=2, max_tokens=900))
        await until(lambda: bool(exchange.parts), "the first event")
        exchange.leave()
        await exchange.ended()
        await app.post("/v1/completions", completion(prompt=list(range(3, 500)) * 3))
        families = await scrape(app)
        assert value(families["request_success"], "_total", finished_reason="abort") == 2
        assert value(families["request_success"], "_total") == 2
        assert value(families["request_prompt_tokens"], "_count") == 0
        routes = families["http_requests"]
        assert value(routes, "_total", handler="/v1/completions", method="POST", status="2xx") == 1
        assert value(routes, "_total", handler="/v1/completions", method="POST", status="4xx") == 1

    served(scenario, FakeEngine(arith, step_delay_s=0.002))


def test_requests_of_an_engine_that_fails_are_errors() -> None:
    """Oracle: the second step raises: both sequences of the request count as errors, and its tokens as generated."""

    async def scenario(app: App) -> None:
        reply = await app.post("/v1/completions", completion(n=2, max_tokens=9))
        assert reply.status == 500
        families = await scrape(app)
        assert value(families["request_success"], "_total", finished_reason="error") == 2
        assert value(families["generation_tokens"], "_total") == 2
        assert value(families["http_requests"], "_total", status="5xx") == 1

    served(scenario, FakeEngine(arith, fail_at_step=2))


def test_http_metrics() -> None:
    """Oracle: three exchanges with their bytes; unknown paths share one label, probes and scrapes have none."""

    async def scenario(app: App) -> None:
        body = json.dumps(completion()).encode()
        reply = await app.start("POST", "/v1/completions", body, **{"content-length": str(len(body))}).reply()
        await app.get("/no/such/path/1")
        await app.get("/no/such/path/2")
        await app.get("/health")
        families = await scrape(app)
        requests = {(s.labels["handler"], s.labels["status"]): s.value for s in families["http_requests"].samples}
        assert requests == {("/v1/completions", "2xx"): 1, ("none", "4xx"): 2}
        assert value(families["http_request_size_bytes"], "_sum", handler="/v1/completions") == len(body)
        assert value(families["http_response_size_bytes"], "_sum", handler="/v1/completions") == len(reply.content)
        assert value(families["http_request_duration_seconds"], "_count") == 3
        assert value(families["http_request_duration_highr_seconds"], "_bucket", le="+Inf") == 3

    served(scenario)


def test_the_engine_and_its_ranks() -> None:
    """Oracle: the fake engine's figures, for as many steps as it took."""

    async def scenario(app: App) -> None:
        await app.post("/v1/completions", completion())
        families = await scrape(app)
        num_steps = value(families["rank_steps"], "_total", rank="0")
        assert num_steps == app.service.engine.num_steps >= 4
        assert value(families["build_info"], version=tp_engine.__version__) == 1
        assert value(families["num_free_blocks"]) == 256 and value(families["kv_cache_usage_perc"]) == 0
        assert value(families["rank_memory_bytes"], rank="1", line="kv_cache") == 1001
        assert value(families["kv_offload_bytes"], "_total", direction="store") == 3000
        loads = families["experts_by_load"]
        assert value(loads, over="-Inf", up_to="0.1") == 0 and value(loads, over="8.0", up_to="+Inf") == 0
        assert value(loads, over="0.75", up_to="1.0") == 3 and value(loads) == 8
        assert value(families["kv_offload_seconds"], "_total", direction="load") == 0.25
        assert value(families["kv_disk_bytes"], "_total", direction="write") == 900
        assert value(families["kv_disk_seconds"], "_total", direction="read") == 0.5
        assert value(families["kv_offload_wait_seconds"], "_total") == 0.125
        assert value(families["kv_event_batches"], "_total") == 6
        assert value(families["kv_events_lost_changes"], "_total") == 2
        assert value(families["startup_phase_seconds"], rank="1", phase="loading weights") == 0.75
        assert value(families["rank_collective_seconds"], "_total", rank="1") == 0.125
        assert value(families["straggler_rank"], "_total", rank="1") == num_steps
        for name in ("rank_step_time_seconds", "rank_idle_seconds", "rank_collective_wait_seconds"):
            assert value(families[name], "_count", rank="1") == num_steps
            assert value(families[name], "_sum", rank="1") == pytest.approx(num_steps * FAMILIES[name].bounds(0)[0])
        assert value(families["iteration_tokens_total"], "_count") == num_steps
        (config,) = families["cache_config_info"].samples
        assert config.value == 1 and config.labels["num_gpu_blocks"] == "256" and config.labels["block_size"] == "16"

    served(scenario)


def test_speculation() -> None:
    """By hand: the fake engine's counters, and none of an engine that does not draft."""
    report, metrics = FakeEngine().report(), ServerMetrics("tiny")
    lines = [line for line in metrics.exposition(report).decode().splitlines() if not line.startswith("#")]
    found = {line.rpartition(" ")[0].removeprefix(PREFIX): float(line.rpartition(" ")[2]) for line in lines}
    assert found['spec_decode_num_draft_tokens_total{model_name="tiny"}'] == 20
    assert found['spec_decode_num_accepted_tokens_per_pos_total{model_name="tiny",position="3"}'] == 1
    assert found['spec_decode_source_accepted_tokens_total{model_name="tiny",source="ngram"}'] == 12
    without = metrics.exposition(replace(report, stats=replace(report.stats, extensions={})))
    assert b"spec_decode" not in without


def test_the_tiers() -> None:
    """By hand: of 100 prompt tokens 60 were cached, 20 of these on the host and 15 on disk; 3 of 12 slots on the host
    hold a block, and 5 of 50 on disk."""
    engine = FakeEngine()
    report = engine.report()
    tiers = TierStats(
        num_host_hit_tokens=20, num_disk_hit_tokens=15, num_host_slots=12, num_used_host_slots=3, num_dropped_blocks=5,
        num_refused_blocks=7, num_disk_slots=50, num_used_disk_slots=5, num_disk_failed_blocks=2,
    )  # fmt: skip
    figures: dict[str, Any] = {"num_prefix_query_tokens": 100, "num_prefix_hit_tokens": 60}
    metrics = ServerMetrics("tiny")
    text = metrics.exposition(
        replace(report, stats=replace(report.stats, extensions={"tiers": tiers}, **figures))
    ).decode()
    families = {one.name.removeprefix(PREFIX): one for one in text_string_to_metric_families(text)}
    sources = {sample.labels["source"]: sample.value for sample in families["prompt_tokens_by_source"].samples}
    assert sources == {"device": 25, "host": 20, "disk": 15, "computed": 40}
    assert value(families["kv_disk_usage_perc"]) == 0.1 and value(families["kv_disk_failed_blocks"], "_total") == 2
    assert value(families["kv_host_usage_perc"]) == 0.25
    assert value(families["kv_dropped_blocks"], "_total") == 5
    assert value(families["kv_refused_blocks"], "_total") == 7


def test_a_silent_engine_leaves_the_servers_own_figures() -> None:
    """Oracle: without an engine, the server's own families are present and the engine's are absent."""

    async def scenario(app: App) -> None:
        await app.post("/v1/completions", completion())
        app.service.service.request_stop()
        await until(lambda: not app.state._llm.is_ready, "the end of the engine")  # type: ignore[union-attr]
        families = await scrape(app)
        assert value(families["prompt_tokens"], "_total") == 3
        assert "num_requests_running" not in families and "rank_steps" not in families

    served(scenario)


def test_prefixes_and_the_names_that_routers_read() -> None:
    """Oracle: the names in the sources of llm-d's scheduler and of vLLM's routers; both prefixes have the same."""

    async def scenario(app: App) -> None:
        await app.post("/v1/completions", completion())
        text = (await app.get("/metrics")).content.decode()
        families = {one.name: one for one in text_string_to_metric_families(text)}
        read = {
            "num_requests_waiting", "num_requests_running", "kv_cache_usage_perc", "cache_config_info",
            "gpu_cache_usage_perc", "gpu_prefix_cache_queries", "gpu_prefix_cache_hits",
        }  # fmt: skip
        assert read <= {name.removeprefix("vllm:") for name in families}
        assert families.keys() == {
            *(f"{prefix}:{name}" for prefix in ("tp_engine", "vllm") for name in FAMILIES),
            *(f"vllm:{name}" for name in OLDER_NAMES.values()),
        }
        for name, also in [*zip(FAMILIES, FAMILIES, strict=True), *OLDER_NAMES.items()]:
            ours = [(one.labels, one.value) for one in families[f"tp_engine:{name}"].samples]
            assert ours == [(one.labels, one.value) for one in families[f"vllm:{also}"].samples]
        assert {"block_size", "num_gpu_blocks"} <= families["vllm:cache_config_info"].samples[0].labels.keys()

    served(scenario, config=ServerConfig(metrics_prefix=("tp_engine", "vllm")))


def test_buckets_of_tokens() -> None:
    """Oracle: vLLM's example for 100, and the edges of others."""
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_buckets(1) == (1,) and token_buckets(4) == (1, 2) and token_buckets(10) == (1, 2, 5, 10)
    assert token_buckets(131072)[-1] == 100_000


def test_a_bound_belongs_to_its_bucket() -> None:
    """Oracle: Prometheus' ``le``: less than or equal."""
    histogram = Histogram((1.0, 2.0))
    for one, count in ((0.5, 1), (1.0, 1), (1.1, 3), (2.0, 1), (2.1, 1)):
        histogram.observe(one, count)
    assert histogram.counts == [2, 4, 1] and histogram.total == pytest.approx(0.5 + 1 + 3.3 + 2 + 2.1)


def test_the_page_names_every_metric() -> None:
    """Oracle: the families, in both directions, against docs/metrics.md."""
    section = PAGE.read_text(encoding="utf-8").split("\n## Metrics\n", 1)[1].split("\n## ", 1)[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    documented = set(re.findall(r"`([a-z0-9_]+)`", re.sub(r"\(`[a-z_]+`(, `[a-z_]+`)*\)", "", "\n".join(rows))))
    assert documented == FAMILIES.keys()


def test_concurrent_scrapes_agree() -> None:
    """Oracle: ten scrapes at once, each whole."""

    async def scenario(app: App) -> None:
        await app.post("/v1/completions", completion())
        scrapes = await asyncio.gather(*(scrape(app) for _ in range(10)))
        assert all(one.keys() == FAMILIES.keys() for one in scrapes)

    served(scenario)


def test_the_dashboard() -> None:
    """Oracle: every metric in an expression is one of ours, with the suffix of its kind, and the dashboard shows all of
    them."""
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    suffixes = {
        "counter": {"_total"},
        "gauge": {""},
        "summary": {"_sum", "_count"},
        "histogram": {"_bucket", "_sum", "_count"},
    }
    known = {one.name + suffix: one.name for one in FAMILIES.values() for suffix in suffixes[one.kind]}
    named = {name for text in expressions for name in re.findall(r"tp_engine:(\w+)", text)}
    assert sorted(named - known.keys()) == []
    assert {known[name] for name in named} == FAMILIES.keys()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids) and all('model_name="$model_name"' in text for text in expressions)


def test_the_dashboards_panels_do_not_overlap() -> None:
    """Oracle: every cell of the grid, 24 wide, belongs to one panel."""
    places = [panel["gridPos"] for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
