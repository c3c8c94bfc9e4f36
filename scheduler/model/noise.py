"""Sampling noise as a pure function of (seed, index, absolute position, lane): counter-based, no generator, no state.

What must live here: nothing but that function. What must not: anything that remembers, anything that knows a batch. A
stream that is preempted, replayed on another engine or served in other company therefore draws the same noise.

A key is mixed once per sequence from (seed, index), once per step from the position; a lane of noise is then one more
round over key + lane. The rounds are SplitMix64's output function and its golden-ratio increment (Steele, Lea and
Flood 2014, "Fast splittable pseudorandom number generators"). All of it runs in numpy on the host, a few hundred
numbers per sampled token, so that every device sees the same noise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt64Array = npt.NDArray[np.uint64]

_INCREMENT = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)


def mix64(values: UInt64Array) -> UInt64Array:
    """SplitMix64's output function, a bijection of 64-bit integers, elementwise."""
    values = (values ^ (values >> np.uint64(30))) * _MULTIPLIER_1
    values = (values ^ (values >> np.uint64(27))) * _MULTIPLIER_2
    return values ^ (values >> np.uint64(31))


def sequence_key(seed: int, index: int) -> int:
    """The 64-bit key of one sequence: `seed` any integer (its low 64 bits count), `index` its place in the request."""
    # Arrays of one, for numpy lets only arrays wrap around in silence.
    seed_key = mix64(np.array([seed & 0xFFFF_FFFF_FFFF_FFFF], dtype=np.uint64) + _INCREMENT)
    return int(position_keys(seed_key, np.array([index], dtype=np.int64))[0])


def position_keys(sequence_keys: UInt64Array, positions: npt.NDArray[np.int64]) -> UInt64Array:
    """The keys [S] of the tokens to be sampled at these absolute positions [S]."""
    return mix64(sequence_keys + (positions.astype(np.uint64) + np.uint64(1)) * _INCREMENT)


def gumbel(keys: UInt64Array, lanes: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Standard Gumbel noise [S, n], finite always, for the keys [S] and the lanes [n], or [S, n]: a row's own.

    -log(-log u), with u uniform on the odd multiples of 2^-54.
    """
    counters = np.atleast_2d(lanes).astype(np.uint64) + np.uint64(1)
    bits = mix64(keys[:, None] + counters * _INCREMENT)
    # 53 bits and a half: u can be neither 0 nor 1, so neither logarithm meets its pole.
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return -np.log(-np.log(uniform))
