"""``forebay cache``: what a folder of ``cache_dir=`` holds; fill it, check it, empty it."""

from __future__ import annotations

import argparse
import os
import sys
import time

from .._errors import ArgumentError, MissingError, StorageError
from .._forebay import CacheFolder, Catalog
from .._internal.units import format_bytes
from ..views.progress import counting
from .index import parse_extensions

_AT_ONCE = 256  # copies checked between two steps of the progress bar
_MOST_PASSES = 100


def _open(folder: str, group: str | None, change: bool = False) -> CacheFolder:
    if not os.path.isdir(folder):
        raise MissingError(f"{folder} is not a folder; name the one given as cache_dir=")
    try:
        return CacheFolder.open(folder, change, group or "")
    except StorageError as error:  # another process has the lock
        raise StorageError(
            f"{error}\nwait for it to end (a daemon goes 5 s after its last run or loader, "
            "that of a mount with `forebay unmount`), and try again"
        ) from None
    except MissingError as error:
        raise MissingError(f"{error}; name the folder given as cache_dir=") from None


def _ours(cache: CacheFolder, folder: str) -> CacheFolder:
    if cache.foreign:
        raise ArgumentError(f"{cache.foreign}\nto empty it: forebay cache clear {folder}")
    return cache


def _name(dataset: dict) -> str:
    return dataset["path"] or f"data set {dataset['dataset']:016x}"


def _ago(seconds: int) -> str:
    if seconds == 0:
        return "not known"
    age = max(0, int(time.time()) - seconds)
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if age >= size:
            count = age // size
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"


def _samples(count: int) -> str:
    return f"{count:,} sample{'' if count == 1 else 's'}"


def _select(cache: CacheFolder, wanted: str | None) -> list[dict]:
    """All data sets, or those of one path or number."""
    datasets = sorted(cache.datasets(), key=lambda each: -each["last_used"])
    if wanted is None:
        return datasets
    path = os.path.abspath(wanted)
    found = [e for e in datasets if e["path"] == path or f"{e['dataset']:016x}" == wanted]
    if not found:
        held = ", ".join(map(_name, datasets)) or "nothing"
        raise ArgumentError(f"the cache folder holds no copies of {wanted}; it holds {held}")
    return found


def run_ls(arguments: argparse.Namespace) -> int:
    cache = _ours(_open(arguments.folder, arguments.cache_group), arguments.folder)
    datasets = _select(cache, None)
    print(os.path.abspath(arguments.folder))
    former = former_bytes = 0
    rows = []
    for each in datasets:
        old, old_bytes = cache.former(each["dataset"])
        former, former_bytes = former + old, former_bytes + old_bytes
        size = format_bytes(each["bytes"] - old_bytes)
        rows.append((_name(each), f"{each['samples'] - old:,}", size, _ago(each["last_used"])))
    if rows:
        head = ("data set", "samples", "size", "last used")
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(4)]
        for row in [head, *rows]:
            print(
                f"  {row[0]:<{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}"
            )
    limit = f" of {format_bytes(cache.limit_bytes)}" if cache.limit_bytes else ""
    count = sum(each["samples"] for each in datasets) - former
    print(f"  {_samples(count)}, {format_bytes(cache.used_bytes)}{limit}")
    if former:
        versions = f"{former:,} former version{'' if former == 1 else 's'}"
        print(f"  and {versions} of files that changed, {format_bytes(former_bytes)}")
    print(f"  written by: {cache.writer or 'nobody now'}")
    return 0


def run_warm(arguments: argparse.Namespace) -> int:
    from ..engine import Engine
    from ..loader import DataLoader

    folder = os.path.abspath(arguments.folder)
    with counting(f"indexing {arguments.path}") as progress:
        catalog, _, note = Catalog.open(
            arguments.path, arguments.format or "", parse_extensions(arguments.extensions), progress
        )
    if note:
        print(f"note: {note}")
    total = len(catalog)
    start = time.monotonic()
    written, before = 0, -1
    for _ in range(_MOST_PASSES):
        engine = Engine(
            memory=arguments.memory,
            keep=False,
            cache_dir=folder,
            cache_bytes=arguments.size,
            cache_group=arguments.cache_group,
        )
        if engine.cache_status:
            raise StorageError(
                f"{engine.cache_status}\nwait for it to end (a daemon goes 5 s after the last run)"
            )
        with (
            counting(f"reading {arguments.path}") as progress,
            DataLoader(catalog, 64, engine=engine, epochs=1, rank=0, world_size=1) as loader,
        ):
            done = 0
            for batch in loader:
                done += len(batch)
                batch.release()
                progress(done, total)
        while engine.metrics()["forebay_tier_copies_under_way"] and not engine.cache_status:
            time.sleep(0.01)  # a slow disk is waited for, one that hangs is not
        metrics = engine.metrics()
        problem = engine.cache_status
        del loader, engine
        skipped = metrics["forebay_tier_skipped_writes_total"]
        # What a disk that hung made it skip is there in another pass, whose other reads are local.
        written, _ = _open(folder, arguments.cache_group).held(catalog)
        if problem:
            raise StorageError(f"{problem}\nheld so far: {written:,} of {_samples(total)}")
        if skipped == 0 or written == before:
            break
        before = written
    took = time.monotonic() - start
    size = format_bytes(_open(folder, arguments.cache_group).held(catalog)[1])
    print(f"{catalog.root}: {written:,} of {_samples(total)} in {folder}, {size}, in {took:.1f} s")
    if written < total:
        if skipped:
            print("  the rest was given up while the disk hung")
        else:
            print(
                "  the rest found no room; raise --size, clear what is not needed, or, for samples "
                "of megabytes, raise --memory"
            )
    return 0


def _compare(cache: CacheFolder, path: str) -> tuple[list[tuple[int, int]], int]:
    """The copies that are not what their files hold, and how much was read to know it. Copies of
    files that changed since, or are gone, have other names: nobody reads them any more.
    """
    catalog, _, _ = Catalog.open(path)
    differ: list[tuple[int, int]] = []
    held = read = 0
    with counting(f"comparing with {path}") as progress:
        for first in range(0, len(catalog), _AT_ONCE):
            found, count, size = cache.compare(catalog, first, _AT_ONCE)
            differ += found
            held, read = held + count, read + size
            progress(min(len(catalog), first + _AT_ONCE), len(catalog))
    print(f"  {path}: {_samples(held)} compared with the source, {len(differ):,} differ")
    return differ, read


def run_verify(arguments: argparse.Namespace) -> int:
    folder = arguments.folder
    try:
        cache = _ours(_open(folder, arguments.cache_group, not arguments.dry_run), folder)
    except StorageError as error:
        raise StorageError(f"{error}; or: forebay cache verify {folder} --dry-run") from None
    datasets = _select(cache, arguments.dataset)
    total = sum(each["samples"] for each in datasets)
    start = time.monotonic()
    done = read = bad = 0
    with counting("verifying") as progress:
        for each in datasets:
            samples = cache.samples(each["dataset"])
            wrong: list[tuple[int, int]] = []
            for first in range(0, len(samples), _AT_ONCE):
                found, size = cache.check(samples[first : first + _AT_ONCE])
                wrong += found
                read += size
                done += len(samples[first : first + _AT_ONCE])
                progress(done, total)
            if arguments.source and each["path"]:
                differ, size = _compare(cache, each["path"])
                wrong = sorted({*wrong, *differ})
                read += size
            bad += len(wrong)
            if wrong:
                print(f"  {_name(each)}: {len(wrong):,} of {_samples(len(samples))} damaged")
            for sample in [] if arguments.dry_run else wrong:
                cache.drop(sample)
    took = time.monotonic() - start
    print(f"{_samples(done)}, {format_bytes(read)} checked in {took:.1f} s")
    if bad == 0:
        print("  no damaged copy")
        return 0
    kept = "left as they are (--dry-run)" if arguments.dry_run else "removed"
    print(f"  {bad:,} damaged {'copy' if bad == 1 else 'copies'} {kept}; Forebay reads the source")
    return 1


def run_clear(arguments: argparse.Namespace) -> int:
    folder = arguments.folder
    cache = _open(folder, arguments.cache_group, True)
    if arguments.dataset is not None:
        chosen = _select(_ours(cache, folder), arguments.dataset)
    else:
        chosen = _select(cache, None)
    count = sum(each["samples"] for each in chosen)
    size = format_bytes(sum(each["bytes"] for each in chosen))
    what = f"{_samples(count)}, {size}, of " + (", ".join(map(_name, chosen)) or "no data set")
    if cache.foreign:
        what = str(cache.foreign)
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise ArgumentError(f"{what}\nto remove this without being asked: --yes")
        if input(f"{what}\nremove? [y/N] ").strip().lower() not in ("y", "yes"):
            print("nothing removed")
            return 1
    if arguments.dataset is None:
        cache.clear()
    else:
        for each in chosen:
            cache.clear(each["dataset"])
    print(f"removed: {what}")
    return 0
