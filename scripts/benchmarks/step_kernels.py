"""The time of each function within a step on a CPU."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile, record_function

from tp_engine.cpu.kernels.tape import naming_calls


def kernel_times(step: Callable[[], object], num_steps: int, period_us: float) -> dict[str, float]:
    """Own microseconds per step of this process's compiled kernels and PyTorch operations, longest first.

    ``period_us`` is a step's time without a profiler.  ``other`` sums functions below a hundredth of it, and the rest
    of the step: Python, dispatch, the calls themselves.
    """
    with profile(activities=[ProfilerActivity.CPU]) as found, naming_calls(record_function):
        for _ in range(num_steps):
            step()
    times = {event.key: event.self_cpu_time_total / num_steps for event in found.key_averages()}
    longest = sorted(((us, name) for name, us in times.items() if us >= period_us / 100), reverse=True)
    other = max(0.0, period_us - sum(us for us, _ in longest))
    return {name: round(us, 1) for us, name in longest} | {"other": round(other, 1)}
