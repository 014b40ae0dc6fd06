"""Connects the hosts of a job, before its process groups: who listens, who connects, and what all must agree on.

::

    rank 0                                            first rank of host h
      address of its route to the rendezvous            the same, told to the store
      listen there
      store: address, port, key        ------------>    connect twice: plans, and boards (``handshake.py``)
      identity: equal?                                  identity

The *identity* is what must be equal on all hosts, because every rank decides from the same bits: the package, torch,
the configuration, the model's description, with transformers if this gave it, the weights
(``weights/fingerprint.py``), and the kind of device.  A difference ends the start, with both values.
"""

import contextlib
import dataclasses
import hashlib
import json
import secrets
import socket
import time
from collections.abc import Mapping

import torch

from tp_engine.config import EngineConfig
from tp_engine.distributed.store import Store, WatchedStore
from tp_engine.engine.job import Job
from tp_engine.errors import ConfigError, RankError
from tp_engine.ipc.handshake import KEY_BYTES, PURPOSES, Listener, connect, watch_peer
from tp_engine.ipc.relay import PlanLink, RelayReader
from tp_engine.ipc.ring_buffer import RingWriter
from tp_engine.job.topology import Topology
from tp_engine.model_config.installed_classes import transformers_version
from tp_engine.model_config.spec import ModelSpec
from tp_engine.options.fields import plain
from tp_engine.system import env
from tp_engine.system.interfaces import address_towards, interface_of, is_loopback
from tp_engine.system.log import get_logger
from tp_engine.system.version import __version__
from tp_engine.weights.fingerprint import checkpoint_fingerprint
from tp_engine.worker.device import kind_of_device
from tp_engine.worker.effective_config import EffectiveConfig

logger = get_logger(__name__)

_MEETING = "where hosts meet"
_FAILED = "a host that failed before it was connected"
_LOOK_S = 0.25


def topology_of(launched: env.LaunchedRank) -> Topology:
    """Return the hosts of a torchrun job; ``ConfigError`` if they have different numbers of ranks."""
    world_size, here = launched.world_size, launched.local_world_size
    counted = launched.num_hosts * here if launched.num_hosts else world_size - world_size % here
    if counted != world_size or launched.rank % here != launched.local_rank:
        raise ConfigError(
            f"torchrun started {world_size} ranks, {here} of them on this host ({socket.gethostname()}); every host "
            "must have equally many: use the same --nproc-per-node everywhere"
        )
    return launched.topology


class Hosts:
    """This rank's connections to other hosts; ``link_hosts`` makes them."""

    def __init__(self, job: Job, store: Store, timeout_s: float) -> None:
        self._job, self._store, self._timeout_s = job, store, timeout_s
        self._looked_s = 0.0
        self._connections: dict[tuple[int, str], socket.socket] = {}  # by the other host and the purpose
        self._listener: Listener | None = None

    def listen(self, address: str, identity: Mapping[str, str]) -> str:
        """Rank 0 begins to listen; returns what the other hosts must know to connect."""
        key = secrets.token_bytes(KEY_BYTES)
        self._listener = Listener(address, key, identity, self._job.board.topology.far_hosts)
        logger.info("other hosts connect to %s:%d (%s)", address, self._listener.port, interface_of(address))
        return json.dumps({"address": address, "port": self._listener.port, "key": key.hex()})

    def await_hosts(self, timeout_s: float) -> None:
        """Rank 0 waits until all other hosts are connected; ``RankError`` names one that is not, or that differs from
        rank 0's."""
        assert self._listener is not None
        board, deadline_s = self._job.board, time.monotonic() + timeout_s
        while self._listener.missing:
            for hello, refusal, connection in self._listener.take():
                if refusal:  # the host cannot take part: it is the cause of the job's end
                    board.slots[board.topology.leader_of(hello.host)].fail(refusal)
                    continue
                self._serve(hello.host, hello.purpose, connection)
                logger.info("host %d (%s) has its connection for %s", hello.host, hello.name, hello.purpose)
            self.check()
            if time.monotonic() > deadline_s:
                missing = sorted({host for host, _ in self._listener.missing})
                raise RankError(
                    board.topology.leader_of(missing[0]),
                    f"has not connected within {timeout_s:g} s (missing hosts: {', '.join(map(str, missing))}); see "
                    "the log of its torchrun",
                )
        self.close()

    def connect(self, meeting: str, identity: Mapping[str, str], *, start_s: float) -> None:
        """Another host's first rank connects to rank 0."""
        where, job = json.loads(meeting), self._job
        for purpose in PURPOSES:
            connection = connect(
                where["address"], where["port"], bytes.fromhex(where["key"]), job.board.host, purpose, identity,
                rank=job.rank, timeout_s=start_s, check=job.check,
            )  # fmt: skip
            self._serve(0, purpose, connection)
        logger.info("connected to rank 0 at %s:%d", where["address"], where["port"])

    def _serve(self, host: int, purpose: str, connection: socket.socket) -> None:
        watch_peer(connection, self._timeout_s)
        self._connections[host, purpose] = connection
        if purpose == "watch":
            self._job.connect().add(host, connection)

    def plan_links(self) -> list[PlanLink]:
        """Rank 0's connections for plans, one per other host."""
        topology = self._job.board.topology
        return [
            PlanLink(connection, topology.leader_of(host), alive=self._job.alive)
            for (host, purpose), connection in sorted(self._connections.items())
            if purpose == "plan"
        ]

    def plan_reader(self, ring: RingWriter | None, *, ring_timeout_s: float) -> RelayReader:
        """Return the first rank's source of plans, which passes them on to its host's ``ring``."""
        return RelayReader(self._connections[0, "plan"], ring, alive=self._job.alive, ring_timeout_s=ring_timeout_s)

    def check(self) -> None:
        """Check as ``job.check``, for waits of the start, and on rank 0 also for a host that failed before it was
        connected."""
        self._job.check()
        now_s = time.monotonic()
        if self._listener is None or now_s < self._looked_s + _LOOK_S:
            return
        self._looked_s = now_s
        if self._store.check([_FAILED]):
            rank, text = json.loads(self._store.get(_FAILED))
            self._job.board.slots[rank].fail(text)
            self._job.check()

    def tell_failure(self, error: Exception) -> None:
        """Tell rank 0, through the store, that this first rank of a host cannot connect."""
        with contextlib.suppress(RuntimeError):
            self._store.set(_FAILED, json.dumps([self._job.rank, f"{type(error).__name__}: {error}"]))

    def close(self) -> None:
        """Stop listening.  The connections belong to the job and to the plan channel."""
        if self._listener is not None:
            self._listener.close()


def link_hosts(effective: EffectiveConfig, launched: env.LaunchedRank, store: Store, job: Job) -> Hosts:
    """Connect this rank's host with rank 0's; does nothing on ranks that are not the first of their host.
    ``RankError`` if a host differs from rank 0's, or cannot be reached."""
    hosts, topology = Hosts(job, store, effective.config.host_timeout_s), job.board.topology
    if topology.num_hosts == 1:
        return hosts
    start_s = effective.config.startup_timeout_s
    watched = WatchedStore(store, job.check, timeout_s=start_s)
    try:
        address = _own_address(watched, launched, topology)
        env.use_interface(interface_of(address))
        if launched.rank == 0:
            watched.set(_MEETING, hosts.listen(address, identity_of(effective)))
            hosts.await_hosts(start_s)
        elif topology.is_leader(launched.rank):
            hosts.connect(watched.get(_MEETING).decode(), identity_of(effective), start_s=start_s)
    except BaseException as error:
        hosts.close()
        if isinstance(error, Exception) and launched.rank != 0 and topology.is_leader(launched.rank):
            hosts.tell_failure(error)
        raise
    return hosts


def identity_of(effective: EffectiveConfig) -> dict[str, str]:
    """Return what must be equal on all hosts, as text by name."""
    shared = [field.name for field in dataclasses.fields(EngineConfig) if not field.metadata.get("is_of_host")]
    return {name: str(plain(getattr(effective.config, name))) for name in shared} | {
        "tp_engine": __version__,
        "torch": str(torch.__version__),
        "transformers": transformers_version() if effective.model.described_by == "transformers" else "not asked",
        "model's description": _digest(effective.model),
        "weights": "dummy" if effective.config.load_format == "dummy" else checkpoint_fingerprint(effective.model_path),
        "kind of device": kind_of_device(torch.device(effective.config.device)),
        "tuned": "a file" if effective.config.tuned is not None else "none",  # whose choices all ranks exchange
    }


def _digest(model: ModelSpec) -> str:
    """Of what counts where models are compared."""
    counts = [(one.name, getattr(model, one.name)) for one in dataclasses.fields(model) if one.compare]
    return hashlib.sha256(repr(counts).encode()).hexdigest()[:16]


def _own_address(store: Store, launched: env.LaunchedRank, topology: Topology) -> str:
    """This host's address on the network of the rendezvous.  On the host of the rendezvous itself that route may be the
    loopback; there the route to another host counts."""
    own = address_towards(launched.master_addr, launched.master_port)
    host = topology.host_of(launched.rank)
    if topology.is_leader(launched.rank):
        store.set(f"address of host {host}", own)
    if not is_loopback(own):
        return own
    other = store.get(f"address of host {1 if host == 0 else 0}").decode()
    return own if is_loopback(other) else address_towards(other, launched.master_port)
