"""cache_dir=: copies on a local disk that later epochs and jobs read instead of the source."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import forebay
import pytest

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


def copies(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.fb"))


def test_the_next_job_reads_the_copies(large_folder, tmp_path):
    cache = tmp_path / "cache"
    first = run_job(large_folder.root, cache)
    assert first.samples == truth(large_folder)
    assert first.reads == len(large_folder)
    # A busy folder may skip some; another job fills the gaps.
    for _ in range(5):
        if len(copies(cache)) == len(large_folder):
            break
        run_job(large_folder.root, cache)
    second = run_job(large_folder.root, cache)
    assert second.samples == truth(large_folder)
    # On a machine that has no time for the folder's threads, a few go to the source instead.
    assert second.reads + second.hits == len(large_folder)
    assert second.hits >= len(large_folder) * 3 // 4
    assert second.metrics["forebay_tier_used_bytes"] >= large_folder.total_bytes


def test_a_cache_that_is_too_small_keeps_what_it_has(large_folder, tmp_path):
    cache = tmp_path / "cache"
    run_job(large_folder.root, cache, "4M", 3)
    held = copies(cache)
    assert 0 < len(held) < len(large_folder)
    assert sum(path.stat().st_size for path in held) <= 4 << 20
    job = run_job(large_folder.root, cache, "4M")
    assert job.samples == truth(large_folder)
    assert job.hits >= len(held)
    assert job.reads + job.hits == len(large_folder)
    assert set(held) <= set(copies(cache))


@pytest.mark.parametrize("kind", ["webdataset", "tfrecord"])
def test_shards(kind, request, tmp_path):
    data = request.getfixturevalue(kind)
    first = run_job(data.root, tmp_path)
    again = run_job(data.root, tmp_path)
    assert first.samples == again.samples == truth(data)
    assert again.reads == 0


def test_corrupt_copies_are_fetched_again(folder, tmp_path):
    run_job(folder.root, tmp_path)
    damaged = copies(tmp_path)[::3]
    for i, path in enumerate(damaged):
        content = bytearray(path.read_bytes())
        if i % 2:
            content[-1] ^= 16
        else:
            del content[len(content) // 2 :]
        path.write_bytes(content)
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
