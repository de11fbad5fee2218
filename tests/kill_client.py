"""Clients of the kill test: one process that has imported everything forks them.

A line on standard input, a JSON object with ``root``, ``seed``, ``out`` and ``env``, makes one; its
process number is answered. At the end of the input it ends; its children live on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib

import forebay
import forebay.daemon

EPOCHS = 4
BATCH = 4
STEP_S = 0.01


def train(root: str, seed: int, out: str) -> None:
    """Writes a line for each batch: epoch, samples, checksum, seconds that it was waited for."""
    with open(out, "w") as file:
        start = time.monotonic()
        loader = forebay.DataLoader(
            root,
            BATCH,
            shuffle=True,
            seed=seed,
            engine=forebay.SharedEngine(memory="64M", linger=0),
            _delay="read_ms=1",
        )
        print(json.dumps(dict(start=time.monotonic() - start)), file=file, flush=True)
        for epoch in range(EPOCHS):
            iterator = iter(loader)
            while True:
                asked = time.monotonic()
                batch = next(iterator, None)
                waited = time.monotonic() - asked
                if batch is None:
                    shared = loader.engine.client() is not None
                    said = dict(end=epoch, waited=waited, shared=shared)
                    print(json.dumps(said), file=file, flush=True)
                    break
                crc = zlib.crc32(b"".join(b.tobytes() for b in batch))
                line = [batch.epoch, batch.indices.tolist(), crc, waited]
                print(json.dumps(line), file=file, flush=True)
                del batch
                time.sleep(STEP_S)
        print("done", file=file, flush=True)


def main() -> None:
    forebay.daemon._RETURN_S = (0.1, 0.2) * 4  # back with a daemon while there is something to do
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        order = json.loads(line)
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        code = 1
        try:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            null = os.open(os.devnull, os.O_RDWR)
            errors = os.open(order["out"] + ".err", os.O_WRONLY | os.O_CREAT, 0o600)
            for number, file in ((0, null), (1, null), (2, errors)):
                os.dup2(file, number)
            os.environ.update(order["env"])
            train(order["root"], order["seed"], order["out"])
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


if __name__ == "__main__":
    main()
