"""A whole engine with latent attention on the GPU's data path, interpreted: Triton decodes, recorded, and attends for
short chunks; longer ones are expanded.

Run in a process of its own with TRITON_INTERPRET=1.  Oracle: the same engine on C, its tokens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

from tests.tiny_models import make_checkpoint
from tests.unit.kernels.kernel_cases_engine import RECORDED, CountedSteps, generate, gpu_path
from tests.unit.kernels.kernel_harness import AGREEMENT, triton_ops_on_cpus
from tp_engine.attention import mla
from tp_engine.attention.mla import MLABackend
from tp_engine.attention.triton_mla import TritonMLABackend


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(Path(name) / "model", "deepseek-v3", num_layers=2, vocab_size=101)
        expected = generate(folder)
        with (
            triton_ops_on_cpus() as used,
            gpu_path(),
            patch("tp_engine.worker.worker.select_backend", lambda *_: MLABackend(TritonMLABackend())),
            patch("tp_engine.worker.worker.graph_plan", lambda *_: RECORDED),
            patch("tp_engine.worker.worker.warms_up", lambda device_type: True),
            patch("tp_engine.worker.graphs.step_runner.CapturedSteps", CountedSteps),
            patch.object(mla, "MIN_EXPANDED_QUERIES", 12),
        ):
            found = generate(folder)
    assert {"prepare_latents", "route"} <= used, used
    assert found == expected, (found, expected)
    assert CountedSteps.steps, "no step of decodes was recorded"
    print(AGREEMENT)


if __name__ == "__main__":
    main()
