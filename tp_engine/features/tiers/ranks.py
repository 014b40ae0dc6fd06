"""A rank's half of the tiers: its slots, the codec that fills them, and a disk below."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tp_engine.attention.registry import simd_width
from tp_engine.features.tiers.block_moves import staging_bytes
from tp_engine.features.tiers.codecs import make_codec
from tp_engine.features.tiers.codecs.base import Codec
from tp_engine.features.tiers.disk_start import DiskStart, open_disk_tier
from tp_engine.features.tiers.options import may_refuse
from tp_engine.features.tiers.rank_host import HostTierWorker, settle_host_slots
from tp_engine.worker.features import RankFeature, RankParts, RunnerParts
from tp_engine.worker.model_runner import ModelRunner


def make(parts: RankParts) -> Iterator[TiersOfRank]:
    """Make a rank's half if there are tiers."""
    config = parts.effective.config
    if config.kv_offloading_size:
        width = simd_width(parts.backends[0], config.block_size)
        yield TiersOfRank(parts, make_codec(config.kv_offloading_codec, parts.effective.kv_shape, width))


class TiersOfRank(RankFeature):
    """``num_slots`` blocks fit into the host tier, the same number on every rank; ``disk`` is below it, if there is
    one."""

    def __init__(self, parts: RankParts, codec: Codec) -> None:
        self._codec, self._device_type = codec, parts.device.type
        self._stores = parts.channels["stores"] if may_refuse(parts.effective.config.kv_offloading_codec) else None
        self.num_slots = 0
        self.disk: DiskStart | None = None

    def reserved(self) -> Counter[str]:
        staging = staging_bytes(self._codec) if self._device_type == "cuda" else 0
        return Counter(tables=self._codec.work_bytes + staging)

    @property
    def host_bytes(self) -> int:
        return self.num_slots * self._codec.blob_bytes

    def settle(self, parts: RankParts, num_blocks: int) -> None:
        block_bytes = parts.effective.kv_shape.block_bytes
        promised_bytes = num_blocks * block_bytes if self._device_type == "cpu" else 0
        self.num_slots = settle_host_slots(
            parts.effective.config, self._codec, parts.groups, parts.effective.kv_capacity, block_bytes, promised_bytes
        )

    def runner(self, parts: RunnerParts) -> Iterator[HostTierWorker]:
        if self.num_slots and not parts.is_trial:
            yield HostTierWorker(parts.pool, self.num_slots, self._codec, self._stores, parts.progress)

    def open(self, parts: RankParts, runner: ModelRunner) -> None:
        if parts.effective.config.kv_disk_path is not None:
            self.disk = open_disk_tier(parts, self._codec, runner.required(HostTierWorker))

    def close(self) -> None:
        if self.disk is not None:
            self.disk.close()
