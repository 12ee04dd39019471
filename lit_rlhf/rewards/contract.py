"""What a reward function may return, checked: N numbers, or N lists with a number for each token."""

from __future__ import annotations

import logging
import math
import numbers
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lit_rlhf.errors import RewardError

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 3.4028234663852886e38  # of float32
_LOG = logging.getLogger("lit_rlhf.rewards.protocol")


@dataclass
class RewardOutput:
    """What a reward function may return in place of a list: rewards, and more numbers for the log.

    Attributes:
        rewards: N rewards, as a function returns them otherwise.
        extras: N numbers by name, ``None`` where there is none. They are logged as ``reward/<function>/<name>`` and
            are no part of the reward.
    """

    rewards: Any
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass
class RewardValues:
    """What one reward function gave N completions.

    Attributes:
        totals: N numbers, NaN where it abstained; the sum where it gave rewards of single tokens.
        per_token: N lists with one number per completion token, ``None`` where it gave a single number.
        extras: N further numbers by name, NaN where there is none.
    """

    totals: list[float]
    per_token: list[list[float] | None]
    extras: dict[str, list[float]] = field(default_factory=dict)

    def tensor(self) -> Tensor:
        """``totals`` as (N,) float32."""
        import torch

        return torch.tensor(self.totals, dtype=torch.float32)


def checked(returned: Any, completion_ids: Sequence[Sequence[int]], name: str, first_row: int = 0) -> RewardValues:
    """Rewards of N completions, or a RewardError that says what was wrong.

    Args:
        returned: By the function.
        completion_ids: N lists of token ids: what a list of token rewards must be as long as.
        name: Of the function.
        first_row: Number of the first row in messages.
    """
    count = len(completion_ids)
    if isinstance(returned, RewardOutput):
        result = checked(returned.rewards, completion_ids, name, first_row)
        result.extras = {key: checked_extra(values, count, name, key) for key, values in returned.extras.items()}
        return result
    values = _as_list(returned, count, name)
    if len(values) != count:
        raise RewardError(f"`{name}`: expected {count} rewards, got {len(values)}")
    result = RewardValues([], [])
    not_numbers = []
    for row, (value, ids) in enumerate(zip(values, completion_ids, strict=True), first_row):
        tokens = _as_tokens(value, name, row, len(ids))
        if tokens is not None:
            result.totals.append(math.fsum(tokens))
            result.per_token.append(tokens)
            continue
        number = _finite(_as_number(value, name, row), f"`{name}`: reward of row {row}")
        if number is not None and math.isnan(number):
            not_numbers.append(row)
        result.totals.append(math.nan if number is None else number)
        result.per_token.append(None)
    if not_numbers:
        rows = ", ".join(map(str, not_numbers[:5])) + (", ..." if len(not_numbers) > 5 else "")
        _LOG.warning("`%s`: reward of row %s is NaN and counts as missing; return None to abstain.", name, rows)
    return result


def checked_extra(values: Any, count: int, name: str, key: str) -> list[float]:
    """N numbers for the log, NaN where there is none.

    Args:
        values: N numbers, or one for all rows.
        count: N.
        name: Of the function.
        key: Of the value.

    Raises:
        RewardError: The values are neither.
    """
    if isinstance(values, (bool, numbers.Real)):
        values = [values] * count
    what = f"{name}: extra value {key}"
    listed = _as_list(values, count, what)
    if len(listed) != count:
        raise RewardError(f"`{what}`: expected {count} values, got {len(listed)}")
    found = [_as_number(value, what, row) for row, value in enumerate(listed)]
    return [math.nan if value is None or not math.isfinite(value) else value for value in found]


def _as_tokens(value: Any, name: str, row: int, length: int) -> list[float] | None:
    """Rewards of single tokens; ``None`` if the value is no list. A token without an opinion (``None``) has 0."""
    if hasattr(value, "tolist") and getattr(value, "ndim", 0) == 1:
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return None
    if len(value) != length:
        raise RewardError(
            f"`{name}`: row {row} has {len(value)} token rewards, but the completion has {length} tokens; "
            "give one number per completion, or one per completion token (0 or None between steps)"
        )
    what = f"`{name}`: reward of a token of row {row}"
    tokens = [_finite(_as_number(token, name, row), what) for token in value]
    return [0.0 if token is None or math.isnan(token) else token for token in tokens]


def _finite(number: float | None, what: str) -> float | None:
    if number is not None and (math.isinf(number) or abs(number) > _LARGEST):
        raise RewardError(f"{what} is {number}; return None where there is no value.")
    return number


def _as_list(returned: Any, count: int, name: str) -> list[Any]:
    if isinstance(returned, (list, tuple)):
        return list(returned)
    if _is_tensor(returned) or type(returned).__module__ == "numpy":
        shape = tuple(getattr(returned, "shape", ()))
        if shape == (count, 1) or len(shape) == 1:
            array = returned.detach().cpu() if _is_tensor(returned) else returned
            return list(array.reshape(-1).tolist())
        raise RewardError(f"`{name}`: expected {count} rewards, got an array of shape {shape}")
    raise RewardError(
        f"`{name}`: expected a list of {count} rewards, got {type(returned).__name__}"
        + (f" {returned!r}" if isinstance(returned, (int, float)) else "")
    )


def _as_number(value: Any, name: str, row: int) -> float | None:
    if value is None:
        return None
    if _is_tensor(value) and value.dim() == 0 and not value.is_complex():
        return float(value.detach())
    if isinstance(value, (bool, numbers.Real)):
        try:
            return float(value)
        except OverflowError:
            return math.inf  # an integer or fraction beyond the range of floats, refused below
    # numpy.bool_ and 0-d arrays are not registered as numbers
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () and value.dtype.kind in "biuf":
        return float(value)
    if isinstance(value, (list, tuple)) or getattr(value, "shape", ()) != ():
        raise RewardError(f"`{name}`: reward of row {row} is a {type(value).__name__} where a number is needed.")
    shown = f" {value!r}" if isinstance(value, str) and len(value) <= 40 else ""
    raise RewardError(f"`{name}`: reward of row {row} is of type {type(value).__name__}{shown}; a number is needed.")


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # not imported for it: a worker process of a plain function starts without
    return torch is not None and isinstance(value, torch.Tensor)
