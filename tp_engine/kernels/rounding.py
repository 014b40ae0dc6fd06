"""How far a right result may be from the exact one: what rounding alone explains, row by row.

::

    sums       a sum of ``depth`` numbers in float32        depth ** 0.5 * 2 ** -23 of a row's root mean square
    rounding   to the result's type, by half a unit         2 ** -9 for bfloat16

A bound by the largest value of all passes a weight that is off by a tenth of its spread everywhere, and one wrong
result among large ones; a root mean square sees the first, and a bound of each result by its own size the second.
"""

import torch

_SMALLEST = 1e-30
_MARGIN = 2.0  # rounded twice, as before a bias is added
_SIGMAS = 8.0  # of the largest of all results' errors of sums


def rms(values: torch.Tensor, count: int) -> torch.Tensor:
    """The root mean squares of ``count`` parts."""
    if not values.numel():
        return values.new_zeros(count)
    return values.reshape(count, -1).square().mean(1).sqrt()


def rounding_of(exact: torch.Tensor, dtype: torch.dtype, depth: int, count: int) -> torch.Tensor:
    """The root mean squares of the errors (count,) that results ``exact`` float64 of sums of ``depth`` numbers have in
    ``dtype``, in ``count`` parts."""
    sums, rounding = _units(dtype, depth)
    # Of few values one can be most of a row, and the luck of its rounding is then no average.
    values = exact.reshape(count, -1)
    luck: torch.Tensor = values.abs().amax(1) / values.shape[1] ** 0.5
    return luck * rounding + rms(exact, count) * (sums + rounding)


def are_products(found: torch.Tensor, exact: torch.Tensor, bias: torch.Tensor, depth: int) -> bool:
    """Whether ``found`` (n, out) are ``exact`` float64, sums of ``depth`` numbers and ``bias`` (out,), but for what
    rounding to its type explains: in each row as a whole, and each result by itself."""
    sums, rounding = _units(found.dtype, depth)
    errors, sizes = (found.double() - exact).abs(), exact.abs() + bias.double().abs()
    by_row = _MARGIN * rounding_of(exact, found.dtype, depth, len(exact)).clamp_min(_SMALLEST)
    of_each = 2 * _MARGIN * rounding * sizes + _SIGMAS * sums * rms(sizes, len(sizes)).unsqueeze(1) + _SMALLEST
    return bool((rms(errors, len(errors)) <= by_row).all() and (errors <= of_each).all())


def _units(dtype: torch.dtype, depth: int) -> tuple[float, float]:
    return depth**0.5 * torch.finfo(torch.float32).eps, torch.finfo(dtype).eps / 2
