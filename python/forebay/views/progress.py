"""Progress bars on standard error, on a terminal only, and only for what takes a while."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SHOW_AFTER_S = 1.0


@contextmanager
def counting(title: str, enabled: bool | None = None) -> Iterator[Callable[..., None]]:
    """Yields ``update(done, total, *_)``. Nothing is shown before a second has passed."""
    if enabled is None:
        enabled = sys.stderr.isatty()
    start = time.monotonic()
    bar = None
    task = None

    def update(done: int, total: int = 0, *_: object) -> None:
        nonlocal bar, task
        if not enabled or time.monotonic() - start < _SHOW_AFTER_S:
            return
        if bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )

            bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
                TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            bar.start()
            task = bar.add_task(title, total=total or None)
        bar.update(task, completed=done, total=max(total, done) or None)

    try:
        yield update
    finally:
        if bar is not None:
            bar.stop()
