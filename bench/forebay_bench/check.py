"""`make bench-check`: eight benches in their shortest form, against bounds that a busy machine
meets and that a lost factor does not.

python -m forebay_bench.check                       all of check.json
python -m forebay_bench.check epoch --junit FILE    one of them, with a report

check.json says for each bench how short it is, what it needs, and for each figure the sign, the
bound, and what is typical on two cores. A figure that misses its bound is measured once more: it
fails when it misses twice. So does a bench that cannot run; one that lacks what it needs is
reported as skipped, which fails in `make test` unless tests/expected_suites.txt allows it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forebay_testing import Cluster, SlowFs

from .measure import is_met
from .run import _read

_LIMIT_S = 200.0
_END_S = 30.0

NEEDS: dict[str, Callable[[], tuple[bool, str]]] = {
    "fuse": SlowFs.available,
    "cluster": Cluster.available,
}


@dataclass
class Finding:
    """Of one figure, or of a bench that gave none."""

    name: str
    outcome: str  # passed, failed, skipped
    message: str
    seconds: float = 0.0


def measure(name: str) -> tuple[dict[str, float], str]:
    """The figures of a run in a process of its own; none, and why, when it failed."""
    with tempfile.TemporaryDirectory(prefix="forebay-check-") as folder:
        file = os.path.join(folder, "out.json")
        command = [sys.executable, "-m", "forebay.cli", "bench", name, "--check", "--json", file]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace",
        )  # fmt: skip
        why = ""
        try:
            said, _ = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            why = f"it has not ended in {_LIMIT_S:.0f} s; "
            process.terminate()  # which it takes as an order to clean up
            try:
                said, _ = process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                said, _ = process.communicate()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        # Exit code 1 is also that of a figure that misses its bound, which is judged here.
        if why or process.returncode not in (0, 1) or not os.path.exists(file):
            last = "\n".join(said.strip().splitlines()[-8:])
            return {}, f"{why}exit code {process.returncode}: {last}"
        with open(file) as out:
            return dict(json.load(out)["figures"]), ""


def judge(
    name: str, about: dict[str, Any], run: Callable[[str], tuple[dict[str, float], str]]
) -> list[Finding]:
    """Every figure of one bench."""
    for need in about.get("needs", []):
        usable, why = NEEDS[need]()
        if not usable:
            return [Finding(f"{name}.runs", "skipped", why)]
    start = time.monotonic()
    figures, why = run(name)
    missed = [f for f, wish in about["bounds"].items() if not _good(figures.get(f), wish)]
    again: dict[str, float] = {}
    if missed:
        again, why = run(name)
    took = time.monotonic() - start
    if missed and not figures and not again:
        return [Finding(f"{name}.runs", "failed", why, took)]
    found = [Finding(f"{name}.runs", "passed", "", took)]
    for figure, wish in about["bounds"].items():
        sign, bound, typical = wish
        seen = [x for x in (figures.get(figure), again.get(figure)) if x is not None]
        text = ", then ".join(f"{x:.4g}" for x in seen) or f"not measured; {why}"
        good = any(_good(x, wish) for x in seen)
        message = f"{text} (wanted {sign} {bound:g}, typical {typical:g})"
        found.append(Finding(f"{name}.{figure}", "passed" if good else "failed", message))
    return found


def _good(value: float | None, wish: Sequence[Any]) -> bool:
    return value is not None and is_met(value, wish[0], wish[1])


def write_junit(path: str, findings: list[Finding]) -> None:
    suite = ET.Element("testsuite", name="bench-check")
    for each in findings:
        case = ET.SubElement(suite, "testcase", name=each.name, time=f"{each.seconds:.1f}")
        if each.outcome != "passed":
            kind = "failure" if each.outcome == "failed" else "skipped"
            ET.SubElement(case, kind, message=each.message)
    ET.ElementTree(suite).write(path, encoding="unicode")


def main(argv: list[str] | None = None) -> int:
    table = _read("check.json")
    parser = argparse.ArgumentParser(prog="python -m forebay_bench.check")
    parser.add_argument("names", nargs="*", help=f"of {', '.join(table)} (default: all)")
    parser.add_argument("--junit", metavar="FILE", help="write a report")
    args = parser.parse_args(argv)
    unknown = [name for name in args.names if name not in table]
    if unknown:
        parser.error(f"no check of {', '.join(unknown)}; there are: {', '.join(table)}")
    findings: list[Finding] = []
    for name in args.names or table:
        found = judge(name, table[name], measure)
        findings += found
        for each in found:
            word = {"passed": "ok", "failed": "FAIL", "skipped": "skip"}[each.outcome]
            print(
                f"  {word:5} {each.name:40} {each.message or f'{each.seconds:.0f} s'}", flush=True
            )
    if args.junit:
        write_junit(args.junit, findings)
    bad = [each.name for each in findings if each.outcome != "passed"]
    if bad:
        print(f"bench-check: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
