"""Limits of promises ("within 10 s") on machines that others use too."""

import os


def on_this_machine(limit_s: float) -> float:
    """Return ``limit_s``, as many times longer as more processes want a core than there are cores."""
    return limit_s * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
