"""What a node knows of the job's other nodes, in words."""

from __future__ import annotations

from typing import Any

from .._internal.units import format_bytes

_HEALTHY_NS = 100_000_000  # PeerCost::kHealthy
_COUNTS = (
    ("timeouts", "not answered in time"),
    ("corrupt", "with wrong bytes"),
    ("lost", "lost with the connection"),
    ("refused", "refused"),
)


def _text(words: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in words)


def name_of(peer: dict[str, Any]) -> str:
    """``node 2 (10.0.0.2:7421)``."""
    address = _text(peer["address"])
    return f"node {peer['node']} ({address})" if address else f"node {peer['node']}"


def _others(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    return [p for p in cluster["peers"] if p["node"] != cluster["node"]]


def _faults(peer: dict[str, Any]) -> int:
    return sum(peer[name] for name, _ in _COUNTS)


def at_fault(cluster: dict[str, Any] | None) -> str:
    """The node that a wait for peers is to be blamed on, and why; empty where none stands out."""
    others = [] if cluster is None else _others(cluster)
    if not others:
        return ""
    worst = max(others, key=lambda p: (p["state"] == "dead", _faults(p) - p["refused"], _faults(p)))
    if worst["fault"] or worst["state"] == "dead":
        why = _text(worst["fault"]) or f"it is {worst['state']}"
        return f"{name_of(worst)}: {why}"
    known = sorted((p for p in others if p["latency_ns"] > 0), key=lambda p: p["latency_ns"])
    if len(known) > 1 and known[-1]["latency_ns"] > 2 * known[len(known) // 2 - 1]["latency_ns"]:
        return f"{name_of(known[-1])}: a read takes {known[-1]['latency_ns'] / 1e6:.1f} ms"
    return ""


def _slow(peer: dict[str, Any], cluster: dict[str, Any]) -> bool:
    """Beyond what a healthy peer takes, and what the others take: its link or its node is slow."""
    rest = sorted(
        p["latency_ns"] for p in _others(cluster) if p["node"] != peer["node"] and p["latency_ns"]
    )
    return peer["latency_ns"] > max(_HEALTHY_NS, 2 * rest[len(rest) // 2] if rest else 0)


def cluster_lines(cluster: dict[str, Any] | None, off: str = "") -> list[str]:
    """The cluster in a line, and one for each other node; without peers ``off``, why there are
    none, or nothing.
    """
    if cluster is None:
        return [_text(off)] if off else []
    off = "" if cluster["coordinated"] else "; each reads for itself"
    lines = [f"node {cluster['node']} of {_text(cluster['description'])}{off}"]
    if cluster["health"]:
        lines.append(f"  {_text(cluster['health'])}")
    for peer in _others(cluster):
        line = (
            f"  {name_of(peer)}, {peer['state']}: {peer['reads']:,} samples "
            f"({format_bytes(peer['bytes'])}) from it, {peer['served']:,} "
            f"({format_bytes(peer['served_bytes'])}) to it"
        )
        if peer["latency_ns"] > 0:
            line += f", {peer['latency_ns'] / 1e6:.1f} ms a read"
        counts = [f"{peer[name]:,} {what}" for name, what in _COUNTS if peer[name]]
        if counts:
            line += f"; went to the source: {', '.join(counts)}"
        if peer["fault"]:
            line += f"; last fault: {_text(peer['fault'])}"
        lines.append(line)
    return lines


def fault_lines(cluster: dict[str, Any] | None) -> list[str]:
    """The nodes that something went wrong with; nothing where all is well."""
    if cluster is None:
        return []
    return [
        line.strip()
        for peer in _others(cluster)
        if peer["fault"] or _faults(peer) or _slow(peer, cluster)
        for line in cluster_lines({**cluster, "health": "", "peers": [peer]})[1:]
    ]
