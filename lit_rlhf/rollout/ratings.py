"""People's ratings of held-out completions, joined by prompt and completion text."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lit_rlhf.data.rows import Rows, read_rows
from lit_rlhf.errors import DataError
from lit_rlhf.rewards.messages import completion_text, prompt_text

if TYPE_CHECKING:
    from lit_rlhf.data.prompts import PromptDataset
    from lit_rlhf.rollout.evaluation import Evaluated

_log = logging.getLogger(__name__)

_Key = tuple[str, int, str]  # name of the set, place of the prompt in it, completion


@dataclass(frozen=True)
class Ratings:
    """Ratings of completions that may be sampled again.

    Args:
        by_completion: Every rating of a completion of a prompt of a set.
        total: Ratings read, those of unknown prompts among them.
    """

    by_completion: Mapping[_Key, tuple[float, ...]]
    total: int

    def join(self, evaluated: Evaluated) -> tuple[Tensor, Tensor, Tensor]:
        """Completions of a batch that have a rating, each text of a prompt once.

        Args:
            evaluated: Prompts with their completions and the verifier's scores.

        Returns:
            Mean rating, mean score of the verifier (NaN where it abstained) and number of ratings, each ``(K,)``.
        """
        scores: dict[_Key, list[float]] = {}
        for judged in (evaluated.greedy, evaluated.sampled):
            if judged is None:
                continue
            places, rollout = judged.rollout.prompt_index.tolist(), judged.rollout
            for place, text, score in zip(places, rollout.completions, judged.scores.flatten().tolist(), strict=True):
                key = (evaluated.batch.set_name, place, text)
                if key in self.by_completion:
                    scores.setdefault(key, []).append(score)
        rows = [
            (sum(given) / len(given), sum(scores[key]) / len(scores[key]), len(given))
            for key, given in ((key, self.by_completion[key]) for key in scores)
        ]
        ratings, judged_scores, numbers = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).unbind(dim=1)
        return ratings, judged_scores, numbers


def load_ratings(source: Any, sets: Mapping[str, PromptDataset]) -> Ratings:
    """Read ratings; say how many have no rating yet, or a prompt that is not held out here.

    Args:
        source: Rows with ``rating`` (a number), ``completion``, and ``prompt`` or ``prompt_index``; ``set`` where there
            are several sets. Or an evaluation file of :class:`~lit_rlhf.callbacks.EvaluationWriter` with a ``rating``
            added to the completions in it. Anything that :func:`~lit_rlhf.data.rows.read_rows` reads.
        sets: Held-out prompts by the name of their set; one without a name has the empty one.

    Raises:
        DataError: A row lacks what is needed, or names no set where there are several. The message names the row.
    """
    rows = read_rows(source)
    by_text = {name: _first_places(prompts) for name, prompts in sets.items()}
    by_index = {name: {prompt.index for prompt in prompts.prompts} for name, prompts in sets.items()}
    found: dict[_Key, tuple[float, ...]] = {}
    total = unknown = unrated = 0
    for number, row in _flat(rows):
        rating = _rating(rows, number, row)
        if rating is None:
            unrated += 1
            continue
        total += 1
        name = _set_of(rows, number, row, list(sets))
        place = _place(rows, number, row, by_text[name])
        if place not in by_index[name]:
            unknown += 1
            continue
        if row.get("completion") is None:
            raise DataError(f"{rows.where(number)}: a rating needs the completion that was rated, column `completion`")
        key = (name, place, completion_text(row["completion"]))
        found[key] = (*found.get(key, ()), rating)
    if not total:
        raise DataError(f"{rows.name}: no row has a number in the column `rating`")
    said = [(unknown, f"of {total} ratings are of prompts that are not held out here"), (unrated, "have no rating yet")]
    for count, what in said:
        if count:
            from lightning.pytorch.utilities.rank_zero import rank_zero_only  # heavy: it brings the Trainer along

            rank_zero_only(_log.warning)("%s: %d %s", rows.name, count, what)
    return Ratings(found, total)


def _flat(rows: Rows) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """One mapping per completion with the number of its row; of an evaluation file only those with a rating."""
    for number, row in enumerate(rows.rows):
        if "greedy" not in row and "samples" not in row:
            yield number, row
            continue
        for completion in (row.get("greedy"), *(row.get("samples") or ())):
            if isinstance(completion, Mapping) and completion.get("rating") is not None:
                yield number, {**row, **completion}


def _rating(rows: Rows, number: int, row: Mapping[str, Any]) -> float | None:
    value = row.get("rating")
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        rating = float(value)
    except (TypeError, ValueError):
        rating = math.nan
    if not math.isfinite(rating):
        raise DataError(f"{rows.where(number)}: a rating is a number, got {value!r}")
    return rating


def _set_of(rows: Rows, number: int, row: Mapping[str, Any], names: list[str]) -> str:
    if names == [""]:
        return ""
    name = row.get("set") or (names[0] if len(names) == 1 else None)
    if name not in names:
        raise DataError(f"{rows.where(number)}: column `set` must name one of {', '.join(names)}, got {name!r}")
    return str(name)


def _place(rows: Rows, number: int, row: Mapping[str, Any], by_text: Mapping[str, int]) -> int:
    """Of the prompt in its source; -1 where it is not there."""
    index = row.get("prompt_index")
    if index is not None and index != "":
        try:
            return int(index)
        except (TypeError, ValueError):
            raise DataError(f"{rows.where(number)}: prompt_index is a whole number, got {index!r}") from None
    if row.get("prompt") is None:
        raise DataError(f"{rows.where(number)}: a rating needs `prompt` or `prompt_index`")
    return by_text.get(prompt_text(row["prompt"]), -1)


def _first_places(prompts: PromptDataset) -> dict[str, int]:
    places: dict[str, int] = {}
    for prompt in prompts.prompts:
        places.setdefault(prompt_text(prompt.text), prompt.index)
    return places
