"""The rule by which times become a choice: the code's own choice stays unless another one is clearly faster.

::

    round      1     2     3   ...   10        a candidate's time over the default's, in the same round
    ratio    0.81  0.84  0.99  ...  0.80       median below 0.97, and below it in 8 rounds of 10: faster

Of two equal candidates on a busy machine the rule takes the other one in 0 to 1 % of choices; "the fastest of one
round" would in half of them.  Equal ones follow the order of their table, so that two starts choose alike.

Clocks are not locked.  If the default's own times drift by more than 5 % from the first rounds to the last, all are
measured again; if they drift again, a candidate must win by as much more.
"""

from collections.abc import Collection, Mapping, Sequence
from statistics import median

from tp_engine.kernels.candidates import MANY, Choice

CLEARLY_FASTER = 0.97
ROUNDS = 10
MORE_ROUNDS = 30
_SHARE_OF_ROUNDS = 0.8
_MOST_DRIFT = 0.05
HOPELESS = 1.3  # so slow after the first rounds that further ones are a waste
FIRST_ROUNDS = 3

Times = Mapping[str, Sequence[float]]
"""By candidate, in the order of its table: its time in each round."""


def ratios(times: Times, name: str, default: str) -> list[float]:
    """Return the times of ``name`` over those of ``default``, round by round."""
    return [own / other for own, other in zip(times[name], times[default], strict=False) if other > 0]


def drift(times: Times, default: str | None) -> float:
    """Return by which part the default's times have moved from the first rounds to the last; 0 if it is little."""
    own = [] if default is None else times[default]
    if len(own) < 2 * FIRST_ROUNDS or not all(own):
        return 0.0
    first, last = median(own[:FIRST_ROUNDS]), median(own[-FIRST_ROUNDS:])
    found = max(first, last) / min(first, last) - 1
    return found if found > _MOST_DRIFT else 0.0


def is_faster(found: Sequence[float], drifted: float = 0.0) -> bool:
    """Return whether these ratios to the default, whose own times have ``drifted``, are those of a faster
    candidate."""
    limit = CLEARLY_FASTER / (1 + drifted)
    won = sum(one < limit for one in found)
    return bool(found) and median(found) < limit and won >= _SHARE_OF_ROUNDS * len(found)


def is_unsure(times: Times, default: str) -> bool:
    """Return whether more rounds would help: a median says faster, and too few rounds do."""
    found = [ratios(times, name, default) for name in times if name != default]
    return any(one and median(one) < CLEARLY_FASTER and not is_faster(one) for one in found)


def fastest(times: Times, default: str | None) -> str:
    """Return the candidate to take.  ``default`` None: the code's own choice is not right, so the fastest one is."""
    if default is None:
        scores = {name: median(own) for name, own in times.items()}
    else:
        moved, found = drift(times, default), {name: ratios(times, name, default) for name in times}
        scores = {name: median(one) for name, one in found.items() if is_faster(one, moved)}
        if not scores:
            return default
    best = min(scores.values())
    return next(name for name, score in scores.items() if score * CLEARLY_FASTER <= best)


def merge(default: Choice, winners: Mapping[int, str | None]) -> Choice:
    """Return ``default`` with the winners of measured sizes; None keeps the default there.

    A size stands for itself and for smaller ones down to the next size, the largest also for all above it.
    """
    found: list[tuple[int, str]] = []
    sizes, begin = sorted(winners), 0
    for size in sizes:
        end, winner = (MANY if size == sizes[-1] else size), winners[size]
        if winner is not None:
            found.append((end, winner))
        else:
            found += [(min(most, end), name) for most, name in default if most > begin and _first(default, most) < end]
        begin = end
    return _joined(found)


def without(choice: Choice, right: Collection[str]) -> Choice:
    """Return ``choice`` with ``right`` candidates alone: one of more rows stands in for another, or else of fewer."""
    names = [name for _, name in choice]
    found: list[tuple[int, str]] = []
    for place, (most, name) in enumerate(choice):
        others = (*names[place:], *reversed(names[:place]))
        found.append((most, next((one for one in others if one in right), name)))
    return _joined(found)


def _joined(lines: Sequence[tuple[int, str]]) -> Choice:
    """Lines, of which neighbours with one name are one."""
    return tuple(line for line, after in zip(lines, [*lines[1:], (0, "")], strict=True) if line[1] != after[1])


def _first(choice: Choice, most: int) -> int:
    """The most rows of the line before that of ``most``; 0 for the first."""
    return max((line for line, _ in choice if line < most), default=0)
