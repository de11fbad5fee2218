"""``forebay status``: what the node's daemon does."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from .. import _forebay, files
from .._errors import AccessError, MissingError, StorageError
from .._internal.units import format_bytes, text_of
from .control_status import control_lines
from .peers_status import cluster_lines
from .watch import why_idle

_KEY_METRICS = (
    ("forebay_source_reads_total", "reads from the source", False),
    ("forebay_source_read_bytes_total", "bytes read from the source", True),
    ("forebay_peer_reads_total", "samples from other nodes", False),
    ("forebay_peer_read_bytes_total", "bytes from other nodes", True),
    ("forebay_stage_samples_total", "samples handed out", False),
    ("forebay_stage_kept_bytes", "kept for later epochs", True),
    ("forebay_source_in_flight_reads", "reads under way", False),
    ("forebay_stage_leases", "batches on loan", False),
    ("forebay_daemon_ready_batches", "batches ready", False),
)


def run(options: argparse.Namespace) -> int:
    folder = os.path.abspath(options.folder) if options.folder else ""
    where = folder or _forebay.SharedEngine.default_folder()
    try:
        client = files.attach_running(folder)
    except (AccessError, MissingError, StorageError) as error:
        if isinstance(error, AccessError):
            raise
        services = files.running(folder)
        if options.json and services:
            print(json.dumps({"files": services}, indent=2))
            return 0
        print(f"No forebayd runs for this user on this node (looked in {where}).")
        if not services:
            return 1
        print("\n".join(file_lines(services)))
        return 0
    if options.prometheus:
        print(client.prometheus(), end="")
        return 0
    said = json.loads(client.describe())
    services = files.running(folder)
    if options.json:
        print(json.dumps({**said, "files": services}, indent=2))
        return 0
    print(describe(said, where))
    if services:
        print("\n".join(file_lines(services)))
    return 0


def file_lines(services: list[dict[str, Any]]) -> list[str]:
    """The file services in a few lines each."""
    lines = ["\nfile services"]
    for s in services:
        m = {name.removeprefix("forebay_"): value for name, value in s["metrics"].items()}
        m |= {name.removeprefix("files_"): value for name, value in m.items()}
        knobs = {k["name"]: k for k in s["knobs"]}

        def of(name: str, knobs: dict[str, Any] = knobs) -> str:
            return knob_value(knobs[name], knobs[name]["value"])

        lines += [
            f"  forebayd {s['pid']} in {text_of(s['cache'])}, for "
            f"{duration(s['uptime_ms'] / 1000)}; {s['sessions']} sessions, {s['streams']} readers",
            f"    data folders: {', '.join(text_of(source) for source in s['sources'])}",
            f"    kept {m['kept_total']} copies, {format_bytes(m['kept_bytes'])} of "
            f"{of('files_cache_bytes')}{' (full)' if s['full'] else ''}; ahead "
            f"{format_bytes(m['staged_bytes'])} of {of('files_ahead_bytes')}",
            f"    read from the source: {m['source_reads_total']} reads, "
            f"{format_bytes(m['source_read_bytes_total'])}; asked for {m['gets_total']}, left to "
            f"the source {m['left_total']}, errors {m['errors_total']}",
            *(f"    WARNING: {text_of(text)}" for text in s["warnings"]),
        ]
    return lines


def describe(said: dict[str, Any], where: str) -> str:
    """The daemon in a page of text."""
    metrics = said["metrics"]
    seconds = said["uptime_ms"] / 1000
    lines = [
        f"forebayd {said['pid']} in {where}, for {duration(seconds)}; "
        f"memory {format_bytes(said['budget'])}"
    ]
    if said["url"]:
        lines.append(f"web page: {said['url']} (metrics for Prometheus: {said['url']}metrics)")
    jobs = [c for c in said["clients"] if c["pid"] != os.getpid()]
    lines.append(why_idle({**said, "clients": jobs}))
    if said["cache_status"]:
        lines.append(f"cache folder: {text_of(said['cache_status'])}")
    lines.append("\ndata sets")
    for d in said["datasets"]:
        name = f" (shared as {text_of(d['name'])})" if d.get("name") else ""
        what = f"{d['files']} files seen so far" if d.get("grows") else f"{d['samples']} samples"
        lines.append(
            f"  {d['dataset']:>3}  {text_of(d['root'])}{name}  {what}, {format_bytes(d['bytes'])}"
        )
    if not said["datasets"]:
        lines.append("  none")
    lines.append("\nprocesses")
    for client in jobs:
        if client.get("program"):
            lines += [program_line(s) for s in client["streams"]]
            continue
        lines.append(f"  pid {client['pid']}, {client['leases']} batches on loan or ready")
        for s in client["streams"]:
            lines.append(
                f"    job {text_of(s['job'])}, data set {s['dataset']}, batches of "
                f"{s['batch_size']}, rank {s['rank']} of {s['world']}, seed {s['seed']}: epoch "
                f"{s['epoch']}, batch {s['batches']}, {s['ready']} ready, waited "
                f"{s['recent_stall_share']:.0%} of the last 10 s"
            )
    if not jobs:
        lines.append("  none")
    if cluster := cluster_lines(said.get("cluster"), said.get("peers_off", "")):
        lines.append("\ncluster")
        lines += [f"  {line}" for line in cluster]
    lines += control_lines(said["control"])
    lines.append("\nmechanisms and their knobs")
    for mechanism in said["mechanisms"]:
        lines.append(f"  {mechanism['name']}: {mechanism['meaning']}")
        for k in mechanism["knobs"]:
            largest = "" if k["maximum"] == 2**63 - 1 else f" to {knob_value(k, k['maximum'])}"
            lines.append(
                f"    {k['name']} = {knob_value(k, k['value'])}  "
                f"({knob_value(k, k['minimum'])}{largest}; {k['meaning']})"
            )
    lines.append("\nmetrics")
    for name, meaning, is_bytes in _KEY_METRICS:
        value = metrics.get(name, 0)
        lines.append(f"  {meaning:<28}{format_bytes(value) if is_bytes else value}")
    return "\n".join(lines)


def program_line(stream: dict[str, Any]) -> str:
    """One that opens files and knows nothing of us."""
    return (
        f"  program {text_of(stream['job'])}, {stream['samples_total']} files opened, waited "
        f"{stream['recent_stall_share']:.0%} of the last 10 s"
    )


def knob_value(knob: dict[str, Any], value: int) -> str:
    """A knob's value, or a bound of it, for people."""
    if knob["type"] == "switch":
        return "on" if value else "off"
    if knob["type"] == "bytes":
        return format_bytes(value)
    if knob["type"] == "bytes_per_second":
        return f"{format_bytes(value)}/s"
    return f"{value}{dict(per_second='/s', seconds=' s').get(knob['type'], '')}"


def duration(seconds: float) -> str:
    """For people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
