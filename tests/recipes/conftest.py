from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Run this Python with the given arguments on one thread; what it printed, or a failure that shows all of it."""

    def run(*args: object, cwd: Path = ROOT) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        environment.pop("PL_GLOBAL_SEED", None)
        command = [sys.executable, *map(str, args)]
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1100)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
