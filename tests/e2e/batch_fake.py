"""``launch/batch.py`` with a ``FakeEngine`` in place of the real one; the rest of the job is real.

``TEST_STEP_DELAY_S`` is the time of one step.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import cache
from types import TracebackType
from typing import Any
from unittest.mock import patch

from tests.e2e.frontend import INFO, new_engine
from tests.fake_engine import FakeEngine
from tp_engine.api.batch_job import run as batch_run
from tp_engine.api.batch_job.config import BatchConfig
from tp_engine.api.input_processor import InputProcessor, load_tokenizer
from tp_engine.api.llm import LLM
from tp_engine.api.output_streams import Outputs, Processed
from tp_engine.cli.launched import run_launched_batch
from tp_engine.config import EngineConfig
from tp_engine.options import Options
from tp_engine.options.launch import run_launched


class FakeLLM:
    """The part of ``LLM`` that a batch job uses: a fake engine that repeats prompts, between the real processors."""

    engine: FakeEngine

    def __init__(self, step_delay_s: float = 0.0) -> None:
        self.engine = new_engine(step_delay_s)
        self.input_processor = InputProcessor(INFO, _tokenizer())
        self.outputs = Outputs(_tokenizer())
        self._lock = threading.RLock()  # of LLM.step

    def step(self) -> Processed:
        return LLM.step(self)  # type: ignore[arg-type]

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.engine.close()


@cache
def _tokenizer() -> Any:
    return load_tokenizer(INFO.tokenizer)


def job(options: Options) -> int:
    delay_s = float(os.environ.get("TEST_STEP_DELAY_S", "0"))
    with patch.object(batch_run, "LLM", lambda **_: FakeLLM(delay_s)):
        return run_launched_batch(options.build("engine", EngineConfig), options.build("batch", BatchConfig))


if __name__ == "__main__":
    sys.exit(run_launched("batch.py", "", {"engine": EngineConfig, "batch": BatchConfig}, job))
