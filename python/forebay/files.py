"""The file service of forebayd: copies of whole files, for programs that know nothing of it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from . import _forebay
from ._errors import AccessError, ArgumentError, ForebayError, MissingError, StorageError
from ._internal.units import format_bytes, parse_bytes, text_of

NAMESPACE = "FOREBAY_FILES_NAMESPACE"
CACHE, SOCKET, SOURCES = "FOREBAY_FILES_CACHE", "FOREBAY_FILES_SOCKET", "FOREBAY_FILES_SOURCES"
JOB = "FOREBAY_FILES_JOB"

_PATIENCE_S = 5.0  # with the disk of a folder for copies
_NOT_YET_LOCKED_S = 600.0  # a folder without a lock may be of a run that begins


class FolderHangs(StorageError):
    """The disk of a folder for copies does not answer: one goes on without copies."""

    def __init__(self, folder: str, option: str = "--cache") -> None:
        super().__init__(
            f"the cache folder {folder} has not answered for {_PATIENCE_S:g} s: nothing is copied, "
            "and all is read from the source; repair its disk, or name a folder on another one "
            f"with {option}"
        )


def check_answers(folder: str | os.PathLike[str], option: str = "--cache") -> None:
    """Raises ``FolderHangs`` when the disk of a folder for copies, or of what there is of its path,
    does not answer. A process of its own asks it, which nobody waits for if it hangs: a thread that
    does could keep this process from its end.
    """
    path = os.path.abspath(os.fspath(folder))
    variables = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    command = [os.fsencode(program()), b"--look=" + os.fsencode(path)]
    try:
        asking = subprocess.Popen(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return  # whoever starts the service says so
    with asking:
        assert asking.stdout is not None
        # It ends at once; its child closes the pipe.
        if not select.select([asking.stdout], [], [], _PATIENCE_S)[0]:
            raise FolderHangs(path, option)


def program() -> str:
    """The daemon: beside the extension module, or as the environment says."""
    named = os.environ.get("FOREBAYD")
    return named or os.path.join(os.path.dirname(os.path.abspath(_forebay.__file__)), "forebayd")


class Stream:
    """Tells the service in which order a reader is going to open its files."""

    def __init__(self, socket: str, job: int = 0) -> None:
        self._session: Any = _forebay.FileSession.connect(socket, job=job)

    def names(self, paths: Iterable[str | bytes | os.PathLike]) -> None:
        """Gives paths the next numbers, from 0 on."""
        self._session.names([os.fsencode(os.path.abspath(p)) for p in paths])

    def order(self, position: int, numbers: Sequence[int]) -> None:
        """What comes at ``position`` and after; replaces what was said of those positions."""
        import numpy as np

        self._session.order(position, np.ascontiguousarray(numbers, dtype=np.uint32))

    def at(self, position: int) -> None:
        """The reader has come to this position."""
        self._session.at(position)

    def close(self) -> None:
        self._session = None


class Service:
    """A session with the service of a cache folder, which stays as long as this object is open."""

    def __init__(self, session: Any, cache: str, sources: list[str]) -> None:
        self._session = session
        self.cache = cache
        self.socket: str = session.socket
        self.job: int = session.job
        """The number of the job that programs read for; 0: the daemon's own."""
        self.sources = sources
        self.view = os.fsdecode(session.cache)
        """The folder in which programs find copies."""
        self.differs: list[str] = []
        """Settings of the daemon that runs which are not those that were asked for, in words."""

    @classmethod
    def start(
        cls,
        cache: str | os.PathLike | None = None,
        cache_bytes: int | str | None = None,
        sources: Iterable[str | os.PathLike] = (),
        ahead_bytes: int | str | None = None,
        *,
        job: str = "",
        shared: str = "",
        names: Mapping[str, str] | None = None,
        folder: str = "",
        timeout: float = 20.0,
        **settings: Any,
    ) -> Service:
        """Starts the service of a cache folder, or joins the one that runs.

        ``job``: whose shares and limits hold for what is read; without it, those of the daemon's
        own.
        Without ``cache`` the folder is a fresh one on the node's local disk, which goes with the
        service; all who name the same ``shared`` have the same one. ``names``: what nodes that have
        a data folder at different paths call it, by its path without links. ``settings`` are more
        of forebayd's options.
        """
        folders = data_folders(sources)
        for name, value in (("cache_bytes", cache_bytes), ("ahead_bytes", ahead_bytes)):
            if value is not None:
                settings[name] = parse_bytes(value, name)
        fresh = cache is None
        if fresh:
            where = shared_folder(shared) if shared else fresh_folder()
        else:
            check_answers(cache)  # type: ignore[arg-type]
            where = os.path.realpath(os.fspath(cache))  # type: ignore[arg-type]
            check_outside(where, folders)
            try:
                os.makedirs(where, mode=0o700, exist_ok=True)
            except OSError as error:
                raise AccessError(
                    f"the cache folder {where}: {error.strerror}; name one on a local disk that "
                    "you may write to with --cache"
                ) from error
        if fresh:
            settings["temporary"] = 1
        try:
            session = _forebay.FileSession.start(
                program(),
                folder,
                os.fsencode(where),
                [os.fsencode(f"{names[f]}={f}" if names and f in names else f) for f in folders],
                [f"{name}={value}" for name, value in settings.items()],
                job,
                timeout,
            )
        except BaseException as error:  # Ctrl-C, too
            if isinstance(error, StorageError) and "has not answered for" in str(error):
                raise FolderHangs(where) from error
            if fresh and not shared:
                shutil.rmtree(where, ignore_errors=True)
            raise
        service = cls(session, where, folders)
        service.differs = differences(settings, service.status())
        return service

    def environment(self) -> dict[str, str]:
        """What programs need to find the service."""
        return {
            CACHE: self.view,
            SOCKET: self.socket,
            SOURCES: ":".join(self.sources),
            JOB: str(self.job),
        }

    def status(self) -> dict[str, Any]:
        """The service's metrics, knobs and state."""
        return json.loads(self._session.status())

    def warnings(self) -> list[str]:
        """What its user should know: settings that do not hold, and what went wrong so far."""
        said = [text_of(text) for text in self.status().get("warnings", [])]
        if self.differs:
            said.insert(
                0,
                f"the daemon of {self.cache} was started by another process, whose settings hold: "
                f"{', '.join(self.differs)}; wait for the others to end, or use another folder",
            )
        return said

    def set_knobs(self, values: dict[str, int]) -> None:
        """Sets knobs of the running service: all of them, or none."""
        self._session.set_knobs([f"{name}={value}" for name, value in values.items()])

    def stream(self) -> Stream:
        """For announcing one reader's order."""
        return Stream(self.socket, self.job)

    def changed(self, path: str | os.PathLike) -> None:
        """Says that a file, or all in a folder, has been changed by a program of ours."""
        self._session.changed(os.fsencode(os.path.abspath(path)))

    def close(self) -> None:
        """The service ends some seconds later, if nobody else uses it."""
        self._session = None

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_SETTINGS = {"cache_bytes": "--cache-size", "ahead_bytes": "--ahead"}
_SIZES = ("cache_bytes", "ahead_bytes")
_FILES_SUFFIX = "-files"  # of a cluster's name; forebayd's


def differences(wanted: Mapping[str, Any], status: Mapping[str, Any]) -> list[str]:
    """What the daemon that runs has otherwise than it is ``wanted``, each with both values."""
    theirs = dict(line.split("=", 1) for line in text_of(status["settings"]).splitlines())
    knobs = {knob["name"]: knob["value"] for knob in status["knobs"]}
    out = []
    for name, value in wanted.items():
        if name in ("linger", "temporary", "peers") or theirs.get(name) == str(value):
            continue
        has: Any = theirs.get(name) or knobs.get(f"files_{name}", "its default")
        ours = value
        if name in _SIZES:
            ours, has = (format_bytes(int(each)) for each in (value, has))
        out.append(f"{_SETTINGS.get(name, name)} {ours} (it has {has})")
    peers = str(wanted.get("peers", ""))
    cluster = _forebay.cluster_name(peers, _FILES_SUFFIX)
    if cluster != theirs.get("cluster", "") and (cluster or peers):
        has = theirs.get("cluster") or "none"
        out.append(f"peers: {cluster or 'none'} (it has {has})")
    return out


def check_outside(cache: str, sources: Iterable[str]) -> None:
    """The cache folder must not be a part of the data: programs would list it with them."""
    for source in map(os.path.realpath, sources):
        if source == "/":
            continue  # forebay:// serves whatever is named
        if cache == source or cache.startswith(source + "/"):
            raise ArgumentError(
                f"the cache folder {cache} lies in the data folder {source}, where programs would "
                "find it among the data; name one elsewhere with --cache"
            )


def data_folders(sources: Iterable[str | os.PathLike]) -> list[str]:
    """The folders as they are named and as they are without links, each once."""
    out: list[str] = []
    for source in sources:
        named = os.path.abspath(os.fspath(source))
        if not os.path.isdir(named):
            raise MissingError(f"the data folder {named} is not there")
        for path in (named, os.path.realpath(named)):
            if ":" in path:
                raise ArgumentError(f"a data folder must not have ':' in its path: {path}")
            if path not in out:
                out.append(path)
    return out


def fresh_folder() -> str:
    """A new folder on a local disk, for the copies of one run. Removes those of runs that were
    killed.
    """
    return _local_folder(lambda prefix, base: tempfile.mkdtemp(prefix=prefix, dir=base))


def shared_folder(shared: str) -> str:
    """The folder on a local disk for the copies of a job's tasks on this node."""
    name = hashlib.sha256(shared.encode(errors="surrogateescape")).hexdigest()[:8]

    def make(prefix: str, base: str) -> str:
        path = os.path.join(base, prefix + name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o22:
            raise PermissionError(errno.EPERM, f"{path} is not a folder of this user alone")
        return path

    return _local_folder(make, f"forebay-{os.geteuid()}-{name}")


def _local_folder(make: Callable[[str, str], str], keep: str = "") -> str:
    why = []
    for base in (os.environ.get("SLURM_TMPDIR"), os.environ.get("TMPDIR"), "/var/tmp"):
        if not base:
            continue
        try:
            check_answers(base)
        except FolderHangs:
            why.append(f"{base}: its disk does not answer")
            continue
        if not os.path.isdir(base):
            continue
        clear_dead(base, keep)
        try:
            made = make(f"forebay-{os.geteuid()}-", base)
        except OSError as error:
            why.append(f"{base}: {error.strerror}")
            continue
        try:
            os.setxattr(made, "user.forebay.try", b"x")
            return os.path.realpath(made)
        except OSError as error:
            why.append(f"{base} has no extended attributes: {error.strerror}")
            with contextlib.suppress(OSError):
                os.rmdir(made)
    raise AccessError(
        "no folder for copies of files ("
        + "; ".join(why)
        + "); name one on a local disk with --cache"
    )


def clear_dead(base: str, keep: str = "") -> None:
    """Removes the folders in ``base`` but ``keep`` whose service was killed, and such services'
    sockets.
    """
    _clear_sockets(_forebay.SharedEngine.default_folder())
    ours = re.compile(rf"forebay-{os.geteuid()}-[a-zA-Z0-9_]{{8}}")
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            dead = ours.fullmatch(entry.name) and entry.name != keep
            if dead and entry.is_dir(follow_symlinks=False):
                _clear_one(entry.path)


def _clear_sockets(folder: str) -> None:
    """Nobody comes back to the name of a folder that was used once."""
    names = []
    with contextlib.suppress(OSError):
        names = [n for n in os.listdir(folder) if re.fullmatch(r"files-[0-9a-f]{16}\.lock", n)]
    for name in names:
        path = os.path.join(folder, name)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            # Held by a service for its life, and by who starts one.
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == os.stat(path).st_ino:
                shutil.rmtree(os.path.join(folder, f"run-{name[6:14]}"), ignore_errors=True)
                for end in (".sock", ".log", ".lock"):
                    with contextlib.suppress(OSError):
                        os.unlink(path.removesuffix(".lock") + end)
        except OSError:
            pass
        finally:
            os.close(lock)


def _clear_one(path: str) -> None:
    try:
        lock = _open_lock(path)
    except OSError:
        with contextlib.suppress(OSError):
            # Without a lock it is one that begins, or ended halfway.
            if time.time() - os.stat(path).st_mtime > _NOT_YET_LOCKED_S:
                shutil.rmtree(path, ignore_errors=True)
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except OSError:
        pass  # it is in use
    finally:
        os.close(lock)


def _open_lock(path: str) -> int:
    """What a service holds for its life, in the folder that programs see."""
    return os.open(os.path.join(path, "run", "lock"), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)


def running(folder: str = "") -> list[dict[str, Any]]:
    """What each file service of this user on this node says of itself."""
    where = folder or _forebay.SharedEngine.default_folder()
    out = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(where)):
            if not re.fullmatch(r"files-[0-9a-f]{16}\.sock", name):
                continue
            with contextlib.suppress(ForebayError, OSError):
                session = _forebay.FileSession.connect(os.path.join(where, name), 2.0)
                out.append(json.loads(session.status()))
    return out


def attach_running(folder: str = "", timeout: float = 4.0) -> Any:
    """To the daemon in ``folder``, to look on: that of loaders, or else one of a run."""
    try:
        return _forebay.SharedEngine.attach_running(folder, timeout)
    except (MissingError, StorageError):
        where = folder or _forebay.SharedEngine.default_folder()
        with contextlib.suppress(OSError):
            for name in sorted(os.listdir(where)):
                if not re.fullmatch(r"run-[0-9a-f]{8}", name):
                    continue
                with contextlib.suppress(ForebayError):
                    return _forebay.SharedEngine.attach_running(os.path.join(where, name), timeout)
        raise


_client: Any = None


def open_fd(path: str | bytes | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the file's copy where there is a service and the file can have one, else of
    the file itself. The service is the one that the environment tells of.
    """
    global _client
    reads = flags & (os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_DIRECTORY | os.O_PATH) == 0
    if (
        reads
        and os.environ.get(SOCKET)
        and "libforebay_posix" not in os.environ.get("LD_PRELOAD", "")
    ):
        named = [os.fsencode(os.environ.get(v, "")) for v in (CACHE, SOCKET, SOURCES, JOB)]
        if _client is None or _client[0] != named:
            _client = (named, _forebay.FileClient(*named))
        fd = _client[1].open(os.fsencode(os.path.abspath(path)))
        if fd >= 0:
            return fd
    return os.open(path, flags | os.O_CLOEXEC)


__all__ = ["Service", "StorageError", "Stream", "open_fd", "running"]
