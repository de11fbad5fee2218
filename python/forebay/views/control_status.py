"""What the daemon's control loop says, in words."""

from __future__ import annotations

from typing import Any

from .._internal.units import format_bytes


def _rate(value: float | None) -> str:
    return "without bound" if value is None else f"{format_bytes(value)}/s"


def control_lines(control: dict[str, Any] | None) -> list[str]:
    """The jobs and their shares of the source; nothing without a control loop."""
    if control is None:
        return []
    lines = ["\njobs and their shares of the source"]
    for job in control["jobs"]:
        line = f"  {job['job']}: {_rate(job['delivered_bytes_per_s'])} from the source"
        if job["limit_bytes_per_s"] is not None:
            line += f", at most {_rate(job['limit_bytes_per_s'])}"
        if job["limit_operations_per_s"] is not None:
            line += f" and {job['limit_operations_per_s']:.0f} reads/s"
        if job["held_share"] > 0.01:
            line += f"; waits for its share {job['held_share']:.0%} of the time"
        lines.append(line)
    if not control["jobs"]:
        lines.append("  none")
    if control["sentence"]:
        lines.append(f"  control: {control['sentence']}")
    if kept := control.get("policy_kept"):
        lines.append(f"  policy: kept for the next daemon in {kept}")
    if control["policy_status"]:
        lines.append(f"  policy: {control['policy_status']}")
    return lines
