"""Padded rows as one packed row: each prompt once, its completions after it, nothing between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lit_rlhf.models.attention import layout_inputs
from lit_rlhf.models.completions import CompletionRows
from lit_rlhf.models.segments import Group, SharedPromptLayout


@dataclass(frozen=True)
class PackedRows:
    """Rows packed into ``L`` tokens, of which ``M`` are completion tokens.

    Args:
        input_ids: ``(1, L)``.
        positions: ``(1, L)`` of each token in its own sequence.
        layout: Attention between them.
        before: ``(M,)`` place in the packed row of the token before each completion token: its output predicts it.
        after: ``(N,)`` place of each row's last token.
    """

    input_ids: Tensor
    positions: Tensor
    layout: SharedPromptLayout
    before: Tensor
    after: Tensor

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the backbone's forward pass."""
        options = {"input_ids": self.input_ids, "position_ids": self.positions, "use_cache": False}
        return {**options, **layout_inputs(self.layout, self.input_ids)}


def pack(rows: CompletionRows) -> PackedRows:
    """Pack rows so that neighbours of one group share their prompt.

    Args:
        rows: To pack; a row without completion tokens still has its prompt run.
    """
    device = rows.completion_ids.device
    prompt_width, width = rows.prompt_ids.shape[1], rows.completion_ids.shape[1]
    groups, first_rows = _groups(rows)
    layout = SharedPromptLayout(groups)
    offsets = []  # from a place in the packed row to that in the flattened padded rows
    for group, first in zip(groups, first_rows, strict=True):
        offsets.append(first * (prompt_width + width) + prompt_width - group.prompt[1])
        for row, (start, _) in enumerate(group.completions, start=first):
            offsets.append(row * (prompt_width + width) + prompt_width - start)
    ids = torch.tensor(offsets).repeat_interleave(layout.lengths) + torch.arange(len(layout.positions))
    places = [row for group in groups for row in _before_and_after(group)]
    padded = torch.cat([rows.prompt_ids, rows.completion_ids], dim=1).flatten()
    return PackedRows(
        input_ids=padded[ids.to(device)][None],
        positions=layout.positions.to(device)[None],
        layout=layout,
        before=torch.tensor([place for row in places for place in row[:-1]], dtype=torch.long, device=device),
        after=torch.tensor([row[-1] for row in places], dtype=torch.long, device=device),
    )


def _groups(rows: CompletionRows) -> tuple[list[Group], list[int]]:
    """Places of all groups in the packed row, and the first row of each."""
    prompts, completions = rows.prompt_lengths.tolist(), rows.completion_lengths.tolist()
    numbers = rows.group_index.tolist()
    groups, first_rows = [], []
    place = row = 0
    while row < len(prompts):
        first, prompt = row, (place, place + prompts[row])
        place = prompt[1]
        spans = []
        while row < len(prompts) and numbers[row] == numbers[first]:
            spans.append((place, place + completions[row]))
            place += completions[row]
            row += 1
        groups.append(Group(prompt, tuple(spans)))
        first_rows.append(first)
    return groups, first_rows


def _before_and_after(group: Group) -> Iterator[list[int]]:
    """For each row: the places whose outputs predict its tokens, then the place of its last token."""
    for start, end in group.completions:
        yield [group.prompt[1] - 1, *range(start, end)]
