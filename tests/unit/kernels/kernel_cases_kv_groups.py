"""Groups of layers with their own block tables, on the GPU's data path, interpreted.

Run in a process of its own with TRITON_INTERPRET=1.  Oracle: the same model with one table for all layers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.tiny_models import make_checkpoint
from tests.unit.attention.test_kv_groups import WINDOWED, Engine, compare, serve
from tests.unit.kernels.kernel_harness import AGREEMENT, triton_ops_on_cpus
from tp_engine.attention.triton_backend import TritonBackend


def main() -> None:
    with tempfile.TemporaryDirectory() as name, triton_ops_on_cpus():
        shape: dict[str, Any] = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 32}
        two_layers = {"num_layers": 2, "layer_types": WINDOWED["layer_types"][:2]}
        folder = make_checkpoint(Path(name) / "model", **shape, **WINDOWED | two_layers)
        grouped = Engine(folder, TritonBackend)
        with patch("tp_engine.kv_layout.MAX_GROUPS", 1):
            single = Engine(folder, TritonBackend)
        assert [len(engine.windows) for engine in (grouped, single)] == [2, 1]
        compare(serve(grouped, 2), serve(single, 2))
    assert grouped.freed > 4
    print(AGREEMENT)


if __name__ == "__main__":
    main()
