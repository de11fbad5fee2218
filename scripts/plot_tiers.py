#!/usr/bin/env python3
"""Draws docs/results/tiers.png from docs/results/tiers.json: time of all epochs by size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"


def main() -> None:
    data = json.loads((RESULTS / "tiers.json").read_text())
    cases = [c for c in data["cases"] if re.match(r"\d+ epochs, tiers", c["name"])]
    epochs = cases[0]["name"].split()[0]
    sizes = [c["name"].split("tiers ")[1] for c in cases]
    rows = {"limit": [c["limit"] for c in cases], "Forebay": [c["value"] for c in cases]}
    for case in cases:
        for name, value in case["rivals"].items():
            rows.setdefault(name, []).append(value)
    colours = ["#9aa5b1", "#1f77b4", "#d98b5f", "#c9ad6a"]
    figure, axes = plt.subplots(figsize=(8.2, 3))
    width = 0.8 / len(rows)
    for i, (name, values) in enumerate(rows.items()):
        places = [k + (i - (len(rows) - 1) / 2) * width for k in range(len(sizes))]
        axes.bar(places, values, width, label=name, color=colours[i % len(colours)])
    axes.set_xticks(range(len(sizes)), sizes)
    axes.set_xlabel("memory and local disk together, as a share of the data set")
    axes.set_ylabel(f"{epochs} epochs, s")
    axes.set_title(
        "Tiers that hold a part of the data, 2 cores, emulated slow storage", fontsize=10
    )
    axes.legend(fontsize=8, frameon=False, ncols=len(rows), loc="upper center",
                bbox_to_anchor=(0.5, -0.22))  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(RESULTS / "tiers.png", dpi=110)
    print(f"written: {RESULTS / 'tiers.png'}")


if __name__ == "__main__":
    main()
