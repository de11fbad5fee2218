"""``forebay tune replay``: a recorded log of the tuner, through the pure policy once more."""

from __future__ import annotations

import argparse

from .. import _forebay
from .._errors import MissingError
from .._internal.units import format_bytes


def run(options: argparse.Namespace) -> int:
    try:
        with open(options.log, encoding="utf-8", errors="replace") as file:
            text = file.read()
    except FileNotFoundError:
        raise MissingError(
            f"{options.log} is not there; a training with FOREBAY_TUNER_LOG={options.log} makes it"
        ) from None
    steps = _forebay.replay_tuner_log(text, options.policy or "")
    last: tuple[int, int] | None = None
    differ = 0
    for seconds, recorded, replayed in steps:
        reads, size, reason = replayed
        differ += recorded != replayed
        if (reads, size) != last:
            was = "" if recorded == replayed else f"   (recorded: {_shown(recorded)})"
            print(f"{seconds:9.3f} s  {_shown(replayed)}  {reason}{was}")
            last = (reads, size)
    if options.policy is None:
        print(f"{len(steps)} steps; {differ or 'no'} decisions differ from the recorded ones")
        return 1 if differ else 0
    print(f"{len(steps)} steps; {differ} of {options.policy}'s decisions differ from the recorded")
    return 0


def _shown(decision: tuple[int, int, str]) -> str:
    return f"{decision[0]:4d} reads, {format_bytes(decision[1]):>9} ahead"
