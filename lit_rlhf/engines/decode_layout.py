"""Attention of a decoding step in which the rows of a group share their prompt.

All rows of a group read their prompt's keys in one matrix product, each row reads its own; one softmax over both parts
makes it exact.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lit_rlhf.engines.cache import GroupCache, LayerCache
from lit_rlhf.models.attention import Scores

# Completion tokens are read in multiples of this.
READ = 32


class DecodeLayout:
    """Attention of one new token per row over its prompt and its completion so far.

    Args:
        cache: Holds them; the new token's keys and values are written to it.
    """

    def __init__(self, cache: GroupCache) -> None:
        self.cache = cache
        self.step = 0
        self._places: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._seen: dict[int | None, tuple[slice, Tensor | None]] = {}
        self.regroup()

    def advance(self) -> None:
        """Go on to the next token."""
        self.step += 1
        for window in [window for window in self._seen if window is not None]:
            del self._seen[window]  # it moves with every token

    def regroup(self) -> None:
        """Arrange the rows by group, after some have left."""
        groups = self.cache.groups
        sizes = torch.bincount(groups)
        order = groups.argsort(stable=True)
        self.rank = torch.empty_like(groups)  # of each row in its group
        self.rank[order] = torch.arange(len(groups), device=groups.device) - (sizes.cumsum(0) - sizes)[groups[order]]
        self.slots = int(sizes.max())
        lengths = self.cache.prompt_lengths
        self.shortest, self.longest = int(lengths.min()), int(lengths.max())
        self._places.clear()
        self._seen.clear()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        """See :class:`~lit_rlhf.models.attention.AttentionLayout`; ``L`` is 1."""
        (rows, heads, _, dim), shared = query.shape, key.shape[1]
        kept = self.cache.append(layer, self.step, key, value)
        to_slots, to_rows = self._arrangement(shared, heads // shared)
        seen, mask = self._seen_prompt(scores.sliding_window)
        prompt_keys = kept.prompt_keys[:, :, seen].flatten(0, 1)
        prompt_values = kept.prompt_values[:, :, seen].flatten(0, 1)
        own_keys, own_values, hidden = self._seen_own(kept, scores.sliding_window)

        def by_group(values: Tensor) -> Tensor:
            return values.index_select(0, to_slots).view(prompt_keys.shape[0], -1, values.shape[-1])

        def by_row(values: Tensor) -> Tensor:
            return values.view(-1, values.shape[-1]).index_select(0, to_rows)

        def capped(products: Tensor) -> Tensor:
            return products if scores.softcap is None else products.div_(scores.softcap).tanh_().mul_(scores.softcap)

        query = (query * scores.scaling).reshape(rows * heads, dim)
        of_prompt = capped(torch.bmm(by_group(query), prompt_keys.transpose(1, 2)))
        if mask is not None:
            of_prompt.view(mask.shape[0], -1, mask.shape[-1]).add_(mask)
        query = query.view(rows * shared, -1, dim)
        of_own = [capped(torch.bmm(query, keys.transpose(1, 2))).view(rows * heads, -1) for keys in own_keys]
        for block, places in hidden:
            of_own[block][:, places] = -torch.inf
        weights = torch.cat([by_row(of_prompt), *of_own], dim=1).softmax(dim=-1, dtype=torch.float32).to(value.dtype)

        on_prompt, *on_own = weights.split([part.shape[-1] for part in (of_prompt, *of_own)], dim=1)
        out = by_row(torch.bmm(by_group(on_prompt), prompt_values)).view(rows * shared, -1, value.shape[-1])
        for block_weights, values in zip(on_own, own_values, strict=True):
            out.baddbmm_(block_weights.view(rows * shared, -1, values.shape[1]), values)
        return out.view(rows, 1, heads, -1)

    def _seen_own(
        self, kept: LayerCache, window: int | None
    ) -> tuple[list[Tensor], list[Tensor], list[tuple[int, slice]]]:
        """Blocks ``(R * K, T, D)`` of keys and of values, and which places of which block are not seen."""
        block = self.cache.block
        start = 0 if window is None else max(0, self.step + 1 - window)
        first, end = start // block, self.step % block + 1  # the block it begins in, and where it ends in the last
        width = min(-(-end // READ) * READ, block)  # on a CPU a whole block
        keys, values = (
            [tensor.flatten(0, 1) for tensor in (*blocks[first:-1], blocks[-1][:, :, :width])]
            for blocks in (kept.own_keys, kept.own_values)
        )
        hidden = [(0, slice(0, start % block)), (len(keys) - 1, slice(end, width))]
        return keys, values, [(index, places) for index, places in hidden if places.start < places.stop]

    def _arrangement(self, shared: int, repeats: int) -> tuple[Tensor, Tensor]:
        """Between ``(R, K, H / K)`` and ``(B, K, S, H / K)``, ``S`` the rows of the largest group: what to take where.

        All queries that read one key head of a group stand together. Slots that no row fills repeat the first row.
        """
        if (shared, repeats) not in self._places:
            groups, device = self.cache.groups, self.cache.groups.device
            of_slot = torch.zeros(len(self.cache.prompt_lengths), self.slots, dtype=torch.long, device=device)
            of_slot[groups, self.rank] = torch.arange(len(groups), device=device)
            head = torch.arange(shared, device=device)[:, None]
            repeat = torch.arange(repeats, device=device)
            to_slots = (of_slot[:, None, :, None] * shared + head[..., None]) * repeats + repeat
            of_row = (groups[:, None] * shared + head.T) * self.slots + self.rank[:, None]
            to_rows = of_row[..., None] * repeats + repeat
            self._places[shared, repeats] = to_slots.flatten(), to_rows.flatten()
        return self._places[shared, repeats]

    def _seen_prompt(self, window: int | None) -> tuple[slice, Tensor | None]:
        """Prompt places that any row sees, and what hides the others: 0 or minus infinity to add, ``(B, 1, P)``."""
        if window is not None and self.longest + self.step < window:
            window = None
        if window not in self._seen:
            lengths = self.cache.prompt_lengths[:, None]
            # The first token that the newest one of a prompt's rows sees; negative where it sees all of them.
            starts = lengths * 0 if window is None else lengths + (self.step + 1 - window)
            start = 0 if window is None else max(0, self.shortest + self.step + 1 - window)
            seen = slice(min(start, self.longest - 1), self.longest)  # one place at least, be it hidden from all
            mask = None
            if window is not None or self.shortest < self.longest:
                places = torch.arange(seen.start, seen.stop, device=lengths.device)
                hidden = (places < starts) | (places >= lengths)
                mask = torch.zeros(hidden.shape, device=lengths.device).masked_fill_(hidden, -torch.inf)[:, None]
            self._seen[window] = seen, mask
        return self._seen[window]
