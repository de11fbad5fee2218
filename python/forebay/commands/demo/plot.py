"""The demo's picture: how long each epoch took, how much of it was waiting, and why."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from .training import Run

_TORCH = "#c8553d"
_FOREBAY = "#1f77b4"
_GREY = "#5f6368"


def draw(
    runs: Sequence[Run], least: float, reasons: Sequence[str], storage: str, file: Path
) -> None:
    """Writes the PNG. `least`: seconds that the storage needs for one epoch's bytes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    plt.rcParams.update({"font.size": 11, "hatch.linewidth": 0.8})
    figure, (times, reads) = plt.subplots(
        1, 2, figsize=(11, 6.4), gridspec_kw={"width_ratios": [4, 3], "wspace": 0.2}
    )
    figure.subplots_adjust(left=0.075, right=0.98, top=0.81, bottom=0.285)
    epochs = len(runs[0].epochs)
    width = 0.36
    # Many epochs leave no room for a number on every bar.
    size = 10 if epochs <= 3 else 8
    numbered = epochs <= 6
    for run, color, side in zip(runs, (_TORCH, _FOREBAY), (-0.5, 0.5), strict=True):
        where = [e + side * (width + 0.03) for e in range(epochs)]
        busy = [e.seconds - e.waited for e in run.epochs]
        waited = [e.waited for e in run.epochs]
        times.bar(where, busy, width, color=color, zorder=2)
        times.bar(where, waited, width, bottom=busy, facecolor="white", edgecolor=color,
                  hatch="////", linewidth=1.0, zorder=2)  # fmt: skip
        for x, epoch in zip(where, run.epochs, strict=True):
            if numbered:
                times.annotate(f"{epoch.seconds:.2f} s", (x, epoch.seconds), xytext=(0, 3),
                               textcoords="offset points", ha="center", va="bottom",
                               fontsize=size)  # fmt: skip
        counts = [e.files_read for e in run.epochs]
        reads.bar(where, counts, width, color=color, zorder=2)
        for x, count in zip(where, counts, strict=True):
            if numbered:
                reads.annotate(f"{count:,}", (x, count), xytext=(0, 3), textcoords="offset points",
                               ha="center", va="bottom", fontsize=size - 1)  # fmt: skip
    for axes in (times, reads):
        axes.set_xticks(
            range(epochs), [f"epoch {e}" if numbered else str(e) for e in range(epochs)]
        )
        axes.tick_params(axis="x", length=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e4e4", zorder=0)
        axes.margins(x=0.06)
    highest = max(least, *(e.seconds for run in runs for e in run.epochs))
    times.set_ylim(0, 1.14 * highest)
    times.axhline(least, color=_GREY, linestyle="--", linewidth=1.2, zorder=3)
    times.set_ylabel("seconds")
    reads.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    times.set_title("Time of an epoch", loc="left", fontsize=12)
    reads.set_ylim(0, 1.14 * max(e.files_read for run in runs for e in run.epochs))
    reads.set_title("Files read from storage", loc="left", fontsize=12)
    key = [
        Patch(facecolor=_TORCH, label=runs[0].name),
        Patch(facecolor=_FOREBAY, label=runs[1].name),
        Patch(facecolor=_GREY, label="training step"),
        Patch(facecolor="white", edgecolor=_GREY, hatch="////", label="waiting for data"),
        Line2D([], [], color=_GREY, linestyle="--", label=f"storage's limit, {least:.2f} s"),
    ]
    figure.legend(handles=key, loc="upper left", bbox_to_anchor=(0.067, 0.915), ncols=5,
                  frameon=False, handlelength=1.6, columnspacing=1.8)  # fmt: skip
    figure.text(0.075, 0.945, _headline(runs), fontsize=15, fontweight="bold", ha="left")
    lines = [line for text in (*reasons, storage) for line in textwrap.wrap(text, 145)]
    figure.text(0.075, 0.025, "\n".join(lines), fontsize=9.5, color=_GREY,
                ha="left", va="bottom", linespacing=1.5)  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _headline(runs: Sequence[Run]) -> str:
    torch, forebay = runs
    first = torch.epochs[0].seconds / forebay.epochs[0].seconds
    said = f"Same training run: first epoch {first:.1f}x as fast"
    if len(torch.epochs) > 1:
        later = sum(e.seconds for e in torch.epochs[1:]) / sum(
            e.seconds for e in forebay.epochs[1:]
        )
        said += f", later epochs {later:.1f}x"
    return said
