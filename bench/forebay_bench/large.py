"""Large files, of which a program reads parts, under `forebay run` and without."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from typing import Any

from forebay.slowfs import SlowFs

from . import large_data
from .measure import Case, Outcome
from .passes import await_end_of_daemons, await_quiet, drop_pages, one_pass, scripts_of
from .run import Context

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "large_script.py")
_RUN = [sys.executable, "-m", "forebay.cli", "run", "--quiet"]
# Files that have just been made may still be being made: they are left alone so long.
SETTLE_S = 3.5


class _Measured:
    """One run of the script: what it took, and what the source gave, pass by pass."""

    def __init__(self, ctx: Context, mount: SlowFs, name: str, *, forebay: bool) -> None:
        part = ctx.workload["formats"][name]
        folder = str(mount.path)
        options = ["--seed", str(ctx.seed), "--share", str(part.get("share", 1.0))]
        if "read_bytes" in part:
            options += ["--read-bytes", str(part["read_bytes"])]
        command = [sys.executable, SCRIPT, name, folder, *options]
        if forebay:
            command = [*_RUN, "--source", folder, "--", *command]
        runtime = os.path.join(ctx.scratch, "r")
        os.makedirs(runtime, mode=0o700, exist_ok=True)
        env = {
            **os.environ, "SLURM_TMPDIR": ctx.scratch, "XDG_RUNTIME_DIR": runtime,
            "OMP_NUM_THREADS": "1",
            "HF_HOME": os.path.join(ctx.scratch, "hf"), "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        self.source: list[int] = []
        self.said: list[dict[str, Any]] = []
        self.idle = 0
        with scripts_of([process]) as scripts:
            for number in range(1 + ctx.workload["later"] if forebay else 1):
                drop_pages(folder)
                mount.reset()
                self.said += one_pass(scripts)
                self.source.append(mount.stats()["bytes_read"])
                if forebay and number == 0:
                    self.idle = await_quiet(mount)
        await_end_of_daemons([runtime])

    @property
    def seconds(self) -> list[float]:
        return [each["seconds"] for each in self.said]


def _check(name: str, plain: _Measured, ours: _Measured) -> None:
    for number, said in enumerate(ours.said):
        for key in ("bytes", "checksum"):
            if said[key] != plain.said[0][key]:
                raise RuntimeError(
                    f"{name}, pass {number}: {key} {said[key]}, without Forebay "
                    f"{plain.said[0][key]}"
                )


def _mount(ctx: Context, folder: str, mapped: bool) -> SlowFs:
    work = ctx.workload
    # A mount that keeps nothing cannot be mapped by MAP_SHARED, so that one has its pages dropped
    # before each pass.
    return SlowFs(
        folder, cache=mapped, open_ms=work["latency_ms"], read_ms=work["latency_ms"],
        stat_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], seed=ctx.seed,
    )  # fmt: skip


def _measure(ctx: Context, out: Outcome, name: str, folder: str) -> None:
    part = ctx.workload["formats"][name]
    plain: list[_Measured] = []
    ours: list[_Measured] = []
    with _mount(ctx, folder, part.get("mapped", False)) as mount:
        for repeat in range(ctx.repeats):
            plain.append(_Measured(ctx, mount, name, forebay=False))
            ours.append(_Measured(ctx, mount, name, forebay=True))
            _check(name, plain[-1], ours[-1])
            ctx.say(
                f"{name}: plain {plain[-1].seconds[0]:.2f} s, forebay "
                f"{', '.join(f'{s:.2f}' for s in ours[-1].seconds)} s; source bytes "
                f"{ours[-1].source[0] / plain[-1].source[0]:.3f} of plain, later "
                f"{sum(ours[-1].source[1:]) / 1e6:.1f} MB ({repeat + 1}/{ctx.repeats})"
            )
    _report(out, name, plain, ours)


def _report(out: Outcome, name: str, plain: list[_Measured], ours: list[_Measured]) -> None:
    shares = [a.source[0] / b.source[0] for a, b in zip(ours, plain, strict=True)]
    later = [float(sum(each.source[1:])) for each in ours]
    first_s = [each.seconds[0] for each in ours]
    later_s = [statistics.median(each.seconds[1:]) for each in ours]
    plain_s = [each.seconds[0] for each in plain]
    out.worst_median("large_source_vs_plain", shares)
    out.worst_median("large_later_source", later)
    out.worst_speedup("large_first_vs_plain", first_s, plain_s)
    out.worst_speedup("large_later_vs_plain", later_s, plain_s)
    read = ours[0].said[0]["bytes"] / 1e6
    rival = {"the same script, plain": read / statistics.median(plain_s)}
    out.cases += [
        Case(f"{name}: source bytes of the first pass", "of plain", shares,
             limit=statistics.median(read * 1e6 / each.source[0] for each in plain),
             limit_name="what the script gets"),
        Case(f"{name}: read from the source when idle after it", "MB",
             [each.idle / 1e6 for each in ours]),
        Case(f"{name}: source bytes of later passes", "bytes", later),
        Case(f"{name}, first pass", "MB/s", [read / t for t in first_s], rivals=rival),
        Case(f"{name}, later passes", "MB/s", [read / t for t in later_s], rivals=rival),
    ]  # fmt: skip


def run(ctx: Context) -> Outcome:
    work = ctx.workload
    out = Outcome()
    folders = {}
    for name, part in work["formats"].items():
        if lacking := large_data.missing(name):
            out.notes.append(f"{name} was left out: {lacking} is not installed")
            continue
        ctx.say(f"making {part['bytes'] / 1e6:.0f} MB for {name}")
        folders[name] = os.path.join(ctx.scratch, name)
        large_data.make(name, folders[name], part, ctx.seed)
    time.sleep(SETTLE_S)
    for name, folder in folders.items():
        _measure(ctx, out, name, folder)
        ctx.save(out)
    out.notes.append(
        f"a mount of {work['latency_ms']:g} ms and {work['bandwidth_mb']:g} MB/s, of which the "
        "kernel keeps nothing from one pass to the next; every pass opens the file anew and makes "
        "the same reads; later passes begin when the source has not been read for a second. "
        "Copies lie on the local disk, whose page cache is not dropped"
    )
    return out
