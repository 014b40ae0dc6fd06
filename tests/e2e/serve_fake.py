"""``launch/serve.py`` with a ``FakeEngine`` in place of the real one; the rest of the job is real.

The engine takes ``TEST_START_DELAY_S`` seconds to start.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any
from unittest.mock import patch

from tests.e2e.frontend import new_engine
from tp_engine.config import EngineConfig
from tp_engine.ipc.pulse import Pulse
from tp_engine.options import Options
from tp_engine.options.launch import run_launched
from tp_engine.server import lifecycle
from tp_engine.server.config import ServerConfig


def start_fake_engine(_config: EngineConfig, *, ends_process: bool, pulse: Pulse) -> Any:
    print("loading", flush=True)
    time.sleep(float(os.environ.get("TEST_START_DELAY_S", "0")))
    return new_engine(step_delay_s=0.005)


def job(options: Options) -> int:
    with patch.object(lifecycle, "start_engine", start_fake_engine):
        return lifecycle.serve(options.build("engine", EngineConfig), options.build("server", ServerConfig))


if __name__ == "__main__":
    sys.exit(run_launched("serve.py", "", {"engine": EngineConfig, "server": ServerConfig}, job))
