"""A loader over loose files begins before their sizes are known."""

from __future__ import annotations

import gc
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import forebay
import pytest
from data_sets import DataSet, batches_of, check_batch, torch_order
from forebay import Catalog
from forebay.slowfs import SlowFs

_SLOW, _WHY = SlowFs.available()


@pytest.fixture
def copy(folder: DataSet, tmp_path: Path) -> DataSet:
    """The folder data set at a path without a saved catalog."""
    root = Path(shutil.copytree(folder.root, tmp_path / "copy"))
    return DataSet(root, folder.samples)


@pytest.fixture
def slow(copy: DataSet) -> Iterator[DataSet]:
    """The same on storage where a stat takes a while."""
    if not _SLOW:
        pytest.skip(_WHY)
    with SlowFs(copy.root, stat_ms=20) as mount:
        yield DataSet(mount.path, copy.samples)
        gc.collect()


def _before_sizes(monkeypatch: pytest.MonkeyPatch, act: Callable[[Catalog], None]) -> None:
    """Calls `act` between the listing and the first lookup of a size."""
    real = forebay.Engine.dataset

    def dataset(engine: forebay.Engine, catalog: Catalog, delay: str = "") -> int:
        act(catalog)
        return real(engine, catalog, delay)

    monkeypatch.setattr(forebay.Engine, "dataset", dataset)


def _check_epochs(loader: forebay.DataLoader, data: DataSet, batch: int, epochs: int = 2) -> None:
    for epoch in range(epochs):
        order = torch_order(
            len(data), shuffle=True, seed=3, epoch=epoch, rank=0, world=1, drop_last=False
        )
        for got, samples in zip(loader, batches_of(order, batch), strict=True):
            check_batch(got, samples, data)


def test_the_same_batches_as_with_sizes(slow: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(slow.root, 8, shuffle=True, seed=3, engine=engine)
    assert not loader.catalog.complete
    assert len(loader) == -(-len(slow) // 8)
    _check_epochs(loader, slow, 8)
    assert loader.catalog.fingerprint == Catalog.build(str(slow.root)).fingerprint
    assert loader.catalog.lengths().tolist() == [len(s.data) for s in slow.samples]


def test_it_is_saved_when_it_is_complete(
    slow: DataSet, engine: forebay.Engine, wait_until: Callable[[Callable[[], bool]], None]
) -> None:
    saved = Path(Catalog.default_file(str(slow.root)))
    loader = forebay.DataLoader(slow.root, 8, shuffle=True, seed=3, engine=engine)
    assert not saved.exists()
    _check_epochs(loader, slow, 8, epochs=1)
    wait_until(lambda: loader.catalog.complete)
    assert loader.catalog.save_note == ""
    again, rebuilt, note = Catalog.open(str(slow.root))
    assert (rebuilt, note) == (False, "")
    assert again.fingerprint == loader.catalog.fingerprint


def test_names_labels_and_length_need_no_sizes(slow: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(slow.root, 8, engine=engine)
    catalog = loader.catalog
    assert [catalog.name(s) for s in range(len(catalog))] == [s.name for s in slow.samples]
    assert catalog.classes and catalog.label(0) == 0
    assert Path(catalog.object_path(0)) == slow.root / slow.samples[0].name
    assert not catalog.complete


def test_state_before_the_first_batch(slow: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(slow.root, 8, shuffle=True, seed=3, engine=engine)
    state = loader.state_dict()
    assert state["fingerprint"] == Catalog.build(str(slow.root)).fingerprint
    _check_epochs(loader, slow, 8, epochs=1)


def test_close_before_the_first_batch(slow: DataSet) -> None:
    for _ in range(3):
        with forebay.DataLoader(slow.root, 8, memory="64M"):
            pass


@pytest.mark.parametrize("where", ["deleted", "folder"])
def test_a_file_that_goes_before_its_size_is_known(
    copy: DataSet, engine: forebay.Engine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    victim = copy.root / copy.samples[11].name

    def damage(_: Catalog) -> None:
        if victim.is_file():
            victim.unlink()
            if where == "folder":
                victim.mkdir()

    with monkeypatch.context() as patched:
        _before_sizes(patched, damage)
        loader = forebay.DataLoader(copy.root, 8, engine=engine)
    iterator = iter(loader)
    check_batch(next(iterator), list(range(8)), copy)
    error = forebay.MissingError if where == "deleted" else forebay.ChangedError
    for _ in range(2):
        with pytest.raises(error, match=re.escape(str(victim))):
            next(iterator)
    # What else needs the sizes does not fail, and nothing half known is saved.
    assert loader.state_dict()["size"] == len(copy)
    assert str(victim) in loader.catalog.save_note
    assert not Path(Catalog.default_file(str(copy.root))).exists()
    # Put back, the same batch comes, and then the others.
    if victim.is_dir():
        victim.rmdir()
    victim.write_bytes(copy.samples[11].data)
    for samples in list(batches_of(list(range(len(copy))), 8))[1:]:
        check_batch(next(iterator), samples, copy)
    assert next(iterator, None) is None


def test_a_second_loader_shares_the_samples(slow: DataSet, engine: forebay.Engine) -> None:
    first = forebay.DataLoader(slow.root, 8, shuffle=True, seed=3, engine=engine)
    second = forebay.DataLoader(slow.root, 8, shuffle=True, seed=3, engine=engine)
    _check_epochs(first, slow, 8, epochs=1)
    _check_epochs(second, slow, 8, epochs=1)
    assert engine.metrics()["forebay_source_reads_total"] == len(slow)


def test_what_needs_all_sizes_waits(slow: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(
        slow.root, 8, shuffle=True, seed=3, engine=engine, layout="contiguous"
    )
    assert loader.catalog.complete
    _check_epochs(loader, slow, 8)


def test_a_cache_folder_waits_for_none(slow: DataSet, tmp_path: Path) -> None:
    """Neither the first job, which lists, nor a later one, which looks at each file again."""
    for job in range(3):
        engine = forebay.Engine(memory="64M", cache_dir=tmp_path / "cache")
        loader = forebay.DataLoader(slow.root, 8, shuffle=True, seed=3, engine=engine)
        if job == 0:  # later ones look at the first 128 while they compare the folders
            assert not loader.catalog.complete
        _check_epochs(loader, slow, 8)
        loader.close()
        reads = engine.metrics()["forebay_source_reads_total"]
        assert reads == (0 if job else len(slow))
        del engine, loader


def test_a_contiguous_loader_beside_one_that_began_early(
    slow: DataSet, engine: forebay.Engine
) -> None:
    early = forebay.DataLoader(slow.root, 8, shuffle=True, seed=3, engine=engine)
    whole = forebay.DataLoader(
        slow.root, 8, shuffle=True, seed=3, engine=engine, layout="contiguous"
    )
    _check_epochs(whole, slow, 8, epochs=1)
    _check_epochs(early, slow, 8, epochs=1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_forked_before_the_sizes_are_known(slow: DataSet) -> None:
    loader = forebay.DataLoader(slow.root, 8, shuffle=True, seed=3, memory="64M")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert loader.state_dict()["size"] == len(slow)
            _check_epochs(loader, slow, 8, epochs=1)
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    _check_epochs(loader, slow, 8, epochs=1)


@pytest.mark.parametrize("take", [False, True], ids=["at once", "after a batch"])
def test_exit_while_lookups_hang(copy: DataSet, take: bool) -> None:
    if not _SLOW:
        pytest.skip(_WHY)
    script = (
        "import sys, forebay\n"
        "loader = forebay.DataLoader(sys.argv[1], 2, memory='64M')\n"
        + ("next(iter(loader))\n" if take else "")
        + "print('ready', flush=True)\n"
    )
    with SlowFs(copy.root, stat_ms=300) as mount:
        done = subprocess.run(
            [sys.executable, "-c", script, str(mount.path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "ready\n"), done.stderr
