"""A bench that is told to end leaves nothing: no mount, no process, no file."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from types import FrameType

_MARK = "FOREBAY_BENCH_RUN"
_GRACE_S = 10.0


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came. What is on the stack cleans up as it does at an error."""


def _descendants(pid: int) -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with (
                contextlib.suppress(OSError, ValueError, IndexError),
                open(f"/proc/{name}/stat") as f,
            ):
                parents[int(name)] = int(f.read().rsplit(")", 1)[1].split()[1])
    found: set[int] = set()
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level} - found
        found |= level
    return found


def _marked(mark: str) -> set[int]:
    """Processes that were started with our mark; also those that are nobody's children now."""
    wanted = f"{_MARK}={mark}".encode()
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as f:
                if wanted in f.read().split(b"\0"):
                    found.add(int(name))
    return found


def _name(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return ""


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def _others(mark: str) -> set[int]:
    me = os.getpid()
    return (_descendants(me) | _marked(mark)) - {me}


def _end_all(mark: str) -> None:
    """Ends whatever still runs: SIGTERM, and after a while SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        _send(_others(mark), number)
        end = time.monotonic() + _GRACE_S
        while time.monotonic() < end:
            if not any(map(_runs, _others(mark))):
                return
            time.sleep(0.05)


@contextlib.contextmanager
def cleans_up() -> Iterator[None]:
    """While it is entered, SIGTERM, SIGHUP and Ctrl-C end the processes that were started
    meanwhile, and then unwind the stack, where mounts and files are removed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    mark = uuid.uuid4().hex
    before_mark = os.environ.get(_MARK)
    came: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if came:
            return  # it is cleaning up already
        came.append(number)
        # What waits for a child goes on when the child ends. A mount stays until its owner, who
        # is on our stack, removes it: readers of a mount without a process would get errors.
        _send({pid for pid in _others(mark) if _name(pid) != "slowfs"}, signal.SIGTERM)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise Terminated(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        if before[number] != signal.SIG_IGN:  # nohup
            signal.signal(number, on_signal)
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        if came:
            _end_all(mark)
        if before_mark is None:
            os.environ.pop(_MARK, None)
        else:
            os.environ[_MARK] = before_mark
        for number in numbers:
            signal.signal(number, before[number] or signal.SIG_DFL)
