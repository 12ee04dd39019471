"""The quantities of a report, and how they are come by."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial

from lit_rlhf.report import finders
from lit_rlhf.report.comparison import Comparison
from lit_rlhf.report.finders import BOUNDS
from lit_rlhf.report.quantity import ANY, POSITIVE, SHARE, Quantity
from lit_rlhf.report.runs import Run

# Metric of an evaluation: title, whether higher is better, range, unit, explanation.
_HELD_OUT = {
    "accuracy": ("greedy accuracy", True, SHARE, "", "greedy completions that the verifier finds right"),
    "verifier": ("verifier score", True, ANY, "", "mean score of the verifier, which training does not see"),
    "sampled_accuracy": ("sampled accuracy", True, SHARE, "", "sampled completions that the verifier finds right"),
    "pass": ("pass@{k}", True, SHARE, "", "chance that one of {k} sampled completions is right, unbiased"),
    "maj": ("majority vote of {k}", True, SHARE, "", "prompts whose most frequent answer is right"),
    "reward": ("held-out reward", True, ANY, "", "task reward of the completions: what training pays for"),
    "completion_length": ("length", None, POSITIVE, "tokens", "mean length of the completions"),
    "truncated": ("truncated share", False, SHARE, "", "completions that were cut"),
}
_HELD_OUT_NAME = re.compile(r"(?P<stage>val|test)/(?:(?P<set>.+)/)?(?P<kind>[^/@]+)(?:@(?P<k>.*))?")
_AT_END = "mean over the last tenth of the iterations"


def quantities(comparison: Comparison, target: float | None) -> list[Quantity]:
    """All quantities that any of the runs has, section by section.

    Args:
        comparison: With its runs.
        target: Accuracy for the cost of reaching it; ``None`` leaves it out.
    """
    runs = [run.run for arm in comparison.arms for run in arm.counted if run.run is not None]
    found = [*_held_out(runs), *_training(), *_groups(), *_critic(), *_cost(target), *_time(target)]
    return [quantity for quantity in found if any(quantity.find(run) is not None for run in runs)]


def _held_out(runs: Iterable[Run]) -> list[Quantity]:
    """Whatever the evaluations logged; a metric that bounds another one is part of that."""
    names = {name for run in runs for name in run.series if name.startswith(("val/", "test/"))}
    shown = [name for name in names if not (name.endswith(BOUNDS) and name.rpartition("_")[0] in names)]
    return [_held_out_quantity(name) for name in sorted(shown, key=_order)]


def _held_out_quantity(name: str) -> Quantity:
    stage, dataset, kind, k = _parts(name)
    known = _HELD_OUT.get(kind, (kind.replace("_", " ") + "@{k}" * bool(k), None, ANY, "", f"metric {name}"))
    title, better, within, unit, explanation = known
    title = title.format(k=k) + (f", {dataset}" if dataset else "") + (" (test)" if stage == "test" else "")
    when = "at the last validation" if stage == "val" else "of lit-rlhf test"
    explanation = f"{explanation.format(k=k)}, {when}"
    return Quantity(name, title, finders.last(name), explanation, "held-out", unit, better, within)


def _order(name: str) -> tuple[bool, bool, int, int, str]:
    """Validation before test, all sets together before each, the known metrics first."""
    stage, dataset, kind, k = _parts(name)
    places = list(_HELD_OUT)
    place = places.index(kind) if kind in places else len(places)
    return stage == "test", bool(dataset), place, int(k) if k.isdigit() else 0, name


def _parts(name: str) -> tuple[str, str, str, str]:
    match = _HELD_OUT_NAME.fullmatch(name)
    return (match["stage"], match["set"] or "", match["kind"], match["k"] or "") if match else ("val", "", name, "")


def _training() -> Iterator[Quantity]:
    for metric, title, unit, better, within in (
        ("reward", "training reward", "", True, ANY),
        ("kl", "KL to the reference, per completion", "nats", None, ANY),
        ("kl/per_token", "KL to the reference, per token", "nats", None, ANY),
        ("sampling/entropy", "entropy", "nats per token", None, POSITIVE),
        ("completion/length", "completion length", "tokens", None, POSITIVE),
        ("completion/truncated", "truncated share", "", False, SHARE),
        ("policy/clip_fraction", "clip fraction", "", None, SHARE),
    ):
        yield Quantity(metric, title, finders.end(metric), f"{metric}, {_AT_END}", "training", unit, better, within)


def _groups() -> Iterator[Quantity]:
    group = partial(Quantity, section="groups")
    yield group(
        "group/reward_std",
        "reward deviation in a group",
        finders.of_groups(finders.mean("group/reward_std")),
        "mean of group/reward_std over the run: the population deviation of a group's rewards",
        within=POSITIVE,
    )
    yield group(
        "group/dead",
        "zero-variance groups",
        finders.of_groups(finders.dead_share),
        "1 - mean of group/effective_ratio over the run: groups that taught nothing",
        higher_is_better=False,
        within=SHARE,
    )
    yield group(
        "group/dead_at_end",
        "zero-variance groups at the end",
        finders.of_groups(finders.dead_at_end),
        f"1 - group/effective_ratio, {_AT_END}; many are to be expected once the task is solved",
        within=SHARE,
    )
    yield group(
        "group/effective_candidates",
        "effective candidates",
        finders.of_groups(finders.effective_candidates),
        "mean over the run of group/effective_ratio times the completions of an iteration",
        unit="per iteration",
        higher_is_better=True,
        within=POSITIVE,
    )
    yield group(
        "group/distinct",
        "distinct completions in a group",
        finders.of_groups(finders.mean("group/distinct")),
        "mean of group/distinct over the run",
        within=POSITIVE,
    )


def _critic() -> Iterator[Quantity]:
    critic = partial(Quantity, section="critic")
    error, explained = "value/error", "value/explained_variance"
    yield critic(
        error,
        "critic error",
        finders.end(error),
        f"{error}, {_AT_END}: root mean square distance of value and return, in units of the reward",
        higher_is_better=False,
        within=POSITIVE,
    )
    yield critic(
        explained,
        "explained variance",
        finders.end(explained),
        f"{explained}, {_AT_END}; it falls once the task is solved, as returns hardly vary then",
        higher_is_better=True,
        within=(None, 1.0),
    )
    yield critic(
        f"{explained}_best",
        "explained variance, best",
        finders.maximum(explained),
        f"largest {explained} of an iteration",
        higher_is_better=True,
        within=(None, 1.0),
    )


def _cost(target: float | None) -> Iterator[Quantity]:
    cost = partial(Quantity, section="cost", within=POSITIVE)
    yield cost(
        "tokens/generated",
        "tokens generated",
        finders.last("tokens/generated"),
        "completion tokens of the whole run, those of thrown-away groups included",
    )
    yield cost(
        "tokens/trained",
        "tokens trained on",
        finders.last("tokens/trained"),
        "prompt and completion tokens that went through the training pass, each pass counted",
    )
    yield cost("iterations", "iterations", finders.iterations, "rollouts in the logs")
    if target is not None:
        yield cost(
            "tokens_to_target",
            f"tokens to accuracy {target:g}",
            finders.to_target(target, "tokens"),
            "tokens generated when val/accuracy first reached it, interpolated between validations",
            higher_is_better=False,
        )


def _time(target: float | None) -> Iterator[Quantity]:
    timing = partial(Quantity, section="time", within=POSITIVE)
    yield timing(
        "memory/peak_gib",
        "peak memory",
        finders.maximum("memory/peak_gib"),
        "most memory that the process of any rank has held: of its CUDA device, or resident on a CPU",
        unit="GiB",
        higher_is_better=False,
    )
    yield timing(
        "seconds",
        "time",
        finders.seconds,
        "sum of time/iteration; evaluations are not in it",
        unit="s",
        higher_is_better=False,
    )
    yield timing(
        "tokens_per_second",
        "throughput, all phases",
        finders.throughput,
        "tokens generated over the sum of time/iteration",
        unit="tokens/s",
        higher_is_better=True,
    )
    yield timing(
        "generation_speed",
        "throughput of generation",
        finders.generation_speed,
        "tokens generated over the sum of time/generation",
        unit="tokens/s",
        higher_is_better=True,
    )
    if target is not None:
        yield timing(
            "seconds_to_target",
            f"time to accuracy {target:g}",
            finders.to_target(target, "seconds"),
            "sum of time/iteration when val/accuracy first reached it, interpolated between validations",
            unit="s",
            higher_is_better=False,
        )
