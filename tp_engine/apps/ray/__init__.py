"""Engines inside other programs' clusters; a module needs the package that it is named after."""

from __future__ import annotations

from typing import Any

from tp_engine.config import EngineConfig

# Ray would kill the ranks before their actor can end them in order; they end by themselves with the actor.
_KILL_CHILDREN = "RAY_kill_child_processes_on_worker_exit"


def ray_actor_options(engine: dict[str, Any], num_cpus: int | None = None) -> dict[str, Any]:
    """Ray's options for an actor with an engine of the options ``engine``: all its GPUs and cores, on one node.

    That is a GPU per rank, or none with ``device`` ``cpu``; and ``num_cpus`` cores, by default one per rank.  Ray would
    give each rank as many threads as the actor has cores; here the ranks share them.  Raises ``ConfigError`` for
    options that an engine does not take.
    """
    config = EngineConfig(**engine)
    ranks = config.tensor_parallel_size
    cores = ranks if num_cpus is None else num_cpus
    return {
        "num_cpus": cores,
        "num_gpus": 0 if config.device == "cpu" else ranks,
        "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(max(1, int(cores) // ranks)), _KILL_CHILDREN: "false"}},
    }
