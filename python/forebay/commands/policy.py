"""``forebay policy``: check a policy file, put it in force, show what is in force, remove it."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from .. import _forebay, files
from .._errors import MissingError, StorageError, UnsupportedError
from .._internal.units import format_bytes
from ..policy import BUILT_IN, JobRule, Knob, Policy, from_json, knobs_of, load_policy

_KEEP_S = 3.0  # the daemon writes it in its next round
_EXAMPLES = """\
examples:
  forebay policy check site.toml                what it means, or what is wrong with it
  forebay policy check site.toml --job resnet   which rule holds for a job of that name
  forebay policy set site.toml                  for the jobs of this node
  forebay policy set site.toml --etcd https://10.0.0.5:2379    for all nodes of a cluster
  forebay policy show
  forebay policy remove                         no policy any more, also for the next daemon

docs/policies.md describes the file.
"""


def _range(low: float, high: float | None, show: Callable[[float], str]) -> str:
    if not low and high is None:
        return "any"
    if high is None:
        return f"at least {show(low)}"
    return f"{show(low)} to {show(high)}" if low else f"at most {show(high)}"


def _rate(value: float) -> str:
    return f"{format_bytes(value)}/s"


def _reads(value: float) -> str:
    return f"{value:,g}/s"


def _row(rule: JobRule) -> list[str]:
    return [
        rule.match,
        f"{rule.share:g}",
        str(rule.priority),
        _range(rule.min_bandwidth, rule.max_bandwidth, _rate),
        _range(rule.min_operations, rule.max_operations, _reads),
        "any" if rule.memory is None else format_bytes(rule.memory),
        "any" if rule.folder is None else format_bytes(rule.folder),
    ]


def _table(rows: list[list[str]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print(
            "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        )


def _contention(rules: list[JobRule]) -> str:
    """One sentence: a job of each rule, all of them hungry."""
    names = [rule.match for rule in rules]
    if len(rules) < 2:
        return ""
    # As the division itself sees it, on a source that dwarfs every minimum and maximum.
    parts = _forebay.divide_fairly(
        1.0, [(float("inf"), rule.share, 0.0, float("inf"), rule.priority) for rule in rules]
    )
    said = ", ".join(f"{name} {part:.0%}" for name, part in zip(names, parts, strict=True))
    return (
        f"one job of each, all wanting more than the source gives: {said}; minima come before "
        "that, maxima bind,\nand what one leaves the others take"
    )


def describe(policy: Policy) -> None:
    """Prints what a policy means."""
    rules = list(policy.jobs)
    if not any(rule.match == "*" for rule in rules):
        rules.append(JobRule("(any other)"))
    heads = ["job", "share", "priority", "bandwidth", "reads", "memory", "cache folder"]
    _table([heads, *map(_row, rules)])
    if sentence := _contention(rules):
        print(sentence)
    for name, size in (("memory", policy.memory), ("cache folder", policy.folder)):
        if size is not None:
            print(f"{name} for all jobs of a node: {format_bytes(size)}")
    fixed = ", ".join(f"{name} = {value}" for name, value in policy.knobs.items())
    if policy.tuner:
        print("tuner: on" + (f", but for {fixed}" if fixed else ""))
    else:
        print("tuner: off" + (f"; {fixed}" if fixed else "; knobs stay as they start"))


def _daemon(folder: str | None) -> _forebay.SharedEngine:
    try:
        return files.attach_running(os.path.abspath(folder) if folder else "")
    except (MissingError, StorageError):
        raise UnsupportedError(
            "no daemon is running on this node, so no policy is in force: start the training "
            "first (forebayd comes with it, and keeps the policy for the next one), or put the "
            "policy into the cluster's etcd with --etcd https://host:2379"
        ) from None


def _knobs_at(folder: str | None) -> tuple[list[Knob], str]:
    """Those of the daemon in the folder that was named, else the built-in ones; and whose."""
    if not folder:
        return list(BUILT_IN), ""
    said = json.loads(_daemon(folder).describe())
    return knobs_of(said), f"forebayd {said['pid']} in {os.path.abspath(folder)}"


def _check(options: argparse.Namespace) -> int:
    knobs, whose = _knobs_at(options.folder)
    policy = load_policy(options.file, knobs)
    if options.json:
        print(policy.json)
        return 0
    count = len(policy.jobs)
    print(f"{options.file}: ok, {count} rule{'' if count == 1 else 's'}")
    describe(policy)
    if policy.knobs:
        print(
            f"knobs are within the limits of {whose}"
            if whose
            else "knobs are within the built-in limits; what a daemon's memory allows may be less "
            "(--folder DIR asks that one)"
        )
    if options.job is not None:
        rule = policy.rule_for(options.job)
        print(f"job {options.job}: " + (f"match = {rule.match!r}" if rule else "no rule, defaults"))
    return 0


def _set(options: argparse.Namespace) -> int:
    if options.etcd:
        policy = load_policy(options.file, _knobs_at(options.folder)[0])
        _forebay.store_policy(options.etcd.split(","), options.prefix, policy.json)
        print(f"{options.file} is in force from the controller's next round on")
        return 0
    load_policy(options.file)  # what is wrong with the file is said also where no daemon runs
    daemon = _daemon(options.folder)
    policy = load_policy(options.file, knobs_of(json.loads(daemon.describe())))
    daemon.set_policy(policy.json)
    control = _settled(daemon)
    print(f"{options.file} is in force on this node")
    if kept := control.get("policy_kept"):
        print(f"kept for the next daemon in {kept}")
    else:
        why = control.get("policy_keep_error") or "nothing of it is kept"
        print(f"it goes with this daemon: {why}")
    return 0


def _settled(daemon: _forebay.SharedEngine) -> dict[str, Any]:
    """The daemon's control loop, when the policy is kept or cannot be."""
    until = time.monotonic() + _KEEP_S
    while True:
        control: dict[str, Any] = json.loads(daemon.describe())["control"]
        if not control.get("policy_pending") or time.monotonic() > until:
            return control
        time.sleep(0.02)


def _remove(options: argparse.Namespace) -> int:
    if options.etcd:
        _forebay.store_policy(options.etcd.split(","), options.prefix, "")
        print("no policy is in force from the controller's next round on")
        return 0
    try:
        daemon = _daemon(options.folder)
    except UnsupportedError:
        _forebay.drop_kept_policy(os.path.abspath(options.folder) if options.folder else "")
        print("no daemon is running on this node, and the next one has no policy")
        return 0
    daemon.set_policy("")
    if trouble := _settled(daemon).get("policy_keep_error"):
        raise StorageError(trouble)
    print("no policy is in force on this node")
    return 0


def _in_force(folder: str | None) -> str:
    try:
        return _daemon(folder).policy()
    except UnsupportedError:
        path, text = _forebay.kept_policy(os.path.abspath(folder) if folder else "")
        if not text:
            raise
        print(f"no daemon is running on this node; the next one follows {path}", file=sys.stderr)
        return text


def _show(options: argparse.Namespace) -> int:
    if options.etcd:
        text = _forebay.stored_policy(options.etcd.split(","), options.prefix)
    else:
        text = _in_force(options.folder)
    if not text:
        print("no policy is in force: every job has share 1 and no bounds")
        return 0
    if options.json:
        print(text)
    else:
        describe(from_json(text))
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    check = actions.add_parser("check", help="what a file means, or what is wrong with it")
    put = actions.add_parser("set", help="put a file in force")
    show = actions.add_parser("show", help="what is in force")
    remove = actions.add_parser("remove", help="none any more, also for the next daemon")
    for each in (check, put, show, remove):
        each.add_argument("--folder", metavar="DIR", help="of the daemon, if it is not the usual")
    for each in (check, put):
        each.add_argument("file", metavar="FILE", help="a .toml file")
    check.add_argument("--job", metavar="NAME", help="which rule holds for a job of this name")
    for each in (check, show):
        each.add_argument("--json", action="store_true", help="the canonical form instead")
    for each in (put, show, remove):
        each.add_argument(
            "--etcd", metavar="URLS", help="of a cluster, as https://a:2379,https://b:2379"
        )
        each.add_argument(
            "--prefix", default="/forebay/", help="of the cluster's keys (default /forebay/)"
        )


def run(parser: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    parser.epilog = _EXAMPLES
    add_arguments(parser)
    options = parser.parse_args(argv)
    return {"check": _check, "set": _set, "show": _show, "remove": _remove}[options.action](options)
