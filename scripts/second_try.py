#!/usr/bin/env python3
"""Which failed tests of a report may run once more, alone (docs/decisions/0060-second-try.md).

    second_try.py build/reports cpp-dev        prints one regular expression for ctest -R
    second_try.py build/reports pytest-rest    prints the tests as pytest takes them, one a line

Exit code 1, and nothing printed, where none may: too many failed, one crashed, or a sanitizer has
found something. FOREBAY_SECOND_TRY=0 allows none.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from check_ran import SECOND_TRIES, Case, read_report  # noqa: E402

# What happened once and may not happen: it is not asked whether it happens again.
FINAL = re.compile(
    r"Sanitizer|runtime error:|SEGFAULT|Segmentation fault|SIGSEGV|SIGABRT"
    r"|Subprocess (aborted|killed|terminated)|worker 'gw\d+' crashed|node down|Fatal Python error"
    r"|terminate called"
    r"|(?<![\w.])-(6|11)\b"  # how a child's abort or bad access is told
)


def may_try_again(failed: list[Case]) -> str:
    """Why they may not; empty: they may."""
    if os.environ.get("FOREBAY_SECOND_TRY") == "0":
        return "FOREBAY_SECOND_TRY=0"
    if not failed:
        return "no test failed: something else did"
    if len(failed) > SECOND_TRIES:
        return f"{len(failed)} tests failed, at most {SECOND_TRIES} may run again"
    for case in failed:
        if found := FINAL.search(case.output):
            return f"{case.name}: {found.group()}"
    return ""


def names(failed: list[Case], kind: str) -> str:
    if kind == "cpp":
        return "^(" + "|".join(re.escape(case.name) for case in failed) + ")$"
    return "\n".join(case.name for case in failed)


def main(folder: str, report: str) -> int:
    kind = report.split("-")[0]
    cases = read_report(Path(folder) / f"{report}.xml", kind)
    failed = [case for case in cases if case.outcome in ("failed", "not run")]
    if why := may_try_again(failed):
        print(f"no second try: {why}", file=sys.stderr)
        return 1
    print(names(failed, kind))
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2]))
