"""Arms that differ in nothing but the size of their groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lit_rlhf.report.comparison import Arm, Comparison

_SIZE = "data.init_args.group_size"
# What has to differ with the size, where a budget is kept, and what says only where things are written.
_FREE = (
    _SIZE,
    "data.init_args.prompts_per_iteration",
    "data.init_args.steps_per_pass",
    "data.init_args.micro_batch_size",
    "trainer.max_epochs",
    "trainer.default_root_dir",
    "seed_everything",
    "ckpt_path",
)
_PLACES = ("save_dir", "dirpath", "name", "version")


@dataclass(frozen=True)
class GroupSizes:
    """Arms that are alike otherwise.

    Args:
        arms: Size and arm, ascending; at least two sizes.
    """

    arms: tuple[tuple[int, Arm], ...]


def find_group_sizes(comparison: Comparison) -> GroupSizes | None:
    """The largest set of arms with group baselines whose recipes differ in their group size only.

    Args:
        comparison: With its runs.
    """
    alike: dict[frozenset[tuple[str, str]], list[tuple[int, Arm]]] = {}
    for arm in comparison.arms:
        run = arm.counted[0].run if arm.counted else None
        if run is not None and run.group_size is not None and not run.has_critic:
            options = frozenset((name, repr(value)) for name, value in _flat(run.config) if _counts(name))
            alike.setdefault(options, []).append((run.group_size, arm))
    chosen = max(alike.values(), key=lambda arms: len({size for size, _ in arms}), default=[])
    if len({size for size, _ in chosen}) < 2:
        return None
    return GroupSizes(tuple(sorted(chosen, key=lambda pair: pair[0])))


def _counts(name: str) -> bool:
    return name not in _FREE and name.rpartition(".")[2] not in _PLACES


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _flat(part, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from _flat(part, f"{name}.{place}")
    else:
        yield name, value
