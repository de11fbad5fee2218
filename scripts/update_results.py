#!/usr/bin/env python3
"""Makes the tables of figures from the JSON files that `forebay bench NAME --json FILE` wrote.

forebay bench overhead --json docs/results/overhead.json
...
scripts/update_results.py            rewrites them: some in README.md, all in docs/results,
                                     the node simulator's in docs/simulator.md
scripts/update_results.py --check    fails when they differ, or when an old result is not marked

A result is old when the folders that its bench names (bench/forebay_bench/benches.json), and the
bench itself, have had more than 40 commits since the one it was measured on, or when its tree had
changes, or when that commit is nowhere in the history. Without git there is no age, and the marks
stay as they are. In a shallow clone that does not reach back far enough the check fails and says
how to get the rest; FOREBAY_RESULTS_AGE=unchecked leaves the age out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results -->", "<!-- /results -->"
SIGNS = {">=": "≥", "<=": "≤", "=": "="}
OLD = "*old*"
MOST_COMMITS = 40


Table = Callable[["list[Bench]", "dict[str, str]"], str]


class NoHistoryError(Exception):
    """The age of a result cannot be known here."""


@dataclass
class Bench:
    name: str
    folders: list[str]
    front: dict[str, str]
    result: dict[str, Any] | None

    def paths(self) -> list[str]:
        """What a change of makes its result older: the bench itself, too."""
        own = f"bench/forebay_bench/{self.name}"
        return [*self.folders, f"{own}*.py", f"bench/forebay_bench/workloads/{self.name}.json"]


def load(root: Path) -> list[Bench]:
    registry = json.loads((root / "bench/forebay_bench/benches.json").read_text(encoding="utf-8"))
    benches = []
    for name, about in registry.items():
        file = root / "docs/results" / f"{name}.json"
        result = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
        benches.append(Bench(name, about["folders"], about.get("front", {}), result))
    return benches


# ---- age


def git(root: Path, *arguments: str) -> str | None:
    """None: it failed."""
    command = ["git", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def has_history(root: Path) -> bool:
    top = git(root, "rev-parse", "--show-toplevel")
    return top is not None and Path(top).resolve() == root.resolve()


def why_old(root: Path, bench: Bench) -> str:
    """Empty: it is not. NoHistoryError: nobody can tell."""
    assert bench.result is not None
    commit = bench.result["commit"]
    if commit.endswith("+"):
        return "the tree had changes when it was measured"
    if git(root, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}") is not None:
        count = int(git(root, "rev-list", "--count", f"{commit}..HEAD", "--", *bench.paths()) or 0)
        return f"{count} commits since {commit[:10]}" if count > MOST_COMMITS else ""
    if git(root, "rev-parse", "--is-shallow-repository") != "true":
        return f"{commit[:10]} is not in the history"
    if int(git(root, "rev-list", "--count", "HEAD", "--", *bench.paths()) or 0) > MOST_COMMITS + 1:
        return f"more than {MOST_COMMITS} commits since {commit[:10]}"
    raise NoHistoryError(
        f"this clone is shallow and does not reach {commit[:10]}, on which {bench.name} was "
        "measured: git fetch --unshallow (or FOREBAY_RESULTS_AGE=unchecked)"
    )


# ---- tables


def shown(value: float | None) -> str:
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1000:
        return f"{value:.0f}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 10 else f"{value:.3f}"


def wanted(sign: str, bound: float | None) -> str:
    if bound is None:
        return ""
    return f"{SIGNS[sign]} " + (f"{bound:.2g}" if 0 < bound < 0.01 else f"{bound:,}")


def is_met(value: float, sign: str, bound: float | None) -> bool:
    if bound is None:
        return True
    return value >= bound if sign == ">=" else value <= bound if sign == "<=" else value == bound


def cells(bench: Bench, figure: str, old: bool) -> str:
    """Wanted, median, worst."""
    result = bench.result
    sign, bound = (result or {"workload": {"targets": {}}})["workload"]["targets"].get(
        figure, (">=", None)
    )
    value = result["figures"].get(figure) if result else None
    if result is None or value is None:
        return f"{wanted(sign, bound)} | not measured | -"
    mark = "" if is_met(value, sign, bound) else " (falls short)"
    mark += f" {OLD}" if old else ""
    worst = result.get("worst", {}).get(figure)
    return f"{wanted(sign, bound)} | {shown(value)}{mark} | {shown(worst)}"


def front_table(benches: list[Bench], old: dict[str, str]) -> str:
    rows = ["| | figure | wanted | median | worst |", "|---|---|---|---|---|"]
    for bench in benches:
        for figure, words in bench.front.items():
            rows.append(f"| {words} | `{figure}` | {cells(bench, figure, bool(old[bench.name]))} |")
    return "\n".join(rows)


def full_tables(benches: list[Bench], old: dict[str, str]) -> str:
    parts = []
    for bench in benches:
        parts.append(f"## {bench.name}\n")
        if bench.result is None:
            parts.append("Not measured.\n")
            continue
        result = bench.result
        is_old = bool(old[bench.name])
        machine = result["machine"]
        parts.append(
            f"Commit {result['commit'][:10]}{'+' if result['commit'].endswith('+') else ''}"
            f"{' ' + OLD if is_old else ''}, {machine['cores']} cores ({machine['cpu']}), load "
            f"{machine['load_1min']:.1f}, {result['seconds']:.0f} s, mode {result['mode']}: "
            f"[{bench.name}.json]({bench.name}.json)\n"
        )
        parts.append("| figure | wanted | median | worst |\n|---|---|---|---|")
        for figure in result["workload"]["targets"]:
            parts.append(f"| `{figure}` | {cells(bench, figure, is_old)} |")
        parts.append("")
    return "\n".join(parts).rstrip()


def simulator_table(benches: list[Bench], old: dict[str, str]) -> str:
    """Of each set-up of bench simulator."""
    what = "simulated / measured: "
    rows = ["| set-up | simulated / measured |", "|---|---|"]
    for bench in benches:
        if bench.name == "simulator" and bench.result is not None:
            mark = f" {OLD}" if old[bench.name] else ""
            rows += [
                f"| {case['name'].removeprefix(what)} | {case['value']:.3f}{mark} |"
                for case in bench.result["cases"]
                if case["name"].startswith(what)
            ]
    return "\n".join(rows)


def between(text: str, table: str) -> str:
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start] + "\n" + table + "\n" + text[stop:]


# ---- what is wrong


def strays(root: Path, benches: list[Bench]) -> list[str]:
    """One JSON a bench, and none of a run that was not the whole of it."""
    names = {bench.name for bench in benches}
    found = []
    for file in sorted((root / "docs/results").glob("*.json")):
        bench = json.loads(file.read_text(encoding="utf-8")).get("bench")
        if bench is not None and (file.stem not in names or bench != file.stem):
            found.append(f"docs/results/{file.name}: a result of {bench}; one file a bench")
    for bench in benches:
        if bench.result is None:
            found.append(
                f"docs/results/{bench.name}.json is missing: forebay bench {bench.name} "
                f"--json docs/results/{bench.name}.json"
            )
        elif bench.result["mode"] in ("quick", "check"):
            found.append(f"docs/results/{bench.name}.json: a {bench.result['mode']} run")
    return found


def differences(
    name: str, table: Table, is_now: str, should: str, benches: list[Bench], old: dict[str, str]
) -> list[str]:
    if is_now == should:
        return []
    lines = set(is_now.splitlines())
    found = []
    for bench in benches:
        marked = [line for line in table([bench], old).splitlines() if OLD in line]
        if any(line not in lines for line in marked):
            found.append(
                f"{name}: the result of {bench.name} is old ({old[bench.name]}) and not marked so"
            )
    missing = [line for line in should.splitlines() if line not in lines]
    found += [f"{name}: not as docs/results says: {line.strip()}" for line in missing[:8]]
    return [*found, f"{name} is not as docs/results says: scripts/update_results.py rewrites it"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail when different")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    args = parser.parse_args(argv)
    root: Path = args.root
    benches = load(root)
    problems = strays(root, benches)
    pages: dict[str, Table] = {"README.md": front_table, "docs/results/README.md": full_tables}
    if (root / "docs/simulator.md").exists():
        pages["docs/simulator.md"] = simulator_table
    texts = {name: (root / name).read_text(encoding="utf-8") for name in pages}

    old: dict[str, str] = {bench.name: "" for bench in benches}
    judged = has_history(root) and os.environ.get("FOREBAY_RESULTS_AGE") != "unchecked"
    if judged:
        for bench in benches:
            if bench.result is not None:
                try:
                    old[bench.name] = why_old(root, bench)
                except NoHistoryError as error:
                    problems.append(str(error))
                    judged = False
                    break
    if not judged:
        print("the age of results is not judged here: no history; their marks stay as they are")
        full = texts["docs/results/README.md"]
        for bench in benches:
            section = full.partition(f"## {bench.name}\n")[2].partition("\n## ")[0]
            old[bench.name] = "marked so" if OLD in section else ""

    for name, table in pages.items():
        should = between(texts[name], table(benches, old))
        if args.check:
            problems += differences(name, table, texts[name], should, benches, old)
        else:
            (root / name).write_text(should, encoding="utf-8")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
