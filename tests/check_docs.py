#!/usr/bin/env python3
"""Checks the documents: links lead somewhere, no path of one machine, every metric, folder and
thread is described.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {"build", ".venv", "offline", ".git", "dist", "out", "node_modules"}

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.S | re.M)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*$", re.M)
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|home/\w+)/")
METRIC = re.compile(r'"(forebay_[a-z0-9_]*[a-z0-9])[{"]')
THREAD = re.compile(r'StartThread(?:<[^>]*>)?\(\s*"([a-z-]+)"')
CAUSES = re.compile(r"kStallCauseNames = \{([^}]*)\}")
DESCRIBED = re.compile(r"^\| `(forebay_[a-z0-9_]+)` \| (?:counter|gauge) \|", re.M)


def anchors(text: str) -> set[str]:
    """The anchors that a Markdown page gets from its headings."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-"))
    return found


def check_page(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT)
    errors = []
    prose = FENCE.sub(lambda m: "\n" * m.group(0).count("\n"), text)
    for match in LINK.finditer(prose):
        target = match.group(1)
        if re.match(r"[a-z]+:", target):
            continue
        line = prose.count("\n", 0, match.start()) + 1
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        if not other.exists():
            errors.append(f"{name}:{line}: link to {target}: no such file")
        elif anchor and other.suffix == ".md":
            if anchor not in anchors(other.read_text(encoding="utf-8")):
                errors.append(f"{name}:{line}: link to {target}: no such heading")
    for match in MACHINE_PATH.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        errors.append(f"{name}:{line}: a path of one machine: {match.group(0)}")
    return errors


def check_metrics() -> list[str]:
    used: dict[str, Path] = {}
    for path in sorted((ROOT / "src").rglob("*.[ch]*")):
        if path.suffix in {".cc", ".h"} and not path.stem.endswith("_test"):
            text = path.read_text(encoding="utf-8")
            names = METRIC.findall(text)
            for causes in CAUSES.findall(text):  # the only names that are put together
                names += [
                    f"forebay_stall_{c}_nanoseconds_total" for c in re.findall(r"\w+", causes)
                ]
            for name in names:
                used.setdefault(name, path.relative_to(ROOT))
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    described = DESCRIBED.findall(page)
    errors = [
        f"{path}: metric {name} has no line in docs/metrics.md"
        for name, path in used.items()
        if name not in described
    ]
    errors += [f"docs/metrics.md: {n} is no metric" for n in described if n not in used]
    errors += [f"docs/metrics.md: {n} twice" for n in set(described) if described.count(n) > 1]
    return errors


def check_architecture() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    where = "docs/architecture.md: has no line for the"
    folders = [p.name for p in sorted((ROOT / "src").iterdir()) if p.is_dir()]
    errors = [f"{where} folder {name}/" for name in folders if f"| `{name}/` |" not in page]
    threads = {
        name
        for path in (ROOT / "src").rglob("*.cc")
        if not path.stem.endswith("_test")
        for name in THREAD.findall(path.read_text(encoding="utf-8"))
    }
    errors += [f"{where} thread {n}" for n in sorted(threads) if f"| `{n}`" not in page]
    return errors


def main() -> int:
    errors: list[str] = []
    for page in sorted(ROOT.rglob("*.md")):
        if not SKIPPED & set(page.relative_to(ROOT).parts):
            errors += check_page(page)
    errors += check_metrics()
    errors += check_architecture()
    for error in errors:
        print(error)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
