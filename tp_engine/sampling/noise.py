"""Gumbel noise from a counter-based hash: a function of (seed, position, token id) alone.

A generator's state would depend on the other rows of the batch, on its order and on the number of candidates; the hash
does not.  The argmax of ``logit / temperature + noise`` is a draw from the softmax (the Gumbel-max trick).

Per row, on the host, in 64 bits (the finalizer of Steele, Lea and Flood's SplitMix64)::

    key = mix64(mix64(seed + GAMMA) + GAMMA * (position + 1));   k1, k2 = two 31-bit words of key

Per token, on the device, in 31 bits (multipliers of Wellons' lowbias32, the key injected twice)::

    x = id ^ k1;  x ^= x >> 16;  x = x * M1 + k2;  x ^= x >> 15;  x = x * M2;  x ^= x >> 16      (modulo 2**31)

Integers give the same bits on CPU and CUDA.  31 bits keep the sign bit clear, so an arithmetic shift is a logical one.
"""

import numpy as np
import numpy.typing as npt
import torch

from tp_engine.plan import IntArray

UInt64Array = npt.NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK_31 = 0x7FFFFFFF
_M1 = 0x7FEB352D
_M2 = 0x846CA68B - (1 << 32)  # the int32 of the same bits

# Maps 0 .. 2**31 - 1 into the open interval (0, 1) in float32, where 2**31 - 1 itself rounds up to 2**31.
_SCALE = 2.0**-31 * (1.0 - 2.0**-23)
_HALF_STEP = 2.0**-32


def _mix64(x: UInt64Array) -> UInt64Array:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_keys(seeds: UInt64Array, positions: IntArray) -> IntArray:
    """Keys (n, 2) int32, 31 bits each, of n rows with 64-bit ``seeds`` that sample the token at ``positions``."""
    with np.errstate(over="ignore"):
        counter = _GAMMA * (positions.astype(np.uint64) + np.uint64(1))
        key = _mix64(_mix64(seeds + _GAMMA) + counter)
    words = np.stack((key & np.uint64(_MASK_31), (key >> np.uint64(32)) & np.uint64(_MASK_31)), axis=1)
    return words.astype(np.int32)


def device_noise_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``noise_keys`` on the device: ``seeds`` (n,) int64, the bits of the unsigned ones, and ``positions`` (n,)."""
    gamma = _signed(int(_GAMMA))
    counter = (positions.to(torch.int64) + 1) * gamma
    key = _device_mix64(_device_mix64(seeds + gamma) + counter)
    return torch.stack((key & _MASK_31, (key >> 32) & _MASK_31), dim=1).to(torch.int32)


def _device_mix64(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """A logical shift."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(x: int) -> int:
    """The int64 of the same bits."""
    return x - (1 << 64) if x >= 1 << 63 else x


def hash_tokens(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """31 hashed bits (m, c) int32 per token: ``token_ids`` (c,) or (m, c) int32 under ``keys`` (m, 2) int32."""
    x = token_ids ^ keys[:, :1]
    x.bitwise_xor_(x >> 16).mul_(_M1).add_(keys[:, 1:]).bitwise_and_(_MASK_31)
    x.bitwise_xor_(x >> 15).mul_(_M2).bitwise_and_(_MASK_31)
    return x.bitwise_xor_(x >> 16)


def gumbel_noise(token_ids: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise (m, c) float32 for ``token_ids`` (c,) or (m, c) int32 under ``keys`` (m, 2) int32.

    With v uniform in (0, 1) it is ``-log(-log(1 - v))``; log1p keeps all bits of a small v, and small v give the
    large values, which win.
    """
    minus_v = hash_tokens(token_ids, keys).to(torch.float32).mul_(-_SCALE).sub_(_HALF_STEP)
    return minus_v.log1p_().neg_().log_().neg_()
