"""Timing rules: interleaved repetitions, medians with spread, each beside rivals and limit."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Case:
    """One measured quantity."""

    name: str
    unit: str
    values: list[float]
    limit: float | None = None
    """The physical limit, in the same unit, measured in the same run."""
    limit_name: str | None = None
    rivals: dict[str, float] = field(default_factory=dict)
    note: str = ""

    @property
    def value(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.values) - min(self.values)) / self.value if self.value else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "value": self.value, "spread": self.spread}


@dataclass
class Outcome:
    """What one bench found."""

    figures: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    """Bounds that the run itself measured, such as a spread; they replace the workload's words."""
    cases: list[Case] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    repeats: dict[str, list[float]] = field(default_factory=dict)
    """A figure's value in each repeat; the worst of them is shown beside the figure. One that is
    not here is the worst of all repeats already."""

    def median(self, figure: str, values: Iterable[float]) -> float:
        """The figure is the median of the repeats' values."""
        self.repeats[figure] = [float(value) for value in values]
        self.figures[figure] = statistics.median(self.repeats[figure])
        return self.figures[figure]

    def speedup(self, figure: str, ours: list[float], theirs: list[float]) -> float:
        """How many times faster ours is, by medians; a repeat is a pair of neighbours in time."""
        self.figures[figure] = ratio_of_medians(ours, theirs)
        self.repeats[figure] = [b / a for a, b in zip(ours, theirs, strict=True)]
        return self.figures[figure]

    def worst_speedup(self, figure: str, ours: list[float], theirs: list[float]) -> None:
        """The smallest of several set-ups' speedups is the figure; called once for each."""
        before, repeats = self.figures.get(figure), self.repeats.get(figure, [])
        found = self.speedup(figure, ours, theirs)
        self.repeats[figure] += repeats
        if before is not None:
            self.figures[figure] = min(before, found)

    def worst_median(self, figure: str, values: Iterable[float]) -> None:
        """The largest of several set-ups' medians is the figure; called once for each."""
        before, repeats = self.figures.get(figure), self.repeats.get(figure, [])
        found = self.median(figure, values)
        self.repeats[figure] += repeats
        if before is not None:
            self.figures[figure] = max(before, found)


def worst_of(values: Iterable[float], sign: str, bound: float | None) -> float:
    """The worst for a wish such as ``>= 2``."""
    if sign == "=":
        wanted = bound or 0.0
        return max(values, key=lambda value: abs(value - wanted))
    return min(values) if sign == ">=" else max(values)


def is_met(value: float, sign: str, bound: float | None) -> bool:
    """Without a bound the figure is only reported."""
    if bound is None:
        return True
    return value >= bound if sign == ">=" else value <= bound if sign == "<=" else value == bound


def timed(function: Callable[[], Any]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleave(
    variants: dict[str, Callable[[], float]], repeats: int, say: Callable[[str], None]
) -> dict[str, list[float]]:
    """Runs the variants in turn, `repeats` times; each returns its own seconds."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(repeats):
        for name, run in variants.items():
            times[name].append(run())
            say(f"{name}: {times[name][-1]:.3f} s ({i + 1}/{repeats})")
    return times


def ratio_of_medians(ours: list[float], theirs: list[float]) -> float:
    """How many times faster ours is: median of theirs over median of ours."""
    return statistics.median(theirs) / statistics.median(ours)


def best_of(candidates: dict[Any, Callable[[], float]], say: Callable[[str], None]) -> Any:
    """The key whose single trial took the least time."""
    trials = {}
    for key, run in candidates.items():
        trials[key] = run()
        say(f"trial {key}: {trials[key]:.3f} s")
    return min(trials, key=lambda key: trials[key])
