#!/usr/bin/env python3
"""Reads the test reports and fails when a test that should have run did not.

    check_ran.py build/reports cpp-dev cpp-asan-ubsan cpp-tsan pytest-rest
    check_ran.py build/reports cpp-dev pytest-rest --update

A test that was skipped and may not be (no may-skip line names it) is a failure;
FOREBAY_STRICT_SKIPS=0 lets it pass, on a machine that lacks something. A test that failed and then
passed alone (again-NAME.xml beside NAME.xml, scripts/second_try.py) is named as unsteady; more than
SECOND_TRIES of them in all reports are a failure.

Each name is a JUnit file in the folder. tests/expected_suites.txt says what must have run; --update
adds the suites found in the reports to it (removing one is done by hand: it is a decision).
The last line printed is "N passed, N failed, N skipped", counted over all reports.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXPECTED = ROOT / "tests" / "expected_suites.txt"
SECOND_TRIES = 3  # in all reports together


@dataclass
class Case:
    suite: str
    name: str
    outcome: str  # passed, failed, skipped, not run
    message: str = ""
    output: str = ""  # of one that failed


@dataclass
class Expected:
    minimum: dict[str, int] = field(default_factory=dict)
    suites: list[tuple[str, str, list[str]]] = field(default_factory=list)  # kind, suite, presets
    may_skip: list[str] = field(default_factory=list)


def read_expected(path: Path) -> Expected:
    expected = Expected()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        if words[0] == "minimum" and len(words) == 3:
            expected.minimum[words[1]] = int(words[2])
        elif words[0] in ("cpp", "pytest", "bench") and len(words) in (2, 3):
            presets = words[2].split(",") if len(words) == 3 else []
            expected.suites.append((words[0], words[1], presets))
        elif words[0] == "may-skip" and len(words) == 2:
            expected.may_skip.append(words[1])
        else:
            sys.exit(f"{path}:{number}: not understood: {line}")
    return expected


def read_report(path: Path, kind: str) -> list[Case]:
    # ctest copies a test's output as it is: control characters are no XML.
    text = path.read_text(encoding="utf-8", errors="replace")
    text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]", "?", text)
    cases = []
    for node in ET.fromstring(text).iter("testcase"):
        name = node.get("name", "?")
        if kind in ("cpp", "bench"):
            suite = name.split(".")[0]
        else:
            suite = node.get("file") or node.get("classname", "?").replace(".", "/") + ".py"
            name = f"{suite}::{name}"
        skipped = node.find("skipped")
        status = node.get("status", "run")
        message = ""
        if node.find("failure") is not None or node.find("error") is not None or status == "fail":
            outcome = "failed"
        elif status == "disabled":
            outcome, message = "skipped", "disabled"
        elif skipped is not None:
            message = skipped.get("message", "")
            # ctest says "Unable to find executable" and the like for a test it could not start.
            not_run = kind == "cpp" and not message.startswith("SKIP_")
            outcome = "not run" if not_run else "skipped"
            if message.startswith("SKIP_"):
                output = node.findtext("system-out") or ""
                said = re.search(r"Skipped\n(.*)", output)
                message = said.group(1).strip() if said else ""
        elif status == "notrun":
            outcome = "not run"
        else:
            outcome = "passed"
        output = "".join(node.itertext()) + message if outcome in ("failed", "not run") else ""
        for said in (node.find("failure"), node.find("error")):
            output += (said.get("message") or "") if said is not None else ""
        cases.append(Case(suite, name, outcome, message, output))
    return cases


def passed_alone(folder: Path, name: str, cases: list[Case]) -> list[str]:
    """Takes those that passed at the second try as passed; returns their names."""
    path = folder / f"again-{name}.xml"
    if not path.exists():
        return []
    again = {c.name: c.outcome for c in read_report(path, name.split("-")[0])}
    unsteady = [c for c in cases if c.outcome == "failed" and again.get(c.name) == "passed"]
    for case in unsteady:
        case.outcome = "passed"
    return [f"{name}: {case.name}" for case in unsteady]


def suites_in_sources() -> dict[str, str]:
    """The suites written in src/, each with its file."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "src").rglob("*_test.cc")):
        text = path.read_text(encoding="utf-8")
        for suite in re.findall(r"^\s*(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)\s*,", text, re.M):
            found.setdefault(suite, path.relative_to(ROOT).as_posix())
    return found


def update(path: Path, reports: dict[str, list[Case]]) -> None:
    known = {(kind, suite) for kind, suite, _ in read_expected(path).suites}
    ran = {
        (report.split("-")[0], case.suite)
        for report, cases in reports.items()
        for case in cases
        if case.outcome in ("passed", "failed")
    }
    new = sorted(ran - known)
    with path.open("a", encoding="utf-8") as out:
        out.writelines(f"{kind} {suite}\n" for kind, suite in new)
    print(f"{path.relative_to(ROOT)}: {len(new)} suites added")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("reports", nargs="*")
    parser.add_argument("--failed", default="", help="phases that failed, to be named")
    parser.add_argument("--expected", type=Path, default=EXPECTED)
    parser.add_argument("--update", action="store_true")
    args = parser.parse_args()

    expected = read_expected(args.expected)
    problems = [f"phase {name} failed" for name in args.failed.split()]
    reports: dict[str, list[Case]] = {}
    for name in args.reports:
        path = args.folder / f"{name}.xml"
        try:
            reports[name] = read_report(path, name.split("-")[0])
        except FileNotFoundError:
            reports[name] = []
            problems.append(f"{name}: no report, so no test ran")
        except ET.ParseError as error:
            reports[name] = []
            problems.append(f"{name}: the report cannot be read: {error}")
    if args.update:
        update(args.expected, reports)
        return 0

    unsteady: list[str] = []
    for name, cases in reports.items():
        unsteady += passed_alone(args.folder, name, cases)
    if len(unsteady) > SECOND_TRIES:
        problems.append(f"{len(unsteady)} tests passed only at their second try")
    totals = dict.fromkeys(("passed", "failed", "skipped", "not run"), 0)
    skips = []
    unlisted = set()
    print("==> test: reports")
    for name, cases in reports.items():
        kind, _, preset = name.partition("-")
        count = {key: sum(c.outcome == key for c in cases) for key in totals}
        for key in totals:
            totals[key] += count[key]
        print(f"  {name:15} " + ", ".join(f"{n} {key}" for key, n in count.items()))
        executed = {c.suite for c in cases if c.outcome in ("passed", "failed")}
        for case in cases:
            if case.outcome == "failed":
                problems.append(f"{name}: {case.name} failed")
            elif case.outcome == "not run":
                problems.append(f"{name}: {case.name} did not run ({case.message})")
            elif case.outcome == "skipped":
                if not any(fnmatch.fnmatchcase(case.name, p) for p in expected.may_skip):
                    skips.append(f"{name}: {case.name} {case.message}".rstrip())
        if not cases:
            continue
        ran = count["passed"] + count["failed"]
        least = max(1, expected.minimum.get(kind, 1))
        if ran < least:
            problems.append(f"{name}: {ran} tests ran, at least {least} must")
        listed = set()
        for want_kind, suite, presets in expected.suites:
            if want_kind == kind and (not presets or preset in presets):
                listed.add(suite)
                if suite not in executed:
                    problems.append(f"{name}: no test of {suite} ran")
            elif want_kind == kind:
                listed.add(suite)
        unlisted |= executed - listed
        if kind == "pytest":
            for path in sorted((ROOT / "tests").rglob("test_*.py")):
                file = path.relative_to(ROOT).as_posix()
                if file not in executed and file not in listed:
                    problems.append(f"{name}: no test of {file} ran")
        elif preset == "dev":
            parts = {part for case in cases for part in case.suite.split("/")}
            for suite, file in suites_in_sources().items():
                if suite not in parts:
                    problems.append(f"{name}: {suite} of {file} is in no test program")

    if skips:
        print(f"\n*** {len(skips)} UNEXPECTED SKIPS (allow one with a may-skip line):")
        for skip in skips:
            print(f"  SKIPPED  {skip}")
        if os.environ.get("FOREBAY_STRICT_SKIPS") == "0":
            print("  they are let pass: FOREBAY_STRICT_SKIPS=0")
        else:
            problems.append(f"{len(skips)} unexpected skips")
    if unsteady:
        print(f"\n*** {len(unsteady)} UNSTEADY: failed beside others, passed alone. Each is a bug:")
        for test in unsteady:
            print(f"  UNSTEADY  {test}")
    if unlisted:
        print("\nnot yet in tests/expected_suites.txt (check_ran.py --update adds them):")
        print("  " + " ".join(sorted(unlisted)))
    if problems:
        print("\nwhat is wrong:")
        for problem in problems:
            print(f"  {problem}")
    failed = totals["failed"] + totals["not run"]
    if problems and failed == 0:
        failed = len(problems)
    print(f"\n{totals['passed']} passed, {failed} failed, {totals['skipped']} skipped", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
