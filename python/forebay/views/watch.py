"""What the daemon's status means: rates from two looks, and why training waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from .._internal.units import format_bytes, text_of
from .peers_status import at_fault
from .report import CAUSES

LEAST_MS = 200
"""Looks that lie closer together give no rate."""


def streams(said: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each stream with its process."""
    for client in said["clients"]:
        for stream in client["streams"]:
            yield client, stream


@dataclass(frozen=True)
class Waiting:
    """What a process has waited for lately. One that trains and validates waits for one of its
    streams at a time.
    """

    job: str
    rank: int
    waits: dict[str, int]
    span: int
    program: bool = False
    """It opens files, and knows nothing of ranks."""

    @property
    def share(self) -> float:
        return min(1.0, sum(self.waits.values()) / self.span)

    @property
    def cause(self) -> str:
        return max(self.waits, key=lambda cause: self.waits[cause])


def processes(said: dict[str, Any]) -> list[Waiting]:
    """Those that have a stream."""
    found = []
    for client in said["clients"]:
        if not client["streams"]:
            continue
        waits: dict[str, int] = {}
        for stream in client["streams"]:
            for cause, nanoseconds in stream["recent_stall_ns"].items():
                waits[cause] = waits.get(cause, 0) + nanoseconds
        first = client["streams"][0]
        span = max(1, *(s["recent_ns"] for s in client["streams"]))
        program = bool(client.get("program"))
        found.append(Waiting(text_of(first["job"]), first["rank"], waits, span, program))
    return found


@dataclass(frozen=True)
class Rates:
    """What happened between two looks, a second."""

    source_bytes: float = 0.0
    source_reads: float = 0.0
    samples: float = 0.0
    streams: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(pid, stream) to samples and bytes."""


def rates(before: dict[str, Any] | None, said: dict[str, Any]) -> Rates | None:
    """None where the looks are of two daemons, or too close together."""
    if before is None or before["pid"] != said["pid"]:
        return None
    if said["time_ms"] - before["time_ms"] < LEAST_MS:
        return None
    seconds = (said["time_ms"] - before["time_ms"]) / 1000
    old = {(c["pid"], s["stream"]): s for c, s in streams(before)}
    each = {}
    for client, stream in streams(said):
        key = (client["pid"], stream["stream"])
        if key in old:
            each[key] = tuple(
                max(0, stream[what] - old[key][what]) / seconds
                for what in ("samples_total", "bytes_total")
            )
    return Rates(
        source_bytes=max(0, said["source"]["bytes"] - before["source"]["bytes"]) / seconds,
        source_reads=max(0, said["source"]["reads"] - before["source"]["reads"]) / seconds,
        samples=sum(samples for samples, _ in each.values()),
        streams=each,  # type: ignore[arg-type]
    )


def why_idle(said: dict[str, Any], now: Rates | None = None) -> str:
    """Why is my GPU idle? In one sentence, of the last ten seconds."""
    found = processes(said)
    if not found:
        return "No job reads through this daemon now."
    worst = max(found, key=lambda p: p.share)
    alone = len(found) == 1
    if worst.share < 0.02:
        kinds = {p.program for p in found}
        every = "processes" if len(kinds) == 2 else "programs" if worst.program else "ranks"
        who = "training has" if alone else f"all {len(found)} {every} have"
        return f"Not for want of data: {who} waited {worst.share:.1%} of the last 10 s."
    most = f"rank that waits most ({worst.job}, rank {worst.rank})"
    if worst.program:
        most = f"program that waits most ({worst.job})"
    who = "Training" if alone else f"The {most}"
    of = worst.waits[worst.cause] / sum(worst.waits.values())
    more = ""
    if worst.cause == "source":
        more = f" ({said['source']['in_flight']} reads in flight)"
        if now is not None:
            more = f" ({format_bytes(now.source_bytes)}/s, {more[2:]}"
    if worst.cause == "peer" and (blamed := at_fault(said.get("cluster"))):
        more = f" ({blamed})"
    what = f"{CAUSES.get(worst.cause, worst.cause)}{more}"
    return f"{who} waited {worst.share:.0%} of the last 10 s, {of:.0%} of it for {what}."
