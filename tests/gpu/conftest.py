"""Fixtures of the tests that need a CUDA device, and the table that ``make gpu-check`` ends with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch


@pytest.fixture
def cuda() -> torch.device:
    """The first CUDA device."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.device("cuda", 0)


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say something in the table."""
    return lambda text: request.node.user_properties.append(("note", text))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Put what a test took of the device's memory at most into its report."""
    if call.when == "call" and torch.cuda.is_available():
        item.user_properties.append(("peak", f"{torch.cuda.max_memory_allocated() / 2**20:,.0f} MiB"))
    return (yield)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line per test that needs a GPU, where such tests were asked for (``-m gpu``)."""
    asked_for = config.option.markexpr
    if "gpu" not in asked_for or "not gpu" in asked_for:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("test", "result", "seconds", "peak memory", "note", title=_title(), title_justify="left")
    for result in ("failed", "error", "passed", "skipped"):
        for report in terminalreporter.stats.get(result, []):
            properties = dict(report.user_properties)
            reason = report.longrepr[2] if result == "skipped" and isinstance(report.longrepr, tuple) else ""
            remark = properties.get("note", reason.removeprefix("Skipped: "))
            name = report.nodeid.removeprefix("tests/").replace("::", " ")
            table.add_row(name, result, f"{report.duration:.1f}", properties.get("peak", ""), remark)
    Console(width=150, markup=False, highlight=False).print(table)


def _title() -> str:
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device"
    packages = [f"Python {platform.python_version()}"]
    for name in ("torch", "transformers", "lightning", "peft", "bitsandbytes", "vllm"):
        found = importlib.util.find_spec(name) is not None
        packages.append(f"{name} {importlib.metadata.version(name) if found else 'missing: its tests are skipped'}")
    return f"{device}; {', '.join(packages)}"
