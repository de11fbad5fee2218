"""A real etcd on loopback, with ports and a data folder of its own."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from forebay._errors import StorageError, UnsupportedError

_START_S = 30


_libc = ctypes.CDLL(None)  # before a fork: other threads may hold the loader's locks then


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Etcd:
    """Starts when made; ``with`` or ``close()`` stops it and removes its data."""

    @staticmethod
    def available() -> tuple[bool, str]:
        """Whether there is one, and what to do otherwise."""
        found = shutil.which("etcd") is not None
        return found, "" if found else "etcd is not installed; try: apt install etcd-server"

    def __init__(self, *options: str) -> None:
        usable, reason = self.available()
        if not usable:
            raise UnsupportedError(reason)
        self._options = options
        self._folder = tempfile.mkdtemp(prefix="forebay-etcd-")
        self._process: subprocess.Popen[bytes] | None = None
        try:
            for _ in range(5):  # a free port may be taken by another before etcd has it
                self._ports = (_free_port(), _free_port())
                self.launch()
                if self.wait():
                    return
                self.kill()
            raise StorageError(f"etcd did not start: {self.log()[-2000:]}")
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    def launch(self) -> None:
        """Starts it, with the same ports and data as before; does not wait for it."""
        peer = f"http://127.0.0.1:{self._ports[1]}"
        command = [
            "etcd",
            f"--data-dir={self._folder}/data",
            f"--listen-client-urls={self.endpoint}",
            f"--advertise-client-urls={self.endpoint}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            *self._options,
        ]
        with open(f"{self._folder}/log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=_die_with_parent
            )

    def wait(self) -> bool:
        """Until it answers; False when it ended, or did not answer for long."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if self._process is None or self._process.poll() is not None:
                return False
            with contextlib.suppress(OSError, urllib.error.URLError):
                with urllib.request.urlopen(f"{self.endpoint}/health", timeout=2) as answer:
                    if b'"true"' in answer.read():
                        return True
            time.sleep(0.02)
        return False

    def log(self) -> str:
        with contextlib.suppress(OSError), open(f"{self._folder}/log") as log:
            return log.read()
        return ""

    def kill(self) -> None:
        """kill -9; its data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
