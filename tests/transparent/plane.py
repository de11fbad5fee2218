"""Which program serves files in this test run: forebayd's engine, or forebay-filesd."""

from __future__ import annotations

import os
from pathlib import Path

from forebay import files

ENGINE = files.by_engine()
PROGRAM = "forebayd" if ENGINE else "forebay-filesd"


def view(cache: str | os.PathLike[str]) -> Path:
    """The folder in which programs find the copies of a cache folder."""
    return Path(cache, "run") if ENGINE else Path(cache)


def source_metric(metrics: dict[str, int], name: str) -> int:
    """What was read of the source; the engine counts it for all its users."""
    return metrics[("forebay_" if ENGINE else "forebay_files_") + name]
