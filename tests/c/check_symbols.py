#!/usr/bin/env python3
"""Checks that the library exports the functions of its header and nothing else.

check_symbols.py NM LIBRARY HEADER
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def main() -> int:
    nm, library, header = sys.argv[1:]
    listed = subprocess.run(
        [nm, "--dynamic", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    exported = set()
    for line in listed.splitlines():
        kind, name = line.split()[-2:]
        if kind != "A":  # the version node itself
            exported.add(name.split("@")[0])
    text = Path(header).read_text(encoding="utf-8")
    declared = set(re.findall(r"FOREBAY_API[^;(]*?\b(fb_\w+)\(", text))
    for name in sorted(declared - exported):
        print(f"declared and not exported: {name}")
    for name in sorted(exported - declared):
        print(f"exported and not declared: {name}")
    print(f"{len(declared)} functions")
    return 0 if declared and declared == exported else 1


if __name__ == "__main__":
    sys.exit(main())
