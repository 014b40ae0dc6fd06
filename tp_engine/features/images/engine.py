"""How images are encoded, as the scheduler must know it, once this rank has loaded the tower."""

from __future__ import annotations

from tp_engine.config import EngineConfig
from tp_engine.engine.feature import EngineFeature
from tp_engine.features.images.feature import ImageLimits
from tp_engine.ipc.job_board import JobBoard
from tp_engine.worker.worker import Worker


def open_tower(config: EngineConfig) -> TowerOfEngine:
    """Make the engine's half."""
    return TowerOfEngine()


class TowerOfEngine(EngineFeature):
    """What the engine knows of the model's tower, if it has one."""

    def __init__(self) -> None:
        self._limits: ImageLimits | None = None

    def start(self, worker: Worker, board: JobBoard) -> None:
        effective = worker.effective
        vision = effective.model.vision
        if vision is None:
            return
        num_layers, row_work, pair_work = worker.tower_work()
        self._limits = ImageLimits(
            num_rows=effective.image_rows,
            token_id=vision.image_token_id,
            num_ranks=effective.config.tensor_parallel_size,
            num_layers=num_layers,
            row_work=row_work,
            pair_work=pair_work,
            is_bidirectional=vision.is_bidirectional,
            num_ahead=0 if effective.model.mtp is None else 1,
        )

    def limits(self) -> ImageLimits | None:
        return self._limits

    def close(self) -> None:
        pass
