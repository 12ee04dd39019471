"""The recipes of the arms: what they share, what each changes, and what none may change."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lit_rlhf.errors import ConfigurationError

# How a rollout is cut into optimizer steps is part of an algorithm; prompts, rewards and sampling are not.
_OF_THE_ALGORITHM = (
    "prompts_per_iteration",
    "group_size",
    "passes",
    "steps_per_pass",
    "micro_batch_tokens",
    "micro_batch_size",
)
_MACHINE = ("accelerator", "devices", "num_nodes", "strategy", "precision")


@dataclass(frozen=True)
class ArmRecipe:
    """What is run for one arm.

    Args:
        name: As in the recipe; the arm's folder.
        title: As it is shown.
        recipe: For ``lit-rlhf fit``, but for what :class:`~lit_rlhf.compare.ComparisonRuns` adds to it.
    """

    name: str
    title: str
    recipe: dict[str, Any]


def arm_recipes(
    shared: str | Sequence[str] | Mapping[str, Any],
    arms: Mapping[str, str | Mapping[str, Any] | None],
    may_differ: Sequence[str] = (),
) -> list[ArmRecipe]:
    """Layer each arm over what all share, and make sure that they differ in nothing else than how they learn.

    Mappings are merged key by key; lists and values replace what stood there.

    Args:
        shared: A recipe, or paths of recipes that are layered.
        arms: By name, what it changes: a recipe's ``model``, ``data`` and ``trainer``, and a ``title``; or a recipe's
            path.
        may_differ: Options, such as ``data.init_args.temperature``, in which arms may differ all the same.

    Raises:
        ConfigurationError: No arm, a bad name or file, or arms that differ in prompts, rewards, sampling, base model
            or machine.
    """
    if not arms:
        raise ConfigurationError("arms: name at least one arm to run")
    base: dict[str, Any] = {}
    for part in [shared] if isinstance(shared, str | Mapping) else shared:
        base = merge(base, _content(part, "recipe"))
    made = []
    for name, changes in arms.items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigurationError(f"arms: {name!r} names a folder; use letters, digits, '-', '_' and '.'")
        content = dict(_content({} if changes is None else changes, f"arms.{name}"))
        title = str(content.pop("title", name))
        for key in content:
            if key not in ("model", "data", "trainer"):
                raise ConfigurationError(f"arms.{name} has no option {key!r}; it has title, model, data and trainer")
        made.append(ArmRecipe(name, title, merge(base, content)))
    for other in made[1:]:
        for option, (mine, theirs) in _differences(made[0].recipe, other.recipe):
            if option not in may_differ:
                raise ConfigurationError(
                    f"arms.{made[0].name} and arms.{other.name} differ in {option} ({mine!r} and {theirs!r}), "
                    "which the arms of a comparison share; set it in recipe:, or name it in may_differ:"
                )
    return made


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of one recipe with another layered over it.

    Args:
        below: What is kept where the other says nothing.
        above: What wins.

    >>> merge({"a": {"x": 1, "y": [1]}, "b": 2}, {"a": {"y": [3]}})
    {'a': {'x': 1, 'y': [3]}, 'b': 2}
    """
    merged = copy.deepcopy(dict(below))
    for key, value in above.items():
        here = merged.get(key)
        both = isinstance(here, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(here, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    # A class comes before its options: the parser of recipes reads them in this order.
    return {key: merged[key] for key in sorted(merged, key=lambda key: key != "class_path")}


def _content(part: str | Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if isinstance(part, Mapping):
        return part
    try:
        content = yaml.safe_load(Path(part).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{where}: {part}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{where}: {part}: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{where}: {part} is no recipe: it has no model:, data: and trainer:")
    content.pop("seed_everything", None)  # the comparison's seeds take its place
    return content


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """What two arms must share and do not."""
    sides = [_fixed(recipe) for recipe in (one, other)]
    for option in dict.fromkeys([*sides[0], *sides[1]]):
        mine, theirs = (side.get(option) for side in sides)
        if mine != theirs:
            yield option, (mine, theirs)


def _fixed(recipe: Mapping[str, Any]) -> dict[str, Any]:
    model, data, trainer = (recipe.get(key) or {} for key in ("model", "data", "trainer"))
    fixed = {"model.init_args.policy": (model.get("init_args") or {}).get("policy")}
    fixed["data.class_path"] = data.get("class_path")
    for name, value in (data.get("init_args") or {}).items():
        if name not in _OF_THE_ALGORITHM:
            fixed[f"data.init_args.{name}"] = value
    fixed.update({f"trainer.{name}": trainer[name] for name in _MACHINE if name in trainer})
    return fixed
