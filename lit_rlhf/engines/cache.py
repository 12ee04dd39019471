"""Keys and values while decoding: each prompt's once for all of its completions, each completion's own beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Completion tokens in one block. A CPU reads memory at a third of its speed where it has to skip what is not filled
# yet, so there the blocks are small and always read whole.
BLOCK = {"cpu": 32}
BLOCK_ELSEWHERE = 256


@dataclass
class LayerCache:
    """Keys and values of one layer, of ``B`` groups and ``R`` rows; there may be room for more than are in use.

    Args:
        prompt_keys: ``(B, K, P, D)``, right-padded with zeros.
        prompt_values: ``(B, K, P, D)``.
        own_keys: Blocks ``(R, K, block, D)`` of the completions' tokens in order, zeros where none is yet.
        own_values: Blocks like these.
    """

    prompt_keys: Tensor
    prompt_values: Tensor
    own_keys: list[Tensor] = field(default_factory=list)
    own_values: list[Tensor] = field(default_factory=list)


class GroupCache:
    """Cache of the ``R`` rows of ``B`` groups, written in place.

    Args:
        prompt_lengths: ``B`` numbers of tokens.
        num_samples: Rows of each group at first, one group's together.
        device: Of all tensors.
    """

    def __init__(self, prompt_lengths: Sequence[int], num_samples: int, device: torch.device) -> None:
        self.prompt_lengths = torch.tensor(prompt_lengths, device=device)
        self.prompt_width = max(prompt_lengths)
        self.groups = torch.arange(len(prompt_lengths), device=device).repeat_interleave(num_samples)
        self.block = BLOCK.get(device.type, BLOCK_ELSEWHERE)
        self.layers: dict[int, LayerCache] = {}

    def write_prompts(
        self, layer: int, first: int, spans: Sequence[tuple[int, int]], key: Tensor, value: Tensor
    ) -> None:
        """Keep what a packed forward pass computed for some prompts.

        Args:
            layer: Its number.
            first: Number of the first of these prompts.
            spans: First place of each in the packed row, and the place after its last.
            key: ``(1, K, L, D)``.
            value: ``(1, K, L, D)``.
        """
        if layer not in self.layers:
            self.layers[layer] = self._allocate(key, value)
        kept = self.layers[layer]
        for group, (start, end) in enumerate(spans, start=first):
            kept.prompt_keys[group, :, : end - start] = key[0, :, start:end]
            kept.prompt_values[group, :, : end - start] = value[0, :, start:end]

    def append(self, layer: int, step: int, key: Tensor, value: Tensor) -> LayerCache:
        """Write the keys and values of every row's newest token.

        Args:
            layer: Its number.
            step: Number of that token in the completion.
            key: ``(R, K, 1, D)``.
            value: ``(R, K, 1, D)``.

        Returns:
            The layer, cut to the groups and rows in use.
        """
        kept = self.layers[layer]
        rows, groups = len(self.groups), len(self.prompt_lengths)
        for blocks, newest in ((kept.own_keys, key), (kept.own_values, value)):
            if step == len(blocks) * self.block:
                blocks.append(newest.new_zeros(rows, newest.shape[1], self.block, newest.shape[3]))
            blocks[-1][:rows, :, step % self.block] = newest[:, :, 0]
        return LayerCache(
            kept.prompt_keys[:groups],
            kept.prompt_values[:groups],
            [block[:rows] for block in kept.own_keys],
            [block[:rows] for block in kept.own_values],
        )

    def keep(self, order: Tensor) -> None:
        """Drop rows, and prompts of which no row is left; only what fills a gap is moved.

        Args:
            order: ``(R',)`` the row that each place holds from now on, as :func:`fill_gaps` gives it.
        """
        groups = self.groups[order]
        used = torch.zeros_like(self.prompt_lengths, dtype=torch.bool).index_fill_(0, groups, True)
        group_order = fill_gaps(used)
        for layer in self.layers.values():
            for block in (*layer.own_keys, *layer.own_values):
                _move(block, order)
            for tensor in (layer.prompt_keys, layer.prompt_values):
                _move(tensor, group_order)
        places = torch.empty_like(self.prompt_lengths)
        places[group_order] = torch.arange(len(group_order), device=places.device)
        self.groups = places[groups]
        self.prompt_lengths = self.prompt_lengths[group_order]

    def _allocate(self, key: Tensor, value: Tensor) -> LayerCache:
        groups = len(self.prompt_lengths)
        # Zeros, since through a masked weight of 0 a NaN would still come.
        keys, values = (
            tensor.new_zeros(groups, tensor.shape[1], self.prompt_width, tensor.shape[3]) for tensor in (key, value)
        )
        return LayerCache(keys, values)


def fill_gaps(alive: Tensor) -> Tensor:
    """An order of the living that moves as few as possible: the last ones take the places of the dead.

    Args:
        alive: ``(R,)`` bool.

    Returns:
        ``(R',)`` int64: place ``i`` is to hold what place ``order[i]`` held.

    >>> fill_gaps(torch.tensor([True, False, True, True])).tolist()
    [0, 3, 2]
    """
    places = alive.nonzero()[:, 0]
    order = torch.arange(len(places), device=alive.device)
    gaps = (~alive[: len(places)]).nonzero()[:, 0]
    order[gaps] = places[len(places) - len(gaps) :]
    return order


def _move(tensor: Tensor, order: Tensor) -> None:
    """Reorder the first entries of a tensor in place, copying only those that change place."""
    gaps = (order != torch.arange(len(order), device=order.device)).nonzero()[:, 0]
    if len(gaps):
        tensor.index_copy_(0, gaps, tensor.index_select(0, order[gaps]))
