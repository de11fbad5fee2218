"""The demo from beginning to end: data, mount, two runs, table, plot, checks, and nothing left."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from ..._errors import StorageError
from ..._forebay import Catalog, memory_limit
from ..._internal.units import format_bytes
from ...slowfs import SlowFs
from ...views import report as epoch_report
from ...views.report import EpochReport
from . import plot
from .dataset import CLASSES, Files, SharedPipe, make_files
from .training import BATCH, Epoch, Run, train_forebay, train_torch, try_workers

_OPEN_MS, _READ_MS, _STAT_MS, _BANDWIDTH_MB = 1.0, 1.0, 0.2, 300.0
_WORKERS = (2, 4, 8, 16)
_THREADS = 1  # of PyTorch's arithmetic, for either run


class Screen:
    """Bars on a terminal, plain lines elsewhere."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, markup=False)
        if not self.console.is_terminal:
            self.console = Console(highlight=False, markup=False, width=110)

    def say(self, text: str = "", style: str | None = None, exact: bool = False) -> None:
        """Prints; a terminal gets lines broken between words, unless they must stay `exact`."""
        self.console.print(text, style=style, soft_wrap=exact or not self.console.is_terminal)

    @contextlib.contextmanager
    def bar(self, title: str, total: int) -> Iterator[Callable[..., None]]:
        """Yields ``update(done, note)``; at the end the bar goes, and text takes its place."""
        if not self.console.is_terminal:
            yield lambda done, note="": None
            return
        with Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
            transient=True,
            refresh_per_second=8,
        ) as progress:
            task = progress.add_task(title, total=total, note="")

            def update(done: int, note: str = "") -> None:
                progress.update(task, completed=done, note=note)

            yield update


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """A polite end (kill, a closed terminal) cleans up as Ctrl-C does."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    before = {
        n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _temporary(keep: bool, screen: Screen) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="forebay-demo-"))
    # PyTorch's optimizers make a cache folder in the temporary one, and leave it there.
    cache = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(cache)
    os.environ.setdefault(cache, str(folder / "torch"))
    try:
        yield folder
    finally:
        if before is None:
            os.environ.pop(cache, None)
        with _undisturbed():
            if keep:
                for entry in folder.iterdir():
                    if entry.name != "data":
                        shutil.rmtree(entry, ignore_errors=True)
                screen.say(f"kept: {folder / 'data'}", exact=True)
            else:
                shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _mounted(source: Path, folder: Path) -> Iterator[SlowFs]:
    point = folder / "slow"
    point.mkdir()
    slow = SlowFs(
        source, point,
        open_ms=_OPEN_MS, read_ms=_READ_MS, stat_ms=_STAT_MS, bandwidth_mb=_BANDWIDTH_MB,
    )  # fmt: skip
    try:
        yield slow
    finally:
        with _undisturbed():
            slow.close()
            with contextlib.suppress(OSError):
                point.rmdir()


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo; 1 when the two runs were not alike."""
    screen = Screen()
    began = time.monotonic()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)  # a bad --out is found before a minute has passed
    threads = torch.get_num_threads()
    torch.set_num_threads(_THREADS)
    try:
        with _ended_by_signals(), warnings.catch_warnings():
            # More workers than cores are right here: they hide the storage's latency.
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            return _demo(arguments, screen, out / "demo.png", began)
    finally:
        torch.set_num_threads(threads)


def _check_room(files: int) -> None:
    needed = files * 150 * 1024
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed:
        raise StorageError(
            f"{tempfile.gettempdir()} has {format_bytes(free)} free, the demo needs "
            f"{format_bytes(needed)}; name another folder with TMPDIR=..., or take fewer --files"
        )
    available, cgroup = memory_limit()
    usable = min(available, cgroup) if cgroup else available
    if usable < 2 * needed:
        raise StorageError(
            f"{format_bytes(usable)} of memory can be used here, the demo needs "
            f"{format_bytes(2 * needed)}; take fewer --files"
        )


def _demo(arguments: argparse.Namespace, screen: Screen, picture: Path, began: float) -> int:
    files, epochs = arguments.files, arguments.epochs
    _check_room(files)
    usable, why = (False, "--no-fuse was given") if arguments.no_fuse else SlowFs.available()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_temporary(arguments.keep, screen))
        source = folder / "data"
        with screen.bar("making the data set", files) as update:
            total = make_files(source, files, update)
        screen.say(
            f"Data set: {files:,} files around 110 KiB, {CLASSES} classes, {format_bytes(total)}"
        )

        latency = f"{_OPEN_MS:g} ms an open, {_READ_MS:g} ms a read"
        pipe = f"{_BANDWIDTH_MB:g} MB/s for all readers together"
        slow: SlowFs | None = None
        if usable:
            try:
                slow = stack.enter_context(_mounted(source, folder))
            except RuntimeError as error:
                why = str(error)
        if slow is not None:
            storage = (
                f"Storage: slowfs (FUSE), {latency}, {_STAT_MS:g} ms a stat, {pipe}; not cached"
            )
            root = str(slow.path)
        else:
            storage = f"Storage: emulated inside the loaders (no mount: {why}), {latency}, {pipe}"
            root = str(source)
        screen.say(storage)
        if slow is None:
            screen.say(
                "  Both loaders wait as long for each file as that storage would take: one open, "
                "one read, one shared pipe.\n"
                "  A mount would charge PyTorch more: Python also stats a file, and reads on to "
                "its end."
            )
        outcome = _both(screen, slow, root, total, epochs)

    return _conclude(screen, outcome, storage, picture, began)


@dataclass(frozen=True)
class Outcome:
    """Both runs, and what Forebay's loader says about its own."""

    torch: Run
    forebay: Run
    accounts: list[EpochReport]
    report: str
    bytes: int  # of the data set
    counted: bool  # the storage counted the requests in flight; else the loaders' limits are known

    @property
    def least(self) -> float:
        """Seconds that the storage's bandwidth needs for the data set, whoever reads."""
        return self.bytes / (_BANDWIDTH_MB * 1e6)

    @property
    def runs(self) -> tuple[Run, Run]:
        return self.torch, self.forebay

    def gain(self, epochs: slice) -> float:
        """How many times as fast Forebay's run was over these epochs."""
        mine, its = (sum(e.seconds for e in run.epochs[epochs]) for run in self.runs)
        return mine / its

    def reasons(self) -> list[str]:
        """Why, in one sentence for each loader and kind of epoch."""
        worst = max(e.waited / e.seconds for e in self.torch.epochs)
        said = [
            f"PyTorch waited up to {worst:.0%} of an epoch: at most {self.torch.in_flight} "
            "requests were in flight, and every epoch reads every file again.",
            f"Forebay {'had' if self.counted else 'allowed'} up to {self.forebay.in_flight} "
            f"in flight. {epoch_report.sentence(self.accounts[0])} "
            f"The storage's bandwidth alone needs {self.least:.2f} s.",
        ]
        if len(self.accounts) > 1:
            said.append(f"Later it reads from memory. {epoch_report.sentence(self.accounts[-1])}")
            first, *later = [e.seconds - e.waited for e in self.forebay.epochs]
            if first > 1.5 * max(later):
                said.append(
                    f"While files are read the steps themselves take longer ({first:.2f} s against "
                    f"{max(later):.2f} s): reads and emulated storage share {os.cpu_count()} cores "
                    "with them."
                )
        return said


def _busy_share() -> float:
    """Share of the processors that other programs use, over a moment in which this one sleeps."""

    def times() -> tuple[int, int]:
        with open("/proc/stat") as file:
            numbers = [int(n) for n in file.readline().split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]

    try:
        before = times()
        time.sleep(0.3)
        after = times()
    except (OSError, ValueError, IndexError):
        return 0.0
    ticks = after[0] - before[0]
    return 1 - (after[1] - before[1]) / ticks if ticks else 0.0


def _both(screen: Screen, slow: SlowFs | None, root: str, total: int, epochs: int) -> Outcome:
    pipe = None
    delay = ""
    if slow is None:
        pipe = SharedPipe(_OPEN_MS / 1e3, _READ_MS / 1e3, _BANDWIDTH_MB * 1e6)
        delay = (
            f"open_ms={_OPEN_MS:g},read_ms={_READ_MS:g},stat_ms={_STAT_MS:g},"
            f"bandwidth_mb={_BANDWIDTH_MB:g}"
        )
    listed = Files(root, pipe)
    count = len(listed)
    mean = total / count

    def mount_counters() -> tuple[int, int]:
        assert slow is not None
        stats = slow.stats()
        return stats["open"], stats["bytes_read"]

    def pipe_counters() -> tuple[int, int]:
        assert pipe is not None
        return pipe.reads, int(pipe.reads * mean)

    screen.say(
        f"Training: a small network, batches of {BATCH}, {epochs} epoch{'s' if epochs > 1 else ''},"
        f" {_THREADS} thread; first PyTorch's DataLoader, then Forebay, nothing else in between\n"
    )
    busy = _busy_share()
    if busy > 0.2:
        screen.say(
            f"Note: other programs use {busy:.0%} of this machine's processors now; that slows "
            "both runs, PyTorch's more, because it needs more processes.\n",
            style="yellow",
        )
    workers = _best_workers(screen, listed)
    if slow is not None:
        slow.reset()
    with _watched(screen, f"PyTorch, {workers} workers", count, epochs) as watcher:
        torch_run = train_torch(
            listed, workers, epochs, mount_counters if slow else pipe_counters, watcher
        )
    if slow is not None:
        torch_run.in_flight = slow.stats()["in_flight_max"]

    start = time.monotonic()
    catalog = Catalog.build(root)
    screen.say(f"Forebay: indexed {len(catalog):,} files in {time.monotonic() - start:.2f} s")
    memory = int(1.2 * total) + (64 << 20)
    if slow is not None:
        slow.reset()
    with _watched(screen, "Forebay", count, epochs) as watcher:
        forebay_run, accounts, report = train_forebay(
            catalog, memory, delay, epochs, mount_counters if slow else None, watcher
        )
    if slow is not None:
        forebay_run.in_flight = slow.stats()["in_flight_max"]
    return Outcome(torch_run, forebay_run, accounts, report, total, slow is not None)


def _best_workers(screen: Screen, files: Files) -> int:
    samples = max(min(len(files), BATCH), len(files) // 2)
    rates: dict[int, float] = {}
    with screen.bar("PyTorch: how many workers?", len(_WORKERS)) as update:
        for i, workers in enumerate(_WORKERS):
            if workers > 2 and len(files) < workers * BATCH:
                break  # more workers than batches
            update(i, f"trying {workers}")
            rates[workers] = try_workers(files, workers, samples)
    best = max(rates, key=lambda w: rates[w])
    tried = ", ".join(f"{w}: {rate:,.0f}" for w, rate in rates.items())
    screen.say(
        f"PyTorch: {best} workers load fastest here (files/s by workers, each tried on "
        f"{samples:,} files without training: {tried})"
    )
    return best


class _Watched:
    """Shows a run: a bar while an epoch goes on, a line when it is over."""

    def __init__(self, screen: Screen, update: Callable[..., None], name: str, count: int) -> None:
        self._screen, self._update, self._name, self._count = screen, update, name, count

    def batch(self, epoch: int, samples: int, loss: float) -> None:
        self._update(epoch * self._count + samples, f"epoch {epoch}, loss {loss:.3f}")

    def epoch(self, number: int, epoch: Epoch) -> None:
        self._screen.say(
            f"  {self._name}: epoch {number} took {epoch.seconds:.2f} s, "
            f"{epoch.waited / epoch.seconds:.0%} of it waiting; loss {epoch.loss:.4f}"
        )


@contextlib.contextmanager
def _watched(screen: Screen, name: str, count: int, epochs: int) -> Iterator[_Watched]:
    with screen.bar(name, count * epochs) as update:
        yield _Watched(screen, update, name, count)


def same(runs: Sequence[Run]) -> list[str]:
    """What differs between the runs; empty when nothing does."""
    torch_run, forebay_run = runs
    problems = []
    if torch_run.order != forebay_run.order:
        pairs = zip(torch_run.order, forebay_run.order, strict=False)
        at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        problems.append(
            f"the order differs, first at sample {at}"
            if at is not None
            else f"PyTorch saw {len(torch_run.order)} samples, Forebay {len(forebay_run.order)}"
        )
    if torch_run.checksums != forebay_run.checksums:
        problems.append("the bytes differ")
    if torch_run.losses != forebay_run.losses:
        both = zip(torch_run.losses, forebay_run.losses, strict=False)
        apart = max((abs(a - b) for a, b in both), default=0.0)
        if apart > 1e-6 or len(torch_run.losses) != len(forebay_run.losses):
            problems.append(f"the losses differ by up to {apart:.2g}")
    return problems


def _conclude(
    screen: Screen,
    outcome: Outcome,
    storage: str,
    picture: Path,
    began: float,
) -> int:
    torch_run, forebay_run = runs = outcome.runs
    screen.say()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for column in ("epoch", "time", "waiting", "files read", "bytes read", "loss"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        for number, epoch in enumerate(run.epochs):
            table.add_row(
                "" if number else run.name,
                str(number),
                f"{epoch.seconds:.2f} s",
                f"{epoch.waited / epoch.seconds:.1%}",
                f"{epoch.files_read:,}",
                format_bytes(epoch.bytes_read),
                f"{epoch.loss:.4f}",
            )
    screen.console.print(table)
    screen.say()
    said = f"First epoch {outcome.gain(slice(0, 1)):.2f} times as fast as PyTorch's DataLoader"
    if len(torch_run.epochs) > 1:
        said += f", later epochs {outcome.gain(slice(1, None)):.1f} times"
    screen.say(f"{said}. Why:", style="bold")
    for reason in outcome.reasons():
        screen.say(f"  {reason}")
    screen.say("What Forebay's own accounting says, loader.report():")
    for line in outcome.report.splitlines():
        screen.say(f"  {line}", exact=True)
    screen.say()

    problems = same(runs)
    seen = len(torch_run.order)
    if problems:
        for problem in problems:
            screen.say(f"Check FAILED: {problem}", style="bold red")
    else:
        equal = "bit for bit" if torch_run.losses == forebay_run.losses else "within 1e-6"
        screen.say(
            f"Check: both saw the same {seen:,} samples in the same order, byte for byte (CRC-32C),"
            f" and all {len(torch_run.losses):,} losses are equal {equal} "
            f"({torch_run.epochs[0].loss:.3f} to {torch_run.epochs[-1].loss:.3f}; "
            f"{forebay_run.correct:.0%} right in the last epoch)",
            style="green",
        )
    _draw(screen, outcome, storage, picture)
    screen.say(f"Took {time.monotonic() - began:.0f} s. Everything else it made is removed.")
    screen.say(
        "\nNext, with your own data:\n"
        "  forebay doctor /path/to/data       measures it and predicts the gain\n"
        "and in the training script one of\n"
        "  loader = forebay.accelerate(loader)\n"
        '  loader = forebay.DataLoader("/path/to/data", batch_size=64, shuffle=True)',
        exact=True,
    )
    return 1 if problems else 0


def _draw(screen: Screen, outcome: Outcome, storage: str, picture: Path) -> None:
    try:
        plot.draw(outcome.runs, outcome.least, outcome.reasons(), storage, picture)
    except ImportError:
        screen.say("No plot: matplotlib is not installed (pip install matplotlib)")
        return
    screen.say(f"Plot: {picture}", exact=True)
