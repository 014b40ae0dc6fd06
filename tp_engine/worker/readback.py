"""Sampled ids on their way back to the host, without waiting for anything that was launched after them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch

from tp_engine.plan import NO_IDS, IntArray


class Readback:
    """Copies of at most ``max_num_ids`` ids each, of which ``num_in_flight`` may be on their way at once.

    On CUDA a copy goes to pinned memory behind the kernels that it needs, and an event tells when it is there; a plain
    ``.cpu()`` would wait for the next step too, which has been launched by then.
    """

    def __init__(self, max_num_ids: int, device: torch.device, *, num_in_flight: int = 3) -> None:
        self._is_cuda = device.type == "cuda"
        self._buffers = cycle(
            [torch.empty(max_num_ids, dtype=torch.int32, pin_memory=True) for _ in range(num_in_flight)]
            if self._is_cuda
            else [None]
        )
        self._seen: tuple[torch.Tensor | None, IntArray] = (None, NO_IDS)

    def start(self, token_ids: torch.Tensor) -> Callable[[], IntArray]:
        """Begin to copy ``token_ids`` (n,) int32; the returned function waits for them, and only for them.

        Its array is the caller's to read until ``num_in_flight`` further copies have begun.
        """
        buffer = next(self._buffers)
        if buffer is None:
            return self._view(token_ids)
        target = buffer[: len(token_ids)]
        target.copy_(token_ids, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def wait() -> IntArray:
            arrived.synchronize()
            found: IntArray = target.numpy()
            return found

        return wait

    def _view(self, token_ids: torch.Tensor) -> Callable[[], IntArray]:
        """The tensor's own memory; recorded steps leave their ids in the same tensor each time."""
        if token_ids is not self._seen[0]:
            self._seen = token_ids, token_ids.numpy()
        ids = self._seen[1]
        return lambda: ids
