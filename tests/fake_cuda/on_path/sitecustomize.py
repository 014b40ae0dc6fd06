"""Python's start on a fake node: what has been imported gets the node's devices and files.

This folder is on the path of every process of a job.  Processes that import neither do nothing here.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

_AFTER = {
    "torch": "use_torch", "triton": "use_triton", "tp_engine.worker.gpu_host": "use_gpu_host",
    "tp_engine.kernels.recurrent_candidates": "use_kernels", "tp_engine.sampling.ranked_shares": "use_draws",
    "tp_engine.attention.expanded": "use_tiles",
}  # fmt: skip
_PATIENCE_S = 240.0
# Limits of what takes long here, as kernels are interpreted and the machine is busy.  Processes get time to end, since
# the log's last lines are theirs.
_PATIENT = {"tp_engine.engine.start": "_STOP_TIMEOUT_S", "tp_engine.engine.service_process": "_STOP_TIMEOUT_S"}
if "FAKE_CUDA_FAULTS" not in os.environ:  # others must say in time what does not end
    _PATIENT |= {
        "tp_engine.distributed.first_collective": "_DEADLINE_S",
        "tp_engine.distributed.all_reduce": "_SYMMETRIC_S",
        "tp_engine.worker.tuning.fused_norm": "_LIMIT_S",
    }


class _Finder:
    """Runs a function of ``tests.fake_cuda.device`` after the import of each module of ``_AFTER``."""

    _asked: ClassVar[set[str]] = set()

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        if name not in (_AFTER | _PATIENT) or name in cls._asked:
            return None
        cls._asked.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            cls._asked.remove(name)
        assert spec is not None and spec.loader is not None
        loader: Any = spec.loader
        load = loader.exec_module

        def load_and_act(module: ModuleType) -> None:
            load(module)
            if name in _PATIENT:
                assert isinstance(vars(module)[_PATIENT[name]], float)
                vars(module)[_PATIENT[name]] = _PATIENCE_S
                return
            from tests.fake_cuda import device

            getattr(device, _AFTER[name])()

        loader.exec_module = load_and_act
        return spec


sys.meta_path.insert(0, _Finder())
if "COVERAGE_PROCESS_START" in os.environ:
    importlib.import_module("coverage").process_startup()
