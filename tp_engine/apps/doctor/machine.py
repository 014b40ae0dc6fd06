"""``tp-engine doctor`` on this machine: GPUs, host, kernels, and what the engine would choose here."""

import ctypes.util
import itertools
import os
import platform
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tp_engine.apps.doctor.findings import Finding, Speed, Status
from tp_engine.attention.registry import obstacles
from tp_engine.config import EngineConfig
from tp_engine.cpu import native_library
from tp_engine.distributed.first_collective import nccl_version
from tp_engine.distributed.symmetric_memory import has_native_atomics
from tp_engine.errors import ConfigError
from tp_engine.ipc.segment import SHM_FOLDER, needed_bytes, shm_option
from tp_engine.kernels.quantization.int8_products import takes_int8_products
from tp_engine.kernels.quantization.weights import Codes, QuantisedWeight, values_per_byte
from tp_engine.layers.quantization.quantised_products import choose_quantised_product
from tp_engine.system import env
from tp_engine.system.cpus import cpu_quota, threads_of_rank
from tp_engine.system.units import GIB, MIB, format_gib
from tp_engine.worker.effective_config import EffectiveConfig, resolve
from tp_engine.worker.gpu_host import driver_version, why_no_gpus, why_unseen
from tp_engine.worker.memory.host_memory import host_memory
from tp_engine.worker.tuning.shapes import wanted_shapes
from tp_engine.worker.tuning.start import known_table, pinned_table

LEAST_FILES = 4096
_MALLOCS = ("tcmalloc", "jemalloc", "mimalloc")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "neon", "sve", "bf16")
_MAX_LISTED = 8
# Name: kind of codes, and whether activations are quantised, too.
_WEIGHT_FORMATS: dict[str, tuple[Codes, bool]] = {
    "int4": ("int4", False),
    "int8": ("int8", False),
    "int8 of w8a8": ("int8", True),
    "fp8": ("e4m3", True),
    "fp4": ("e2m1", False),
}


def has_gpu() -> bool:
    """Whether the engine would run on GPUs."""
    return torch.cuda.device_count() > 0 and why_no_gpus() is None


def check_machine(model: str, num_ranks: int) -> Iterator[Finding]:
    """Yield what this machine has for ``num_ranks`` ranks, and what would be chosen for the model."""
    device = "cuda" if has_gpu() else "cpu"
    yield from check_devices()
    yield from check_host(on_cpu=device == "cpu", num_ranks=num_ranks)
    if device == "cpu":
        yield check_kernels()
    yield check_quantised_products(device)
    yield from check_choice(EngineConfig(model=model, tensor_parallel_size=num_ranks, device=device))


def check_devices() -> Iterator[Finding]:
    """Yield the GPUs and their links."""
    count = torch.cuda.device_count()
    obstacle, unseen = why_no_gpus(), why_unseen()
    if obstacle is not None or unseen is not None:
        status = Status.NOTE if obstacle is None else Status.MISSING
        yield Finding("GPUs", status, str(obstacle or unseen))
        return
    if count == 0:
        built = f"torch {torch.__version__} for CUDA {torch.version.cuda}" if torch.version.cuda else "torch for CPUs"
        yield Finding("GPUs", Status.OK, f"none ({built}); models run on the processor", speed=Speed.SLOW)
        return
    for index in range(min(count, _MAX_LISTED)):
        properties = torch.cuda.get_device_properties(index)
        capability = f"compute capability {properties.major}.{properties.minor}"
        detail = f"{properties.name}, {format_gib(properties.total_memory)}, {capability}"
        yield Finding(f"GPU {index}", Status.OK, detail, speed=Speed.FAST)
    detail = f"{torch.version.cuda}, NCCL {nccl_version()}, driver {driver_version()}"
    yield Finding("CUDA", Status.OK, detail)
    if count > 1:
        yield _between("peer access", torch.cuda.can_device_access_peer, "reads every other's memory", count)
        yield _between("peer atomics", has_native_atomics, "changes every other's memory in one operation", count)


def _between(topic: str, can: Callable[[int, int], bool], good: str, count: int) -> Finding:
    """Whether each of ``count`` GPUs ``can`` do to each other one what symmetric memory needs."""
    apart = [f"{one}-{other}" for one, other in itertools.permutations(range(count), 2) if not can(one, other)]
    if not apart:
        return Finding(topic, Status.OK, f"every GPU {good}", speed=Speed.FAST)
    shown = ", ".join(apart[:_MAX_LISTED]) + (" and others" if len(apart) > _MAX_LISTED else "")
    detail = f"none between {shown}: symmetric memory is not used, and NCCL adds up"
    return Finding(topic, Status.NOTE, detail, speed=Speed.SLOW)


def check_kernels() -> Finding:
    """Whether there are compiled kernels of CPUs; they are built now unless they exist."""
    if native_library() is not None:
        told = "compiled, and equal to PyTorch's on small inputs"
        return Finding("native kernels", Status.OK, told, speed=Speed.FAST)
    detail = "there are none (the log line above says why); PyTorch computes, several times slower"
    remedy = "install gcc, and let TP_ENGINE_CACHE_DIR be a folder that can be written to"
    return Finding("native kernels", Status.NOTE, detail, remedy, Speed.SLOW)


def check_quantised_products(device: str) -> Finding:
    """Which products would be used for each format of quantised weights."""
    made_by: dict[str, list[str]] = {}
    for name, (kind, quantises) in _WEIGHT_FORMATS.items():
        codes = torch.zeros(64, 128 // values_per_byte(kind), dtype=torch.uint8, device=device)
        weight = QuantisedWeight(
            kind=kind, codes=codes, scales=torch.ones(64, 1, device=device, dtype=torch.float32), group=128
        )
        product = choose_quantised_product(
            weight, dtype=torch.bfloat16, activation=None, quantises_activations=quantises
        )
        maker = getattr(product, "made_by", type(product).__name__)
        if quantises and kind == "int8" and takes_int8_products(device):
            maker = "C, oneDNN above 4 rows"
        made_by.setdefault(maker, []).append(name)
    detail = "; ".join(f"{', '.join(names)}: {maker}" for maker, names in made_by.items())
    speed = Speed.SLOW if any("PyTorch" in maker for maker in made_by) else Speed.FAST
    return Finding("quantised weights", Status.OK, detail, speed=speed)


def check_choice(config: EngineConfig) -> Iterator[Finding]:
    """Yield what ``auto`` chooses for one model on this machine, and why."""
    try:
        effective = resolve(config)
    except ConfigError as error:
        yield Finding("model", Status.MISSING, str(error))
        return
    yield Finding("model", Status.OK, f"{effective.model.architecture} at {effective.model_path}")
    for name, obstacle in obstacles(effective.attention_needs).items():
        usable = "usable" if name == effective.config.attention_backend else "usable where attention_backend names it"
        yield Finding(f"attention {name}", Status.NOTE if obstacle else Status.OK, obstacle or usable)
    yield _attention(effective)
    yield check_choices(effective)
    chosen, own = effective.config, effective.model.quantization
    plain = {name: getattr(chosen, name) for name in ("device", "dtype", "kv_cache_dtype", "attention_backend")}
    plain |= {"weights": chosen.dtype if own is None else own.method, "block_size": chosen.block_size}
    plain |= {name: getattr(effective, name) for name in ("gpu_memory_utilization", "max_model_len")}
    yield Finding("would be chosen", Status.OK, ", ".join(f"{name} {value}" for name, value in plain.items()))


def _attention(effective: EffectiveConfig) -> Finding:
    """The backend that would be chosen, and why faster ones are not, where that can be changed."""
    chosen, is_gpu = effective.config.attention_backend, effective.config.device == "cuda"
    if chosen != "torch":
        return Finding("attention", Status.OK, f"{chosen} is chosen", speed=Speed.FAST)
    found = obstacles(effective.attention_needs)
    wanted = "triton" if is_gpu else "native"
    return Finding("attention", Status.OK, f"plain PyTorch; {wanted}: {found[wanted]}", speed=Speed.SLOW)


def check_choices(effective: EffectiveConfig) -> Finding:
    """The choices of kernels that a start would find on this device, without trying any."""
    topic, config = "kernel choices", effective.config
    if config.tune == "off" and config.tuned is None:
        told = "own: the code's own kernels; --tune quick would try others"
        return Finding(topic, Status.OK, told, speed=Speed.FAST)
    device = torch.device("cuda", effective.device_map.indices[0]) if config.device == "cuda" else torch.device("cpu")
    if config.tuned is not None:
        table, num_open = pinned_table(config.tuned, device), 0
    else:
        table, num_open = known_table(device, wanted_shapes(effective, device.type))
    told = f"{table.choices().digest}: of {len(table.shapes) + num_open} products {num_open} are not tried yet"
    if not num_open:
        return Finding(topic, Status.OK, told, speed=Speed.FAST)
    return Finding(topic, Status.NOTE, told, "tp-engine tune MODEL, or leave it to the next starts, 20 s at most each")


def check_host(*, on_cpu: bool, num_ranks: int) -> Iterator[Finding]:
    """Memory, limits, folders, the kernel, for ``num_ranks``; ``on_cpu``: they would run on this host's processor."""
    yield processor(num_ranks)
    memory = host_memory()
    yield Finding("memory", Status.OK, f"{format_gib(memory.total)}, {format_gib(memory.free)} free")
    yield shared_memory(SHM_FOLDER, num_ranks, on_cpu=on_cpu)
    yield open_files()
    yield process_handles()
    yield writable("cache folder", env.cache_dir(), "set TP_ENGINE_CACHE_DIR to a folder that can be written to")
    yield writable("temporary folder", Path(tempfile.gettempdir()), "set TMPDIR to a folder that can be written to")
    yield allocator(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"), on_cpu=on_cpu)
    if on_cpu:
        yield huge_pages(_HUGE_PAGES)


def processor(num_ranks: int, root: Path = Path("/")) -> Finding:
    """What computes: cores by affinity, the container's quota, and the threads that each of ``num_ranks`` ranks
    would have.  ``root`` is where /proc and /sys are mounted."""
    text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    features = [name for name in _CPU_FLAGS if name in flags]
    name = fields.get("model name") or platform.machine()
    quota, threads = cpu_quota(root), threads_of_rank(torch.get_num_threads(), num_ranks, root)
    cores = f"{len(os.sched_getaffinity(0))} cores" + ("" if quota is None else f" of which a quota allows {quota:g}")
    share = f"{threads} thread{'' if threads == 1 else 's'} for each rank"
    detail = f"{name}, {cores}, {share}, {' '.join(features) or 'no vector units'}"
    is_slow = not features or (quota is not None and quota < num_ranks)
    return Finding("processor", Status.OK, detail, speed=Speed.SLOW if is_slow else Speed.FAST)


def shared_memory(folder: Path, num_ranks: int, *, on_cpu: bool) -> Finding:
    """Room for what ``num_ranks`` ranks share: plans, tensors of CPUs, and NCCL's buffers."""
    least = needed_bytes(num_ranks, has_gpus=not on_cpu)
    try:
        status = os.statvfs(folder)
    except OSError as error:
        remedy = f"mount a tmpfs of at least {least // MIB} MiB at {folder}"
        return Finding("shared memory", Status.MISSING, f"{folder}: {error.strerror}", remedy)
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    detail = f"{folder}: {size / GIB:.2f} GiB, {free / GIB:.2f} GiB free"
    if free >= least:
        return Finding("shared memory", Status.OK, detail)
    remedy = f"{num_ranks} ranks may need {least // MIB} MiB: docker run {shm_option(num_ranks)}, or free some"
    return Finding("shared memory", Status.MISSING, detail, remedy=remedy)


def open_files() -> Finding:
    """Whether the limit on open files leaves enough sockets: every stream needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= LEAST_FILES:
        return Finding("open files", Status.OK, f"limit {soft} (hard {hard})")
    remedy = f"ulimit -n {LEAST_FILES if hard == resource.RLIM_INFINITY else min(hard, 65536)}"
    return Finding("open files", Status.NOTE, f"limit {soft}: a server holds one per connection", remedy)


def process_handles() -> Finding:
    """Watchdogs wait for processes through pidfds (Linux 5.3)."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:
        remedy = "use Linux 5.3 or newer; in a container, allow the system call pidfd_open"
        return Finding("kernel", Status.MISSING, f"{kernel} has no pidfd_open ({error})", remedy)
    return Finding("kernel", Status.OK, kernel)


def writable(topic: str, folder: Path, remedy: str) -> Finding:
    """Whether files can be made in a folder, or in its nearest parent that exists."""
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    if os.access(place, os.W_OK | os.X_OK):
        return Finding(topic, Status.OK, str(folder))
    return Finding(topic, Status.NOTE, f"{folder} cannot be written to", remedy=remedy)


def allocator(libraries: str, *, on_cpu: bool) -> Finding:
    """Which malloc this process has; glibc's may return memory and fetch it again in every step of a CPU
    model."""
    loaded = [name for name in _MALLOCS if name in libraries]
    if loaded or not on_cpu:
        detail = f"{loaded[0]} is loaded" if loaded else "glibc (it hardly matters where a GPU computes)"
        return Finding("malloc", Status.OK, detail)
    found = [file for name in ("tcmalloc_minimal", "jemalloc") if (file := ctypes.util.find_library(name))]
    remedy = f"LD_PRELOAD={found[0]} tp-engine ..." if found else "install libtcmalloc-minimal4 and LD_PRELOAD it"
    told = "glibc; on CPUs tcmalloc may be faster"
    return Finding("malloc", Status.NOTE, told, remedy, Speed.SLOW)


def huge_pages(setting: Path) -> Finding:
    """Whether a process that asks gets pages of 2 MiB; ``setting`` holds a line such as "always [madvise]
    never"."""
    try:
        words = setting.read_text(encoding="utf-8").split()
    except OSError:
        words = []
    chosen = next((word.strip("[]") for word in words if word.startswith("[")), "missing")
    if chosen in ("always", "madvise"):
        return Finding("huge pages", Status.OK, chosen, speed=Speed.FAST)
    detail = f"{chosen}: weights and KV cache are read more slowly"
    return Finding("huge pages", Status.NOTE, detail, f"echo madvise > {setting}", Speed.SLOW)
