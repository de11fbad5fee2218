"""Programs under Forebay in tests: a file service of the test's own, and what preloads the library.

`forebay run` does the same for users; here the service's knobs are at hand, so that a test need not
wait for its files to grow old, and the service can be killed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forebay
from forebay import _forebay

from transparent.table import opens_in, table_of

PACKAGE = Path(forebay.__file__).resolve().parent
SERVICE = Path(os.environ.get("FOREBAYD") or PACKAGE / "forebayd")
LIBRARY = Path(os.environ.get("FOREBAY_POSIX_LIBRARY") or PACKAGE / "libforebay_posix.so")
_START_S = 20.0
_RUN_S = 240.0


def plain_environment() -> dict[str, str]:
    """Without Forebay, and the same for both: no cached byte code, one language."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FOREBAY_", "LD_PRELOAD"))}
    return kept | {"LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "TZ": "UTC"}


def run(
    command: Sequence[str], environment: dict[str, str], cwd: Path | str | None = None, **more: Any
) -> subprocess.CompletedProcess[bytes]:
    more.setdefault("timeout", _RUN_S)
    return subprocess.run(
        command, env=environment, cwd=cwd, capture_output=True, stdin=subprocess.DEVNULL,
        check=False, **more,
    )  # fmt: skip


class FileService:
    """``forebayd`` with a cache folder of its own; `environment()` is what serves a program.

    Knobs are the options of the program, such as ``cache_bytes=65536``. Files are copied however
    young they are, unless ``young_ms`` says otherwise.
    """

    def __init__(self, sources: Sequence[Path], cache: Path | None = None, **knobs: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="fbt-"))  # short: a socket's path is limited
        store = cache or self.folder / "cache"
        self.cache = store / "run"
        self.sources = [Path(os.path.realpath(source)) for source in sources]
        knobs = {"young_ms": 0, "slots": 1 << 16, "linger": 600} | knobs
        self._process = subprocess.Popen(
            [
                str(SERVICE),
                f"--files={store}",
                f"--folder={self.folder}",
                *(f"--source={source}" for source in self.sources),
                *(f"--{name}={value}" for name, value in knobs.items()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=plain_environment(),
        )
        end = time.monotonic() + _START_S
        while not (sockets := list(self.folder.glob("files-*.sock"))):
            if self._process.poll() is not None or time.monotonic() > end:
                self.close()
                assert self._process.stderr is not None
                raise RuntimeError(f"forebayd: {self._process.stderr.read().decode()}")
            time.sleep(0.01)
        self.socket = sockets[0]

    @property
    def pid(self) -> int:
        return self._process.pid

    def environment(self) -> dict[str, str]:
        return plain_environment() | {
            "FOREBAY_FILES_CACHE": str(self.cache),
            "FOREBAY_FILES_SOCKET": str(self.socket),
            "FOREBAY_FILES_SOURCES": ":".join(map(str, self.sources)),
            "LD_PRELOAD": str(LIBRARY),
        }

    def copies(self) -> int:
        """Files that have a whole copy now."""
        try:
            return sum("." not in name for name in os.listdir(self.cache / "copies"))
        except FileNotFoundError:
            return 0

    def opens(self) -> int:
        """How often programs opened a copy, also of files that have been changed since."""
        return opens_in(table_of(self.socket))

    def metric(self, name: str) -> int:
        status = json.loads(_forebay.FileSession.connect(str(self.socket), 5.0).status())
        return int(status["metrics"][name])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()
        if self._process.stderr is not None:
            self._process.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> FileService:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
