"""Random numbers that belong to a row, not to a process.

A row's key comes from (seed, stream, iteration, prompt, sample), its uniform numbers from the key and the position.
So a resumed run samples what the uninterrupted one would have, and one process samples what two do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: np.ndarray) -> np.ndarray:
    """Finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection whose output bits look independent.

    Args:
        values: uint64, any shape.
    """
    with np.errstate(over="ignore"):
        z = values.astype(np.uint64) + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def row_keys(seed: int, stream: int, iteration: int, prompt_index: Sequence[int], num_samples: int) -> np.ndarray:
    """Keys of ``num_samples`` rows for each prompt, the rows of one prompt together.

    Args:
        seed: Of the run.
        stream: Separates uses that must not share numbers (training, validation, redraws).
        iteration: Of the run, from 0.
        prompt_index: ``B`` places in the data source, the same on any number of ranks.
        num_samples: ``G``.

    Returns:
        ``(B * G,)`` uint64.

    >>> one, two = row_keys(7, 0, 3, [5, 9], 2), row_keys(7, 0, 3, [9], 2)
    >>> bool((one[2:] == two).all())
    True
    """
    base = np.uint64(0)
    for part in (seed, stream, iteration):
        base = mix(np.uint64(base) ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    prompts = mix(base ^ np.asarray(prompt_index, dtype=np.uint64).reshape(-1, 1))
    samples = np.arange(num_samples, dtype=np.uint64).reshape(1, -1)
    return mix(prompts ^ samples).reshape(-1)


def uniforms(keys: np.ndarray, num_positions: int) -> np.ndarray:
    """Uniform numbers in ``[0, 1)`` for each row and position.

    Args:
        keys: ``(N,)`` uint64.
        num_positions: ``T``.

    Returns:
        ``(N, T)`` float64.
    """
    return uniforms_at(keys.reshape(-1, 1), np.arange(num_positions, dtype=np.uint64).reshape(1, -1))


def uniforms_at(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniform numbers in ``[0, 1)``, each of a row and a position of its own.

    Args:
        keys: uint64, any shape.
        positions: uint64, of a shape that goes with it.

    Returns:
        float64.
    """
    bits = mix(keys ^ mix(positions))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
