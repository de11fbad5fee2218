"""The engine that a node's training processes share: ``forebayd``, started when it is needed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from . import _forebay, peers_watch, ranks
from ._errors import (
    AccessError,
    ArgumentError,
    DeadlineError,
    ForebayError,
    MissingError,
    StorageError,
    UnsupportedError,
)
from .engine import Engine, dataset_id, metrics_port_of, peers_of, shared_engine
from .units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from .feeds import At, Held

_log = logging.getLogger("forebay")
_START_S = 20.0
# Seconds between tries to come back to a daemon. One that lived for a minute was worth it.
_RETURN_S = (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0)
_LIVED_S = 60.0
_LEAST = 16 << 20  # bytes for an engine of one rank
_T = TypeVar("_T")
MakeFeed = Callable[[Any, int, dict], Any]  # (engine, data set, arguments)
_NO_DAEMON = (AccessError, DeadlineError, MissingError, StorageError, UnsupportedError)
_BYTES = ("memory", "memory_tier", "cache_bytes")


def program() -> str:
    """The daemon's executable: $FOREBAYD, or the one beside the extension module."""
    beside = os.path.join(os.path.dirname(os.path.abspath(_forebay.__file__)), "forebayd")
    return os.environ.get("FOREBAYD") or beside


class SharedEngine(Engine):
    """One engine for all of a user's processes on a node, in a process of its own.

    Ranks of one job, and different jobs, share its memory budget; a data set that several of them
    read is read from the source once. The first to need it starts it; it ends some seconds after
    the last has left. Batches are views of its memory. When it dies, each loader goes on with the
    next batch from an engine in its own process, and comes back to a new daemon some seconds later;
    where that one cannot take it, it stays.

    With more than one rank on the node (``LOCAL_WORLD_SIZE`` and its kin) loaders use it by
    default; ``FOREBAY_DAEMON=off``, or ``engine=forebay.Engine()``, keeps them apart.

    Args:
        memory: Bytes for everything the daemon holds, for all ranks together. Default: half of
            what may be used.
        linger: Seconds that it stays without a client.
        metrics_port: The daemon's web page on 127.0.0.1, with ``/metrics`` for Prometheus; 0: no
            port. Default: ``FOREBAY_METRICS_PORT``, or none.
        job: The job that this process belongs to, for policies. Default: ``$FOREBAY_JOB``, else
            SLURM's or torchrun's, else the process group.
        etcd: ``http://host:2379``, several with commas: the cluster whose nodes divide the source
            among them. Default: ``$FOREBAY_ETCD``, or this node alone.
        folder: Where its socket lies. Default: ``$XDG_RUNTIME_DIR/forebay``, or
            ``/tmp/forebay-UID``.
        Others: As in ``forebay.Engine``. Whoever starts the daemon decides; a later process that
            wants something else is told so in its log.
    """

    def __init__(
        self,
        memory: int | str | None = None,
        *,
        in_flight: int = 0,
        max_in_flight: int = 256,
        io: str = "auto",
        copy_threads: int | None = None,
        keep: bool = True,
        memory_tier: int | str | None = None,
        verify: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        linger: int = 5,
        metrics_port: int | None = None,
        job: str | None = None,
        etcd: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        peers: str | bool | None = None,
    ) -> None:
        if cache_bytes and not cache_dir:
            raise ArgumentError("cache_bytes needs a cache_dir")
        self._options: dict[str, Any] = dict(
            memory=parse_bytes(memory),
            in_flight=in_flight,
            max_in_flight=max_in_flight,
            io=io,
            copy_threads=copy_threads,
            keep=keep,
            memory_tier=parse_bytes(memory_tier, "memory_tier"),
            verify=verify,
            cache_dir=os.path.abspath(cache_dir) if cache_dir else "",
            cache_bytes=parse_bytes(cache_bytes, "cache_bytes"),
            linger=linger,
            metrics_port=metrics_port_of(metrics_port),
            job=job or "",
            etcd=etcd or "",
            folder=os.path.abspath(folder) if folder else "",
            peers=peers_of(peers),
        )
        self._noted = False
        self._pid = -1
        self._client: _forebay.SharedEngine | None = None
        self._embedded: Engine | None = None
        self._former: weakref.ref[Engine] | None = None  # embedded before a daemon came back
        self._decode_threads = 0
        self._gate = threading.RLock()
        self._feeds: weakref.WeakSet[SharedFeed] = weakref.WeakSet()
        self._tries = 0  # to come back
        self._attached_at = 0.0
        self._returning: threading.Thread | None = None
        self._gone = threading.Event()  # this object is
        weakref.finalize(self, self._gone.set)
        self.client()
        peers_watch.start(self, str(self._options["peers"]), self._gone)

    # ---- the daemon, or what stands in for it

    def client(self) -> _forebay.SharedEngine | None:
        """The connection of this process; None once it goes on without the daemon."""
        now = self.now()
        return None if isinstance(now, Engine) else now

    def now(self) -> _forebay.SharedEngine | Engine:
        """The daemon, or the engine of this process that took its place; never both."""
        if self._pid != os.getpid():
            # A forked child has a connection of its own; its parent's lock may be held.
            self._gate = threading.RLock()
            self._feeds = weakref.WeakSet()
            self._client = self._embedded = self._former = self._returning = None
            self._tries = 0
            self._pid = os.getpid()
        with self._gate:
            if self._client is None and self._embedded is None:
                try:
                    self._client = self._attach()
                    self._tell_differences(self._client)
                except _NO_DAEMON as error:
                    self._go_on_alone(str(error))
            return self._client or self._alone()

    def _attach(self) -> _forebay.SharedEngine:
        client = _forebay.SharedEngine.attach(
            program(), self._options["folder"], self._settings(), _START_S
        )
        client.set_decode_threads(self._decode_threads)
        self._attached_at = time.monotonic()
        return client

    def _alone(self) -> Engine:
        """The engine of this process. Under the gate, and only without a daemon."""
        if self._embedded is None and self._former is not None:
            self._embedded = self._former()  # a loader has not left it yet
        if self._embedded is None:
            options: dict[str, Any] = dict(self._options)
            for name in ("linger", "job", "etcd", "folder"):
                del options[name]
            options["metrics_port"] = 0  # one port, and as many of these as ranks
            options["peers"] = "off"  # the daemon was the node, and another one may come
            # What was meant for all ranks of the node is divided among them.
            for name in ("memory", "memory_tier"):
                if options[name]:
                    options[name] = max(options[name] // ranks.local_world(), _LEAST)
            self._embedded = Engine(**options)
            if self._decode_threads:
                self._embedded.set_knob("decode_threads", self._decode_threads)
        return self._embedded

    def lost(self, client: _forebay.SharedEngine, why: str) -> None:
        """The daemon has gone: this process goes on alone. Said once."""
        with self._gate:
            if self._client is client:
                self._client = None
                if time.monotonic() - self._attached_at > _LIVED_S:
                    self._tries = 0
                self._go_on_alone(why)
        _forebay.SharedEngine.clear_dead(self._options["folder"])
        self._settle_feeds()

    def refused(self, client: _forebay.SharedEngine, why: str) -> None:
        """The daemon that was come back to cannot serve this process, which stays alone."""
        with self._gate:
            if self._client is client:
                self._client = None
                self._tries = len(_RETURN_S)
                self._go_on_alone(why)

    def _settle_feeds(self) -> None:
        with self._gate:
            feeds = list(self._feeds)
        for feed in feeds:
            with contextlib.suppress(ForebayError):  # its next call meets it again
                feed.settle()

    def _go_on_alone(self, why: str) -> None:
        # As text: an exception that a handler keeps would keep the connection.
        _log.warning("forebay: going on without the node's daemon, in this process: %s", why)
        self._alone()
        if self._returning is None and self._tries < len(_RETURN_S):
            self._returning = threading.Thread(
                target=_come_back, args=(weakref.ref(self), self._gone), daemon=True
            )
            self._returning.start()

    def _try_to_return(self) -> float:
        """One try; seconds until the next one, 0 when there is none."""
        self._tries += 1
        try:
            client = self._attach()
        except Exception:  # noqa: BLE001 - whatever it is, the next try may do
            with self._gate:
                if self._tries < len(_RETURN_S):
                    return _RETURN_S[self._tries]
                self._returning = None
                return 0.0
        with self._gate:
            # Batches on loan keep the engine of this process, and feeds until they have moved.
            self._former = weakref.ref(self._alone())
            self._client, self._embedded, self._returning = client, None, None
        _log.info("forebay: back with the node's daemon, process %d", client.pid)
        self._settle_feeds()
        return 0.0

    def _settings(self) -> list[str]:
        options, out = self._options, []
        defaults = dict(max_in_flight=256, io="auto", keep=True, linger=5)
        for name, value in options.items():
            if (
                name in ("folder", "job")
                or value is None
                or value == defaults.get(name, 0)
                or value == ""
            ):
                continue
            out.append(f"{name}={int(value) if isinstance(value, bool) else value}")
        return out

    def _tell_differences(self, client: _forebay.SharedEngine) -> None:
        theirs = dict(line.split("=", 1) for line in client.settings.splitlines())
        differ = []
        for setting in self._settings():
            name, value = setting.split("=", 1)
            if theirs.get(name) != value:
                has = theirs.get(name, "default")
                if name in _BYTES:
                    value = format_bytes(int(value))
                    has = format_bytes(int(has)) if has.isdigit() else has
                differ.append(f"{name}={value} (it has {has})")
        if differ:
            _log.warning("forebay: the node's daemon was started by another process; not used: %s",
                         ", ".join(differ))  # fmt: skip

    def _describe(self) -> dict[str, Any] | Engine:
        """What the daemon says of itself; without one, the engine in its place."""
        while True:
            now = self.now()
            if isinstance(now, Engine):
                return now
            try:
                return json.loads(now.describe())
            except ForebayError as error:
                if now.connected:
                    raise
                self.lost(now, str(error))

    @property
    def job(self) -> str:
        """The job that this process belongs to."""
        return self._options["job"] or _forebay.SharedEngine.job_name()

    @property
    def socket(self) -> str:
        """The daemon's, for processes that attach to it by themselves."""
        return os.path.join(self.folder, "forebayd.sock")

    @property
    def folder(self) -> str:
        """Where the daemon's socket lies."""
        return str(self._options["folder"] or _forebay.SharedEngine.default_folder())

    # ---- as Engine

    @property
    def native(self) -> Any:
        """The C++ engine behind this one."""
        now = self.now()
        return now.native if isinstance(now, Engine) else now

    @property
    def cache_status(self) -> str:
        said = self._describe()
        return said.cache_status if isinstance(said, Engine) else said["cache_status"]

    def cluster(self) -> dict[str, Any] | None:
        said = self._describe()
        return said.cluster() if isinstance(said, Engine) else said.get("cluster")

    def _peers_off(self) -> str:
        said = self._describe()
        if not _forebay.wants_peers(str(self._options["peers"])):
            return ""
        if isinstance(said, Engine):
            return "no peers: this process goes on without the node's daemon, which was the node"
        if said.get("cluster") is None:
            return said.get("peers_off") or (
                "no peers: the node's daemon was started without them, by another program or "
                "before the launcher's variables were set"
            )
        return ""

    def metrics(self) -> dict[str, int]:
        said = self._describe()
        return said.metrics() if isinstance(said, Engine) else said["metrics"]

    def knobs(self) -> dict[str, tuple[int, int, int, str]]:
        said = self._describe()
        if isinstance(said, Engine):
            return said.knobs()
        return {
            k["name"]: (k["value"], k["minimum"], k["maximum"], k["meaning"])
            for mechanism in said["mechanisms"]
            for k in mechanism["knobs"]
        }

    def mechanisms(self) -> dict[str, dict[str, Any]]:
        """What can be tuned: each mechanism's meaning, and the names of its knobs and metrics."""
        said = self._describe()
        if isinstance(said, Engine):
            return said.mechanisms()
        return {
            m["name"]: {
                "meaning": m["meaning"],
                "knobs": [k["name"] for k in m["knobs"]],
                "metrics": m["metrics"],
            }
            for m in said["mechanisms"]
        }

    def set_knob(self, name: str, value: int) -> None:
        self.set_knobs({name: value})

    def set_knobs(self, knobs: dict[str, int]) -> None:
        """Changes all of them, or none, while running; for every process that shares the daemon.
        ``decode_threads`` is this process's own.
        """
        now = self.now()
        if isinstance(now, Engine):
            now.set_knobs(knobs)
            return
        others = {k: v for k, v in knobs.items() if k != "decode_threads"}
        if others:
            now.set_knobs(list(others), list(others.values()))
        if "decode_threads" in knobs:
            now.set_decode_threads(knobs["decode_threads"])
            self._decode_threads = knobs["decode_threads"]

    def feed(
        self, catalog: _forebay.Catalog, delay: str, arguments: dict, make: MakeFeed
    ) -> SharedFeed:
        """A loader's batches."""
        return SharedFeed(self, catalog, delay, arguments, make)

    def __reduce__(self):
        return _rebuild, (self._options,)


def _rebuild(options: dict) -> SharedEngine:
    return SharedEngine(**options)


def _come_back(engine: weakref.ref[SharedEngine], gone: threading.Event) -> None:
    """Tries to find or start a daemon again, some seconds after one has gone."""
    found = engine()
    delay = _RETURN_S[min(found._tries, len(_RETURN_S) - 1)] if found is not None else 0.0
    while delay:
        del found
        if gone.wait(delay):
            return
        found = engine()
        delay = found._try_to_return() if found is not None else 0.0


class _Attached:
    """A daemon where a feed expects an engine."""

    def __init__(self, client: _forebay.SharedEngine) -> None:
        self.native = client


class _Call:
    """A call under way in a feed."""

    over = False


class SharedFeed:
    """Batches from the daemon; from an engine of this process while there is none.

    Each call names the place that it asks for, so that after a change nothing is missed or seen
    twice. ``make`` makes the feed of either engine.
    """

    def __init__(
        self,
        engine: SharedEngine,
        catalog: _forebay.Catalog,
        delay: str,
        arguments: dict,
        make: MakeFeed,
    ) -> None:
        self._engine = engine
        self._catalog = catalog
        self._delay = delay
        self._arguments = dict(arguments)
        self._make = make
        self._at = arguments["first_epoch"], arguments["first_position"]  # asked for last
        self._past: list[dict] = []  # what engines that were left had delivered
        self.before_move: Callable[[], None] | None = None
        """Called before the memory of the batches changes."""
        # A lock of C: a signal handler cannot raise between its being taken and the block.
        self._gate = threading.RLock()
        self._left = threading.Condition(self._gate)
        self._calls: list[_Call] = []
        self._pid = os.getpid()
        self._client: _forebay.SharedEngine | None = None
        self._embedded: Engine | None = None  # kept for the engine, should the daemon not take us
        self._feed: Any = None
        self._opened = self._closed = False
        self._open()
        with engine._gate:
            engine._feeds.add(self)

    @property
    def native(self) -> Any:
        """What the batches come from now."""
        return self._feed.native

    def _misplaced(self) -> bool:
        """Whether this is of a daemon that has gone, or of this process although there is one."""
        now, ours = self._engine._client, self._client
        if now is ours or self._pid != os.getpid():
            return False
        return ours is None or not ours.connected

    def _open(self) -> None:
        """Moves to where the engine is. What served so far is left when the new stream is open."""
        while self._feed is None or self._misplaced():
            arguments = {
                **self._arguments,
                "first_epoch": self._at[0],
                "first_position": self._at[1],
            }
            if arguments["epochs"]:  # the end stays where it was
                end = self._arguments["first_epoch"] + arguments["epochs"]
                arguments["epochs"] = max(end - self._at[0], 1)
            now = self._engine.now()
            if isinstance(now, Engine):
                dataset = dataset_id(now, self._catalog, self._delay)
                feed = self._make(now, dataset, arguments)
                self._leave()
                self._feed, self._client, self._embedded = feed, None, now
            else:
                try:
                    dataset = now.add_dataset(self._catalog, self._delay)
                    named = {**arguments, "job": self._engine.job}
                    feed = self._make(_Attached(now), dataset, named)
                except ForebayError as error:
                    if not now.connected:
                        self._engine.lost(now, str(error))
                    elif self._opened:  # it was served before, so this process can
                        self._engine.refused(now, str(error))
                    else:
                        raise
                    continue
                self._leave()
                self._feed, self._client = feed, now
            self._opened = True

    def _leave(self) -> None:
        feed = self._feed
        if feed is None:
            return
        if self.before_move is not None:
            self.before_move()
        self._feed = self._client = self._embedded = None  # a client maps its daemon's memory
        with contextlib.suppress(ForebayError):  # its daemon has gone, or it was closed
            self._past = merge_stats(self._past, feed.stats())
            feed.close()

    def settle(self) -> None:
        """The engine has lost its daemon or come back to one. A feed that nobody waits on gives up
        its old memory, so that the node does not spend two budgets; one in use does so at its next
        call.
        """
        if not self._gate.acquire(blocking=False):
            return
        try:
            if self._inside or self._feed is None or self._closed or self.before_move is not None:
                return
            if self._client is None:
                self._open()
                if self._closed:  # meanwhile
                    self.close()
            elif self._misplaced():
                self._leave()  # the next call opens it again
        finally:
            self._gate.release()

    @property
    def _inside(self) -> int:
        """Calls under way."""
        return sum(not call.over for call in self._calls)

    def _enter(self, call: _Call) -> tuple[Any, _forebay.SharedEngine | None]:
        with self._gate:
            if self._feed is None:  # lost; another call may still be in it
                self._left.wait_for(lambda: self._inside == 0 or self._feed is not None, _START_S)
            if self._inside == 0 or self._feed is None:
                self._open()
            self._calls = [other for other in self._calls if not other.over]
            self._calls.append(call)
            return self._feed, self._client

    def _call(self, function: Callable[[Any], _T], after: Callable[[_T], _T] = lambda x: x) -> _T:
        """``after`` is done with the result before the feed can move."""
        while True:
            call = _Call()
            try:
                feed, client = self._enter(call)
                try:
                    result = function(feed)
                    with self._gate:
                        return after(result)
                except ForebayError as error:
                    if client is None or client.connected or self._engine._pid != os.getpid():
                        raise
                    why = str(error)
            finally:
                call.over = True  # whatever is raised after this line
                with self._gate:
                    self._left.notify_all()
            self._engine.lost(client, why)
            with self._gate:
                if self._client is client:
                    self._leave()

    def take(self, wait: float, at: At) -> Held | None:
        """As ``NativeFeed.take``."""
        self._at = at
        return self._call(lambda feed: feed.take(wait, at))

    def stand(self, at: At) -> None:
        """As ``NativeFeed.stand``."""
        self._at = at
        self._call(lambda feed: feed.stand(at))

    def seek(self, at: At) -> None:
        """As ``NativeFeed.seek``."""
        self._at = at
        self._call(lambda feed: feed.seek(at))

    def stats(self) -> list[dict]:
        if self._feed is None:  # no reason to open a stream
            return self._past
        return self._call(lambda feed: feed.stats(), lambda now: merge_stats(self._past, now))

    def waiting_for(self) -> str:
        return self._call(lambda feed: feed.waiting_for())

    def close(self) -> None:
        self._closed = True
        # Not through _call: this ends a wait of another thread.
        client, feed = self._client, self._feed
        if feed is None:
            return
        try:
            feed.close()
        except ForebayError:
            if client is None or client.connected:
                raise


def merge_stats(past: list[dict], now: list[dict]) -> list[dict]:
    """Epochs of two engines in one list; the one that both have a part of is added up."""
    now = [s for s in now if s["batches"]]
    if not past or not now or past[-1]["epoch"] != now[0]["epoch"]:
        return past + now
    import numpy as np

    first, second = past[-1], now[0]
    both = {name: first[name] + second[name] for name in first if name not in ("epoch", "wait")
            and name != "batch_us"}  # fmt: skip
    both["epoch"] = first["epoch"]
    both["wait"] = {cause: first["wait"][cause] + second["wait"][cause] for cause in first["wait"]}
    both["batch_us"] = np.concatenate([first["batch_us"], second["batch_us"]])
    return [*past[:-1], both, *now[1:]]


_shared: weakref.ref[SharedEngine] | None = None
_shared_lock = threading.Lock()


def default_engine(**options: Any) -> Engine:
    """The engine of a loader that names none: the node's daemon where the node has several ranks,
    else the process's own.
    """
    return shared_engine(**options) if ranks.local_world() == 1 else node_engine(**options)


def node_engine(**options: Any) -> Engine:
    """The node's daemon, for what has several processes; ``FOREBAY_DAEMON=off``: this process's own
    engine.
    """
    if os.environ.get("FOREBAY_DAEMON", "").lower() in ("off", "0"):
        return shared_engine(**options)
    global _shared
    given = {k: v for k, v in options.items() if v is not None}
    with _shared_lock:
        engine = _shared() if _shared is not None else None
        if engine is None:
            engine = SharedEngine(**given)
            _shared = weakref.ref(engine)
            return engine
    for name, value in given.items():
        wanted = parse_bytes(value, name) if name in _BYTES else value
        if wanted and wanted != engine._options[name]:
            raise ArgumentError(
                f"{name}={value!r}, but the loaders of this process already share an engine with "
                f"{engine._options[name]!r}; leave {name}= out, or pass "
                f"engine=forebay.Engine({name}={value!r})"
            )
    return engine
