"""Which of a data set's files this program has written to: those are read from the source.

Python tells of each file that is opened, renamed or removed before it happens (audit events), in
every thread and whatever library asks for it. What a library writes by system calls of its own, or
another program does, is not told.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# The arguments that name what becomes another file, and those with the folders they start in.
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.rename": ((0, 2), (1, 3)),  # and os.replace
    "os.remove": ((0, 1),),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
}
# What may give a folder another name, or a name another folder.
_MOVES = ("os.rename", "os.symlink")


class Written:
    """Samples whose files were written to, by this process or one that it has forked or spawned
    with this. A mark stays.
    """

    def __init__(self, numbers: Mapping[str, int], folder: str) -> None:
        """`numbers` are the samples by path; relative ones start in `folder`."""
        self._marks = multiprocessing.RawArray("B", max(1, len(numbers)))
        self._any = multiprocessing.RawValue("B", 0)
        self.watch(numbers, folder)

    def watch(self, numbers: Mapping[str, int], folder: str) -> None:
        """From now on in this process, too."""
        self._numbers = numbers
        self._folder = folder
        # Names of folders as they are listed, by where these really are; made by the first write.
        self._folders: dict[str, list[str]] | None = None
        _watched.add(self)
        _install()

    def __getstate__(self) -> tuple:
        return self._marks, self._any

    def __setstate__(self, state: tuple) -> None:
        self._marks, self._any = state

    def __getitem__(self, number: int) -> int:
        return self._marks[number]

    def paths(self) -> set[str]:
        """As they are listed."""
        if not self._any.value:
            return set()
        return {path for path, number in self._numbers.items() if self._marks[number]}

    def mark(self, paths: Iterable[str]) -> None:
        for path in paths:
            if (number := self._numbers.get(path)) is not None:
                self._marks[number] = 1
                self._any.value = 1

    def change(self, path: str, below: bool) -> None:
        """This path, absolute, is about to lead to other bytes; with `below`, it may be a folder
        whose files do.
        """
        if self._folders is None:
            self._folders = self._real_folders()
        name = os.path.basename(path)
        # The file that is written to, and the name: one of them may be a link.
        for real in {_real(path), os.path.join(_real(os.path.dirname(path)), name)}:
            for listed in self._folders.get(os.path.dirname(real), ()):
                self.mark((os.path.join(listed, os.path.basename(real)),))
        self.mark((path,))
        if not below:
            return
        start = _real(path) + os.sep
        inside = {
            listed
            for folder, names in self._folders.items()
            if (folder + os.sep).startswith(start)
            for listed in names
        }
        if inside:
            self.mark([p for p in self._numbers if os.path.dirname(p) in inside])

    def change_anywhere(self, name: str) -> None:
        """A file of this name is written to, nobody knows in which folder."""
        if self._folders is None:
            self._folders = self._real_folders()
        for names in self._folders.values():
            self.mark(os.path.join(listed, name) for listed in names)

    def _real_folders(self) -> dict[str, list[str]]:
        folders: dict[str, list[str]] = {}
        for listed in {os.path.dirname(path) for path in self._numbers}:
            real = _real(os.path.join(self._folder, listed))
            folders.setdefault(real, []).append(listed)
        return folders


class _Recent:
    """Where this process has written to, and when for the last time."""

    _MOST = 256

    def __init__(self) -> None:
        self._folders: dict[str, float] = {}  # of files that were opened to be written, or removed
        self._names: dict[str, float] = {}  # that lead elsewhere now; they may be folders'
        self._anywhere: float | None = None
        # Where data sets lie that were opened, by who is told of writes to them.
        self._told: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()

    def tell_of(self, root: str, listener: Any) -> None:
        roots = self._told.setdefault(listener, set())
        roots.update({os.path.abspath(root), _real(root)})
        if len(roots) > 4 * self._MOST:
            roots.clear()
            roots.add(os.sep)

    def tell(self, path: str | None, moved: bool) -> None:
        for listener, roots in list(self._told.items()):
            names = set() if path is None else {path, _real(path)}
            if path is None or any(
                _is_below(name, root) or (moved and _is_below(root, name))
                for name in names
                for root in roots
            ):
                listener.wrote()

    def note(self, path: str | None, moved: bool = False) -> None:
        """None: nobody knows where."""
        now = time.monotonic()
        if path is None or len(self._folders) + len(self._names) >= self._MOST:
            self._anywhere = now
            self._folders.clear()
            self._names.clear()
        elif moved:
            self._names[path] = now
        else:
            self._folders[os.path.dirname(path)] = now
        self.tell(path, moved)

    def last(self, root: str) -> float | None:
        """To something below `root`, or to what `root` is below."""
        roots = {os.path.abspath(root), _real(root)}
        times = [] if self._anywhere is None else [self._anywhere]
        for places, moved in ((self._folders, False), (self._names, True)):
            for place, at in list(places.items()):
                for name in {place, _real(place)}:
                    if any(_is_below(name, r) or (moved and _is_below(r, name)) for r in roots):
                        times.append(at)
        return max(times, default=None)


_watched: weakref.WeakSet[Written] = weakref.WeakSet()
_recent: _Recent | None = None
_installed = False


def remember() -> None:
    """From now on `last_write_ago` knows."""
    global _recent
    if _recent is None:
        _recent = _Recent()
        _install()


def tell_of(root: str, listener: Any) -> None:
    """`listener.wrote()` is called before this process writes to a file below `root`."""
    if _recent is not None:
        _recent.tell_of(root, listener)


def last_write_ago(root: str) -> float | None:
    """How many seconds ago this process wrote to a file below `root`; None: it has not, as far as
    is known.
    """
    last = None if _recent is None else _recent.last(root)
    return None if last is None else max(0.0, time.monotonic() - last)


def _is_below(path: str, folder: str) -> bool:
    return (path + os.sep).startswith(folder.rstrip(os.sep) + os.sep)


def _real(path: str) -> str:
    return os.path.realpath(path)


def _install() -> None:
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_hook)  # which stays for the life of the process


def _hook(event: str, arguments: tuple) -> None:
    if event != "open" and event not in _CHANGES:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & _WRITING):
        return
    if not _watched and _recent is None:
        return
    # An exception of ours would be the program's: its file would not be opened.
    with contextlib.suppress(Exception):
        for place, start in ((0, None),) if event == "open" else _CHANGES[event]:
            path = _absolute(arguments[place], None if start is None else arguments[start])
            if path is None:
                continue
            for written in list(_watched):
                written.change(path, below=event != "open")
            if _recent is not None:
                _recent.note(path, moved=event in _MOVES)
        # os.open() does not tell of its dir_fd.
        if event == "open" and arguments[1] is None:
            text = os.fsdecode(arguments[0])
            for written in [] if os.path.isabs(text) else list(_watched):
                written.change_anywhere(os.path.basename(text))
            if _recent is not None and not os.path.isabs(text):
                _recent.note(None)


def _absolute(path: Any, start: Any) -> str | None:
    """Nothing where it is a descriptor: that was opened by a path."""
    if isinstance(path, int):
        return None
    text = os.fsdecode(path)
    if isinstance(start, int) and start >= 0 and not os.path.isabs(text):
        text = os.path.join(os.readlink(f"/proc/self/fd/{start}"), text)
    return os.path.abspath(text)
