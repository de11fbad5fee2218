"""open() inside a worker: files that the data set lists come from the engine's memory."""

from __future__ import annotations

import builtins
import io
import logging
import multiprocessing
import os
import threading
import time
import zlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from .. import _forebay
from .._errors import ChangedError
from .own_writes import Written

_log = logging.getLogger("forebay")
_real_open = builtins.open
# Longer than any storage that still works takes for a sample; then the real open() has its turn.
_WAIT_S = 20.0
_COUNT_EVERY = 64
_ATTACH_S = 5.0
# Seconds between tries to come to an engine again, when it is still the one that was lost.
_AGAIN_S = (1.0, 4.0, 16.0, 60.0)
_READ_MODES = {"r", "rt", "tr", "rb", "br"}


class Place:
    """Where the samples are: an engine's socket and a stream of it. The main process writes it and
    its workers, forked or spawned, read it: the engine may change while they run.
    """

    _BYTES = 256

    def __init__(self) -> None:
        self._text = multiprocessing.RawArray("c", self._BYTES)
        self._count = multiprocessing.RawValue("Q", 0)  # of changes
        self._lost = multiprocessing.RawValue("Q", 0)
        self._asked = multiprocessing.RawValue("Q", 0)
        self._changed = multiprocessing.RawValue("b", 0)

    def move(self, socket: str, stream: int) -> None:
        said = os.fsencode(f"{stream} {socket}")
        if len(said) > self._BYTES - 16:
            raise OSError(f"the path of a socket is too long: {socket}")
        self._text.value = b"%08x %b" % (zlib.crc32(said), said)
        self._count.value += 1

    @property
    def version(self) -> int:
        """Another one than before: it has moved."""
        return self._count.value

    def read(self) -> tuple[str, int] | None:
        """(socket, stream); None while it is being written."""
        crc, _, said = self._text.value.partition(b" ")
        if crc != b"%08x" % zlib.crc32(said):
            return None
        stream, _, socket = said.partition(b" ")
        return os.fsdecode(socket), int(stream)

    def tell_asked(self) -> None:
        """A worker asks for a sample."""
        self._asked.value += 1

    @property
    def asked(self) -> int:
        """Another number than before: workers have asked. It does not count them: some at once may
        count as one.
        """
        return self._asked.value

    def tell_lost(self) -> None:
        """A worker has lost the engine."""
        self._lost.value = self.version

    def was_lost(self) -> bool:
        """Whether a worker has lost the engine of now. Said once."""
        lost = self._lost.value == self.version
        self._lost.value = 0
        return lost

    def tell_changed(self) -> None:
        """A file is not as it was when it was listed."""
        self._changed.value = 1

    @property
    def changed(self) -> bool:
        """Whether one was."""
        return bool(self._changed.value)


class WorkerWaits:
    """What each worker has waited for in the engine, by cause, and how many samples it has had from
    there. The workers, forked or spawned, write it and their main process reads it.

    It only grows, over all workers that had a slot: two of one number at the same time, as of two
    passes at once, share one, and what they count at the same moment may be lost.
    """

    OWN = 0
    """The slot of the main process; worker n has n + 1."""
    _SLOTS = 256  # further workers are not counted
    _WIDTH = len(_forebay.STALL_CAUSES) + 1

    def __init__(self) -> None:
        self._cells = multiprocessing.RawArray("Q", self._SLOTS * self._WIDTH)

    def add(self, slot: int, waits: list[int], samples: int) -> None:
        """Nanoseconds by cause."""
        if not 0 <= slot < self._SLOTS:
            return
        at = slot * self._WIDTH
        for place, wait in enumerate(waits):
            if wait > 0:  # threads of one reader may come out of order
                self._cells[at + place] += wait
        self._cells[at + self._WIDTH - 1] += samples

    def waits(self, slot: int | None) -> list[int]:
        """Nanoseconds by cause of one slot, or of all together."""
        if slot is not None and 0 <= slot < self._SLOTS:
            at = slot * self._WIDTH
            return self._cells[at : at + self._WIDTH - 1]
        cells = self._cells[:]
        return [sum(cells[place :: self._WIDTH]) for place in range(self._WIDTH - 1)]

    def samples(self) -> int:
        """Of all slots."""
        return sum(self._cells[self._WIDTH - 1 :: self._WIDTH])


class SampleFile(io.BytesIO):
    """A sample's bytes as a binary file opened for reading."""

    mode = "rb"

    def __init__(self, content: bytes, name: str) -> None:
        super().__init__(content)
        self.name = name
        self._real: Any = None

    def peek(self, _: int = 0) -> bytes:
        """What is left, without moving; as of a buffered file."""
        return bytes(self.getbuffer()[self.tell() :])

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
    """Opens samples through an engine."""

    def __init__(
        self,
        place: Place,
        numbers: Mapping[str, int],
        folder: str,
        waits: WorkerWaits,
        slot: int,
        written: Written,
    ) -> None:
        self._place = place
        self._written = written
        self._numbers = numbers
        self._folder = folder
        self._waits = waits
        self._slot = slot
        self._waited: list[int] = []  # by the client of now, as far as it was counted
        self._served = 0
        self._passed = 0
        self._client: _forebay.WorkerClient | None = None
        self._stream = 0
        self._version = 0
        self._tries = 0
        self._again = 0.0
        self._attach()

    def _attach(self) -> None:
        self._client = None
        self._version = self._place.version
        found = self._place.read()
        if found is None:  # the next call sees another version
            self._version = 0
            return
        socket, self._stream = found
        self._waited = [0] * len(_forebay.STALL_CAUSES)
        self._client = _forebay.WorkerClient.attach(socket, _ATTACH_S)

    def _now(self) -> _forebay.WorkerClient | None:
        """The engine of now; None while there is none."""
        moved = self._version != self._place.version
        if not moved and (self._client is not None or time.monotonic() < self._again):
            return self._client
        if moved:
            self._tries = 0
        try:
            self._attach()
        except Exception:  # noqa: BLE001 - whatever it is, training goes on without us
            self._wait()
        return self._client

    def _wait(self) -> None:
        self._again = time.monotonic() + _AGAIN_S[min(self._tries, len(_AGAIN_S) - 1)]
        self._tries += 1

    def sample(self, file: Any) -> int | None:
        """The number of the sample that a path names."""
        if not isinstance(file, (str, os.PathLike)):
            return None
        path = os.fspath(file)
        number = self._numbers.get(path) if isinstance(path, str) else None
        if number is not None and not os.path.isabs(path) and os.getcwd() != self._folder:
            return None  # another file by now
        if number is not None and self._written[number]:
            return None  # what the engine has is older
        return number

    def fetch(self, number: int) -> bytes | None:
        """A sample's bytes; None when only the real open() can tell."""
        self._place.tell_asked()
        client = self._now()
        if client is None:
            return None
        try:
            content = client.fetch(self._stream, number, _WAIT_S)
            self._count(client, content is not None)
            # The engine is told now and then how many reads it answered.
            self._served += content is not None
            self._passed += content is None
            if self._served + self._passed >= _COUNT_EVERY:
                client.served(self._served, self._passed)
                self._served = self._passed = 0
            return content
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on without us
            # A failing file fails again, in its own words, in the real open(). Logged as text: an
            # exception that a handler keeps would keep the engine.
            self._count(client, False)
            if isinstance(error, ChangedError):
                self._place.tell_changed()
            if not client.connected:
                if self._client is client:
                    _log.warning("forebay: reading from the source for now: %s", str(error))
                    self._client = None
                    self._wait()
                    self._place.tell_lost()
            self._passed += 1
            return None

    def _count(self, client: _forebay.WorkerClient, served: bool) -> None:
        waits = client.waits
        if self._client is not client:  # another thread has attached anew
            return
        before, self._waited = self._waited, waits
        self._waits.add(self._slot, [w - b for w, b in zip(waits, before, strict=True)], served)


def start_worker(
    place: Place,
    numbers: Mapping[str, int],
    folder: str,
    waits: WorkerWaits,
    slot: int,
    written: Written,
) -> Reader | None:
    """Attaches this process to the engine; None, with one line in the log, when that fails.

    `numbers` are the samples by path; relative ones start in `folder`. What is waited for goes to a
    slot of `waits`. Files that were `written` to are not the engine's any more.
    """
    try:
        return Reader(place, numbers, folder, waits, slot, written)
    except Exception as error:  # noqa: BLE001 - whatever it is, training goes on without us
        _log.warning("forebay: worker %d reads from the source: %s", os.getpid(), str(error))
        return None


# Readers in force in this process, in any thread; replaced as a whole, under the lock.
_active: tuple[intercepting, ...] = ()
_lock = threading.Lock()
_before: tuple[Any, Any] = (builtins.open, io.open)  # what _open stands in for


def _open(
    file: Any,
    mode: str = "r",
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Any = None,
) -> Any:
    """The built-in, with samples from the engine; what it does not have, from the real one."""
    if mode in _READ_MODES and buffering != 0 and closefd and opener is None:
        text = "b" not in mode
        if text or (encoding is None and errors is None and newline is None):
            for each in reversed(_active):
                reader = each.reader
                if reader is None or not each.inside:
                    continue
                number = reader.sample(file)
                content = None if number is None else reader.fetch(number)
                if content is None:
                    continue
                raw = SampleFile(content, os.fspath(file))
                if not text:
                    return raw
                wrapped = io.TextIOWrapper(raw, encoding, errors, newline, buffering == 1)
                wrapped.mode = mode  # type: ignore[misc]
                return wrapped
    return _before[0](file, mode, buffering, encoding, errors, newline, closefd, opener)


def open_here(file: Any, mode: str, **kwargs: Any) -> Any:
    """open(), through the engine where a reader is in force."""
    return (_open if _active else open)(file, mode, **kwargs)


class intercepting:  # noqa: N801 - used as a statement
    """builtins.open and io.open go through `reader` while `inside`, in every thread.

    A signal handler may raise before __exit__ has begun: whoever cannot have that sets `inside` to
    False as well, which is no call. What is left behind then is cleared by the next one.
    """

    def __init__(self, reader: Reader | None) -> None:
        self.reader = reader
        self.inside = False

    def __enter__(self) -> None:
        global _active, _before
        if self.reader is None:
            return
        with _lock:
            others = tuple(each for each in _active if each.inside)
            if not others:
                # What an interrupted one has left in place is not what was before.
                _before = (
                    _before[0] if builtins.open is _open else builtins.open,
                    _before[1] if io.open is _open else io.open,
                )
                builtins.open = io.open = _open  # type: ignore[assignment]
            self.inside = True
            _active = (*others, self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        global _active
        if self.reader is None:
            return
        self.inside = False
        with _lock:
            # Threads leave in any order; each takes out its own.
            _active = tuple(each for each in _active if each.inside)
            if not _active:
                _restore()


def _restore() -> None:
    # What somebody else has put in our place stays.
    if builtins.open is _open:
        builtins.open = _before[0]
    if io.open is _open:
        io.open = _before[1]


def _after_fork() -> None:
    """A child starts without its parent's readers: their connections are the parent's."""
    global _active, _lock
    _lock = threading.Lock()
    if _active:
        _active = ()
        _restore()


os.register_at_fork(after_in_child=_after_fork)


def intercept_for_life(reader: Reader | None) -> None:
    """As intercepting(), until the process ends."""
    intercepting(reader).__enter__()
