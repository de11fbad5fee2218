"""A job of `bench fairness`, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

STEP_S = 0.5  # what a rate is taken over
_CHILD_S = 120

# A job whose consumer takes batches as fast as they come, when it was told to go.
_JOB = """
import json, sys, threading, time
import forebay
spec = json.loads(sys.argv[1])
engine = forebay.SharedEngine(spec["memory"], folder=spec["folder"], keep=False, linger=1,
                              job=spec["job"], etcd=spec["etcd"])
go, ended, seen = threading.Event(), threading.Event(), []
def listen():
    for line in sys.stdin:
        {"go": go.set, "pause": go.clear, "end": ended.set}[line.strip()]()
    ended.set()
    go.set()
threading.Thread(target=listen, daemon=True).start()
print("ready", flush=True)
go.wait()
loader = forebay.DataLoader(spec["root"], spec["batch"], shuffle=True, seed=1, engine=engine,
                            rank=0, world_size=1)
while not ended.is_set():
    for batch in loader:
        seen.append((time.monotonic(), len(batch)))
        batch.release()
        go.wait()
        if ended.is_set():
            break
print(json.dumps(dict(seen=seen, alone=engine.client() is None)), flush=True)
"""


class Job:
    """One consumer, in a process of its own, by the daemon of its folder."""

    def __init__(self, spec: dict[str, Any], sample_bytes: int) -> None:
        self._bytes = sample_bytes
        self._child = subprocess.Popen(
            [sys.executable, "-c", _JOB, json.dumps(spec)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "XDG_STATE_HOME": spec["folder"] + "-state"},
        )  # fmt: skip
        self._times = np.zeros(1)
        self._total = np.zeros(1)

    def await_ready(self) -> None:
        assert self._child.stdout is not None
        if self._child.stdout.readline().strip() != "ready":
            raise RuntimeError("a measured process did not start")

    def tell(self, what: str) -> float:
        """When it was told."""
        assert self._child.stdin is not None
        self._child.stdin.write(what + "\n")
        self._child.stdin.flush()
        return time.monotonic()

    def end(self) -> None:
        try:
            said, _ = self._child.communicate("end\n", timeout=_CHILD_S)
        finally:
            self.kill()
        answer = json.loads(said.splitlines()[-1])
        if answer["alone"]:
            raise RuntimeError("a job went on without the daemon")
        self._times = np.array([t for t, _ in answer["seen"]])
        self._total = np.cumsum([n for _, n in answer["seen"]]) * self._bytes

    def kill(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()

    def taken(self, begin: float, end: float) -> float:
        """Bytes that the consumer got."""
        at = np.interp([begin, end], self._times, self._total, left=0.0)
        return float(at[1] - at[0])

    def rate(self, begin: float, end: float) -> float:
        return self.taken(begin, end) / (end - begin)

    def until(self, begin: float, end: float, reached: Any) -> float:
        """Seconds from `begin` until a stretch of STEP_S at whose rate `reached` holds."""
        for t in np.arange(begin, end - STEP_S, 0.01):
            if reached(self.rate(t, t + STEP_S)):
                return float(t - begin)
        return end - begin
