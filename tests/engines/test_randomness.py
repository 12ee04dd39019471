"""Keys and uniform numbers: distribution, independence, and literal values that must never change."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lit_rlhf.engines.randomness import mix, row_keys, uniforms


@pytest.fixture(scope="module")
def numbers():
    """4,096 neighbouring rows (64 prompts of 64 samples) of 64 positions."""
    return uniforms(row_keys(0, 0, 0, range(64), 64), 64)


def test_mix_is_splitmix64():
    # The first outputs of the reference implementation (Vigna) for seed 1234567.
    state, golden = 1234567, 0x9E3779B97F4A7C15
    states = np.array([(state + n * golden) % 2**64 for n in range(3)], dtype=np.uint64)
    assert mix(states).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_literal_values():
    keys = row_keys(7, 1, 3, [5], 2)
    assert keys.tolist() == [11338940435509870598, 998880247144538576]
    assert uniforms(keys, 3).tolist() == [
        [0.08723521035987236, 0.8134373615275148, 0.027873889107256633],
        [0.6495318889430596, 0.31007982944011503, 0.7384410177703641],
    ]


def test_uniforms_lie_in_the_unit_interval_with_the_right_moments_and_histogram(numbers):
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    n = numbers.size
    assert abs(numbers.mean() - 0.5) < 4 * (1 / 12 / n) ** 0.5
    assert abs(numbers.var() - 1 / 12) < 4 * (1 / 180 / n) ** 0.5
    counts = np.histogram(numbers, bins=100, range=(0, 1))[0]
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 99 + 4 * (2 * 99) ** 0.5


def test_the_largest_and_smallest_bits_give_numbers_below_one():
    keys = np.array([0, 1, 2**64 - 1, 2**63], dtype=np.uint64)
    values = uniforms(keys, 1000)
    assert values.max() < 1.0
    assert values.max() > 0.999
    assert len(np.unique(values)) == 4000


@pytest.mark.parametrize(
    "shift", [(0, 1), (1, 0), (64, 0), (1, 1), (0, 7)], ids=["position", "sample", "prompt", "diagonal", "far position"]
)
def test_neighbours_are_uncorrelated(numbers, shift):
    down, right = shift
    one = numbers[: len(numbers) - down, : 64 - right].ravel()
    two = numbers[down:, right:].ravel()
    bound = 4 / len(one) ** 0.5
    assert abs(np.corrcoef(one, two)[0, 1]) < bound
    assert abs(np.corrcoef((one - 0.5) ** 2, (two - 0.5) ** 2)[0, 1]) < bound
    assert abs(np.corrcoef(np.floor(one * 1024) % 2, np.floor(two * 1024) % 2)[0, 1]) < bound


def test_every_position_and_every_sample_is_uniform_on_its_own(numbers):
    assert np.abs(numbers.mean(axis=0) - 0.5).max() < 4.5 * (1 / 12 / 4096) ** 0.5
    by_sample = numbers.reshape(64, 64, 64).mean(axis=(0, 2))
    assert np.abs(by_sample - 0.5).max() < 4.5 * (1 / 12 / 4096) ** 0.5


def test_every_part_of_the_key_matters():
    keys = np.concatenate(
        [
            row_keys(seed, stream, iteration, range(6), 5)
            for seed, stream, iteration in itertools.product((0, 1, 2, 2**40), (0, 1, 2, 3), (0, 1, 2, 3))
        ]
    )
    assert len(np.unique(keys)) == len(keys) == 64 * 30


@pytest.mark.parametrize("other", [(8, 0, 3), (7, 1, 3), (7, 0, 4), (0, 7, 3), (3, 0, 7)], ids=str)
def test_other_seed_stream_or_iteration_gives_uncorrelated_numbers(other):
    one = uniforms(row_keys(7, 0, 3, range(50), 8), 50).ravel()
    two = uniforms(row_keys(*other, range(50), 8), 50).ravel()
    assert abs(np.corrcoef(one, two)[0, 1]) < 4 / len(one) ** 0.5


def test_a_row_keeps_its_numbers_whichever_rows_are_drawn_with_it():
    together = row_keys(7, 0, 3, [4, 9, 2, 5], 3)
    ranks = [row_keys(7, 0, 3, [4, 2], 3), row_keys(7, 0, 3, [9, 5], 3)]
    assert together.reshape(4, 3)[[0, 2, 1, 3]].ravel().tolist() == np.concatenate(ranks).tolist()
    assert row_keys(7, 0, 3, [4, 9, 2, 5], 8).reshape(4, 8)[:, :3].ravel().tolist() == together.tolist()


def test_numbers_do_not_depend_on_how_many_positions_are_drawn():
    keys = row_keys(7, 0, 3, [4], 3)
    assert uniforms(keys, 5).tolist() == uniforms(keys, 9)[:, :5].tolist()


def test_inputs_are_left_unchanged():
    keys = row_keys(7, 0, 3, [4], 3)
    before = keys.copy()
    uniforms(keys, 5)
    mix(keys)
    assert keys.tolist() == before.tolist()
