"""Put a report together and write it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_rlhf.checkpointing import atomic_file
from lit_rlhf.errors import check_number
from lit_rlhf.report import formats
from lit_rlhf.report.alarms import alarm_entries
from lit_rlhf.report.comparison import Comparison, read_folder
from lit_rlhf.report.figures import plots
from lit_rlhf.report.finders import common_target
from lit_rlhf.report.group_sizes import find_group_sizes
from lit_rlhf.report.quantities import quantities
from lit_rlhf.report.samples import sample_table
from lit_rlhf.report.summary import differences, numbers
from lit_rlhf.report.svg import load_matplotlib
from lit_rlhf.report.tables import difference_text, sections, settings, sources
from lit_rlhf.report.trace import trace
from lit_rlhf.report.verdict import method_note, verdict

NAMES = ("report.html", "report.md", "report.json")
_TEMPLATES = ("report.html.jinja", "report.md.jinja")


def write_report(folder: str | Path, target_accuracy: float | None = None, out: str | Path | None = None) -> Path:
    """Write ``report.html``, ``report.md`` and ``report.json`` of a run or a comparison, from what is there now.

    Args:
        folder: Of a run, or with a ``comparison.json``.
        target_accuracy: The cost of reaching it is reported; by default the highest that all runs have reached.
        out: Folder to write to; ``folder`` by default.

    Returns:
        The path of ``report.html``.

    Raises:
        ConfigurationError: There is no run in the folder, or matplotlib is not installed.
        DataError: What is there cannot be read.
        OutputError: The report cannot be written.
    """
    check_number("target_accuracy", target_accuracy, minimum=0, maximum=1)
    load_matplotlib()
    comparison = read_folder(folder)
    place = Path(folder if out is None else out)
    for name, text in render(comparison, target_accuracy, place).items():
        with atomic_file(place / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return place / NAMES[0]


def render(comparison: Comparison, target_accuracy: float | None, out: Path) -> dict[str, str]:
    """The texts of the files by their names.

    Args:
        comparison: What the report is about.
        target_accuracy: As for :func:`write_report`.
        out: Folder of the report, that links are relative to.
    """
    runs = [run.run for arm in comparison.arms for run in arm.counted if run.run is not None]
    target = common_target(runs) if target_accuracy is None else target_accuracy
    found = numbers(comparison, quantities(comparison, target))
    differing = differences(found, comparison.arms)
    statements = verdict(comparison, found, differing, target)
    group_sizes = find_group_sizes(comparison)
    content: dict[str, Any] = {
        "comparison": comparison,
        "title": _title(comparison),
        "target": target,
        "statements": statements,
        "method_note": method_note(differing, comparison.is_single),
        "sections": sections(found, differing, comparison.arms),
        "settings": settings(comparison),
        "sources": sources(found, out),
        "plots": plots(comparison, found, group_sizes),
        "group_sizes": group_sizes,
        "samples": sample_table(comparison),
        "alarms": alarm_entries(comparison),
        "differences": differing,
    }
    html, markdown = (_filled(name, content) for name in _TEMPLATES)
    return dict(zip(NAMES, (html, markdown, trace(comparison, found, differing, statements, target, out)), strict=True))


def _title(comparison: Comparison) -> str:
    if comparison.is_single:
        arm = comparison.arms[0]
        return f"{arm.title}: {arm.name}"
    titles = [arm.title for arm in comparison.arms]
    return " against ".join(titles) if len(titles) <= 3 else f"{titles[0]} against {len(titles) - 1} others"


def _filled(name: str, content: Mapping[str, Any]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("lit_rlhf.report"),
        autoescape=select_autoescape(("html.jinja",)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        number=formats.number,
        signed=formats.signed,
        bounds=formats.bounds,
        difference=difference_text,
        listed=formats.listed,
        cell=_markdown,
    )
    return environment.get_template(name).render(**content)


def _markdown(text: object) -> str:
    """Text in a cell of a markdown table."""
    return str(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
