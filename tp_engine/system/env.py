"""The one door to the process environment."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tp_engine.errors import ConfigError
from tp_engine.job.topology import RankInfo

_LAUNCH_VARIABLES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable of the environment; ``default`` is its value where it is not set, or empty."""

    name: str
    default: str = ""

    def read(self) -> str:
        """Return its value now."""
        return os.environ.get(self.name) or self.default


LOG_LEVEL = Variable("TP_ENGINE_LOG_LEVEL", "INFO")
API_KEY = Variable("TP_ENGINE_API_KEY")  # the server's key if --api-key is not given
ADMIN_API_KEY = Variable("TP_ENGINE_ADMIN_API_KEY")  # that of its operators if --admin-api-key is not given
REASONING_KEY = Variable("TP_ENGINE_REASONING_KEY")  # what seals reasoning if --reasoning-key is not given
KV_EVENTS_KEY = Variable("TP_ENGINE_KV_EVENTS_KEY")  # what subscribers of KV events must send
FAULT = Variable("TP_ENGINE_FAULT")  # what tests inject (faults.py)
OMP_NUM_THREADS = Variable("OMP_NUM_THREADS")  # threads of each rank
OMP_WAIT_POLICY = Variable("OMP_WAIT_POLICY")  # how OpenMP's threads wait, where the user has said it
GOMP_SPINCOUNT = Variable("GOMP_SPINCOUNT")  # how long they spin, likewise
NATIVE_KERNELS = Variable("TP_ENGINE_NATIVE", "1")  # compiled CPU kernels: 0 none, else for which level of processors
NOTIFY_SOCKET = Variable("NOTIFY_SOCKET")  # where systemd wants to hear of a service's state (Type=notify)
OTLP_PROTOCOL = Variable("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
OTEL_SERVICE_NAME = Variable("OTEL_SERVICE_NAME", "tp_engine")  # this server's name in its spans
RUN_ID = Variable("TORCHELASTIC_RUN_ID")  # the name of torchrun's job; random with --standalone
GITHUB_STEP_SUMMARY = Variable("GITHUB_STEP_SUMMARY")  # the file of Markdown that GitHub shows with a job
AGENT_STORE = Variable("TORCHELASTIC_USE_AGENT_STORE")  # "True": the agent serves the ranks' store, else rank 0 does


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank(RankInfo):
    """This process's place in a torchrun job, as torchrun's variables say; ``num_hosts`` 0 if they do not say it."""

    master_addr: str
    master_port: int
    num_hosts: int = 0


def launched_rank(environ: Mapping[str, str] | None = None) -> LaunchedRank | None:
    """Return this process's place in a torchrun job, or None for a process that torchrun did not start.
    ``ConfigError`` if the ranks cannot meet with these variables."""
    env = os.environ if environ is None else environ
    if "RANK" not in env or "WORLD_SIZE" not in env or "MASTER_ADDR" not in env:
        return None
    try:
        launched = LaunchedRank(
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env.get("LOCAL_RANK", env["RANK"])),
            local_world_size=int(env.get("LOCAL_WORLD_SIZE", env["WORLD_SIZE"])),
            master_addr=env["MASTER_ADDR"],
            master_port=int(env["MASTER_PORT"]),
            num_hosts=int(env.get("GROUP_WORLD_SIZE", "0")),
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(f"incomplete torchrun environment ({error}); start the job with torchrun") from error
    if launched.world_size > 1 and not 0 < launched.master_port < 65536:
        raise ConfigError(
            f"MASTER_PORT is {launched.master_port}; the {launched.world_size} ranks meet at this port, so it must be "
            "from 1 to 65535: start torchrun with --standalone, which finds a free one, or name a real port "
            "(--rdzv-endpoint HOST:PORT, --master-port PORT)"
        )
    return launched


def leave_launch() -> None:
    """Forget that torchrun started this process: engines that it starts from now on have ranks of their own."""
    for name in [name for name in os.environ if name in _LAUNCH_VARIABLES or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def given_rank(environ: Mapping[str, str] | None = None) -> int:
    """``RANK`` alone, for errors about an environment that ``launched_rank`` refuses; 0 if it is not a number."""
    rank = (os.environ if environ is None else environ).get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def has_torchrun_agent() -> bool:
    """Return whether torchrun's agent started this process; other launchers set the ranks' variables, but not this
    one."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch_marks() -> dict[str, str]:
    """Return the variables that torchrun's agent gives to every rank of this job alike; empty under other launchers."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ.get(name, "") for name in names} if has_torchrun_agent() else {}


def log_warnings_only() -> None:
    """Let this process, and those that it starts, log warnings and errors, unless ``TP_ENGINE_LOG_LEVEL`` is set."""
    os.environ.setdefault(LOG_LEVEL.name, "WARNING")


def log_level(otherwise: str) -> str:
    """``TP_ENGINE_LOG_LEVEL``; ``otherwise`` if it is not set."""
    return os.environ.get(LOG_LEVEL.name) or otherwise


def log_at(level: str) -> None:
    """Let this process, and those that it starts, log from ``level`` on."""
    os.environ[LOG_LEVEL.name] = level


def without_native_kernels() -> None:
    """Set ``TP_ENGINE_NATIVE`` to 0: this process runs the twins in PyTorch, and compiles nothing."""
    os.environ[NATIVE_KERNELS.name] = "0"


def silence_advice() -> None:
    """Set ``TRANSFORMERS_NO_ADVISORY_WARNINGS``, so that transformers does not warn about a missing torch."""
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def copied() -> dict[str, str]:
    """The environment, for programs of others."""
    return dict(os.environ)


def python_path(*folders: Path | None) -> str:
    """``PYTHONPATH`` for programs of others: these folders before those that this process has."""
    return os.pathsep.join(str(folder) for folder in (*folders, os.environ.get("PYTHONPATH")) if folder)


def cache_dir() -> Path:
    """``TP_ENGINE_CACHE_DIR``: the folder of compiled kernels, ``~/.cache/tp_engine`` unless set."""
    return Path(os.environ.get("TP_ENGINE_CACHE_DIR") or Path.home() / ".cache" / "tp_engine")


def visible_devices() -> str | None:
    """``CUDA_VISIBLE_DEVICES``: the GPUs that this process may use; None if it is not set."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def is_peer_access_off() -> bool:
    """Return whether ``NCCL_P2P_DISABLE`` or ``NCCL_P2P_LEVEL`` keeps NCCL from letting GPUs read each other's
    memory."""
    level = os.environ.get("NCCL_P2P_LEVEL", "").upper()
    return os.environ.get("NCCL_P2P_DISABLE", "0").strip() not in ("", "0") or level in ("0", "LOC")


def leave_hangs_to_the_engine() -> None:
    """Set ``TORCH_NCCL_ENABLE_MONITORING`` to 0 unless it is set.  Torch's monitor aborts a process whose NCCL thread
    was silent for 8 minutes, idle jobs of several hosts included, and names no cause.  The engine's own watchdog ends
    hangs by its limits."""
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")


def graphs_stay_unregistered() -> str | None:
    """Keep NCCL from registering the buffers of recorded steps if torch's allocator has expandable segments: replays
    then hang where GPUs read each other's memory (pytorch#158029).  Returns what the log should say; None if NCCL is
    left as it is."""
    given = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:true" not in given.lower().replace(" ", "") or "NCCL_GRAPH_REGISTER" in os.environ:
        return None
    os.environ["NCCL_GRAPH_REGISTER"] = "0"
    return "the allocator has expandable segments, so NCCL_GRAPH_REGISTER is set to 0: recorded steps would hang"


def use_interface(name: str | None) -> None:
    """Let gloo and NCCL use this network interface, if ``GLOO_SOCKET_IFNAME``, ``NCCL_SOCKET_IFNAME`` are not set."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if name is not None and variable not in os.environ:
            os.environ[variable] = name


@contextlib.contextmanager
def gloo_on(name: str | None) -> Iterator[None]:
    """Gloo's groups that are made within listen on this network interface, unless ``GLOO_SOCKET_IFNAME`` names one."""
    if name is None or "GLOO_SOCKET_IFNAME" in os.environ:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)


def collective_interface(backend: str) -> str:
    """Return the network interface that ``backend``, gloo or nccl, uses, as far as the environment says."""
    return os.environ.get(f"{backend.upper()}_SOCKET_IFNAME", "an interface of its choice")


def let_ranks_share_devices() -> None:
    """Set the variable without which torch's symmetric memory refuses two ranks on one GPU."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
