"""The tuner against a grid of fixed settings, on storage of several latencies and for consumers of
several speeds; then storage that changes under it. PRISMA's rule runs beside it.

Nothing is kept in memory, so that every batch comes from the storage.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forebay import _forebay
from forebay.engine import Engine
from forebay.loader import DataLoader
from forebay.slowfs import SlowFs

from .data import make_files
from .measure import Case, Outcome
from .run import Context

_AS_GOOD = 0.98  # of the best point: the smallest such setting is the best one
_STANDSTILL_S = 60.0  # without a batch
_REACHED = 0.95


class Consumer:
    """Takes batches in a thread, and computes for `step_s` on each; may be paused."""

    def __init__(self, loader: DataLoader, step_s: float) -> None:
        self.bytes = 0
        self._loader = loader
        self._step_s = step_s
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._go = threading.Event()
        self._thread = threading.Thread(target=self._consume)

    @contextmanager
    def running(self) -> Iterator[Consumer]:
        self._go.set()
        self._thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            self._go.set()
            self._thread.join()
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def pause(self) -> None:
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def _consume(self) -> None:
        try:
            while not self._stop.is_set():
                for batch in self._loader:
                    self.bytes += batch.nbytes
                    if self._step_s > 0:
                        time.sleep(self._step_s)
                    self._go.wait()
                    if self._stop.is_set():
                        return
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody waits for it
            self._failure = error

    def rate(self, settle_s: float, seconds: float) -> float:
        """Bytes a second, after a while that does not count; until a batch has come, at least."""
        time.sleep(settle_s)
        start, before = time.perf_counter(), self.bytes
        time.sleep(seconds)
        while self.bytes == before and time.perf_counter() - start < _STANDSTILL_S:
            self.check()
            time.sleep(0.01)
        rate = (self.bytes - before) / (time.perf_counter() - start)
        self.check()
        return rate


@dataclass
class Series:
    """What a run gave, bin by bin."""

    bin_s: float
    rates: list[float] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)

    def watch(self, consumer: Consumer, engine: Engine, seconds: float) -> Series:
        """Watches for a while; appends."""
        last_at, last_bytes = time.perf_counter(), consumer.bytes
        due = last_at
        for _ in range(max(1, round(seconds / self.bin_s))):
            due += self.bin_s
            time.sleep(max(0.0, due - time.perf_counter()))
            now, total = time.perf_counter(), consumer.bytes
            self.rates.append((total - last_bytes) / (now - last_at))
            metrics = engine.metrics()
            self.reads.append(metrics["forebay_source_in_flight_limit_reads"])
            self.buffers.append(metrics["forebay_read_ahead_limit_bytes"])
            last_at, last_bytes = now, total
        consumer.check()
        return self

    def reached_s(self, rate: float, window_s: float = 1.0) -> float:
        """Seconds until the rate stays near `rate`: in the second that follows, and in half of the
        seconds after it. All the time it was watched when it does not. By whole seconds: a bin has
        15 or 16 batches of a slow consumer, which differ by more than what is near.
        """
        window = min(len(self.rates), max(1, round(window_s / self.bin_s)))
        near = _REACHED * rate
        seconds = [
            statistics.fmean(self.rates[i : i + window])
            for i in range(len(self.rates) - window + 1)
        ]
        for i, second in enumerate(seconds):
            if second >= near and statistics.median(seconds[i:]) >= near:
                return i * self.bin_s
        return len(self.rates) * self.bin_s

    def tail(self, values: Sequence[float], seconds: float) -> list[float]:
        return [float(x) for x in values[-max(1, round(seconds / self.bin_s)) :]]

    def last(self, values: Sequence[float], seconds: float) -> float:
        return statistics.median(self.tail(values, seconds))


@dataclass
class Best:
    """The best point of a grid."""

    reads: int
    buffer: int
    rate: float


def best_point(rates: dict[tuple[int, int], float]) -> Best:
    """Of the points within 2 % of the fastest: the fewest reads, then the smallest buffer."""
    fastest = max(rates.values())
    reads, buffer = min(point for point, rate in rates.items() if rate >= _AS_GOOD * fastest)
    return Best(reads, buffer, rates[reads, buffer])


def search(
    reads: list[int], buffers: list[int], rate: Callable[[int, int], float]
) -> dict[tuple[int, int], float]:
    """Measures the points of a grid that may be the best one: every number of reads with the
    largest buffer, then the other buffers of the fewest reads that are as good as any, and of the
    next fewer. More read-ahead does not slow a consumer down, so that a number of reads whose
    largest buffer is too slow has no better one.
    """
    largest = buffers[-1]
    rates = {(n, largest): rate(n, largest) for n in reads}
    fewest = best_point(rates).reads
    for n in reads[max(0, reads.index(fewest) - 1) : reads.index(fewest) + 1]:
        rates |= {(n, size): rate(n, size) for size in buffers[:-1]}
    return rates


def grid(demand: float, latency_s: float, sample: float, batch: int, shape: list[int],
         most: int) -> tuple[list[int], list[int]]:  # fmt: skip
    """Reads and buffers in steps of two, around what Little's law needs for the demand: a quarter
    of it and more. A buffer holds a batch at least, since the next batch is always read.
    """
    little = demand * latency_s
    wanted = (little + 2 * batch) * sample
    first = max(1, round(little / 4))
    reads = [min(most, first * 2**i) for i in range(shape[0])]
    smallest = max(batch * sample, wanted / 4)
    return sorted(set(reads)), [round(smallest * 2**i) for i in range(shape[1])]


class Setup:
    """A mount with its data, whose latency can be set."""

    def __init__(self, ctx: Context, mount: SlowFs) -> None:
        self.work = ctx.workload
        self.seed = ctx.seed
        self.mount = mount
        self.catalog = _forebay.Catalog.build(str(mount.path))
        self.sample = float(self.catalog.lengths().mean())
        self.most = 1e6 * self.work["bandwidth_mb"] / self.sample  # samples a second

    def set_latency(self, ms: float) -> None:
        self.mount.set(open_ms=ms, read_ms=ms)

    def demand(self, speed: float) -> float:
        return self.most * speed if speed > 0 else self.most

    def step_s(self, speed: float) -> float:
        return float(self.work["batch"] / self.demand(speed)) if speed > 0 else 0.0

    @contextmanager
    def consumer(self, speed: float, **options: object) -> Iterator[tuple[Consumer, Engine]]:
        engine = Engine(memory=self.work["memory_bytes"], keep=False, **options)  # type: ignore[arg-type]
        loader = DataLoader(
            self.catalog, self.work["batch"], shuffle=True, seed=self.seed, rank=0, world_size=1,
            engine=engine,
        )  # fmt: skip
        with loader, Consumer(loader, self.step_s(speed)).running() as consumer:
            yield consumer, engine


def _set(engine: Engine, reads: int, buffer: int) -> None:
    engine.set_knob("source_reads_in_flight", reads)
    engine.set_knob("read_ahead_bytes", buffer)


def _name(ms: float, speed: float) -> str:
    return f"{ms:g} ms, " + (f"{speed:.0%} of the storage" if speed > 0 else "as fast as it comes")


def _case(ctx: Context, out: Outcome, setup: Setup, ms: float, speed: float) -> Best:
    """The grid, the tuner, and the best point once more beside it."""
    work = setup.work
    settle: float = work["settle_s"]
    name = _name(ms, speed)
    # A read is an open and a read; what the kernel and we add is small beside it.
    latency_s = 2e-3 * ms + 1e-4
    reads, buffers = grid(
        setup.demand(speed), latency_s, setup.sample, work["batch"], work["grid"], 256
    )
    setup.set_latency(ms)
    with setup.consumer(speed, in_flight=reads[0], read_ahead=buffers[0]) as (consumer, engine):

        def rate(n: int, size: int) -> float:
            _set(engine, n, size)
            return consumer.rate(settle, work["point_s"] - settle)

        if work["whole_grid"]:
            rates = {(n, size): rate(n, size) for n in reads for size in buffers}
        else:
            rates = search(reads, buffers, rate)
        best = best_point(rates)
        ctx.say(
            f"{name}: {best.reads} reads and {best.buffer / 1e6:.1f} MB are best, "
            f"{best.rate / 1e6:.0f} MB/s"
        )
        consumer.pause()
        _set(engine, best.reads, best.buffer)
        series = Series(work["bin_s"])
        tuned: list[float] = []
        fixed: list[float] = []
        with setup.consumer(speed) as (own, own_engine):
            series.watch(own, own_engine, work["tune_s"])
            for _ in range(max(2, ctx.repeats)):
                tuned.append(own.rate(settle, work["point_s"] - settle))
                own.pause()
                consumer.resume()
                fixed.append(consumer.rate(settle, work["point_s"] - settle))
                consumer.pause()
                own.resume()
        consumer.resume()
    # The best point's rate is measured again, beside the tuner's: the grid took a while.
    beside = statistics.median(fixed)
    ours = statistics.median(tuned)
    last = min(2.0, work["tune_s"] / 2)
    chosen, buffer = series.last(series.reads, last), series.last(series.buffers, last)
    tune_s = series.reached_s(beside)
    figures = {
        "tuned_vs_best": ours / beside,
        "tune_s": tune_s,
        "parallelism_vs_best": chosen / best.reads,
        "buffer_vs_best": buffer / best.buffer,
    }
    out.repeats.setdefault("tuned_vs_best", []).extend(
        a / b for a, b in zip(tuned, fixed, strict=True)
    )
    worst = {"tuned_vs_best": min}
    for key, value in figures.items():
        out.figures[key] = worst.get(key, max)(out.figures.get(key, value), value)
    ctx.say(
        f"{name}: tuner {chosen:.0f} reads, {buffer / 1e6:.1f} MB, {ours / beside:.3f} of the best "
        f"after {tune_s:.1f} s"
    )
    out.cases += [
        Case(f"tuned, {name}", "MB/s", [x / 1e6 for x in tuned], limit=beside / 1e6,
             limit_name=f"best of {len(rates)} points, measured beside it",
             note=f"reached after {tune_s:.2f} s"),
        Case(f"reads in flight, {name}", "reads", series.tail(series.reads, last), limit=best.reads,
             limit_name="best point",
             note="by second: " + " ".join(
                 str(x) for x in series.reads[:: max(1, round(1 / series.bin_s))])),
        Case(f"read-ahead, {name}", "MB", [x / 1e6 for x in series.tail(series.buffers, last)],
             limit=best.buffer / 1e6, limit_name="best point",
             note="by second: " + " ".join(
                 f"{x / 1e6:.1f}" for x in series.buffers[:: max(1, round(1 / series.bin_s))])),
    ]  # fmt: skip
    shown = "; ".join(
        f"{n} reads: "
        + " ".join(f"{rates[n, size] / 1e6:.0f}" if (n, size) in rates else "-" for size in buffers)
        for n in reads
    )
    sizes = " ".join(f"{size / 1e6:.1f}" for size in buffers)
    out.notes.append(f"{name}, MB/s by reads and buffers of {sizes} MB: {shown}")
    return best


def _prisma(ctx: Context, out: Outcome, setup: Setup, ms: float, best: Best) -> None:
    """PRISMA's rule, for a consumer that takes what comes."""
    work = setup.work
    if work["prisma_s"] <= 0 or ms not in work["prisma_ms"]:
        return
    setup.set_latency(ms)
    series = Series(work["bin_s"])
    with setup.consumer(0, tuner="prisma") as (consumer, engine):
        series.watch(consumer, engine, work["prisma_s"])
    last = min(4.0, work["prisma_s"] / 2)
    rate = series.last(series.rates, last)
    reads, buffer = series.last(series.reads, last), series.last(series.buffers, last)
    ctx.say(f"{ms:g} ms: PRISMA's rule gives {rate / best.rate:.2f} of the best point's rate")
    out.cases.append(
        Case(f"PRISMA's rule, {_name(ms, 0)}", "MB/s",
             [x / 1e6 for x in series.tail(series.rates, last)],
             limit=best.rate / 1e6, limit_name="best point of the grid",
             note=f"{reads:.0f} reads and {buffer / 1e6:.1f} MB in the last seconds of "
                  f"{work['prisma_s']:g}; within 5 % of the best after "
                  f"{series.reached_s(best.rate):.1f} s of them")
    )  # fmt: skip


def _change(ctx: Context, out: Outcome, setup: Setup, speed: float,
            best: dict[tuple[float, float], Best]) -> None:  # fmt: skip
    """Storage that becomes slow and fast again."""
    work = setup.work
    fast, slow = work["change_ms"]
    for number in range(ctx.repeats):
        setup.set_latency(fast)
        with setup.consumer(speed) as (consumer, engine):
            time.sleep(work["change_settle_s"])
            for ms in (slow, fast):
                setup.set_latency(ms)
                series = Series(work["bin_s"]).watch(consumer, engine, work["change_s"])
                found = best[ms, speed]
                retune = series.reached_s(found.rate)
                quarters = series.reached_s(found.rate, 0.0)
                for figure, value in (("retune_s", retune), ("retune_s_quarters", quarters)):
                    out.repeats.setdefault(figure, []).append(value)
                    out.figures[figure] = max(out.repeats[figure])
                name = f"changed to {_name(ms, speed)}"
                ctx.say(
                    f"{name}: as good as the best after {retune:.2f} s, by single bins after "
                    f"{quarters:.2f} s ({number + 1})"
                )
                for case in out.cases:
                    if case.name == name:
                        case.values.append(retune)
                        break
                else:
                    out.cases.append(
                        Case(name, "s", [retune],
                             note=f"at the end {series.last(series.reads, 1):.0f} reads, "
                                  f"{series.last(series.buffers, 1) / 1e6:.1f} MB; best point "
                                  f"{found.reads} reads, {found.buffer / 1e6:.1f} MB")
                    )  # fmt: skip


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    root = os.path.join(ctx.scratch, "files")
    ctx.say(f"making {work['files']} files")
    make_files(root, work["files"], work["mean_bytes"], ctx.seed)
    with SlowFs(
        root, open_ms=1, read_ms=1, stat_ms=work["stat_ms"], readdir_ms=work["stat_ms"],
        bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"], seed=ctx.seed,
    ) as mount:  # fmt: skip
        setup = Setup(ctx, mount)
        best: dict[tuple[float, float], Best] = {}
        for ms in work["latency_ms"]:
            for speed in work["speeds"]:
                best[ms, speed] = _case(ctx, out, setup, ms, speed)
                ctx.save(out)
            _prisma(ctx, out, setup, ms, best[ms, 0])
        for speed in work["change_speeds"]:
            _change(ctx, out, setup, speed, best)
            ctx.save(out)
    return out
