"""How images are encoded, as the scheduler must know it, once this rank has loaded the tower."""

from __future__ import annotations

from tp_engine.config import EngineConfig
from tp_engine.cpu import kernel_level
from tp_engine.engine.feature import EngineFeature
from tp_engine.features.images.feature import ImageLimits
from tp_engine.ipc.job_board import JobBoard
from tp_engine.models.language_model import LanguageModel
from tp_engine.models.weight_sizes import layer_parameters
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.worker import StartedRank

# float32 on an EPYC of 2 cores: 156 GFLOP/s by PyTorch in a tower of 1,024 columns, 400 by the compiled kernels.
_TOWER_BY_PYTORCH = 2.5


def open_tower(config: EngineConfig) -> TowerOfEngine:
    """Make the engine's half."""
    return TowerOfEngine()


class TowerOfEngine(EngineFeature):
    """What the engine knows of the model's tower, if it has one."""

    def __init__(self) -> None:
        self._limits: ImageLimits | None = None

    def start(self, rank: StartedRank, board: JobBoard) -> None:
        effective = rank.effective
        vision = effective.model.vision
        if vision is None:
            return
        num_layers, row_work, pair_work = tower_work(effective, rank.runner.model)
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


def tower_work(effective: EffectiveConfig, model: LanguageModel) -> tuple[int, float, float]:
    """Return the number of the tower's layers, and what one of them takes for each row of an image and for each pair
    of rows, in tokens of a prompt."""
    assert model.vision is not None, "only a model that sees has a tower"
    of_token = layer_parameters(effective.model, effective.config.tensor_parallel_size)
    of_row, of_pair = (share * _share_of_rate(effective.config.device) for share in model.vision.layer_work())
    return len(model.vision.stack), of_row / of_token, of_pair / of_token


def _share_of_rate(device_type: str) -> float:
    """How many times longer the tower takes for a multiplication than the layers of text do."""
    return _TOWER_BY_PYTORCH if device_type == "cpu" and kernel_level() is not None else 1.0
