"""Advice on the block size: waste calculated by hand and by counting, and the lines that name it."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.asgi import App, run_served, until
from tests.fake_engine import FakeEngine
from tests.text_tokenizers import byte_level_tokenizer
from tp_engine import recommend
from tp_engine.apps.advice.question import Workload
from tp_engine.model_config.block_size import (
    BLOCK_SIZES,
    LengthCounter,
    Lengths,
    advise_measured,
    choose_block_size,
    describe_waste,
)
from tp_engine.server import engine_watch
from tp_engine.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[4]


def wasted(lengths: Lengths) -> list[float]:
    return [lengths.wasted_tokens(size) for size in BLOCK_SIZES]


def test_requests_that_share_nothing() -> None:
    """By hand: 3.5, 7.5, 15.5 and 31.5 empty slots, of 512 + 128 / 2 tokens held."""
    lengths = Lengths(prompt=512, output=128)
    assert lengths.held_tokens == 576 and lengths.shared_tokens == 0
    assert wasted(lengths) == [3.5, 7.5, 15.5, 31.5]
    assert [round(100 * lengths.waste(size), 1) for size in BLOCK_SIZES] == [0.6, 1.3, 2.7, 5.5]
    assert choose_block_size(lengths) == 16


def test_a_prefix_of_known_length() -> None:
    """By hand: of 300 shared tokens, 4, 12, 12 and 44 lie after the last full block."""
    lengths = Lengths(prompt=512, output=128, prefixes={300: 1})
    assert wasted(lengths) == [3.5 + 4, 7.5 + 12, 15.5 + 12, 31.5 + 44]
    assert choose_block_size(lengths) == 8


def test_prefixes_that_a_server_found() -> None:
    """By hand, with blocks of 16: two requests share 288 tokens, one 64, one none.  After the full blocks that were
    found, 7.5 more tokens are shared on the average; blocks of 8 would find one of these half of the time."""
    counter = LengthCounter()
    for prompt, output, shared in ((400, 100, 288), (300, 20, 288), (100, 60, 64), (40, 20, 0)):
        counter.observe(prompt, output, shared)
    lengths = counter.lengths(16)
    assert (lengths.prompt, lengths.output, lengths.shared_tokens, lengths.num_requests) == (210, 50, 160, 4)
    beyond_288 = (0, 0, 0, 32)
    unseen = (3.5, 7.5, 7.5, 7.5)
    last = (3.5, 7.5, 15.5, 31.5)
    assert wasted(lengths) == [a + (2 * b + 3 * c) / 4 for a, b, c in zip(last, beyond_288, unseen, strict=True)]


@pytest.mark.parametrize("size", BLOCK_SIZES)
def test_the_waste_is_what_counting_finds(size: int) -> None:
    """Oracle: the mean over requests whose lengths take every place in a block, counted one by one.  What a server
    with blocks of 8 finds of such prefixes gives the same."""
    lengths = range(640, 704)
    empty = sum(-length % size for length in lengths) / len(lengths)
    lost = sum(length - length // size * size for length in lengths) / len(lengths)
    exact = Lengths(prompt=1000, output=0, prefixes=Counter(lengths), num_requests=64)
    found = Counter(length // 8 * 8 for length in lengths)
    measured = Lengths(prompt=1000, output=0, prefixes=found, num_requests=64, block_size=8)
    assert exact.wasted_tokens(size) == measured.wasted_tokens(size) == empty + lost


def test_the_texts() -> None:
    """By hand: 20 prompts of 30 and outputs of 20 tokens hold 40; 8-token blocks waste 3.5 of these."""
    counter = LengthCounter()
    for _ in range(2000):
        counter.observe(30, 20, 0)
    assert advise_measured(counter.lengths(32)) == (
        "block size 32 wastes 38.8% of the 40 tokens that a request holds on the average; 8 would waste 8.8%, "
        "16 18.8%, 64 78.8% (2,000 requests with 30 tokens of prompt and 20 of output); best is --block-size 8, "
        "which wastes least"
    )
    large = Lengths(prompt=3000, output=300, prefixes={1024: 1})
    assert describe_waste(large, 128) == (
        "128 wastes 2.0% of the 3,150 tokens that a request holds on the average, of which 1,024 are shared; "
        "8 would waste 0.1%, 16 0.2%, 32 0.5%, 64 1.0%"
    )
    assert advise_measured(large).endswith("best is --block-size 64, the largest with at most 2%")
    page = " ".join((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8").split())
    assert advise_measured(Lengths(prompt=512, output=128, num_requests=1204, block_size=16)) in page


def test_a_recommendation_names_the_waste() -> None:
    """By hand: 1,000 + 100 / 2 tokens, and 12 of 300 shared ones after the last full block of 16."""
    workload = Workload(name="measured", prompt=1000, output=100, longest=2000, shared_prefix=300)
    found = recommend(workload=workload, device_memory="8GiB", block_size=16)
    reasons = [reason for reason in found.reasons if reason.startswith("block_size 16 wastes 1.9% of the 1,050 tokens")]
    assert len(reasons) == 1 and reasons[0].endswith("300 are shared; 8 would waste 0.7%, 32 2.6%, 64 7.2%")


def test_a_server_logs_the_waste(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Oracle: a line once enough sequences have finished and one at the end, over all of them; none with
    disable_log_stats."""
    monkeypatch.setattr(engine_watch, "INTERVAL_S", 0.01)
    monkeypatch.setattr(engine_watch, "ADVISE_AFTER", 2)

    async def scenario(app: App) -> None:
        running = asyncio.create_task(app.state.watch.run())
        for _ in range(3):
            await app.post("/v1/completions", {"prompt": "a" * 40, "max_tokens": 8, "n": 2})
        seen = len(app.state.watch.history)
        await until(lambda: len(app.state.watch.history) > seen + 3, "samples")
        running.cancel()

    def lines(config: ServerConfig) -> list[str]:
        caplog.clear()
        run_served(scenario, FakeEngine(), byte_level_tokenizer(), config)
        return [text for text in (record.getMessage() for record in caplog.records) if "block size" in text]

    with caplog.at_level("INFO", "tp_engine"):
        first, last = lines(ServerConfig())
        assert "requests with 40 tokens of prompt and 8 of output" in first
        assert "(6 requests with 40 tokens of prompt and 8 of output)" in last
        assert not lines(ServerConfig(disable_log_stats=True))
