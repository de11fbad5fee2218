"""What an epoch cost, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import ForebayError
from .._internal.units import format_bytes
from .peers_status import at_fault, fault_lines

_log = logging.getLogger("forebay")

CAUSES = {
    "source": "reads from storage",
    "memory": "memory held by unreleased batches",
    "decode": "copying and decoding",
    "plan": "working out the order",
    "copy": "copies to the GPU",
    "tier": "reads from the cache folder",
    "share": "the job's share of the source, which it has used up",
    "peer": "reads from other nodes",
}


@dataclass(frozen=True)
class EpochReport:
    """One epoch of one loader."""

    epoch: int
    seconds: float
    batches: int
    samples: int
    bytes: int
    wait: dict[str, float]
    """Seconds the consumer waited, by cause; every wait is charged to exactly one."""
    source_reads: int
    source_bytes: int
    batch_seconds: np.ndarray
    """From one batch handed out to the next."""
    peer_reads: int = 0
    """Samples that other nodes of the job gave instead of the source."""
    peer_bytes: int = 0

    @property
    def stall(self) -> float:
        """Seconds the consumer waited in all."""
        return sum(self.wait.values())

    @property
    def stall_share(self) -> float:
        """Share of the epoch that the consumer waited."""
        return self.stall / self.seconds if self.seconds > 0 else 0.0

    @property
    def main_cause(self) -> str:
        """The cause that most of the waiting is charged to."""
        return max(self.wait, key=lambda cause: self.wait[cause])

    def percentile(self, q: float) -> float:
        """The q-th percentile of the time between batches, in seconds."""
        return float(np.percentile(self.batch_seconds, q)) if len(self.batch_seconds) else 0.0


def from_native(stats: dict) -> EpochReport:
    return EpochReport(
        epoch=stats["epoch"],
        seconds=stats["seconds"],
        batches=stats["batches"],
        samples=stats["samples"],
        bytes=stats["bytes"],
        wait=dict(stats["wait"]),
        source_reads=stats["source_reads"],
        source_bytes=stats["source_bytes"],
        batch_seconds=stats["batch_us"] * 1e-6,
        peer_reads=stats["peer_reads"],
        peer_bytes=stats["peer_bytes"],
    )


def sentence(report: EpochReport, cluster: dict[str, Any] | None = None) -> str:
    """Why was my GPU idle? In one sentence, which names the peer at fault."""
    share = report.stall_share
    start = f"Epoch {report.epoch}: {report.samples:,} samples in {report.seconds:.2f} s"
    if share < 0.02:
        return f"{start}; training was never kept waiting ({share:.1%} of the time)."
    cause = report.main_cause
    of = report.wait[cause] / report.stall
    more = ""
    if cause == "source":
        rate = report.source_bytes / report.seconds if report.seconds else 0
        more = f" ({report.source_reads:,} reads, {format_bytes(rate)}/s)"
    if cause == "peer":
        rate = report.peer_bytes / report.seconds if report.seconds else 0
        blamed = at_fault(cluster)
        more = f" ({report.peer_reads:,} reads, {format_bytes(rate)}/s"
        more += f"; {blamed})" if blamed else ")"
    what = f"{CAUSES[cause]}{more}"
    return f"{start}; training waited {share:.0%} of the time, {of:.0%} of it for {what}."


def log_epoch(
    what: str,
    rank: int,
    report: Callable[[], EpochReport | None],
    cluster: Callable[[], dict[str, Any] | None] = lambda: None,
) -> None:
    """Logs the sentence, as INFO for rank 0 and as DEBUG for the others. ``report`` is called only
    where somebody listens.
    """
    level = logging.INFO if rank == 0 else logging.DEBUG
    if not _log.isEnabledFor(level):
        return
    try:
        found = report()
        nodes = cluster()
    except ForebayError as error:  # training does not depend on it
        _log.log(level, "forebay: %s: no report of this epoch: %s", what, str(error))
        return
    if found is not None:
        rank_text = f", rank {rank}" if rank else ""
        _log.log(level, "forebay: %s%s: %s", what, rank_text, sentence(found, nodes))


def story(
    reports: list[EpochReport], cluster: dict[str, Any] | None, problem: str, cache: str = ""
) -> str:
    """The last epoch's sentence, a table of all, and what is wrong with the other nodes and the
    cache folder.
    """
    lines = [sentence(reports[-1], cluster), table(reports), *fault_lines(cluster)]
    if problem:
        lines.append(f"peers: {problem}")
    lines += [f"cache: {line}" for line in cache.splitlines()]
    return "\n".join(lines)


def table(reports: list[EpochReport]) -> str:
    """A table of plain text, one row an epoch."""
    peers = any(r.peer_reads for r in reports)
    head = ("epoch", "time s", "samples/s", "waited s", "waited", "mostly for", "reads", "read",
            *(("of peers", "read") if peers else ()), "batch p50 ms", "p99 ms")  # fmt: skip
    rows = [head]
    for r in reports:
        rows.append((
            str(r.epoch), f"{r.seconds:.2f}", f"{r.samples / r.seconds if r.seconds else 0:,.0f}",
            f"{r.stall:.2f}", f"{r.stall_share:.1%}",
            r.main_cause if r.stall_share >= 0.005 else "-",
            f"{r.source_reads:,}", format_bytes(r.source_bytes),
            *((f"{r.peer_reads:,}", format_bytes(r.peer_bytes)) if peers else ()),
            f"{r.percentile(50) * 1e3:.2f}", f"{r.percentile(99) * 1e3:.2f}",
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
    )
