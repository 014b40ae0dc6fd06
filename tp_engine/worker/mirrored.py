"""A per-row table that lives on the device and has a twin on the host.

On a CPU the two share their memory and pushing costs nothing; on CUDA only the named entries travel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.layers.upload import upload
from tp_engine.plan import IntArray


class MirroredTable:
    """An int32 table of ``shape``: ``host`` (numpy) is written first, then pushed to ``device``.

    ``is_shared``: both are the same memory.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        on_host = torch.zeros(shape, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.host: IntArray = on_host.numpy()
        self.device = on_host if device.type == "cpu" else torch.zeros(shape, dtype=torch.int32, device=device)
        self.is_shared = device.type == "cpu"

    def push(self, *index: npt.NDArray[np.integer]) -> None:
        """Send ``host[..., *index]`` to the device, without a synchronisation."""
        if self.is_shared:
            return
        on_host: tuple[Any, ...] = (..., *index)
        on_device: tuple[Any, ...] = (..., *(upload(axis.astype(np.int64), self.device.device) for axis in index))
        self.device[on_device] = upload(self.host[on_host], self.device.device)
