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

from .. import _forebay
from .measure import Case, Outcome

BENCHES = (
    "overhead", "epoch", "accelerate", "budget", "decode", "accuracy", "placement", "plan",
    "simulator", "tiers", "drift", "tune", "control", "jobs", "fairness", "transparent",
    "peers",
)  # fmt: skip
GPU_BENCHES = ("gpu",)  # not part of `all`


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
    """workloads/NAME.json: `default`, with what `quick` or `full` says differently."""
    text = resources.files(__package__).joinpath("workloads", f"{name}.json").read_text()
    file = json.loads(text)
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
        if not os.path.exists(os.path.join(top, "python", "forebay", "bench", "run.py")):
            return "unknown"  # installed inside somebody else's checkout
        return _git("rev-parse", "HEAD") + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _print_table(name: str, outcome: Outcome, targets: dict[str, list]) -> None:
    print(f"\n{name}: figures")
    for figure, value in outcome.figures.items():
        goal = targets.get(figure)
        verdict = ""
        if goal:
            sign, bound = goal
            met = (
                value >= bound
                if sign == ">="
                else value <= bound
                if sign == "<="
                else value == bound
            )
            verdict = f"   (wanted {sign} {bound:g}: {'met' if met else 'NOT MET'})"
        print(f"  {figure:28} {value:12.4g}{verdict}")
    print(f"{name}: cases (median, spread)")
    for case in outcome.cases:
        print(f"  {_case_line(case)}")
    for note in outcome.notes:
        print(f"  note: {note}")


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

    def targets(outcome: Outcome) -> dict[str, list]:
        wanted = workload.get("targets", {}).items()
        return {k: [sign, outcome.bounds.get(k, bound)] for k, (sign, bound) in wanted}

    def result(outcome: Outcome) -> dict[str, Any]:
        return {
            "bench": name,
            "mode": mode,
            "seed": seed,
            "seconds": time.monotonic() - start,
            "commit": commit(),
            "machine": machine(),
            "workload": {**workload, "targets": targets(outcome)},
            "figures": outcome.figures,
            "cases": [case.to_json() for case in outcome.cases],
            "notes": outcome.notes,
        }

    def save(outcome: Outcome) -> None:
        if json_file:
            _write(json_file, result(outcome))

    try:
        outcome = module.run(Context(workload, mode, scratch, seed, say, save))
    finally:
        if not keep:
            shutil.rmtree(scratch, ignore_errors=True)
    if tty:
        print("\033[K", end="", file=sys.stderr)
    _print_table(name, outcome, targets(outcome))
    return result(outcome)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="forebay bench",
        description="Measures Forebay and its rivals in one run, interleaved. Ratios carry over "
        "between machines, single times do not.",
    )
    parser.add_argument("name", choices=(*BENCHES, *GPU_BENCHES, "all"), help="which bench")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="smaller: to see that it works")
    size.add_argument("--full", action="store_true", help="larger: every rival, more repetitions")
    parser.add_argument("--json", metavar="FILE", help="write figures and cases to FILE")
    parser.add_argument("--seed", type=int, default=1, help="seed of data and orders (default 1)")
    parser.add_argument(
        "--busy", type=int, metavar="N", help="tiers: measure beside N busy loops (default 4), too"
    )
    parser.add_argument("--keep", action="store_true", help="keep the data that was made")
    args = parser.parse_args(argv)
    # PyTorch warns of more workers than cores; on slow storage that is the point.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    mode = "quick" if args.quick else "full" if args.full else "default"
    names = BENCHES if args.name == "all" else (args.name,)
    single = args.json if len(names) == 1 else None
    results = [run_one(name, mode, args.seed, args.keep, single, args.busy) for name in names]
    if args.json:
        merged = results[0] if len(results) == 1 else {
            "bench": "all",
            **{key: results[0][key] for key in ("mode", "seed", "commit", "machine")},
            "figures": {k: v for r in results for k, v in r["figures"].items()},
            "cases": [c for r in results for c in r["cases"]],
            "benches": results,
        }  # fmt: skip
        _write(args.json, merged)
        print(f"\nwritten to {args.json}")
    return 0
