"""``forebay top``: the node's daemon, live in a terminal."""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .. import _forebay, files
from .._errors import AccessError, ForebayError
from .._internal.units import format_bytes, text_of
from .daemon_status import duration, knob_value
from .peers_status import cluster_lines
from .report import CAUSES
from .watch import Rates, processes, rates, streams, why_idle

_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_ENTER = "\x1b[?1049h\x1b[?25l"  # another screen, no cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_COLORS = {"bold": "1", "soft": "2", "good": "32", "warn": "33", "bad": "31", "fill": "36"}


class _Text:
    """Lines of at most ``width`` characters, with colors that count for nothing."""

    def __init__(self, width: int, color: bool) -> None:
        self.width, self.color = width, color
        self.lines: list[str] = []

    def add(self, *parts: str | tuple[str, str]) -> None:
        """A part may be (text, color)."""
        line, left = "", self.width
        for part in parts:
            words, color = part if isinstance(part, tuple) else (part, "")
            # What is not printable would move the cursor, or worse.
            words = "".join(c if c.isprintable() else "?" for c in words)[:left]
            left -= len(words)
            line += f"\x1b[{_COLORS[color]}m{words}\x1b[0m" if self.color and color else words
        self.lines.append(line)


def bar(share: float, width: int) -> str:
    """A bar of plain characters."""
    full = round(max(0.0, min(1.0, share)) * width)
    return "[" + "#" * full + "." * (width - full) + "]"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def frame(
    said: dict[str, Any],
    now: Rates | None,
    *,
    width: int = 100,
    height: int = 0,
    color: bool = False,
) -> list[str]:
    """The daemon's status as lines for a terminal; ``height`` 0: as many as it takes."""
    text = _Text(width, color)
    source = said["source"]
    text.add(("forebay top", "bold"), f"  forebayd {said['pid']}, for ",
             f"{duration(said['uptime_ms'] / 1000)}, memory {format_bytes(said['budget'])}",
             f"   {said['url']}" if said.get("url") else "")  # fmt: skip
    worst = max((p.share for p in processes(said)), default=0.0)
    for line in _wrapped(why_idle(said, now), width):
        text.add((line, "good" if worst < 0.02 else "warn" if worst < 0.1 else "bad"))
    if control := said.get("control"):
        text.add(("control  ", "soft"), text_of(str(control.get("sentence", ""))))
    text.add()
    rate = "-" if now is None else f"{format_bytes(now.source_bytes)}/s"
    reads = "-" if now is None else f"{_number(now.source_reads)} reads/s"
    text.add(("source   ", "soft"), f"{rate:>13}  {reads:>14}   in flight {source['in_flight']} of "
             f"{source['in_flight_limit']}", ("   errors " + str(source["errors"]), "bad")
             if source["errors"] else "")  # fmt: skip
    for line in cluster_lines(said.get("cluster"), said.get("peers_off", "")):
        for part in _wrapped(line, width - 9):
            text.add((f"{'' if line.startswith(' ') else 'cluster':<9}", "soft"), part.strip())
    for tier in said["tiers"]:
        share = tier["used"] / tier["limit"] if tier["limit"] else 0.0
        text.add((f"{tier['name']:<9}", "soft"), (bar(share, 24), "fill"), f" {share:4.0%}  ",
                 f"{format_bytes(tier['used'])} of {format_bytes(tier['limit'])}",
                 (f"  {text_of(tier['status'])}", "bad") if tier["status"] else "")  # fmt: skip
    text.add()
    _ranks(text, said, now)
    text.add()
    for mechanism in said["mechanisms"]:
        knobs = ", ".join(f"{k['name']} {knob_value(k, k['value'])}" for k in mechanism["knobs"])
        if knobs:
            text.add((f"{mechanism['name']:<14}", "soft"), knobs)
    if height and len(text.lines) > height:
        left_out = len(text.lines) - height + 1
        text.lines = text.lines[: height - 1]
        text.add((f"({left_out} more lines: make the window higher)", "soft"))
    return text.lines


def _ranks(text: _Text, said: dict[str, Any], now: Rates | None) -> None:
    rows = [("job", "rank", "epoch", "batch", "samples/s", "ready", "waited", "mostly for")]
    shares = [0.0]
    for client, s in sorted(streams(said), key=lambda cs: (cs[1]["job"], cs[1]["rank"])):
        got = now.streams.get((client["pid"], s["stream"])) if now is not None else None
        waits = s["recent_stall_ns"]
        cause = max(waits, key=lambda c: waits[c])
        share = s["recent_stall_share"]
        of = f"/{s['epoch_batches']}" if s["epoch_batches"] else ""
        where = (f"{s['rank']}/{s['world']}", str(s["epoch"]), f"{s['batches']}{of}")
        if client.get("program"):
            where = ("-", "-", "-")
        rows.append((
            text_of(s["job"]), *where,
            "-" if got is None else _number(got[0]), str(s["ready"]), f"{share:.0%}",
            CAUSES.get(cause, cause) if share >= 0.005 else "-",
        ))  # fmt: skip
        shares.append(share)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    widths[0] = min(widths[0], max(10, text.width - 80))
    for i, (row, share) in enumerate(zip(rows, shares, strict=True)):
        cells = [
            cell[:w].ljust(w) if at in (0, 7) else cell.rjust(w)
            for at, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        first, last = "  ".join(cells[:6]), "  ".join(cells[6:])
        if i == 0:
            text.add((f"{first}  {last}", "soft"))
        else:
            hue = "good" if share < 0.02 else "warn" if share < 0.1 else "bad"
            text.add(f"{first}  ", (last, hue))
    if len(rows) == 1:
        text.add("no job reads through this daemon now")


def _wrapped(sentence: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(sentence, max(20, width)) or [""]


# ---- the terminal


class _Looks:
    """Asks the daemon; finds it again after it was gone."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._client: _forebay.SharedEngine | None = None
        self.before: dict[str, Any] | None = None
        self.now: Rates | None = None

    def look(self) -> dict[str, Any] | None:
        """The status; None when no daemon runs."""
        try:
            if self._client is None:
                self._client = files.attach_running(self.folder, 2.0)
            said = json.loads(self._client.describe())
        except AccessError:
            raise
        except ForebayError:
            self._client, self.before, self.now = None, None, None
            return None
        said["clients"] = [c for c in said["clients"] if c["pid"] != os.getpid()]
        if (fresh := rates(self.before, said)) is not None or self.before is None:
            self.before, self.now = said, fresh
        return said


def _no_daemon(where: str, waiting: bool) -> str:
    said = f"No forebayd runs for this user on this node (looked in {where})."
    return f"{said} Waiting for one." if waiting else said


@contextmanager
def _screen() -> Iterator[int]:
    """A screen of its own on a terminal, which is as it was afterwards. The descriptor that comes
    is readable after a signal.
    """
    import termios
    import tty

    keyboard = sys.stdin.fileno() if sys.stdin.isatty() else -1
    before = termios.tcgetattr(keyboard) if keyboard >= 0 else None

    def stop(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    handlers = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGHUP)}
    # A signal ends the wait for a key: the next frame has the new size.
    handlers[signal.SIGWINCH] = signal.signal(signal.SIGWINCH, lambda *_: None)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    old_wake = signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    try:
        if before is not None:
            tty.setcbreak(keyboard)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        yield wake_read
    finally:
        signal.set_wakeup_fd(old_wake)
        os.close(wake_read)
        os.close(wake_write)
        if before is not None:
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _asked_to_leave(signals: int, seconds: float) -> bool:
    """Waits for a key, a signal or the time."""
    watched = [signals]
    if sys.stdin.isatty():
        watched.append(sys.stdin.fileno())
    ready, _, _ = select.select(watched, [], [], seconds)
    for fd in ready:
        got = os.read(fd, 64)
        if fd != signals and (not got or b"q" in got.lower() or b"\x1b" == got):
            return True
    return False


def _paint(lines: list[str]) -> None:
    sys.stdout.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in lines[:-1]))
    sys.stdout.write(f"{lines[-1]}{_CLEAR_LINE}{_CLEAR_BELOW}")
    sys.stdout.flush()


def run(options: argparse.Namespace) -> int:
    folder = os.path.abspath(options.folder) if options.folder else ""
    where = folder or _forebay.SharedEngine.default_folder()
    if options.web is not None:
        from .web import serve

        return serve(folder, options.web)
    looks = _Looks(folder)
    if options.once:
        if looks.look() is None:
            print(_no_daemon(where, waiting=False))
            return 1
        time.sleep(options.interval)  # rates come from two looks
        said = looks.look()
        if said is None:
            print(_no_daemon(where, waiting=False))
            return 1
        width = shutil.get_terminal_size((120, 0)).columns
        print("\n".join(frame(said, looks.now, width=width, color=sys.stdout.isatty())))
        return 0
    try:
        if sys.stdout.isatty():
            _show(looks, where, options.interval)
        else:
            _print(looks, where, options.interval)
    except KeyboardInterrupt:
        pass
    return 0


def _show(looks: _Looks, where: str, interval: float) -> None:
    """On a terminal, until a key ends it."""
    with _screen() as signals:
        while True:
            # Not the environment's, which does not change with the window.
            columns, lines_there = os.get_terminal_size(sys.stdout.fileno())
            columns, lines_there = columns or 80, lines_there or 24
            said = looks.look()
            if said is None:
                lines = _wrapped(_no_daemon(where, waiting=True), columns)
            else:
                lines = frame(said, looks.now, width=columns, height=lines_there, color=True)
            _paint(lines)
            if _asked_to_leave(signals, interval if looks.now is not None else 0.5):
                return


def _print(looks: _Looks, where: str, interval: float) -> None:
    """Into a pipe: frame after frame, with a line between them."""
    told = False
    while True:
        said = looks.look()
        if said is not None:
            print("\n".join(frame(said, looks.now, width=120)), end="\n\n", flush=True)
        elif not told:
            print(_no_daemon(where, waiting=True), flush=True)
        told = said is None
        time.sleep(interval)
