"""Whether torch can use this host's GPUs, and if not why, asked before a rank touches one.

::

    torch is built for ROCm                          refused: the kernels and the ranks' exchange are CUDA's
    GPUs, but a driver older than torch's CUDA       refused, with both versions
    a GPU host on which torch sees no GPU            the CPU, with a warning; an error under torchrun
"""

import ctypes
import re
from pathlib import Path

import torch

from tp_engine.errors import ConfigError
from tp_engine.job.device_map import OWN
from tp_engine.system import env
from tp_engine.system.log import get_logger, warn_once

logger = get_logger(__name__)

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_DEVICE_FOLDER = Path("/dev")
_LEAST_DRIVERS = {11: "450", 12: "525", 13: "580"}  # NVIDIA's, for each major version of CUDA


def choose_device_type(asked: str) -> str:
    """``cuda`` or ``cpu`` for the option ``device``; ``ConfigError`` if the GPUs that it means cannot be used."""
    if asked == "cpu":
        return "cpu"
    obstacle = why_no_gpus()
    if obstacle is not None:
        raise ConfigError(f"{obstacle}, or use --device cpu")
    if asked == "cuda" or torch.cuda.device_count():
        return "cuda"
    unseen = why_unseen()
    if unseen is None:
        return "cpu"
    if env.launched_rank() is not None:
        raise ConfigError(f"{unseen}; or use --device cpu if the ranks are to run on the processor")
    warn_once(logger, "the model runs on the processor: %s", unseen)
    return "cpu"


def devices_of_ranks(asked: str | None, local_world_size: int) -> str | None:
    """Return the option ``device_ids`` of ``local_world_size`` ranks on this host's GPUs: ``own`` where the launcher of
    each of several ranks shows it one GPU, as Slurm's ``--gpus-per-task=1`` does; else what is ``asked``."""
    is_shown_one = torch.cuda.device_count() == 1 < local_world_size and env.launched_rank() is not None
    return OWN if asked is None and is_shown_one else asked


def why_no_gpus() -> str | None:
    """Return why the GPUs that torch counts cannot be used, with the remedy; None if they can, or if it counts
    none."""
    count = torch.cuda.device_count()
    if not count:
        return None
    if torch.version.hip is not None:
        return (
            f"torch {torch.__version__} is built for ROCm (HIP {torch.version.hip}), and tp_engine runs on NVIDIA GPUs "
            "and on CPUs: install a torch built for CUDA or for CPUs"
        )
    if torch.cuda.is_available():
        return None
    built, driver = torch.version.cuda or "none", driver_version()
    taken = cuda_of_driver()
    if taken is not None and taken[0] < int(built.partition(".")[0]):
        least = _LEAST_DRIVERS.get(int(built.partition(".")[0]), "a newer one")
        return (
            f"torch {torch.__version__} is built for CUDA {built}, and the NVIDIA driver {driver} of this host is too "
            f"old for it: it takes CUDA up to {taken[0]}.{taken[1]}. Update the driver (to {least} or newer), install "
            f"a torch built for CUDA {taken[0]}"
        )
    return (
        f"torch {torch.__version__} (CUDA {built}) counts {count} GPUs and can use none, with the NVIDIA driver "
        f"{driver}: {_first_error()}. Look at nvidia-smi and the kernel's log"
    )


def why_unseen() -> str | None:
    """Return why torch sees no GPU on a host that has NVIDIA GPUs, with the remedy; None on other hosts, and if
    ``CUDA_VISIBLE_DEVICES`` hides all of them on purpose."""
    visible = env.visible_devices()
    if torch.cuda.device_count() or visible in ("", "-1") or not is_gpu_host():
        return None
    what = f"this host has NVIDIA GPUs (driver {driver_version()}), but torch {torch.__version__} sees none"
    if torch.version.cuda is None:
        return f"{what}: it is built without CUDA; install a torch built for CUDA"
    built = f"(built for CUDA {torch.version.cuda})"
    if visible is not None:
        return f"{what} {built}: CUDA_VISIBLE_DEVICES is {visible!r}; name GPUs that exist, or unset it"
    return f"{what} {built}: a container must be started with its GPUs (docker run --gpus all); look at nvidia-smi"


def is_gpu_host() -> bool:
    """Return whether NVIDIA's kernel module is loaded, or has made a device."""
    return _DRIVER_FILE.exists() or any(_DEVICE_FOLDER.glob("nvidia[0-9]*"))


def driver_version() -> str:
    """Return the version of the NVIDIA driver, such as ``580.65.06``; ``of unknown version`` if the kernel does not
    say."""
    try:
        text = _DRIVER_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text)
    return found[0] if found else "of unknown version"


def cuda_of_driver() -> tuple[int, int] | None:
    """Return the newest CUDA that the driver takes, such as (12, 2); None without a driver.

    Torch does not say, so this asks the driver (CUDA Driver API, cuDriverGetVersion).
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return version.value // 1000, version.value % 1000 // 10


def _first_error() -> str:
    """What torch says when CUDA is to start, in one line."""
    try:
        torch.cuda.init()
    except Exception as error:
        return str(error).strip().splitlines()[0]
    return "CUDA starts, but is not available"
