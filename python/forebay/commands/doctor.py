"""``forebay doctor``: what this machine has, and what Forebay would gain on a user's own folder."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .. import _forebay
from .._forebay import Catalog
from .._internal.units import format_bytes, parse_bytes
from ..engine import Engine
from ..loader import DataLoader
from ..slowfs import SlowFs
from ..views.progress import counting
from .index import describe, parse_extensions

# Files read in all, and how they are shared out among the trials, by threads.
_MAX_FILES = 400
_SHARES = {1: 40, 4: 56, 16: 112, 64: 192}
_FIRST_TRIAL_S = 1.0
_TRIAL_S = 1.5  # of a parallel trial, if the storage serves many no faster than one
_TOTAL_S = 6.0
# Of larger samples only the beginning is read, and times are scaled by bytes.
_MAX_READ = 2 << 20
# Below this a file came from memory or a near disk: no network answers open and read so soon.
_NEAR_S = 0.00015


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; errors of input are raised as ForebayError."""
    console = _console()
    if arguments.path is None:
        _machine(console)
        return 0
    _folder(console, arguments)
    return 0


def _console() -> Console:
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # A pipe has no width; wrapped table cells would be hard to read there.
        console = Console(highlight=False, markup=False, width=120)
    return console


# ---- the machine


@dataclass(frozen=True)
class Part:
    """One optional part of Forebay."""

    name: str
    state: str  # "works", "not built in", "missing"
    detail: str
    meaning: str  # what it is for, or what its absence costs


def _library(*names: str) -> bool:
    for name in names:
        try:
            ctypes.CDLL(name)
            return True
        except OSError:
            continue
    return False


def parts() -> list[Part]:
    """Every optional part, and what its absence costs."""
    features = _forebay.features()
    found = []
    reason = features.get("io_uring", "not in this build")
    found.append(Part(
        "io_uring", "missing" if reason else "works", reason,
        "reads go through a pool of threads: same results, more processor time on fast local disks"
        if reason else "asynchronous reads of local disks",
    ))  # fmt: skip
    usable, why = SlowFs.available()
    found.append(Part(
        "FUSE", "works" if usable else "missing", why,
        "slow storage for the demo and the benchmarks" if usable
        else "demo and benchmarks emulate slow storage inside the loaders, less exactly",
    ))  # fmt: skip
    found += _peers()
    etcd = shutil.which("etcd") is not None
    found.append(Part(
        "etcd", "works" if etcd else "missing", "" if etcd else "no etcd in PATH",
        "one may run here: peers and controllers find each other by it" if etcd
        else "peers find each other by torchrun's, SLURM's or MPI's variables, or etcd elsewhere",
    ))  # fmt: skip
    later = (
        ("libjpeg-turbo", "libjpeg", _library("libjpeg.so.62", "libjpeg.so.8"),
         "JPEGs of rare kinds",
         "JPEGs of rare kinds (arithmetic coding, 12 bits) are not read; all others are"),
        ("libpng", "libpng", _library("libpng16.so.16"), "PNG images",
         'decode="image" reads no PNG'),
        ("libwebp", "libwebp", _library("libwebp.so.7"), "WebP images",
         'decode="image" reads no WebP'),
        ("libcurl", "curl", _library("libcurl.so.4", "libcurl-gnutls.so.4"), "S3",
         "no S3: data sets must be mounted as files"),
    )  # fmt: skip
    kernel = (Path(_forebay.__file__).parent / "lib" / "libforebay_cuda.so").exists()
    found.append(Part(
        "CUDA kernel", "works" if kernel else "not built in",
        "" if kernel else "built where nvcc is found",
        "batches are normalised on the GPU in one pass" if kernel
        else "batches are normalised on a GPU by PyTorch's operations, in several passes",
    ))  # fmt: skip
    for name, key, installed, use, cost in later:
        if key in features:
            why = features[key]
            found.append(Part(name, "missing" if why else "works", why, cost if why else use))
        else:
            detail = "installed here, not used" if installed else "not installed here either"
            found.append(Part(name, "not built in", detail, cost))
    return found


@dataclass(frozen=True)
class Link:
    """What a transport carries between two ends on this machine, over its loopback device."""

    transport: str  # "tcp", "ucx 1.13.1 (tcp)"
    bytes: int
    bytes_per_s: float  # of payloads of so many bytes, asked for many at once
    round_trip_s: float  # of an empty message


def measure_transport(kind: str = "tcp", size: int = 110 << 10, count: int = 2000) -> Link:
    """Measures one (tcp, tls, ucx) in a process of its own; OSError says why it cannot be used."""
    program = Path(_forebay.__file__).parent / "forebay-linkperf"
    done = subprocess.run(
        [str(program), kind, "here", str(size), str(count)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    if done.returncode != 0:
        raise OSError(done.stderr.strip().removeprefix("forebay-linkperf: "))
    lines = {line["mode"]: line for line in map(json.loads, done.stdout.splitlines())}
    pull = lines["pull"]
    return Link(pull["transport"], size, pull["bytes_per_s"], lines["ping"]["us"] / 1e6)


def _peers() -> list[Part]:
    """What nodes can talk by: TCP, which is what they use, TLS, and UCX."""
    costs = {
        "tcp": "every node reads from storage for itself; none reads from its peers' memory",
        "tls": "nodes cannot encrypt what they send each other (FOREBAY_PEER_TRANSPORT=tls)",
        "ucx": "nodes do not use RDMA; they talk over TCP",
    }
    found = []
    for kind, cost in costs.items():
        name = {"tcp": "peers", "tls": "TLS of peers", "ucx": "UCX"}[kind]
        if kind == "ucx" and not Path(_forebay.__file__).with_name("libforebay_ucx.so").exists():
            installed = _library("libucp.so.0")
            detail = "installed here, not used" if installed else "built where libucx-dev is found"
            found.append(Part(name, "not built in", detail, cost))
            continue
        try:
            link = measure_transport(kind)
        except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
            found.append(Part(name, "missing", str(error), cost))
            continue
        found.append(Part(
            name, "works",
            f"{link.transport} over this machine's loopback device: {format_bytes(link.bytes)} a "
            f"read, {format_bytes(link.bytes_per_s)}/s; there and back in "
            f"{_time(link.round_trip_s)}",
            "reads from peers' memory",
        ))  # fmt: skip
    return found


def _memory_total() -> int:
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemTotal:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


def _package(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _machine(console: Console) -> None:
    from .. import __version__

    console.print(f"Forebay {__version__}", style="bold")
    cores = len(os.sched_getaffinity(0))
    of = "" if cores == os.cpu_count() else f" of {os.cpu_count()}"
    available, cgroup = _forebay.memory_limit()
    torch = _package("torch")
    facts = Table.grid(padding=(0, 2))
    facts.add_row("cores", f"{cores}{of} for this process")
    facts.add_row("memory", f"{format_bytes(_memory_total())}, {format_bytes(available)} available")
    facts.add_row("cgroup limit", f"{format_bytes(cgroup)} left" if cgroup else "none")
    facts.add_row(
        "Forebay's budget",
        f'{format_bytes(_forebay.default_budget())} by default; DataLoader(memory="8G") sets it',
    )
    facts.add_row(
        "PyTorch", torch or "not installed; forebay.DataLoader works without, the demo not"
    )
    console.print(facts)
    console.print()

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("part", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("what that means")
    styles = {"works": "green", "missing": "yellow", "not built in": "dim"}
    for part in parts():
        meaning = f"{part.meaning} ({part.detail})" if part.detail else part.meaning
        table.add_row(part.name, f"[{styles[part.state]}]{part.state}[/]", meaning)
    # The table's own cells use markup; nothing in them comes from the user.
    Console(highlight=False, width=console.width).print(table)
    console.print(
        "\nNext: forebay doctor PATH measures your data set; forebay demo shows the difference."
    )


# ---- a folder


@dataclass
class Trial:
    """What one number of threads got from the storage."""

    threads: int
    files: int
    seconds: float
    bytes: int

    @property
    def files_per_s(self) -> float:
        return self.files / self.seconds if self.seconds > 0 else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.seconds if self.seconds > 0 else 0.0


@dataclass
class Measured:
    """A folder's storage as it was measured."""

    plain: list[float]  # seconds of open, one read, close; one file at a time
    python: list[float]  # seconds of open(path).read(), what a Dataset does
    trials: list[Trial]
    cached: float | None  # share of the files that were in the page cache; None: cannot be told
    mean_read: float  # bytes read of a sample, on average
    repeated: bool  # too few files: some were read more than once
    short: int = 0  # reads that got fewer bytes than the catalog says

    @property
    def best(self) -> Trial:
        return max(self.trials, key=lambda t: t.files_per_s)


@dataclass(frozen=True)
class _Piece:
    path: str
    offset: int
    length: int
    whole: bool  # the piece is the entire file


def _pieces(catalog: Catalog, count: int) -> list[_Piece]:
    chosen = random.Random(time.time_ns()).sample(range(len(catalog)), min(count, len(catalog)))
    whole_files = catalog.format == "folder"
    return [
        _Piece(
            catalog.object_path(i),
            catalog.offset(i),
            min(_MAX_READ, catalog.length(i)),
            whole_files and catalog.length(i) <= _MAX_READ,
        )
        for i in chosen
    ]


def _read(piece: _Piece) -> int:
    fd = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return len(os.pread(fd, piece.length, piece.offset))
    finally:
        os.close(fd)


def _read_as_python_does(piece: _Piece) -> int:
    with open(piece.path, "rb") as file:
        if piece.whole:
            return len(file.read())
        file.seek(piece.offset)
        return len(file.read(piece.length))


def _in_page_cache(piece: _Piece) -> bool | None:
    """Whether the piece's first page is in memory; None where the file system cannot say."""
    flag = getattr(os, "RWF_NOWAIT", None)
    if flag is None:
        return None
    fd = os.open(piece.path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.preadv(fd, [bytearray(1)], piece.offset, flag) == 1
    except BlockingIOError:
        return False
    except OSError:
        return None
    finally:
        os.close(fd)


def _parallel(pieces: Sequence[_Piece], threads: int, whole_files: bool) -> Trial:
    if whole_files:
        seconds, count = _forebay.limit_read_files(
            [p.path for p in pieces], [p.length for p in pieces], threads
        )
        return Trial(threads, len(pieces), seconds, count)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(time.sleep, [0.001] * threads))  # the threads exist before the clock starts
        start = time.perf_counter()
        count = sum(pool.map(_read, pieces))
        return Trial(threads, len(pieces), time.perf_counter() - start, count)


def measure(catalog: Catalog) -> Measured:
    """Reads some of the data set: each file once, as long as there are enough."""
    whole_files = catalog.format == "folder"
    began = time.monotonic()
    share = min(1.0, len(catalog) / _MAX_FILES)
    pieces = _pieces(catalog, _MAX_FILES)
    repeated = len(pieces) < 24
    pool = pieces * (1 + 24 // len(pieces)) if repeated else pieces
    taken = 0

    def take(count: int) -> list[_Piece]:
        nonlocal taken
        part = pool[taken : taken + count]
        taken += len(part)
        return part

    plain: list[float] = []
    python: list[float] = []
    known: list[bool] = []
    short = 0
    read_bytes = 0
    for i, piece in enumerate(take(max(8, int(_SHARES[1] * share)))):
        read, times = (_read, plain) if i % 2 == 0 else (_read_as_python_does, python)
        start = time.perf_counter()
        got = read(piece)
        times.append(time.perf_counter() - start)
        short += got < piece.length
        read_bytes += got if i % 2 == 0 else 0
        if time.monotonic() - began > _FIRST_TRIAL_S and python:
            break
    if len(plain) > 4 and len(python) > 4:
        # The first of each pays for code and folders that are used for the first time.
        read_bytes = read_bytes * (len(plain) - 1) // len(plain)
        del plain[0], python[0]
    trials = [Trial(1, len(plain), sum(plain), read_bytes)]
    for threads in (4, 16, 64):
        rate = trials[-1].files_per_s
        part = take(max(threads, min(int(_SHARES[threads] * share), int(rate * _TRIAL_S))))
        worst = len(part) / rate  # if more threads gain nothing
        if len(part) < threads or time.monotonic() - began + worst > _TOTAL_S:
            break
        # Asked without reading, so of files that are still unread.
        for piece in part[:: max(1, len(part) // 4)]:
            cached = _in_page_cache(piece)
            if cached is not None:
                known.append(cached)
        trials.append(_parallel(part, threads, whole_files))
    return Measured(
        plain=plain,
        python=python,
        trials=trials,
        cached=sum(known) / len(known) if known else None,
        mean_read=statistics.mean(p.length for p in pieces),
        repeated=repeated,
        short=short,
    )


def memory_rate(catalog: Catalog, measured: Measured) -> float:
    """Bytes a second from Forebay's memory, every byte checksummed; 0: not measured."""
    if catalog.format != "folder":
        return 0.0
    room = 64 << 20
    paths: list[str] = []
    held = 0
    for i in random.Random(1).sample(range(len(catalog)), min(len(catalog), 256)):
        if held + catalog.length(i) > room or len(paths) > measured.best.files_per_s:
            break
        held += catalog.length(i)
        paths.append(catalog.object_path(i))
    if not held:
        return 0.0
    engine = Engine(memory=4 * room)
    files = Catalog.from_files(paths)
    with DataLoader(files, min(32, len(paths)), engine=engine, rank=0, world_size=1) as loader:
        best = 0.0
        for _ in range(4):
            start = time.perf_counter()
            for batch in loader:
                batch.checksum()
                batch.release()
            best = max(best, held / (time.perf_counter() - start))
    return best


def _mount_of(path: str) -> str:
    """File system type of the mount that holds the path, "" when unknown."""
    best, kind = "", ""
    try:
        with open("/proc/self/mountinfo") as file:
            real = os.path.realpath(path)
            for line in file:
                left, _, right = line.partition(" - ")
                point = left.split()[4].encode().decode("unicode_escape")
                inside = real == point or real.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= len(best):
                    best, kind = point, right.split()[0]
    except (OSError, IndexError, UnicodeError):
        return ""
    return kind


def _time(seconds: float) -> str:
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Prediction:
    """One line of the forecast."""

    what: str
    seconds: float
    why: str


def predict(
    catalog: Catalog, measured: Measured, budget: int, from_memory: float, workers: Sequence[int]
) -> list[Prediction]:
    """Epoch times that the measured storage allows, data loading alone."""
    samples = len(catalog)
    # Samples beyond _MAX_READ were read in part: each counts as several of what was measured.
    pieces = samples * max(1.0, catalog.total_bytes / samples / max(1.0, measured.mean_read))
    limit = measured.best.files_per_s
    latency = statistics.mean(measured.python)
    rows = []
    for n in workers:
        rate = n / latency
        why = f"{n} reads at once, {_time(latency)} each"
        if rate > limit:
            rate, why = limit, f"the storage's best measured rate, {limit:,.0f} reads/s"
        name = f"PyTorch with {n} worker{'s' if n > 1 else ''}"
        rows.append(Prediction(name, pieces / rate, why))
    first = pieces / limit
    rows.append(Prediction(
        "Forebay, first epoch", first,
        f"the best measured rate ({measured.best.threads} at once), {limit:,.0f} reads/s",
    ))  # fmt: skip
    fits = min(1.0, 0.9 * budget / max(1, catalog.total_bytes))
    memory_s = catalog.total_bytes * fits / from_memory if from_memory else 0.0
    if fits >= 1:
        why = "from memory" + (f", {format_bytes(from_memory)}/s measured" if from_memory else "")
        rows.append(Prediction("Forebay, later epochs", memory_s, why))
    else:
        why = f"{fits:.0%} from memory, the rest from storage meanwhile"
        rows.append(Prediction("Forebay, later epochs", max(first * (1 - fits), memory_s), why))
    return rows


def _advice(measured: Measured, rows: Sequence[Prediction], near: bool, fits: float) -> str:
    torch = min((r for r in rows if r.what.startswith("PyTorch")), key=lambda r: r.seconds)
    first = next(r for r in rows if r.what == "Forebay, first epoch")
    later = next(r for r in rows if r.what == "Forebay, later epochs")
    gain = torch.seconds / first.seconds if first.seconds else 1.0
    if near:
        return (
            "These files answered from memory or a near disk, so storage is hardly what you wait "
            "for now; measure where the data is cold, or on the shared storage that you train from."
        )
    said = f"Against {torch.what} the first epoch would load {gain:.1f} times as fast"
    if len(measured.trials) == 1:
        said = "Parallel reads could not be tried (slow, or few files): the first epoch is a guess"
    elif gain < 1.1:
        said = f"{torch.what} would already get what this storage gives in the first epoch"
    if fits >= 1:
        return f"{said}; later epochs would not touch the storage at all."
    ratio = torch.seconds / later.seconds if later.seconds else gain
    return (
        f"{said}, later ones {ratio:.1f} times; {fits:.0%} of the data fits the memory budget, "
        "more memory would gain more."
    )


def _folder(console: Console, arguments: argparse.Namespace) -> None:
    path = arguments.path
    start = time.monotonic()
    with counting(f"indexing {path}") as progress:
        catalog, rebuilt, _ = Catalog.open(
            path, arguments.format or "", parse_extensions(arguments.extensions), progress
        )
    listed = time.monotonic() - start
    budget = parse_bytes(arguments.memory) or _forebay.default_budget()
    kind = _mount_of(path)

    console.print(catalog.root, style="bold")
    how = f"listed in {_time(listed)}" if rebuilt else "index up to date"
    console.print(f"{describe(catalog)}; {how}" + (f"; file system {kind}" if kind else ""))
    if console.is_terminal:
        with console.status("reading some of it ..."):
            measured, from_memory = _measure_all(catalog)
    else:
        measured, from_memory = _measure_all(catalog)
    _print_measured(console, catalog, measured)

    near = statistics.median(measured.plain) < _NEAR_S or (measured.cached or 0) > 0.5
    workers = [arguments.workers] if arguments.workers else [4, 8, 16]
    rows = predict(catalog, measured, budget, from_memory, workers)
    _print_prediction(console, rows, budget, measured, near)
    fits = min(1.0, 0.9 * budget / max(1, catalog.total_bytes))
    console.print(
        _advice(measured, rows, near, fits), style="bold", soft_wrap=not console.is_terminal
    )
    memory = f', memory="{arguments.memory}"' if arguments.memory else ""
    console.print(
        "\nNext, in your training script:\n"
        f"  loader = forebay.accelerate(loader)    # keeps your own Dataset and transforms\n"
        f"or\n"
        f"  loader = forebay.DataLoader({path!r}, batch_size=64, shuffle=True{memory})",
        soft_wrap=True,
    )


def _measure_all(catalog: Catalog) -> tuple[Measured, float]:
    measured = measure(catalog)
    return measured, memory_rate(catalog, measured)


def _print_measured(console: Console, catalog: Catalog, measured: Measured) -> None:
    size = format_bytes(measured.mean_read)
    whole = catalog.max_length <= _MAX_READ
    what = f"{size} on average" if whole else f"{size} on average, larger ones read in part"
    count = sum(t.files for t in measured.trials) + len(measured.python)
    console.print(f"\nMeasured now, on {count} samples ({what}):")
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("reading", no_wrap=True)
    for column in ("time for one", "samples/s", "bandwidth"):
        table.add_column(column, justify="right", no_wrap=True)
    one = statistics.mean(measured.python)
    table.add_row("Python's open().read(), one at a time", _time(one), f"{1 / one:,.0f}",
                  f"{format_bytes(measured.mean_read / one)}/s")  # fmt: skip
    for trial in measured.trials:
        label = "open, read, close: " + (
            "1 thread" if trial.threads == 1 else f"{trial.threads} threads"
        )
        each = _time(statistics.mean(measured.plain)) if trial.threads == 1 else ""
        bandwidth = f"{format_bytes(trial.bytes_per_s)}/s"
        table.add_row(label, each, f"{trial.files_per_s:,.0f}", bandwidth)
    console.print(table)
    if measured.short:
        console.print(f"{measured.short} files were shorter than the index says: "
                      f"forebay index {catalog.root} --verify")  # fmt: skip


def _print_prediction(
    console: Console, rows: Sequence[Prediction], budget: int, measured: Measured, near: bool
) -> None:
    console.print("\nPredicted epoch (loading alone, no training step):")
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    table.add_column("because of")
    for row in rows:
        table.add_row(row.what, _time(row.seconds) if row.seconds else "-", row.why)
    console.print(table)
    notes = [
        "each PyTorch worker reads one sample at a time and costs nothing else (in truth it also "
        "decodes and copies: this favours PyTorch)",
        f"Forebay may use {format_bytes(budget)} of memory",
        "the storage stays as fast as it was in these seconds",
        "a training step hides loading up to its own length",
    ]
    if measured.cached is not None and measured.cached > 0:
        notes.append(
            f"{measured.cached:.0%} of the files looked at were in the page cache: "
            "the storage itself is slower"
        )
    elif near:
        notes.append("answers came too soon for a network: cache or local disk")
    if measured.repeated:
        notes.append("there were so few files that some were read more than once")
    console.print("Assumed: " + ";\n  ".join(notes) + ".\n", soft_wrap=not console.is_terminal)
