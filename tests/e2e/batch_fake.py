"""``launch/batch.py`` with a ``FakeEngine`` in place of the real one; the rest of the job is real.

``TEST_STEP_DELAY_S`` is the time of one step.
"""

from __future__ import annotations

import os
import sys
from unittest.mock import patch

from tests.e2e.frontend import new_engine
from tests.services import FakeLLM
from tp_engine.apps.batch import run as batch_run
from tp_engine.apps.batch.command import run_launched_batch
from tp_engine.apps.batch.config import BatchConfig
from tp_engine.config import EngineConfig
from tp_engine.options import Options
from tp_engine.options.launch import run_launched


def job(options: Options) -> int:
    delay_s = float(os.environ.get("TEST_STEP_DELAY_S", "0"))
    with patch.object(batch_run, "LLM", lambda **_: FakeLLM(new_engine(delay_s))):
        return run_launched_batch(options.build("engine", EngineConfig), options.build("batch", BatchConfig))


if __name__ == "__main__":
    sys.exit(run_launched("batch.py", "", {"engine": EngineConfig, "batch": BatchConfig}, job))
