"""Which rank uses which GPU."""

from __future__ import annotations

import pytest

from tests.fake_gpus import FakeGpus
from tp_engine.config import EngineConfig
from tp_engine.errors import ConfigError
from tp_engine.job.device_map import DeviceMap, map_devices, parse_devices
from tp_engine.worker.effective_config import resolve


@pytest.mark.parametrize(
    ("devices", "world_size", "indices", "is_shared", "sharing"),
    [
        (None, 1, (0,), False, [1]),
        (None, 3, (0, 1, 2), False, [1, 1, 1]),
        ("2", 1, (2,), False, [1]),
        ("3, 1", 2, (3, 1), False, [1, 1]),
        ("0,0,0,0", 4, (0, 0, 0, 0), True, [4, 4, 4, 4]),
        ("0,1,0", 3, (0, 1, 0), True, [2, 1, 2]),
        ("own", 3, (0, 0, 0), False, [1, 1, 1]),
    ],
)
def test_a_rank_has_its_gpu(
    devices: str | None, world_size: int, indices: tuple[int, ...], is_shared: bool, sharing: list[int]
) -> None:
    """Oracle: the lists, read by hand."""
    found = map_devices(devices, world_size, num_found=4)
    assert found == DeviceMap(indices, are_own=devices == "own") == parse_devices(devices, world_size)
    assert found.is_shared == is_shared
    assert [found.num_sharing(rank) for rank in range(world_size)] == sharing


@pytest.mark.parametrize(
    ("devices", "world_size", "message"),
    [
        (None, 3, "tensor_parallel_size is 3 but this host has 2 CUDA devices.*--device-ids 0,1,0"),
        ("0,1,0", 2, "names 3 GPUs for 2 ranks.*tensor_parallel_size to 3"),
        ("0", 2, "names 1 GPUs for 2 ranks"),
        ("0,2", 2, "has 2 CUDA devices, numbered from 0; GPU 2"),
        ("cuda:0,1", 2, "'cuda:0,1'; it must be numbers"),
        ("0,", 2, "must be numbers"),
        ("", 1, "must be numbers"),
        ("-1", 1, "must be numbers"),
    ],
)
def test_a_map_that_can_not_be_is_refused(devices: str | None, world_size: int, message: str) -> None:
    """Oracle: the error names the value and the remedy; this host has two GPUs."""
    with pytest.raises(ConfigError, match=message):
        map_devices(devices, world_size, num_found=2)


def test_the_configuration_refuses_what_is_no_list() -> None:
    """Oracle: an error before the world's size is known, which torchrun sets later."""
    assert EngineConfig(device_ids="0,0").device_ids == "0,0"
    with pytest.raises(ConfigError, match="device_ids is 'a'"):
        EngineConfig(device_ids="a")


@pytest.mark.parametrize(
    ("rank", "num_found", "asked", "expected"),
    [
        ("1", 1, None, DeviceMap((0, 0), are_own=True)),  # srun --gpus-per-task=1
        ("1", 2, None, DeviceMap((0, 1))),
        ("1", 1, "0,0", DeviceMap((0, 0))),  # two ranks share it
    ],
)
def test_a_launcher_may_show_each_rank_one_gpu(
    monkeypatch: pytest.MonkeyPatch, rank: str, num_found: int, asked: str | None, expected: DeviceMap
) -> None:
    """Oracle: the map by hand, for torchrun's variables; ranks that the engine starts itself see what it sees."""
    FakeGpus(num_found).install(monkeypatch)
    config = EngineConfig(device_ids=asked, tensor_parallel_size=2, device="cuda")
    if num_found == 1 and asked is None:
        with pytest.raises(ConfigError, match="one rank needs one device"):
            resolve(config)
    for name, value in {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert resolve(config).device_map == expected


def test_devices_need_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Oracle: the remedies in the errors, on a host without GPUs and on one with two."""
    gpus = FakeGpus(0).install(monkeypatch)
    for device in ("cpu", "auto"):
        with pytest.raises(ConfigError, match="device_ids is '0', which names GPUs, but the ranks run on the CPU"):
            resolve(EngineConfig(device_ids="0", device=device))
    gpus.count = 2
    effective = resolve(EngineConfig(device_ids="1,1,1,1", tensor_parallel_size=4))
    assert effective.config.device == "cuda" and effective.device_map == DeviceMap((1, 1, 1, 1))
    with pytest.raises(ConfigError, match="names 4 GPUs for 2 ranks"):
        resolve(EngineConfig(device_ids="1,1,1,1", tensor_parallel_size=2))
