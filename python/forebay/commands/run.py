"""``forebay run``: an unmodified program, with the files of its data folders from local copies.

The program runs as a child, in the same process group and with the same standard streams. What goes
wrong with Forebay is said in one line, and the program runs all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from .. import _forebay
from .._errors import ArgumentError, MissingError, UnsupportedError
from .._internal.units import format_bytes, parse_bytes

LIBRARY = "libforebay_posix.so"
_FORWARDED = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
)  # fmt: skip


def say(text: str) -> None:
    """Standard output is the program's."""
    try:
        print(f"forebay: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass


# ---- which folders


def split_name(source: str) -> tuple[str, str]:
    """(name, path) of NAME=DIR; a folder that is there by that very path has no name."""
    found = re.fullmatch(r"([\w.-]+)=(.+)", source, re.DOTALL)
    if found is None or os.path.isdir(source):
        return "", source
    return found.group(1), found.group(2)


def named_sources(given: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The paths of --source, and the names that some of them have, by path without links."""
    pairs = [split_name(source) for source in given]
    names: dict[str, str] = {}
    for name, path in pairs:
        if name:
            check_name(name, path, names)
            names[os.path.realpath(path)] = name
    return [path for _, path in pairs], names


def check_name(name: str, path: str, names: dict[str, str]) -> None:
    for other, has in names.items():
        if (has == name) != (other == os.path.realpath(path)):
            raise ArgumentError(
                f"--source {name}={path}: a name is of one folder, and a folder has one name; "
                f"{other} is {has}"
            )


def as_source(path: str) -> list[str]:
    """A data folder as the program may name it: as given, and where links lead. Raises."""
    if not os.path.isdir(path):
        there = os.path.exists(path)
        raise MissingError(
            f"--source {path}: "
            + ("is not a folder; give the folder that the file lies in" if there else
               "there is no such folder; check the spelling, or mount it first")
        )  # fmt: skip
    given = os.path.abspath(path) if ".." not in path.split("/") else os.path.realpath(path)
    real = os.path.realpath(path)
    if real == "/":
        raise ArgumentError(f"--source {path}: not the whole machine; give the data set's folder")
    for each in (given, real):
        if ":" in each or "\n" in each:
            raise ArgumentError(
                f"--source {path}: a folder with ':' in its name cannot be told to programs; "
                "make a link to it, and use the link"
            )
    return [given] if given == real else [given, real]


def found_sources(command: Sequence[str]) -> list[str]:
    """Folders among the command's arguments: alone, or after the = of an option.

    Not those that the program stands in: it would be served its own outputs.
    """
    here = os.path.realpath(os.getcwd())
    found = []
    for argument in command[1:]:
        for text in (argument, argument.partition("=")[2]):
            if not text or text in found or not os.path.isdir(text):
                continue
            real = os.path.realpath(text)
            if here != real and not here.startswith(real.rstrip("/") + "/") and ":" not in real:
                found.append(text)
    return found


def sources_of(given: Sequence[str], command: Sequence[str]) -> tuple[list[str], bool]:
    """The data folders, and whether they were only found among the arguments."""
    named = list(given) or found_sources(command)
    if not named:
        missing = [
            a for a in command[1:] if "/" in a and not os.path.lexists(a.partition("=")[2] or a)
        ]
        raise ArgumentError(
            "no data folder: none of the command's arguments is one"
            + (f" ({', '.join(missing[:3])}: no such file)\n" if missing else "\n")
            + f"try: forebay run --source /path/to/data -- {shlex.join(command)}"
        )
    sources: list[str] = []
    for path in named:
        sources += [each for each in as_source(path) if each not in sources]
    return sources, not given


_MOST_LINKS = 16
_MOST_LOOKED_AT = 10_000  # names of a folder


def _links_in(folder: str) -> Iterator[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in itertools.islice(entries, _MOST_LOOKED_AT):
            with contextlib.suppress(OSError):
                if entry.is_symlink() and entry.is_dir():
                    yield entry.path


def linked_sources(sources: Sequence[str], command: Sequence[str]) -> list[str]:
    """Other names by which the program may reach the data folders: links to them, or to folders
    above or below, where it stands, beside its scripts, and among its arguments and variables.
    """
    here = os.getcwd()
    scripts = {os.path.dirname(os.path.abspath(a)) for a in command if os.path.isfile(a)}
    named = [text for a in command[1:] for text in (a, a.partition("=")[2])]
    named += [value for value in os.environ.values() if value.startswith("/")]
    links: list[str] = []
    for text in named:
        # Any part of a path may be a link.
        path = os.path.abspath(text) if text and ".." not in text.split("/") else "/"
        while path != "/":
            if os.path.islink(path) and os.path.isdir(path):
                links.append(path)
            path = os.path.dirname(path)
    for folder in (here, *sorted(scripts - {here})):
        links += _links_in(folder)
    found: list[str] = []
    for link in dict.fromkeys(links):
        real = os.path.realpath(link)
        for source in sources:
            if source == real or real.startswith(source + "/"):
                alias = link
            elif source.startswith(real.rstrip("/") + "/"):
                alias = link + source[len(real.rstrip("/")) :]
            else:
                continue
            covered = any(alias == s or alias.startswith(s + "/") for s in (*sources, *found))
            if not covered and ":" not in alias and "\n" not in alias:
                found.append(alias)
    return found[:_MOST_LINKS]


# ---- the program's environment


def library() -> str:
    """The library that is preloaded. Raises MissingError."""
    folder = os.path.dirname(os.path.abspath(_forebay.__file__))
    places = [os.path.join(folder, LIBRARY), os.path.join(folder, "lib", LIBRARY)]
    if named := os.environ.get("FOREBAY_POSIX_LIBRARY"):
        places = [named]
    for place in places:
        if os.path.exists(place):
            return place
    raise MissingError(f"{places[0]} is missing; this build has no preload library")


def environment(told: dict[str, str], hook: bool) -> dict[str, str]:
    """What the program gets beside its own."""
    env = {**os.environ, **told}
    from ..files import NAMESPACE

    path = library()
    if " " in path or ":" in path:
        raise UnsupportedError(
            f"{path}: libraries with a space or a colon in their path cannot be preloaded; "
            "install Forebay elsewhere"
        )
    with contextlib.suppress(OSError):
        env[NAMESPACE] = os.readlink("/proc/self/ns/mnt")
    others = [p for p in os.environ.get("LD_PRELOAD", "").replace(":", " ").split() if p != path]
    env["LD_PRELOAD"] = ":".join([path, *others])
    env.pop("FOREBAY_HOOK", None)
    if hook:
        env["FOREBAY_HOOK"] = "1"
    return env


def why_not(command: Sequence[str]) -> str:
    """Why the command's program cannot have the library; empty: it can."""
    for path in os.environ.get("LD_PRELOAD", "").replace(":", " ").split():
        if _forebay.is_sanitizer(os.fsencode(os.path.basename(path))):
            return f"{path} is preloaded, and must be loaded before all others"
    # Where there is none, the start says so.
    program = shutil.which(command[0])
    why = _forebay.why_not_preload(os.fsencode(program)) if program else ""
    return f"{command[0]}: {why}" if why else ""


# ---- the program


def execute(command: Sequence[str], env: dict[str, str]) -> int:
    """Runs it to its end; signals that reach us reach it. Its exit code, 128 + signal's number."""
    forwarding = _forebay.SignalForwarding([int(number) for number in _FORWARDED])
    try:
        try:
            # SIGPIPE and SIGXFSZ: Python ignores them, programs do not expect that.
            pid = os.posix_spawnp(
                command[0], list(command), env, setsigdef=[signal.SIGPIPE, signal.SIGXFSZ]
            )
        except FileNotFoundError:
            say(f"{command[0]}: no such program; check its spelling and PATH")
            return 127
        except OSError as error:
            say(f"{command[0]} cannot be run: {error.strerror}")
            return 126
        forwarding.send_to(pid)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        forwarding.stop()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return code if code >= 0 else 128 - code
    finally:
        del forwarding  # handlers are as before


def summary(before: dict[str, Any], after: dict[str, Any]) -> str:
    """One line of what the service did between two statuses: others may use it, too."""

    def of(name: str) -> int:
        # What was read of the source is the engine's count.
        names = [n for n in (f"forebay_files_{name}", f"forebay_{name}") if n in after["metrics"]]
        return sum(int(after["metrics"][n]) - int(before["metrics"].get(n, 0)) for n in names[:1])

    held = int(after["metrics"].get("forebay_files_kept_bytes", 0))
    parts = [
        f"{of('kept_total')} files copied to local disk, which holds {format_bytes(held)}",
        f"{of('staged_total')} copied ahead for one reading" if of("staged_total") else "",
        f"{of('left_total')} left to the source" if of("left_total") else "",
        f"{of('errors_total')} that the source failed to give" if of("errors_total") else "",
        f"{format_bytes(of('source_read_bytes_total'))} read from the source "
        f"in {of('source_reads_total')} reads",
    ]
    return "; ".join(part for part in parts if part)


@contextlib.contextmanager
def peers_of(
    arguments: argparse.Namespace, command: Sequence[str], settings: dict[str, Any]
) -> Iterator[None]:
    """What the service that is started meanwhile is told of other nodes."""
    from .._internal.launcher import cluster_variables, shared_job

    variables: dict[str, str] = {}
    if getattr(arguments, "private", False) and not arguments.peers and shared_job(os.environ):
        arguments.peers = "off"  # several would be the same node
    asked = arguments.peers or os.environ.get("FOREBAY_PEERS", "")
    if asked not in ("off", "0", "none"):
        variables, why = cluster_variables(command, os.environ)
        if why and asked in ("", "auto"):
            say(f"WARNING: each node reads all of the data for itself: {why}")
    if arguments.peers:
        settings["peers"] = arguments.peers
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def job_name(name: str | None) -> str:
    """Whose limits hold for what is read: the job that was named, or $FOREBAY_JOB's."""
    return name or os.environ.get("FOREBAY_JOB", "")


def run(arguments: argparse.Namespace) -> int:
    from .._internal import ranks
    from .._internal.launcher import shared_job
    from ..files import FolderHangs, check_answers, check_outside

    command = list(arguments.command)
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        raise ArgumentError(
            "no command to run\ntry: forebay run --source /path/to/data -- python train.py"
        )
    if arguments.private and arguments.cache:
        raise ArgumentError(
            "--private makes a folder of this run's own, --cache names one that others may use: "
            "give one of them"
        )
    given, names = named_sources(arguments.source)
    sources, guessed = sources_of(given, command)
    sources += linked_sources(sources, command)
    hangs = None
    try:
        if arguments.cache:
            check_answers(arguments.cache)
            check_outside(os.path.realpath(arguments.cache), sources)
    except FolderHangs as error:
        hangs = error
    cache_bytes = parse_bytes(arguments.cache_size, "--cache-size") or None
    ahead_bytes = parse_bytes(arguments.ahead, "--ahead") or None
    # One of a node's tasks says what holds for all.
    job = shared_job(os.environ)
    leads = not job or arguments.private or ranks.local_rank() == 0
    quiet = arguments.quiet or not leads
    if guessed and not quiet:
        say(f"data folders, from the command's arguments: {', '.join(sources)} (or use --source)")
    if why := why_not(command):
        say(f"WARNING: running without Forebay: {why}")
        return execute(command, dict(os.environ))
    service = None
    status: dict[str, Any] = {"metrics": {}}
    warned: list[str] = []
    try:
        from ..files import Service

        if hangs is not None:
            raise hangs
        library()
        # Nobody else comes to a folder of our own: it need not wait for them.
        own = arguments.private or not (arguments.cache or job)
        more: dict[str, Any] = {"linger": 1} if own else {}
        with peers_of(arguments, command, more):
            service = Service.start(
                cache=arguments.cache,
                cache_bytes=cache_bytes,
                sources=sources,
                ahead_bytes=ahead_bytes,
                job=job_name(arguments.job),
                shared="" if own else job,
                names=names,
                **more,
            )
        if arguments.cache:  # else nobody used it before, and what tasks beside this one do counts
            status = service.status()
        warned = tell(service) if leads else []
        env = environment(service.environment(), not arguments.no_hook)
    except Exception as error:  # noqa: BLE001 - whatever it is, the program runs
        if service is not None:
            service.close()
            service = None
        level = "WARNING: " if isinstance(error, FolderHangs) else ""
        say(f"{level}running without Forebay: {' '.join(str(error).split())}")
        env = dict(os.environ)
    try:
        code = execute(command, env)
    finally:
        if service is not None:
            end(service, status, quiet, arguments.cache is None, warned if leads else None)
    return code


def tell(service: Any, told: Sequence[str] = ()) -> list[str]:
    """Says each of the service's warnings that was not ``told`` yet; returns all."""
    warnings: list[str] = service.warnings()
    for text in warnings:
        if text not in told:
            say(f"WARNING: {text}")
    return warnings


def end(
    service: Any, before: dict[str, Any], quiet: bool, temporary: bool, told: list[str] | None
) -> None:
    """Says what the service did, and lets it go. Ctrl-C does not leave the copies behind."""
    from .. import files

    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        after = service.status()
        if told is not None:
            tell(service, told)
        service.close()
        plain = int(after.get("plain", 0)) - int(before.get("plain", 0))
        if plain:
            say(
                f"WARNING: {plain} programs ran without Forebay: they are linked with "
                "AddressSanitizer, or their C library is not glibc"
            )
        if not quiet:
            say(summary(before, after))
    except Exception as error:  # noqa: BLE001 - the program's exit code is what counts
        if not quiet:
            say(f"the file service did not last to the end: {' '.join(str(error).split())}")
        if temporary:  # nobody else removes its copies
            files.clear_dead(os.path.dirname(service.cache))
    finally:
        signal.signal(signal.SIGINT, handler)
