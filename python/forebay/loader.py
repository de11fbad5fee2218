"""forebay.DataLoader: batches in the framework's exact order, ready before they are asked for."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from . import _forebay
from ._errors import ArgumentError, CancelledError, ChangedError, DeadlineError
from ._forebay import Batch, Catalog
from ._internal import ranks
from ._internal.device import DeviceBatch, DeviceFeed, check_device
from ._internal.feeds import At, Course, Decoding, Held, PipelineFeed, StreamFeed, finish
from ._internal.units import parse_bytes, suffixes, whole_number
from .daemon import SharedEngine, default_engine
from .engine import Engine, may_size_later, peers_of
from .views.report import EpochReport, from_native, log_epoch, story

_log = logging.getLogger("forebay")
# A daemon thread that loops over a loader waits in next() while the interpreter ends.
atexit.register(_forebay.leave)
_SLOW_WAIT_S = 30.0
# A batch that took so long may have waited for a cache folder that hangs.
_LONG_TAKE_S = 1.0
_STATE_VERSION = 1
FRESHNESS = ("job", "epoch", "never")


class DataLoader:
    """Iterates over a data set as PyTorch's ``DistributedSampler(seed, epoch)`` orders it.

    ``path`` is a folder of files (class = folder, as torchvision's ImageFolder), WebDataset tar
    shards or TFRecord files; nothing is converted. C++ threads read ahead, across epoch
    boundaries; samples stay in memory for later epochs as far as the budget goes. Each ``iter()``
    after a finished epoch starts the next one; ``set_epoch`` chooses another. After an early
    ``break`` the next ``iter()`` starts the same epoch over.

    Args:
        path: The data set, or a ``forebay.Catalog``.
        batch_size: Samples a batch, of this rank.
        shuffle: Shuffle anew each epoch; else in order.
        seed: As in ``DistributedSampler``.
        drop_last: Drop an epoch's last batch when it is not full.
        sampler_drop_last: ``DistributedSampler``'s ``drop_last``: drop the tail that does not
            divide among the ranks instead of repeating samples.
        rank, world_size: Default: from torchrun, SLURM or MPI; else 0 of 1.
        collate_fn: Called with each ``Batch``; what it returns is what the loop gets. Default: the
            ``Batch``.
        memory: Budget of the engine, such as ``"4G"``; see ``forebay.Engine``.
        layout: ``"views"``: samples are handed out where they lie, with no copy. ``"contiguous"``:
            C++ threads copy each batch into one piece ahead of time (``batch.data`` is a view).
        epochs: Number of epochs, when known: nothing is read ahead beyond the last, and in a
            cluster samples live with the node that uses them most. Default: unknown.
        format: ``"folder"``, ``"webdataset"`` or ``"tfrecord"``; default: from what lies at the
            path.
        extensions: Folder: only files with these suffixes, such as ``forebay.IMG_EXTENSIONS``, or
            with this one, such as ``".jpg"``.
        timeout: Seconds to wait for a batch before ``DeadlineError``; 0 waits, with a warning
            every 30 s that names what it waits for.
        engine: An engine of your own; default: the process's shared one, or, with several ranks on
            the node, ``forebay.SharedEngine()``.
        io, in_flight, verify, cache_dir, cache_bytes, cache_group, peers: As in ``forebay.Engine``.
        progress: Show a bar while the data set is indexed; default: on a terminal.
        decode: ``"image"``: C++ threads decode and augment, the loop gets ``(images, labels)`` as
            PyTorch tensors (NumPy arrays where there is no PyTorch). ``"npy"``, ``"npz"`` or
            ``"npz:NAME"``: the same for arrays. Default: batches of stored bytes.
        transform: For images: a list of ``forebay.transforms``, or your own torchvision
            ``Compose``. What has no C++ counterpart is applied in Python, sample by sample;
            ``forebay.transforms.transforms_from(compose)`` tells which parts.
        dtype: ``"float32"``, ``"float16"`` or ``"bfloat16"`` after ``ToTensor``; else bytes.
        channels_last: Tensors of shape (N, 3, H, W) whose memory is in the order N, H, W, 3.
        device: ``"cuda"``: batches arrive on the GPU, copied one ahead as bytes on a stream of
            their own and normalised there; nothing to synchronise.
        fast: Let the JPEG decoder shrink large images by itself where the crop allows. Faster, but
            the pixels differ from a full decode.
        on_error: A corrupt image: ``"raise"`` an error that names it, or ``"skip"`` it: the batch
            is shorter, a warning at the end of the epoch counts them.
        max_pixels: A larger image is corrupt; default: 178,956,970, as in PIL.
        decode_threads: Threads that decode, for all loaders of the engine. Default: as many as
            are needed, up to the processors.
        locality: Ranks exchange samples of one global batch so that most are read on the node
            that keeps them. The global batch stays the same set; which rank gets which sample
            changes. All ranks must have the same setting.
        freshness: When files are looked at (one ``statx`` each) before copies of them are used that
            an earlier job, an earlier loader or another node has made: ``"job"``, once, as they are
            needed; ``"epoch"``, at the start of each epoch; ``"never"``: they do not change.
        on_change: A file that is found changed in a run is served as it is from then on.
            ``"warn"``: one line in the log names it. ``"raise"``: ``ChangedError``, once, with the
            batch that is asked for next.
    """

    def __init__(
        self,
        path: str | os.PathLike | Catalog,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        sampler_drop_last: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        collate_fn: Callable[[Batch], Any] | None = None,
        memory: int | str | None = None,
        layout: str = "views",
        epochs: int | None = None,
        format: str | None = None,
        extensions: str | Sequence[str] | None = None,
        timeout: float = 0,
        engine: Engine | None = None,
        io: str | None = None,
        in_flight: int | None = None,
        verify: bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        cache_group: str | int | None = None,
        peers: str | bool | None = None,
        progress: bool | None = None,
        decode: str | None = None,
        transform: Any = None,
        dtype: str | None = None,
        channels_last: bool = False,
        device: Any = None,
        fast: bool = False,
        on_error: str = "raise",
        max_pixels: int | None = None,
        decode_threads: int | None = None,
        locality: bool = False,
        freshness: str = "job",
        on_change: str = "warn",
        _delay: str = "",
    ) -> None:
        if freshness not in FRESHNESS:
            raise ArgumentError(f"freshness is {freshness!r}; it takes 'job', 'epoch' or 'never'")
        if on_change not in ("warn", "raise"):
            raise ArgumentError(f"on_change is {on_change!r}; it takes 'warn' or 'raise'")
        if layout not in ("views", "contiguous"):
            raise ArgumentError(f"layout is {layout!r}; it takes 'views' or 'contiguous'")
        batch_size = whole_number("batch_size", batch_size, 1)
        if not 0 <= int(seed) < 1 << 64:
            raise ArgumentError(f"seed is {seed}; it must be at least 0 and below 2**64")
        if not 0 <= float(timeout) < 1e9:
            raise ArgumentError(f"timeout is {timeout}; it is in seconds, and 0 waits without end")
        if epochs is not None:
            epochs = whole_number("epochs", epochs, 1)
        if decode_threads is not None:
            decode_threads = whole_number("decode_threads", decode_threads, 0)
        if engine is not None and memory is not None:
            raise ArgumentError("pass memory= to the engine, not to a loader that has one")
        if engine is not None and (cache_dir, cache_bytes, cache_group) != (None, None, None):
            raise ArgumentError("pass cache_dir= to the engine, not to a loader that has one")
        if engine is not None and peers is not None:
            raise ArgumentError("pass peers= to the engine, not to a loader that has one")
        self._decoding: Decoding | None = None
        self.device = check_device(device)
        if decode is not None:
            self._decoding = Decoding.of(
                decode,
                transform,
                dtype=dtype,
                channels_last=channels_last,
                fast=fast,
                on_error=on_error,
                max_pixels=max_pixels,
            )
        else:
            for name, given in (
                ("transform", transform is not None),
                ("dtype", dtype is not None),
                ("channels_last", channels_last),
                ("fast", fast),
                ("on_error", on_error != "raise"),
                ("max_pixels", max_pixels is not None),
            ):
                if given:
                    raise ArgumentError(f'{name}= needs decode=, such as decode="image"')
        if self.device is not None:
            if self._decoding is None or self._decoding.kind != "image":
                raise ArgumentError('device= needs decode="image"')
            if self._decoding.rest or collate_fn is not None:
                what = "collate_fn" if collate_fn is not None else "transforms that stay in Python"
                raise ArgumentError(f"device= cannot be combined with {what}")
        if decode is not None and layout != "views":
            raise ArgumentError("layout= is for stored bytes; decoded batches are in one piece")
        self.batch_size = batch_size
        self.shuffle = bool(shuffle)
        self.seed = int(seed)
        self.drop_last = bool(drop_last)
        self.sampler_drop_last = bool(sampler_drop_last)
        self.rank, self.world_size = ranks.resolve(rank, world_size)
        self.locality = bool(locality)
        self.freshness = freshness
        self.on_change = on_change
        self.collate_fn = collate_fn
        self.layout = layout
        self.epochs = epochs
        self.timeout = float(timeout)
        self._delay = _delay
        self._path = path
        self._format = format
        self._cursor = _Cursor((0, 0))
        self._extensions = suffixes(extensions)
        self.engine = engine or default_engine(
            memory=memory,
            io=io,
            in_flight=in_flight,
            verify=verify,
            cache_dir=None if cache_dir is None else os.path.abspath(cache_dir),
            cache_bytes=None if cache_bytes is None else parse_bytes(cache_bytes, "cache_bytes"),
            cache_group=None if cache_group is None else str(cache_group),
            peers=peers_of(peers) or None,
        )
        if isinstance(path, Catalog):
            path.wait()
            path.check_shards()  # copies of samples are used without a look at their shard
            self.catalog = path
            if freshness != "never" and not path.looked_at and self.engine.may_hold(path.root):
                self.catalog = path.look(self.engine.looks(path.root))[0] or path
        else:
            # After the engine: what a scan of shards reads on its way stays in its memory.
            self.catalog = self._open_catalog(progress)
        if decode_threads is not None:
            self.engine.set_knob("decode_threads", decode_threads)
        self._total = _forebay.epoch_total(
            len(self.catalog), self.world_size, self.sampler_drop_last
        )
        self._resumed = False  # the next iter() starts inside the epoch
        self._iteration = 0  # tells an abandoned iterator that it is one
        self._noted_save = False
        self._begun = False  # an epoch of this opening
        # Files that were found changed, in the feed's engine, and the last of them.
        self._changes: tuple[int, str] = (0, "")
        self._told_changes: set[str] = set()
        self._feed: StreamFeed | PipelineFeed | DeviceFeed | None = None
        self._failed = False  # the feed, so that the next iter() starts afresh
        self._closed_stats: list[EpochReport] = []
        self._pid = -1
        self._attach()

    def _open_catalog(self, progress: bool | None = None) -> Catalog:
        # Batches of stored bytes can begin while sizes of files are still being looked up.
        later = (
            self._decoding is None
            and self.layout == "views"
            and not isinstance(self.engine, SharedEngine)
            and may_size_later(self.engine)
        )
        return open_catalog(
            self._path,  # type: ignore[arg-type]
            format=self._format,
            extensions=self._extensions,
            progress=progress,
            engine=self.engine,
            sizes_later=later,
            look=self._looks(),
            first=(
                self.shuffle,
                self.seed,
                self._cursor.at[0],
                self.rank,
                self.world_size,
                self.sampler_drop_last,
                self.batch_size if self.locality else 0,
                ranks.ranks_per_node(self.world_size),
            ),
        )

    def _looks(self) -> bool:
        """Whether files of a saved catalog are looked at: where bytes of them may be elsewhere."""
        if self.freshness == "job":
            return self.engine.may_hold(os.fspath(self._path))  # type: ignore[arg-type]
        return self.freshness == "epoch"

    def _look_again(self) -> None:
        """Before a later epoch: files that have changed are read anew from then on."""
        catalog, changed, path = self.catalog.look(self.engine.looks(self.catalog.root))
        if catalog is None:
            return
        if not changed:  # perhaps: what is there of such files is read again, or compared
            self._use(catalog)
            return
        more = f" and {changed - 1} more files" if changed > 1 else ""
        what = f"{path}{more} changed since the last epoch"
        if self.on_change == "raise":
            raise ChangedError(f"{what}; on_change='warn' goes on with them as they are now")
        _log.warning("forebay: %s: served as they are now", what)
        self._use(catalog)

    def _use(self, catalog: Catalog) -> None:
        self.close()
        self.catalog = catalog
        self._attach()

    def _raise_changes(self, feed: StreamFeed | PipelineFeed | DeviceFeed) -> None:
        count, last = feed.files_changed()
        # An engine that takes the place of another one counts from 0, and may find the same again.
        if (count, last) == self._changes:
            return
        self._changes = (count, last)
        if count and last not in self._told_changes:
            self._told_changes.add(last)
            raise ChangedError(last)

    # ---- iteration

    def __len__(self) -> int:
        """Batches of this rank in a full epoch."""
        mine = self._total // self.world_size
        return mine // self.batch_size if self.drop_last else -(-mine // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        if self.freshness == "epoch" and self._begun:
            self._look_again()
        self._begun = True
        self._attach()
        epoch, position = self._cursor.at
        if self.epochs and epoch >= self.epochs:
            raise ArgumentError(
                f"epoch {epoch} is beyond epochs={self.epochs}; raise epochs=, or leave it out"
            )
        at = epoch, position if self._resumed else 0
        assert self._feed is not None
        if self._failed:
            self._feed.seek(at)
        else:
            self._feed.stand(at)
        cursor = _Cursor(at)
        iterator = _Iterator(self, self._iteration + 1, cursor)
        # Assignments only, as in next(): a place to resume from is not lost either.
        self._iteration += 1
        self._cursor = cursor
        self._resumed = self._failed = False
        return iterator

    def set_epoch(self, epoch: int) -> None:
        """The next ``iter()`` yields this epoch, from its start."""
        if epoch < 0:
            raise ArgumentError(f"epoch is {epoch}; it cannot be negative")
        if self._resumed and epoch == self.epoch:
            return  # the usual loop calls set_epoch right after load_state_dict
        self._cursor = _Cursor((int(epoch), 0))
        self._resumed = False

    @property
    def epoch(self) -> int:
        """The epoch that is being, or will next be, iterated."""
        return self._cursor.at[0]

    # ---- resume

    def state_dict(self) -> dict[str, Any]:
        """Where the job stands, for every rank alike: all batches handed out so far count as
        consumed.
        """
        self._renew_catalog()
        epoch, consumed = self._cursor.at
        return {
            "version": _STATE_VERSION,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "locality": self.locality,
            "epoch": epoch,
            "consumed": consumed,
            "total": self._total,
            "size": len(self.catalog),
            "fingerprint": self.catalog.fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where ``state_dict`` stood, also at another world size with the same global
        batch.
        """
        try:
            version, epoch, consumed = state["version"], state["epoch"], state["consumed"]
            ours = (self.seed, self.shuffle, len(self.catalog))
            theirs = (state["seed"], state["shuffle"], state["size"])
        except (KeyError, TypeError) as error:
            raise ArgumentError(f"this is no state of a forebay.DataLoader: {error!r}") from None
        if version != _STATE_VERSION:
            raise ArgumentError(
                f"the state has version {version}, this program reads {_STATE_VERSION}"
            )
        if ours != theirs:
            raise ArgumentError(
                "the state is of another loader: (seed, shuffle, samples) were "
                f"{theirs}, here they are {ours}"
            )
        if state.get("fingerprint") not in (None, self.catalog.fingerprint):
            _log.warning("forebay: the data set at %s is not the one the state was saved with",
                         self.catalog.root)  # fmt: skip
        if consumed >= min(self._total, state.get("total", self._total), len(self.catalog)):
            # The epoch was over; this world size may pad it to more samples, or drop fewer.
            consumed = max(self._total, -(-consumed // self.world_size) * self.world_size)
        elif consumed % self.world_size:
            raise ArgumentError(
                f"{consumed} samples were consumed, which {self.world_size} ranks cannot continue "
                f"from; "
                "resume with the same global batch (batch_size times world size)"
            )
        self._cursor = _Cursor((int(epoch), int(consumed)))
        self._resumed = True

    # ---- reports

    def stats(self) -> list[EpochReport]:
        """One report for each epoch begun, the current one last."""
        feed = self._feed
        if feed is None or self._pid != os.getpid():
            return list(self._closed_stats)
        return [from_native(s) for s in feed.stats() if s["batches"]]

    def report(self) -> str:
        """Why training waited, in one sentence, and a table of all epochs."""
        reports = self.stats()
        if not reports:
            return "No epoch has been read yet."
        engine = self.engine
        return story(reports, engine.cluster(), engine.peers_problem(), engine.cache_problem())

    def _tell_epoch(self, epoch: int) -> None:
        """Why was my GPU idle? A line of the log at each epoch's end."""
        self.engine.warn_of_cache()
        note = self.catalog.save_note
        if note and not self._noted_save:
            self._noted_save = True
            _log.info("forebay: %s", note)
        log_epoch(
            str(self.catalog.root),
            self.rank,
            lambda: next((r for r in reversed(self.stats()) if r.epoch == epoch), None),
            self.engine.cluster,
        )

    def close(self) -> None:
        """Stops reading ahead and gives the memory back. Batches still held stay valid."""
        feed = self._feed
        if feed is not None and self._pid == os.getpid():
            if not sys.is_finalizing():  # a thread that is no more may have left with a lock
                self._closed_stats = self.stats()
            feed.close()
        if self._feed is feed:  # else another thread has opened it anew meanwhile
            self._feed = None
        self._iteration += 1

    def __enter__(self) -> DataLoader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:  # noqa: BLE001, S110 - nothing can be done while being collected
            pass

    # ---- processes

    def _attach(self) -> None:
        """Opens the stream; again in a forked child, whose parent keeps its own."""
        if self._feed is not None and self._pid == os.getpid():
            return
        self._renew_catalog()
        arguments = dict(
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            size=len(self.catalog),
            shuffle=self.shuffle,
            seed=self.seed,
            rank=self.rank,
            world=self.world_size,
            sampler_drop_last=self.sampler_drop_last,
            epochs=self.epochs or 0,
            first_epoch=self._cursor.at[0],
            first_position=self._cursor.at[1],
            exchange=self.batch_size if self.locality else 0,
            ranks_per_node=ranks.ranks_per_node(self.world_size),
        )
        contiguous = self.layout == "contiguous"
        if self._decoding is None:
            self._feed = StreamFeed(self.engine, self._dataset(), arguments, contiguous)
        elif self.device is None:
            self._feed = self._decoded_feed(arguments, self._decoding)
        else:
            self._feed = DeviceFeed(
                lambda decoding: self._decoded_feed(arguments, decoding),
                self._decoding,
                self.device,
                arguments,
            )
        self._course = Course(arguments)
        self._pid = os.getpid()

    def _renew_catalog(self) -> None:
        """In a forked child, where nobody looks up the lengths that the parent's lacks."""
        forked = self._pid not in (-1, os.getpid())
        if forked and not self.catalog.complete:
            self.catalog = self._open_catalog()

    def _dataset(self) -> int:
        return self.engine.dataset(self.catalog, self._delay)

    def _decoded_feed(self, arguments: dict, decoding: Decoding) -> PipelineFeed:
        return PipelineFeed(self.engine, self._dataset(), arguments, decoding, self.catalog)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        path = self._path
        if isinstance(path, Catalog):
            raise TypeError("a loader over a Catalog object cannot be pickled; give it the path")
        del state["catalog"]
        state.update(_feed=None, _pid=-1, _closed_stats=[])
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.catalog = self._open_catalog()


class _Cursor:
    """Where an iteration stands: behind all that was handed out. Shared by the iterator, which
    moves it, and its loader, which saves it.
    """

    __slots__ = ("at",)

    def __init__(self, at: At) -> None:
        self.at = at


class _Iterator:
    def __init__(self, loader: DataLoader, iteration: int, cursor: _Cursor) -> None:
        self._loader = loader
        self._iteration = iteration
        self._cursor = cursor
        self._epoch = cursor.at[0]
        self._told = False
        self._guard = _forebay.EntryGuard()

    def __iter__(self) -> _Iterator:
        return self

    def __len__(self) -> int:
        return len(self._loader)

    def __next__(self) -> Any:
        # An exception, also of a signal handler between any two instructions, loses no batch: until
        # the cursor moves, the next call gets the same. Python runs signal handlers when a call
        # returns or a loop goes round; from where the cursor moves there are assignments only.
        loader, cursor, guard = self._loader, self._cursor, self._guard
        try:
            if not guard.enter():
                raise RuntimeError(
                    "next() of this iterator was called inside itself, by its collate_fn, a "
                    "transform or a signal handler"
                )
            at = cursor.at
            if at[0] != self._epoch:
                raise StopIteration
            feed = loader._feed
            if self._iteration != loader._iteration or feed is None:
                raise _ended()
            try:
                begun = time.monotonic()
                held = feed.take(loader.timeout or _SLOW_WAIT_S, at)
                if held is None:
                    held = self._wait_on(feed, at)
                if time.monotonic() - begun > _LONG_TAKE_S:
                    loader.engine.warn_of_cache()
                if loader.on_change == "raise":
                    loader._raise_changes(feed)
                item = held.item
            except Exception:
                loader._failed = True
                raise
            if item is None:  # another thread has sent the feed elsewhere
                raise _ended()
            after = loader._course.after(at, item)
            if isinstance(item, str):
                if not self._told:
                    self._told = True
                    loader._tell_epoch(at[0])
                cursor.at = after
                held.item = None
                raise StopIteration
            if loader.collate_fn is not None:
                result = loader.collate_fn(item)
            elif isinstance(item, DeviceBatch):
                result = item.images, item.labels
            elif loader._decoding is None:
                result = item
            else:
                result = finish(item, loader._decoding)
            cursor.at = after
            held.item = None
            return result
        finally:
            guard.inside = False

    def _wait_on(self, feed: Any, at: At) -> Held:
        loader = self._loader
        if loader.timeout:
            raise DeadlineError(
                f"no batch in {loader.timeout:g} s; waiting for {feed.waiting_for()}"
            )
        start = time.monotonic() - _SLOW_WAIT_S
        while True:
            _log.warning(
                "forebay: waited %.0f s for %s",
                time.monotonic() - start,
                feed.waiting_for(),
            )
            held = feed.take(_SLOW_WAIT_S, at)
            if held is not None:
                return held


def _ended() -> CancelledError:
    return CancelledError("a newer iter() of this loader, or close(), ended this iterator")


def open_catalog(
    path: str | os.PathLike,
    *,
    format: str | None = None,
    extensions: str | Sequence[str] | None = None,
    progress: bool | None = None,
    engine: Engine | SharedEngine | None = None,
    sizes_later: bool = False,
    look: bool = True,
    first: tuple | None = None,
) -> Catalog:
    """The data set's catalog: the saved one while it is fresh, else built (with a bar) and
    saved; with ``sizes_later`` it may still be incomplete. With ``look`` every file of a saved one
    is looked at, and taken as it is now, those of the epoch ``first`` first (see
    ``Catalog.open``). Samples that are read on the way stay in the engine, if it is of this
    process.
    """
    from .views.progress import counting

    embedded = isinstance(engine, Engine) and not isinstance(engine, SharedEngine)
    native = engine.native if embedded and engine is not None else None

    with counting(f"indexing {os.fspath(path)}", progress) as callback:
        catalog, _, note = Catalog.open(
            os.fspath(path),
            format or "",
            [e.lower() for e in suffixes(extensions)],
            callback,
            native,
            sizes_later,
            look,
            first,
            engine.looks(os.fspath(path)) if look and engine is not None else None,
        )
    if note:
        _log.info("forebay: %s", note)
    return catalog
