"""``report.json``: every number of the report with the files that it was made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_rlhf.report.comparison import Comparison
from lit_rlhf.report.summary import CONFIDENCE, Difference, Number
from lit_rlhf.report.tables import relative
from lit_rlhf.report.verdict import Statement

FORMAT = 1


def trace(
    comparison: Comparison,
    numbers: Sequence[Number],
    differences: Sequence[Difference],
    statements: Sequence[Statement],
    target: float | None,
    out: Path,
) -> str:
    """The text of the file. What another run with the same seeds would change stands apart, under ``timing``.

    Args:
        comparison: What the report is about.
        numbers: Of the tables.
        differences: Between arms.
        statements: The verdict.
        target: Accuracy that the cost of reaching was looked for.
        out: Folder of the report, that files are relative to.
    """
    arms = [
        {
            "name": arm.name,
            "title": arm.title,
            "runs": [{"seed": run.seed, "status": run.status, "error": run.error} for run in arm.runs],
        }
        for arm in comparison.arms
    ]

    def part(is_timing: bool) -> dict[str, Any]:
        return {
            "numbers": [_number(n, out) for n in numbers if n.quantity.is_timing == is_timing],
            "differences": [_difference(d) for d in differences if d.quantity.is_timing == is_timing],
            "verdict": [{"kind": s.kind, "text": str(s)} for s in statements if s.is_timing == is_timing],
        }

    content = {
        "format": FORMAT,
        "confidence": CONFIDENCE,
        "token_budget": comparison.token_budget,
        "target_accuracy": target,
        "arms": arms,
        **part(is_timing=False),
        "timing": part(is_timing=True),
    }
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def _number(number: Number, out: Path) -> dict[str, Any]:
    interval = number.interval
    return {
        "quantity": number.quantity.key,
        "title": number.quantity.title,
        "unit": number.quantity.unit,
        "arm": number.arm.name,
        "mean": None if interval is None else interval.mean,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "interval_over": number.basis or None,
        "runs_without": number.missing,
        "values": [
            {"seed": seed, "value": found.value, "file": relative(found.file, out), "metric": found.source}
            for seed, found in number.values
        ],
    }


def _difference(difference: Difference) -> dict[str, Any]:
    interval = difference.interval
    return {
        "quantity": difference.quantity.key,
        "arm": difference.first.name,
        "less": difference.second.name,
        "mean": interval.mean,
        "low": interval.low,
        "high": interval.high,
        "pairs": interval.size,
        "method": difference.method,
        "confidence": round(difference.confidence, 6),
        "claimed": difference.is_shown,
    }
