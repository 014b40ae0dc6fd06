"""A short soak: seconds and two ranks; ``scripts/soak`` runs for minutes on eight, and kills more often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.__main__ import run
from tests.soak.disk_kills import MODEL, disk_kills
from tests.soak.lives import Soak

pytestmark = pytest.mark.slow


def test_a_short_soak(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracles: an undisturbed engine's tokens, the sum of blocks, the number of descriptors, the lost rank's name."""
    folder = checkpoint("qwen3", num_heads=8, num_kv_heads=8)
    soak = Soak(folder, tmp_path / "flight", num_ranks=2, seed=1, check_every_s=0.4)
    least = Counter(
        {"steps": 300, "compared": 1, "preemptions": 1, "aborted": 1, "stored blocks": 1, "loaded blocks": 1}
    )
    run(soak, seconds=6.0, least=least, fatal_kinds=("kill",))  # too short to judge memory
    assert soak.count >= least, soak.count
    assert soak.count["ended by kill"] > 0 and soak.count["lives"] >= 4, soak.count


def test_kill_9_costs_no_token_and_hardly_a_block(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Oracle: the tokens of an engine without tiers; most blocks that are older than a second are found by the next
    engine (the soak asks for 95 %, on a machine that is not busy).  Six kills of two ranks at random moments."""
    count = disk_kills(checkpoint("qwen3", **MODEL), tmp_path, 6, num_ranks=2, seed=5, least_share=0.8)
    assert count["kills"] == 7 and count["answers"] > 20 and count["blocks that should be there"] > 20, count
