#!/usr/bin/env python3
"""Checks the order of folders in src/, the purity of the core, and a few forbidden calls.

Each folder may include only itself and the folders before it in ORDER. The pure files decide and do
nothing else: no clock, thread, file or randomness of the system, so that the engine and both
simulators run the same code. Nothing in src/ ends the process: it may be somebody's training. What
is not shown to the thread sanitizer (SEQUENTIAL in src/CMakeLists.txt) has no threads.

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
    "base metrics io catalog core source tier transport decode cuda stage control"
    " peer wire files mount port pipeline sim daemon posix capi tools"
).split()

# Pure by folder, and what others keep pure beside it.
PURE = ["core/*", "base/json.*"]
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
# What the core may not be given from outside.
HOOK = re.compile(r"\bstd::function\b")

FORBIDDEN_CALLS = [
    (re.compile(r"(?<![\w.>])(?:std::|::)?(?:exit|quick_exit|abort)\s*\("), "ends the process"),
    (re.compile(r"\bstd::s?rand\b|(?<![\w.>:])s?rand\s*\("), "randomness comes from base/rng.h"),
]

SEQUENTIAL = re.compile(r'forebay_folder\((\w+)[^)]*?SEQUENTIAL "([^"]+)"')
THREADS = {"atomic", "condition_variable", "future", "mutex", "shared_mutex", "thread"}

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


def sequential_tests(src: Path) -> dict[str, re.Pattern[str]]:
    """By folder: the names of tests that the thread sanitizer does not see."""
    path = src / "CMakeLists.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return {folder: re.compile(names) for folder, names in SEQUENTIAL.findall(text)}


def check_file(path: Path, src: Path, sequential: dict[str, re.Pattern[str]]) -> list[str]:
    name = path.relative_to(src).as_posix()
    folder = name.split("/")[0]
    is_test = path.stem.endswith("_test")
    pure = matches(name, PURE) and not is_test
    code = strip(path.read_text(encoding="utf-8"))
    unseen = folder in sequential and sequential[folder].fullmatch(
        path.stem if is_test else f"{path.stem}_test"
    )
    errors = []

    def report(at: int, what: str) -> None:
        errors.append(f"src/{name}:{code.count(chr(10), 0, at) + 1}: {what}")

    for match in INCLUDE.finditer(code):
        ours, system = match.groups()
        if system:
            if unseen and not pure and system in THREADS:
                report(
                    match.start(2), f"<{system}>, but the thread sanitizer does not see its tests"
                )
            if pure and (system in IMPURE_HEADERS or system.startswith("sys/")):
                report(match.start(1 if ours else 2), f"<{system}> in a pure file")
            continue
        at = match.start(1)
        if unseen and ours.startswith("base/thread"):
            report(at, f'"{ours}", but the thread sanitizer does not see its tests')
        head = ours.split("/")[0]
        if "/" not in ours:
            report(at, f'"{ours}": write includes from src/, such as "{folder}/{ours}"')
        elif head in ORDER:
            if ORDER.index(head) > ORDER.index(folder):
                report(at, f'"{ours}": {folder}/ comes before {head}/ and may not include it')
            if ours == "base/clock.h" and pure:
                report(at, '"base/clock.h" in a pure file; the type Nanos is in "base/nanos.h"')
        elif head != "forebay":
            report(at, f'"{ours}": {head}/ is no folder of src/')
    if pure:
        for match in HOOK.finditer(code):
            report(match.start(), "std::function in a pure file: it takes events and data")
    for pattern, why in FORBIDDEN_CALLS:
        for match in pattern.finditer(code):
            report(match.start(), f"{match.group(0).strip()}: {why}")
    return errors


def check(root: Path) -> tuple[list[str], int]:
    src = root / "src"
    errors = []
    count = 0
    sequential = sequential_tests(src)
    for folder in sorted(p for p in src.iterdir() if p.is_dir()):
        if folder.name not in ORDER:
            errors.append(f"src/{folder.name}: not in the order of folders: {' '.join(ORDER)}")
            continue
        for path in sorted(folder.rglob("*")):
            if path.suffix in {".cc", ".h", ".c", ".inc"}:
                count += 1
                errors += check_file(path, src, sequential)
    return errors, count


# (file, code, what the error must say; None: there must be none)
CASES = [
    ("base/a.h", '#include "io/loop.h"\n', "may not include"),
    ("stage/a.cc", '#include "control/store.h"\n', "may not include"),
    ("stage/a.cc", '#include "core/p.h"\n#include <thread>\n', None),
    ("stage/a_test.cc", '#include "port/c.h"\n', "may not include"),
    ("io/a.cc", '#include "loop.h"\n', "write includes from src/"),
    ("io/a.cc", '#include "helpers/x.h"\n', "no folder of src/"),
    ("capi/a.cc", '#include "forebay/forebay.h"\n', None),
    ("core/a.cc", "#include <mutex>\n", "pure file"),
    ("core/a.cc", "  #  include <sys/mman.h>\n", "pure file"),
    ("core/a_test.cc", "#include <random>\n", None),
    ("core/a.h", '#include "base/clock.h"\n', "pure file"),
    ("core/a.h", '#include "base/nanos.h"\n', None),
    ("core/a.h", "std::function<void()> f;\n", "events and data"),
    ("core/residency.h", "std::function<void()> f;\n", "events and data"),
    ("core/a_test.cc", "std::function<void()> f;\n", None),
    ("core/storage_model.cc", "#include <chrono>\n", "pure file"),
    ("core/scheduler.cc", "#include <atomic>\n", "pure file"),
    ("base/json.cc", "#include <fstream>\n", "pure file"),
    ("stage/engine.h", "std::function<void()> f;\n", None),
    ("decode/jpeg.h", "#include <mutex>\n", "thread sanitizer"),
    ("decode/npy_test.cc", '#include "base/thread.h"\n', "thread sanitizer"),
    ("decode/pool.h", "#include <mutex>\n", None),
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
            (Path(folder) / "src" / "CMakeLists.txt").write_text(
                'forebay_folder(decode SEQUENTIAL "(jpeg|npy)_test" DEPENDS base)\n'
            )
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
