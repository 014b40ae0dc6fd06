"""One rank's worker: start in phases, then run plans."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from tp_engine.attention.registry import select_backend
from tp_engine.dist.groups import RankGroups
from tp_engine.layers.sampling_state import SamplingState
from tp_engine.log import get_logger
from tp_engine.model_config import local_num_kv_heads
from tp_engine.models.registry import build_model
from tp_engine.plan import StepPlan
from tp_engine.weights.loader import load_weights
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.input_batch import InputBatch
from tp_engine.worker.model_runner import ModelRunner, PendingStep

logger = get_logger(__name__)
