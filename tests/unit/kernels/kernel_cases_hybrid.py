"""A whole engine of a hybrid on the GPU's data path, interpreted: Triton steps the states of decodes, also recorded.

Run in a process of its own with TRITON_INTERPRET=1.  Oracle: the same engine on C, its tokens.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest.mock import patch

from tests.tiny_models import make_checkpoint
from tests.unit.kernels.kernel_cases_engine import RECORDED, generate, gpu_path
from tests.unit.kernels.kernel_harness import AGREEMENT, triton_ops_on_cpus


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint(
            Path(name) / "model",
            "qwen3.5",
            num_layers=2,
            layer_types=["linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=6,
            vocab_size=101,
            intermediate_size=64,
        )
        expected = generate(folder)
        with (
            triton_ops_on_cpus() as used,
            gpu_path(),
            patch("tp_engine.worker.worker.graph_plan", lambda *_: RECORDED),
            patch("tp_engine.worker.worker.warms_up", lambda device_type: True),
        ):
            found = generate(folder)
    assert {"gated_delta_net_decode", "sigmoid_gate"} <= used, used
    assert found == expected, (found, expected)
    print(AGREEMENT)


if __name__ == "__main__":
    main()
