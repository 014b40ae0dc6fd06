"""``--bisect``: which option makes the answers wrong?  Options are switched off one at a time, then checked again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from tp_engine.apps.check.engine_check import EngineCheck
from tp_engine.apps.check.report import CheckFinding, CheckReport, CheckStatus
from tp_engine.errors import ConfigError

# What each option is switched to, in this order; one that has that value already is left out.
SWITCHES: Mapping[str, Any] = {
    "speculative_config": None,
    "enable_prefix_caching": False,
    "kv_offloading_size": 0.0,
    "enforce_eager": True,
    "async_scheduling": False,
    "attention_backend": "torch",
    "kv_cache_dtype": "auto",
    "quantization": None,
    "enable_expert_parallel": False,
    "tensor_parallel_size": 1,
    "dtype": "float32",
}
# Options that make no sense without the switched one.
_WITH_IT: Mapping[str, Mapping[str, Any]] = {
    "enable_prefix_caching": {"kv_offloading_size": 0.0, "kv_disk_path": None, "kv_disk_size": 0.0},
    "kv_offloading_size": {"kv_disk_path": None, "kv_disk_size": 0.0, "kv_offloading_codec": "none"},
    "tensor_parallel_size": {"device_ids": None, "enable_expert_parallel": False},
}


def bisect(
    check: EngineCheck, report: CheckReport, configuration: Mapping[str, Any], note: Callable[[str], None]
) -> Iterator[CheckFinding]:
    """Yield a finding for each option: does what was wrong in ``report`` become right without it?

    ``configuration`` is the effective one.  All is checked again.
    """
    wrong = {one.name for one in report.findings if one.status is CheckStatus.WRONG}
    for option, value in SWITCHES.items():
        now = configuration.get(option)
        if now == value or not wrong or (option == "kv_cache_dtype" and now == configuration["dtype"]):
            continue
        flag = _flag(option, value)
        note(f"without {option}")
        try:
            options = {**check.options, **_WITH_IT.get(option, {}), option: value}
            again, _ = replace(check, options=options).run()
        except ConfigError as error:
            yield CheckFinding.skipped(f"bisect {option}", f"{flag}: {error}")
            continue
        yield _judged(option, flag, wrong, again)


def _flag(option: str, value: Any) -> str:
    """The switch as the command line has it."""
    name = option.replace("_", "-")
    if value is None:
        return f"no --{name}"
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


def _judged(option: str, flag: str, wrong: set[str], again: CheckReport) -> CheckFinding:
    still = {one.name for one in again.findings if one.status is CheckStatus.WRONG}
    mended = sorted(wrong - still)
    name = f"bisect {option}"
    if not mended:
        return CheckFinding.skipped(name, f"{flag} changes nothing")
    return CheckFinding.skipped(
        name,
        f"with {flag} these are right, or do not occur: {', '.join(mended)}",
        remedy=flag,
    )
