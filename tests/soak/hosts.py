"""The soak over two hosts (``tests/namespaces.py``): torchrun runs this module on each, with rank 0 in charge.

::

    quiet life        the reference: greedy tokens of every prompt
    disturbed life    requests at random times, aborts, preemptions, pauses and sleeps of ranks of both hosts
    quiet life        the same tokens as at first
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.host_jobs import meeting_of
from tests.namespaces import hosts
from tests.ranks.launch import torchrun
from tests.soak.disturbances import random_sleeps
from tests.soak.lives import TIER_GIB, Soak, check_process, disturbed_life, fault_of_ranks, findings, quiet_life
from tp_engine.engine.start import serve_rank
from tp_engine.system import env
from tp_engine.system.log import configure_logging
from tp_engine.system.units import MIB

RSS_ALLOWANCE = 12 * MIB
_START_S = 240.0


def soak_hosts(folder: Path, *, num_ranks: int, seed: int, seconds: float, check_every_s: float) -> dict[str, Any]:
    """What ``main`` says on rank 0 of a job over two hosts, whose checkpoint is in ``folder``."""
    options = {"num_ranks": num_ranks, "seed": seed, "check_every_s": check_every_s, "seconds": seconds}
    command = ["-m", "tests.soak.hosts", str(folder), json.dumps(options)]
    with hosts() as made, ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(
                torchrun, num_ranks // 2, command,
                meeting=meeting_of(index, made[0]), wrap=host.command, timeout_s=seconds + _START_S,
            )
            for index, host in enumerate(made)
        ]  # fmt: skip
        outputs = [end.result() for end in ends]
    codes = [one.returncode for one in outputs]
    assert codes == [0, 0], f"the hosts ended with {codes}\n" + "\n".join(one.stdout[-6000:] for one in outputs)
    return dict(json.loads(outputs[0].stdout.strip().splitlines()[-1]))


def main(folder: str, options: str) -> None:
    """A rank: rank 0 drives all lives and prints the findings, the others serve them in the same order."""
    launched = env.launched_rank()
    assert launched is not None, "torchrun runs this module"
    configure_logging(f"soak {launched.rank}")
    given = json.loads(options)
    seconds = given.pop("seconds")
    with tempfile.TemporaryDirectory(prefix="tp_engine-soak-") as scratch:
        soak = Soak(Path(folder), Path(scratch), **given)
        most_steps = int(40 * seconds)
        lives: list[tuple[Callable[[], None], str, dict[str, Any]]] = [
            (lambda: quiet_life(soak), "", {}),
            (
                lambda: disturbed_life(soak, seconds, least=Counter(), most_steps=most_steps),
                # the same as those that rank 0 draws
                random_sleeps(soak.num_ranks, random.Random(soak.seed), most_steps=most_steps),
                {"kv_offloading_size": TIER_GIB},
            ),
            (lambda: quiet_life(soak), "", {}),
        ]
        for live, sleeps, changes in lives:
            if launched.rank == 0:
                live()
                continue
            with fault_of_ranks(sleeps):
                serve_rank(soak.config(**changes))
        if launched.rank == 0:
            soak.usage.check(RSS_ALLOWANCE)
            check_process(soak)
            print(json.dumps(findings(soak, None, seconds)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
