"""`forebay run` on programs that know nothing of it, beside the same programs without."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from forebay.commands.run import environment
from forebay.files import Service
from forebay.slowfs import SlowFs

from . import transparent_opening
from .data import make_files
from .decode_data import make_jpegs
from .measure import Case, Outcome
from .run import Context

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "transparent_script.py")
_RUN = [sys.executable, "-m", "forebay.cli", "run", "--quiet"]
# Files that have just been made may still be being made: the service leaves them alone so long.
_SETTLE_S = 3.5
# What slowfs counts that is no request of a program.
_NO_REQUESTS = {
    "bytes_read", "eio_injected", "in_flight", "in_flight_max", "answers", "late_us_mean",
    "late_us_max", "cpu_user_s", "cpu_system_s", "pid",
}  # fmt: skip


def _mount(ctx: Context, root: str, latency: float) -> SlowFs:
    work = ctx.workload
    return SlowFs(
        root, open_ms=latency, read_ms=latency, stat_ms=work["stat_ms"],
        readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"],
        seed=ctx.seed,
    )  # fmt: skip


def _script(
    ctx: Context,
    folder: str,
    forebay: bool,
    *arguments: str,
    options: tuple[str, ...] = (),
    after_epoch: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Runs the script, plain or through `forebay run`; what it says of each epoch."""
    command = [sys.executable, _SCRIPT, folder, "--seed", str(ctx.seed), *arguments]
    if after_epoch is not None:
        command.append("--wait")
    if forebay:
        command = [*_RUN, "--source", folder, *options, "--", *command]
    # The copies go with the bench's own files (not by TMPDIR, in which PyTorch makes sockets, whose
    # paths must be short). PyTorch's advice on how many workers to have is not asked for.
    env = {**os.environ, "SLURM_TMPDIR": ctx.scratch, "PYTHONWARNINGS": "ignore::UserWarning"}
    said = []
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        assert process.stdin and process.stdout
        for line in process.stdout:
            said.append(json.loads(line))
            if after_epoch is not None:
                after_epoch()
                process.stdin.write("\n")
                process.stdin.flush()
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return said


# ---- epochs


def _epochs(
    ctx: Context, folder: str, part: dict[str, Any], workers: int, expected: int, what: str
) -> dict[str, list[float]]:
    """Seconds of epochs, plain and through Forebay, in turn."""
    times: dict[str, list[float]] = {"plain": [], "plain first": [], "first": [], "later": []}
    for i in range(ctx.repeats):
        for forebay in (False, True):
            epochs = part["epochs"] if forebay else 1
            decode = ("--decode",) if part.get("decode") else ()
            said = _script(
                ctx, folder, forebay, "--workers", str(workers), "--epochs", str(epochs), *decode
            )
            for epoch in said:
                if (epoch["samples"], epoch["bytes"]) != (part["files"], expected):
                    raise RuntimeError(
                        f"{epoch['samples']} samples, {epoch['bytes']} bytes were delivered, not "
                        f"{part['files']}, {expected}"
                    )
            seconds = [epoch["seconds"] for epoch in said]
            # A first epoch is from the script's listing on.
            first = seconds[0] + said[0]["listing"]
            if forebay:
                times["first"].append(first)
                times["later"].append(statistics.median(seconds[1:]))
            else:
                times["plain"] += seconds
                times["plain first"].append(first)
            ctx.say(
                f"{what}, {workers} workers, {'forebay' if forebay else 'plain'}: "
                f"{', '.join(f'{s:.2f}' for s in seconds)} s ({i + 1}/{ctx.repeats})"
            )
    return times


def _cases(out: Outcome, what: str, files: int, times: dict[str, list[float]]) -> None:
    for name, plain in (("first", "plain first"), ("later", "plain")):
        out.cases.append(
            Case(f"{what}, {name} epoch", "samples/s", [files / t for t in times[name]],
                 rivals={"the same script, plain": files / statistics.median(times[plain])})
        )  # fmt: skip


def _make_raw(ctx: Context) -> list[str]:
    root = os.path.join(ctx.scratch, "raw")
    return make_files(root, ctx.workload["raw"]["files"], ctx.workload["mean_bytes"], ctx.seed)


def _raw(ctx: Context, out: Outcome, paths: list[str]) -> None:
    part = ctx.workload["raw"]
    volume = sum(os.path.getsize(p) for p in paths)
    with _mount(ctx, os.path.join(ctx.scratch, "raw"), part["latency_ms"]) as mount:
        for workers in part["workers"]:
            times = _epochs(ctx, str(mount.path), part, workers, volume, "raw")
            out.worst_speedup("first_vs_plain", times["first"], times["plain first"])
            out.worst_speedup("later_vs_plain", times["later"], times["plain"])
            _cases(out, f"raw reads, {workers} workers", part["files"], times)


def _make_decode(ctx: Context) -> str:
    part = ctx.workload["decode"]
    root = os.path.join(ctx.scratch, "jpegs")
    make_jpegs(root, part["files"], part["distinct"], ctx.workload["mean_bytes"], ctx.seed)
    return root


def _decode(ctx: Context, out: Outcome, root: str) -> None:
    part = ctx.workload["decode"]
    with _mount(ctx, root, part["latency_ms"]) as mount:
        expected = part["files"] * 224 * 224 * 3
        times = _epochs(ctx, str(mount.path), part, part["workers"], expected, "decode")
    out.speedup("decode_later_vs_plain", times["later"], times["plain"])
    _cases(out, f"PIL decode, {part['workers']} workers", part["files"], times)


# ---- room for half the data


def _requests(stats: dict[str, Any]) -> int:
    return sum(value for name, value in stats.items() if name not in _NO_REQUESTS)


def _make_half_fit(ctx: Context) -> list[str]:
    root = os.path.join(ctx.scratch, "half")
    return make_files(root, ctx.workload["half_fit"]["files"], ctx.workload["mean_bytes"], ctx.seed)


def _half_fit(ctx: Context, out: Outcome, paths: list[str]) -> None:
    """MONARCH's case: a tier for half the data, several reader processes, plain open().read()."""
    part = ctx.workload["half_fit"]
    # Half of what the files take on a disk, which is what a limit of the cache is about.
    half = sum(os.stat(p).st_blocks * 512 for p in paths) // 2
    shares, ops = [], []
    with _mount(ctx, os.path.join(ctx.scratch, "half"), part["latency_ms"]) as mount:
        for i in range(part["repeats"]):
            later: dict[bool, int] = {}
            all_ops: dict[bool, int] = {}
            sums: dict[bool, list[int]] = {}
            for forebay in (False, True):
                mount.reset()
                read: list[int] = []

                def after_epoch(read: list[int] = read) -> None:
                    read.append(mount.stats()["bytes_read"])

                said = _script(
                    ctx, str(mount.path), forebay, "--workers", str(part["workers"]), "--epochs",
                    str(part["epochs"]), "--checksum",
                    options=("--cache-size", str(half), "--ahead", str(part["ahead_bytes"])),
                    after_epoch=after_epoch,
                )  # fmt: skip
                stats = mount.stats()
                later[forebay] = read[-1] - read[0]
                all_ops[forebay] = _requests(stats)
                sums[forebay] = [epoch["checksum"] for epoch in said]
                ctx.say(
                    f"half fit, {'forebay' if forebay else 'plain'}: {all_ops[forebay]} requests, "
                    f"{later[forebay] / 1e6:.0f} MB after the first epoch ({i + 1})"
                )
            if sums[True] != sums[False]:
                raise RuntimeError("wrong bytes: the checksums of the epochs differ")
            shares.append(later[True] / later[False])
            ops.append(all_ops[True] / all_ops[False])
    out.median("half_fit_source_share", shares)
    out.median("source_ops_vs_plain", ops)
    where = f"room for half, {part['workers']} workers, {part['epochs']} epochs"
    out.cases.append(
        Case(f"{where}: source bytes after the first epoch", "of plain", shares,
             limit=0.5, limit_name="what does not fit, read once an epoch")
    )  # fmt: skip
    out.cases.append(Case(f"{where}: source requests of the run", "of plain", ops))
    out.notes.append(
        f"room for half: beside it {part['ahead_bytes'] / 1e6:.1f} MB for copies made ahead, of "
        f"{2 * half / 1e6:.0f} MB of data; all epochs delivered the plain run's bytes, in its order"
    )


# ---- what the preloaded library costs


def open_loop() -> str | None:
    """The measuring program: $FOREBAY_OPEN_LOOP, or what `make build` made."""
    named = os.environ.get("FOREBAY_OPEN_LOOP")
    if named:
        return named
    root = Path(__file__).resolve().parents[2]
    built = root / "build" / "python" / "bench" / "preload" / "open_loop"
    return str(built) if built.exists() else None


_Warm = dict[tuple[str, int], list[str]]


def _make_warm(ctx: Context) -> _Warm:
    part = ctx.workload["warm"]
    return {
        (name, size): make_files(
            os.path.join(ctx.scratch, f"warm-{name}", str(size)), part["files"], size, ctx.seed,
            sigma=0, classes=1,
        )
        for name in ("outside", "inside")
        for size in part["bytes"]
    }  # fmt: skip


def _warm(ctx: Context, out: Outcome, files: _Warm) -> None:
    part = ctx.workload["warm"]
    program = open_loop()
    if program is None:
        raise RuntimeError("the program open_loop is not built; FOREBAY_OPEN_LOOP may name it")
    worst: dict[str, float] = {}
    single: dict[int, list[float]] = {size: [] for size in part["bytes"]}
    cache = os.path.join(ctx.scratch, "warm-cache")

    def took_us(paths: list[str], preloaded: dict[str, str] | None, seconds: float) -> float:
        said = subprocess.run(
            [program, str(seconds), *paths], env=preloaded, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
        return float(said.stdout) / 1e3

    with Service.start(cache, sources=[os.path.join(ctx.scratch, "warm-inside")]) as service:
        preloaded = environment(service.environment(), hook=False)
        times: dict[tuple, list[float]] = {}
        for i in range(part["repeats"]):
            for where in files:
                # A process may be a third slower than the next one, by where its memory lies: of
                # several, taken in turn, the fastest tells what the calls cost.
                fastest: dict[bool, float] = {}
                for turn in range(2 * part["processes"]):
                    ours = (turn + turn // 2 + i) % 2 == 0  # who is first changes
                    took = took_us(files[where], preloaded if ours else None, part["seconds"])
                    fastest[ours] = min(fastest.get(ours, took), took)
                for ours, took in fastest.items():
                    times.setdefault((where, ours), []).append(took)
            # One process a side, who is first changes: a pair is what a user would see.
            for size, costs in single.items():
                pair = {
                    ours: took_us(
                        files["outside", size], preloaded if ours else None, part["pair_seconds"]
                    )
                    for ours in ((False, True) if i % 2 else (True, False))
                }
                costs.append(pair[True] / pair[False] - 1)
            ctx.say(f"warm files ({i + 1}/{part['repeats']})")
    for name, size in files:
        plain, with_library = (times[(name, size), ours] for ours in (False, True))
        # Of neighbours in time: others on the machine slow both.
        costs = [b / a - 1 for a, b in zip(plain, with_library, strict=True)]
        cost = statistics.median(costs)
        worst[name] = max(worst.get(name, cost), cost)
        figure = "warm_overhead" if name == "outside" else "warm_overhead_inside"
        out.repeats.setdefault(figure, []).extend(costs)
        out.cases.append(
            Case(f"open, read, close of {size} bytes, {name} data folders", "us", with_library,
                 limit=statistics.median(plain), limit_name="without the library",
                 note=f"{cost:+.1%}, the median of {len(plain)} pairs")
        )  # fmt: skip
    for size, costs in single.items():
        out.cases.append(
            Case(f"what the library adds to {size} bytes outside, one process a side", "ratio",
                 costs)
        )  # fmt: skip
    out.figures["warm_overhead_median"] = max(map(statistics.median, single.values()))
    out.repeats["warm_overhead_median"] = [cost for costs in single.values() for cost in costs]
    out.figures["warm_overhead"] = worst["outside"]
    out.figures["warm_overhead_inside"] = worst["inside"]


def _tensorflow(ctx: Context, out: Outcome, part: ModuleType | None) -> None:
    if part is None:
        out.notes.append("tf_first_vs_plain, tf_later_vs_plain: TensorFlow is not installed")
    else:
        part.run(ctx, out)


def _make_tensorflow(ctx: Context) -> ModuleType | None:
    names = ("tensorflow", f"{__package__}.transparent_tf")
    if any(importlib.util.find_spec(name) is None for name in names):
        return None
    return importlib.import_module(names[1])


# Making its data, and measuring.
_PARTS: dict[str, tuple[Callable[[Context], Any], Callable[[Context, Outcome, Any], None]]] = {
    "warm": (_make_warm, _warm),
    "half_fit": (_make_half_fit, _half_fit),
    "raw": (_make_raw, _raw),
    "decode": (_make_decode, _decode),
    "opening": (transparent_opening.make, transparent_opening.run),
    "tensorflow": (_make_tensorflow, _tensorflow),
}


def run(ctx: Context) -> Outcome:
    out = Outcome()
    ctx.say("making files")
    made = {name: _PARTS[name][0](ctx) for name in ctx.workload["parts"]}
    time.sleep(_SETTLE_S)
    for name, data in made.items():
        _PARTS[name][1](ctx, out, data)
        ctx.save(out)
    out.notes.append(
        "the script is bench/transparent_script.py, run as a process of its own with and without "
        "forebay run, in turn; an epoch's clock runs from iter() to its last batch, a first "
        "epoch's from the listing of the folder on"
    )
    return out
