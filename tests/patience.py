"""Time limits of promises ("within 10 s") on shared machines."""

import os


def on_this_machine(limit_s: float) -> float:
    """``limit_s``, times the number of runnable processes per core if that is above 1."""
    return limit_s * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
