"""The choices of a job: looked up or found by one rank of each host, then agreed on by all.

::

    the first rank of each host    reads the cache; what is missing is tried in a process of its own (tuner.py)
    every rank                     one gather of the hosts' tables, and the same rule on each: agree

No collective runs while candidates are tried, and every rank takes part in the gather, whether it found or waited.  It
comes before a rank's first snapshot of memory, and the process has ended by then, so that nothing of it is in the
ledger.
"""

import contextlib
import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from tp_engine.distributed.rank import Agreeing
from tp_engine.errors import ConfigError
from tp_engine.kernels.candidates import CANDIDATES, DEFAULTS, Choice, Choices, operation
from tp_engine.kernels.compile_turn import take_turn
from tp_engine.system.log import get_logger
from tp_engine.system.units import GIB
from tp_engine.worker.effective_config import EffectiveConfig
from tp_engine.worker.tuning.shapes import wanted_shapes
from tp_engine.worker.tuning.table import (
    MOST_STARTS,
    Extent,
    Facts,
    Store,
    TunedShape,
    TunedTable,
    decode_tables,
    encode_table,
    read_pinned,
    shown,
    today,
)
from tp_engine.worker.tuning.tuner import NoRightKernelError, Tuner, WantedShape

logger = get_logger(__name__)

_MOST_NAMED = 4
_PINNED_FACTS = ("device", "capability", "units")  # in which a pinned file must agree


RunPhase: TypeAlias = Callable[[str, Callable[[], TunedTable | None]], TunedTable | None]


def choose_kernels(effective: EffectiveConfig, host: Agreeing, device: torch.device, run_phase: RunPhase) -> Choices:
    """Return the choices for the model on ``device``, as the resolved configuration asks, equal on all ranks.
    It is a collective, but for the code's own choice."""
    config = effective.config
    if config.tuned is None and config.tune == "off":
        return DEFAULTS

    def find() -> TunedTable:
        if config.tuned is not None:
            return pinned_table(config.tuned, device)
        wanted = wanted_shapes(effective, device.type)
        return find_table(device, wanted, "full" if config.tune == "full" else "quick")

    is_finder = host.info.is_first if config.tuned is not None else host.info.local_rank == 0
    return agreed_choices(host, run_phase, find, is_finder=is_finder)


def agreed_choices(host: Agreeing, run_phase: RunPhase, find: Callable[[], TunedTable], *, is_finder: bool) -> Choices:
    """Return the choices of all ranks; a collective.  ``find`` is called on the finders, in a phase of the start: if it
    fails on one, it fails on every rank."""
    own = run_phase("choosing kernels", lambda: find() if is_finder else None)
    tables = decode_tables(host.all_gather_bytes(encode_table(own)))
    agreed = agree(tables)
    choices = TunedTable(device={}, shapes=tuple(agreed)).choices()
    if host.info.is_first:
        differing = [one for one in agreed if one.choice != one.default]
        logger.info("choices of kernels: %s (%d of %d not the code's own)", choices.digest, len(differing), len(agreed))
        if differing:
            names = [f"{one.key}: {shown(one.choice)}" for one in differing]
            more = "; ..." if len(names) > _MOST_NAMED else ""
            logger.info("kernels other than the code's own choice: %s%s", "; ".join(names[:_MOST_NAMED]), more)
            logger.debug("all of them: %s", "; ".join(names))
    return choices


def agree(tables: Sequence[TunedTable]) -> list[TunedShape]:
    """Return the shapes of the first table, each with a choice that is right on every host; all ranks call this with
    the same tables.  Hosts with unlike devices take the code's own choices.  ``NoRightKernelError`` if a shape has
    none."""
    first, *others = tables
    unlike = next((one for one in others if one.device != first.device), None)
    if unlike is not None:
        logger.warning(
            "hosts have unlike devices or versions (%s; %s), so all take the code's own choice of kernels",
            _in_words(first.device),
            _in_words(unlike.device),
        )
    return [_agree_on(one, others, keeps=unlike is not None) for one in first.shapes]


def _agree_on(one: TunedShape, others: Sequence[TunedTable], *, keeps: bool) -> TunedShape:
    known = [found for table in others for found in table.shapes if found.key == one.key]
    wanted: list[Choice] = [one.default, one.choice] if keeps else [one.choice, one.default]
    wanted += [found.choice for found in known]
    if len(known) < len(others):  # not known on a host: what is proven nowhere is not taken
        wanted.sort(key=lambda choice: choice != one.default)
    everywhere = next((choice for choice in wanted if all(found.is_usable(choice) for found in (one, *known))), None)
    if everywhere is None:
        raise NoRightKernelError(
            f"no kernel for {one.key} is right on all hosts; --tune off takes the code's own choice"
        )
    if everywhere != one.choice and not keeps:
        logger.warning("%s: %s, because %s is not right on all hosts", one.key, shown(everywhere), shown(one.choice))
    return msgspec.structs.replace(one, choice=everywhere)


def find_table(
    device: torch.device,
    wanted: Sequence[WantedShape],
    extent: Extent,
    *,
    places: Mapping[str, str] = CANDIDATES,
    again: bool = False,
    make_tuner: Callable[..., Tuner] = Tuner,
) -> TunedTable:
    """Return what is known of ``wanted`` on this device, from the cache; what is not is tried now and kept, and so is
    what some starts before have left open.  ``again``: all is tried.  Of several processes that want it, one tries and
    the others wait."""
    store = Store(device_facts(device), places)

    def look() -> dict[str, TunedShape]:
        found = (store.read(one.operation, one.shape, extent) for one in wanted)
        return {} if again else {one.key: one for one in found if one is not None}

    def left(now: Mapping[str, TunedShape]) -> list[WantedShape]:
        """What nobody has tried meanwhile."""
        keys = {one.key for one in wanted if now.get(one.key) == before.get(one.key)}
        return [one for one in wanted if one.key in keys and _is_to_try(now.get(one.key), extent)]

    known = before = look()
    if left(known):
        with _turn(store, lambda: not left(look())) as report:
            known = look()
            tuner = make_tuner(device=device, extent=extent, places=places, report=report)
            missing = left(known)
            for found in tuner.tune(missing, {one.key: known[one.key] for one in missing if one.key in known}):
                known[found.key] = found
                store.keep(found)
    shapes = tuple(msgspec.structs.replace(known[one.key], count=one.count) for one in wanted)
    return TunedTable(device=store.facts, shapes=shapes, date=today())


def known_table(device: torch.device, wanted: Sequence[WantedShape]) -> tuple[TunedTable, int]:
    """Return what the cache has for ``wanted`` on this device, and how many shapes the next start would try."""
    store = Store(device_facts(device), CANDIDATES)
    found = [store.read(one.operation, one.shape, "quick") for one in wanted]
    shapes = tuple(one for one in found if one is not None and not _is_to_try(one, "quick"))
    return TunedTable(device=store.facts, shapes=shapes), len(wanted) - len(shapes)


def _is_to_try(known: TunedShape | None, extent: Extent) -> bool:
    """Whether a start tries a shape: nothing is known of it, or a few such starts have left it open."""
    return known is None or (known.is_open and known.starts < MOST_STARTS and known.extent == extent)


@contextlib.contextmanager
def _turn(store: Store, is_there: Callable[[], bool]) -> Iterator[Callable[[str], None]]:
    """The turn to try candidates on this device, where there are locks; its function says how far it is."""
    with contextlib.ExitStack() as stack:
        turn = None
        with contextlib.suppress(OSError):  # a folder that cannot be written to; ``keep`` says so
            turn = stack.enter_context(take_turn(store.lock_file(), is_there, what="the choice of kernels"))
        yield (lambda _text: None) if turn is None else turn.report


def pinned_table(path: str, device: torch.device) -> TunedTable:
    """Return the table of the file ``path``; ``ConfigError`` if it was not made on such a device."""
    table, facts = read_pinned(path), device_facts(device)
    for name in _PINNED_FACTS:
        if table.device.get(name) != facts.get(name):
            raise ConfigError(
                f"tuned is {path!r}, whose kernels were proven on {_in_words(table.device)}, but this device is "
                f"{_in_words(facts)}: make the file here with tp-engine tune MODEL --to FILE, or leave tuned out"
            )
    for one in table.shapes:
        check_usable(path, one, device)
    return table


def check_usable(path: str, one: TunedShape, device: torch.device) -> None:
    """Raise ``ConfigError`` if a choice of a pinned file cannot be taken here."""
    for _, name in one.choice:
        candidate = operation(one.operation).named(name) if one.operation in CANDIDATES else None
        reason = "there is no such kernel in this version"
        if candidate is not None:
            reason = candidate.why_not(one.shape, device) or ""
        if reason:
            raise ConfigError(
                f"tuned is {path!r}, which takes {name} for {one.key}, but {reason}: make the file anew with "
                "tp-engine tune MODEL --to FILE, or leave tuned out"
            )


def device_facts(device: torch.device) -> Facts:
    """Return what ``device`` is, and the versions that its kernels depend on."""
    versions = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
        return {
            "device": found.name,
            "capability": f"{found.major}.{found.minor}",
            "units": str(found.multi_processor_count),
            "memory": f"{round(found.total_memory / GIB)} GiB",
            "driver": f"CUDA {driver // 1000}.{driver % 1000 // 10}",
            "cuda": str(torch.version.cuda),
            "triton": _version_of("triton"),
            **versions,
        }
    return {**_processor_facts(), **versions}


@cache
def _processor_facts() -> Facts:
    """The name of the first processor, and a digest of its instructions."""
    fields = {}
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0]
        fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    flags = fields.get("flags") or fields.get("Features") or ""
    name = fields.get("model name") or platform.machine()
    return {"device": name, "capability": hashlib.sha256(flags.encode()).hexdigest()[:12]}


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _in_words(facts: Facts) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items()) or "an unknown device"
