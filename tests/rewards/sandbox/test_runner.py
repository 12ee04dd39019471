"""Nothing that a program does gets past its limits, and nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from lit_rlhf.errors import ConfigurationError
from lit_rlhf.rewards.sandbox import runner
from lit_rlhf.rewards.sandbox.runner import Limits, Verdict, run_tests, way_of_confining

pytest.importorskip("resource")

LIMITS = Limits(seconds=1.5, memory_bytes=256 << 20, processes=8)
TESTS = [("1", "assert f(1) == 2")]
RIGHT = "\ndef f(x): return x + 1\n"
MARK = "lit_rlhf_hostile_program"  # in the environment of nothing, in the command line of what a program leaves

HOSTILE = {
    "endless loop": "while True: pass",
    "endless loop that ignores signals": (
        "import signal\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: pass"
    ),
    "one long call": "x = 5 ** 5 ** 15",
    "sleep": "import time\ntime.sleep(1000)",
    "early exit": "import sys\nsys.exit(0)",
    "hard exit": "import os\nos._exit(0)",
    "memory at once": "x = bytearray(100 << 30)",
    "memory bit by bit": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "memory over processes": (
        "import os, time\nfor _ in range(6):\n    if os.fork() == 0:\n        x = bytearray(120 << 20)\n"
        "        time.sleep(100)\n"
        "time.sleep(100)"
    ),
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "threads": "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(100,)).start()",
    "output": "while True: print('x' * 10_000)",
    "error output": "import sys\nwhile True: sys.stderr.write('x' * 10_000)",
    "deep recursion": "def g(n): return g(n + 1)\ng(0)",
    "deep recursion in C": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef g(): return g()\ng()",
    "large file": "f = open('big', 'wb')\nwhile True: f.write(b'x' * (1 << 20))",
    "many files": "i = 0\nwhile True:\n    open(f'f{i}', 'wb').write(b'x' * (1 << 16))\n    i += 1",
    "crash": "import ctypes\nctypes.string_at(0)",
    "abort": "import os\nos.abort()",
    "stops itself": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "stops the others": "import os, signal\nos.kill(-1, signal.SIGSTOP)\nwhile True: pass",
    "closes everything": "import os\nos.closerange(0, 1024)\nwhile True: pass",
    "deletes": "import shutil\nshutil.rmtree('/', ignore_errors=True)\nwhile True: pass",
}


def ours() -> list[int]:
    """Running processes of the sandbox, told by their command lines."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or ())
        if "lit_rlhf.rewards.sandbox" in line or MARK in line:
            found.append(process.pid)
    return found


@pytest.fixture
def nothing_left():
    before = set(ours())
    yield
    for pid in set(ours()) - before:  # of other tests that run beside this one, which end by themselves
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(30)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs(name: str) -> None:
    verdict = run_tests([HOSTILE[name] + RIGHT], TESTS, "", LIMITS)
    assert verdict.passed == 0
    assert verdict.problem


def test_a_right_program_after_a_hostile_one() -> None:
    run_tests([HOSTILE["fork bomb"]], TESTS, "", LIMITS)
    assert run_tests([RIGHT], TESTS, "", LIMITS) == Verdict(1, 1)


@pytest.mark.usefixtures("nothing_left")
def test_what_a_program_leaves_running_ends_with_it() -> None:
    daemon = (
        "import os, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(1000)', '{MARK}'])\n"
        "    os._exit(0)\nos.wait()"
    )
    assert run_tests([daemon + RIGHT], TESTS, "", LIMITS).passed == 1


@pytest.mark.usefixtures("nothing_left")
def test_a_killed_caller_leaves_nothing_either() -> None:
    code = (
        "from lit_rlhf.rewards.sandbox.runner import Limits, run_tests\n"
        f"run_tests(['import time; time.sleep(1000)'], {TESTS!r}, '', Limits(seconds=100.0))\n"
    )
    before = set(ours())
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[3]) as process:
        for _ in range(600):
            if len(set(ours()) - before) >= 3:
                break
            threading.Event().wait(0.05)
        started = set(ours()) - before - {process.pid}
        process.kill()
    assert started
    for pid in started:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(30)


def test_the_time_of_rows_does_not_add_up_over_threads() -> None:
    results: list[Verdict] = []
    threads = [
        threading.Thread(target=lambda: results.append(run_tests(["import time; time.sleep(99)"], TESTS, "", LIMITS)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [verdict.problem for verdict in results] == ["did not end in time"] * 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="namespaces are Linux's")
def test_network_and_files_are_out_of_reach(tmp_path: Path) -> None:
    if way_of_confining() != "namespaces":
        pytest.skip("this system allows no namespaces")
    mine = tmp_path / "mine"
    mine.write_text("mine")
    os.chmod(tmp_path, 0o777)
    os.chmod(mine, 0o666)
    program = (
        f"def write():\n    open({str(mine)!r}, 'w').write('theirs')\n"
        "def call():\n    import socket\n    socket.create_connection(('127.0.0.1', 9), 1)\n"
        "def own():\n    open('x', 'w').write('y')\n    return open('x').read()\n"
        "def others():\n    import os\n    os.kill(%d, 0)\n" % os.getpid()
    )
    refused = "try:\n    {}()\nexcept OSError:\n    pass\nelse:\n    raise AssertionError"
    tests = [(name, refused.format(name)) for name in ("write", "call", "others")]
    assert run_tests([program], [*tests, ("own", "assert own() == 'y'")], "", LIMITS).passed == 4
    assert mine.read_text() == "mine"


def test_no_folder_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o755)
    assert run_tests(["open('x', 'w').write('y')" + RIGHT], TESTS, "", LIMITS).passed == 1
    assert list(tmp_path.iterdir()) == []


def test_secrets_of_the_environment_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    program = "import os\ndef f(x): return 'WANDB_API_KEY' in os.environ"
    assert run_tests([program], [("1", "assert f(1) is False")], "", LIMITS).passed == 1


@pytest.mark.parametrize("way", ["user", "limits"])
def test_the_weaker_ways_hold_their_limits(way: str) -> None:
    if way == "user" and os.getuid() != 0:
        pytest.skip("only root may become another user")
    if way == "limits" and os.getuid() == 0:
        pytest.skip("root has no limit on processes")
    for name in ("endless loop", "fork bomb", "memory over processes", "output", "hard exit"):
        verdict = runner._run([HOSTILE[name] + RIGHT], TESTS, "", LIMITS, way)
        assert verdict.passed == 0, name
    assert runner._run([RIGHT], TESTS, "", LIMITS, way).passed == 1
    assert not [pid for pid in ours() if psutil.Process(pid).ppid() == os.getpid()]


def test_a_system_that_confines_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_run", lambda *_: Verdict(0, 1, "ended before the last test did", completed=False))
    with pytest.raises(ConfigurationError, match="lets no program be confined"):
        way_of_confining.__wrapped__()


def stress(count: int, seed: int) -> None:
    from lit_rlhf.rewards.parallel import map_in_threads

    chance = random.Random(seed)
    names = [chance.choice([*HOSTILE, "right", "wrong"]) for _ in range(count)]
    programs = {"right": RIGHT, "wrong": "def f(x): return x"}
    limits = Limits(seconds=1.0, memory_bytes=128 << 20, processes=6, output_bytes=1 << 16, disk_bytes=4 << 20)

    def run(item: tuple[int, str]) -> int:
        return run_tests([programs.get(item[1], HOSTILE.get(item[1], "") + RIGHT)], TESTS, "", limits).passed

    def open_files() -> int:
        return psutil.Process().num_fds()

    map_in_threads(run, [(0, "right"), (1, "right")], 2, "warm-up")
    files, threads = open_files(), threading.active_count()
    results = map_in_threads(run, list(enumerate(names)), 6, "stress")
    assert [name for name, result in zip(names, results, strict=True) if result and name != "right"] == []
    # On a machine this busy an honest program may run out of its one second, but not many do.
    right = [result for name, result in zip(names, results, strict=True) if name == "right"]
    assert sum(right) >= len(right) // 2
    assert open_files() <= files + 2
    assert threading.active_count() <= threads


@pytest.mark.usefixtures("nothing_left")
def test_sixty_programs_at_once() -> None:
    stress(60, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("nothing_left")
def test_a_thousand_programs() -> None:
    stress(1000, 1)
