#!/usr/bin/env python3
"""Runs the C example over files made here and compares what it prints with what was written.

check_example.py PROGRAM
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path


def run(program: str, cache: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"FOREBAY_CACHE_DIR": str(cache)}
    return subprocess.run(
        [program, *args], env=env, capture_output=True, text=True, timeout=100, check=False
    )


def main() -> int:
    program = sys.argv[1]
    rng = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        cache = Path(folder) / "cache"
        sizes = [0, 1, 100_000, *rng.choices(range(9000), k=60)]
        contents = [rng.randbytes(size) for size in sizes]
        for i, content in enumerate(contents):
            path = data / f"class{i % 3}" / f"{i}.bin"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

        crc_sum = sum(zlib.crc32(content) for content in contents)
        totals = f"{len(contents)} samples, {sum(map(len, contents))} bytes, crc sum {crc_sum:016x}"
        expected = "".join(f"epoch {epoch}: {totals}\n" for epoch in range(2))
        for batch in ["1", "16", "1000"]:
            done = run(program, cache, str(data), batch)
            if done.returncode != 0 or done.stdout != expected:
                print(f"batch {batch}: exit {done.returncode}")
                print(f"expected:\n{expected}printed:\n{done.stdout}{done.stderr}")
                return 1

        missing = str(Path(folder) / "not_here")
        done = run(program, cache, missing)
        if done.returncode != 1 or missing not in done.stderr:
            print(f"a missing folder is not named: exit {done.returncode}, {done.stderr}")
            return 1
    print(totals)
    return 0


if __name__ == "__main__":
    sys.exit(main())
