#!/usr/bin/env python3
"""Fills README's table of figures from the JSON files that `forebay bench NAME --json FILE` wrote.

forebay bench overhead --json docs/results/overhead.json
...
scripts/update_results.py          reads docs/results/*.json, rewrites the table between the markers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results -->", "<!-- /results -->"
SIGNS = {">=": "≥", "<=": "≤", "=": "="}


def shown(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return f"{value:.0f}"
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.3g}"
        if abs(value) >= 10
        else f"{value:.3f}"
    )


def main() -> int:
    rows = ["| figure | wanted | measured |", "|---|---|---|"]
    seen = []
    shown_before = set()
    for name in (
        "overhead",
        "epoch",
        "accelerate",
        "budget",
        "decode",
        "gpu",
        "accuracy",
        "placement",
        "plan",
        "simulator",
        "tiers",
        "drift",
        "tune",
        "control",
        "jobs",
        "fairness",
        "transparent",
        "peers",
    ):
        file = ROOT / "docs" / "results" / f"{name}.json"
        if not file.exists():
            print(f"{file} is missing: run forebay bench {name} --json {file}", file=sys.stderr)
            return 1
        result = json.loads(file.read_text())
        seen.append(f"`{name}` {result['commit'][:10]}")
        for figure, (sign, bound) in result["workload"]["targets"].items():
            value = result["figures"].get(figure)
            # Two benches may have a figure of one name.
            label = f"`{figure}` ({name})" if figure in shown_before else f"`{figure}`"
            shown_before.add(figure)
            if value is None:
                rows.append(f"| {label} | {SIGNS[sign]} {bound} | not measured |")
                continue
            met = (
                value >= bound
                if sign == ">="
                else value <= bound
                if sign == "<="
                else value == bound
            )
            mark = "" if met else " (falls short)"
            wanted = f"{bound:.2g}" if 0 < bound < 0.01 else f"{bound:,}"
            rows.append(f"| {label} | {SIGNS[sign]} {wanted} | {shown(value)}{mark} |")
    rows += [
        "",
        f"Commits measured: {', '.join(seen)}; every value with its spread is in "
        f"[docs/results](docs/results).",
    ]
    readme = ROOT / "README.md"
    text = readme.read_text()
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    readme.write_text(text[:start] + "\n" + "\n".join(rows) + "\n" + text[stop:])
    return 0


if __name__ == "__main__":
    sys.exit(main())
