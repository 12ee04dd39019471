from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.folders import write_three_arms


@pytest.fixture
def comparison_dir(tmp_path: Path) -> Path:
    return write_three_arms(tmp_path / "comparison")
