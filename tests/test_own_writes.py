"""A program that writes to the files of an accelerated data set reads what it wrote."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import forebay  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

SERVED = "forebay_stage_samples_total"
COUNT = 24


# ---- ways to write, at the top so that spawn can send them


def _in_place(path: str, new: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(new)


def _anew(path: str, new: bytes) -> None:
    with open(path, "wb") as file:
        file.write(new)


def _appended(path: str, new: bytes) -> None:
    with open(path, "ab") as file:
        file.write(new)


def _as_text(path: str, new: bytes) -> None:
    Path(path).write_text(new.hex())


def _replaced(path: str, new: bytes) -> None:
    Path(path + ".new").write_bytes(new)
    os.replace(path + ".new", path)


def _array(path: str, new: bytes) -> None:
    with open(path, "wb") as file:
        np.save(file, np.frombuffer(new, np.uint8))


def _mapped(path: str, new: bytes) -> None:
    array = np.memmap(path, np.uint8, "r+")
    array[: len(new)] = np.frombuffer(new, np.uint8)
    array.flush()


def _by_descriptor(path: str, new: bytes) -> None:
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    file = os.open(os.path.basename(path), os.O_WRONLY, dir_fd=folder)
    os.write(file, new)
    os.close(file)
    os.close(folder)


def _truncated(path: str, new: bytes) -> None:
    os.truncate(path, len(new))


def _copied(path: str, new: bytes) -> None:
    Path(path + ".new").write_bytes(new)
    shutil.copyfile(path + ".new", path)


def _by_another_name(path: str, new: bytes) -> None:
    other = os.path.join(os.path.dirname(os.path.dirname(path)), "link", os.path.basename(path))
    _in_place(other, new)


def _through_a_link(path: str, new: bytes) -> None:
    link = path + ".link"
    os.symlink(path, link)
    _in_place(link, new)
    os.unlink(link)


def _folder_replaced(path: str, new: bytes) -> None:
    folder = os.path.dirname(path)
    beside = f"{folder}.{os.getpid()}"
    shutil.copytree(folder, beside)
    Path(beside, os.path.basename(path)).write_bytes(new)
    os.rename(folder, beside + ".old")
    os.rename(beside, folder)
    shutil.rmtree(beside + ".old")


WAYS: dict[str, Callable[[str, bytes], None]] = {
    way.__name__.strip("_"): way
    for way in (
        _in_place, _anew, _appended, _as_text, _replaced, _array, _mapped, _by_descriptor,
        _truncated, _copied, _by_another_name, _through_a_link, _folder_replaced,
    )
}  # fmt: skip


def _really(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 1 << 20)
    finally:
        os.close(file)


class Rewritten(Dataset):
    """Reads a file, writes every third one, and reads it again."""

    def __init__(self, paths: list[str], way: Callable[[str, bytes], None]) -> None:
        self.paths = paths
        self.way = way

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[bool, bool]:
        path = self.paths[i]
        before = self._is_right(path)
        if i % 3 == 0:
            self.way(path, os.urandom(300))
        return before, self._is_right(path)

    @staticmethod
    def _is_right(path: str) -> bool:
        with open(path, "rb") as file:
            return file.read() == _really(path)


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    out = [folder / f"{i}.npy" for i in range(COUNT)]
    for path in out:
        path.write_bytes(os.urandom(1000))
    return [str(path) for path in out]


def _loader(paths: list[str], way: str, engine: forebay.Engine, **options: Any) -> DataLoader:
    loader = DataLoader(Rewritten(paths, WAYS[way]), 4, collate_fn=list, **options)
    fast = forebay.accelerate(loader, engine=engine)
    assert fast is not loader
    return fast


def _check(fast: DataLoader) -> None:
    for _ in range(3):
        assert [item for batch in fast for item in batch] == [(True, True)] * COUNT


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("workers", [0, 2], ids=["here", "workers"])
def test_what_was_written_is_read(way: str, workers: int, paths: list[str]) -> None:
    if way == "folder_replaced":
        workers = min(workers, 1)  # the others would find no folder
    engine = forebay.Engine(memory="32M")
    _check(_loader(paths, way, engine, num_workers=workers))
    # What was not written comes from memory, in every pass.
    unwritten = 0 if way == "folder_replaced" else COUNT - COUNT // 3
    assert engine.metrics()[SERVED] >= 3 * unwritten
    # A loader made anew, with an engine that still has what the files were.
    _check(_loader(paths, way, engine, num_workers=workers))


@pytest.mark.parametrize("stay", [False, True], ids=["anew", "stay"])
def test_workers_that_are_spawned(stay: bool, paths: list[str]) -> None:
    engine = forebay.Engine(memory="32M")
    _check(
        _loader(
            paths, "in_place", engine,
            num_workers=2, multiprocessing_context="spawn", persistent_workers=stay,
        )
    )  # fmt: skip


def test_what_the_main_process_writes_is_read_by_workers(paths: list[str]) -> None:
    engine = forebay.Engine(memory="32M")
    loader = DataLoader(
        Rewritten(paths, _nothing), 4, collate_fn=list, num_workers=2, persistent_workers=True
    )
    fast = forebay.accelerate(loader, engine=engine)
    for _ in range(3):
        assert [item for batch in fast for item in batch] == [(True, True)] * COUNT
        for path in paths[::5]:
            _in_place(path, os.urandom(300))


def _nothing(path: str, new: bytes) -> None:
    pass


def test_a_write_that_fails_is_the_programs_error(paths: list[str]) -> None:
    engine = forebay.Engine(memory="32M")
    fast = _loader(paths, "in_place", engine)
    with pytest.raises(FileNotFoundError):
        os.rename(paths[0] + ".none", paths[0] + ".other")
    with pytest.raises(TypeError):
        os.remove(object())  # type: ignore[arg-type]
    _check(fast)
