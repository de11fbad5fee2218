"""Tar and TFRecord shards that are rewritten or replaced below a job: right samples or
ChangedError, never another sample's bytes.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forebay
import numpy as np
import pytest
from data_sets import DataSet, check_batch, make_tfrecord, make_webdataset, write_tar

MEMORY = "8M"  # of less than the data, so that shards are read in every epoch


def _in_place(path: Path) -> None:
    """Other samples, of other lengths, in a file of the same size; none looks damaged."""
    size = path.stat().st_size
    old = path.read_bytes()
    with path.open("r+b") as file:
        file.write(old[size // 2 :] + old[: size // 2])


def _other_size(path: Path) -> None:
    write_tar(path, [("0", {"jpg": b"another", "cls": b"5"})] * 9)


def _replaced(path: Path) -> None:
    beside = path.with_suffix(".new")
    beside.write_bytes(path.read_bytes())
    _in_place(beside)
    beside.rename(path)


CHANGES: dict[str, Callable[[Path], None]] = {
    change.__name__.strip("_"): change for change in (_in_place, _other_size, _replaced)
}


@pytest.fixture(autouse=True)
def own_catalogs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "catalogs"))


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: Any) -> Iterator[Path]:
    """A place for a daemon of this test's own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    where = tmp_path / "forebay"
    yield where
    wait_until(lambda: not where.exists())


def _until_changed(loader: forebay.DataLoader, data: DataSet, shards: list[Path]) -> None:
    """Every sample is right until one of these is found to be another one."""
    with pytest.raises(forebay.ChangedError) as caught:
        for _ in range(10_000):
            for batch in loader:
                check_batch(batch, batch.indices.tolist(), data)
    said = str(caught.value)
    assert any(str(path) in said for path in shards), said
    assert "forebay index --rebuild" in said


def _check(loader: forebay.DataLoader, data: DataSet, change: str) -> None:
    for batch in loader:
        check_batch(batch, batch.indices.tolist(), data)
    shards = sorted(data.root.iterdir())
    for path in shards:
        CHANGES[change](path)
    _until_changed(loader, data, shards)


def _data(kind: str, root: Path, shards: int = 4) -> DataSet:
    make = make_webdataset if kind == "tar" else make_tfrecord
    per_shard = 1200 if shards < 100 else 20
    return make(root, shards=shards, per_shard=per_shard)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_in_this_process(kind: str, change: str, tmp_path: Path) -> None:
    data = _data(kind, tmp_path / "data")
    engine = forebay.Engine(memory=MEMORY)
    _check(forebay.DataLoader(data.root, 32, shuffle=True, engine=engine), data, change)


@pytest.mark.parametrize("change", CHANGES)
def test_more_shards_than_are_held_open(change: str, tmp_path: Path) -> None:
    data = _data("tar", tmp_path / "data", shards=270)
    engine = forebay.Engine(memory=MEMORY)
    _check(forebay.DataLoader(data.root, 32, shuffle=True, engine=engine), data, change)


@pytest.mark.parametrize("change", CHANGES)
def test_by_the_daemon(change: str, tmp_path: Path, run_folder: Path) -> None:
    data = _data("tar", tmp_path / "data")
    engine = forebay.SharedEngine(memory=MEMORY, linger=0)
    _check(forebay.DataLoader(data.root, 32, shuffle=True, engine=engine), data, change)
    del engine
    gc.collect()  # the error's frames have it, too


@pytest.mark.parametrize("change", CHANGES)
def test_copies_of_a_changed_shard_are_not_used(change: str, tmp_path: Path) -> None:
    """By a job that has its catalog from an earlier one; all samples are in the cache folder."""
    data = make_webdataset(tmp_path / "data", shards=2, per_shard=30)
    saved = tmp_path / "saved"
    options = dict(memory="64M", cache_dir=tmp_path / "cache")
    loader = forebay.DataLoader(data.root, 8, engine=forebay.Engine(**options))  # type: ignore[arg-type]
    loader.catalog.save(str(saved))
    for _ in loader:
        pass
    loader.close()
    del loader
    shard = sorted(data.root.iterdir())[0]
    CHANGES[change](shard)
    with pytest.raises(forebay.ChangedError, match=str(shard)):
        forebay.DataLoader(forebay.Catalog.load(str(saved)), 8, engine=forebay.Engine(**options))  # type: ignore[arg-type]


def test_a_shard_that_is_put_back_is_read_on(tmp_path: Path) -> None:
    data = _data("tar", tmp_path / "data")
    before = [(path, path.read_bytes(), path.stat()) for path in data.root.iterdir()]
    loader = forebay.DataLoader(data.root, 32, shuffle=True, engine=forebay.Engine(memory=MEMORY))
    _check(loader, data, "in_place")
    for path, whole, times in before:
        path.write_bytes(whole)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    seen = np.zeros(len(data), bool)
    ended, until = 0, time.monotonic() + 60
    while ended < 2:  # what is left of the epoch, and a whole one
        try:
            for batch in loader:
                seen[batch.indices] = True
                check_batch(batch, batch.indices.tolist(), data)
            ended += 1
        except forebay.ChangedError:  # of samples that were read ahead before
            assert time.monotonic() < until
    assert seen.all()
