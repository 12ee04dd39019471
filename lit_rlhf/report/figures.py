"""The plots of a report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lit_rlhf.report.bars import memory_bars, phase_bars
from lit_rlhf.report.comparison import Arm, Comparison
from lit_rlhf.report.curves import Axis, Curve, curve_of, seconds, tokens
from lit_rlhf.report.formats import short
from lit_rlhf.report.group_sizes import GroupSizes
from lit_rlhf.report.summary import Number
from lit_rlhf.report.svg import MUTED, Drawing, Plot, arm_colour, arm_dashes

_FRONTIER_POINTS = 12
_HEADROOM = 0.08  # of the drawn range, above and below


def plots(comparison: Comparison, numbers: Sequence[Number], group_sizes: GroupSizes | None) -> list[Plot]:
    """All plots that there are data for.

    Args:
        comparison: With its runs.
        numbers: For the bars.
        group_sizes: Arms that differ in nothing else, if there are any.
    """
    found = [
        *_learning(comparison),
        *(_group_size_plots(group_sizes, numbers, comparison) if group_sizes is not None else ()),
        *_timing(comparison, numbers),
    ]
    return [plot for plot in found if plot is not None]


def _learning(comparison: Comparison) -> Iterator[Plot | None]:
    pass_k = _largest_pass_k(comparison)
    for metric, title, caption in (
        ("val/accuracy", "Held-out accuracy", "Greedy completions that the verifier finds right."),
        ("val/verifier", "Verifier score", "Falling while the reward rises: the reward is being gamed."),
        ("reward", "Training reward", "Before any KL penalty."),
        (pass_k, f"{pass_k.partition('/')[2]}", "Falling while accuracy rises: diversity is being lost."),
        ("kl", "KL to the reference", "Nats per completion, under the policy that sampled."),
    ):
        yield _curves(comparison, metric, title, caption, tokens)
    yield _frontier(comparison)
    for metric, title, caption in (
        ("sampling/entropy", "Entropy", "Nats per token; a fall to 0 is the end of exploration."),
        ("completion/length", "Completion length", "Tokens, end-of-sequence included."),
    ):
        yield _curves(comparison, metric, title, caption, tokens)
    groups = [arm for arm in comparison.arms if not arm.has_critic]
    critics = [arm for arm in comparison.arms if arm.has_critic]
    yield _curves(
        *(comparison, "group/effective_ratio", "Effective groups"),
        "Share of groups whose completions got different rewards: only these teach.",
        *(tokens, groups),
    )
    yield _curves(
        *(comparison, "value/explained_variance", "Explained variance of the critic"),
        "0 is a critic as good as a constant; below 0 it harms.",
        *(tokens, critics),
    )
    yield _curves(
        *(comparison, "value/error", "Critic error"),
        "Root mean square distance of value and return, in units of the reward.",
        *(tokens, critics),
    )


def _timing(comparison: Comparison, numbers: Sequence[Number]) -> Iterator[Plot | None]:
    yield _curves(
        *(comparison, "val/accuracy", "Held-out accuracy against time"),
        "Seconds of generation, rewards, reference and training; evaluations are not in it.",
        seconds,
        section="time",
    )
    yield _curves(*(comparison, "reward", "Training reward against time", "The same seconds."), seconds, section="time")
    yield memory_bars(comparison, numbers)
    yield phase_bars(comparison)


def _curves(
    comparison: Comparison,
    metric: str,
    title: str,
    caption: str,
    axis: Axis,
    arms: Sequence[Arm] | None = None,
    section: str = "learning",
) -> Plot | None:
    chosen = comparison.arms if arms is None else arms
    curves = [(comparison.arms.index(arm), curve_of(arm, metric, axis)) for arm in chosen]
    drawn = [(place, curve) for place, curve in curves if curve is not None]
    if not drawn:
        return None
    key = f"{metric.replace('/', '-').replace('@', '-')}-{axis.__name__}"
    drawing = Drawing(key)
    with drawing as axes:
        for place, curve in drawn:
            style = {"color": arm_colour(place), "linestyle": arm_dashes(place)}
            if curve.low:
                axes.fill_between(curve.x, curve.low, curve.high, color=arm_colour(place), alpha=0.15, linewidth=0)
            elif len(curve.runs) > 1:
                for run in curve.runs:
                    axes.plot(*zip(*run, strict=True), color=arm_colour(place), alpha=0.3, linewidth=0.7)
            axes.plot(curve.x, curve.mean, **style)
            axes.plot(curve.x[-1:], curve.mean[-1:], "o", color=arm_colour(place), markersize=3.5)
        # A band of two seeds is so wide that it would press the curves flat.
        axes.set_ylim(*_limits([y for _, curve in drawn for run in curve.runs for _, y in run], metric))
        axes.set_xlim(left=0)
        axes.set_xlabel("tokens generated" if axis is tokens else "seconds")
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
    return Plot(key, title, caption, drawing.svg, section)


def _limits(values: Sequence[float], metric: str) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = (high - low) * _HEADROOM or abs(high) * _HEADROOM or 0.1
    is_share = metric.startswith(("val/accuracy", "val/pass", "group/effective_ratio"))
    return (max(low - room, -0.02), min(high + room, 1.02)) if is_share else (low - room, high + room)


def _frontier(comparison: Comparison) -> Plot | None:
    """How much reward each arm has bought with how much KL."""
    drawn: list[tuple[int, Curve, Curve]] = []
    for place, arm in enumerate(comparison.arms):
        kl, reward = curve_of(arm, "kl", tokens), curve_of(arm, "reward", tokens)
        if kl is not None and reward is not None and len(kl.x) == len(reward.x):
            drawn.append((place, kl, reward))
    if not drawn:
        return None
    drawing = Drawing("frontier")
    with drawing as axes:
        for place, kl, reward in drawn:
            size = math.ceil(len(kl.x) / _FRONTIER_POINTS)  # single iterations scatter
            x, y = (
                [math.fsum(v[i : i + size]) / len(v[i : i + size]) for i in range(0, len(v), size)]
                for v in (kl.mean, reward.mean)
            )
            axes.plot(x, y, color=arm_colour(place), linestyle=arm_dashes(place), alpha=0.9)
            axes.plot(x[-1:], y[-1:], "o", color=arm_colour(place), markersize=4.5)
        axes.set_xlabel("KL to the reference, nats per completion")
        axes.set_ylabel("training reward")
    caption = "In the order of training; the dot is the end. Higher and further left is better."
    return Plot("frontier", "KL–reward frontier", caption, drawing.svg, "learning")


def _group_size_plots(sizes: GroupSizes, numbers: Sequence[Number], comparison: Comparison) -> Iterator[Plot]:
    for key, title, caption in (
        ("val/accuracy", "Accuracy by group size", "At the end of the same budget."),
        (
            "tokens_to_target",
            "Tokens to the target by group size",
            "Lower is better; sizes that missed it are left out.",
        ),
        ("group/dead", "Dead groups by group size", "Mean over the run: small groups agree by chance."),
        ("group/effective_candidates", "Effective candidates by group size", "Completions per iteration that taught."),
    ):
        found = {number.arm.name: number for number in numbers if number.quantity.key == key}
        shown = [(size, found[arm.name]) for size, arm in sizes.arms if arm.name in found]
        shown = [(size, number) for size, number in shown if number.interval is not None]
        if len(shown) < 2:
            continue
        drawing = Drawing(f"group-size-{key.replace('/', '-')}")
        with drawing as axes:
            x = [math.log2(size) for size, _ in shown]
            means = [number.interval.mean for _, number in shown if number.interval is not None]
            axes.plot(x, means, color=MUTED, linewidth=1)
            for place, (_, number) in zip(x, shown, strict=True):
                assert number.interval is not None
                colour = arm_colour(comparison.arms.index(number.arm))
                if number.interval.low is not None and number.interval.high is not None:
                    axes.plot([place, place], [number.interval.low, number.interval.high], color=colour, alpha=0.5)
                axes.plot([place], [number.interval.mean], "o", color=colour)
                seeds = [found.value for _, found in number.values]
                axes.plot([place] * len(seeds), seeds, "_", color=colour, markersize=7)
            values = [found.value for _, number in shown for _, found in number.values]
            axes.set_ylim(*_limits(values, key))
            axes.set_xticks(x, [str(size) for size, _ in shown])
            axes.set_xlabel("completions per prompt, G")
            axes.yaxis.set_major_formatter(lambda value, _: short(value))
        yield Plot(drawing.name, title, caption + " Ticks are seeds, lines intervals.", drawing.svg, "groups")


def _largest_pass_k(comparison: Comparison) -> str:
    runs = [run.run for arm in comparison.arms for run in arm.counted if run.run is not None]
    names = {name for run in runs for name in run.series if name.startswith("val/pass@") and name[9:].isdigit()}
    return max(names, key=lambda name: int(name[9:]), default="val/pass@1")
