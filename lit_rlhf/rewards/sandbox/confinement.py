"""Shut a process in: namespaces, another user, resource limits. Linux does most of it, other systems the limits.

A way of confining is one of

``namespaces``
    A PID namespace (its end ends every process in it, however it was started), no network, the file system read-only
    but for a temporary one of limited size, and as root also a user of its own. As root, or where user namespaces are
    allowed.
``user``
    A user of its own, for which the system counts processes and which owns no file; as root in a container that may
    not make namespaces. The network is not shut off.
``limits``
    Resource limits alone. The program has the rights of whoever runs the training.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path

WAYS = ("namespaces", "user", "limits")

_NEW_MOUNTS, _NEW_IPC, _NEW_USER, _NEW_PIDS, _NEW_NETWORK = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_NAMESPACES = _NEW_MOUNTS | _NEW_IPC | _NEW_PIDS | _NEW_NETWORK
_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _KEEP_CAPABILITIES, _SUBREAPER = 1, 4, 8, 36
_NO_NEW_PRIVILEGES, _AMBIENT, _AMBIENT_RAISE = 38, 47, 2
_READ_ANYTHING = 2  # CAP_DAC_READ_SEARCH
_MOUNT_SETATTR, _HERE, _RECURSIVE, _READ_ONLY, _PRIVATE = 442, -100, 0x8000, 1, 1 << 18
_NO_SETUID_NO_DEVICES = 2 | 4
_FIRST_USER = 1 << 30  # far from any real user's number


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def prctl(option: int, *arguments: int) -> None:
    """Set an attribute of this process; nothing happens where the system has no such thing."""
    if sys.platform.startswith("linux"):
        _libc().prctl(option, *[ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0)[:4]])


def die_with_parent() -> None:
    """End this process when its parent ends, also when that one is killed."""
    prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that none gets lost."""
    prctl(_SUBREAPER, 1)


def hide_memory() -> None:
    """Let no process of the same user read or change this one's memory."""
    prctl(_SET_DUMPABLE, 0)


def enter_namespaces() -> None:
    """Leave the network, and make this process's next child the first of a PID namespace.

    Raises:
        OSError: The system does not allow it.
    """
    libc, user, group = _libc(), os.getuid(), os.getgid()
    if user == 0 and libc.unshare(_NAMESPACES) == 0:
        return
    if user == 0:
        raise PermissionError("root may not make namespaces here")
    _checked(libc.unshare(_NAMESPACES | _NEW_USER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def enclose_files(folder: str, size: int) -> None:
    """Make every file read-only for this mount namespace, but for a new file system in memory.

    Args:
        folder: Where that one is.
        size: Of it, in bytes.

    Raises:
        OSError: The system does not allow it.
    """
    libc = _libc()
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, _PRIVATE, 0)
    _checked(libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, attributes, ctypes.sizeof(attributes)))
    options = f"size={size},mode=777,nr_inodes=4096".encode()
    _checked(libc.mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(_NO_SETUID_NO_DEVICES), options))


def become_nobody(number: int) -> None:
    """Give up root for a user that owns nothing.

    Where Python itself lies in a folder that only root may enter, the right to read files is kept, and no other.

    Args:
        number: Decides which user; two with different numbers cannot touch each other's processes.

    Raises:
        OSError: The system does not allow it.
    """
    keep = not all(map(_open_to_all, (sys.executable, os.__file__, __file__)))
    libc = _libc()
    if keep:
        prctl(_KEEP_CAPABILITIES, 1)
    os.setgroups([])
    try:
        _become(_FIRST_USER + number)
    except OSError:  # the container maps fewer users
        _become(61_000 + number % 4_000)
    if keep:
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        bits = 1 << _READ_ANYTHING
        _checked(libc.capset(header, (ctypes.c_uint32 * 6)(bits, bits, bits, 0, 0, 0)))
        prctl(_AMBIENT, _AMBIENT_RAISE, _READ_ANYTHING)


def _become(user: int) -> None:
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _open_to_all(path: str) -> bool:
    real = Path(path).resolve()
    return all(folder.stat().st_mode & 0o001 for folder in (*Path(path).absolute().parents, *real.parents))


def limit_resources(seconds: float, memory: int, processes: int, file_bytes: int) -> None:
    """Set the limits of this process and of all that it starts. They cannot be raised again.

    Args:
        seconds: Of processor time, per process.
        memory: Address space of each process, in bytes.
        processes: Of this user at a time, threads included.
        file_bytes: Largest file.
    """
    prctl(_NO_NEW_PRIVILEGES, 1)
    cpu = int(seconds) + 1
    wanted = [
        ("RLIMIT_CPU", cpu),
        ("RLIMIT_AS", memory),
        ("RLIMIT_FSIZE", file_bytes),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NPROC", processes),
        ("RLIMIT_MSGQUEUE", 0),
    ]
    for name, limit in wanted:
        if hasattr(resource, name):
            with contextlib.suppress(ValueError, OSError):  # macOS refuses some
                resource.setrlimit(getattr(resource, name), (limit, limit))


def tasks_of_user() -> int:
    """Processes and threads that this user has now: what a limit on processes counts from."""
    count, user = 0, os.getuid()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if entry.stat().st_uid == user:
                count += len(os.listdir(entry / "task"))
    return count


def descendants(pid: int) -> list[int]:
    """All processes that come from one, children first; empty where the system does not tell."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                children = Path(f"/proc/{parent}/task/{task}/children").read_text().split()
                found += map(int, children)
                waiting += map(int, children)
    return found


def resident_bytes(pids: list[int]) -> int:
    """Memory that processes hold at the moment."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError, ValueError):
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder that goes away again, and may be entered by any user."""
    folder = tempfile.TemporaryDirectory(prefix="lit_rlhf_", ignore_cleanup_errors=True)
    os.chmod(folder.name, 0o777)
    return folder
