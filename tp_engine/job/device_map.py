"""The GPU of each rank on this host: the option ``devices``, one number per rank.

Ranks may share a GPU, to test several ranks on fewer GPUs; they then divide its memory::

    devices       rank 0   rank 1   rank 2   rank 3      a rank's share of its GPU
    not given     GPU 0    GPU 1    GPU 2    GPU 3       all of it
    0,0,0,0       GPU 0    GPU 0    GPU 0    GPU 0       a quarter
    2,3           GPU 2    GPU 3                         all of it
    own           GPU 0    GPU 0    GPU 0    GPU 0       all of it: each rank's launcher shows it another GPU as GPU 0

``own`` is for launchers that show each rank one GPU (Slurm's ``--gpus-per-task=1``, a container per rank); under
torchrun and its kind it is taken where one GPU is visible to each of several ranks.
"""

from dataclasses import dataclass

from tp_engine.errors import ConfigError

OWN = "own"


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """``indices[local_rank]`` is the GPU of a rank, in CUDA's numbering of the GPUs that it sees; ``are_own``: each
    rank sees one, which no other rank sees."""

    indices: tuple[int, ...]
    are_own: bool = False

    @property
    def is_shared(self) -> bool:
        """Whether any GPU has more than one rank."""
        return not self.are_own and len(set(self.indices)) < len(self.indices)

    def num_sharing(self, local_rank: int) -> int:
        """Return the number of ranks on the GPU of ``local_rank``, including itself."""
        return 1 if self.are_own else self.indices.count(self.indices[local_rank])


def parse_devices(devices: str | None, world_size: int) -> DeviceMap:
    """Return the map for ``world_size`` ranks; None gives each rank its own GPU.  ``ConfigError`` for any other
    text."""
    if devices is None:
        return DeviceMap(tuple(range(world_size)))
    if devices == OWN:
        return DeviceMap((0,) * world_size, are_own=True)
    indices = check_devices(devices)
    if len(indices) != world_size:
        raise ConfigError(
            f"device_ids is {devices!r}, which names {len(indices)} GPUs for {world_size} ranks; name one for each "
            f"rank, the same one several times if they are to share it, or set tensor_parallel_size to {len(indices)}"
        )
    return DeviceMap(indices)


def check_devices(devices: str) -> tuple[int, ...]:
    """Return the numbers in ``devices``, none for ``own``; ``ConfigError`` for anything else."""
    if devices == OWN:
        return ()
    parts = [part.strip() for part in devices.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(
            f"device_ids is {devices!r}; it must be numbers of GPUs separated by commas, one for each rank, such as "
            f"0,1, or {OWN}, if each rank sees one GPU of its own"
        )
    return tuple(int(part) for part in parts)


def shares_devices(devices: str | None) -> bool:
    """Return whether ``devices`` gives a GPU to several ranks."""
    return devices is not None and DeviceMap(check_devices(devices)).is_shared


def map_devices(devices: str | None, world_size: int, num_found: int) -> DeviceMap:
    """Return the map on a host with ``num_found`` GPUs; ``ConfigError`` if a GPU of the map does not exist."""
    found = parse_devices(devices, world_size)
    if devices is None and world_size > num_found:
        raise ConfigError(
            f"tensor_parallel_size is {world_size} but this host has {num_found} CUDA devices; one rank needs one "
            f"device: lower tensor_parallel_size, use --device cpu, or, for a test, let ranks share GPUs with "
            f"--device-ids {','.join(str(rank % max(num_found, 1)) for rank in range(world_size))}"
        )
    if max(found.indices) >= num_found:
        raise ConfigError(
            f"device_ids is {devices!r}, but this host has {num_found} CUDA devices, numbered from 0; GPU "
            f"{max(found.indices)} is not one of them (CUDA_VISIBLE_DEVICES hides and renumbers them)"
        )
    return found
