"""The bench command: chooses workloads, runs them, writes the JSON."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from forebay import _forebay

from .ending import cleans_up
from .measure import Case, Outcome, is_met, worst_of


def _read(name: str) -> dict[str, Any]:
    text = resources.files(__package__).joinpath(name).read_text()
    return dict(json.loads(text))


REGISTRY = _read("benches.json")
"""Every bench: the folders that its result depends on, and its figures on README's first page."""
GPU_BENCHES = tuple(name for name, about in REGISTRY.items() if not about.get("in_all", True))
BENCHES = tuple(name for name in REGISTRY if name not in GPU_BENCHES)
_DAEMONS_END_S = 15.0
MODES = ("default", "quick", "full", "check")


@dataclass
class Context:
    """What a bench gets: its workload, a scratch folder, a way to speak."""

    workload: dict[str, Any]
    mode: str
    scratch: str
    seed: int
    say: Callable[[str], None]
    save: Callable[[Outcome], None] = lambda _: None
    """Writes what there is so far into the JSON; for benches that run where time is short."""

    @property
    def repeats(self) -> int:
        return int(self.workload["repeats"])


def load_workload(name: str, mode: str) -> dict[str, Any]:
    """workloads/NAME.json: `default`, with what `quick` or `full` says differently; `check` is
    `quick` with what check.json says differently, and with its bounds.
    """
    file = _read(f"workloads/{name}.json")
    if mode == "check":
        check = _read("check.json")[name]
        targets = {figure: [sign, None] for figure, (sign, _) in file["default"]["targets"].items()}
        targets |= {figure: wish[:2] for figure, wish in check["bounds"].items()}
        return {**file["default"], **file.get("quick", {}), **check["workload"], "targets": targets}
    return {**file["default"], **file.get(mode, {})}


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as info:
            cpu = next(
                line.split(":", 1)[1].strip() for line in info if line.startswith("model name")
            )
    except (OSError, StopIteration):
        pass
    available, cgroup = _forebay.memory_limit()
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_available_bytes": available,
        "cgroup_bytes": cgroup,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": os.getloadavg()[0],
    }


def _git(*arguments: str) -> str:
    here = os.path.dirname(os.path.abspath(__file__))
    command = ["git", "-C", here, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def commit() -> str:
    """The commit of Forebay's checkout, with "+" when it has changes; "unknown" outside one."""
    if given := os.environ.get("FOREBAY_COMMIT"):
        return given  # a copy without history, whose maker knows
    try:
        top = _git("rev-parse", "--show-toplevel")
        if not os.path.exists(os.path.join(top, "bench", "forebay_bench", "run.py")):
            return "unknown"  # a copy inside somebody else's checkout
        # Documents, and results of other benches among them, are no part of what is measured.
        others = (":(top,exclude)docs", ":(top,exclude)README.md")
        changes = _git("status", "--porcelain", "--", ":(top)", *others)
        return _git("rev-parse", "HEAD") + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _wish(sign: str, bound: float | None) -> str:
    return "reported" if bound is None else f"wanted {sign} {bound:g}"


def _judge(value: float, sign: str, bound: float | None) -> str:
    if bound is None:
        return ""
    return ": met" if is_met(value, sign, bound) else ": NOT MET"


def _print_table(name: str, result: dict[str, Any]) -> None:
    print(f"\n{name}: figures (worst repeat)")
    targets = result["workload"]["targets"]
    for figure, value in result["figures"].items():
        worst = f"({result['worst'][figure]:.4g})"
        line = f"  {figure:28} {value:12.4g} {worst:>12}"
        if figure in targets:
            line += f"   ({_wish(*targets[figure])}{_judge(value, *targets[figure])})"
        print(line)
    for figure, target in targets.items():
        if figure not in result["figures"]:
            print(f"  {figure:28} not measured   ({_wish(*target)})")


def _print_cases(name: str, outcome: Outcome) -> None:
    print(f"{name}: cases (median, spread)")
    for case in outcome.cases:
        print(f"  {_case_line(case)}")
    for note in outcome.notes:
        print(f"  note: {note}")


def not_met(result: dict[str, Any]) -> list[str]:
    """The figures that miss what is wanted of them."""
    targets = result["workload"]["targets"]
    figures = result["figures"]
    return [f for f in targets if f in figures and not is_met(figures[f], *targets[f])]


def _case_line(case: Case) -> str:
    line = f"{case.name:44} {case.value:12.5g} {case.unit:10} ±{case.spread / 2:.0%}"
    if case.limit is not None:
        line += f"  limit {case.limit:.5g} ({case.limit_name})"
    for rival, value in case.rivals.items():
        line += f"  {rival} {value:.5g}"
    return line


def _write(path: str, result: dict[str, Any]) -> None:
    with open(path, "w") as out:
        json.dump(result, out, indent=1)
        out.write("\n")


def _remove(folder: str) -> None:
    """Removes a scratch folder. Daemons that end by themselves some seconds after their last client
    may still make files in it.
    """
    end = time.monotonic() + _DAEMONS_END_S
    while True:
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return
        if time.monotonic() > end:
            print(f"forebay bench: {folder} could not be removed", file=sys.stderr)
            return
        time.sleep(0.1)


def run_one(
    name: str,
    mode: str,
    seed: int,
    keep: bool,
    json_file: str | None = None,
    busy: int | None = None,
) -> dict[str, Any]:
    module = importlib.import_module(f"{__package__}.{name}")
    workload = load_workload(name, mode)
    if busy is not None and "busy_loops" in workload:
        workload["busy_loops"] = busy
    scratch = tempfile.mkdtemp(prefix=f"forebay-bench-{name}-")
    tty = sys.stderr.isatty()

    def say(text: str) -> None:
        end = "\r" if tty else "\n"
        print(
            f"\033[K  {name}: {text}" if tty else f"  {name}: {text}",
            end=end,
            file=sys.stderr,
            flush=True,
        )

    start = time.monotonic()
    # Of the start: what is committed while it runs is not what it measures.
    measured = commit()

    def targets(outcome: Outcome) -> dict[str, list]:
        wanted = workload.get("targets", {}).items()
        return {k: [sign, outcome.bounds.get(k, bound)] for k, (sign, bound) in wanted}

    def worst(outcome: Outcome) -> dict[str, float]:
        wanted = targets(outcome)
        found = {}
        for figure, value in outcome.figures.items():
            sign, bound = wanted.get(figure, (">=", None))
            found[figure] = worst_of([*outcome.repeats.get(figure, []), value], sign, bound)
        return found

    def result(outcome: Outcome) -> dict[str, Any]:
        return {
            "bench": name,
            "mode": mode,
            "seed": seed,
            "seconds": time.monotonic() - start,
            "commit": measured,
            "machine": machine(),
            "workload": {**workload, "targets": targets(outcome)},
            "figures": outcome.figures,
            "worst": worst(outcome),
            "repeats": outcome.repeats,
            "cases": [case.to_json() for case in outcome.cases],
            "notes": outcome.notes,
        }

    def save(outcome: Outcome) -> None:
        if json_file:
            _write(json_file, result(outcome))

    # Also what others make here, mounts and the sockets of PyTorch's workers, lies in the scratch
    # folder: it goes with that, however this ends.
    before, tempfile.tempdir = tempfile.tempdir, scratch
    try:
        outcome = module.run(Context(workload, mode, scratch, seed, say, save))
    finally:
        tempfile.tempdir = before
        if not keep:
            _remove(scratch)
    if tty:
        print("\033[K", end="", file=sys.stderr)
    found = result(outcome)
    _print_table(name, found)
    _print_cases(name, outcome)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="forebay bench",
        description="Measures Forebay and its rivals in one run, interleaved. Ratios carry over "
        "between machines, single times do not. Exit code 1: a figure is not what is wanted.",
    )
    parser.add_argument("name", choices=(*BENCHES, *GPU_BENCHES, "all"), help="which bench")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="smaller: to see that it works")
    size.add_argument("--full", action="store_true", help="larger: every rival, more repetitions")
    size.add_argument("--check", action="store_true", help="smallest: what make bench-check runs")
    parser.add_argument("--json", metavar="FILE", help="write figures and cases to FILE")
    parser.add_argument("--seed", type=int, default=1, help="seed of data and orders (default 1)")
    parser.add_argument(
        "--busy", type=int, metavar="N", help="tiers: measure beside N busy loops (default 4), too"
    )
    parser.add_argument("--keep", action="store_true", help="keep the data that was made")
    args = parser.parse_args(argv)
    # PyTorch warns of more workers than cores; on slow storage that is the point.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    mode = next((m for m in MODES[1:] if getattr(args, m)), "default")
    names = BENCHES if args.name == "all" else (args.name,)
    if args.check:
        unchecked = [name for name in names if name not in _read("check.json")]
        if unchecked:
            parser.error(f"--check: there is none of {', '.join(unchecked)}")
    single = args.json if len(names) == 1 else None
    with cleans_up():
        results = [run_one(name, mode, args.seed, args.keep, single, args.busy) for name in names]
    if args.json:
        merged = results[0] if len(results) == 1 else {
            "bench": "all",
            **{key: results[0][key] for key in ("mode", "seed", "commit", "machine")},
            "figures": {k: v for r in results for k, v in r["figures"].items()},
            "worst": {k: v for r in results for k, v in r["worst"].items()},
            "cases": [c for r in results for c in r["cases"]],
            "benches": results,
        }  # fmt: skip
        _write(args.json, merged)
        print(f"\nwritten to {args.json}")
    missed = [f"{figure} ({r['bench']})" for r in results for figure in not_met(r)]
    if missed:
        print(f"\nNOT MET: {', '.join(missed)}")
    return 1 if missed else 0
