"""open() inside a worker: files that the data set lists come from the engine's memory."""

from __future__ import annotations

import builtins
import io
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import _forebay

_log = logging.getLogger("forebay")
_real_open = builtins.open
# Longer than any storage that still works takes for a sample; then the real open() has its turn.
_WAIT_S = 20.0
_READ_MODES = {"r", "rt", "tr", "rb", "br"}


class SampleFile(io.BytesIO):
    """A sample's bytes as a binary file opened for reading."""

    mode = "rb"

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name
        self._real: Any = None

    def writable(self) -> bool:
        return False

    def write(self, _: Any) -> int:
        raise io.UnsupportedOperation("not writable")

    def writelines(self, _: Any) -> None:
        raise io.UnsupportedOperation("not writable")

    def truncate(self, _: int | None = None) -> int:
        raise io.UnsupportedOperation("not writable")

    def fileno(self) -> int:
        """A descriptor of the real file, for code that insists on one."""
        if self._real is None:
            self._real = _real_open(self.name, "rb", buffering=0)
            os.lseek(self._real.fileno(), self.tell(), os.SEEK_SET)
        return self._real.fileno()

    def close(self) -> None:
        if self._real is not None:
            self._real.close()
            self._real = None
        super().close()


class Reader:
    """Opens samples through an engine; anything else, and anything that fails, through the real open()."""

    def __init__(self, client: _forebay.WorkerClient, stream: int, numbers: Mapping[str, int]) -> None:
        self._client: _forebay.WorkerClient | None = client
        self._stream = stream
        self._numbers = numbers

    def sample(self, file: Any) -> int | None:
        """The number of the sample that a path names."""
        if not isinstance(file, (str, os.PathLike)):
            return None
        path = os.fspath(file)
        return self._numbers.get(path) if isinstance(path, str) else None

    def open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        """As the built-in."""
        if self._client is not None and opener is None and buffering != 0 and mode in _READ_MODES:
            number = self.sample(file)
            if number is not None:
                content = self._fetch(number)
                if content is not None:
                    raw = SampleFile(content, os.fspath(file))
                    if "b" in mode:
                        return raw
                    return io.TextIOWrapper(raw, encoding, errors, newline)
        return _real_open(file, mode, buffering, encoding, errors, newline, closefd, opener)

    def _fetch(self, number: int) -> bytes | None:
        assert self._client is not None
        try:
            return self._client.fetch(self._stream, number, _WAIT_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on without us
            # A failing file fails again, in its own words, in the real open(); a lost engine stays lost.
            if not self._client.connected:
                _log.warning("forebay: reading from the source from now on: %s", error)
                self._client = None
            return None


def start_worker(socket: str, stream: int, numbers: Mapping[str, int]) -> Reader | None:
    """Attaches this process to the engine; None, with one line in the log, when that fails."""
    try:
        return Reader(_forebay.WorkerClient.attach(socket, 5.0), stream, numbers)
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on without us
        _log.warning("forebay: worker %d reads from the source: %s", os.getpid(), error)
        return None


_active: list[Reader] = []


def active_reader() -> Reader | None:
    """The reader that is in force in this process."""
    return _active[-1] if _active else None


@contextmanager
def intercepting(reader: Reader | None) -> Iterator[None]:
    """builtins.open and io.open go through `reader` inside."""
    if reader is None:
        yield
        return
    saved = (builtins.open, io.open)
    builtins.open = reader.open  # type: ignore[assignment]
    io.open = reader.open  # type: ignore[assignment]
    _active.append(reader)
    try:
        yield
    finally:
        _active.pop()
        builtins.open, io.open = saved  # type: ignore[assignment]


_for_life: list[Any] = []


def intercept_for_life(reader: Reader | None) -> None:
    """As intercepting(), until the process ends."""
    context = intercepting(reader)
    context.__enter__()
    _for_life.append(context)  # its end would put the real open() back
