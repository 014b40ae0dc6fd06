"""A short soak: seconds and two ranks; ``scripts/soak`` runs for minutes on eight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.soak.__main__ import run
from tests.soak.lives import Soak


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
