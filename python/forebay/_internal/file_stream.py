"""Tells the file service which files a reader is about to open, in their order.

The hook of ``forebay run`` loads this file alone, inside other people's programs: it imports
nothing but the standard library, never waits long, and leaves a forked child and the program's own
descriptors alone. The messages are those of ``src/files/message.h``.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import struct
import weakref
from array import array
from collections.abc import Iterable, Sequence

_HEADER = struct.Struct("<IHHHHIQQ")
_LENGTH = struct.Struct("<H")
_MAGIC = 0x31594246
_NAMES, _ORDER, _AT = 4, 5, 6
_BAD = 4
_MOST_PACKET = 128 << 10
_ROOM = _MOST_PACKET - _HEADER.size
# A service that takes longer than this for one packet is of no help.
_WAIT_S = 2.0

_streams: weakref.WeakSet[Stream] = weakref.WeakSet()


class Stream:
    """One reader's coming order. Raises OSError when the service is not there any more."""

    def __init__(self, path: str, job: str = "") -> None:
        number = int(job) if job.isdecimal() else 0
        self._job = number if number < 1 << 16 else 0
        first = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            first.settimeout(_WAIT_S)
            first.connect(path)
            # High up: the program gets the numbers that it would get without us.
            high = min(1000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
            try:
                fd = fcntl.fcntl(first.fileno(), fcntl.F_DUPFD_CLOEXEC, high)
            except OSError:
                fd = os.dup(first.fileno())
        finally:
            first.close()
        self._socket: socket.socket | None = socket.socket(fileno=fd)
        self._socket.settimeout(_WAIT_S)
        self._is = _identity(fd)
        self._next = 0  # number of the next name
        _streams.add(self)

    def names(self, paths: Iterable[str | bytes]) -> int:
        """Gives paths (absolute, normal) numbers, counted up; returns the first one's."""
        begin = first = self._next
        parts: list[bytes] = []
        size = 0
        for path in paths:
            name = os.fsencode(path)
            if size + _LENGTH.size + len(name) > _ROOM:
                self._send(_NAMES, first, len(parts), b"".join(parts))
                first, parts, size = self._next, [], 0
            parts.append(_LENGTH.pack(len(name)) + name)
            size += len(parts[-1])
            self._next += 1
        if parts:
            self._send(_NAMES, first, len(parts), b"".join(parts))
        return begin

    def order(self, position: int, numbers: Sequence[int]) -> None:
        """What comes from a position on; what was said of it and later positions is over."""
        most = _ROOM // 4
        for at in range(0, max(len(numbers), 1), most):
            part = array("I", numbers[at : at + most])
            self._send(_ORDER, position + at, len(part), part.tobytes())

    def at(self, position: int) -> None:
        """The reader has come to a position."""
        self._send(_AT, position, 0, b"")

    def _send(self, kind: int, a: int, count: int, body: bytes) -> None:
        if self._socket is None:
            raise BrokenPipeError("the stream is closed")
        # Programs close descriptors that are not theirs; the number may mean another file by now.
        if _identity(self._socket.fileno()) != self._is:
            self._forget()
            raise BrokenPipeError("the stream's descriptor was closed")
        try:
            self._socket.sendall(
                _HEADER.pack(_MAGIC, kind, 0, count, self._job, len(body), a, 0) + body
            )
            self._drain()
        except OSError:
            self.close()
            raise

    def _drain(self) -> None:
        """Answers are not waited for; a refusal is met at the next message."""
        assert self._socket is not None
        self._socket.settimeout(0)
        while True:
            try:
                answer = self._socket.recv(_HEADER.size)
            except BlockingIOError:
                self._socket.settimeout(_WAIT_S)
                return
            if len(answer) < _HEADER.size or _HEADER.unpack(answer)[2] == _BAD:
                raise BrokenPipeError("the service refused")

    def close(self) -> None:
        """May be called again."""
        if self._socket is None:
            return
        if _identity(self._socket.fileno()) == self._is:
            self._socket.close()
        self._forget()

    def _forget(self) -> None:
        if self._socket is not None:
            self._socket.detach()
        self._socket = None

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # noqa: BLE001, S110 - nothing can be done while being collected
            pass


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _after_fork() -> None:
    """A child has no part in its parent's streams."""
    for stream in list(_streams):
        stream.close()


os.register_at_fork(after_in_child=_after_fork)
