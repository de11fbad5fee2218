#!/usr/bin/env python3
"""Checks the order of folders in src/, the purity of the core, and a few forbidden calls.

Each folder may include only itself and the folders before it in ORDER. The pure files decide and do
nothing else: no clock, thread, file or randomness of the system, so that the engine and both
simulators run the same code. Nothing in src/ ends the process: it may be somebody's training.

    check_includes.py              check the repository
    check_includes.py --self-test  prove that each rule catches a violation
"""

from __future__ import annotations

import fnmatch
import re
import sys
import tempfile
from pathlib import Path

ORDER = (
    "base metrics io catalog plan source tier transport decode cuda tune stage pipeline control"
    " peer wire files mount client sim daemon posix capi tools"
).split()

PURE = [
    "plan/*",
    "stage/scheduler.*",
    "stage/allocator.*",
    "tune/*",
    "source/storage_model.*",
    "control/division.*",
    "control/fair_share.*",
    "control/json.*",
    "control/policy*",
    "control/capacity.*",
    "peer/directory.*",
]
IMPURE_HEADERS = {
    "atomic",
    "chrono",
    "condition_variable",
    "ctime",
    "fcntl.h",
    "fstream",
    "mutex",
    "random",
    "thread",
    "time.h",
    "unistd.h",
}
# base/clock.h defines both the clock and the type Nanos; these files need the type.
CLOCK_ALLOWED = [
    "control/capacity.*",
    "plan/cost_model.*",
    "plan/rate_limit.*",
    "source/storage_model.*",
]

FORBIDDEN_CALLS = [
    (re.compile(r"(?<![\w.>])(?:std::|::)?(?:exit|quick_exit|abort)\s*\("), "ends the process"),
    (re.compile(r"\bstd::s?rand\b|(?<![\w.>:])s?rand\s*\("), "randomness comes from base/rng.h"),
]

INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.M)
LITERAL_OR_COMMENT = re.compile(
    r"""(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)"""
    r"""|(?P<raw>\bR"(?P<tag>[^()\s]{0,16})\(.*?\)(?P=tag)")"""
    r"""|(?P<include>^[ \t]*\#[ \t]*include[^\n]*)"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*")"""
    r"""|(?P<char>(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])+')""",
    re.S | re.M,
)


def strip(text: str) -> str:
    """The code with comments and literals blanked; lines keep their numbers."""

    def blank(match: re.Match[str]) -> str:
        if match.group("include"):
            return match.group(0)
        return re.sub(r"[^\n]", " ", match.group(0))

    return LITERAL_OR_COMMENT.sub(blank, text)


def matches(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def check_file(path: Path, src: Path) -> list[str]:
    name = path.relative_to(src).as_posix()
    folder = name.split("/")[0]
    is_test = path.stem.endswith("_test")
    pure = matches(name, PURE) and not is_test
    code = strip(path.read_text(encoding="utf-8"))
    errors = []

    def report(at: int, what: str) -> None:
        errors.append(f"src/{name}:{code.count(chr(10), 0, at) + 1}: {what}")

    for match in INCLUDE.finditer(code):
        ours, system = match.groups()
        if system:
            if pure and (system in IMPURE_HEADERS or system.startswith("sys/")):
                report(match.start(1 if ours else 2), f"<{system}> in a pure file")
            continue
        at = match.start(1)
        head = ours.split("/")[0]
        if "/" not in ours:
            report(at, f'"{ours}": write includes from src/, such as "{folder}/{ours}"')
        elif head in ORDER:
            if ORDER.index(head) > ORDER.index(folder):
                report(at, f'"{ours}": {folder}/ comes before {head}/ and may not include it')
            if ours == "base/clock.h" and pure and not matches(name, CLOCK_ALLOWED):
                report(at, '"base/clock.h" in a pure file')
        elif head != "forebay":
            report(at, f'"{ours}": {head}/ is no folder of src/')
    for pattern, why in FORBIDDEN_CALLS:
        for match in pattern.finditer(code):
            report(match.start(), f"{match.group(0).strip()}: {why}")
    return errors


def check(root: Path) -> tuple[list[str], int]:
    src = root / "src"
    errors = []
    count = 0
    for folder in sorted(p for p in src.iterdir() if p.is_dir()):
        if folder.name not in ORDER:
            errors.append(f"src/{folder.name}: not in the order of folders: {' '.join(ORDER)}")
            continue
        for path in sorted(folder.rglob("*")):
            if path.suffix in {".cc", ".h", ".c", ".inc"}:
                count += 1
                errors += check_file(path, src)
    return errors, count


# (file, code, what the error must say; None: there must be none)
CASES = [
    ("base/a.h", '#include "io/loop.h"\n', "may not include"),
    ("stage/a.cc", '#include "control/policy.h"\n', "may not include"),
    ("stage/a.cc", '#include "plan/p.h"\n#include <thread>\n', None),
    ("stage/a_test.cc", '#include "client/c.h"\n', "may not include"),
    ("io/a.cc", '#include "loop.h"\n', "write includes from src/"),
    ("io/a.cc", '#include "helpers/x.h"\n', "no folder of src/"),
    ("capi/a.cc", '#include "forebay/forebay.h"\n', None),
    ("plan/a.cc", "#include <mutex>\n", "pure file"),
    ("plan/a.cc", "  #  include <sys/mman.h>\n", "pure file"),
    ("plan/a_test.cc", "#include <random>\n", None),
    ("plan/a.h", '#include "base/clock.h"\n', "pure file"),
    ("source/storage_model.h", '#include "base/clock.h"\n', None),
    ("source/storage_model.cc", "#include <chrono>\n", "pure file"),
    ("stage/scheduler.cc", "#include <atomic>\n", "pure file"),
    ("tune/tuner.h", "#include <ctime>\n", "pure file"),
    ("control/policy_prisma.cc", "#include <fstream>\n", "pure file"),
    ("base/a.cc", "void f() {\n  exit(1);\n}\n", "src/base/a.cc:2: exit("),
    ("base/a.cc", "void f() { std::abort(); }\n", "ends the process"),
    ("base/a.cc", "int f() { return std::rand(); }\n", "base/rng.h"),
    ("base/a.cc", '// exit(1)\n/* abort() */ auto s = "exit(1)";\n', None),
    ("base/a.cc", "auto n = 1'000; void f() { abort(); } char c = 'x';\n", "ends the process"),
    ("base/a.cc", "void f() { _exit(1); x.abort(); atexit(f); on_exit(f); }\n", None),
    ("base/a.cc", 'auto s = R"(\n#include "io/x.h"\n)";\n', None),
    ("misc/a.cc", "\n", "not in the order"),
]


def self_test() -> int:
    failed = 0
    for name, code, expected in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "src" / name
            path.parent.mkdir(parents=True)
            path.write_text(code, encoding="utf-8")
            errors, _ = check(Path(folder))
        good = not errors if expected is None else any(expected in e for e in errors)
        if not good:
            failed += 1
            print(f"self-test: {name}: {code!r}: expected {expected!r}, got {errors}")
    print(f"check_includes self-test: {len(CASES) - failed} of {len(CASES)} cases as expected")
    return 1 if failed else 0


def main() -> int:
    if sys.argv[1:] == ["--self-test"]:
        return self_test()
    if sys.argv[1:]:
        print(__doc__, file=sys.stderr)
        return 2
    errors, count = check(Path(__file__).resolve().parent.parent)
    for error in errors:
        print(error)
    if count == 0:
        print("src/ has no file to check")
        return 1
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
