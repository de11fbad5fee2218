"""The file service behind ``forebay://`` paths, of fsspec and of TensorFlow.

Under ``forebay run`` it is that run's. Else the first use starts one for this process and those it
starts, which ends some seconds after them. ``FOREBAY_CACHE`` names a folder on a local disk that
keeps the copies for later runs, and ``FOREBAY_CACHE_BYTES`` how much it may take; without it copies
lie in a new folder that goes with the service.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import threading
from typing import Any

from .. import _forebay, files
from .._errors import ForebayError

_log = logging.getLogger("forebay")
_lock = threading.Lock()
_service: files.Service | None = None
_tried = False


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def settings() -> tuple[str, str, str, str] | None:
    """(cache, socket, sources, job) of the service, which is started where there is none; None
    when that fails, which is a line in the log: sources are then read.
    """
    global _service, _tried
    with _lock:
        if not os.environ.get(files.SOCKET) and not _tried:
            _tried = True
            try:
                # Whoever writes forebay:// says so of each file.
                _service = files.Service.start(
                    cache=os.environ.get("FOREBAY_CACHE") or None,
                    cache_bytes=os.environ.get("FOREBAY_CACHE_BYTES") or None,
                    sources=["/"],
                    job=os.environ.get("FOREBAY_JOB", ""),
                )
            except (ForebayError, OSError) as error:
                _log.warning("forebay: forebay:// reads from the source: %s", str(error))
                return None
            for text in _service.warnings():
                _log.warning("forebay: %s", text)
            # Processes that are started from here on share it.
            os.environ.update(_service.environment())
    found = tuple(
        os.environ.get(v, "") for v in (files.CACHE, files.SOCKET, files.SOURCES, files.JOB)
    )
    return found if all(found[:3]) else None  # type: ignore[return-value]


_client: tuple[tuple[str, str, str, str], Any] | None = None


def preloaded() -> bool:
    """Whether every open() of this program is served already."""
    return "libforebay_posix" in os.environ.get("LD_PRELOAD", "")


class _PartialFile(io.RawIOBase):
    """A large file that is being copied. Its descriptor is the source's, for who asks for one."""

    def __init__(self, part: Any, fd: int) -> None:
        self._part = part
        self._fd = fd
        self._at = 0

    def readinto(self, buffer: Any) -> int:
        got = self._part.read_into(buffer, self._at) if len(buffer) > 0 else 0
        self._at += got
        return got

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence == os.SEEK_CUR:
            offset += self._at
        elif whence == os.SEEK_END:
            offset += os.fstat(self._fd).st_size
        if offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        if not self.closed:
            os.close(self._fd)
        super().close()


def _connected() -> Any:
    global _client
    found = None if preloaded() else settings()
    if found is None:
        return None
    client = _client
    if client is None or client[0] != found:
        client = (found, _forebay.FileClient(*(os.fsencode(text) for text in found)))
        _client = client
    return client[1]


def open_file(path: str) -> io.BufferedReader:
    """The file's copy while the file is what was copied, or the file."""
    client = _connected()
    name = os.fsencode(os.path.abspath(path))
    fd = client.open_current(name) if client is not None else -1
    if fd >= 0:
        return os.fdopen(fd, "rb")
    source = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    part = _forebay.PartialFile.of(client, name, source) if fd == -2 else None
    if part is None:
        return os.fdopen(source, "rb")
    return io.BufferedReader(_PartialFile(part, source), 1 << 17)
