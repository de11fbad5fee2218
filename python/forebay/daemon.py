"""The engine that a node's training processes share: ``forebayd``, started when it is needed."""

from __future__ import annotations

import json
import logging
import os
import threading
import weakref
from typing import Any

from . import _forebay
from ._errors import ArgumentError
from ._internal import own_writes, peers_watch, ranks
from ._internal.units import format_bytes, parse_bytes, text_of, whole_number
from .engine import (
    Engine,
    cache_group_of,
    copy_threads_of,
    metrics_port_of,
    peers_of,
    shared_engine,
)

_log = logging.getLogger("forebay")
if ranks.among_others() is not None:
    # What it writes before it opens a data set, it does not let another rank look at for it.
    own_writes.remember()
_START_S = 20.0
# Seconds between tries to come back to a daemon.
_RETURN_S = (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0)
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
        etcd: ``https://host:2379``, several with commas: the cluster whose nodes divide the source
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
        cache_group: str | int | None = None,
        linger: int = 5,
        metrics_port: int | None = None,
        job: str | None = None,
        etcd: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        peers: str | bool | None = None,
    ) -> None:
        if cache_bytes and not cache_dir:
            raise ArgumentError("cache_bytes needs a cache_dir")
        if cache_group not in (None, "") and not cache_dir:
            raise ArgumentError("cache_group needs a cache_dir")
        self._options: dict[str, Any] = dict(
            memory=parse_bytes(memory),
            in_flight=whole_number("in_flight", in_flight, 0),
            max_in_flight=whole_number("max_in_flight", max_in_flight, 1),
            io=io,
            copy_threads=copy_threads,
            keep=keep,
            memory_tier=parse_bytes(memory_tier, "memory_tier"),
            verify=verify,
            cache_dir=os.path.abspath(cache_dir) if cache_dir else "",
            cache_bytes=parse_bytes(cache_bytes, "cache_bytes"),
            cache_group=cache_group_of(cache_group, cache_dir),
            linger=whole_number("linger", linger, 0),
            metrics_port=metrics_port_of(metrics_port),
            job=job or "",
            etcd=etcd or "",
            folder=os.path.abspath(folder) if folder else "",
            peers=peers_of(peers),
        )
        self._noted = False
        self._warned: set[str] = set()
        self._pid = -1
        self._port: _forebay.Port | None = None
        self._changes: _forebay.Changes | None = None
        self._decode_threads = 0
        self._gate = threading.RLock()
        self._telling = threading.RLock()
        self._listening = False  # a thread waits for what the port has to say
        self._gone = threading.Event()  # this object is
        weakref.finalize(self, self._gone.set)
        self.client()
        peers_watch.start(self, str(self._options["peers"]), self._gone)

    # ---- the daemon, or what stands in for it

    @property
    def native(self) -> Any:
        """A ``_forebay.Port``: the way to the daemon, or to the engine of this process that takes
        its place; a forked child has its own.
        """
        if self._pid != os.getpid():  # the parent's locks may be held
            self._gate, self._telling = threading.RLock(), threading.RLock()
            self._port, self._changes, self._listening = None, None, False
            self._pid = os.getpid()
        port = self._port
        if port is None:
            with self._gate:
                if self._port is None:
                    self._port = self._open()
                port = self._port
        return port

    def _open(self) -> _forebay.Port:
        names = ("memory", "in_flight", "max_in_flight", "io", "keep", "memory_tier", "verify")
        own = {
            name: self._options[name]
            for name in (*names, "cache_dir", "cache_bytes", "cache_group")
        }
        own["copy_threads"] = copy_threads_of(self._options["copy_threads"])
        port = _forebay.Port(
            _forebay.EngineOptions(**own),
            program=program(),
            folder=self._options["folder"],
            settings=self._settings(),
            job=self._options["job"],
            timeout_s=_START_S,
            retry_s=list(_RETURN_S),
        )
        port.set_decode_threads(self._decode_threads)
        self._changes = port.changes
        client = port.daemon
        if client is not None:
            self._tell_differences(client)
        return port

    def client(self) -> _forebay.SharedEngine | None:
        """The connection of this process; None while it goes on without the daemon."""
        client = self.native.daemon
        self.tell_changes()
        return client

    def tell_changes(self) -> None:
        changes = self._changes
        if changes is None or not changes.any or self._pid != os.getpid():
            return
        with self._telling:
            # Whoever looks meanwhile waits until it is said.
            while (change := changes.first()) is not None:
                alone, what = change
                if alone:
                    _log.warning(
                        "forebay: going on without the node's daemon, in this process: %s", what
                    )
                else:
                    _log.info("forebay: back with the node's daemon, %s", what)
                changes.drop_first()
            if not self._listening:
                # It comes back in a thread of its own, when nobody may be there to say it.
                self._listening = True
                threading.Thread(
                    target=_listen, args=(weakref.ref(self), changes), daemon=True
                ).start()

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

    def _describe(self) -> dict[str, Any] | _forebay.Engine:
        """What the daemon says of itself; without one, the engine in its place."""
        port = self.native
        while True:
            said = port.describe()
            self.tell_changes()
            if said:
                return json.loads(said)
            own = port.engine
            if own is not None:  # else it has just come back
                return own

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

    def dataset(self, catalog: _forebay.Catalog, delay: str = "") -> int:
        port = self.native
        number = port.add_dataset(catalog, delay)
        own = None if self._noted or not self._options["cache_dir"] else port.engine
        if own is not None and own.cache_note:
            self._noted = True
            _log.warning("forebay: %s", own.cache_note)
        return number

    def may_hold(self, root: str) -> bool:
        return True  # of any job before this one

    def looks(self, root: str) -> _forebay.RankLooks | None:
        place = ranks.among_others()
        if place is None:
            return None
        own_writes.tell_of(root, self)
        return self.native.rank_looks(self.job, *place, own_writes.last_write_ago(root))

    def wrote(self) -> None:
        """This process is about to write to a data set that it has opened."""
        port = self._port
        if port is not None and self._pid == os.getpid():
            port.looks_over()

    @property
    def cache_status(self) -> str:
        said = self._describe()
        return said["cache_status"] if isinstance(said, dict) else said.cache_status

    def warn_of_cache(self) -> None:
        """One process of the node says it."""
        if ranks.local_rank() == 0:
            super().warn_of_cache()

    def cache_problem(self) -> str:
        said = self._describe()
        if not isinstance(said, dict):
            return str(said.cache_warning)
        return text_of(said.get("cache_warning", ""))

    def _warnings(self) -> str:
        # Of the folder to those who asked for one.
        return super()._warnings() if self._options["cache_dir"] else self.changes()

    def changes(self) -> str:
        said = self._describe()
        if not isinstance(said, dict):
            return str(said.changed_files)
        return text_of(said.get("changed_files", ""))

    def cluster(self) -> dict[str, Any] | None:
        said = self._describe()
        return said.get("cluster") if isinstance(said, dict) else said.cluster()

    def _peers_off(self) -> str:
        said = self._describe()
        if not _forebay.wants_peers(str(self._options["peers"])):
            return ""
        if not isinstance(said, dict):
            return "no peers: this process goes on without the node's daemon, which was the node"
        if said.get("cluster") is None:
            return said.get("peers_off") or (
                "no peers: the node's daemon was started without them, by another program or "
                "before the launcher's variables were set"
            )
        return ""

    def metrics(self) -> dict[str, int]:
        said, port = self._describe(), self.native
        if isinstance(said, dict):
            return {**said["metrics"], **port.own_metrics()}
        return {**said.metrics(), **port.decoding(), **port.own_metrics()}

    def knobs(self) -> dict[str, tuple[int, int, int, str]]:
        said = self._describe()
        if not isinstance(said, dict):
            return said.knobs()
        return {
            k["name"]: (k["value"], k["minimum"], k["maximum"], k["meaning"])
            for mechanism in said["mechanisms"]
            for k in mechanism["knobs"]
        }

    def mechanisms(self) -> dict[str, dict[str, Any]]:
        """What can be tuned: each mechanism's meaning, and the names of its knobs and metrics."""
        said = self._describe()
        if not isinstance(said, dict):
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
        port = self.native
        others = {k: v for k, v in knobs.items() if k != "decode_threads"}
        while others:
            client = port.daemon
            if client is not None:
                client.set_knobs(list(others), list(others.values()))
                break
            own = port.engine
            if own is not None:  # else it has just come back
                own.set_knobs(others)
                break
        if "decode_threads" in knobs:
            port.set_decode_threads(knobs["decode_threads"])
            self._decode_threads = knobs["decode_threads"]

    def __reduce__(self):
        return _rebuild, (self._options,)


def _rebuild(options: dict) -> SharedEngine:
    return SharedEngine(**options)


def _listen(engine: weakref.ref[SharedEngine], changes: _forebay.Changes) -> None:
    """Says what has changed when no call does."""
    while changes.wait():
        found = engine()
        if found is None:
            return
        found.tell_changes()
        del found


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
