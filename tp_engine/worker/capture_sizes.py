"""Batch sizes for which a decode step is captured as a CUDA graph; a step runs the next larger one, padded."""

from __future__ import annotations

from tp_engine.errors import ConfigError

_SMALLEST = (1, 2, 4)
_FINE_STEP, _FINE_UP_TO, _COARSE_STEP = 8, 256, 16
_LARGEST = 512


def capture_sizes(asked: str | None, max_num_seqs: int) -> tuple[int, ...]:
    """Sizes in rising order.

    ``asked`` is a comma-separated list; None takes 1, 2, 4, then every 8 up to 256 and every 16 up to 512, as far as
    ``max_num_seqs`` goes, which is always the last unless it is larger: padding then costs at most an eighth or 16
    rows.  Raises ``ConfigError`` for what is no list of numbers from 1 to ``max_num_seqs``.
    """
    if asked is not None:
        return _parse(asked, max_num_seqs)
    fine = range(_FINE_STEP, _FINE_UP_TO + 1, _FINE_STEP)
    coarse = range(_FINE_UP_TO + _COARSE_STEP, _LARGEST + 1, _COARSE_STEP)
    largest = min(max_num_seqs, _LARGEST)
    return (*(size for size in (*_SMALLEST, *fine, *coarse) if size < largest), largest)


def _parse(asked: str, max_num_seqs: int) -> tuple[int, ...]:
    try:
        sizes = sorted({int(part) for part in asked.split(",")})
    except ValueError as error:
        raise ConfigError(
            f"cuda_graph_sizes is {asked!r}; it must be batch sizes separated by commas, such as 1,2,4,8"
        ) from error
    if sizes[0] < 1 or sizes[-1] > max_num_seqs:
        wrong = sizes[0] if sizes[0] < 1 else sizes[-1]
        raise ConfigError(
            f"cuda_graph_sizes contains {wrong}; sizes go from 1 to max_num_seqs, which is {max_num_seqs}: leave it "
            "out, or raise max_num_seqs"
        )
    return tuple(sizes)
