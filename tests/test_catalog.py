"""The catalog as Python sees it: order, classes, the saved file, and what it notices."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import forebay
import pytest
from data_sets import (
    DataSet,
    image_folder,
    make_folder,
    make_tfrecord,
    make_webdataset,
    write_tar,
    write_tfrecord,
)
from forebay import Catalog


@pytest.fixture
def copy(folder: DataSet, tmp_path: Path) -> Path:
    """The folder data set, to be damaged."""
    return Path(shutil.copytree(folder.root, tmp_path / "copy"))


def test_a_folder(folder: DataSet) -> None:
    catalog, _, _ = Catalog.open(str(folder.root))
    assert catalog.format == "folder"
    assert catalog.root == str(folder.root)
    assert len(catalog) == len(folder)
    assert catalog.classes == image_folder(folder.root)[0]
    assert catalog.total_bytes == folder.total_bytes
    assert catalog.max_length == max(len(s.data) for s in folder.samples)
    assert catalog.lengths().tolist() == [len(s.data) for s in folder.samples]
    for i, sample in enumerate(folder.samples):
        assert (catalog.name(i), catalog.label(i)) == (sample.name, sample.label)
        assert catalog.length(i) == len(sample.data)
        assert catalog.object_path(i) == str(folder.root / sample.name)
        assert catalog.offset(i) == 0
        assert catalog.fields(i) == [("data", 0, len(sample.data))]


def test_a_folder_without_classes(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / name).write_bytes(name.encode())
    catalog = Catalog.build(str(tmp_path))
    assert [catalog.name(i) for i in range(3)] == ["a", "b", "c"]
    assert [catalog.label(i) for i in range(3)] == [-1, -1, -1]
    assert catalog.classes == []


@pytest.mark.parametrize("name", ["webdataset", "tfrecord"])
def test_shards(name: str, request: pytest.FixtureRequest) -> None:
    data: DataSet = request.getfixturevalue(name)
    catalog, _, _ = Catalog.open(str(data.root))
    assert catalog.format == name
    assert catalog.objects == 3
    assert len(catalog) == len(data)
    for i, sample in enumerate(data.samples):
        assert (catalog.name(i), catalog.label(i)) == (sample.name, sample.label)
        with open(catalog.object_path(i), "rb") as file:
            file.seek(catalog.offset(i))
            assert file.read(catalog.length(i)) == sample.data
        fields = {
            field: sample.data[begin : begin + size] for field, begin, size in catalog.fields(i)
        }
        assert fields == (sample.fields or {"data": sample.data})


@pytest.mark.parametrize("make", [make_webdataset, make_tfrecord])
def test_one_shard_file(make, tmp_path: Path) -> None:
    data: DataSet = make(tmp_path / "one", shards=1)
    (file,) = data.root.iterdir()
    catalog, rebuilt, _ = Catalog.open(str(file))
    assert rebuilt and len(catalog) == len(data)
    _, rebuilt, _ = Catalog.open(str(file))
    assert not rebuilt


def test_at_most_64_bytes_a_sample_plus_names(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for i in range(2000):
        (tmp_path / "c" / f"{i:08d}").touch()
    (tmp_path / "c" / "x").write_bytes(b"x")
    catalog = Catalog.build(str(tmp_path))
    assert catalog.image_bytes <= 64 * 2001 + 8 * 2001 + 4096


def test_a_saved_catalog_is_used_again(copy: Path) -> None:
    first, rebuilt, note = Catalog.open(str(copy))
    assert (rebuilt, note) == (True, "")
    saved = Path(Catalog.default_file(str(copy)))
    assert saved.is_file()
    assert saved.parent == Path(os.environ["FOREBAY_CACHE_DIR"])
    again, rebuilt, note = Catalog.open(str(copy))
    assert (rebuilt, note) == (False, "")
    assert again.fingerprint == first.fingerprint
    assert [again.name(i) for i in range(len(again))] == [first.name(i) for i in range(len(first))]
    assert Catalog.load(str(saved)).fingerprint == first.fingerprint


def test_options_have_catalogs_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    for name in ("a.jpg", "b.txt", "c.JPG"):
        (tmp_path / "c" / name).write_bytes(b"x")
    assert len(Catalog.open(str(tmp_path))[0]) == 3
    images, rebuilt, _ = Catalog.open(str(tmp_path), "", [".jpg"])
    assert rebuilt
    assert [images.name(i) for i in range(len(images))] == ["c/a.jpg", "c/c.JPG"]


def test_relative_and_absolute_paths_share_a_catalog(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Catalog.open(str(copy))
    monkeypatch.chdir(copy.parent)
    catalog, rebuilt, _ = Catalog.open(copy.name)
    assert not rebuilt
    assert catalog.root == str(copy)


@pytest.mark.parametrize("change", ["added", "removed", "renamed", "class", "deep"])
def test_a_changed_folder_is_noticed(copy: Path, change: str) -> None:
    Catalog.open(str(copy))
    time.sleep(0.02)  # a folder's time moves in the kernel's ticks
    if change == "added":
        (copy / "class0" / "zzz.bin").write_bytes(b"new")
    elif change == "removed":
        (copy / "class1" / "00001.bin").unlink()
    elif change == "renamed":
        (copy / "class1" / "00001.bin").rename(copy / "class1" / "zzz.bin")
    elif change == "class":
        (copy / "class9").mkdir()
        (copy / "class9" / "a.bin").write_bytes(b"new")
    else:
        (copy / "class0" / "deep" / "er" / "zzz.bin").write_bytes(b"new")
    catalog, rebuilt, note = Catalog.open(str(copy))
    assert rebuilt
    assert str(copy) in note and "changed" in note
    names = [catalog.name(i) for i in range(len(catalog))]
    assert names == [os.path.relpath(path, copy) for path, _ in image_folder(copy)[1]]


def test_check_fresh_names_the_folder(copy: Path) -> None:
    catalog = Catalog.build(str(copy))
    catalog.check_fresh()
    time.sleep(0.02)
    (copy / "class2" / "new").touch()
    with pytest.raises(forebay.ChangedError, match=str(copy / "class2")):
        catalog.check_fresh()


def test_a_changed_shard_is_noticed(tmp_path: Path) -> None:
    data = make_tfrecord(tmp_path / "records")
    Catalog.open(str(data.root))
    write_tfrecord(data.root / "part-00001-of-00003.tfrecord", [b"one", b"two"])
    catalog, rebuilt, note = Catalog.open(str(data.root))
    assert rebuilt and "part-00001" in note
    assert len(catalog) == len(data) - 21 + 2


def test_another_time_is_not_another_data_set(folder: DataSet, copy: Path) -> None:
    there = Catalog.build(str(folder.root))
    assert Catalog.build(str(copy)).fingerprint == there.fingerprint
    (copy / "class0" / "zzz").touch()
    assert Catalog.build(str(copy)).fingerprint != there.fingerprint


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "noise"])
def test_a_damaged_saved_catalog_is_made_anew(copy: Path, damage: str) -> None:
    first, _, _ = Catalog.open(str(copy))
    saved = Path(Catalog.default_file(str(copy)))
    image = bytearray(saved.read_bytes())
    if damage == "cut":
        image = image[: len(image) // 2]
    elif damage == "bit":
        image[len(image) // 2] ^= 1
    elif damage == "empty":
        image = bytearray()
    else:
        image = bytearray(os.urandom(len(image)))
    saved.unlink()  # `first` has it mapped
    saved.write_bytes(image)
    with pytest.raises(forebay.ForebayError):
        Catalog.load(str(saved))
    again, rebuilt, note = Catalog.open(str(copy))
    assert rebuilt and str(saved) in note
    assert again.fingerprint == first.fingerprint


def test_a_catalog_that_another_user_planted_is_not_used(copy: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: only root can make files of another user")
    mine, _, _ = Catalog.open(str(copy))
    saved = Path(Catalog.default_file(str(copy)))
    assert saved.stat().st_mode & 0o777 == 0o600
    # Another choice of samples, for the same path and just as fresh.
    planted = Catalog.build(str(copy), "folder", ["1.bin"])
    assert 0 < len(planted) < len(mine)
    saved.unlink()
    planted.save(str(saved))
    os.chown(saved, 65534, 65534)
    again, rebuilt, note = Catalog.open(str(copy))
    assert rebuilt and again.fingerprint == mine.fingerprint
    assert str(saved) in note and "user 65534" in note and "not used" in note
    assert Catalog.open(str(copy))[1:] == (False, "")


def test_a_folder_of_catalogs_that_others_can_write_to_is_not_used(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(shared))
    Catalog.open(str(copy))
    shared.chmod(0o775)
    catalog, rebuilt, note = Catalog.open(str(copy))
    assert rebuilt and len(catalog) == 61
    assert f"others may write to {shared}" in note and "FOREBAY_CACHE_DIR" in note
    shared.chmod(0o1777)
    assert Catalog.open(str(copy))[1:] == (False, "")


def test_no_place_to_save_is_no_error(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = copy.parent / "file"
    in_the_way.touch()
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(in_the_way / "cache"))
    catalog, rebuilt, note = Catalog.open(str(copy))
    assert rebuilt and "not saved" in note
    assert len(catalog) == 61


def test_verify_finds_what_changed(copy: Path) -> None:
    catalog = Catalog.build(str(copy))
    catalog.verify()
    cut = copy / "class1" / "00004.bin"
    size = cut.stat().st_size
    os.truncate(cut, size - 1)
    with pytest.raises(forebay.ChangedError, match=f"{cut} has {size - 1} bytes.* {size}"):
        catalog.verify()
    (copy / "class0" / "00000.bin").unlink()
    with pytest.raises(forebay.ChangedError, match="2 problems") as caught:
        catalog.verify()
    assert "00000.bin is gone" in str(caught.value)


def test_verify_finds_a_flipped_bit_in_a_record(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    offsets = write_tfrecord(path, [b"first", b"second", b"third"])
    catalog = Catalog.build(str(tmp_path))
    catalog.verify()
    with path.open("r+b") as file:
        file.seek(offsets[1])
        file.write(b"S")
    with pytest.raises(forebay.CorruptError, match=rf"{path}.*offset {offsets[1]}"):
        catalog.verify()


def test_a_truncated_tar_names_file_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_tar(path, [("1", {"bin": b"x" * 5000}), ("2", {"bin": b"y" * 5000})])
    os.truncate(path, 512 + 5120 + 512 + 100)
    with pytest.raises(forebay.CorruptError, match=rf"{path}.*offset \d+"):
        Catalog.build(str(tmp_path))


def test_a_damaged_record_header_names_file_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    offsets = write_tfrecord(path, [b"first", b"second"])
    with path.open("r+b") as file:
        file.seek(offsets[1] - 12)
        file.write(b"\xff")
    with pytest.raises(forebay.CorruptError, match=rf"{path}.*offset {offsets[1] - 12}"):
        Catalog.build(str(tmp_path))


def test_from_files(folder: DataSet, tmp_path: Path) -> None:
    other = tmp_path / "other.bin"
    other.write_bytes(b"elsewhere")
    files = [str(folder.root / s.name) for s in reversed(folder.samples)] + [str(other)]
    files.append(files[0])  # the same file twice is two samples
    catalog = Catalog.from_files(files)
    assert catalog.format == "files"
    assert [catalog.object_path(i) for i in range(len(catalog))] == files
    assert [catalog.length(i) for i in range(len(catalog))] == [os.path.getsize(f) for f in files]
    loader = forebay.DataLoader(catalog, 10, memory="64M")
    got = [batch[i].tobytes() for batch in loader for i in range(len(batch))]
    assert got == [Path(f).read_bytes() for f in files]


def test_from_files_names_the_missing_one(folder: DataSet, tmp_path: Path) -> None:
    missing = tmp_path / "missing.bin"
    with pytest.raises(forebay.MissingError, match=str(missing)):
        Catalog.from_files([str(folder.root / folder.samples[0].name), str(missing)])
    with pytest.raises(forebay.ArgumentError, match="empty"):
        Catalog.from_files([])


def test_progress_is_called_and_its_exception_ends_it(folder: DataSet, tmp_path: Path) -> None:
    calls = []
    Catalog.build(str(folder.root), "", [], lambda *numbers: calls.append(numbers))
    for done, total, samples in calls:
        assert 0 <= done <= total and 0 <= samples <= len(folder)

    class Stop(Exception):
        pass

    def stop(*_: int) -> None:
        raise Stop

    many = make_folder(tmp_path / "many", files=300, mean_bytes=10)
    try:
        Catalog.build(str(many.root), "", [], stop)  # may be done before the first call
    except Stop:
        pass


def test_sample_numbers_are_checked(folder: DataSet) -> None:
    catalog = Catalog.build(str(folder.root))
    for wrong in (-1, len(catalog), 2**40):
        for ask in (catalog.name, catalog.label, catalog.length, catalog.offset, catalog.fields):
            with pytest.raises(IndexError, match="of 61"):
                ask(wrong)


def test_a_file_name_that_is_not_utf8(tmp_path):
    """Shown as os.fsdecode() shows it, in names, batches and errors."""
    odd = os.fsencode(tmp_path) + b"/c/\xff\xfe.bin"
    os.makedirs(tmp_path / "c")
    with open(odd, "wb") as out:
        out.write(b"abc")
    catalog = forebay.Catalog.build(str(tmp_path))
    assert os.fsencode(catalog.object_path(0)) == odd
    with forebay.DataLoader(catalog, 1, engine=forebay.Engine(memory="16M")) as loader:
        assert os.fsencode(next(iter(loader)).paths[0]) == b"c/\xff\xfe.bin"
    os.unlink(odd)
    with forebay.DataLoader(catalog, 1, engine=forebay.Engine(memory="16M")) as loader:
        with pytest.raises(forebay.MissingError) as error:
            next(iter(loader))
    assert odd in os.fsencode(str(error.value))


_LOSES = """
import os, sys, time
import forebay
mounted, below, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
catalog = forebay.Catalog.load(mounted)
os.truncate(below, 100)  # as a rebuild by another node, which knows no rename over this one's cache
while os.stat(mounted).st_size == size:
    time.sleep(0.05)
print(len(catalog), catalog.name(len(catalog) - 1))
"""


def test_a_catalog_that_another_node_cuts_off_kills_nobody(tmp_path):
    from forebay.slowfs import SlowFs

    usable, reason = SlowFs.available()
    if not usable:
        pytest.skip(f"no mount here: {reason}")
    data = tmp_path / "data" / "a"
    data.mkdir(parents=True)
    for i in range(2000):
        (data / f"{i:05}.bin").write_bytes(b"0")
    below = tmp_path / "below"
    below.mkdir()
    catalog = forebay.Catalog.build(str(data.parent))
    catalog.save(str(below / "saved.fbc"))
    mount = tmp_path / "mount"
    mount.mkdir()
    size = (below / "saved.fbc").stat().st_size
    with SlowFs(below, mount):
        done = subprocess.run(
            [sys.executable, "-c", _LOSES, mount / "saved.fbc", below / "saved.fbc", str(size)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.split() == ["2000", "a/01999.bin"]
