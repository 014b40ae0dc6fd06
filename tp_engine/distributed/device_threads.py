"""Threads of a rank that touch its device: the rank's GPU is current in each of them.

In a new thread GPU 0 is current, whatever the main thread has chosen, and many CUDA calls create a context on the
current GPU: with 8 ranks, half a GiB of GPU 0 for each of the 7 others.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch


def use_device(device: torch.device) -> None:
    """Make ``device`` current in the calling thread; does nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def device_thread(device: torch.device, body: Callable[[], None], *, name: str) -> threading.Thread:
    """A daemon thread, not started yet, that runs ``body`` with ``device``."""

    def run() -> None:
        use_device(device)
        body()

    return threading.Thread(target=run, name=name, daemon=True)


def device_pool(device: torch.device, num_threads: int, *, name: str) -> ThreadPoolExecutor:
    """A pool whose threads work with ``device``."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix=name, initializer=use_device, initargs=(device,))
