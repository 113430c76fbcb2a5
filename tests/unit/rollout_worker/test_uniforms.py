"""The numbers that draw tokens: reproducible, uniform, and independent of each other."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rlboost.services.rollout_worker.domain.requests import as_u64, uniforms


def of(seeds: npt.ArrayLike, offsets: npt.ArrayLike) -> npt.NDArray[np.float64]:
    seeds, offsets = np.broadcast_arrays(np.asarray(seeds, np.uint64), np.asarray(offsets, np.int64))
    return uniforms(seeds.ravel(), offsets.ravel())


def chi_square(drawn: npt.NDArray[np.float64], bins: int) -> float:
    counts = np.bincount((drawn * bins).astype(int), minlength=bins)
    expected = drawn.size / bins
    return float(((counts - expected) ** 2 / expected).sum())


def test_the_numbers_never_change() -> None:
    # A worker of another release must continue a sample as this one would.
    assert of([0, 1, 2**64 - 1], [0, 7, 2**40]).tolist() == [
        0.6524484863740321,
        0.24696520214533768,
        0.5440041384053076,
    ]


def test_a_number_depends_on_its_own_seed_and_offset_only() -> None:
    many = of(np.arange(50), np.arange(50) * 3)
    assert [of(i, i * 3)[0] for i in range(50)] == many.tolist()


def test_the_numbers_lie_within_zero_and_one_and_never_round_up_to_a_total() -> None:
    drawn = of(np.arange(100_000), 0)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    largest = 1 - 2.0**-52
    for total in np.random.default_rng(0).uniform(0.5, 2, 10_000):
        assert largest * total < total


def test_along_a_sample_and_across_samples_the_numbers_are_uniform() -> None:
    # 255 degrees of freedom: 330 is exceeded once in a thousand runs, and there is only this one
    assert chi_square(of(12345, np.arange(100_000)), 256) < 330
    assert chi_square(of(np.arange(100_000), 17), 256) < 330


def test_neighbouring_seeds_and_offsets_share_nothing() -> None:
    grid = of(np.arange(300)[:, None], np.arange(300)[None, :]).reshape(300, 300)
    assert np.unique(grid).size == grid.size
    noise = 5 / np.sqrt(grid.size)
    for other in (np.roll(grid, 1, axis=0), np.roll(grid, 1, axis=1), grid.T):
        off_diagonal = ~np.eye(300, dtype=bool)
        assert abs(np.corrcoef(grid[off_diagonal], other[off_diagonal])[0, 1]) < noise


def test_any_integer_is_a_seed() -> None:
    assert as_u64(-1) == 2**64 - 1
    assert as_u64(2**70 + 5) == 5
