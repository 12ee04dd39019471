"""Copies inside a group and repetition inside a completion, against counting them."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from lit_rlhf.functional.diversity import group_copies, repeated_ngrams

GENERATOR = torch.Generator().manual_seed(3)
IDS = torch.randint(0, 3, (40, 7), generator=GENERATOR)
LENGTHS = torch.randint(0, 8, (40,), generator=GENERATOR)
GROUPS = torch.randint(0, 6, (40,), generator=GENERATOR)


def counted_copies(ids, lengths, groups):
    rows = [
        (group, *row[:length])
        for row, length, group in zip(ids.tolist(), lengths.tolist(), groups.tolist(), strict=True)
    ]
    pairs = (
        [n * (n - 1) // 2 for n in Counter(rows).values()],
        [n * (n - 1) // 2 for n in Counter(groups.tolist()).values()],
    )
    return [len(set(rows)), sum(pairs[0]), sum(pairs[1])]


def test_copies_equal_counting_them():
    assert [int(count) for count in group_copies(IDS, LENGTHS, GROUPS)] == counted_copies(IDS, LENGTHS, GROUPS)


def test_padding_and_order_do_not_count():
    order = torch.randperm(40, generator=GENERATOR)
    padded = torch.where(torch.arange(7) < LENGTHS[:, None], IDS, 99)
    wider = torch.nn.functional.pad(padded, (0, 4), value=5)
    expected = counted_copies(IDS, LENGTHS, GROUPS)
    assert [int(count) for count in group_copies(wider[order], LENGTHS[order], GROUPS[order])] == expected
    assert repeated_ngrams(wider, LENGTHS)[0].equal(repeated_ngrams(IDS, LENGTHS)[0])


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 9])
def test_repetition_equals_counting_it(n):
    repeated, total = repeated_ngrams(IDS, LENGTHS, n)
    for row, length, some, all_ in zip(IDS.tolist(), LENGTHS.tolist(), repeated.tolist(), total.tolist(), strict=True):
        runs = [tuple(row[start : start + n]) for start in range(length - n + 1)]
        assert (some, all_) == (len(runs) - len(set(runs)), len(runs))


def test_ids_of_a_large_vocabulary_are_told_apart():
    ids = torch.arange(300_000).reshape(-1, 2)
    zeros = torch.zeros(len(ids), dtype=torch.long)
    distinct, same, pairs = group_copies(ids, zeros + 2, zeros)
    assert (int(distinct), int(same)) == (150_000, 0)
    assert int(pairs) == 150_000 * 149_999 // 2


def test_nothing_to_count():
    empty = torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, dtype=torch.long)
    assert [int(count) for count in group_copies(*empty, empty[1])] == [0, 0, 0]
    assert [part.tolist() for part in repeated_ngrams(*empty)] == [[], []]
