"""The engine that a process's loaders share."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import weakref
from typing import Any

from . import _forebay
from ._errors import ArgumentError, ForebayError
from ._internal import peers_watch, ranks
from ._internal.units import format_bytes, parse_bytes, whole_number
from .files import FolderHangs, check_answers

_log = logging.getLogger("forebay")


class Engine:
    """Memory budget, memory tier and source reads, shared by any number of loaders.

    Loaders of one process share one engine by default, so that training and validation live under
    one budget. Make your own only to keep loaders apart: ``forebay.DataLoader(...,
    engine=engine)``.

    Args:
        memory: Bytes for everything the engine holds, as a number or ``"4G"``. Default: half of
            what this process may use (cgroup limit or available memory), divided by the ranks on
            this node.
        in_flight: Source reads at once. Default 0: found while running.
        max_in_flight: The most it may find.
        read_ahead: Bytes in flight and ready ahead of the training loop, beside samples that stay
            in memory, such as ``"64M"``. Default: found while running.
        tuner: Who finds the two: ``"forebay"``, or ``"prisma"`` to compare with that rule.
        tuner_log: A file for what the tuner sees and decides, read by ``forebay tune replay``.
            Default: ``$FOREBAY_TUNER_LOG``, or none.
        io: ``"auto"``, ``"threads"`` or ``"io_uring"``.
        decode_threads: The most threads that decode. Default: one for each processor, divided by
            the ranks on this node.
        keep: Keep samples in memory for later epochs.
        memory_tier: The most bytes of samples that are kept so. Default: all of ``memory`` that
            read-ahead leaves.
        verify: Check every sample's bytes once more as they arrive.
        cache_dir: A folder on a local disk. What is read from the source is copied there, in the
            background, and later epochs and jobs read the copies. One process writes to a folder,
            others read it. A file that changed is told by its size and modification time: see
            ``freshness`` of ``forebay.DataLoader``.
        cache_bytes: How much of the disk it may take, such as ``"50G"``. Default: four fifths of
            what is free.
        cache_group: A group, by name or number, whose members share ``cache_dir`` on purpose: each
            of them can read what the others' jobs copied there, and chooses what they train on.
            Default: the folder is this user's alone, and one that others may write to is refused.
        peers: The other nodes of the job, whose memory and cache folders serve this one and the
            other way round: ``None`` as ``$FOREBAY_PEERS`` says, else the launcher's variables
            (torchrun, SLURM, MPI) where they tell of several nodes; ``False`` for none; or a string
            as that variable takes it, ``"host:port,host:port"`` or ``"etcds://host:port"``. One
            engine of a process has them. Where they cannot be had, the log says why.
        metrics_port: ``GET /metrics`` for Prometheus on 127.0.0.1; 0: no port. Default:
            ``FOREBAY_METRICS_PORT``, or none. One that is taken is a line in the log.
    """

    def __init__(
        self,
        memory: int | str | None = None,
        *,
        in_flight: int = 0,
        max_in_flight: int = 256,
        io: str = "auto",
        copy_threads: int | None = None,
        decode_threads: int = 0,
        keep: bool = True,
        memory_tier: int | str | None = None,
        verify: bool = False,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_bytes: int | str | None = None,
        cache_group: str | int | None = None,
        metrics_port: int | None = None,
        read_ahead: int | str | None = None,
        tuner: str = "forebay",
        tuner_log: str | os.PathLike[str] | None = None,
        peers: str | bool | None = None,
    ) -> None:
        if cache_bytes and not cache_dir:
            raise ArgumentError("cache_bytes needs a cache_dir")
        if cache_group not in (None, "") and not cache_dir:
            raise ArgumentError("cache_group needs a cache_dir")
        self._hung = ""
        try:
            if cache_dir:
                check_answers(cache_dir, "cache_dir=")
        except FolderHangs as error:
            self._hung = str(error)
            cache_dir, cache_bytes, cache_group = None, 0, None
        self._options: dict[str, Any] = dict(
            memory=parse_bytes(memory),
            in_flight=whole_number("in_flight", in_flight, 0),
            max_in_flight=whole_number("max_in_flight", max_in_flight, 1),
            io=io,
            copy_threads=copy_threads_of(copy_threads),
            decode_threads=whole_number("decode_threads", decode_threads, 0),
            keep=keep,
            memory_tier=parse_bytes(memory_tier, "memory_tier"),
            verify=verify,
            cache_dir=os.path.abspath(cache_dir) if cache_dir else "",
            cache_bytes=parse_bytes(cache_bytes, "cache_bytes"),
            cache_group=cache_group_of(cache_group, cache_dir),
            read_ahead=parse_bytes(read_ahead, "read_ahead"),
            tuner=tuner,
            tuner_log=os.fspath(
                os.environ.get("FOREBAY_TUNER_LOG", "") if tuner_log is None else tuner_log
            ),
            peers=peers_of(peers) or embedded_peers(),
        )
        self._metrics_port = metrics_port_of(metrics_port)
        self._web: _forebay.MetricsPort | None = None
        self._pid = -1
        self._noted = False
        self._warned: set[str] = set()
        self._native: _forebay.Engine | None = None
        self._lock = threading.Lock()
        self.native  # noqa: B018 - bad options are reported here, not at the first batch
        if self._native is not None and self._native.cluster() is not None:
            # The one that says what is known at the start is `native`.
            gone = threading.Event()
            weakref.finalize(self, gone.set)
            peers_watch.start(self, self._options["peers"], gone)
        if self._metrics_port:
            # Of the process that made the engine; a forked child has other things to do.
            try:
                self._web = _forebay.MetricsPort(self.native, self._metrics_port)
            except ForebayError as error:
                # With the environment's, only the first process of a node has it.
                level = logging.INFO if metrics_port is None else logging.WARNING
                _log.log(level, "forebay: no metrics over HTTP: %s", str(error))

    @property
    def native(self) -> _forebay.Engine:
        """The C++ engine of this process; a forked child gets its own, a small one."""
        if self._native is None or self._pid != os.getpid():
            with self._lock if self._pid in (-1, os.getpid()) else threading.Lock():
                options = self._options
                if self._native is not None:
                    # A child must not write into its parent's log, nor be its node, nor take as
                    # much memory again.
                    whole = self._native.budget
                    memory = child_budget(whole)
                    options = {**options, "tuner_log": "", "peers": "off", "memory": memory}
                    options["memory_tier"] = min(options["memory_tier"], memory)
                    options["read_ahead"] = min(options["read_ahead"], memory)
                    _tell_child(whole, memory)
                made = {k: v for k, v in options.items() if k != "peers"}
                self._native = _forebay.Engine(
                    _forebay.EngineOptions(**made), peers=options["peers"]
                )
                self._pid = os.getpid()
                if self._native.peers_note:
                    level = logging.WARNING if self._native.peers_failed else logging.INFO
                    _log.log(level, "forebay: %s", self._native.peers_note)
                if self._native.peers_warning:
                    _log.warning("forebay: %s", self._native.peers_warning)
        return self._native

    @property
    def budget(self) -> int:
        """Bytes the engine may hold."""
        return self.native.budget

    @property
    def cache_status(self) -> str:
        """Why the cache folder takes no copies; empty while it does, or where there is none."""
        return self._hung or self.native.cache_status

    def warn_of_cache(self) -> None:
        """Says each line of ``cache_problem()`` and ``changes()`` once, at WARNING."""
        if self._pid != os.getpid():
            return
        for line in self._warnings().splitlines():
            if line not in self._warned:
                self._warned.add(line)
                _log.warning("forebay: %s", line)

    def cache_problem(self) -> str:
        """That the cache folder hung or stopped taking copies, and what to do, in a line each; what
        is over by now stays. Mostly nothing.
        """
        return self._hung or str(self.native.cache_warning)

    def _warnings(self) -> str:
        return f"{self.cache_problem()}\n{self.changes()}".strip()

    def changes(self) -> str:
        """The files that changed after they were looked at, in a line each, the first few."""
        return str(self.native.changed_files)

    def tell_changes(self) -> None:
        """Says in the log what has changed with the engine, each change once: calls of ``native``
        are followed by one. Nothing does in an engine of this process.
        """

    def dataset(self, catalog: _forebay.Catalog, delay: str = "") -> int:
        """Adds a catalog once, so that loaders over it share its samples; its number for
        ``native``, until ``native.close_dataset``.
        """
        return dataset_id(self, catalog, delay)

    def may_hold(self, root: str) -> bool:
        """Whether bytes of the files below ``root`` may come from elsewhere than the files: from a
        cache folder, from peers, or out of memory, where an earlier loader has left them.
        """
        if self._options["cache_dir"] or not may_size_later(self):
            return True
        places = [place[0] for place in self.__dict__.get("_places", {})]
        places += [entry[4][0] for entry in self.__dict__.get("_early_datasets", [])]
        return os.path.realpath(root) in places

    def looks(self, root: str) -> Any:
        """The way to other ranks of the job on this node, for one opening of the data set at
        ``root``: one of them looks at its files, for all. None: each looks by itself.
        """
        return None

    def cluster(self) -> dict[str, Any] | None:
        """What this node knows of the job's other nodes: who is there, what came from each, and
        what went wrong with it last. None without peers.
        """
        return self.native.cluster()

    def peers_problem(self) -> str:
        """Why the job's other nodes are not used though they were meant to be; mostly nothing."""
        off = self._peers_off()
        if off:
            return off
        cluster = self.cluster()
        return "" if cluster is None else str(cluster["health"])

    def _peers_off(self) -> str:
        """Why there are no peers at all."""
        return str(self.native.peers_off)

    def metrics(self) -> dict[str, int]:
        """Every counter and gauge by name (see docs/metrics.md)."""
        return self.native.metrics()

    def prometheus(self) -> str:
        """The same as Prometheus text."""
        return self.native.prometheus()

    def knobs(self) -> dict[str, tuple[int, int, int, str]]:
        """Name to (value, minimum, maximum, meaning)."""
        return self.native.knobs()

    def set_knob(self, name: str, value: int) -> None:
        """Changes a knob while running."""
        self.native.set_knob(name, value)

    def set_knobs(self, knobs: dict[str, int]) -> None:
        """Changes all of them while running, or none if one is wrong."""
        self.native.set_knobs(knobs)

    def mechanisms(self) -> dict[str, dict[str, Any]]:
        """What can be tuned: each mechanism's meaning, and the names of its knobs and metrics."""
        return self.native.mechanisms()

    def __reduce__(self):
        # Two must not write to one log, nor be one node.
        return _rebuild, ({**self._options, "tuner_log": "", "peers": "off"},)


def child_budget(parents: int) -> int:
    """Bytes for the engine of a forked child: what ``memory=`` allows is its parent's, and there
    may be many children.
    """
    return min(parents, max(parents // 8, 64 << 20))


_told_pid = -1


def _tell_child(parents: int, own: int) -> None:
    """Once a process."""
    global _told_pid
    if _told_pid != os.getpid() and own < parents:
        _told_pid = os.getpid()
        _log.warning(
            "forebay: this process was forked from one with an engine of %s, and reads with %s of "
            "its own: less stays in memory. Make the loader, or forebay.Engine(memory=...), after "
            "the fork, or let processes share one engine (docs/daemon.md)",
            format_bytes(parents),
            format_bytes(own),
        )


def _rebuild(options: dict) -> Engine:
    return Engine(**options, metrics_port=0)


def cache_group_of(group: str | int | None, cache_dir: str | os.PathLike[str] | None) -> str:
    """As the engine takes it; says whom its user trusts from now on."""
    if group in (None, ""):
        return ""
    name = str(group)
    _log.info(
        "forebay: the cache folder %s is shared with group %s, by cache_group=: all its members "
        "can read the copies, and choose what is read from them",
        cache_dir,
        name,
    )
    return name


def copy_threads_of(given: int | None) -> int:
    """Threads that copy contiguous batches."""
    if given is not None:
        given = whole_number("copy_threads", given, 0)
    return given or max(1, min(4, os.cpu_count() or 2))


def metrics_port_of(given: int | None) -> int:
    """The port to answer on: what was given, or the environment's; 0: none."""
    text = os.environ.get("FOREBAY_METRICS_PORT", "") if given is None else str(given)
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        name = "FOREBAY_METRICS_PORT" if given is None else "metrics_port"
        raise ArgumentError(f"{name} is {text}; it takes a port, 1 to 65535, or 0 for none")
    return int(text)


def peers_of(given: str | bool | None) -> str:
    """What the user said of other nodes, as the C++ side takes it; empty: nothing."""
    if given is None or given == "":
        return ""
    if given is False:
        return "off"
    if given is True:
        return "auto"
    if not isinstance(given, str):
        raise ArgumentError(
            f"peers is {given!r}; it takes None, False, or what FOREBAY_PEERS takes, such as "
            f"'host:port,host:port'"
        )
    return given


def embedded_peers() -> str:
    """Of several ranks on a node, each with an engine of its own, the first is the node."""
    return "off" if ranks.local_rank() > 0 else ""


_shared: weakref.ref[Engine] | None = None
_shared_lock = threading.Lock()


def shared_engine(**options) -> Engine:
    """The process's shared engine, made by the first loader and gone with the last.

    A later loader that names another budget is an error: one process has one budget.
    """
    global _shared
    given = {k: v for k, v in options.items() if v is not None}
    with _shared_lock:
        engine = _shared() if _shared is not None else None
        if engine is None:
            engine = Engine(**given)
            _shared = weakref.ref(engine)
            return engine
        wanted = parse_bytes(given.get("memory"))
        if wanted and wanted != engine._options["memory"]:
            raise ArgumentError(
                f"memory={format_bytes(wanted)}, but the loaders of this process already share an "
                f"engine "
                f"with {format_bytes(engine.budget)}; leave memory= out, or pass "
                f"engine=forebay.Engine(memory=...)"
            )
        for name, value in given.items():
            if name != "memory" and value != engine._options[name]:
                raise ArgumentError(
                    f"{name}={value!r}, but the engine that this process's loaders share has "
                    f"{engine._options[name]!r}; pass engine=forebay.Engine({name}={value!r}) to "
                    f"keep them apart"
                )
        return engine


def dataset_id(engine: Engine, catalog: _forebay.Catalog, delay: str = "") -> int:
    """Adds a catalog to an engine, or finds an equal one, so that loaders over it share its
    samples. ``native.close_dataset`` ends the use of the number.
    """
    native = engine.native
    pid = os.getpid()
    # Where links lead now: one that was moved leads to another data set.
    place = (os.path.realpath(catalog.root), delay)
    # Where data sets are, and the key of the one that was opened there last.
    places: dict = engine.__dict__.setdefault("_places", {})
    for there, (of, key) in list(places.items()):
        if of != pid or not native.knows_dataset(key, closed=True):
            places.pop(there, None)
    # Catalogs that were added before their lengths were known, which make the fingerprint.
    early: list = engine.__dict__.setdefault("_early_datasets", [])
    early[:] = [e for e in early if e[0] == pid and native.knows_dataset(e[3], closed=True)]
    for _, other, of, key, _ in early:
        if other is catalog and of == delay:
            return native.add_dataset(catalog, delay, key)
    for entry in [e for e in early if e[4] == place]:  # perhaps the same data set
        key = _dataset_key(entry[1], place)
        native.rename_dataset(entry[3], key)
        places[place] = (pid, key)
        if entry in early:  # another thread may have waited for it as well
            early.remove(entry)
    if not catalog.complete and place in places:
        catalog.wait()
    if not catalog.complete:
        key = f"early {next(_early_numbers)}"
        number = native.add_dataset(catalog, delay, key)
        early.append((pid, catalog, delay, key, place))
        _note_cache(engine)
        return number
    key = _dataset_key(catalog, place)
    if native.knows_dataset(key, closed=True):
        catalog.drop_early()
    number = native.add_dataset(catalog, delay, key)
    places[place] = (pid, key)
    _note_cache(engine)
    return number


_early_numbers = itertools.count()


def _dataset_key(catalog: _forebay.Catalog, place: tuple[str, str]) -> str:
    """What two catalogs of one data set have in common; waits for the lengths. Sizes and times
    count: what is in memory of the files as they were is not of these.
    """
    root, delay = place
    return f"{catalog.version} {delay} {root}"


def _note_cache(engine: Engine) -> None:
    note = engine.native.cache_note
    if note and not engine._noted:
        engine._noted = True
        _log.warning("forebay: %s", note)


def may_size_later(engine: Engine) -> bool:
    """Whether an engine of this process can begin with a data set whose lengths are not known."""
    return engine.native.cluster() is None
