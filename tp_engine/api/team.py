"""Ranks of a trainer that share one engine, as with vLLM's ``external_launcher``: all get the first one's results.

::

    rank 0, 1 | 2, 3 | ...      teams of neighbouring ranks, as many as the engine has
    the first of each           starts the engine, whose ranks are processes of their own, on the GPUs of its team
    every one                   makes the same calls; the first does them, and tells the others (team_ranks.py)
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

from tp_engine.api.engine_options import read_options
from tp_engine.api.team_ranks import FirstRank, OtherRank, TeamRank
from tp_engine.errors import ConfigError

EXTERNAL_LAUNCHER = "external_launcher"
_Method = TypeVar("_Method", bound=Callable[..., Any])
_numbers = itertools.count()


class Team:
    """The ranks of one engine, of which the first ``leads``."""

    def __init__(self, rank: TeamRank) -> None:
        self.leads = isinstance(rank, FirstRank)
        self._rank = rank
        self._is_doing = False

    def do(self, method: str, work: Callable[[], Any], meanwhile: Callable[[], object] = lambda: None) -> Any:
        """Return what ``work`` returned on the first rank, or raise what it raised; on the others it does not run, but
        ``meanwhile`` does.

        Nested calls are not exchanged.
        """
        if self._is_doing:
            return work()
        self._is_doing = True
        try:
            return self._rank.do(method, work, meanwhile)
        finally:
            self._is_doing = False

    def close(self) -> None:
        """Leave; the other ranks may have ended."""
        self._rank.close()


def join_team(model: Any, options: dict[str, Any]) -> tuple[Team | None, dict[str, Any]]:
    """This process's team in the job that it belongs to, torch.distributed's or that of torchrun's variables,
    and the options of the team's engine.  None for a rank that is alone.  All ranks of the job call this in the same
    order.  ``ConfigError`` if the job cannot be divided so."""
    from tp_engine.distributed.neighbours import hear, own_gpu, place_in_job  # torch, which a trainer has

    config, number = read_options("LLM", model, options).engine, next(_numbers)
    num_ranks, (rank, world_size) = config.tensor_parallel_size, place_in_job()
    if world_size % num_ranks:
        raise ConfigError(
            f"tensor_parallel_size is {num_ranks}; with {EXTERNAL_LAUNCHER}, ranks of a job make engines of so many "
            f"neighbours, and this job has {world_size} ranks: use a divisor of that"
        )
    own = own_gpu() if config.device != "cpu" and config.device_ids is None else ""
    if num_ranks == 1:
        return None, {**options, "device_ids": own} if own else options
    index, place = divmod(rank, num_ranks)
    first = FirstRank(num_ranks) if place == 0 else None
    try:
        said = json.dumps((own, first and first.address))
        heard = [json.loads(one) for one in hear(place, num_ranks, f"team {index} of engine {number}", said)]
        if first is not None:
            first.meet()
    except BaseException:
        if first is not None:
            first.close()
        raise
    team = Team(first or OtherRank(place, heard[0][1]))
    return team, {**options, "device_ids": ",".join(one[0] for one in heard)} if own else options


def together(method: _Method) -> _Method:
    """Have the first rank of a team run a method of ``LLM`` for all of them."""

    @functools.wraps(method)
    def call(llm: Any, *arguments: Any, **named: Any) -> Any:
        if llm.team is None:
            return method(llm, *arguments, **named)
        return llm.team.do(method.__name__.lstrip("_"), lambda: method(llm, *arguments, **named))

    return cast("_Method", call)
