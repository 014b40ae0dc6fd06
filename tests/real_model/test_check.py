"""``tp-engine check`` finds SmolLM2 right in the coarsest formats, and on the three ranks that share its nine heads.

``tests/e2e/test_check.py`` has every format with tiny models, and ``test_quality.py`` what each costs this one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tp_engine.apps.check.engine_check import EngineCheck

pytestmark = pytest.mark.slow

FORMATS: list[dict[str, Any]] = [
    {"dtype": "float32", "tensor_parallel_size": 3},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int4"},
    {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", FORMATS, ids=lambda options: "-".join(map(str, options.values())))
def test_smollm2_is_right(options: dict[str, Any], smollm2: Path) -> None:
    """Oracle: transformers, layer by layer, in float32 and with the engine's rounding."""
    given = {"model": str(smollm2), "device": "cpu", "max_model_len": 512, "num_gpu_blocks_override": 256, **options}
    report, _ = EngineCheck(options=given, quick=True).run()
    assert report.exit_code == 0, report.as_text()
