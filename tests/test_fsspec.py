"""forebay:// for fsspec, and what reads through it."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import os
import pickle
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forebay._internal.url
import forebay.files
import numpy as np
import pytest
from data_sets import DataSet

fsspec = pytest.importorskip("fsspec")

from forebay.fsspec_fs import ForebayFileSystem  # noqa: E402


@pytest.fixture
def service(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[forebay.files.Service]:
    """A service of this test's own, as the first use starts it."""
    place = tmp_path_factory.mktemp("service")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
    monkeypatch.setenv("FOREBAY_CACHE", str(place / "cache"))
    monkeypatch.setattr(forebay._internal.url, "_tried", False)
    # Files of a test have just been written.
    start = functools.partial(forebay.files.Service.start, young_ms=0, linger=1)
    monkeypatch.setattr(forebay.files.Service, "start", start)
    for name in (forebay.files.CACHE, forebay.files.SOCKET, forebay.files.SOURCES):
        monkeypatch.setenv(name, "")
    fsspec.register_implementation("forebay", ForebayFileSystem, clobber=True)
    assert forebay._internal.url.settings() is not None
    made = forebay._internal.url._service
    assert made is not None
    yield made
    made.close()
    forebay._internal.url._service = None


def copies(service: forebay.files.Service) -> int:
    return sum(1 for p in Path(service.view, "copies").iterdir() if not p.name.endswith(".part"))


def test_the_entry_point() -> None:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    assert 'forebay = "forebay.fsspec_fs:ForebayFileSystem"' in text
    try:
        found = importlib.metadata.distribution("forebay").entry_points
    except importlib.metadata.PackageNotFoundError:
        return  # a build folder on the path
    (spec,) = found.select(group="fsspec.specs", name="forebay")
    assert spec.load() is ForebayFileSystem


def test_reading(folder: DataSet, service: forebay.files.Service) -> None:
    names = [str(folder.root / s.name) for s in folder.samples]
    for _ in range(2):
        for name, sample in zip(names, folder.samples, strict=True):
            with fsspec.open(f"forebay://{name}") as file:
                assert file.read() == sample.data
    fs = fsspec.filesystem("forebay")
    big = max(range(len(names)), key=lambda i: len(folder.samples[i].data))
    data = folder.samples[big].data
    assert fs.cat_file(names[big], 3, -2) == data[3:-2]
    assert fs.cat([names[0], names[big]])[names[big]] == data
    with fs.open(names[big]) as file:
        assert file.size == len(data) and file.seek(5) == 5
        again = pickle.loads(pickle.dumps(file))
        assert again.read() == file.read() == data[5:]
        again.close()
    out = io.BytesIO()
    fs.get_file(names[big], out)
    assert out.getvalue() == data


def test_names_are_the_sources(folder: DataSet, service: forebay.files.Service) -> None:
    fs, plain = fsspec.filesystem("forebay"), fsspec.filesystem("file")
    root = str(folder.root)
    assert sorted(fs.find(root)) == sorted(plain.find(root))
    assert fs.glob(f"forebay://{root}/*/*.bin") == plain.glob(f"{root}/*/*.bin")
    path = str(folder.root / folder.samples[3].name)
    assert fs.info(f"forebay://{path}") == plain.info(path)
    assert fs.unstrip_protocol(path) == f"forebay://{path}"
    assert fs.info(f"forebay://{path[1:]}") == plain.info(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        fs.open(f"forebay://{root}/nowhere")


def origin(path: object) -> tuple[bytes, str]:
    """What is read, and of which file."""
    with fsspec.open(f"forebay://{path}") as file:
        return file.read(), os.readlink(f"/proc/self/fd/{file.fileno()}")


def test_copies_are_read_while_the_source_is_as_it_was(
    tmp_path: Path, service: forebay.files.Service
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    for _ in range(2):
        data, file = origin(path)
        assert data == b"before" and file.startswith(f"{service.view}/copies/")
    assert copies(service) == 1
    assert service.status()["metrics"]["forebay_source_read_bytes_total"] == 6
    path.write_bytes(b"after!")  # past us
    for _ in range(2):
        assert origin(path) == (b"after!", str(path))
    path.unlink()
    with pytest.raises(FileNotFoundError, match="file"):
        fsspec.open(f"forebay://{path}").open()


def test_a_killed_service(tmp_path: Path, service: forebay.files.Service) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    assert origin(tmp_path / "a")[0] == b"a" * 100
    os.kill(service.status()["pid"], signal.SIGKILL)
    assert origin(tmp_path / "a")[0] == b"a" * 100
    assert origin(tmp_path / "b") == (b"b" * 100, str(tmp_path / "b"))


def test_it_is_for_reading(tmp_path: Path, service: forebay.files.Service) -> None:
    fs = fsspec.filesystem("forebay")
    kept = tmp_path / "kept"
    kept.write_bytes(b"kept")
    changes: list[Any] = [
        lambda: fs.open(str(kept), "wb"), lambda: fs.open(str(kept), "ab"),
        lambda: fs.rm(str(kept)), lambda: fs.mv(str(kept), f"{kept}2"),
        lambda: fs.touch(str(kept)), lambda: fs.mkdir(f"{kept}3"),
        lambda: fs.put(str(kept), f"{kept}4"), lambda: fs.pipe(str(kept), b"x"),
    ]  # fmt: skip
    for change in changes:
        with pytest.raises(OSError, match="forebay:// is for reading"):
            change()
    assert kept.read_bytes() == b"kept" and os.listdir(tmp_path) == ["kept"]


def test_pandas_and_pyarrow(tmp_path: Path, service: forebay.files.Service) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    import pyarrow.parquet as pq
    from pyarrow import dataset

    frame = pandas.DataFrame({"a": np.arange(1000), "b": np.random.default_rng(1).random(1000)})
    frame.to_parquet(tmp_path / "x.parquet")
    frame.to_csv(tmp_path / "x.csv", index=False)
    assert pandas.read_parquet(f"forebay://{tmp_path}/x.parquet").equals(frame)
    assert np.allclose(pandas.read_csv(f"forebay://{tmp_path}/x.csv"), frame)
    fs = fsspec.filesystem("forebay")
    assert pq.read_table(f"{tmp_path}/x.parquet", filesystem=fs).num_rows == 1000
    found = dataset.dataset(f"{tmp_path}/x.parquet", filesystem=fs, format="parquet")
    assert found.to_table(columns=["a"])["a"].to_pylist() == list(range(1000))


def test_a_large_file_is_read_while_it_is_copied(
    tmp_path: Path, service: forebay.files.Service
) -> None:
    path = tmp_path / "large.bin"
    data = random.Random(1).randbytes(24 << 20)
    path.write_bytes(data)
    url = f"forebay://{path}"
    with fsspec.open(url) as file:
        assert file.read(100) == data[:100]
        for at in (5 << 20, 7, (24 << 20) - 10, 12_345_678):
            file.seek(at)
            assert file.read(300_000) == data[at : at + 300_000]
        file.seek(0)
        assert file.read() == data
        assert file.read() == b"" and file.tell() == len(data)
    # Another file of that name, while there is some of the first.
    path.write_bytes(data[::-1])
    for _ in range(2):
        with fsspec.open(url) as file:
            assert file.read(2 << 20) == data[::-1][: 2 << 20]


def test_what_was_copied_of_a_file_that_changes_is_not_read(
    tmp_path: Path, service: forebay.files.Service
) -> None:
    path = tmp_path / "large.bin"
    path.write_bytes(b"a" * (24 << 20))
    url = f"forebay://{path}"
    with fsspec.open(url) as file:
        assert set(file.read(1 << 20)) == set(b"a")
        path.write_bytes(b"b" * (24 << 20))
        with fsspec.open(url) as other:
            assert set(other.read(1 << 20)) == set(b"b")
