"""``launch/serve.py`` with a ``FakeEngine`` in place of the real one; the rest of the job is real.

The engine takes ``TEST_START_DELAY_S`` seconds to start, and makes no step while the file ``TEST_GATE`` exists.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any
from unittest.mock import patch

from tests.e2e.frontend import INFO, repeat_prompt
from tests.fake_engine import FakeEngine
from tp_engine.config import EngineConfig
from tp_engine.ipc.pulse import Pulse
from tp_engine.options import Options
from tp_engine.options.launch import run_launched
from tp_engine.requests.request import StepOutput
from tp_engine.server import lifecycle
from tp_engine.server.config import ServerConfig


class GatedByFile(FakeEngine):
    """A ``FakeEngine`` that another process can hold up; requests, aborts and signals reach it meanwhile."""

    def step(self) -> StepOutput:
        if os.path.exists(os.environ.get("TEST_GATE", "")):
            time.sleep(self.step_delay_s)
            return StepOutput()
        return super().step()


def start_fake_engine(_config: EngineConfig, *, ends_process: bool, pulse: Pulse) -> Any:
    print("loading", flush=True)
    time.sleep(float(os.environ.get("TEST_START_DELAY_S", "0")))
    return GatedByFile(repeat_prompt, step_delay_s=0.005, model_info=INFO)


def job(options: Options) -> int:
    with patch.object(lifecycle, "start_engine", start_fake_engine):
        return lifecycle.serve(options.build("engine", EngineConfig), options.build("server", ServerConfig))


if __name__ == "__main__":
    sys.exit(run_launched("serve.py", "", {"engine": EngineConfig, "server": ServerConfig}, job))
