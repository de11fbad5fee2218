"""Data sets come and go: memory, threads and descriptors stay what a few of them need."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import forebay
import pytest
from conftest import forebay_threads
from data_sets import written_long_ago
from test_daemon import run_folder  # noqa: F401 - a fixture


def _files(folder: Path, count: int, size: int = 3000) -> list[str]:
    folder.mkdir()
    for i in range(count):
        path = folder / f"{i:04}.bin"
        path.write_bytes(i.to_bytes(4, "little") * (size // 4))
        written_long_ago(path)
    return [str(folder / f"{i:04}.bin") for i in range(count)]


def _descriptors(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def _private_memory(pid: int | str = "self") -> int:
    """Bytes that the process has of its own; the engine's arena is shared."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("Linux before 4.5")


def _read(loader: forebay.DataLoader) -> int:
    seen = 0
    for batch in loader:
        for i in range(len(batch)):
            number = int(Path(batch.paths[i]).stem)
            assert bytes(batch[i][:4]) == number.to_bytes(4, "little")
            seen += 1
    return seen


def test_k_fold_in_a_small_budget(tmp_path: Path) -> None:
    files = _files(tmp_path / "data", 200)
    engine = forebay.Engine(memory="64M")
    folds = 100
    after_ten: tuple[int, int] | None = None
    for fold in range(folds):
        held_out = files[fold * 2 : fold * 2 + 2]
        rest = [name for name in files if name not in held_out]
        train = forebay.DataLoader(
            forebay.Catalog.from_files(rest), 16, shuffle=True, engine=engine
        )
        test = forebay.DataLoader(forebay.Catalog.from_files(held_out), 2, engine=engine)
        assert _read(train) == 198
        assert _read(test) == 2
        train.close()
        test.close()
        if fold == 9:
            after_ten = len(forebay_threads()), _descriptors()
    assert after_ten is not None
    # The pool of readers grows to as many as one data set can use.
    assert len(forebay_threads()) <= after_ten[0] + 128
    assert _descriptors() <= after_ten[1] + 8


def test_a_thousand_data_sets_in_one_process(tmp_path: Path) -> None:
    files = _files(tmp_path / "data", 40, 400)
    engine = forebay.Engine(memory="32M", max_in_flight=16)
    kept = forebay.DataLoader(forebay.Catalog.from_files(files), 10, engine=engine)
    after_ten = None
    memory = 0
    for turn in range(1000):
        some = files[turn % 20 : turn % 20 + 20 - turn % 7]
        with forebay.DataLoader(forebay.Catalog.from_files(some), 10, engine=engine) as loader:
            assert _read(loader) == len(some)
        if turn == 9:
            after_ten = len(forebay_threads()), _descriptors(), _arena(engine)
        if turn == 199:  # what is kept by age is kept by then
            memory = _private_memory()
    assert after_ten is not None
    assert len(forebay_threads()) <= after_ten[0] + 16
    assert _descriptors() <= after_ten[1] + 8
    assert _arena(engine) <= after_ten[2] + (1 << 20)
    assert _private_memory() <= memory + (4 << 20)
    assert _read(kept) == 40


def test_a_thousand_data_sets_of_a_daemon(tmp_path: Path, run_folder: Path) -> None:  # noqa: F811
    files = _files(tmp_path / "data", 40, 400)
    engine = forebay.SharedEngine(memory="32M", max_in_flight=16, linger=0)
    kept = forebay.DataLoader(forebay.Catalog.from_files(files), 10, engine=engine)
    client = engine.client()
    assert client is not None
    pid = client.pid
    after_ten: tuple[int, int] | None = None
    memory = 0
    for turn in range(1000):
        some = files[turn % 20 : turn % 20 + 20 - turn % 7]
        with forebay.DataLoader(forebay.Catalog.from_files(some), 10, engine=engine) as loader:
            assert _read(loader) == len(some)
        if turn == 9:
            after_ten = _threads(pid), _descriptors(pid)
        if turn == 199:
            memory = _private_memory(pid)
    assert after_ten is not None
    assert _threads(pid) <= after_ten[0] + 16
    assert _descriptors(pid) <= after_ten[1] + 8
    assert _private_memory(pid) <= memory + (1 << 20)  # 1.3 KiB a data set
    assert _read(kept) == 40


def _arena(engine: forebay.Engine) -> int:
    return engine.metrics()["forebay_stage_arena_used_bytes"]


def test_a_loader_that_is_made_anew_finds_what_was_kept(tmp_path: Path) -> None:
    _files(tmp_path / "data", 60)
    engine = forebay.Engine(memory="64M")
    for _ in range(5):
        with forebay.DataLoader(tmp_path / "data", 8, shuffle=True, engine=engine) as loader:
            assert _read(loader) == 60
    assert engine.metrics()["forebay_source_reads_total"] == 60


def test_a_loader_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    files = _files(tmp_path / "data", 10)
    engine = forebay.Engine(memory="32M")
    for turn in range(200):
        catalog = forebay.Catalog.from_files(files[: 1 + turn % 10])
        with pytest.raises(forebay.CorruptError):
            forebay.DataLoader(catalog, 2, engine=engine, decode="npy")
    assert _arena(engine) < 4 << 20


def test_a_forked_child_takes_a_part_of_the_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _files(tmp_path / "data", 20)
    engine = forebay.Engine(memory="1G")
    loader = forebay.DataLoader(tmp_path / "data", 5, engine=engine)
    assert _read(loader) == 20
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "failed"
        try:
            with caplog.at_level(logging.WARNING, "forebay"):
                seen = _read(loader)
                again = _read(loader)
            warned = sum("was forked" in r.getMessage() for r in caplog.records)
            said = f"{seen} {again} {engine.budget >> 20} {warned}"
        finally:
            os.write(write, said.encode())
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == "20 20 128 1"
    os.waitpid(child, 0)
    assert engine.budget == 1 << 30
