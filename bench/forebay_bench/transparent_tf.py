"""The part of `bench transparent` with TensorFlow: tf.data over TFRecord shards."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from typing import Any

from forebay.slowfs import SlowFs

from .data import make_tfrecords
from .measure import Case, Outcome
from .run import Context

_SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "transparent_tf_script.py")
_RUN = [sys.executable, "-m", "forebay.cli", "run", "--quiet"]
_RECORD_BYTES = 110 << 10
_SETTLE_S = 3.5  # the file service leaves alone what has just been written


def _epochs(
    ctx: Context, folder: str, forebay: bool, epochs: int, *arguments: str
) -> list[dict[str, Any]]:
    """What the script says of each epoch, plain or through `forebay run`."""
    command = [sys.executable, _SCRIPT, folder, "--epochs", str(epochs), *arguments]
    if forebay:
        command = [*_RUN, "--source", folder, "--", *command]
    # The copies go with the bench's own files.
    env = {**os.environ, "TMPDIR": ctx.scratch, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return [json.loads(line) for line in done.stdout.splitlines()]


def run(ctx: Context, out: Outcome) -> None:
    """Adds tf_first_vs_plain and tf_later_vs_plain, with their cases."""
    work = ctx.workload
    part = work["tensorflow"]
    root = os.path.join(ctx.scratch, "tfrecords")
    each = part["shard_bytes"] // _RECORD_BYTES
    count = each * part["shards"]
    make_tfrecords(root, count, _RECORD_BYTES, ctx.seed, shards=part["shards"])
    time.sleep(_SETTLE_S)
    # TensorFlow reads several shards at a time; "one" reads one after the other.
    kinds = ("plain", "plain first", "one", "one first", "first", "later")
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with SlowFs(
        root, open_ms=part["latency_ms"], read_ms=part["latency_ms"], stat_ms=work["stat_ms"],
        readdir_ms=work["stat_ms"], bandwidth_mb=work["bandwidth_mb"], jitter=work["jitter"],
        seed=ctx.seed,
    ) as mount:  # fmt: skip
        for i in range(ctx.repeats):
            for forebay, more in ((False, ()), (False, ("--parallel-reads", "0")), (True, ())):
                said = _epochs(
                    ctx, str(mount.path), forebay, part["epochs"] if forebay else 1, *more
                )
                for epoch in said:
                    if (epoch["samples"], epoch["bytes"]) != (count, count * _RECORD_BYTES):
                        raise RuntimeError(f"{epoch} was delivered, not {count} records")
                seconds = [epoch["seconds"] for epoch in said]
                if forebay:
                    times["first"].append(seconds[0] + said[0]["listing"])
                    times["later"].append(statistics.median(seconds[1:]))
                elif more:
                    times["one"] += seconds
                    times["one first"].append(seconds[0] + said[0]["listing"])
                else:
                    times["plain"] += seconds
                    times["plain first"].append(seconds[0] + said[0]["listing"])
                who = "forebay" if forebay else "plain, one shard at a time" if more else "plain"
                ctx.say(
                    f"tf.data, {who}: "
                    f"{', '.join(f'{s:.2f}' for s in seconds)} s ({i + 1}/{ctx.repeats})"
                )
    for name, suffix in (("first", " first"), ("later", "")):
        plain, one = times[f"plain{suffix}"], times[f"one{suffix}"]
        out.speedup(f"tf_{name}_vs_plain", times[name], plain)
        out.speedup(f"tf_{name}_vs_one_shard", times[name], one)
        out.cases.append(
            Case(
                f"tf.data, {part['shards']} TFRecord shards of {part['shard_bytes'] / 1e6:.0f} MB, "
                f"{name} epoch",
                "MB/s",
                [count * _RECORD_BYTES / 1e6 / t for t in times[name]],
                rivals={
                    "the same script, plain": count
                    * _RECORD_BYTES
                    / 1e6
                    / statistics.median(plain),
                    "plain, one shard at a time": count
                    * _RECORD_BYTES
                    / 1e6
                    / statistics.median(one),
                },
            )
        )
    shutil.rmtree(root)
