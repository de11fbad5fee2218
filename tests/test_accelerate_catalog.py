"""The list of an accelerated data set's files is saved, and opened again without a look at each."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import forebay  # noqa: E402
from data_sets import DataSet  # noqa: E402
from forebay import Catalog  # noqa: E402
from forebay.slowfs import SlowFs  # noqa: E402
from test_accelerate import Files, accelerated, as_list, needs_fuse, warned  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

WORKERS = pytest.mark.parametrize("workers", [0, 2], ids=["here", "workers"])


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where catalogs are kept, by this test alone."""
    folder = tmp_path / "catalogs"
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def copy(folder: DataSet, tmp_path: Path) -> DataSet:
    return DataSet(Path(shutil.copytree(folder.root, tmp_path / "copy")), folder.samples)


def loader(root: Path, data: DataSet, workers: int = 0) -> DataLoader:
    dataset = Files([str(root / s.name) for s in data.samples])
    return DataLoader(dataset, 4, num_workers=workers, collate_fn=as_list)


def contents(fast: DataLoader) -> list[bytes]:
    return [item[1] for batch in fast for item in batch]


def catalogs(saved: Path) -> list[str]:
    return sorted(os.listdir(saved)) if saved.exists() else []


@needs_fuse
def test_a_second_start_looks_at_folders_only(copy: DataSet, saved: Path) -> None:
    folders = {os.path.dirname(s.name) for s in copy.samples}
    depth = max(s.name.count("/") for s in copy.samples) + 1
    with SlowFs(copy.root) as slow:
        looked = []
        for _ in range(2):
            slow.reset()
            fast = accelerated(loader(slow.path, copy), forebay.Engine(memory="64M"))
            looked.append(slow.stats()["lookup"] + slow.stats()["getattr"])
            assert contents(fast) == [s.data for s in copy.samples]
            del fast
        first, second = looked
        assert first >= len(copy)
        # The folders, by the names on the way to them, and the one path that is tried at first.
        assert second <= 2 * (len(folders) + 1) * depth < len(copy)
        assert len(catalogs(saved)) == 1


@WORKERS
def test_a_file_put_in_anothers_place_is_seen(workers: int, copy: DataSet, saved: Path) -> None:
    first = accelerated(loader(copy.root, copy, workers), forebay.Engine(memory="64M"))
    assert contents(first) == [s.data for s in copy.samples]
    (before,) = catalogs(saved)
    new = copy.root / "new"
    new.write_bytes(b"another one, of another size")
    new.rename(copy.root / copy.samples[7].name)
    engine = forebay.Engine(memory="64M")
    again = accelerated(loader(copy.root, copy, workers), engine)
    expected = [s.data for s in copy.samples]
    expected[7] = b"another one, of another size"
    assert contents(again) == expected
    assert engine.metrics()["forebay_stage_samples_total"] == len(copy)  # all of them by us
    (after,) = catalogs(saved)
    assert after != before


@WORKERS
@pytest.mark.parametrize("size", ["same size", "another size"])
def test_a_file_rewritten_in_place_is_read_as_it_is(
    size: str, workers: int, copy: DataSet, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay")
    contents(accelerated(loader(copy.root, copy, workers), forebay.Engine(memory="64M")))
    expected = [s.data for s in copy.samples]
    number = next(i for i, data in enumerate(expected) if data)
    expected[number] = bytes(255 - b for b in expected[number])
    if size == "another size":
        expected[number] += b"more"
    with open(copy.root / copy.samples[number].name, "r+b") as file:
        file.write(expected[number])
    again = accelerated(loader(copy.root, copy, workers), forebay.Engine(memory="64M"))
    for _ in range(2):
        assert contents(again) == expected
    # What was met is not met for ever.
    assert len(catalogs(saved)) == (0 if size == "another size" else 1)
    assert warned(caplog) == []
    engine = forebay.Engine(memory="64M")
    assert contents(accelerated(loader(copy.root, copy, workers), engine)) == expected
    assert engine.metrics()["forebay_stage_samples_total"] == len(copy)


def test_copies_of_what_was_rewritten_are_not_used(
    copy: DataSet, saved: Path, tmp_path: Path
) -> None:
    """With a cache folder each file's own time counts."""
    options = dict(memory="64M", cache_dir=tmp_path / "cache")
    contents(accelerated(loader(copy.root, copy), forebay.Engine(**options)))  # type: ignore[arg-type]
    assert catalogs(saved) == []
    expected = [s.data for s in copy.samples]
    number = next(i for i, data in enumerate(expected) if data)
    expected[number] = bytes(255 - b for b in expected[number])
    path = copy.root / copy.samples[number].name
    path.write_bytes(expected[number])
    os.utime(path, ns=(1, 1))
    again = accelerated(loader(copy.root, copy), forebay.Engine(**options))  # type: ignore[arg-type]
    assert contents(again) == expected


def test_a_folder_that_others_may_write_to_is_not_believed(
    copy: DataSet, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "forebay")
    saved.mkdir()
    saved.chmod(0o777)
    fast = accelerated(loader(copy.root, copy), forebay.Engine(memory="64M"))
    assert contents(fast) == [s.data for s in copy.samples]
    assert catalogs(saved) == []
    assert any("others may write to" in r.getMessage() for r in caplog.records)


def test_open_files(copy: DataSet, saved: Path) -> None:
    files = [str(copy.root / s.name) for s in copy.samples]
    catalog, rebuilt, note, file = Catalog.open_files(files)
    assert rebuilt and note == "" and Path(file).parent == saved
    again, rebuilt, note, found = Catalog.open_files(files)
    assert (rebuilt, note, found) == (False, "", file)
    assert again.fingerprint == catalog.fingerprint == Catalog.from_files(files).fingerprint
    assert [again.object_path(i) for i in range(len(again))] == files
    with pytest.raises(forebay.MissingError, match="nowhere"):
        Catalog.open_files([*files, "/nowhere/at/all"])
