"""forebay.accelerate: the user's own DataLoader, with its reads served from memory.

The data set, transforms, collation and workers stay as they are. In the main process, the order
that the sampler will yield is told to the engine, which reads ahead. In the workers, ``open()`` of
a file that the data set lists returns the sample's bytes from the engine's memory; everything else
goes to the real ``open``. Whatever fails, the real ``open`` is called: the program sees what it
would have seen without.

The engine is this process's own, or, with several ranks on the node, the daemon's: ranks and their
workers then share one memory and read each file once. When the daemon dies, the workers read from
the source until the main process has an engine of its own for them, a moment later.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _forebay
from ._errors import ForebayError
from ._internal import ranks
from ._internal.foresight import Replay, between_passes, numbers, paths_of, replay
from ._internal.own_writes import Written
from ._internal.worker_io import (
    Place,
    Reader,
    WorkerWaits,
    intercept_for_life,
    intercepting,
    open_here,
    start_worker,
)
from .daemon import SharedEngine, default_engine
from .engine import Engine
from .views.progress import counting
from .views.report import EpochReport, log_epoch, story

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

_log = logging.getLogger("forebay")
_PASSES_KEPT = 1000
_BATCHES_UNPROVEN = 4  # read ahead before the data set is seen to read through us
_CAUSES = _forebay.STALL_CAUSES
_DECODE = _CAUSES.index("decode")


def accelerate(
    loader: DataLoader, *, memory: int | str | None = None, engine: Engine | None = None
) -> DataLoader:
    """Returns a loader that yields exactly what ``loader`` yields, faster from slow storage.

    Covered are map-style data sets that keep a list of paths (``ImageFolder``, ``DatasetFolder``,
    any attribute with one path, or a tuple that starts with one, for each item; ``Subset`` and
    ``ConcatDataset`` of these) and read them with ``open()``, ``pathlib``, PIL, or
    ``forebay.open``. What is not covered is named in one line of the log, and the loader comes
    back as it was.

    Files are read ahead in the sampler's order, across the end of a pass where the next one's
    order can be worked out: with ``shuffle=True``, give the loader a ``generator``. Without one the
    order comes from PyTorch's global generator, which everything else in the program draws from.

    Args:
        loader: A ``torch.utils.data.DataLoader``.
        memory: Budget of the engine, such as ``"4G"``; see ``forebay.Engine``.
        engine: An engine of your own, or a ``forebay.SharedEngine``. Default: as for
            ``forebay.DataLoader``, the node's daemon where the node has several ranks, else the
            process's shared one.
    """
    from torch.utils.data import DataLoader, IterableDataset

    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"accelerate() takes a torch.utils.data.DataLoader, not {type(loader).__name__}"
        )
    if hasattr(loader, "_forebay"):
        return loader  # it is fast already
    name = type(loader.dataset).__name__
    if isinstance(loader.dataset, IterableDataset):
        return _unchanged(loader, f"{name} is an IterableDataset, whose order cannot be known")
    paths = paths_of(loader.dataset)
    if paths is None:
        return _unchanged(loader, f"{name} has no list of paths, one for each item")
    try:
        hub = _Hub(name, paths, loader.batch_size or 1, engine or default_engine(memory=memory))
    except (ForebayError, OSError) as error:
        return _unchanged(loader, str(error))
    # What workers may have drawn and not read yet.
    hub.lag = loader.num_workers * (loader.prefetch_factor or 2) * (loader.batch_size or 1)
    fast = copy.copy(loader)
    # DataLoader refuses new samplers through setattr; the copy shares nothing that changes.
    state = fast.__dict__
    if loader.batch_sampler is not None:
        state["batch_sampler"] = _Announcing(loader.batch_sampler, hub, batched=True)
    else:
        state["sampler"] = _Announcing(loader.sampler, hub, batched=False)
    state["worker_init_fn"] = _WorkerInit(loader.worker_init_fn, hub)
    state["_iterator"] = None
    state["_forebay"] = hub
    fast.__class__ = _accelerated(type(loader))
    return fast


def _unchanged(loader: DataLoader, reason: str) -> DataLoader:
    _log.warning("forebay: this loader runs unchanged: %s", reason)
    if not hasattr(loader, "report"):
        # A program that asks for it need not know whether its loader is covered.
        loader.__dict__["report"] = functools.partial(_report_unchanged, reason)
    return loader


def _report_unchanged(reason: str) -> str:
    return f"This loader runs unchanged: {reason}"


# ---- the main process


class _Hub:
    """Engine, stream and socket that one accelerated loader uses."""

    def __init__(self, name: str, paths: Sequence[str], batch_size: int, engine: Engine) -> None:
        self.name = name  # of the data set, for the log
        self.numbers: dict[str, int] = {}
        for path in paths:
            self.numbers.setdefault(path, len(self.numbers))
        self.folder = os.getcwd()  # where relative paths start
        self.samples = np.fromiter((self.numbers[p] for p in paths), np.uint32, len(paths))
        self.written = Written(self.numbers, self.folder)
        self.written.mark(_written_before(engine))
        self.catalog, self._saved = _catalog_of([os.path.abspath(p) for p in self.numbers], engine)
        self._lengths: Any = self.catalog.lengths()
        self.engine = engine
        self.lag = 0
        self.epoch = 0
        self.place = Place()
        self.waits = WorkerWaits()
        self._batch_size = batch_size
        self._pid = os.getpid()
        self._checked = False
        self._ahead = True
        self._future: list[int] | None = None  # of this pass, where it is known
        self._at = 0  # in it
        self._told = 0  # so much of it, or of what was drawn, has been declared
        self._begun = False
        self._unproven = 0  # so much may be declared before a worker has asked
        self._trusted = False  # the pass before has read through us
        self._asked = 0  # samples that workers had asked for when the pass began
        self._fetched = 0  # by the workers before it
        self._next: list[int] | None = None  # the pass after it, as it was guessed and declared
        # What may happen between two passes, the likeliest first; those that were wrong are gone.
        self._guesses: list[Callable[[Any], bool]] | None = None
        self.stay = False  # workers do, from pass to pass
        self.generator: Any = None  # the loader's
        self.drawn_samples = self.drawn_bytes = 0  # of all passes
        self.passes: deque[EpochReport] = deque(maxlen=_PASSES_KEPT)
        # The first is not tried twice: what this raises goes to the caller's log.
        self._open()
        _hubs.add(self)

    def _open(self) -> None:
        """Opens the stream, and tells the workers where it is."""
        engine = self.engine
        self.native: Any = engine.native
        dataset = engine.dataset(self.catalog)
        options = _forebay.StreamOptions(
            dataset,
            self._batch_size,
            itemised=True,
            declared=True,
            first_epoch=self.epoch,
        )
        try:
            if isinstance(engine, SharedEngine):
                self.stream = engine.native.open_shared_stream(options)
            else:
                self.stream = self.native.open_stream(options)
        finally:
            self.native.close_dataset(dataset)  # the stream keeps it
        self._address: tuple[int, int] | None = None  # as the workers were told
        self._server: Any = None
        self._follow()

    def _follow(self) -> bool:
        """Whether the stream has moved, to an engine of this process or to a daemon; the workers
        are told. What was declared before is over then.
        """
        engine = self.engine
        shared = isinstance(engine, SharedEngine)
        address = self.native.address(self.stream) if shared else (0, self.stream)
        engine.tell_changes()
        if address == self._address:
            return False
        if address[0]:
            assert isinstance(engine, SharedEngine)
            server, self.socket = None, engine.socket
        else:
            server = _serve(engine)
            if server is None:  # it has moved again
                return self._follow()
            self.socket = server.path
        self.place.move(self.socket, address[1])
        self._address, self._server = address, server
        self._next = None
        return True

    def reader(self) -> Reader | None:
        """For the data set that runs in this process."""
        return start_worker(
            self.place, self.numbers, self.folder, self.waits, WorkerWaits.OWN, self.written
        )

    def _call(self, function: Callable[[], object]) -> None:
        """Never fails: the program does not need it."""
        if not self._ahead:
            return
        try:
            function()
        except (ForebayError, OSError) as error:
            self._ahead = False
            _log.warning("forebay: reading ahead is off: %s", str(error))

    def _moved(self) -> bool:
        """As _follow(), which may fail."""
        moved = False

        def look() -> None:
            nonlocal moved
            moved = self._follow()

        self._call(look)
        return moved

    def begin(self, future: list[int] | None) -> None:
        """A new pass over the data set, and all that it will ask for where that is known."""
        asked = self.place.asked
        self._trusted = asked != self._asked
        # Of the first pass nothing is known; one that asked for nothing is not believed in.
        self._unproven = 0 if self._begun else max(self.lag, _BATCHES_UNPROVEN * self._batch_size)
        self._begun, self._asked = True, asked
        self._ahead = True
        moved = self._moved()
        guess, self._next = self._next, None
        known = guess is not None and guess == future
        if guess is not None and future is not None and not known and self._guesses:
            del self._guesses[0]
        goes_on = known and not moved and self._all_fetched()
        self._future, self._at = future, 0
        self._fetched = self.waits.samples()
        if goes_on:
            self._told = 0 if future is None else len(future)
            return
        self._told = 0  # what was declared before is over
        self._call(lambda: self.native.seek(self.stream, self.epoch, 0))
        self._tell()

    def start_over(self) -> None:
        """What was foreseen of this pass is not what it asks for."""
        self._ahead = True
        self._future, self._next, self._at, self._told = None, None, 0, 0
        self._moved()
        self._call(lambda: self.native.seek(self.stream, self.epoch, 0))

    def _covered(self) -> bool:
        """Whether the data set is known to read through us. One that does not would have every file
        read twice: by us, ahead of it, and by itself.
        """
        return self._trusted or self.place.asked != self._asked

    def _all_fetched(self) -> bool:
        """Whether the workers have had from the engine what the pass before was to ask for, no more
        and no less: only then its order, and the next one's behind it, are where the reader is.
        """
        future = self._future
        if future is None or self._at != len(future):
            return False
        return self.waits.samples() - self._fetched == len(future)

    def look_beyond(self, known: Replay, apart: bool) -> bool:
        """Declares the next pass as it will probably be: the engine reads ahead across the end of
        this one. Whether it was right shows when it begins. False: it is too early to tell.
        """
        if self._future is None or self._told < len(self._future):
            return False
        if self._guesses is None:
            self._guesses = between_passes(known, self.stay, apart)
        if not self._guesses or not self._guesses[0](known.sampler):
            return True
        guess = known.draw()
        self.declare(guess)
        if self._moved():
            self._tell_again()
        elif self._ahead:
            self._next = guess
        return True

    def _tell_again(self) -> None:
        """The stream is a new one: what is left of this pass is told to it."""
        self._call(lambda: self.native.seek(self.stream, self.epoch, 0))
        if self._future is not None:
            self.declare(self._future[max(0, self._at - self.lag) : self._told])

    def _tell(self) -> None:
        """Declares what was foreseen: at first enough for the workers to begin with, the rest when
        one of them has asked for a sample.
        """
        if self._future is None or self._told >= len(self._future):
            return
        end = len(self._future) if self._covered() else min(self._unproven, len(self._future))
        if end > self._told:
            self.declare(self._future[max(self._told, self._at - self.lag) : end])
            self._told = end

    def drawn(self, indices: Sequence[int]) -> None:
        """The sampler has come to these."""
        self._tell()
        self._at += len(indices)
        order = self._order(indices)
        self.drawn_samples += len(order)
        self.drawn_bytes += int(self._lengths[order].sum(dtype=np.int64))

    def follow(self, indices: Sequence[int]) -> None:
        """Drawn, and not foreseen."""
        if self._told < self._unproven or self._covered():
            self.declare(indices)
            self._told += len(indices)

    def _order(self, indices: Sequence[int]) -> np.ndarray:
        """The samples of the catalog that the data set's items read."""
        drawn = np.asarray(indices, dtype=np.int64)
        count = len(self.samples)
        # The data set itself will object to the others.
        return self.samples[drawn[(drawn >= -count) & (drawn < count)]]

    def declare(self, indices: Sequence[int]) -> None:
        """What the data set will be asked for next."""
        order = self._order(indices)
        if len(order) == 0:
            return

        def say() -> None:
            self.native.declare(self.stream, self.epoch, order)
            self.epoch += 1

        self._call(say)

    def check(self) -> None:
        """Between two batches: has the daemon gone, or come back? Then the rest of the pass goes on
        with the engine of now.
        """
        if not isinstance(self.engine, SharedEngine):
            return
        if self.place.was_lost():
            # A question that a daemon which does not move any more cannot answer.
            self.native.waiting_for(self.stream)
        if self._moved():
            self._tell_again()

    def metrics(self) -> dict[str, int]:
        """Of the engine; the daemon's are the whole node's. Empty when it cannot tell."""
        try:
            return self.engine.metrics()
        except (ForebayError, OSError):
            return {}

    def stalled(self, waits: Sequence[float]) -> None:
        """The consumer has waited for so many seconds, by cause. Never fails: it is for those who
        look on.
        """
        try:
            for cause, seconds in enumerate(waits):
                if seconds > 0:
                    self.native.stalled(self.stream, cause, seconds)
        except (ForebayError, OSError):
            pass  # a daemon that has gone; the next declaration meets it

    def _forget_changed(self) -> None:
        """A file that was rewritten in place is read by the real open() from now on. The next run
        looks at all files again.
        """
        if not self._saved or not self.place.changed:
            return
        _log.info("forebay: files have changed since they were listed; the next start lists them")
        with contextlib.suppress(OSError):
            os.unlink(self._saved)
        self._saved = ""

    def finished(self, tally: _Tally) -> None:
        """A pass has delivered everything: what did it cost? The first: did it read through us?"""
        self._forget_changed()
        report = tally.report(self.passes[-1].epoch + 1 if self.passes else 0)
        self.passes.append(report)
        log_epoch(self.name, ranks.resolve(None, None)[0], lambda: report, self.engine.cluster)
        with contextlib.suppress(ForebayError, OSError):  # a daemon that has just gone
            self.engine.warn_of_cache()
        if self._checked:
            return
        self._checked = True
        if self.place.asked == self._asked:
            _log.warning(
                "forebay: the data set reads its files in a way that is not covered (not through "
                "open()); "
                "use forebay.open(path) in it to make them fast"
            )

    def report(self) -> str:
        """As of a loader of ours."""
        passes = list(self.passes)
        try:
            cluster, problem = self.engine.cluster(), self.engine.peers_problem()
            cache = self.engine.cache_problem()
        except (ForebayError, OSError):  # a daemon that has just gone
            cluster, problem, cache = None, "", ""
        return story(passes, cluster, problem, cache)

    def __del__(self) -> None:
        try:
            if self._pid == os.getpid():
                _remember_written(self)
                self.native.close_stream(self.stream)
        except Exception:  # noqa: BLE001, S110 - nothing can be done while being collected
            pass


_hubs: weakref.WeakSet[_Hub] = weakref.WeakSet()
# Files that the program wrote to while an engine, which lives on, had them in its memory.
_written_with: weakref.WeakKeyDictionary[Engine, set[str]] = weakref.WeakKeyDictionary()


def _remember_written(hub: _Hub) -> None:
    if paths := hub.written.paths():
        _written_with.setdefault(hub.engine, set()).update(paths)


def _written_before(engine: Engine) -> set[str]:
    for hub in list(_hubs):
        _remember_written(hub)
    return _written_with.get(engine, set())


def _common_folder(files: list[str]) -> str:
    return os.path.dirname(os.path.commonprefix([min(files), max(files)]))


def _catalog_of(files: list[str], engine: Engine) -> tuple[_forebay.Catalog, str]:
    """The files' catalog, and where it is saved: as of the last start where that is known to hold.

    A file that is rewritten in place shows in its own size and time only. So where the engine may
    have bytes of it from before, each file is looked at; elsewhere they are read, and that tells.
    """
    with counting("looking at the data set's files") as progress:
        if isinstance(engine, SharedEngine) or engine._options["cache_dir"]:
            looks = engine.looks(_common_folder(files)) if files else None
            if looks is None:
                return _forebay.Catalog.from_files(files, progress), ""
            catalog, _, note, _ = _forebay.Catalog.open_files(files, progress, True, looks)
            if note:
                _log.info("forebay: %s", note)
            return catalog, ""
        catalog, _, note, saved = _forebay.Catalog.open_files(files, progress, look=False)
        if engine.may_hold(catalog.root):
            catalog, _, note, saved = _forebay.Catalog.open_files(files, progress)
    if note:
        _log.info("forebay: %s", note)
    return catalog, saved


class _Tally:
    """What one pass over the data set costs.

    The consumer waits for the worker that makes its batch, or makes it itself. What that worker
    meanwhile waited for in the engine, the engine has charged to causes; with the rest of the time
    it decodes, or does whatever else the data set does.
    """

    _TELL_S = 0.01  # of waiting, before those who look on are told

    def __init__(self, hub: _Hub, workers: int) -> None:
        self._hub = hub
        self._workers = workers
        self._start = self._last = time.monotonic()
        self._metrics = hub.metrics()
        self._drawn = hub.drawn_samples, hub.drawn_bytes
        self._gaps: list[float] = []
        self._wait = [0.0] * len(_CAUSES)
        self._untold = [0.0] * len(_CAUSES)
        self._asked = 0.0
        self._slot: int | None = None
        self._before: list[int] = []
        self._open = True

    def ask(self, iterator: Any) -> None:
        """The consumer asks for the next batch."""
        self._slot = self._awaited(iterator)
        self._before = self._hub.waits.waits(self._slot)
        self._asked = time.monotonic()

    def _awaited(self, iterator: Any) -> int | None:
        """Who makes the next batch; None when PyTorch does not say."""
        if self._workers == 0:
            return WorkerWaits.OWN
        try:
            return int(iterator._task_info[iterator._rcvd_idx][0]) + 1
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            return None

    def _charge(self, now: float) -> None:
        waited = now - self._asked
        after = self._hub.waits.waits(self._slot)
        # Of all workers together it is a mean one's.
        share = 1e-9 if self._slot is not None else 1e-9 / self._workers
        waits = [(a - b) * share for a, b in zip(after, self._before, strict=True)]
        known = sum(waits)
        if known > waited:  # one of them began before the consumer did
            waits = [wait * waited / known for wait in waits]
            known = waited
        waits[_DECODE] += waited - known
        for place, wait in enumerate(waits):
            self._wait[place] += wait
            self._untold[place] += wait
        if sum(self._untold) >= self._TELL_S:
            self._tell()

    def _tell(self) -> None:
        self._hub.stalled(self._untold)
        self._untold = [0.0] * len(_CAUSES)

    def batch(self) -> None:
        """It has come."""
        now = time.monotonic()
        self._charge(now)
        self._gaps.append(now - self._last)
        self._last = now

    @property
    def count(self) -> int:
        return len(self._gaps)

    def ended(self, asked: bool) -> bool:
        """There is none; ``asked``: it was waited for. True the first time."""
        first, self._open = self._open, False
        if first:
            if asked:
                self._charge(time.monotonic())
            self._tell()
        return first

    def report(self, epoch: int) -> EpochReport:
        metrics = self._hub.metrics()
        # Another engine than at the start has counts of its own.
        grown = {name: max(0, metrics[name] - self._metrics.get(name, 0)) for name in metrics}
        return EpochReport(
            epoch=epoch,
            seconds=time.monotonic() - self._start,
            batches=len(self._gaps),
            samples=self._hub.drawn_samples - self._drawn[0],
            bytes=self._hub.drawn_bytes - self._drawn[1],
            wait=dict(zip(_CAUSES, self._wait, strict=True)),
            source_reads=grown.get("forebay_source_reads_total", 0),
            source_bytes=grown.get("forebay_source_read_bytes_total", 0),
            batch_seconds=np.array(self._gaps),
            peer_reads=grown.get("forebay_peer_reads_total", 0),
            peer_bytes=grown.get("forebay_peer_read_bytes_total", 0),
        )


class _Server:
    """Lends an engine of this process to the workers. It keeps that engine, which may have no other
    owner.
    """

    def __init__(self, native: _forebay.Engine) -> None:
        self.of = (os.getpid(), native.identity)
        self._native = _forebay.Server(native)
        self.path = self._native.path

    def close(self) -> None:
        """Disconnects the workers."""
        self._native.close()


def _serve(engine: Engine) -> _Server | None:
    """The one server on an engine of this process; None: there is a daemon. It goes with that
    engine; where a daemon may come back, with the last hub that needs it.
    """
    shared = isinstance(engine, SharedEngine)
    way: Any = engine.native
    native: _forebay.Engine | None = way.engine if shared else way
    if native is None:
        return None
    kept = engine.__dict__.get("_server")
    server = kept() if isinstance(kept, weakref.ref) else kept
    if server is None or server.of != (os.getpid(), native.identity):
        server = _Server(native)
        engine.__dict__["_server"] = weakref.ref(server) if shared else server
    return server


class _Announcing:
    """A sampler that tells the engine what it will yield, and yields what the real one yields."""

    def __init__(
        self,
        inner: Any,
        hub: _Hub | None = None,
        *,
        batched: bool = True,
        batch_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        # Lightning puts another sampler into a loader by making its batch sampler anew, as if it
        # were PyTorch's own; see _adopted().
        if batch_size is not None:
            from torch.utils.data import BatchSampler

            inner = BatchSampler(inner, batch_size, drop_last)
        self.__dict__.update(_inner=inner, _hub=hub, _batched=batched)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._inner, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        hub = self._hub
        known = replay(self._inner, self._batched)
        future = None if known is None else known.draw()
        hub.begin(future)
        at = 0
        for drawn in self._inner:
            indices = numbers(drawn if self._batched else [drawn])
            if future is None or future[at : at + len(indices)] != indices:
                # Unknown sampler, or one that drew something else: follow it, batch by batch.
                if future is not None:
                    _log.warning(
                        "forebay: the sampler drew another order than foreseen; following it"
                    )
                    hub.start_over()
                future = known = None
                hub.follow(indices)
            at += len(indices)
            hub.drawn(indices)
            beyond = known is not None and future is not None and 2 * at >= len(future)
            if beyond and hub.look_beyond(known, self._apart()):
                known = None
            yield drawn

    def _apart(self) -> bool:
        """Whether the sampler has a generator that the loader does not draw from."""
        sampler = getattr(self._inner, "sampler", None) if self._batched else self._inner
        own = getattr(sampler, "generator", None)
        return own is not None and own is not self._hub.generator


_classes: dict[type, type] = {}


def _accelerated(base: type) -> type:
    """A subclass of the loader's class, so that isinstance() and its methods hold."""
    if base in _classes:
        return _classes[base]

    class Accelerated(base):  # type: ignore[misc, valid-type]
        def _get_iterator(self) -> Any:
            hub = _adopted(self)
            if hub is None:
                return super()._get_iterator()
            hub.stay = self.num_workers > 0 and self.persistent_workers
            hub.generator = self.generator
            reader = hub.reader() if self.num_workers == 0 else None
            plain = self.num_workers == 0 and reader is None
            # A pass that does not read through us is not ours to judge. Reading ahead begins with
            # the iterator.
            tally = None if plain else _Tally(hub, self.num_workers)
            iterator = super()._get_iterator()
            iterator._forebay = (hub, reader, tally)
            iterator.__class__ = _passing(type(iterator))
            return iterator

        def report(self) -> str:
            """Why training waited, in one sentence, and a table of the finished passes."""
            hub = _adopted(self)
            if hub is None or not hub.passes:
                return "No epoch has been read to its end yet."
            return hub.report()

    if not hasattr(base, "stats"):
        Accelerated.stats = _stats  # type: ignore[attr-defined]
    Accelerated.__name__ = f"Accelerated{base.__name__}"
    Accelerated.__qualname__ = Accelerated.__name__
    _classes[base] = Accelerated
    return Accelerated


def _stats(loader: Any) -> list[EpochReport]:
    """One report for each finished pass."""
    hub = _adopted(loader)
    return [] if hub is None else list(hub.passes)


def _adopted(loader: Any) -> _Hub | None:
    """The hub of a loader. One that a framework made of the class and the arguments of another one
    takes the place of that one.
    """
    state = loader.__dict__
    if "_forebay" not in state:
        hub = getattr(loader.worker_init_fn, "hub", None)
        if hub is None:
            return None
        name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
        sampler = state[name]
        if not isinstance(sampler, _Announcing):
            sampler = state[name] = _Announcing(sampler, batched=name == "batch_sampler")
        sampler.__dict__["_hub"] = hub
        state["_forebay"] = hub
    return state["_forebay"]


def _length(iterator: Any) -> int:
    """Batches of a pass; -1: unknown."""
    try:
        return len(iterator)
    except TypeError:
        return -1


def _passing(base: type) -> type:
    """A subclass of an iterator's class that reads through the engine."""
    if base in _classes:
        return _classes[base]

    class Passing(base):  # type: ignore[misc, valid-type]
        def __next__(self) -> Any:
            # What PyTorch has handed to us is not lost by an exception, such as a signal handler's;
            # what one inside PyTorch loses is lost without us, too.
            hub, reader, tally = self._forebay
            own = self.__dict__
            if "_forebay_held" not in own:
                hub.check()
                if tally is not None:
                    tally.ask(self)
                # Only while the data set runs: the program's own code sees the real open().
                through = intercepting(reader)
                try:
                    with through:
                        own["_forebay_held"] = super().__next__()
                except StopIteration:
                    if tally is not None and tally.ended(asked=True):
                        hub.finished(tally)
                    raise
                finally:
                    through.inside = False
                if tally is not None:
                    tally.batch()
            # Some, such as Lightning, count the batches and never ask for the end.
            if tally is not None and tally.count == _length(self) and tally.ended(asked=False):
                hub.finished(tally)
            batch = own["_forebay_held"]
            del own["_forebay_held"]  # no call, so no signal handler, between this and the return
            return batch

        next = __next__

        def _reset(self, *args: Any, **more: Any) -> None:
            """Another pass of workers that stay."""
            own = self.__dict__
            own.pop("_forebay_held", None)
            hub, reader, _ = own["_forebay"]
            own["_forebay"] = (hub, reader, _Tally(hub, self._num_workers))
            super()._reset(*args, **more)

    Passing.__name__ = base.__name__
    Passing.__qualname__ = base.__qualname__
    _classes[base] = Passing
    return Passing


# ---- the workers


class _WorkerInit:
    """Runs in each worker before the user's own worker_init_fn.

    It carries the paths as the engine was told them: the data set's own list may have changed.
    """

    def __init__(self, user: Any, hub: _Hub) -> None:
        self._user = user
        self.hub: _Hub | None = hub  # of the main process
        self._place = hub.place
        self._waits = hub.waits
        self._numbers = hub.numbers
        self._folder = hub.folder
        self._written = hub.written

    def __getstate__(self) -> tuple:
        # For spawn: pickle sends each text once, and the data set has most of them.
        shared = self._place, self._waits, self._written
        return self._user, shared, list(self._numbers), self._folder

    def __setstate__(self, state: tuple) -> None:
        self.hub = None
        self._user, shared, paths, self._folder = state
        self._place, self._waits, self._written = shared
        self._numbers = {path: number for number, path in enumerate(paths)}
        self._written.watch(self._numbers, self._folder)

    def __call__(self, worker_id: int) -> None:
        intercept_for_life(
            start_worker(
                self._place,
                self._numbers,
                self._folder,
                self._waits,
                worker_id + 1,
                self._written,
            )
        )
        if self._user is not None:
            self._user(worker_id)


def open_through(path: str | os.PathLike, mode: str = "rb", **kwargs: Any) -> Any:
    """``open()`` through Forebay inside an accelerated loader; plain ``open()`` elsewhere."""
    return open_here(path, mode, **kwargs)
