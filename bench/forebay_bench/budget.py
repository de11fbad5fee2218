"""The memory budget holds: what a process takes at its peak, above what it needs bare."""

from __future__ import annotations

import os
import select
import subprocess
import sys

from forebay._internal.units import format_bytes, parse_bytes

from .data import make_files
from .measure import Case, Outcome
from .run import Context

# The child says "bare" before it makes a loader, then consumes, then says "done".
_CHILD = """
import sys
import numpy, forebay
root, layout = sys.argv[1], sys.argv[3]
memory, batch, epochs = int(sys.argv[2]), int(sys.argv[4]), int(sys.argv[5])
catalog = forebay.Catalog.build(root)
print("bare", flush=True)
sys.stdin.readline()
loader = forebay.DataLoader(
    catalog, batch, shuffle=True, seed=1, memory=memory, layout=layout, rank=0, world_size=1
)
samples = 0
for _ in range(epochs):
    for item in loader:
        item.checksum()
        samples += len(item)
print("done", samples, loader.engine.metrics()["forebay_stage_arena_peak_bytes"], flush=True)
sys.stdin.readline()
"""


def _anonymous(pid: int) -> int:
    """Anonymous and shared memory of a process, in bytes; mapped files are not counted."""
    total = 0
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def _peak(
    root: str, memory: int, layout: str, batch: int, epochs: int, samples: int
) -> tuple[int, int]:
    """(bytes above bare at the peak, most bytes of the arena in use)."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, root, str(memory), layout, str(batch), str(epochs)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdin and child.stdout
    try:
        if child.stdout.readline().strip() != "bare":
            raise RuntimeError("the measured process failed before its loader was made")
        bare = _anonymous(child.pid)
        child.stdin.write("\n")
        child.stdin.flush()
        peak, text = 0, ""
        while "\n" not in text:
            if child.poll() is not None:
                raise RuntimeError(f"the measured process failed: exit code {child.returncode}")
            peak = max(peak, _anonymous(child.pid))
            if select.select([child.stdout], [], [], 0.002)[0]:
                text += os.read(child.stdout.fileno(), 4096).decode()
        peak = max(peak, _anonymous(child.pid))
        _, seen, arena = text.split()
        if int(seen) != samples * epochs:
            raise RuntimeError(f"{seen} samples were delivered of {samples * epochs}")
        return peak - bare, int(arena)
    finally:
        child.stdin.close()
        child.wait(timeout=30)


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    root = os.path.join(ctx.scratch, "files")
    ctx.say(f"making {work['files']} files")
    make_files(root, work["files"], work["mean_bytes"], ctx.seed)
    worst = 0.0
    for text in work["budgets"]:
        memory = parse_bytes(text)
        for layout in ("views", "contiguous"):
            shares, arenas = [], []
            for i in range(ctx.repeats):
                above, arena = _peak(
                    root, memory, layout, work["batch"], work["epochs"], work["files"]
                )
                shares.append(above / memory)
                arenas.append(arena / memory)
                ctx.say(f"{text} {layout}: {format_bytes(above)} ({i + 1}/{ctx.repeats})")
            worst = max(worst, max(shares))
            out.cases.append(
                Case(f"peak / budget, {text}B, {layout}", "ratio", shares, limit=1.0,
                     limit_name="the budget",
                     note=f"arena in use at most {max(arenas):.2f} of the budget")
            )  # fmt: skip
    out.figures["peak_vs_budget"] = worst
    return out
