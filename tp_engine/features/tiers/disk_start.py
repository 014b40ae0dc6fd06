"""How the ranks open their disk tier together, and agree on what it has.

::

    rank 0        makes and locks the directory
    all ranks     fingerprint, number of slots (the smallest counts), files with room reserved
    all ranks     tell each other: store, serials of the slots that may be trusted
                  one store everywhere   -> what all ranks have under one serial is kept
                  anything else          -> all begin empty, under a new store, and say why

Serials of writes go on after the largest that any rank has, which all ranks know.
"""

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from tp_engine.features.tiers.codecs.base import Codec
from tp_engine.features.tiers.disk_files import Identity, SlotFiles, choose_disk_slots, lock_directory
from tp_engine.features.tiers.rank_disk import DiskTierWorker
from tp_engine.features.tiers.rank_host import HostTierWorker
from tp_engine.job.topology import RankInfo
from tp_engine.system.log import get_logger
from tp_engine.system.units import format_gib
from tp_engine.system.version import __version__
from tp_engine.weights.fingerprint import weights_fingerprint
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.features import RankParts
from tp_engine.worker.memory.kv_cache import KvCacheShape
from tp_engine.worker.memory.meter import settle_slots

logger = get_logger(__name__)

_FORMAT = 1  # of the fingerprint


class _RankStore(msgspec.Struct, array_like=True):
    """What a rank tells the others: store ("" for none), why there is none, serials (int64), a new store."""

    store: str
    difference: str
    serials: bytes
    proposal: str


@dataclass(frozen=True, slots=True)
class DiskStart:
    """A rank's tier, and what the scheduler must know of it: ``serials`` are those of each rank, by slot."""

    tier: DiskTierWorker
    path: Path
    num_slots: int
    store: bytes
    serials: tuple[npt.NDArray[np.int64], ...]
    first_serial: int
    lock: int | None

    def close(self) -> None:
        """End the threads, and let others use the directory."""
        self.tier.close()
        if self.lock is not None:
            os.close(self.lock)


def open_disk_tier(parts: RankParts, codec: Codec, tier: HostTierWorker) -> DiskStart:
    """Open this rank's files, agree on what is kept, and put a disk tier below ``tier``.  A collective.

    Raises ``ConfigError`` or ``MemoryBudgetError`` on a rank that cannot, ``RankError`` on the others.
    """
    config, groups, slot_bytes = parts.effective.config, parts.groups, tier.slots.shape[1]
    info, start_up = groups.info, parts.start_up
    assert config.kv_disk_path is not None, "there is no disk tier"
    path = Path(config.kv_disk_path)

    def open_files() -> SlotFiles:
        names = [backend.name for backend in parts.backends]
        identity = make_identity(parts.effective, info, parts.effective.kv_shape, names, codec=codec)
        return SlotFiles(path, info.rank, num_slots, slot_bytes, identity)

    with contextlib.ExitStack() as undo:
        lock = start_up.run_agreed_phase(
            "locking the disk tier", lambda: lock_directory(path) if info.is_first else None
        )
        if lock is not None:
            undo.callback(os.close, lock)
        num_slots = settle_slots(
            lambda: choose_disk_slots(
                path,
                config.kv_disk_size,
                slot_bytes,
                rank=info.rank,
                world_size=info.world_size,
                local_world_size=info.local_world_size,
            ),
            groups.host,
            of="disk tier",
        )
        files = start_up.run_agreed_phase(
            "opening the disk tier", lambda: undo.enter_context(contextlib.closing(open_files()))
        )
        own = _RankStore(files.store, files.difference, files.serials.tobytes(), secrets.token_hex(16))
        gathered = groups.host.all_gather_bytes(msgspec.msgpack.encode(own))
        reports = [msgspec.msgpack.decode(one, type=_RankStore) for one in gathered]
        stores = {report.store for report in reports}
        keeps = len(stores) == 1 and "" not in stores
        store = reports[0].store if keeps else reports[0].proposal
        files.begin(store, keeps=keeps)
        if info.is_first:
            size = format_gib(num_slots * slot_bytes)
            logger.info("Disk KV cache: %s a rank, %d slots, in %s", size, num_slots, path)
            _log_loss(reports, keeps=keeps)
        serials = tuple(np.frombuffer(report.serials, np.int64) for report in reports)
        first_serial = 1 + max(int(one.max()) for one in serials)
        undo.pop_all()
        disk = tier.disk = DiskTierWorker(
            tier.slots.numpy(), files, parts.channels, first_serial=first_serial, device=parts.device
        )
        return DiskStart(
            tier=disk,
            path=path,
            num_slots=num_slots,
            store=bytes.fromhex(store),
            serials=serials if keeps else (),
            first_serial=first_serial,
            lock=lock,
        )


def _log_loss(reports: list[_RankStore], *, keeps: bool) -> None:
    """Say why what is there cannot be used."""
    if keeps:
        return
    reasons = [f"rank {rank}: {report.difference}" for rank, report in enumerate(reports) if report.difference]
    if reasons:
        logger.warning(
            "the disk tier begins empty, because what it has does not fit this engine: %s", "; ".join(reasons)
        )
    elif any(report.store for report in reports):
        logger.warning("the disk tier begins empty, because the files of its ranks do not belong together")


def make_identity(
    effective: EffectiveConfig, info: RankInfo, shape: KvCacheShape, backends: Sequence[str], *, codec: Codec
) -> Identity:
    """Return the identity of this rank's blocks, which ``codec`` writes into slots; ``backends`` are those of the
    groups.  Blocks of another process are used only if all of it is equal::

        weights    the names, types and shapes of all tensors, and a page of each (weights/fingerprint.py)
        model      the ModelSpec as read: layers, rope, norms, overrides; max_model_len, which chooses rope scales
        types      of weights, of the cache, the quantization and the codec of the tiers
        layout     block size, groups of layers, this rank's heads, and what the codec makes of a block, in which order
        ranks      this rank's number and that of all, and whether experts stay whole
        kernel     attention backends, choices of kernels
        format     of this fingerprint, and the version of the program

    Weights count by content, not by the model's name.  Reading all of them would take as long as loading them, so pages
    are sampled: a tensor that was trained on differs in nearly every page.
    """
    config = effective.config
    parts = {
        "weights": _weights(effective.model_path, config.load_format, config.seed),
        "model": _digest(repr(effective.model), str(effective.max_model_len)),
        "types": _digest(config.dtype, config.kv_cache_dtype, str(config.quantization), config.kv_offloading_codec),
        "layout": _digest(
            str(config.block_size), repr(effective.model.kv_layout), repr(shape), codec.fingerprint().hex()
        ),
        "ranks": f"{info.rank} of {info.world_size}, experts whole: {config.enable_expert_parallel}",
        "kernel": _digest(config.device, *backends, effective.choices.digest),
        "format": f"{_FORMAT} of {__version__}",
    }
    whole = xxhash.xxh3_128_digest("\n".join(f"{name}={value}" for name, value in sorted(parts.items())).encode())
    return Identity(whole, parts)


def _digest(*texts: str) -> str:
    return xxhash.xxh3_128_hexdigest("\0".join(texts).encode())


def _weights(path: Path, load_format: str, seed: int) -> str:
    """A fingerprint of the checkpoint's tensors, by content; dummy weights follow from their seed."""
    return f"dummy {seed}" if load_format == "dummy" else weights_fingerprint(path)
