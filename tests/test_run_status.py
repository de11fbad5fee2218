"""While an unmodified program runs, `forebay status` and /metrics name it and what it waits for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forebay.slowfs import SlowFs
from transparent.under import LIBRARY

READ = """
import os, sys, time
folder = sys.argv[1]
while not os.path.exists(sys.argv[2]):
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), "rb") as file:
            file.read()
"""


def forebay(*words: str, env: dict[str, str]) -> str:
    command = [sys.executable, "-m", "forebay.cli", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr


def jobs_of(status: str) -> list[str]:
    """None: there is no daemon yet."""
    try:
        return [job["job"] for job in json.loads(status)["control"]["jobs"]]
    except (ValueError, KeyError):
        return []


@pytest.mark.skipif(not LIBRARY.exists(), reason="this build has no libforebay_posix.so")
def test_the_program_and_what_it_waits_for(tmp_path: Path) -> None:
    data = tmp_path / "d"
    data.mkdir()
    for i in range(200):
        (data / f"{i:03}.bin").write_bytes(bytes(20_000))
    time.sleep(3.2)  # files that have just changed are left alone
    runtime = tmp_path / "r"
    runtime.mkdir(mode=0o700)
    env = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    stop = tmp_path / "stop"
    with SlowFs(data, read_ms=20) as slow:
        program = subprocess.Popen(
            [
                sys.executable, "-m", "forebay.cli", "run", "--job", "mine", "--cache-size", "64K",
                "--source",
                str(slow.path), "--", sys.executable, "-c", READ, str(slow.path), str(stop),
            ],
            env=env, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            end = time.monotonic() + 60
            said = metrics = ""
            jobs: list[str] = []
            while time.monotonic() < end and ("python" not in said or not jobs):
                said = forebay("status", env=env)
                jobs = jobs_of(forebay("status", "--json", env=env))
                metrics = forebay("status", "--prometheus", env=env)
                time.sleep(0.2)
        finally:
            stop.touch()
            assert program.wait(60) == 0, program.communicate()[1]
    assert "program python" in said and "rank" not in said.split("\nmechanisms")[0], said
    seen = re.search(rf"  {re.escape(str(slow.path))}  (\d+) files seen so far", said)
    assert seen is not None and int(seen[1]) > 0, said
    assert jobs == ["mine"]  # whose limits hold for what it reads
    rows = [r for r in metrics.splitlines() if 'stream="files"' in r and "stall_nano" in r]
    waited = {r.split('cause="')[1].split('"')[0]: int(r.split()[-1]) for r in rows}
    assert 'job="python' in rows[0]
    assert max(waited, key=lambda cause: waited[cause]) == "source"
    assert waited["source"] > 0
    # Nothing is left behind.
    end = time.monotonic() + 30
    while (left := list(runtime.rglob("*-*"))) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []
