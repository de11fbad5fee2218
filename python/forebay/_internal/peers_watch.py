"""Says in the program's log when other nodes are not used though they were meant to be.

Once a node: the process with local rank 0 says it, for its engine or for the node's daemon. What is
known at the start is said at once; what arises later, when it has lasted for a while.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING

from .. import _forebay
from . import ranks

if TYPE_CHECKING:
    from ..engine import Engine

_log = logging.getLogger("forebay")
_LOOK_S = 5.0
_LASTED_S = 15.0  # the nodes of a job do not start at the same moment


class PeersWatch:
    """One line when a problem has lasted, and one when it is over."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._told = False

    def look(self, problem: str, now: float, lasting: bool = False) -> None:
        """``lasting``: it cannot pass by itself, and is said at once."""
        if not problem:
            if self._told:
                _log.info("forebay: peers: all is well again")
            self._since, self._told = None, False
            return
        if self._since is None:
            self._since = now
        if not self._told and (lasting or now - self._since >= _LASTED_S):
            self._told = True
            _log.warning(
                "forebay: other nodes are not used as they were meant to be, and more is read from "
                "the source: %s",
                problem,
            )


def start(engine: Engine, wanted: str, gone: threading.Event) -> None:
    """Looks now, and every few seconds while the engine is there. Nothing where no peers are
    meant to be, or another process of the node looks.
    """
    if ranks.local_rank() > 0 or not _forebay.wants_peers(wanted):
        return
    watch = PeersWatch()
    off = engine._peers_off()
    watch.look(off, time.monotonic(), lasting=True)
    threading.Thread(target=_look_on, args=(weakref.ref(engine), watch, gone), daemon=True).start()


def _look_on(engine: weakref.ref[Engine], watch: PeersWatch, gone: threading.Event) -> None:
    while not gone.wait(_LOOK_S):
        found = engine()
        if found is None:
            return
        try:
            off = found._peers_off()
            watch.look(off or found.peers_problem(), time.monotonic(), lasting=bool(off))
        except Exception:  # noqa: BLE001, S110 - the daemon has gone; who uses it will say so
            pass
        del found
