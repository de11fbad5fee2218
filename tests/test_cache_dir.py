"""cache_dir=: copies on a local disk that later epochs and jobs read instead of the source."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import subprocess
import sys
import time
import zlib
from pathlib import Path

import forebay
import pytest
from data_sets import make_folder
from forebay import _forebay
from forebay.slowfs import SlowFs

_usable, _reason = SlowFs.available()
needs_fuse = pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}")

_JOB = """
import sys, zlib
import forebay
path, cache, size, epochs = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
engine = forebay.Engine(memory="8M", keep=False, cache_dir=cache, cache_bytes=size)
with forebay.DataLoader(path, 7, shuffle=True, seed=3, epochs=epochs, engine=engine) as loader:
    for _ in range(epochs):
        for batch in loader:
            for i, number in enumerate(batch.indices):
                print("sample", number, zlib.crc32(batch[i].tobytes()))
            batch.release()
for name, value in engine.metrics().items():
    print("metric", name, value)
"""


class Job:
    def __init__(self, text: str) -> None:
        lines = [line.split() for line in text.splitlines()]
        self.samples = {int(number): int(crc) for kind, number, crc in lines if kind == "sample"}
        self.metrics = {name: int(value) for kind, name, value in lines if kind == "metric"}
        self.reads = self.metrics["forebay_source_reads_total"]
        self.hits = self.metrics["forebay_tier_hits_total"]


def run_job(root: Path, cache: Path, size: str = "1G", epochs: int = 1) -> Job:
    """One training job in a process of its own, with memory for a few batches only."""
    done = subprocess.run(
        [sys.executable, "-c", _JOB, str(root), str(cache), size, str(epochs)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Job(done.stdout)


def truth(data) -> dict[int, int]:
    return {i: zlib.crc32(sample.data) for i, sample in enumerate(data.samples)}


def copies(cache: Path) -> set[tuple[int, int]]:
    """The name of every copy."""
    folder = _forebay.CacheFolder.open(str(cache))
    return {
        name for each in folder.datasets() for name in map(tuple, folder.samples(each["dataset"]))
    }


def test_the_next_job_reads_the_copies(large_folder, tmp_path):
    cache = tmp_path / "cache"
    first = run_job(large_folder.root, cache)
    assert first.samples == truth(large_folder)
    assert first.reads == len(large_folder)
    # The write buffer of so small a budget holds a dozen samples, the rest is skipped; other jobs
    # fill the gaps.
    for _ in range(20):
        if len(copies(cache)) == len(large_folder):
            break
        run_job(large_folder.root, cache)
    held = sum(e["bytes"] for e in _forebay.CacheFolder.open(str(cache)).datasets())
    second = run_job(large_folder.root, cache)
    assert second.samples == truth(large_folder)
    # On a machine that has no time for the folder's threads, a few go to the source instead.
    assert second.reads + second.hits == len(large_folder)
    assert second.hits >= len(large_folder) * 3 // 4
    assert second.metrics["forebay_tier_used_bytes"] >= held


def test_a_cache_that_is_too_small_keeps_what_it_has(large_folder, tmp_path):
    cache = tmp_path / "cache"
    run_job(large_folder.root, cache, "4M", 3)
    held = copies(cache)
    assert 0 < len(held) < len(large_folder)
    assert sum(path.stat().st_size for path in cache.rglob("*.seg")) <= 4 << 20
    job = run_job(large_folder.root, cache, "4M")
    assert job.samples == truth(large_folder)
    assert job.hits >= len(held)
    assert job.reads + job.hits == len(large_folder)
    assert held <= copies(cache)


def test_a_file_that_is_added_or_replaced_is_one_new_copy(tmp_path):
    data = make_folder(tmp_path / "data", files=60)
    cache = tmp_path / "cache"
    assert run_job(data.root, cache).reads == len(data)
    before = copies(cache)
    assert len(before) == len(data)
    # First in the order: every other sample has another number from now on.
    first = min(data.root.iterdir()) / "000"
    first.write_bytes(b"new")
    job = run_job(data.root, cache)
    assert job.reads == 1
    assert job.samples[0] == zlib.crc32(b"new")
    assert [job.samples[i + 1] for i in range(len(data))] == list(truth(data).values())
    # Replaced by one of its size: its time tells.
    other = data.root / "other"
    other.write_bytes(b"two")
    os.utime(other, ns=(1, first.stat().st_mtime_ns + 1))
    os.replace(other, first)
    job = run_job(data.root, cache)
    assert (job.reads, job.samples[0]) == (1, zlib.crc32(b"two"))
    assert before < copies(cache)
    assert len(copies(cache)) == len(data) + 2


def test_data_sets_with_the_same_files_share_copies(tmp_path):
    data = make_folder(tmp_path / "data", files=60)
    cache = tmp_path / "cache"
    run_job(data.root, cache)
    (tmp_path / "link").symlink_to(data.root)
    again = run_job(tmp_path / "link", cache)
    assert (again.reads, again.samples) == (0, truth(data))
    # A folder of it alone: other labels and numbers, the same files.
    one = next(data.root.rglob("er"))
    part = run_job(one, cache)
    assert part.reads == 0
    assert sorted(part.samples.values()) == sorted(
        zlib.crc32(path.read_bytes()) for path in one.rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("kind", ["webdataset", "tfrecord"])
def test_shards(kind, request, tmp_path):
    data = request.getfixturevalue(kind)
    first = run_job(data.root, tmp_path)
    again = run_job(data.root, tmp_path)
    assert first.samples == again.samples == truth(data)
    assert again.reads == 0


def test_corrupt_copies_are_fetched_again(folder, tmp_path):
    run_job(folder.root, tmp_path)
    (segment,) = tmp_path.rglob("*.seg")
    content = bytearray(segment.read_bytes())
    for place in range(100, len(content) // 2, 20_000):
        content[place] ^= 16
    del content[-5000:]
    segment.write_bytes(content)
    cache = _forebay.CacheFolder.open(str(tmp_path))
    (dataset,) = (each["dataset"] for each in cache.datasets())
    damaged, _ = cache.check(cache.samples(dataset))
    assert 2 <= len(damaged) < len(folder)
    del cache
    job = run_job(folder.root, tmp_path)
    assert job.samples == truth(folder)
    assert job.reads == len(damaged)
    repaired = run_job(folder.root, tmp_path)
    assert repaired.samples == truth(folder)
    assert repaired.reads == 0


def test_a_folder_removed_in_the_middle_fails_nothing(large_folder, tmp_path):
    cache = tmp_path / "cache"
    # More data than memory: later epochs have to read again.
    engine = forebay.Engine(memory="8M", keep=False, cache_dir=cache, cache_bytes="100M")
    assert engine.cache_status == ""
    with forebay.DataLoader(large_folder.root, 4, shuffle=True, engine=engine) as loader:
        for epoch in range(4):
            seen = {}
            for index, batch in enumerate(loader):
                seen |= {int(n): zlib.crc32(batch[i]) for i, n in enumerate(batch.indices)}
                batch.release()
                while epoch == 1 and index == 5 and cache.exists():
                    shutil.rmtree(cache, ignore_errors=True)  # while the engine writes
            assert seen == truth(large_folder)
    assert engine.metrics()["forebay_source_errors_total"] == 0
    assert str(cache) in engine.cache_status


def test_a_changed_data_set_is_not_mistaken_for_its_copies(tmp_path):
    root, cache = tmp_path / "data", tmp_path / "cache"
    for content in (b"old bytes", b"new bytes"):
        shutil.rmtree(root, ignore_errors=True)
        (root / "a").mkdir(parents=True)
        for i in range(10):
            (root / "a" / f"{i}.bin").write_bytes(content + b"%d" % i)
        job = run_job(root, cache)
        assert job.samples == {i: zlib.crc32(content + b"%d" % i) for i in range(10)}
        assert job.reads == 10


def test_a_second_engine_only_reads(folder, tmp_path):
    run_job(folder.root, tmp_path)
    writer = forebay.Engine(memory="8M", cache_dir=tmp_path)
    reader = forebay.Engine(memory="8M", keep=False, cache_dir=tmp_path)
    assert writer.cache_status == ""
    assert "another process writes" in reader.cache_status
    with forebay.DataLoader(folder.root, 4, engine=reader, epochs=1) as loader:
        for batch in loader:
            batch.release()
    assert reader.metrics()["forebay_source_reads_total"] == 0


def test_options(folder, tmp_path):
    with pytest.raises(forebay.ArgumentError, match="cache_dir"):
        forebay.Engine(memory="8M", cache_bytes="1G")
    with pytest.raises(forebay.ArgumentError, match="cache_bytes"):
        forebay.Engine(memory="8M", cache_dir=tmp_path, cache_bytes="many")
    (tmp_path / "file").touch()
    with pytest.raises(forebay.ForebayError, match="file"):
        forebay.Engine(memory="8M", cache_dir=tmp_path / "file")
    with forebay.DataLoader(
        folder.root, 4, memory="8M", cache_dir=tmp_path / "c", cache_bytes="1M"
    ) as loader:
        assert len(next(iter(loader))) == 4
        assert (tmp_path / "c" / "forebay.lock").exists()
        with pytest.raises(forebay.ArgumentError, match="cache_dir"):
            forebay.DataLoader(folder.root, 4, cache_dir=tmp_path / "d")
        with pytest.raises(forebay.ArgumentError, match="cache_dir"):
            forebay.DataLoader(folder.root, 4, engine=loader.engine, cache_dir=tmp_path / "c")


def test_an_older_format_is_cleared_and_said_once(folder, tmp_path, caplog):
    old = tmp_path / "0123456789abcdef" / "00000000" / "00000001.fb"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    (tmp_path / "forebay.lock").touch(mode=0o600)
    with forebay.DataLoader(folder.root, 4, memory="8M", cache_dir=tmp_path, epochs=1) as loader:
        assert sum(len(batch) for batch in loader) == len(folder)
    assert not old.exists()
    (line,) = [record.message for record in caplog.records if record.name == "forebay"]
    assert str(tmp_path) in line
    assert "cleared" in line


def test_a_first_epoch_copies_everything(large_folder, tmp_path):
    # The write buffer of so small a budget holds a dozen samples: the others wait for it.
    engine = forebay.Engine(memory="8M", keep=False, cache_dir=tmp_path / "cache")
    with forebay.DataLoader(large_folder.root, 8, engine=engine, epochs=1) as loader:
        for batch in loader:
            batch.release()
        end = time.monotonic() + 60
        while engine.metrics()["forebay_tier_copies_under_way"] and time.monotonic() < end:
            time.sleep(0.01)
    metrics = engine.metrics()
    assert metrics["forebay_tier_writes_total"] == len(large_folder)
    assert metrics["forebay_tier_skipped_writes_total"] == 0
    assert metrics["forebay_source_reads_total"] == len(large_folder)


_STRANGER = 65534


def _modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode)
        for path in [folder, *folder.rglob("*")]
    }


def _cache_command(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay.cli", "cache", *map(str, words)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["foreign", "group", "all", "link"])
def test_a_folder_that_others_can_write_to_is_an_error(kind, folder, tmp_path):
    cache = tmp_path / "cache"
    run_job(folder.root, cache)
    remedy = "chmod go-w"
    if kind == "foreign":
        if os.geteuid() != 0:
            pytest.skip("NOT TESTED: only root can make a folder of another user")
        os.chown(cache, _STRANGER, _STRANGER)
        remedy = f"user {_STRANGER}.*this process is user 0.*chown"
    elif kind == "link":
        if os.geteuid() != 0:
            pytest.skip("NOT TESTED: only root can make a link of another user")
        cache.rename(tmp_path / "elsewhere")
        cache.symlink_to(tmp_path / "elsewhere")
        os.lchown(cache, _STRANGER, _STRANGER)
        remedy = "another user's symbolic link.*name the folder it leads to"
    else:
        cache.chmod(0o770 if kind == "group" else 0o777)
        remedy = f"mode 07{'70' if kind == 'group' else '77'}.*chmod go-w"
    with pytest.raises(forebay.AccessError, match=f"{cache}.*{remedy}") as error:
        forebay.DataLoader(folder.root, 4, memory="8M", cache_dir=cache)
    assert isinstance(error.value, PermissionError)
    for words in [("ls", cache), ("warm", cache, folder.root), ("verify", cache)]:
        done = _cache_command(*words)
        assert done.returncode != 0 and str(cache) in done.stdout + done.stderr, words
    # Its remedy helps.
    if kind == "foreign":
        os.chown(cache, 0, 0)
    elif kind == "link":
        os.lchown(cache, 0, 0)  # one's own is followed
    else:
        cache.chmod(0o755)
    job = run_job(folder.root, cache)
    assert job.samples == truth(folder) and job.hits > 0
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("how", ["job", "warm"])
def test_copies_of_private_files_are_private(how, tmp_path):
    root = tmp_path / "data"
    (root / "a").mkdir(parents=True)
    for i in range(4):
        (root / "a" / f"{i}.bin").write_bytes(bytes([i]) * (300_000 if i == 0 else 1000))
        (root / "a" / f"{i}.bin").chmod(0o600)
    root.chmod(0o700)
    cache = tmp_path / "cache"
    before = os.umask(0)
    try:
        if how == "job":
            run_job(root, cache)
        else:
            done = _cache_command("warm", cache, root)
            assert done.returncode == 0, done.stderr
    finally:
        os.umask(before)
    modes = _modes(cache)
    assert any(name.endswith(".bin") for name in modes) and "index.log" in modes
    wide = {name: oct(mode) for name, mode in modes.items() if mode & 0o077}
    assert wide == {}


def test_the_lock_is_no_way_to_another_file(folder, tmp_path):
    cache, precious = tmp_path / "cache", tmp_path / "precious"
    cache.mkdir(0o700)
    precious.write_text("do not lose this")
    (cache / "forebay.lock").symlink_to(precious)
    engine = forebay.Engine(memory="8M", cache_dir=cache)
    assert "forebay.lock is not a regular file of this user" in engine.cache_status
    with forebay.DataLoader(folder.root, 4, engine=engine, epochs=1) as loader:
        assert sum(len(batch) for batch in loader) == len(folder)
    assert precious.read_text() == "do not lose this"


@pytest.mark.parametrize("kind", ["fifo", "link", "foreign"])
def test_what_lies_in_the_place_of_a_copy_is_not_read(kind, folder, tmp_path):
    cache = tmp_path / "cache"
    run_job(folder.root, cache)
    for copy in [*cache.rglob("*.seg"), *cache.rglob("*.bin")]:
        if kind == "foreign":
            if os.geteuid() != 0:
                pytest.skip("NOT TESTED: only root can make files of another user")
            os.chown(copy, _STRANGER, _STRANGER)
            continue
        aside = tmp_path / copy.name
        copy.rename(aside)
        if kind == "fifo":
            os.mkfifo(copy, 0o600)
        else:
            copy.symlink_to(aside)
    job = run_job(folder.root, cache)
    assert job.samples == truth(folder)
    assert job.hits == 0 and job.reads == len(folder)


@needs_fuse
def test_a_disk_that_hangs_stops_nobody(large_folder, tmp_path, caplog):
    (tmp_path / "disk").mkdir()
    (tmp_path / "mount").mkdir()
    n = len(large_folder)
    with SlowFs(tmp_path / "disk", tmp_path / "mount", writable_mb=0) as slow:
        cache = slow.path / "cache"
        engine = forebay.Engine(memory="8M", keep=False, cache_dir=cache)
        # Its log has a header and the limit: the folder is open.
        end = time.monotonic() + 60
        log = tmp_path / "disk" / "cache" / "index.log"
        while time.monotonic() < end and not (log.exists() and log.stat().st_size >= 64):
            time.sleep(0.01)
        slow.set(stall_ms="forever")
        with forebay.DataLoader(large_folder.root, 8, engine=engine, epochs=3) as loader:
            with caplog.at_level(logging.WARNING, logger="forebay"):
                assert sum(len(batch) for batch in loader) == n
            said = [r.getMessage() for r in caplog.records]
            said = [line for line in said if "has written nothing" in line]
            assert len(said) == 1
            assert str(cache) in said[0]
            assert str(cache) in engine.cache_status
            assert engine.metrics()["forebay_tier_skipped_writes_total"] > 0
            slow.set(stall_ms=0)
            # It writes again: what was given up is copied by later epochs.
            end = time.monotonic() + 60
            while engine.cache_status and time.monotonic() < end:
                time.sleep(0.01)
            for _ in range(2):
                assert sum(len(batch) for batch in loader) == n
            while engine.metrics()["forebay_tier_copies_under_way"] and time.monotonic() < end:
                time.sleep(0.01)
            assert engine.metrics()["forebay_tier_writes_total"] == n
        del loader, engine


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("shared", [False, True], ids=["engine", "daemon"])
def test_a_folder_that_stops_taking_copies_is_told(
    shared, later, large_folder, tmp_path, caplog, monkeypatch
):
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    if not later:
        (cache / "forebay.lock").touch(mode=0o600)
        (cache / "writing").write_text("in the way of what is being written")
    if shared:
        runtime = tmp_path / "r"
        runtime.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    make = forebay.SharedEngine if shared else forebay.Engine
    engine = make(memory="8M", keep=False, cache_dir=cache)
    if later:
        end = time.monotonic() + 60
        while not (cache / "index.log").exists() and time.monotonic() < end:
            time.sleep(0.01)
        (cache / "writing").rmdir()
        (cache / "writing").write_text("in the way of what is being written")
    with forebay.DataLoader(large_folder.root, 8, engine=engine, epochs=3) as loader:
        with caplog.at_level(logging.WARNING, logger="forebay"):
            for _ in range(3):
                assert sum(len(batch) for batch in loader) == len(large_folder)
        said = [r.getMessage() for r in caplog.records if str(cache) in r.getMessage()]
        assert len(said) == 1, said
        told = f"the cache folder {cache} takes no {'more ' * later}copies"
        assert told in said[0] and "name another folder" in said[0]
        assert f"cache: {told}" in loader.report()
    if shared:
        log = next(runtime.rglob("forebayd.log"))
        assert log.read_text().count("WARNING: the cache folder") == 1
        del loader, engine


def test_a_second_reader_of_a_folder_is_no_problem(folder, tmp_path, caplog):
    writer = forebay.Engine(memory="64M", cache_dir=tmp_path / "cache")
    reader = forebay.Engine(memory="64M", cache_dir=tmp_path / "cache")
    with forebay.DataLoader(folder.root, 8, engine=reader) as loader:
        with caplog.at_level(logging.WARNING, logger="forebay"):
            assert sum(len(batch) for batch in loader) == len(folder)
        assert "cache:" not in loader.report()
    assert "another process writes" in reader.cache_status
    assert caplog.records == []
    del writer


def test_a_users_own_index_log_is_left_alone(folder, tmp_path):
    mine = tmp_path / "index.log"
    mine.write_text("my own notes")
    for _ in range(2):
        with pytest.raises(forebay.ArgumentError, match=r"index\.log"):
            forebay.DataLoader(folder.root, 4, memory="8M", cache_dir=tmp_path)
    assert mine.read_text() == "my own notes"
    assert os.listdir(tmp_path) == ["index.log"]


@pytest.mark.parametrize("shared", [False, True], ids=["embedded", "daemon"])
def test_a_folder_that_a_group_shares_on_purpose(shared, folder, tmp_path, caplog, monkeypatch):
    cache = tmp_path / "cache"
    group = 54321 if os.geteuid() == 0 else os.getgid()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def engine(**more):
        made = forebay.SharedEngine if shared else forebay.Engine
        extra = {"linger": 0, "folder": tmp_path / "daemon"} if shared else {}
        return made(memory="64M", cache_dir=cache, **extra, **more)

    before = os.umask(0o077)
    try:
        with caplog.at_level(logging.INFO, logger="forebay"):
            first = engine(cache_group=group)
        with forebay.DataLoader(folder.root, 4, engine=first, epochs=1) as loader:
            assert sum(len(batch) for batch in loader) == len(folder)
        del first, loader
    finally:
        os.umask(before)
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    assert any(str(cache) in line and f"group {group}" in line for line in said), said
    deadline = time.monotonic() + 60
    while _forebay.CacheFolder.open(str(cache), False, str(group)).writer:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for path in [cache, *cache.rglob("*")]:
        found = path.stat()
        assert found.st_gid == group, path
        assert stat.S_IMODE(found.st_mode) == (0o2770 if path.is_dir() else 0o660), path
    # Who does not say so trusts nobody.
    with pytest.raises(forebay.AccessError, match=f"others may write.*{cache}.*cache_group"):
        forebay.Engine(memory="8M", cache_dir=cache)
    with pytest.raises(forebay.ArgumentError, match="cache_group needs a cache_dir"):
        forebay.DataLoader(folder.root, 4, memory="8M", cache_group=group)
    with pytest.raises(forebay.ArgumentError, match="no-such-group.*does not know"):
        forebay.Engine(memory="8M", cache_dir=cache, cache_group="no-such-group")
    for words in [("ls", cache), ("verify", cache), ("clear", cache, "--yes")]:
        assert _cache_command(*words).returncode != 0, words
        done = _cache_command(*words, "--cache-group", group)
        assert done.returncode == 0, done.stderr
    done = _cache_command("warm", cache, folder.root, "--cache-group", group)
    assert done.returncode == 0, done.stderr
