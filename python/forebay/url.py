"""The file service behind ``forebay://`` paths, of fsspec and of TensorFlow.

Under ``forebay run`` it is that run's. Else the first use starts one for this process and those it
starts, which ends some seconds after them. ``FOREBAY_CACHE`` names a folder on a local disk that
keeps the copies for later runs, and ``FOREBAY_CACHE_BYTES`` how much it may take; without it copies
lie in a new folder that goes with the service.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from . import _forebay, files
from ._errors import ForebayError

_log = logging.getLogger("forebay")
_lock = threading.Lock()
_service: files.Service | None = None
_tried = False


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def settings() -> tuple[str, str, str] | None:
    """(cache, socket, sources) of the service, which is started where there is none; None when that
    fails, which is a line in the log: sources are then read.
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
                )
            except (ForebayError, OSError) as error:
                _log.warning("forebay: forebay:// reads from the source: %s", str(error))
                return None
            for text in _service.warnings():
                _log.warning("forebay: %s", text)
            # Processes that are started from here on share it.
            os.environ.update(_service.environment())
    found = tuple(os.environ.get(v, "") for v in (files.CACHE, files.SOCKET, files.SOURCES))
    return found if all(found) else None  # type: ignore[return-value]


_client: tuple[tuple[str, str, str], Any] | None = None


def preloaded() -> bool:
    """Whether every open() of this program is served already."""
    return "libforebay_posix" in os.environ.get("LD_PRELOAD", "")


def open_fd(path: str) -> int:
    """A descriptor of the file's copy while the file is what was copied, or of the file."""
    global _client
    if not preloaded():
        found = settings()
        if found is not None:
            client = _client
            if client is None or client[0] != found:
                client = (found, _forebay.FileClient(*(os.fsencode(text) for text in found)))
                _client = client
            fd = client[1].open_current(os.fsencode(os.path.abspath(path)))
            if fd >= 0:
                return fd
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
