"""Noise is a function of (seed, index, position, lane) and of nothing else."""

from __future__ import annotations

import numpy as np

from scheduler.model.noise import gumbel, mix64, position_keys, sequence_key


def keys_of(seed: int, index: int, position: int) -> np.ndarray:
    return position_keys(np.array([sequence_key(seed, index)], dtype=np.uint64), np.array([position]))


def test_mix_is_splitmix64() -> None:
    """The first outputs of SplitMix64 seeded with 0 are the published ones."""
    increments = np.array([1, 2, 3], dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    assert mix64(increments).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


def test_every_coordinate_matters() -> None:
    """Seeds over the whole 64 bits, indices, positions and lanes each give other noise."""
    lanes = np.arange(4)
    drawn = {
        tuple(gumbel(keys_of(seed, index, position), lanes)[0])
        for seed in (0, 1, 2**32, 2**63, 2**64 - 1)
        for index in (0, 1, 127)
        for position in (0, 1, 8191, 2**31)
    }
    assert len(drawn) == 5 * 3 * 4
    assert len({value for row in drawn for value in row}) == 5 * 3 * 4 * 4


def test_noise_of_a_row_does_not_depend_on_the_others() -> None:
    """Keys and noise of many rows at once are those of each alone."""
    sequence_keys = np.array([sequence_key(seed, 0) for seed in range(5)], dtype=np.uint64)
    positions = np.arange(5) * 1000
    together = gumbel(position_keys(sequence_keys, positions), np.arange(7))
    for row in range(5):
        assert together[row].tolist() == gumbel(keys_of(row, 0, row * 1000), np.arange(7))[0].tolist()


def test_gumbel_has_the_moments_of_its_distribution() -> None:
    """Mean 0.5772 and variance 1.6449 over neighbouring lanes and positions alike; always finite."""
    keys = position_keys(np.full(300, sequence_key(3, 0), dtype=np.uint64), np.arange(300))
    noise = gumbel(keys, np.arange(300))
    assert np.isfinite(noise).all()
    for means, variances in ((noise.mean(0), noise.var(0)), (noise.mean(1), noise.var(1))):
        assert abs(means.mean() - 0.5772) < 0.01
        assert abs(variances.mean() - 1.6449) < 0.03
        assert means.std() < 2 * (1.6449 / 300) ** 0.5
    assert abs(np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]) < 0.01
