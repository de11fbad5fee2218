"""``forebay index``: list a data set, save the list, check it."""

from __future__ import annotations

import argparse
import os
import time

from .._errors import ArgumentError, ChangedError, CorruptError, ForebayError, MissingError
from .._forebay import Catalog
from .._internal.units import format_bytes
from ..views.progress import counting

_NAMES = {
    "folder": "folder of files",
    "webdataset": "WebDataset shards",
    "tfrecord": "TFRecord files",
}


def parse_extensions(text: str | None) -> list[str]:
    """``"JPG, png"`` becomes ``[".jpg", ".png"]``, as ``DataLoader(extensions=...)`` takes them."""
    if not text:
        return []
    if text.strip() == "images":
        from .. import IMG_EXTENSIONS

        return list(IMG_EXTENSIONS)
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names:
        raise ArgumentError(f"--extensions is '{text}'; write suffixes such as jpg,png")
    return [name if name.startswith(".") else f".{name}" for name in names]


def describe(catalog: Catalog) -> str:
    """Format, samples, classes and bytes in one line."""
    parts = [f"{_NAMES.get(catalog.format, catalog.format)}: {_count(len(catalog), 'sample')}"]
    classes = len(catalog.classes)
    if classes:
        parts.append(_count(classes, "class", "classes"))
    if catalog.format != "folder":
        parts.append(_count(catalog.objects, "file"))
    parts.append(format_bytes(catalog.total_bytes))
    return ", ".join(parts)


def _count(n: int, one: str, many: str | None = None) -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def _seconds(seconds: float) -> str:
    if seconds < 0.001:
        return "under 1 ms"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; errors of input are raised as ForebayError."""
    path = arguments.path
    format_name = arguments.format or ""
    extensions = parse_extensions(arguments.extensions)
    target = arguments.output or Catalog.default_file(path, format_name, extensions)

    start = time.monotonic()
    catalog = None
    how = ""
    if arguments.verify and not arguments.rebuild and target and os.path.exists(target):
        # Not Catalog.open: it would list a changed folder anew, and the change would go unseen.
        catalog = _load_saved(target, path)
        if catalog is not None:
            how = "opened"
    if catalog is None:
        with counting(f"indexing {path}") as progress:
            if arguments.rebuild or arguments.output:
                catalog = Catalog.build(path, format_name, extensions, progress)
                rebuilt, how, note = True, "listed", ""
            else:
                catalog, rebuilt, note = Catalog.open(path, format_name, extensions, progress)
                how = "listed" if rebuilt else "up to date, opened"
        if note:
            print(f"note: {note}; listed anew" if rebuilt else f"note: {note}")
        if target and (arguments.rebuild or arguments.output):
            catalog.save(target)
    took = time.monotonic() - start

    print(catalog.root)
    print(f"  {describe(catalog)}")
    if target and os.path.exists(target):
        print(f"  index: {target} ({format_bytes(os.path.getsize(target))})")
    else:
        print("  index: not saved; name a file with -o, or a folder with FOREBAY_CACHE_DIR")
    print(f"  {how} in {_seconds(took)}")
    if not arguments.verify:
        return 0
    return _verify(catalog, path)


def _load_saved(file: str, path: str) -> Catalog | None:
    if not os.path.exists(path):
        raise MissingError(f"{path} does not exist; check the path, and that it is mounted here")
    try:
        catalog = Catalog.load(file)
    except ForebayError:
        return None  # Catalog.open says why, and lists anew
    if os.path.realpath(catalog.root) not in (
        os.path.realpath(path),
        os.path.dirname(os.path.realpath(path)),  # PATH is one shard
    ):
        raise ArgumentError(
            f"{file} is the index of {catalog.root}, not of {path}; choose another file"
        )
    return catalog


def _verify(catalog: Catalog, path: str) -> int:
    start = time.monotonic()
    problems: list[str] = []
    head = ""
    try:
        with counting("verifying") as progress:
            catalog.verify(progress)
    except (ChangedError, CorruptError, MissingError) as error:
        head, *problems = str(error).splitlines()
        if not problems:
            head, problems = "1 problem", [head]
    try:
        catalog.check_fresh()
    except ChangedError as error:
        # Files that came since have no entry, so verify alone does not see them.
        if not problems:
            head, problems = "1 problem", [f"{error}: files were added, removed or renamed"]
    took = _seconds(time.monotonic() - start)
    if not problems:
        print(f"  verified in {took}: {_count(catalog.objects, 'file')}, no problem")
        return 0
    print(f"  verified in {took}: {head}")
    for problem in problems:
        print(f"    {'and more' if problem.strip() == '...' else problem.strip()}")
    print(
        f"  If the files are right as they are: forebay index {path} --rebuild; else restore them."
    )
    return 1
