"""What the scheduler and the frontend are told of the options."""

from __future__ import annotations

from dataclasses import dataclass

from tp_engine.config import EngineConfig
from tp_engine.engine.build import _as_configured, model_info
from tp_engine.sched.limits import SchedulerLimits
from tp_engine.worker.effective_config import resolve


def test_options_reach_the_scheduler_and_the_frontend() -> None:
    """Oracle: the options, none of which has its default; names that mean something else there are not taken."""
    config = EngineConfig(device="cpu", block_size=32, max_num_seqs=7, max_num_batched_tokens=96, seed=5)
    told = _as_configured(SchedulerLimits, config)
    assert {"block_size": 32, "max_num_seqs": 7, "max_num_batched_tokens": 96, "seed": 5}.items() <= told.items()
    info = model_info(resolve(config), 40, longest=128)
    assert (info.block_size, info.max_num_seqs, info.device, info.num_blocks) == (32, 7, "cpu", 40)
    assert (info.model, info.tokenizer, info.max_model_len, info.convert) == (config.model, config.model, 128, "none")


def test_an_option_of_another_type_is_not_taken() -> None:
    """Oracle: ``max_model_len`` may be None as an option, and is a number where it is known."""

    @dataclass
    class Sizes:
        max_model_len: int
        block_size: int

    assert _as_configured(Sizes, EngineConfig(device="cpu", block_size=8)) == {"block_size": 8}
    assert not _as_configured(Sizes, EngineConfig(device="cpu"), but={"block_size"})
