"""Policies: who may take how much of the source and of the tiers.

A policy is a TOML file; docs/policies.md describes its keys. Checked here is what only the file can
tell: keys, kinds of values, sizes as people write them. Ranges are checked by the C++ code that the
daemon and the controller use, too.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _forebay
from ._errors import ArgumentError, MissingError, UnsupportedError
from ._internal.units import parse_bytes

Knob = tuple[str, int, int]
"""Name, least and largest value."""

_ANY = 2**63 - 1
BUILT_IN: tuple[Knob, ...] = (
    ("source_reads_in_flight", 0, 4096),
    ("read_ahead_bytes", 0, _ANY),
    ("tuner_on", 0, 1),
    ("memory_tier_bytes", 0, _ANY),
    ("cache_folder_bytes", 0, _ANY),
    ("admit_memory", 0, 1),
    ("admit_folder", 0, 1),
    ("hedge_one_in", 0, 1_000_000),
    ("source_bytes_per_second", 0, 1 << 50),
    ("source_operations_per_second", 0, 1_000_000_000),
    ("source_extra", 0, 2),
    ("decode_threads", 0, 4096),
    ("daemon_linger_seconds", 0, 604_800),
    ("peer_bytes_per_second", 0, 1 << 50),
    ("peer_link_bytes_per_second", 0, 1 << 50),
    ("peer_requests_in_flight", 1, 4096),
    ("peer_pull", 0, 1),
    ("files_reads_in_flight", 1, 256),
    ("files_cache_bytes", 0, _ANY),
    ("files_ahead_bytes", 0, _ANY),
)
"""Those that a daemon may have; what its memory and options allow may be less."""

_SIZE = 'a size in bytes, such as 4096 or "8G"'
_RATE = 'bytes a second, such as "200M"'
_COUNT = "a number of reads a second, such as 500"
# key: what kind of value, and how a complaint calls it
_JOB = {
    "match": ("text", 'text with * and ?, such as "imagenet-*"'),
    "share": ("number", "a number from 0.001 to 1000000"),
    "priority": ("whole", "a whole number from -100 to 100"),
    "min_bandwidth": ("size", _RATE),
    "max_bandwidth": ("size", _RATE),
    "min_operations": ("number", _COUNT),
    "max_operations": ("number", _COUNT),
    "memory": ("size", _SIZE),
    "folder": ("size", _SIZE),
}
_TIERS = {"memory": ("size", _SIZE), "folder": ("size", _SIZE)}
_TUNER = {"on": ("boolean", "true or false"), "knobs": ("table", "a table: [tuner.knobs]")}
_ROOT = {
    "job": ("tables", "rules, each under [[job]]"),
    "tiers": ("table", "a table: [tiers]"),
    "tuner": ("table", "a table: [tuner]"),
}


@dataclass(frozen=True)
class JobRule:
    """What each job whose name matches may take; None: no bound."""

    match: str
    share: float = 1.0
    priority: int = 0
    min_bandwidth: float = 0.0
    max_bandwidth: float | None = None
    min_operations: float = 0.0
    max_operations: float | None = None
    memory: int | None = None
    folder: int | None = None


@dataclass(frozen=True)
class Policy:
    """A policy that was checked."""

    jobs: tuple[JobRule, ...] = ()
    memory: int | None = None
    folder: int | None = None
    tuner: bool = True
    knobs: dict[str, int] = field(default_factory=dict)
    json: str = '{"version":1}'
    """The canonical form, which goes to the daemon: equal policies have equal text."""

    def rule_for(self, job: str) -> JobRule | None:
        """The first rule that matches; None when the defaults hold."""
        number = _forebay.policy_rule(self.json, job)
        return self.jobs[number] if number >= 0 else None


def knobs_of(described: dict) -> list[Knob]:
    """The knobs a policy may fix, of a daemon's description."""
    return [
        (knob["name"], knob["minimum"], knob["maximum"])
        for mechanism in described["mechanisms"]
        for knob in mechanism["knobs"]
    ]


class _Lines:
    """Where the keys of a TOML file stand. Text of several lines may mislead it: then the line is
    that of the table."""

    _HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]")
    _KEY = re.compile(r"""\s*([A-Za-z0-9_.\-"' ]+?)\s*=""")

    def __init__(self, text: str) -> None:
        self._at: dict[str, int] = {}
        counts: dict[str, int] = {}
        prefix = ""
        for number, line in enumerate(text.splitlines(), 1):
            if match := self._HEADER.match(line):
                prefix = match[2].replace('"', "").replace("'", "").replace(" ", "")
                if match[1] == "[[":
                    index = counts.get(prefix, 0)
                    counts[prefix] = index + 1
                    prefix = f"{prefix}[{index}]"
                self._at.setdefault(prefix, number)
            elif match := self._KEY.match(line):
                key = match[1].replace('"', "").replace("'", "").replace(" ", "")
                self._at.setdefault(f"{prefix}.{key}" if prefix else key, number)

    def find(self, key: str) -> int | None:
        """The line of a key, or of the nearest table around it."""
        while key:
            if key in self._at:
                return self._at[key]
            if f"{key}[0]" in self._at:
                return self._at[f"{key}[0]"]
            key = key.rpartition(".")[0]
        return None


class _File:
    """One file that is read; every complaint names it, the line and the key."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self._lines = _Lines(text)

    def fail(self, key: str, what: str) -> ArgumentError:
        line = self._lines.find(key)
        place = self.name if line is None else f"{self.name}:{line}"
        return ArgumentError(f"{place}: {key} {what}")

    def unknown(self, where: str, key: str, known: Sequence[str]) -> ArgumentError:
        close = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
        return self.fail(f"{where}.{key}" if where else key, f"is not a key; {hint}")

    def value(self, key: str, kind: str, wanted: str, value: Any) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind == "size" and (number or isinstance(value, str)):
            try:
                return parse_bytes(value, key)
            except (ArgumentError, ValueError, OverflowError):
                pass
        good = {
            "text": isinstance(value, str),
            "number": number and value == value and abs(value) != float("inf"),
            "whole": number and isinstance(value, int),
            "boolean": isinstance(value, bool),
            "table": isinstance(value, dict),
            "tables": isinstance(value, list) and all(isinstance(each, dict) for each in value),
        }.get(kind, False)
        if not good:
            raise self.fail(key, f"is {_shown(value)}; it must be {wanted}")
        return value

    def table(
        self, where: str, values: dict[str, Any], keys: dict[str, tuple[str, str]]
    ) -> dict[str, Any]:
        for key in values:
            if key not in keys:
                raise self.unknown(where, key, list(keys))
        return {
            key: self.value(f"{where}.{key}" if where else key, *keys[key], value)
            for key, value in values.items()
        }


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a table"
    return repr(value)


def _toml(name: str, text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef]
        except ImportError:
            raise UnsupportedError(
                "policies are TOML, which Python reads from 3.11 on; try: pip install tomli"
            ) from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        said = str(error)
        place = re.search(r" \(at line (\d+), column \d+\)$", said)
        if place:
            raise ArgumentError(f"{name}:{place[1]}: {said[: place.start()]}") from None
        raise ArgumentError(f"{name}: {said}") from None


def parse_policy(text: str, name: str = "policy", knobs: Sequence[Knob] | None = None) -> Policy:
    """A policy from the text of a TOML file; ``name`` is how complaints call it."""
    file = _File(name, text)
    root = file.table("", _toml(name, text), _ROOT)
    canonical: dict[str, Any] = {"version": 1}
    if "job" in root:
        canonical["job"] = [
            file.table(f"job[{i}]", rule, _JOB) for i, rule in enumerate(root["job"])
        ]
    if "tiers" in root:
        canonical["tiers"] = file.table("tiers", root["tiers"], _TIERS)
    if "tuner" in root:
        tuner = file.table("tuner", root["tuner"], _TUNER)
        fixed = tuner.get("knobs", {})
        for key, value in fixed.items():
            file.value(f"tuner.knobs.{key}", "whole", "a whole number", value)
            names = [each[0] for each in knobs or ()]
            if names and key not in names:
                raise file.unknown("tuner.knobs", key, names)
        canonical["tuner"] = tuner
    known = knobs if knobs is not None else ()
    try:
        return from_json(_forebay.policy_canonical(json.dumps(canonical), list(known)))
    except ArgumentError as error:
        key, colon, what = str(error).partition(": ")
        if not colon:
            raise
        raise file.fail(key, what.removeprefix("it ")) from None
    except (OverflowError, ValueError) as error:
        raise ArgumentError(f"{name}: {error}") from None


def load_policy(path: str | os.PathLike[str], knobs: Sequence[Knob] | None = None) -> Policy:
    """Reads and checks a policy file. ``knobs``: those it may fix; None compares with nothing."""
    name = os.fspath(path)
    try:
        with open(name, encoding="utf-8") as file:
            text = file.read()
    except FileNotFoundError:
        raise MissingError(
            f"{name} does not exist; docs/policies.md has one to start from"
        ) from None
    except IsADirectoryError:
        raise ArgumentError(f"{name} is a folder; name a .toml file") from None
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{name}: not UTF-8 text: {error}") from None
    return parse_policy(text, name, knobs)


def from_json(text: str) -> Policy:
    """A policy from its JSON, as a daemon or etcd gives it; checked again."""
    canonical = _forebay.policy_canonical(text)
    values = json.loads(canonical)
    tiers, tuner = values.get("tiers", {}), values.get("tuner", {})
    return Policy(
        jobs=tuple(JobRule(**rule) for rule in values.get("job", ())),
        memory=tiers.get("memory"),
        folder=tiers.get("folder"),
        tuner=tuner.get("on", True),
        knobs=tuner.get("knobs", {}),
        json=canonical,
    )
