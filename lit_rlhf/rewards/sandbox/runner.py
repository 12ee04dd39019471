"""Run programs against tests, each in a confined process of its own."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lit_rlhf.errors import ConfigurationError, RewardError

_LOG = logging.getLogger(__name__)
_ROOT = str(Path(__file__).parents[3])
_GRACE_SECONDS = 40.0  # for the start, and for the supervisor to clear away; it has limits of its own
_PROBLEMS = {
    "time": "did not end in time",
    "memory": "used too much memory",
    "processes": "started too many processes",
    "output": "printed too much",
    "exit": "ended before the last test did",
    "start": "did not start in time",
}


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: Wall clock from its start to the end of its last test.
        memory_bytes: Memory, each process and all together.
        processes: Processes and threads at a time, its own included.
        output_bytes: What it may print.
        disk_bytes: Largest file; where the system allows it, also all its files together.
    """

    seconds: float = 5.0
    memory_bytes: int = 512 << 20
    processes: int = 16
    output_bytes: int = 1 << 20
    disk_bytes: int = 16 << 20


@dataclass(frozen=True)
class Verdict:
    """How a program did.

    Attributes:
        passed: Tests that passed; 0 where not all of them ran to their end.
        total: Tests.
        problem: Why they did not, or why the first that failed did; empty where all passed.
        completed: Whether every test was run to its end.
    """

    passed: int
    total: int
    problem: str = ""
    completed: bool = True


def run_tests(
    sources: Sequence[str], tests: Sequence[tuple[str, str]], setup: str = "", limits: Limits | None = None
) -> Verdict:
    """Run a program and its tests, confined.

    Args:
        sources: Python, run one after the other; the last is the program.
        tests: Names and Python of the tests; a name that is empty marks code between them that is no test.
        setup: Python whose imports the tests may use.
        limits: See :class:`Limits`.

    Raises:
        RewardError: The tests themselves are broken, or no process could be started.
        ConfigurationError: This system cannot confine a program, see :func:`way_of_confining`.

    >>> run_tests(["def double(n): return 2 * n"], [("1", "assert double(2) == 4"), ("2", "assert double(1) == 3")])
    Verdict(passed=1, total=2, problem='AssertionError', completed=True)
    """
    return _run(sources, tests, setup, limits or Limits(), way_of_confining())


@functools.lru_cache(maxsize=1)
def way_of_confining() -> str:
    """The strictest way that works here, see :mod:`~lit_rlhf.rewards.sandbox.confinement`; tried out once.

    Raises:
        ConfigurationError: None does; or only resource limits do, and this process is root: a program would have
            its rights.
    """
    from lit_rlhf.rewards.sandbox.confinement import WAYS

    root, reasons = os.getuid() == 0, []
    for way in WAYS:
        if (way == "user" and not root) or (way == "limits" and root):
            continue
        try:
            probe = _run(["def one(): return 1"], [("", "pass"), ("probe", "assert one() == 1")], "", Limits(20.0), way)
        except RewardError as error:
            reasons.append(str(error))
            continue
        if probe.passed == 1:
            if way != "namespaces":
                _LOG.warning("code is run %s: %s", *_weaker(way, reasons))
            return way
        reasons.append(f"{way}: the program {probe.problem}")
    raise ConfigurationError(
        "this system lets no program be confined, so no code of a model is run: allow user namespaces, or do not "
        f"train as root ({'; '.join(reasons)})"
    )


def _weaker(way: str, reasons: Sequence[str]) -> tuple[str, str]:
    right = "as a user of its own" if way == "user" else "with your own rights on files and processes"
    return f"{right} and with access to the network, within limits of time and memory", "; ".join(reasons)


def _run(sources: Sequence[str], tests: Sequence[tuple[str, str]], setup: str, limits: Limits, way: str) -> Verdict:
    from lit_rlhf.rewards.sandbox.confinement import temporary_folder

    total = sum(bool(name) for name, _ in tests)
    with temporary_folder() as folder:
        job = {
            "way": way,
            "root": _ROOT,
            "path": [path for path in sys.path if path],
            "folder": folder,
            "sources": [source.encode("utf-8", "replace").decode() for source in sources],
            "tests": [list(test) for test in tests],
            "setup": setup,
            **asdict(limits),
        }
        outcome = _supervised(job, limits.seconds + _GRACE_SECONDS)
    problem, detail = outcome.get("problem"), outcome.get("detail", "")
    if problem in ("confinement", "tests"):
        raise RewardError(f"{'the tests are broken: ' if problem == 'tests' else ''}{detail}")
    if problem is not None:
        return Verdict(0, total, _PROBLEMS.get(problem, problem), completed=False)
    results = outcome["results"]
    passed = sum(status == "passed" for status, _ in results)
    why = next((reason for status, reason in results if status != "passed"), "")
    return Verdict(passed, total, why)


def _supervised(job: dict[str, object], seconds: float) -> dict:
    code = f"import sys; sys.path.append({_ROOT!r}); from {__package__}.supervisor import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={"LANG": "C.UTF-8", "PATH": os.defpath},
    )
    try:
        answer, _ = process.communicate(json.dumps(job).encode("ascii"), timeout=seconds)
        return dict(json.loads(answer))
    except subprocess.TimeoutExpired:
        return {"problem": "time"}
    except ValueError:
        return {"problem": "exit"}
    finally:
        process.kill()
        process.communicate()
