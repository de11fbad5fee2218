"""forebay.grain.Source: a random-access data source for Grain (JAX), read through Forebay.

>>> source = forebay.grain.Source("/data/train")
>>> sampler = grain.samplers.IndexSampler(len(source), shuffle=True, seed=0, ...)
>>> source.follow(sampler)                     # its order is known: read ahead of the workers
>>> loader = grain.DataLoader(data_source=source, sampler=sampler, worker_count=4, ...)

It serves as well in ``grain.MapDataset.source(source)``. Worker processes and ranks of a node share
the node's daemon: one memory, and one read of each sample.
"""

from __future__ import annotations

import itertools
import logging
import operator
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from . import _forebay
from ._errors import ForebayError
from .daemon import SharedEngine, node_engine
from .engine import Engine
from .loader import open_catalog

_log = logging.getLogger("forebay")
_WAIT_S = 60.0
_TELL = 4096  # samples of the order at once; one more lot is told ahead
_LOOK_S = 0.1


class Source:
    """Samples by number, each a dictionary: ``data`` (bytes) and ``label`` (a number).

    Safe for concurrent use by threads; a copy sent to another process by pickle reads through the
    same daemon. When the daemon dies, each process goes on with an engine of its own.

    Args:
        path: A folder of files (class = folder), WebDataset tar shards or TFRecord files.
        fields: WebDataset: the parts of a sample that are wanted, such as ``("jpg", "json")``; they
            take the place of ``data``.
        engine: Default: ``forebay.SharedEngine()``; with ``FOREBAY_DAEMON=off``, one in each
            process.
        format, extensions: As in ``forebay.DataLoader``.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        fields: Sequence[str] = (),
        engine: Engine | None = None,
        format: str | None = None,
        extensions: str | Sequence[str] | None = None,
    ) -> None:
        self._open = dict(path=os.fspath(path), format=format, extensions=extensions)
        self._fields = tuple(fields)
        self._engine = engine or node_engine()
        self._inherited: tuple[int, int] | None = None  # the address of our parent's stream
        self._begin()

    def _begin(self) -> None:
        self.catalog = open_catalog(**self._open)  # type: ignore[arg-type]
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._native: Any = None  # what the stream is in
        self._stream = -1
        self._address: tuple[int, int] | None = None  # of the stream in a daemon
        self._epoch = 0
        self._gone = threading.Event()
        self._base = 0

    # ---- what Grain asks

    def __len__(self) -> int:
        return len(self.catalog)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        number = operator.index(index)
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        record: dict[str, Any] = {}
        batch = self._fetch(number)
        if batch is None:
            record["data"] = self._from_file(number)
        else:
            if self._fields:
                for name in self._fields:
                    record[name] = bytes(batch.field(0, name))
            else:
                record["data"] = bytes(batch[0])
            batch.release()
        record["label"] = self.catalog.label(number)
        return record

    def __repr__(self) -> str:  # Grain puts it into its checkpoints, and compares
        return f"forebay.grain.Source({self._open['path']!r}, {len(self)} samples)"

    def __getstate__(self) -> dict[str, Any]:
        with self._here():
            self._where()
        inherited = self._address
        return {
            "open": self._open, "fields": self._fields, "engine": self._engine,
            "inherited": inherited,
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._open, self._fields = state["open"], state["fields"]
        self._engine, self._inherited = state["engine"], state["inherited"]
        self._begin()

    # ---- the engine

    def _here(self) -> threading.Lock:
        if self._pid != os.getpid():  # forked; its parent's lock may be held
            inherited = self._address
            self._begin()
            self._inherited = inherited
        return self._lock

    def _where(self) -> tuple[Any, int]:
        """The engine and the stream in it. Under the lock."""
        engine = self._engine
        shared = isinstance(engine, SharedEngine)
        if self._native is None:
            native: Any = engine.native
            dataset = engine.dataset(self.catalog)
            options = _forebay.StreamOptions(dataset, 1, itemised=True, declared=True)
            try:
                if not shared:
                    self._stream = native.open_stream(options)
                elif self._inherited is not None:
                    self._stream = native.adopt_stream(options, self._inherited)
                else:
                    self._stream = native.open_shared_stream(options)
            finally:
                native.close_dataset(dataset)  # the stream keeps it
            self._native = native
        if shared:
            self._address = self._native.address(self._stream)
            engine.tell_changes()
        return self._native, self._stream

    def _fetch(self, number: int) -> Any:
        """A batch of one sample; None: the file itself has the answer."""
        try:
            with self._here():
                native, stream = self._where()
            return native.fetch(stream, number, _WAIT_S)
        except ForebayError as error:
            why = str(error)
        finally:
            self._engine.tell_changes()
        if self._fields:
            raise ForebayError(f"{self.catalog.name(number)} cannot be read: {why}")
        return None

    def _from_file(self, number: int) -> bytes:
        catalog = self.catalog
        with open(catalog.object_path(number), "rb") as file:
            file.seek(catalog.offset(number))
            return file.read(catalog.length(number))

    # ---- the order

    def follow(self, order: Any, start: int = 0) -> None:
        """Reads ahead in this order, of which ``start`` samples are skipped: a
        ``grain.samplers.IndexSampler`` or ``SequentialSampler``, or anything that yields sample
        numbers, such as ``grain.MapDataset.range(len(source)).shuffle(seed=0)``. Called once, in
        the process that makes the loader; without it samples are read when they are asked for.
        """
        numbers = itertools.islice(numbers_of(order), start, None)
        with self._here():
            self._where()
        self._base = self._served()
        # One lot is told before the first question comes.
        self._tell(numbers, _TELL)
        threading.Thread(
            target=_tell_on, args=(_Weak(self), numbers, self._gone), daemon=True
        ).start()

    def _served(self) -> int:
        try:
            return self._engine.metrics().get("forebay_stage_samples_total", 0)
        except (ForebayError, OSError):
            return 0

    def _tell(self, numbers: Iterator[int], count: int) -> int:
        drawn = np.fromiter(itertools.islice(numbers, count), np.int64)
        if len(drawn) == 0:
            return 0
        if drawn.min() < 0 or drawn.max() >= len(self):
            raise IndexError(f"the order has numbers that are not below {len(self)}")
        with self._here():
            native, stream = self._where()
            native.declare(stream, self._epoch, drawn.astype(np.uint32))
            self._epoch += 1
        return len(drawn)

    def __del__(self) -> None:
        gone = self.__dict__.get("_gone")
        if gone is not None:
            gone.set()
        try:
            if self._pid == os.getpid() and self._native is not None:
                self._native.close_stream(self._stream)
        except Exception:  # noqa: BLE001, S110 - nothing can be done while being collected
            pass


class _Weak:
    """A source that its thread does not keep."""

    def __init__(self, source: Source) -> None:
        import weakref

        self.get = weakref.ref(source)


def _tell_on(source: _Weak, numbers: Iterator[int], gone: threading.Event) -> None:
    """Tells the rest of an order, as the samples are taken."""
    told = _TELL
    while not gone.wait(_LOOK_S):
        found = source.get()
        if found is None:
            return
        try:
            if told - (found._served() - found._base) < 2 * _TELL:
                count = found._tell(numbers, _TELL)
                if count == 0:
                    return
                told += count
        except Exception as error:  # noqa: BLE001 - samples are read when they are asked for
            _log.warning("forebay: reading ahead is off: %s", str(error))
            return
        del found


def numbers_of(order: Any) -> Iterator[int]:
    """The sample numbers that a sampler of Grain, or an iterable, will yield."""
    kind = type(order)
    if kind.__module__.partition(".")[0] == "grain" and kind.__name__ in (
        "IndexSampler", "SequentialSampler",
    ):  # fmt: skip
        return _sampled(order)
    if isinstance(order, Iterable):
        return (operator.index(i) for i in order)
    raise TypeError(f"follow() takes a sampler of Grain or sample numbers, not {kind.__name__}")


def _sampled(sampler: Any) -> Iterator[int]:
    # A sampler is a pure function of the position. Positions of all shards are counted together;
    # this process asks for those of its own.
    shard = sampler._shard_options
    try:
        for position in itertools.count(shard.shard_index, shard.shard_count):
            yield int(sampler[position].record_key)
    except IndexError:
        return
