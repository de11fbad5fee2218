"""Mounts a folder as slow storage, with the ``slowfs`` program.

with SlowFs("/data/train", open_ms=1, read_ms=1, bandwidth_mb=300) as slow:
    train(slow.path)
    print(slow.stats()["bytes_read"])
"""

from __future__ import annotations

import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

Setting = int | float | str

# Keyword argument -> option of slowfs. The keywords are the keys of `.slowfs/settings`.
_OPTIONS = {
    "open_ms": "--open-ms",
    "stat_ms": "--stat-ms",
    "readdir_ms": "--readdir-ms",
    "read_ms": "--read-ms",
    "jitter": "--jitter",
    "tail_prob": "--tail-prob",
    "tail_mult": "--tail-mult",
    "bandwidth_mb": "--bandwidth",
    "ops": "--ops",
    "eio_rate": "--eio-rate",
    "stall_ms": "--stall",
    "seed": "--seed",
}


def _unmount(mountpoint: str) -> None:
    for command in (["fusermount3", "-u", "-z", mountpoint], ["umount", "-l", mountpoint]):
        if shutil.which(command[0]) is None:
            continue
        if subprocess.run(command, capture_output=True, check=False).returncode == 0:
            return


def _stop(process: subprocess.Popen[str], mountpoint: str, temporary: str | None) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if process.stderr is not None:
        process.stderr.close()
    if _is_mounted(mountpoint):
        _unmount(mountpoint)
    if temporary is not None:
        # Only an empty folder goes: if the unmount failed, nothing below it may be touched.
        try:
            os.rmdir(temporary)
        except OSError:
            pass


def _is_mounted(path: str) -> bool:
    try:
        return os.path.ismount(path)
    except OSError:
        # A mount whose process has died answers nothing but errors.
        return True


class SlowFs:
    """A mounted ``slowfs``; a context manager that unmounts at its end.

    ``source`` appears read-only at ``path``: at ``mountpoint``, or at a temporary folder if that is
    None. With ``writable_mb`` it can be written to, at so many 10^6 bytes a second (0: no limit),
    as a local disk can. The other arguments are the settings of slowfs (``slowfs --help``); times
    are in milliseconds, ``bandwidth_mb`` in 10^6 bytes a second, ``stall_ms`` may be ``"forever"``.

    Raises RuntimeError, with slowfs's own words, if the mount fails.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        mountpoint: str | os.PathLike[str] | None = None,
        *,
        cache: bool = False,
        threads: int | None = None,
        realtime: bool = True,
        timeout_s: float = 30,
        writable_mb: float | None = None,
        **settings: Setting,
    ) -> None:
        binary = self.find()
        if binary is None:
            raise RuntimeError(self.available()[1])
        unknown = sorted(set(settings) - set(_OPTIONS))
        if unknown:
            raise TypeError(f"unknown settings {unknown}; known are {sorted(_OPTIONS)}")
        temporary = None
        if mountpoint is None:
            mountpoint = temporary = tempfile.mkdtemp(prefix="slowfs-")
        self.path = Path(mountpoint).absolute()
        command = [binary, "--foreground"]
        for key, value in settings.items():
            command += [_OPTIONS[key], str(value)]
        if cache:
            command.append("--cache")
        if writable_mb is not None:
            command += ["--writable", str(writable_mb)]
        if not realtime:
            command.append("--no-realtime")
        if threads is not None:
            command += ["--threads", str(threads)]
        self._process = subprocess.Popen(
            [*command, os.fspath(source), str(self.path)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._close = weakref.finalize(self, _stop, self._process, str(self.path), temporary)
        try:
            self._wait_until_mounted(timeout_s)
        except BaseException:
            self.close()
            raise

    def _wait_until_mounted(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not self._control("stats").exists():
            if self._process.poll() is not None:
                assert self._process.stderr is not None
                message = self._process.stderr.read().strip()
                raise RuntimeError(message or f"slowfs exited with {self._process.returncode}")
            if time.monotonic() > end:
                raise RuntimeError(f"slowfs did not mount {self.path} within {timeout_s} s")
            time.sleep(0.005)

    @staticmethod
    def find() -> str | None:
        """Path of the slowfs program: $FOREBAY_SLOWFS, beside Python, on PATH, in a build
        folder.
        """
        named = os.environ.get("FOREBAY_SLOWFS")
        if named:
            return named if os.access(named, os.X_OK) else None
        beside = Path(sys.executable).parent / "slowfs"
        if os.access(beside, os.X_OK):
            return str(beside)
        on_path = shutil.which("slowfs")
        if on_path:
            return on_path
        root = Path(__file__).resolve().parents[2]
        built = glob.glob(str(root / "build" / "*" / "bench" / "slowfs" / "slowfs"))
        return max(built, key=os.path.getmtime, default=None)

    @classmethod
    def available(cls) -> tuple[bool, str]:
        """Whether slowfs can be used here and, if not, why."""
        if cls.find() is None:
            named = os.environ.get("FOREBAY_SLOWFS")
            if named:
                return False, f"FOREBAY_SLOWFS={named} is not a program"
            return False, "the slowfs program is not built (needs libfuse3) or not on PATH"
        try:
            os.close(os.open("/dev/fuse", os.O_RDWR))
        except OSError as error:
            return False, f"/dev/fuse: {error.strerror}"
        if os.geteuid() != 0 and shutil.which("fusermount3") is None:
            return False, "fusermount3 is missing (package fuse3)"
        return True, ""

    @property
    def pid(self) -> int:
        """Process id of slowfs."""
        return self._process.pid

    def _control(self, name: str) -> Path:
        return self.path / ".slowfs" / name

    def stats(self) -> dict[str, Any]:
        """Counters since the mount or the last reset; docs/slowfs.md explains each."""
        result: dict[str, Any] = json.loads(self._control("stats").read_text())
        return result

    def reset(self) -> None:
        """Sets the counters, and the processor time, back to 0."""
        self._control("reset").write_text("1")

    def settings(self) -> dict[str, str]:
        """The settings in force, as text."""
        lines = self._control("settings").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if not line.startswith("#"))

    def set(self, **settings: Setting) -> None:
        """Changes settings of the mounted file system, from now on.

        Raises ValueError, with slowfs's own words, if it refuses them; then nothing has changed.
        """
        text = "".join(f"{key}={value}\n" for key, value in settings.items())
        try:
            self._control("settings").write_text(text)
        except OSError as error:
            shown = self._control("settings").read_text().splitlines()
            reasons = [line for line in shown if line.startswith("#")]
            raise ValueError(reasons[0] if reasons else str(error)) from error

    def close(self) -> None:
        """Unmounts and ends slowfs; what still waits is answered at once. May be called again."""
        self._close()

    def __enter__(self) -> SlowFs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
