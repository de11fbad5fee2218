#!/usr/bin/env python3
"""Takes the picture of the daemon's web page: two jobs, three ranks, on slow storage.

scripts/picture_web_page.py ROOT OUT.png [SECONDS]

Data sets are made and mounted below the folder ROOT (as /data), which has to be absent or empty and
is removed at the end. Needs slowfs and a headless Chromium.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from browser import Browser  # noqa: E402
from forebay.slowfs import SlowFs  # noqa: E402

_JOB = textwrap.dedent("""\
    import sys, time, forebay
    root, rank, world, step, cache = sys.argv[1:]
    engine = forebay.SharedEngine(memory="192M", cache_dir=cache, cache_bytes="96M", linger=1)
    loader = forebay.DataLoader(root, 32, shuffle=True, rank=int(rank), world_size=int(world),
                                engine=engine)
    while True:
        for batch in loader:
            time.sleep(float(step))
            batch.release()
""")
_SETS = {"imagenet": (5000, 50_000), "speech": (600, 80_000)}
_RANKS = (("resnet50", "imagenet", 0, 2, 0.02), ("resnet50", "imagenet", 1, 2, 0.02),
          ("conformer", "speech", 0, 1, 0.08))  # fmt: skip


def main() -> int:
    root, out = Path(sys.argv[1]), Path(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 60.0
    work = Path(tempfile.mkdtemp(prefix="forebay-picture-"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(work), "FOREBAY_METRICS_PORT": str(port),
                   "FOREBAY_CACHE_DIR": str(work / "catalogs")}  # fmt: skip
    for name, (files, size) in _SETS.items():
        for i in range(files):
            path = work / name / f"class{i % 10}" / f"{i:05}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(size))
    running: list[subprocess.Popen] = []
    mounts: list[SlowFs] = []
    chromium = None
    try:
        for name in _SETS:
            (root / name).mkdir(parents=True)
            mounts.append(SlowFs(work / name, root / name, open_ms=2, read_ms=1, bandwidth_mb=45))
        for job, name, rank, world, step in _RANKS:
            arguments = [str(root / name), str(rank), str(world), str(step), str(work / "nvme")]
            running.append(subprocess.Popen([sys.executable, "-c", _JOB, *arguments],
                                            env={**environment, "FOREBAY_JOB": job}))  # fmt: skip
        url = f"http://127.0.0.1:{port}/"
        for _ in range(300):
            try:
                with urllib.request.urlopen(f"{url}status.json") as answer:
                    if len(json.load(answer)["clients"]) == len(_RANKS):
                        break
            except OSError:
                pass
            time.sleep(0.1)
        chromium = Browser(work / "profile", 1240, 900)
        chromium.scheme("light")
        chromium.open(url)
        chromium.wait_for(f"Number(document.body?.dataset.looks) >= {seconds}", 3 * seconds)
        chromium.screenshot(out)
        print(chromium.evaluate("document.getElementById('answer').textContent"))
        assert chromium.errors == []
    finally:
        if chromium is not None:
            chromium.close()
        for process in running:
            process.kill()
            process.wait()
        time.sleep(2)
        for mount in mounts:
            mount.close()
        shutil.rmtree(work)
        shutil.rmtree(root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
