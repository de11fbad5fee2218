"""An exception inside next() loses no batch and doubles none: the next next() gets the same.

Raised by signal handlers at any moment, by a collate_fn, and by transforms that stay in Python.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("PIL.Image")

import forebay  # noqa: E402
from forebay import transforms as T  # noqa: E402
from forebay._internal import worker_io  # noqa: E402
from forebay._internal.feeds import NativeFeed  # noqa: E402
from forebay.loader import _Iterator  # noqa: E402
from test_daemon import _await  # noqa: E402
from test_device import (  # noqa: E402
    OPS,
    photos,  # noqa: F401 - a fixture
    without_gpu,  # noqa: F401 - a fixture
)

_EPOCHS = 2


class _Interrupt(BaseException):
    """As KeyboardInterrupt: nothing but the test catches it."""


def _plus_one(image: Any) -> Any:
    return image + 1


def _mode(name: str) -> dict[str, Any]:
    decode: dict[str, Any] = dict(decode="image", transform=OPS)
    return {
        "views": {},
        "contiguous": dict(layout="contiguous"),
        "collate": dict(collate_fn=lambda batch: (batch.indices.copy(), batch.labels.copy())),
        "decode": decode,
        "python": dict(decode="image", transform=[T.CenterCrop(32), T.ToTensor(), _plus_one]),
        "device": dict(**decode, device="fake"),
    }[name]


_MODES = ("views", "contiguous", "collate", "decode", "python", "device")


@pytest.fixture
def engine(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[], forebay.Engine]]:
    if request.param == "embedded":
        yield lambda: forebay.Engine("64M")
        return
    where = tmp_path_factory.mktemp("run")  # beside the data set, which lies in tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(where))
    yield lambda: forebay.SharedEngine("64M", linger=0)
    _await(lambda: not (where / "forebay").exists(), "a daemon is left")


@pytest.fixture
def make(
    photos: Path,  # noqa: F811
    without_gpu: None,  # noqa: F811
    engine: Callable[[], forebay.Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[str], forebay.DataLoader]]:
    made: list[forebay.DataLoader] = []
    shared = [engine()]
    monkeypatch.setattr(
        "forebay.loader.check_device", lambda given: torch.device("cpu") if given else None
    )

    def make_one(mode: str) -> forebay.DataLoader:
        how = dict(shuffle=True, seed=7, rank=0, world_size=1)
        made.append(forebay.DataLoader(photos, 8, engine=shared[0], **how, **_mode(mode)))
        return made[-1]

    yield make_one
    for loader in made:
        loader.close()
    made.clear()
    shared.clear()
    del loader
    gc.collect()


def _content(batch: Any) -> Any:
    if isinstance(batch, forebay.Batch):
        return batch.epoch, batch.index, batch.indices.tolist(), batch.checksum()
    first, labels = batch
    return torch.as_tensor(first).double().sum().item(), labels.tolist()


def _whole(loader: forebay.DataLoader, epochs: int) -> list[list[Any]]:
    return [[_content(batch) for batch in loader] for _ in range(epochs)]


class _Loop:
    """A loop that goes on after each interruption, and checks what the loader says it delivered."""

    def __init__(self, loader: forebay.DataLoader) -> None:
        self.loader = loader
        self.interrupted = 0
        self.got: list[list[Any]] = []

    def run(self, epochs: int, arm: Callable[[bool], None], disarm: Callable[[], None]) -> None:
        loader, again = self.loader, False
        for epoch in range(epochs):
            iterator = iter(loader)
            self.got.append([])
            while True:
                state = loader.state_dict()
                arm(again)
                try:
                    batch = next(iterator)
                except StopIteration:
                    disarm()
                    again = False
                    break
                except _Interrupt:
                    disarm()
                    self.interrupted += 1
                    assert loader.state_dict() == state
                    again = True
                    continue
                disarm()
                again = False
                self.got[-1].append(_content(batch))
                del batch
                consumed = min(42, 8 * len(self.got[-1]))
                state = loader.state_dict()
                assert (state["epoch"], state["consumed"]) == (epoch, consumed)
            assert loader.epoch == epoch + 1
        # The GPU is sent one batch ahead, also beyond the end.
        assert [r.batches for r in loader.stats()][:epochs] == [len(loader)] * epochs


def _inside_next(frame: Any) -> bool:
    while frame is not None:
        if frame.f_code is _Iterator.__next__.__code__:
            return True
        frame = frame.f_back
    return False


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("engine", ["embedded", "daemon"], indirect=True)
def test_interrupted_after_every_call(make: Callable[[str], forebay.DataLoader], mode: str) -> None:
    """Python runs signal handlers where a function begins and where a call of C returns: each of
    these moments of each next() has its exception.
    """
    wanted = _whole(make(mode), _EPOCHS)
    loop = _Loop(make(mode))
    at = 0  # the moment of this next() that is interrupted
    seen = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal seen
        if event in ("call", "c_return") and _inside_next(frame):
            seen += 1
            if seen > at:
                raise _Interrupt

    def arm(again: bool) -> None:
        nonlocal at, seen
        at = at + 1 if again else 0
        seen = 0
        sys.setprofile(profile)

    loop.run(_EPOCHS, arm, lambda: sys.setprofile(None))
    assert loop.got == wanted
    assert loop.interrupted > 100


class _Taking:
    """A stream whose every second take() that brings something is interrupted as it returns."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.interrupted = self.taken = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)

    def take(self, *arguments: Any) -> Any:
        took = self.native.take(*arguments)
        if took is not None:
            self.taken += 1
            if self.taken % 2:
                self.interrupted += 1
                raise _Interrupt
        return took


@pytest.mark.parametrize("mode", _MODES)
@pytest.mark.parametrize("engine", ["embedded", "daemon"], indirect=True)
def test_interrupted_as_each_batch_is_taken(
    make: Callable[[str], forebay.DataLoader], mode: str
) -> None:
    """The profiler of the test above does not see calls of the extension module."""
    wanted = _whole(make(mode), _EPOCHS)
    loader = make(mode)
    feed: Any = loader._feed
    while not isinstance(feed, NativeFeed):
        feed = feed._feed
    feed.native = taking = _Taking(feed.native)
    loop = _Loop(loader)
    loop.run(_EPOCHS, lambda again: None, lambda: None)
    assert loop.got == wanted
    assert loop.interrupted == taking.interrupted >= _EPOCHS * (len(loader) + 1) // 2


@pytest.mark.seeds
@pytest.mark.parametrize("engine", ["embedded", "daemon"], indirect=True)
def test_interrupted_by_signals(make: Callable[[str], forebay.DataLoader], seed: int) -> None:
    mode = _MODES[seed % len(_MODES)]
    rng = random.Random(seed)
    epochs = 6
    wanted = _whole(make(mode), epochs)
    loop = _Loop(make(mode))

    def on_alarm(_: int, frame: Any) -> None:
        # What is raised behind the return cannot be told from what the loop itself raises.
        if _inside_next(frame):
            raise _Interrupt

    before = signal.signal(signal.SIGALRM, on_alarm)
    try:
        loop.run(
            epochs,
            lambda again: signal.setitimer(
                signal.ITIMER_REAL, 10 ** rng.uniform(-5.5, -2.5) if rng.random() < 0.9 else 0
            ),
            lambda: signal.setitimer(signal.ITIMER_REAL, 0),
        )
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert loop.got == wanted


# ---- 1,000 exceptions at random instants: 0 batches lost or doubled

_THOUSAND = [
    ("embedded", "views", 140), ("embedded", "contiguous", 60), ("embedded", "collate", 140),
    ("embedded", "decode", 140), ("embedded", "python", 60), ("embedded", "device", 60),
    ("daemon", "views", 100), ("daemon", "collate", 100), ("daemon", "decode", 100),
]  # fmt: skip
_ACCELERATED = [(0, 50), (2, 50)]  # workers, exceptions


def test_they_are_a_thousand() -> None:
    assert sum(n for *_, n in _THOUSAND) + sum(n for _, n in _ACCELERATED) == 1000


class _Alarm:
    """Raises one of several exceptions at a random instant after arm(), where `inside` holds."""

    ERRORS = (_Interrupt, KeyboardInterrupt, ValueError)

    def __init__(self, seed: int, inside: Callable[[Any], bool]) -> None:
        self.rng = random.Random(seed)
        self._inside = inside

    def __enter__(self) -> _Alarm:
        self._before = signal.signal(signal.SIGALRM, self._on_alarm)
        return self

    def __exit__(self, *_: object) -> None:
        self.disarm()
        signal.signal(signal.SIGALRM, self._before)

    def _on_alarm(self, _: int, frame: Any) -> None:
        # What is raised behind the return cannot be told from what the loop itself raises.
        if self._inside(frame):
            raise self.rng.choice(self.ERRORS)("at a random instant")

    def arm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 10 ** self.rng.uniform(-5.5, -3))

    def disarm(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _same_batch(content: Any, wanted: Any) -> bool:
    # Of a batch of views all but its index, which counts from where the stream began.
    return content[-2:] == wanted[-2:] if len(wanted) == 4 else content == wanted


@pytest.mark.seeds  # make soak: ten times as many
@pytest.mark.parametrize(
    ("engine", "mode", "exceptions"), _THOUSAND, indirect=["engine"], ids=lambda v: str(v)
)
def test_a_thousand_exceptions(
    make: Callable[[str], forebay.DataLoader], mode: str, exceptions: int
) -> None:
    """In signal handlers, and, where there is one, in the user's own function. Each time the state
    is what it was, and now and then a second loader goes on from it.
    """
    exceptions *= 10 if os.environ.get("FOREBAY_SOAK") else 1
    loader, whole = make(mode), make(mode)
    rng = random.Random(exceptions)
    collate = loader.collate_fn
    if collate is not None:

        def faulty(batch: Any) -> Any:
            if rng.random() < 0.3:
                raise ValueError("of the user's function")
            return collate(batch)

        loader.collate_fn = faulty
    raised = epoch = 0
    with _Alarm(7, _inside_next) as alarm:
        while raised < exceptions:
            wanted = [_content(batch) for batch in whole]
            got: list[Any] = []
            iterator = iter(loader)
            while True:
                state = loader.state_dict()
                assert (state["epoch"], state["consumed"]) == (epoch, min(42, 8 * len(got)))
                try:
                    alarm.arm()
                    try:
                        batch = next(iterator)
                    finally:
                        alarm.disarm()
                except StopIteration:
                    break
                except _Alarm.ERRORS:
                    raised += 1
                    assert loader.state_dict() == state
                    if raised % 20 == 0 and len(got) < len(wanted):
                        other = make(mode)
                        other.load_state_dict(state)
                        assert _same_batch(_content(next(iter(other))), wanted[len(got)])
                        other.close()
                else:
                    got.append(_content(batch))
                    del batch
            assert got == wanted
            epoch += 1
            assert loader.epoch == epoch


@pytest.mark.seeds
@pytest.mark.parametrize(("workers", "exceptions"), _ACCELERATED)
def test_a_thousand_exceptions_with_accelerate(
    photos: Path,  # noqa: F811
    workers: int,
    exceptions: int,
) -> None:
    """Outside of PyTorch's own next(), which loses a batch that is interrupted inside it."""
    exceptions *= 10 if os.environ.get("FOREBAY_SOAK") else 1
    dataset = _Files(sorted(str(p) for p in photos.rglob("*.jpg")))
    plain = torch.utils.data.DataLoader(
        dataset, 2, num_workers=workers, persistent_workers=workers > 0
    )
    wanted = [batch.tolist() for batch in plain]
    fast = forebay.accelerate(plain, engine=forebay.Engine("64M"))
    theirs = torch.utils.data.dataloader._BaseDataLoaderIter.__next__.__code__
    rng = random.Random(workers)
    left = raised = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal left
        if event not in ("call", "c_return"):
            return
        while frame.f_code is not ours:
            frame = frame.f_back
            if frame is None or frame.f_code is theirs or frame.f_code is here:
                return
        left -= 1
        if left == 0:
            raise rng.choice(_Alarm.ERRORS)("at a random instant")

    here = sys._getframe().f_code
    while raised < exceptions:
        iterator = iter(fast)
        ours = type(iterator).__next__.__code__
        assert ours is not theirs
        got = []
        while True:
            left = rng.randrange(1, 60)
            sys.setprofile(profile)
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except _Alarm.ERRORS:
                raised += 1
            else:
                got.append(batch.tolist())
            finally:
                sys.setprofile(None)
        assert got == wanted
        assert not any(each.inside for each in worker_io._active), "open() is not the program's own"
        assert len(worker_io._active) <= 1
    del iterator, fast, plain, profile
    gc.collect()


@pytest.mark.parametrize("engine", ["embedded", "daemon"], indirect=True)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", ["collate", "python"])
def test_an_error_in_the_users_code_loses_no_batch(
    make: Callable[[str], forebay.DataLoader], mode: str, error: type[BaseException]
) -> None:
    wanted = _whole(make(mode), _EPOCHS)
    loader = make(mode)
    calls = 0

    def faulty(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(value: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls % 3 == 0:
                raise error("every third")
            return real(value)

        return call

    if mode == "collate":
        assert loader.collate_fn is not None
        loader.collate_fn = faulty(loader.collate_fn)
    else:
        assert loader._decoding is not None
        rest = loader._decoding.rest
        once = faulty(lambda batch: batch)

        def apply(image: Any) -> Any:
            return rest[0](once(image)) if calls < 20 else rest[0](image)

        object.__setattr__(loader._decoding, "rest", [apply])
    got, raised = [], 0
    for _ in range(_EPOCHS):
        iterator = iter(loader)
        got.append([])
        while True:
            try:
                got[-1].append(_content(next(iterator)))
            except StopIteration:
                break
            except error:
                raised += 1
    assert raised > 0
    assert got == wanted


@pytest.mark.parametrize("engine", ["embedded"], indirect=True)
def test_an_interrupted_iter_keeps_the_place_to_resume_from(
    make: Callable[[str], forebay.DataLoader],
) -> None:
    wanted = _whole(make("views"), 1)[0]
    loader = make("views")
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    other = make("views")
    other.load_state_dict(state)
    seek = other._feed.stand

    def interrupted(at: tuple[int, int]) -> None:
        seek(at)
        raise _Interrupt

    other._feed.stand = interrupted
    with pytest.raises(_Interrupt):
        iter(other)
    assert other.state_dict() == state
    del other._feed.stand
    # A batch's index counts from where the stream began.
    assert [_content(batch)[2:] for batch in other] == [content[2:] for content in wanted[2:]]


@pytest.mark.parametrize("engine", ["embedded", "daemon"], indirect=True)
@pytest.mark.parametrize("mode", ["views", "decode"])
def test_threads_share_an_iterator(make: Callable[[str], forebay.DataLoader], mode: str) -> None:
    """Each batch goes to one of them, and the end is the end for all."""
    wanted = _whole(make(mode), 3)
    loader = make(mode)
    for epoch in wanted:
        iterator = iter(loader)
        got: list[Any] = []

        def consume(iterator: Any = iterator, got: list[Any] = got) -> None:
            for batch in iterator:
                got.append(_content(batch))

        threads = [threading.Thread(target=consume) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(got) == sorted(epoch)


@pytest.mark.parametrize("engine", ["embedded"], indirect=True)
def test_next_inside_next_is_an_error(make: Callable[[str], forebay.DataLoader]) -> None:
    loader = make("collate")
    real = loader.collate_fn
    loader.collate_fn = lambda batch: next(iterator)
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match="inside itself"):
        next(iterator)
    loader.collate_fn = real
    assert len(list(iterator)) == len(loader)


def test_accelerate_keeps_a_batch_that_pytorch_has_made(photos: Path) -> None:  # noqa: F811
    """PyTorch's own loader loses one that is interrupted inside it; what it has handed to Forebay
    is not lost.
    """
    module = importlib.import_module("forebay.accelerate")  # its name is also the function's
    dataset = _Files(sorted(str(p) for p in photos.rglob("*.jpg")))
    plain = torch.utils.data.DataLoader(dataset, 8)
    with pytest.MonkeyPatch.context() as patch:
        fast = forebay.accelerate(plain, engine=forebay.Engine("64M"))
        count = 0
        real = module._Tally.batch

        def interrupted(self: Any) -> None:
            nonlocal count
            real(self)
            count += 1
            if count % 2:
                raise _Interrupt

        patch.setattr(module._Tally, "batch", interrupted)
        got = []
        iterator = iter(fast)
        while True:
            try:
                got.append(next(iterator))
            except StopIteration:
                break
            except _Interrupt:
                continue
    assert count == len(plain)
    assert [g.tolist() for g in got] == [w.tolist() for w in plain]


class _Files:
    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        with open(self.paths[index], "rb") as file:
            return sum(file.read())
