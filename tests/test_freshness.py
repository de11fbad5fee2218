"""What training gets is what the files hold now, whatever was copied or kept of them before."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import forebay
import numpy as np
import pytest
from data_sets import written_long_ago
from forebay import _forebay
from forebay.cli import main
from test_daemon import _pid as daemon_pid
from test_daemon import run_folder  # noqa: F401 - a fixture

COUNT = 24
BYTES = 3000


class Files:
    """A folder of files, and what they hold."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now: dict[str, bytes] = {}
        for i in range(COUNT):
            self.write(f"{i % 3}/{i:02d}.bin", i)

    def write(self, name: str, version: int, size: int = BYTES) -> None:
        """In place, where it is there: no folder changes."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.now[name] = bytes([version % 256]) * size
        with open(path, "r+b" if path.exists() else "wb") as file:
            file.write(self.now[name])
            file.truncate()
        written_long_ago(path)

    def check(self, loader: forebay.DataLoader, epochs: int = 1) -> None:
        for _ in range(epochs):
            got = {}
            for batch in loader:
                for i, number in enumerate(batch.indices):
                    got[loader.catalog.name(int(number))] = batch[i].tobytes()
                batch.release()
            old = sorted(n for n, data in self.now.items() if got.get(n) != data)
            assert not old, f"not as they are now: {old}"
            assert got.keys() == self.now.keys()


def same_size(files: Files) -> None:
    files.write("1/04.bin", 200)


def longer(files: Files) -> None:
    files.write("1/04.bin", 201, BYTES + 100)


def shorter(files: Files) -> None:
    files.write("2/05.bin", 202, BYTES - 100)


def empty(files: Files) -> None:
    files.write("2/05.bin", 203, 0)


def renamed(files: Files) -> None:
    files.now["0/03.bin"] = bytes([204]) * BYTES
    beside = files.root / "beside"
    beside.write_bytes(files.now["0/03.bin"])
    written_long_ago(beside)
    beside.rename(files.root / "0/03.bin")


def older(files: Files) -> None:
    """With a time that is before the one it had, as of a backup that was put back."""
    files.write("1/04.bin", 205)
    os.utime(files.root / "1/04.bin", ns=(10**18, 10**18))


def link_moved(files: Files) -> None:
    beside = files.root.parent / "v2"
    beside.mkdir()
    target = files.root.resolve()
    os.unlink(files.root)
    for name in files.now:
        (beside / name).parent.mkdir(exist_ok=True)
        st = os.stat(target / name)
        files.now[name] = bytes(255 - b for b in files.now[name])
        (beside / name).write_bytes(files.now[name])
        os.utime(beside / name, ns=(st.st_atime_ns, st.st_mtime_ns))  # a replica with its times
    files.root.symlink_to(beside)


CHANGES = [same_size, longer, shorter, empty, renamed, older, link_moved]
change = pytest.mark.parametrize("change", CHANGES, ids=lambda c: c.__name__)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "catalogs"))
    (tmp_path / "v1").mkdir()
    root = tmp_path / "now"
    root.symlink_to(tmp_path / "v1")
    yield Files(root)
    gc.collect()


Change = Callable[[Files], None]


@change
@pytest.mark.parametrize("layout", ["views", "contiguous"])
def test_a_later_job_with_copies(change: Change, layout: str, files: Files, tmp_path: Path) -> None:
    """T1, T30: the copies of the job before are of other bytes."""
    for step in range(3):
        engine = forebay.Engine(memory="16M", cache_dir=tmp_path / "cache")
        with forebay.DataLoader(
            files.root, 5, shuffle=True, engine=engine, layout=layout
        ) as loader:
            files.check(loader, epochs=2)
        reads = engine.metrics()["forebay_source_reads_total"]
        del engine, loader
        if step == 0:
            assert reads == COUNT
            change(files)
        elif step == 1:
            assert reads == (COUNT if change is link_moved else 1)
        else:
            assert reads == 0  # what was read anew has copies


@change
def test_a_new_loader_in_the_same_process(change: Change, files: Files) -> None:
    """T21, T30: what is in memory is of the files as they were."""
    engine = forebay.Engine(memory="16M")
    first = forebay.DataLoader(files.root, 5, engine=engine)
    files.check(first)
    first.close()
    change(files)
    with forebay.DataLoader(files.root, 5, engine=engine) as second:
        files.check(second, epochs=2)


@pytest.mark.parametrize("change", [same_size, longer, renamed])
def test_each_later_loader_looks(change: Change, files: Files) -> None:
    engine = forebay.Engine(memory="16M")
    for step in range(4):
        with forebay.DataLoader(files.root, 5, engine=engine) as loader:
            files.check(loader)
        if step == 2:
            change(files)


@change
def test_a_list_made_anew(change: Change, files: Files) -> None:
    """T21: Catalog.from_files looks, and the engine must not take its files for those it has."""
    engine = forebay.Engine(memory="16M")
    paths = [str(files.root / name) for name in sorted(files.now)]
    for _ in range(2):
        catalog = forebay.Catalog.from_files(paths)
        with forebay.DataLoader(catalog, 5, engine=engine) as loader:
            files.check(loader)
        if files.now["1/04.bin"][:1] == b"\x04":
            change(files)


@change
def test_what_is_not_changed_is_shared(change: Change, files: Files) -> None:
    """Loaders over one state of the files have one copy of them in memory."""
    engine = forebay.Engine(memory="16M")
    change(files)
    for _ in range(3):
        with forebay.DataLoader(files.root, 5, engine=engine) as loader:
            files.check(loader)
    assert engine.metrics()["forebay_source_reads_total"] == COUNT


@change
@pytest.mark.parametrize("cache", [False, True], ids=["memory", "cache"])
def test_a_living_daemon(
    change: Change,
    cache: bool,
    files: Files,
    run_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """T1, T30: another job's daemon has them in memory and in its cache folder."""
    options = {"cache_dir": tmp_path / "cache"} if cache else {}
    with ExitStack() as open_loaders:
        for step in range(2):
            engine = forebay.SharedEngine(memory="16M", linger=0, **options)
            loader = forebay.DataLoader(files.root, 5, engine=engine)
            open_loaders.enter_context(loader)
            files.check(loader, epochs=2)
            if step == 0:
                change(files)


def test_what_nobody_changed_is_read_once(files: Files, tmp_path: Path) -> None:
    reads = []
    for freshness in ("job", "never", "job"):
        engine = forebay.Engine(memory="16M", cache_dir=tmp_path / "cache")
        with forebay.DataLoader(files.root, 5, engine=engine, freshness=freshness) as loader:
            files.check(loader)
        reads.append(engine.metrics()["forebay_source_reads_total"])
        del engine, loader
    assert reads == [COUNT, 0, 0]


def test_never_trusts(files: Files, tmp_path: Path) -> None:
    """The files are said not to change: no look is made at them."""
    engine = forebay.Engine(memory="16M", cache_dir=tmp_path / "cache")
    with forebay.DataLoader(files.root, 5, engine=engine) as loader:
        files.check(loader)
    del engine, loader
    before = dict(files.now)
    same_size(files)
    files.now = before
    engine = forebay.Engine(memory="16M", cache_dir=tmp_path / "cache")
    with forebay.DataLoader(files.root, 5, engine=engine, freshness="never") as loader:
        files.check(loader)


def test_a_wrong_mode_is_named(files: Files) -> None:
    with pytest.raises(forebay.ArgumentError, match="'job', 'epoch' or 'never'"):
        forebay.DataLoader(files.root, 5, freshness="always")


# ---- in a run


def _warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize("io", ["threads", "io_uring"])
@pytest.mark.parametrize("cache", [False, True], ids=["memory", "cache"])
def test_a_change_in_a_run_is_told_once(
    cache: bool, io: str, files: Files, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What is read from then on is new, and is not copied under the old name."""
    if io == "io_uring" and (reason := _forebay.features()["io_uring"]):
        pytest.skip(reason)
    where = tmp_path / "cache" if cache else None
    engine = forebay.Engine(memory="16M", cache_dir=where, io=io)
    os.utime(files.root / "1/04.bin", ns=(10**18, 10**18))
    catalog = forebay.Catalog.build(str(files.root))  # looked at, and not yet read
    same_size(files)
    with forebay.DataLoader(catalog, 5, engine=engine) as loader:
        files.check(loader, epochs=3)
    lines = _warned(caplog)
    assert len(lines) == 1 and "1/04.bin changed" in lines[0]
    assert engine.metrics()["forebay_source_changed_files"] == 1
    del loader, engine
    if cache:  # as it was put back with its time: no copy has the bytes of meanwhile
        files.write("1/04.bin", 4)
        os.utime(files.root / "1/04.bin", ns=(10**18, 10**18))
        again = forebay.Engine(memory="16M", cache_dir=where)
        with forebay.DataLoader(files.root, 5, engine=again) as loader:
            files.check(loader)
        assert again.metrics()["forebay_source_reads_total"] == 1


def _array_files(files: Files) -> None:
    for name, data in files.now.items():
        np.save(files.root / name.replace(".bin", ".npy"), np.frombuffer(data, np.uint8))
        (files.root / name).unlink()


@pytest.mark.parametrize("where", ["here", "daemon", "daemon is killed"])
def test_a_change_may_be_an_error(
    files: Files,
    where: str,
    run_folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.daemon._RETURN_S", (600.0,))
    catalog = forebay.Catalog.build(str(files.root))
    same_size(files)
    engine: forebay.Engine = (
        forebay.Engine(memory="16M")
        if where == "here"
        else forebay.SharedEngine(memory="16M", linger=0)
    )
    loader = forebay.DataLoader(catalog, 4, engine=engine, on_change="raise")
    with pytest.raises(forebay.ChangedError, match="1/04.bin"):
        files.check(loader)
    files.check(loader)  # told once; from then on it is the data set's
    if where == "daemon is killed":
        assert isinstance(engine, forebay.SharedEngine)
        os.kill(daemon_pid(engine), signal.SIGKILL)
    files.check(loader, epochs=2)  # nor by the engine that takes its place
    loader.close()
    if where == "daemon is killed":
        assert engine.native.daemon is None
        for left in run_folder.glob("forebayd.*"):  # what a dead one had to say, and its socket
            left.unlink(missing_ok=True)
        if run_folder.exists():
            run_folder.rmdir()


def test_an_error_of_decoded_batches_from_a_daemon(
    files: Files,
    run_folder: Path,  # noqa: F811
) -> None:
    _array_files(files)
    catalog = forebay.Catalog.build(str(files.root))
    changed = np.full(BYTES, 200, np.uint8)
    np.save(files.root / "1/04.npy", changed)
    engine = forebay.SharedEngine(memory="32M", linger=0)
    loader = forebay.DataLoader(catalog, COUNT, engine=engine, on_change="raise", decode="npy")
    with pytest.raises(forebay.ChangedError, match="1/04.npy"):
        next(iter(loader))
    arrays, _ = next(iter(loader))
    assert any((np.asarray(array) == changed).all() for array in arrays)
    loader.close()


def test_an_error_is_of_the_own_data_set(files: Files, tmp_path: Path) -> None:
    """Of those that share an engine, only who reads the file is told, also with its number."""
    others = Files(tmp_path / "others")
    catalog = forebay.Catalog.build(str(others.root))
    same_size(others)
    engine = forebay.Engine(memory="16M", cache_dir=tmp_path / "cache", keep=False)
    with forebay.DataLoader(catalog, 5, engine=engine) as loader:
        with forebay.DataLoader(files.root, 5, engine=engine, on_change="raise") as own:
            others.check(loader)
            files.check(own)
    del loader, own, catalog
    later = [Files(tmp_path / f"later{i}") for i in range(4)]
    for one in later:  # one of them has the number of the changed one
        with forebay.DataLoader(one.root, 5, engine=engine) as loader:
            one.check(loader)
    del loader, engine
    again = forebay.Engine(memory="16M", cache_dir=tmp_path / "cache")
    for one in later:
        with forebay.DataLoader(one.root, 5, engine=again) as loader:
            one.check(loader)
    assert again.metrics()["forebay_source_reads_total"] == 0


@pytest.mark.parametrize("change", [same_size, longer, shorter, empty, renamed, older])
@pytest.mark.parametrize("where", ["memory", "cache", "daemon"])
def test_each_epoch_looks_again(
    change: Change,
    where: str,
    files: Files,
    run_folder: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine: forebay.Engine
    if where == "daemon":
        engine = forebay.SharedEngine(memory="16M", linger=0)
    else:
        cache = tmp_path / "cache" if where == "cache" else None
        engine = forebay.Engine(memory="16M", cache_dir=cache)
    with forebay.DataLoader(files.root, 5, engine=engine, freshness="epoch") as loader:
        files.check(loader, epochs=2)
        change(files)
        files.check(loader, epochs=2)
        assert loader.epoch == 4
    assert len(_warned(caplog)) == 1


def test_each_epoch_may_raise(files: Files) -> None:
    engine = forebay.Engine(memory="16M")
    loader = forebay.DataLoader(files.root, 5, engine=engine, freshness="epoch", on_change="raise")
    files.check(loader)
    same_size(files)
    with pytest.raises(forebay.ChangedError, match="1/04.bin"):
        iter(loader)


# ---- what only the time of any change shows


def time_put_back(files: Files) -> None:
    """Same size, and the modification time as it was."""
    path = files.root / "1/04.bin"
    st = path.stat()
    time.sleep(0.01)  # within a tick of the kernel's clock no time moves
    files.write("1/04.bin", 206)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))


def only_its_mode(files: Files) -> None:
    time.sleep(0.01)
    (files.root / "1/04.bin").chmod(0o640)


def reads_of(root: Path, cache: Path, layout: str = "views") -> int:
    """What a job of one epoch reads from the source."""
    engine = forebay.Engine(memory="16M", cache_dir=cache)
    with forebay.DataLoader(root, 5, engine=engine, layout=layout) as loader:
        for batch in loader:
            batch.release()
    return engine.metrics()["forebay_source_reads_total"]


@pytest.mark.parametrize("layout", ["views", "contiguous"])
def test_a_copy_of_a_file_that_was_just_written_is_compared_once(
    layout: str, files: Files, tmp_path: Path
) -> None:
    """It may have been written again within one tick of the clock, which no look can tell."""
    for name in ("1/04.bin", "2/05.bin"):
        os.utime(files.root / name)
    assert reads_of(files.root, tmp_path / "cache", layout) == COUNT
    assert reads_of(files.root, tmp_path / "cache", layout) == 2
    time.sleep(3.2)
    assert reads_of(files.root, tmp_path / "cache", layout) == 2
    assert reads_of(files.root, tmp_path / "cache", layout) == 0


@pytest.mark.parametrize("layout", ["views", "contiguous"])
@pytest.mark.parametrize("bytes_", [BYTES, 300 << 10], ids=["packed", "file"])
@pytest.mark.parametrize("change", [time_put_back, only_its_mode], ids=lambda c: c.__name__)
def test_a_copy_is_compared_when_only_the_change_time_differs(
    change: Change, bytes_: int, layout: str, files: Files, tmp_path: Path
) -> None:
    if bytes_ != BYTES:
        files.write("1/04.bin", 4, bytes_)
        monkey = files.write
        files.write = lambda name, version: monkey(name, version, bytes_)  # type: ignore[method-assign,assignment]

    def job() -> int:
        engine = forebay.Engine(memory="32M", cache_dir=tmp_path / "cache")
        with forebay.DataLoader(files.root, 5, engine=engine, layout=layout) as loader:
            files.check(loader)
        return engine.metrics()["forebay_source_reads_total"]

    assert job() == COUNT
    assert job() == 0
    change(files)
    assert job() == 1  # that one is compared
    assert job() == 0  # and its copy, as it was or a new one, is believed from then on


# Every place of a sample but this process's cache folder, and looks that are not an opening's.
put_back = pytest.mark.parametrize(
    "change", [time_put_back, only_its_mode], ids=lambda c: c.__name__
)


def _saved_catalog(files: Files) -> None:
    """One that an earlier process has saved: what it lists is not looked at without need."""
    forebay.Catalog.open(str(files.root))


@put_back
@pytest.mark.parametrize("io", ["threads", "io_uring"])
@pytest.mark.parametrize("looked", [True, False], ids=["looked", "only read"])
def test_memory_of_a_closed_loader_forgets_that_file(
    change: Change, looked: bool, io: str, files: Files
) -> None:
    if io == "io_uring" and (reason := _forebay.features()["io_uring"]):
        pytest.skip(reason)
    engine = forebay.Engine(memory="16M", io=io)
    if not looked:
        _saved_catalog(files)
    changed_after = 1 if looked else 0
    for step in range(4):
        with forebay.DataLoader(files.root, 5, engine=engine) as loader:
            assert loader.catalog.looked_at == (looked or step > 0)
            files.check(loader, epochs=2)
        reads = engine.metrics()["forebay_source_reads_total"]
        assert reads == COUNT + (step > changed_after)
        if step == changed_after:
            change(files)


@pytest.mark.parametrize("looked", [True, False], ids=["looked", "only read"])
def test_an_open_loader_keeps_its_memory_to_itself(looked: bool, files: Files) -> None:
    engine = forebay.Engine(memory="16M")
    if not looked:
        _saved_catalog(files)
    with forebay.DataLoader(files.root, 5, engine=engine) as first:
        files.check(first)
        with forebay.DataLoader(files.root, 5, engine=engine) as second:
            files.check(second)
        assert engine.metrics()["forebay_source_reads_total"] == COUNT
        time_put_back(files)
        with forebay.DataLoader(files.root, 5, engine=engine) as third:
            files.check(third)
            with forebay.DataLoader(files.root, 5, engine=engine) as fourth:
                files.check(fourth)
    assert engine.metrics()["forebay_source_reads_total"] == 2 * COUNT


@put_back
@pytest.mark.parametrize("cache", [False, True], ids=["memory", "cache"])
@pytest.mark.parametrize("others", ["open", "closed"])
def test_a_daemon_is_told_the_change_times(
    change: Change,
    others: str,
    cache: bool,
    files: Files,
    run_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    options = {"cache_dir": tmp_path / "cache"} if cache else {}
    with ExitStack() as open_loaders:
        watch = forebay.SharedEngine(memory="16M", linger=0, **options)
        for step in range(3):
            # As another process would: with a connection of its own.
            engine = forebay.SharedEngine(memory="16M", linger=0, **options)
            loader = forebay.DataLoader(files.root, 5, engine=engine)
            open_loaders.enter_context(loader)
            files.check(loader, epochs=2)
            if others == "closed":
                loader.close()
            if step == 0:
                change(files)
    reads = watch.metrics()["forebay_source_reads_total"]
    # Beside one that is open there is another data set; of a closed one, that file is forgotten.
    most = COUNT + 1 if others == "closed" or cache else 2 * COUNT
    assert reads <= most


@put_back
def test_the_cache_folder_of_a_later_daemon(
    change: Change,
    files: Files,
    run_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    for step in range(4):
        engine = forebay.SharedEngine(memory="16M", linger=0, cache_dir=tmp_path / "cache")
        with forebay.DataLoader(files.root, 5, engine=engine) as loader:
            files.check(loader)
        reads = engine.metrics()["forebay_source_reads_total"]
        pid = daemon_pid(engine)
        del engine, loader
        gc.collect()
        _wait_until_gone(pid)
        assert reads == {0: COUNT, 1: 0, 2: 1, 3: 0}[step]
        if step == 1:
            change(files)


def _wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < until:
        time.sleep(0.01)


@put_back
@pytest.mark.parametrize("on_change", ["warn", "raise"])
@pytest.mark.parametrize("where", ["memory", "cache", "daemon"])
def test_each_epoch_sees_change_times(
    change: Change,
    where: str,
    on_change: str,
    files: Files,
    run_folder: Path,  # noqa: F811
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine: forebay.Engine
    if where == "daemon":
        engine = forebay.SharedEngine(memory="16M", linger=0)
    else:
        cache = tmp_path / "cache" if where == "cache" else None
        engine = forebay.Engine(memory="16M", cache_dir=cache)
    with forebay.DataLoader(
        files.root, 5, engine=engine, freshness="epoch", on_change=on_change
    ) as loader:
        files.check(loader, epochs=2)
        change(files)
        files.check(loader, epochs=3)
        assert loader.epoch == 5
        assert engine.metrics()["forebay_source_reads_total"] == COUNT + 1
    assert not _warned(caplog)  # a file's mode may have changed, and nothing else


@pytest.mark.parametrize("cache", [False, True], ids=["memory", "cache"])
def test_a_catalog_that_was_loaded_is_looked_at(cache: bool, files: Files, tmp_path: Path) -> None:
    saved = tmp_path / "saved.catalog"
    forebay.Catalog.build(str(files.root)).save(str(saved))
    engine = forebay.Engine(memory="16M", cache_dir=tmp_path / "cache" if cache else None)
    for step in range(3):
        catalog = forebay.Catalog.load(str(saved))
        with forebay.DataLoader(catalog, 5, engine=engine) as loader:
            files.check(loader)
        assert engine.metrics()["forebay_source_reads_total"] == COUNT + (step == 2)
        if step == 1:
            time_put_back(files)


# ---- what no time shows


def test_verify_compares_with_the_source(
    files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same size, and the time put back: only reading tells."""
    cache = tmp_path / "cache"
    engine = forebay.Engine(memory="16M", cache_dir=cache)
    with forebay.DataLoader(files.root, 5, engine=engine) as loader:
        files.check(loader)
    del engine, loader
    path = files.root / "1/04.bin"
    before = path.stat()
    same_size(files)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert main(["cache", "verify", str(cache)]) == 0
    assert main(["cache", "verify", str(cache), "--source", "--dry-run"]) == 1
    assert "1 differ" in capsys.readouterr().out
    assert main(["cache", "verify", str(cache), "--source"]) == 1
    assert main(["cache", "verify", str(cache), "--source"]) == 0
    engine = forebay.Engine(memory="16M", cache_dir=cache)
    with forebay.DataLoader(files.root, 5, engine=engine) as loader:
        files.check(loader)
    assert engine.metrics()["forebay_source_reads_total"] == 1
