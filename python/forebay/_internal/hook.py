"""The start-up hook of ``forebay run``: the order of PyTorch's loaders, with no line changed.

Python starts it through ``forebay_hook.pth`` when ``forebay run`` has set FOREBAY_HOOK. It waits
for ``torch.utils.data`` to be imported and stands in for one method of the loader's iterators, the
one that draws the next indices. Before a pass draws its first, the order is worked out on copies of
the sampler and its generator (see ``foresight``) and told to the file service; each draw is then
compared with what was foreseen. At the first difference the loader is left alone.

It changes nothing that the program computes: no generator moves, nothing is drawn that would not
have been drawn, and whatever fails here is not seen by the program.

Every Python program below ``forebay run`` loads this file: what it needs is imported when it is
needed.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable
    from types import ModuleType
    from typing import Any

_TARGET = "torch.utils.data.dataloader"
_SOCKET = "FOREBAY_FILES_SOCKET"
_SOURCES = "FOREBAY_FILES_SOURCES"
_JOB = "FOREBAY_FILES_JOB"
# So many samples are told ahead of the draws, half of them at a time: a data set of millions of
# files does not delay its first batch.
_AHEAD = 32768
# The service is told of the reader's place every so many samples.
_STEP = 32


def _beside(name: str) -> ModuleType:
    """A module of this folder without the package around it, which takes long to import."""
    loaded = sys.modules.get(f"_forebay_{name}")
    if loaded is not None:
        return loaded
    from importlib.util import module_from_spec, spec_from_file_location

    file = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = spec_from_file_location(f"_forebay_{name}", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[f"_forebay_{name}"] = module
    spec.loader.exec_module(module)
    return module


def _debug(text: str, *values: object) -> None:
    import logging

    logging.getLogger("forebay").debug("forebay: " + text, *values)


# ---- waiting for torch


class _Finder:
    """On sys.meta_path until torch's loader is imported; finds nothing itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _TARGET:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None

    def invalidate_caches(self) -> None:
        pass


class _Loader:
    """Runs the module as its own loader would, then looks at it."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def create_module(self, spec: Any) -> Any:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module is to look as if it had never met us.
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        watch(module)


def install() -> None:
    """Watches the loaders of this process, now or once torch is there. May be called again."""
    if not os.environ.get(_SOCKET):
        return
    loaded = sys.modules.get(_TARGET)
    if loaded is not None:
        watch(loaded)
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


def watch(module: ModuleType) -> None:
    """Stands in for the iterators' `_next_index` of `torch.utils.data.dataloader`."""
    base = getattr(module, "_BaseDataLoaderIter", None)
    real = getattr(base, "_next_index", None)
    if base is None or real is None or hasattr(real, "_forebay"):
        return

    def _next_index(self: Any) -> Any:
        seen = _before(self)
        if seen is None:
            return real(self)
        try:
            drawn = real(self)
        except StopIteration:
            seen.ended(self)
            raise
        seen.drew(drawn)
        return drawn

    _next_index.__qualname__ = real.__qualname__
    _next_index.__module__ = real.__module__
    _next_index._forebay = real  # type: ignore[attr-defined]
    base._next_index = _next_index


def _before(iterator: Any) -> _Pass | None:
    """The pass that an iterator is in; a new one is foreseen here, before it draws anything."""
    seen = None
    try:
        now = iterator._sampler_iter
        seen = iterator.__dict__.get("_forebay_pass")
        if seen is None or seen.sampler_iter is not now:
            iterator.__dict__["_forebay_pass"] = None  # the last pass ends here
            seen = _Pass(iterator)
            iterator.__dict__["_forebay_pass"] = seen
            seen.begin(iterator)
        if not seen.on:
            return None
        seen.came_to(iterator)
        return seen
    except Exception as error:  # noqa: BLE001 - the program does not need it
        if seen is not None:
            seen.off(str(error) or type(error).__name__)
        return None


# ---- what the service knows of one loader


class _Segment:
    """A pass as it is told: samples of the data folders, from a position on."""

    def __init__(self, start: int, order: array, places: array | None) -> None:
        self.start = start
        self.order = order
        # How many samples of the data folders come up to each draw; None: all are.
        self.places = places
        self.told = 0

    def place(self, draws: int) -> int:
        """Position after so many draws."""
        if self.places is not None:
            draws = self.places[draws - 1] if draws else 0
        return self.start + draws

    def add(self, more: _Segment) -> None:
        if self.places is not None and more.places is not None:
            self.places.extend(_array(len(self.order) + place for place in more.places))
        self.order.extend(more.order)

    @property
    def end(self) -> int:
        return self.start + len(self.order)


class _Reader:
    """A loader's data set and stream. Positions count on from pass to pass."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.on = False
        self.pass_: Callable[[], _Pass | None] = lambda: None  # the one that is told
        self.place = 0  # position after all that was drawn
        # The pass after the present one as it is thought to be, and how it is told.
        self.guess: tuple[array, _Segment] | None = None
        # What may happen between two passes, the likeliest first; those that were wrong are gone.
        self.guesses: list[Callable[[Any], bool]] | None = None

    def start(self, dataset: Any) -> None:
        from array import array

        self._folder = os.getcwd()
        self._sources = [s for s in os.environ.get(_SOURCES, "").split(":") if s]
        self._paths: list[str] = _beside("foresight").paths_of(dataset) or []
        self._covered = self._which()
        if self._covered is not None and not any(self._covered):
            return
        self._numbers = array("q", [-1]) * len(self._paths)  # by index; -1: not told yet
        self.stream = _beside("file_stream").Stream(os.environ[_SOCKET], os.environ.get(_JOB, ""))
        self.on = True

    def _which(self) -> list[bool] | None:
        """The samples that lie in data folders; None: all."""
        paths = self._paths
        if not paths:
            return []
        if not any("/.." in path for path in paths):
            common = os.path.commonprefix([min(paths), max(paths)])
            folder = common[: common.rfind("/") + 1]
            if self._name(folder) is not None:
                return None
        return [self._name(path) is not None for path in paths]

    def _name(self, path: str) -> str | None:
        """As the service names it: absolute, without detours; None outside the data folders."""
        path = os.path.join(self._folder, path)
        if "//" in path or "/." in path or path.endswith("/"):
            parts = path.split("/")
            if ".." in parts:
                return None  # a link on the way may lead elsewhere
            path = "/" + "/".join(part for part in parts if part not in ("", "."))
        for source in self._sources:
            if path.startswith(source) and path[len(source) : len(source) + 1] in ("", "/"):
                return path
        return None

    def off(self, why: str) -> None:
        if self.on:
            self.on = False
            self.stream.close()
            _debug("a loader is left alone: %s", why)

    def segment(self, start: int, indices: array) -> _Segment:
        """Raises IndexError for a sampler that draws what the data set does not have."""
        count = len(self._paths)
        if indices and (min(indices) < 0 or max(indices) >= count):
            indices = _array(range(count)[i] for i in indices)
        if self._covered is None:
            return _Segment(start, indices, None)
        order, places = _array(), _array()
        for i in indices:
            if self._covered[i]:
                order.append(i)
            places.append(len(order))
        return _Segment(start, order, places)

    def tell(self, segment: _Segment, end: int) -> None:
        """Names and order up to a position, when half of what was told has passed."""
        if segment.start + segment.told >= min(end - _AHEAD // 2, segment.end):
            return
        part = segment.order[segment.told : end - segment.start]
        numbers = self._numbers
        fresh = sorted({i for i in part if numbers[i] < 0})
        if fresh:
            first = self.stream.names(self._name(self._paths[i]) for i in fresh)
            for number, i in enumerate(fresh, first):
                numbers[i] = number
        self.stream.order(segment.start + segment.told, [numbers[i] for i in part])
        segment.told += len(part)


def _array(values: Iterable[int] = ()) -> array:
    from array import array

    return array("q", values)


_readers: Any = None


def _reader_of(iterator: Any) -> _Reader:
    """The loader's, for as long as its sampler lives: the iterator is another one each epoch."""
    import weakref

    global _readers
    if _readers is None:
        _readers = weakref.WeakKeyDictionary()
    sampler, dataset = iterator._index_sampler, iterator._dataset
    reader = None
    try:
        known = _readers.setdefault(sampler, {})
        reader = known.get(id(dataset))
    except TypeError:  # a list, or a sampler that cannot be kept track of
        known = {}
    if reader is not None and reader.pid == os.getpid():
        other = reader.pass_()
        if other is None or other.over:
            return reader
        known = {}  # two passes at once, as of zip(loader, loader): each has its own order
    reader = known[id(dataset)] = _Reader()
    if iterator._dataset_kind == 0:  # no IterableDataset
        reader.start(dataset)
    return reader


# ---- one pass


class _Pass:
    """One pass of a loader over its data set."""

    def __init__(self, iterator: Any) -> None:
        self.sampler_iter = iterator._sampler_iter
        self.over = False
        self._reader = _Reader()
        self._batched = bool(iterator._auto_collation)
        self._future: array | None = None  # None: nobody knows, the sampler is followed
        self._draws = 0
        self._ends = _array()  # draws after each batch
        self._said = 0

    @property
    def on(self) -> bool:
        return self._reader.on

    def off(self, why: str) -> None:
        self._reader.off(why)

    def begin(self, iterator: Any) -> None:
        """Nothing has been drawn, and the generators are where the sampler will find them."""
        reader = self._reader = _reader_of(iterator)
        if not reader.on:
            return
        import weakref

        reader.pass_ = weakref.ref(self)
        self._replay = _beside("foresight").replay(iterator._index_sampler, self._batched)
        if self._replay is not None:
            self._future = _array(self._replay.draw())
            if reader.guesses is None:
                reader.guesses = self._ways(iterator)
        guess, reader.guess = reader.guess, None
        known = guess is not None and guess[0] == self._future
        if guess is not None and known and guess[1].start == reader.place:
            self._now = guess[1]
        else:  # from here on: what was told of a pass that was left early, or wrongly, is over
            self._now = reader.segment(reader.place, self._future or _array())
            if guess is not None and not known and reader.guesses:
                del reader.guesses[0]
        self._guessed = False
        self._said = self._now.start
        self._tell()
        if self._said > 0:
            reader.stream.at(self._said)

    def _ways(self, iterator: Any) -> list[Callable[[Any], bool]]:
        """What may happen to the sampler before the next pass."""
        stay = iterator._num_workers > 0 and iterator._persistent_workers
        return _beside("foresight").between_passes(self._replay, stay)

    def _tell(self) -> None:
        reader, now = self._reader, self._now
        reader.place = now.place(self._draws)
        end = reader.place + _AHEAD
        reader.tell(now, end)
        if end - _AHEAD // 2 < now.end:
            return
        if not self._guessed:
            self._guessed = True
            if self._future is not None and reader.guesses:
                if reader.guesses[0](self._replay.sampler):
                    indices = _array(self._replay.draw())
                    reader.guess = (indices, reader.segment(now.end, indices))
            self._replay = None
        if reader.guess is not None:
            reader.tell(reader.guess[1], end)

    def came_to(self, iterator: Any) -> None:
        """Tells where the reader is: at what the loader has handed to the program."""
        draws = self._draws
        if iterator._num_workers > 0:
            batches = iterator._rcvd_idx
            draws = self._ends[batches - 1] if batches else 0
        place = self._now.place(draws)
        if place - self._said >= _STEP or (self.over and place > self._said):
            self._said = place
            self._reader.stream.at(place)

    def ended(self, iterator: Any) -> None:
        """The sampler has no more; the workers may still be at it. Never fails."""
        self.over = True
        try:
            self.came_to(iterator)
        except Exception as error:  # noqa: BLE001
            self.off(str(error))

    def drew(self, drawn: Any) -> None:
        """Never fails: the program does not need it."""
        try:
            indices = _beside("foresight").numbers(drawn if self._batched else [drawn])
            begin, self._draws = self._draws, self._draws + len(indices)
            self._ends.append(self._draws)
            if self._future is None:
                self._now.add(self._reader.segment(0, _array(indices)))
            elif self._future[begin : self._draws].tolist() != indices:
                self._reader.off("its sampler drew another order than foreseen")
                return
            self._tell()
        except Exception as error:  # noqa: BLE001
            self._reader.off(str(error))
