"""Storage whose latency changes while a loader runs: how soon it reads at the new limit.

Nothing is kept, and the consumer does nothing but count, so the source alone sets the pace.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from forebay import _forebay
from forebay.engine import Engine
from forebay.loader import DataLoader
from forebay.slowfs import SlowFs

from .data import make_files
from .measure import Case, Outcome
from .run import Context

_WITHIN = 0.9
_AS_GOOD = 0.95  # fewer threads that read so fast would do as well


class Recorder:
    """Delivered bytes and the limit of reads in flight, in bins of equal time."""

    def __init__(self, loader: DataLoader, engine: Engine, bin_s: float) -> None:
        self.rates: list[float] = []
        self.limits: list[int] = []
        self.failure: BaseException | None = None
        self._loader = loader
        self._engine = engine
        self._bin_s = bin_s
        self._bytes = 0
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._consume),
            threading.Thread(target=self._watch),
        ]

    @contextmanager
    def running(self) -> Iterator[Recorder]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()
        if self.failure is not None:
            raise self.failure

    def _consume(self) -> None:
        try:
            while not self._stop.is_set():
                for batch in self._loader:
                    self._bytes += batch.nbytes
                    if self._stop.is_set():
                        return
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits for it
            self.failure = error

    def _watch(self) -> None:
        last_at, last_bytes = time.perf_counter(), self._bytes
        due = last_at
        while not self._stop.is_set():
            due += self._bin_s
            self._stop.wait(max(0.0, due - time.perf_counter()))
            now, total = time.perf_counter(), self._bytes
            self.rates.append((total - last_bytes) / (now - last_at))
            self.limits.append(self._engine.metrics()["forebay_source_in_flight_limit_reads"])
            last_at, last_bytes = now, total


def recovered_after(rates: list[float], limit: float, window: int) -> int | None:
    """The first bin from which on the rate stays near the limit: by the median of the window that
    follows, and by that of all the rest. None when there is none.
    """
    near = _WITHIN * limit
    for i in range(len(rates) - window + 1):
        following, rest = rates[i : i + window], rates[i:]
        if statistics.median(following) >= near and statistics.median(rest) >= near:
            return i
    return None


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    root = os.path.join(ctx.scratch, "files")
    ctx.say(f"making {work['files']} files")
    make_files(root, work["files"], work["mean_bytes"], ctx.seed)
    fast, slow = work["latency_ms"]
    bin_s: float = work["bin_s"]
    window = round(1 / bin_s)
    with SlowFs(
        root, open_ms=fast, read_ms=fast, stat_ms=work["stat_ms"], readdir_ms=work["stat_ms"],
        bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"], seed=ctx.seed,
    ) as mount:  # fmt: skip
        catalog = _forebay.Catalog.build(str(mount.path))
        sizes = catalog.lengths().tolist()
        paths = [catalog.object_path(i) for i in range(len(sizes))]

        def set_latency(ms: float) -> None:
            mount.set(open_ms=ms, read_ms=ms)

        def plain(ms: float, threads: int, files: int) -> float:
            """Bytes a second."""
            set_latency(ms)
            wanted = sum(sizes[:files])
            seconds, got = _forebay.limit_read_files(paths[:files], sizes[:files], threads)
            if got != wanted:
                raise RuntimeError(f"plain threads read {got} of {wanted} bytes")
            return float(wanted / seconds)

        best, fewest = {}, {}
        for ms, counts in zip((fast, slow), work["threads"], strict=True):
            trials = {n: plain(ms, n, work["trial_files"]) for n in counts}
            best[ms] = max(trials, key=lambda n: trials[n])
            fewest[ms] = min(n for n in counts if trials[n] >= _AS_GOOD * trials[best[ms]])
            ctx.say(f"{ms} ms: {best[ms]} plain threads are best, {fewest[ms]} are nearly so")

        limits: dict[float, list[float]] = {fast: [], slow: []}
        rates: dict[float, list[list[float]]] = {fast: [], slow: []}
        in_flight: dict[float, list[list[int]]] = {fast: [], slow: []}
        for i in range(ctx.repeats):
            for ms in (slow, fast):
                limits[ms].append(plain(ms, best[ms], len(sizes)))
            # The mount is fast now: the loader settles before the first change.
            engine = Engine(memory=work["memory_bytes"], keep=False)
            loader = DataLoader(
                catalog, work["batch"], shuffle=True, seed=ctx.seed, rank=0, world_size=1,
                engine=engine,
            )  # fmt: skip
            with loader, Recorder(loader, engine, bin_s).running() as recorder:
                time.sleep(work["settle_s"])
                for ms in (slow, fast):
                    first = len(recorder.rates) + 1  # the bin of the change itself is mixed
                    set_latency(ms)
                    time.sleep(work["phase_s"])
                    rates[ms].append(recorder.rates[first:])
                    in_flight[ms].append(recorder.limits[first - 1 :])
            ctx.say(f"changed to {slow} ms and back ({i + 1}/{ctx.repeats})")
            del loader, engine

    recovery = {}
    for ms, before in ((slow, fast), (fast, slow)):
        limit = statistics.median(limits[ms])
        found = [recovered_after(r, limit, window) for r in rates[ms]]
        # A rate that never comes near the limit counts as the whole time it was watched.
        values = [
            bin_s * (1 + (len(r) if f is None else f))
            for f, r in zip(found, rates[ms], strict=True)
        ]
        recovery[ms] = statistics.median(values)
        out.repeats.setdefault("recovery_s", []).extend(values)
        seconds = [
            round(statistics.median(column[i] for column in in_flight[ms]))
            for i in range(0, min(len(column) for column in in_flight[ms]), window)
        ]
        never = sum(f is None for f in found)
        out.cases += [
            Case(f"recovery, {before:g} to {ms:g} ms", "s", values,
                 note=(f"not recovered in {never} of {len(found)}; " if never else "")
                 + f"limit of reads in flight, by second: {seconds}"),
            Case(f"rate at the end, {before:g} to {ms:g} ms", "MB/s",
                 [statistics.median(r[-2 * window :]) / 1e6 for r in rates[ms]],
                 limit=limit / 1e6, limit_name=f"{best[ms]} plain threads",
                 note="median of the last two seconds"),
            Case(f"limit of reads in flight, {before:g} to {ms:g} ms", "reads",
                 [statistics.median(column[-2 * window :]) for column in in_flight[ms]],
                 limit=fewest[ms], limit_name="fewest plain threads that do",
                 note="median of the last two seconds"),
            Case(f"plain threads, {ms:g} ms", "MB/s", [x / 1e6 for x in limits[ms]],
                 note=f"{best[ms]} threads"),
        ]  # fmt: skip
        for number, series in enumerate(rates[ms]):
            shown = " ".join(f"{r / 1e6:.0f}" for r in series[: 3 * window])
            out.notes.append(
                f"to {ms:g} ms, run {number + 1}, MB/s in bins of {bin_s:g} s: {shown}"
            )
    out.figures["recovery_s"] = max(recovery.values())
    return out
