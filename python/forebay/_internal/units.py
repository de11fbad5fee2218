"""Sizes as people write them."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Iterable
from typing import Any

from .._errors import ArgumentError

_MOST_BYTES = 1 << 63
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: int | float | str | None, name: str = "memory") -> int:
    """Bytes from a number or from text such as ``"64M"``, ``"1.5GiB"``; ``None`` gives 0."""
    if text is None:
        return 0
    if isinstance(text, (int, float)):
        if text < 0:
            raise ArgumentError(f"{name} is {text}; it cannot be negative")
        if not text < _MOST_BYTES:
            raise ArgumentError(f"{name} is {text}; it must be below 2**63")
        return int(text)
    if not isinstance(text, str):
        raise ArgumentError(f"{name} is {text!r}; write a size such as 512M, 4G or 1.5GiB")
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtKMGT]?)(?:i?[bB])?\s*", text)
    if not match:
        raise ArgumentError(f"{name} is {text!r}; write a size such as 512M, 4G or 1.5GiB")
    return parse_bytes(float(match[1]) * _UNITS[match[2].lower()], name)


def whole_number(name: str, value: Any, least: int, most: int = (1 << 31) - 1) -> int:
    """A whole number in its range; what is none, or lies outside, is an error with its name."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name} is {value!r}; it must be a whole number") from None
    if number < least:
        raise ArgumentError(f"{name} is {number}; it must be at least {least}")
    if number > most:
        raise ArgumentError(f"{name} is {number}; it must be at most {most}")
    return number


def suffixes(given: str | Iterable[str] | None) -> list[str]:
    """``extensions=`` as a list; one suffix may stand for itself."""
    if given is None:
        return []
    found = [given] if isinstance(given, str) else list(given)
    for suffix in found:
        if not isinstance(suffix, str) or not suffix.strip("."):
            raise ArgumentError(
                f"extensions has {suffix!r}; it takes suffixes such as '.jpg', or a list of them"
            )
    return found


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
