"""``forebay mount`` and ``forebay unmount``: a data folder through FUSE."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import select
import shutil
import subprocess
from typing import Any

from .. import _forebay
from .._errors import ArgumentError, ForebayError, MissingError, UnsupportedError
from .._internal.units import parse_bytes
from . import run as run_command

_KIND = "fuse.forebay"
_SERVED_BY = "user.forebay.mount"  # of the mount's root: the process that serves it
_WAIT_S = 30.0


def program() -> str:
    """The program that serves a mount: $FOREBAY_MOUNT, or the one beside the extension module."""
    named = os.environ.get("FOREBAY_MOUNT")
    beside = os.path.join(os.path.dirname(os.path.abspath(_forebay.__file__)), "forebay-mount")
    found = named or beside
    if not os.access(found, os.X_OK):
        raise UnsupportedError(
            f"{found} is not there: this build has no mount, because libfuse3 was not found.\n"
            "Install libfuse3-dev and fuse3 (Debian, Ubuntu) or fuse3-devel and fuse3 (RHEL), and "
            "build Forebay again; programs that are not static need no mount: forebay run"
        )
    return found


def _environment(service: dict[str, str]) -> dict[str, str]:
    """What the program runs with: it must not be served by what it serves."""
    return {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | service


def run_mount(arguments: argparse.Namespace) -> int:
    """``forebay mount``."""
    from .. import files

    binary = program()
    source = os.path.realpath(arguments.source)
    if not os.path.isdir(source):
        raise MissingError(f"source folder {arguments.source} does not exist or is no folder")
    if mounted_kind(arguments.mountpoint) == _KIND:
        raise ArgumentError(
            f"{arguments.mountpoint} is mounted already, or was when its process was killed; "
            f"'forebay unmount {arguments.mountpoint}' ends that"
        )
    if not os.path.isdir(arguments.mountpoint):
        raise MissingError(
            f"mountpoint {arguments.mountpoint} is no folder; make it with "
            f"'mkdir -p {arguments.mountpoint}'"
        )
    limit = parse_bytes(arguments.cache_size, "--cache-size") if arguments.cache_size else None
    command = [binary, source, arguments.mountpoint]
    if arguments.allow_other:
        command.insert(1, "--allow-other")
    more: dict[str, Any] = {}
    if arguments.name and run_command.split_name(f"{arguments.name}={source}")[0] == "":
        raise ArgumentError(f"--name {arguments.name}: letters, digits and . _ - make a name")
    service = None
    try:
        with run_command.peers_of(arguments, [], more):
            service = files.Service.start(
                cache=arguments.cache,
                cache_bytes=limit,
                sources=[source],
                names={source: arguments.name} if arguments.name else None,
                job=run_command.job_name(arguments.job),
                **more,
            )
    except files.FolderHangs as error:
        run_command.say(f"WARNING: the mount shows the source as it is: {error}")
    try:
        environment = _environment({})
        if service is not None:
            run_command.tell(service)
            environment = _environment(service.environment())
        if arguments.foreground:
            # Ctrl-C and SIGTERM end it, and it unmounts.
            return run_command.execute([binary, "--foreground", *command[1:]], environment)
        # It returns when the mount is ready, and its background process has joined the service.
        return subprocess.run(command, env=environment, check=False).returncode
    finally:
        if service is not None:
            service.close()


def mounted_kind(path: str | os.PathLike[str]) -> str | None:
    """The kind of file system that is mounted at this folder; asks nothing of it, for it may be
    dead.
    """
    real = os.path.realpath(path)
    found = None
    with open("/proc/self/mountinfo") as mounts:
        for line in mounts:
            words = line.split(" ")
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), words[4])
            if point.encode("latin-1", "ignore") == os.fsencode(real) or point == real:
                found = words[words.index("-") + 1]
    return found


def run_unmount(arguments: argparse.Namespace) -> int:
    """``forebay unmount``: returns when the mount and what served it are gone."""
    path = arguments.mountpoint
    kind = mounted_kind(path)
    if kind is None:
        there = os.path.isdir(path)
        raise ArgumentError(f"nothing is mounted at {path}" + ("" if there else ": no such folder"))
    if kind != _KIND:
        raise ArgumentError(
            f"what is mounted at {path} is not Forebay's; use umount, or fusermount3 -u"
        )
    served_by = _served_by(path)
    watched = None
    if served_by is not None:
        with contextlib.suppress(OSError):  # of another user, or just gone
            watched = os.pidfd_open(served_by)
    try:
        _unmount(path, arguments.lazy or served_by is None)
        if watched is not None and not select.select([watched], [], [], _WAIT_S)[0]:
            raise ForebayError(
                f"{path} is unmounted, but process {served_by}, which served it, still waits "
                "for the source"
            )
    finally:
        if watched is not None:
            os.close(watched)
    return 0


def _served_by(path: str) -> int | None:
    try:
        return int(os.getxattr(path, _SERVED_BY))
    except (OSError, ValueError):
        return None


def _unmount(path: str, lazy: bool) -> None:
    """With fusermount3, which needs no root, or umount."""
    said = "neither fusermount3 (package fuse3) nor umount is there"
    commands = (["fusermount3", "-u"], ["umount"])
    if lazy:
        commands = (["fusermount3", "-u", "-z"], ["umount", "-l"])
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        done = subprocess.run([*command, path], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        said = done.stderr.strip()
        if "busy" in said:
            break
    remedy = (
        "; programs still use it: end them, or 'forebay unmount --lazy' removes it once they have"
        if "busy" in said
        else ""
    )
    raise ForebayError(f"cannot unmount {path}: {said}{remedy}")
