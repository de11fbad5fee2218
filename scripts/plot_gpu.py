#!/usr/bin/env python3
"""Draws docs/results/gpu.png from docs/results/gpu.json: images/s of each loader, and of none."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
PREFIX = "ResNet-50, "
COLOURS = {"no I/O": "#9aa5b1", "Forebay": "#1f77b4"}


def main() -> None:
    data = json.loads((RESULTS / "gpu.json").read_text())
    cases = [c for c in data["cases"] if c["name"].startswith(PREFIX)]
    cases.sort(key=lambda c: c["value"])
    names = [c["name"].removeprefix(PREFIX) for c in cases]
    figure, axes = plt.subplots(figsize=(8.2, 2.4))
    bars = axes.barh(
        names, [c["value"] for c in cases], color=[COLOURS.get(n, "#d98b5f") for n in names]
    )
    for case, bar in zip(cases, bars, strict=True):
        low, high = min(case["values"]), max(case["values"])
        middle = bar.get_y() + bar.get_height() / 2
        axes.plot([low, high], [middle, middle], color="black", linewidth=1)
        axes.annotate(f"{case['value']:,.0f}", (high, middle), (6, 0), va="center",
                      textcoords="offset points", fontsize=9)  # fmt: skip
    axes.set_xlabel("images/s; lines from the lowest to the highest round")
    axes.set_title("Training ResNet-50 on one H200, 16 cores, JPEGs in the page cache", fontsize=10)
    axes.set_xlim(0, max(max(c["values"]) for c in cases) * 1.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(RESULTS / "gpu.png", dpi=110)
    print(f"written: {RESULTS / 'gpu.png'}")


if __name__ == "__main__":
    main()
