"""Sizes as people write them."""

from __future__ import annotations

import os
import re

from .._errors import ArgumentError

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: int | float | str | None, name: str = "memory") -> int:
    """Bytes from a number or from text such as ``"64M"``, ``"1.5GiB"``; ``None`` gives 0."""
    if text is None:
        return 0
    if isinstance(text, (int, float)):
        if text < 0:
            raise ArgumentError(f"{name} is {text}; it cannot be negative")
        return int(text)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtKMGT]?)(?:i?[bB])?\s*", text)
    if not match:
        raise ArgumentError(f"{name} is {text!r}; write a size such as 512M, 4G or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(count: float) -> str:
    """``1234567`` becomes ``1.2 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def text_of(quoted: str) -> str:
    """Text of a daemon's answer: names of files come with a character for each byte."""
    try:
        return os.fsdecode(quoted.encode("latin-1"))
    except UnicodeEncodeError:
        return quoted
