"""The process that watches over one program: it confines it, stops it at its limits and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from lit_rlhf.rewards.sandbox import confinement
from lit_rlhf.rewards.sandbox.judge import BrokenTestsError, judge
from lit_rlhf.rewards.sandbox.wire import Channel

STARTUP_SECONDS = 30.0
_TICK = 0.02  # seconds between two looks at memory and processes
_MAX_REPORT = 1 << 20
_ENVIRONMENT = {"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def main() -> None:
    """Read a job from stdin, write its outcome to stdout."""
    confinement.die_with_parent()
    job = json.load(sys.stdin)
    try:
        outcome = _supervise(job)
    except OSError as error:
        outcome = {"problem": "confinement", "detail": f"{job['way']}: {error}"}
    json.dump(outcome, sys.stdout)


def _supervise(job: dict[str, Any]) -> dict[str, Any]:
    confinement.adopt_orphans()
    if job["way"] == "namespaces":
        confinement.enter_namespaces()
    confinement.hide_memory()  # of this process and its forks: the tests are in it
    output, output_end = os.pipe()
    report, report_end = os.pipe()
    user = os.getpid() % (1 << 29)
    first = os.fork()
    if first == 0:
        os.close(output)
        os.close(report)
        _first_process(job, user, output_end, report_end)
    os.close(output_end)
    os.close(report_end)
    try:
        return _watch(job, first, output, report)
    finally:
        _end(job, first, user)


def _watch(job: dict[str, Any], first: int, output: int, report: int) -> dict[str, Any]:
    """Until the judge has reported or a limit is passed. Every limit gives a name for what went wrong."""
    deadline, started = time.monotonic() + STARTUP_SECONDS, False
    said, written = bytearray(), 0
    descriptors = [output, report]
    while True:
        ready, _, _ = select.select(descriptors, [], [], _TICK)
        if report in ready:
            part = os.read(report, 1 << 16)
            if not part or len(said) > _MAX_REPORT:
                return _reported(said)
            said += part
            if not started:
                started, deadline = True, time.monotonic() + job["seconds"]
        if output in ready:
            part = os.read(output, 1 << 16)
            written += len(part)
            if not part:
                descriptors.remove(output)
            if written > job["output_bytes"]:
                return {"problem": "output"}
        if time.monotonic() > deadline:
            return {"problem": "time" if started else "start"}
        alive = confinement.descendants(first)
        if len(alive) > job["processes"] + 2:  # the judge and the program's own process
            return {"problem": "processes"}
        if confinement.resident_bytes(alive) > job["memory_bytes"]:
            return {"problem": "memory"}


def _reported(said: bytearray) -> dict[str, Any]:
    _, _, last = bytes(said).partition(b"\n")
    with contextlib.suppress(ValueError):
        return dict(json.loads(last))
    return {"problem": "exit"}


def _end(job: dict[str, Any], first: int, user: int) -> None:
    """Kill the first process and all that came from it."""
    if job["way"] == "namespaces":
        os.kill(first, signal.SIGKILL)  # the kernel ends a PID namespace with its first process
        os.waitpid(first, 0)
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(first, signal.SIGKILL)  # all there is to do where a system does not list children
    while alive := confinement.descendants(os.getpid()):
        if job["way"] == "user":
            _kill_user(user)
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: nothing forks between the two
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


def _kill_user(user: int) -> None:
    """Kill every process of the program's user at once, so that a fork bomb cannot outrun it."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            confinement.become_nobody(user)
            os.kill(-1, signal.SIGKILL)
        os._exit(0)
    os.waitpid(child, 0)


def _first_process(job: dict[str, Any], user: int, output: int, report: int) -> NoReturn:
    """Parent of judge and program; the first process of the namespace, where there is one."""
    confinement.die_with_parent()
    confinement.adopt_orphans()
    os.setsid()
    status = 1
    try:
        if job["way"] == "namespaces":
            confinement.enclose_files(job["folder"], job["disk_bytes"])
        os.chdir(job["folder"])
        judges, programs = socket.socketpair()
        judging = os.fork()
        if judging == 0:
            programs.close()
            _confine(job, user)
            confinement.hide_memory()  # again: a change of user resets it
            _judge(job, Channel(judges), report)
        os.close(report)
        judges.close()
        if os.fork() == 0:
            _confine(job, user)
            _run_program(job, programs.fileno(), output)
        programs.close()
        os.close(output)
        while os.waitpid(-1, 0)[0] != judging:
            pass
        status = 0
    finally:
        os._exit(status)


def _confine(job: dict[str, Any], user: int) -> None:
    confinement.die_with_parent()
    processes = job["processes"] + 1  # with the judge
    if job["way"] == "limits":
        processes += confinement.tasks_of_user()
    elif os.getuid() == 0:
        confinement.become_nobody(user)
    confinement.die_with_parent()  # again: a change of user resets it
    confinement.limit_resources(job["seconds"], job["memory_bytes"], processes, job["disk_bytes"])


def _judge(job: dict[str, Any], channel: Channel, report: int) -> NoReturn:
    outcome: dict[str, Any] = {"problem": "exit"}
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):  # what a test prints is not the supervisor's answer
        os.dup2(null, standard)
    sys.path += job["path"]  # tests may import what is installed
    # Whatever else is raised is the program's doing: nothing that it sends may end the run of a training.
    with contextlib.suppress(BaseException):
        if channel.receive() == "ready":
            os.write(report, b"ready\n")
            try:
                outcome = {"results": judge(channel, job["sources"], job["setup"], job["tests"])}
            except BrokenTestsError as error:
                outcome = {"problem": "tests", "detail": str(error)[:300]}
    with contextlib.suppress(OSError), os.fdopen(report, "w", encoding="utf-8") as stream:
        json.dump(outcome, stream)
    os._exit(0)


def _run_program(job: dict[str, Any], connection: int, output: int) -> NoReturn:
    """Replace this process by a fresh interpreter: what the supervisor knows is not in its memory."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.set_inheritable(connection, True)
        folder = job["folder"]
        code = (
            f"import sys; sys.path.append({job['root']!r}); from {__package__}.program import main; main({connection})"
        )
        command = [sys.executable, "-I", "-B", "-c", code]
        os.execve(sys.executable, command, {**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder})
    os._exit(1)
