"""Scripts that a bench runs pass by pass, and the page cache between two passes.

Such a script prints a line of JSON when it is ready and after each pass; it begins a pass when it
gets a line, and ends when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any

from forebay.slowfs import SlowFs

_ANSWER_S = 180.0
_END_S = 30.0


class Script:
    """One process, whose standard input and output are pipes of text."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._text = b""

    def begin(self) -> None:
        """Lets it go on to its next pass."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except OSError as error:
            raise RuntimeError(f"{self._name()} takes no more passes: {error}") from error

    def answer(self, wait_s: float = _ANSWER_S) -> dict[str, Any]:
        """Its next line. RuntimeError: it has ended, or says nothing."""
        stdout = self._process.stdout
        assert stdout is not None
        end = time.monotonic() + wait_s
        while b"\n" not in self._text:
            left = end - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                raise RuntimeError(f"{self._name()} said nothing for {wait_s:g} s")
            got = os.read(stdout.fileno(), 1 << 16)
            if not got:
                raise RuntimeError(f"{self._name()} ended with {self._process.wait(_END_S)}")
            self._text += got
        line, self._text = self._text.split(b"\n", 1)
        return dict(json.loads(line))

    def has_answer(self) -> bool:
        """Whether answer() would not wait: a pass is over, or the process is."""
        stdout = self._process.stdout
        assert stdout is not None
        return b"\n" in self._text or bool(select.select([stdout], [], [], 0)[0])

    def end(self) -> None:
        """Waits until it has ended by itself; RuntimeError: it failed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        code = self._process.wait(_END_S)
        self._process.stdout.close()
        if code != 0:
            raise RuntimeError(f"{self._name()} ended with {code}")

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _name(self) -> str:
        arguments = self._process.args
        return " ".join(arguments) if isinstance(arguments, list) else str(arguments)


@contextlib.contextmanager
def scripts_of(processes: Sequence[subprocess.Popen[str]]) -> Iterator[list[Script]]:
    """All of them, ready; at the end they have ended, and did not fail."""
    scripts = [Script(process) for process in processes]
    try:
        for script in scripts:
            script.answer()
        yield scripts
        for script in scripts:
            script.end()
    finally:
        for script in scripts:
            script.kill()


def one_pass(scripts: Sequence[Script]) -> list[dict[str, Any]]:
    """The same pass of all at once: what each says of it."""
    for script in scripts:
        script.begin()
    return [script.answer() for script in scripts]


def drop_pages(folder: str) -> None:
    """The kernel forgets what it keeps of the files in the folder; nobody may have them mapped."""
    for where, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(where, name), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def await_quiet(mount: SlowFs, *, quiet_s: float = 1.0, most_s: float = 30.0) -> int:
    """Bytes that the mount gave until it was not read for a while."""
    before = last = mount.stats()["bytes_read"]
    since = begin = time.monotonic()
    while time.monotonic() - since < quiet_s and time.monotonic() - begin < most_s:
        time.sleep(0.05)
        now = mount.stats()["bytes_read"]
        if now != last:
            last, since = now, time.monotonic()
    return int(last - before)


def await_end_of_daemons(runtimes: Sequence[str], *, most_s: float = 20.0) -> None:
    """Those with these folders as XDG_RUNTIME_DIR; they stay a moment after their last client."""

    def there(runtime: str) -> bool:
        folder = os.path.join(runtime, "forebay")
        with contextlib.suppress(FileNotFoundError):
            return any(name.endswith((".sock", ".lock")) for name in os.listdir(folder))
        return False

    end = time.monotonic() + most_s
    while time.monotonic() < end and any(map(there, runtimes)):
        time.sleep(0.05)
