"""A place that hangs is left: a cache disk or a peer that does not answer, beside a good source."""

from __future__ import annotations

import json
import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forebay
import pytest
from forebay.slowfs import SlowFs
from forebay_bench.data import make_files
from forebay_bench.peers_cluster import Oracle, Ranks
from forebay_bench.peers_node import Spec
from forebay_testing import Cluster

_usable, _reason = SlowFs.available()
needs_fuse = pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}")


def wait_until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def checked(batch, data) -> int:
    """Samples of a batch, whose bytes are the source's."""
    for i, number in enumerate(batch.indices):
        assert batch[i].tobytes() == data.samples[number].data
    n = len(batch)
    batch.release()
    return n


def fill(cache: Path, data) -> None:
    """An earlier job has copied every sample."""
    engine = forebay.Engine(memory="64M", keep=False, cache_dir=cache)
    with forebay.DataLoader(data.root, 8, engine=engine) as loader:
        assert sum(len(batch) for batch in loader) == len(data)
        wait_until(
            lambda: engine.metrics()["forebay_tier_writes_total"] == len(data), "not all is copied"
        )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowFs]:
    (tmp_path / "disk").mkdir()
    (tmp_path / "mount").mkdir()
    with SlowFs(tmp_path / "disk", tmp_path / "mount", writable_mb=0) as slow:
        yield slow
        slow.set(stall_ms=0)  # nothing is left hanging when it ends


@needs_fuse
@pytest.mark.parametrize("shared", [False, True], ids=["engine", "daemon"])
def test_a_disk_that_hangs_in_the_middle_of_an_epoch_is_left(
    shared, large_folder, disk, tmp_path, caplog, monkeypatch
):
    n = len(large_folder)
    cache = disk.path / "cache"
    if shared:
        runtime = tmp_path / "r"
        runtime.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    fill(cache, large_folder)
    make = forebay.SharedEngine if shared else forebay.Engine
    engine = make(memory="8M", keep=False, cache_dir=cache)
    metrics = engine.metrics
    with forebay.DataLoader(
        large_folder.root, 8, engine=engine, shuffle=True, epochs=40, timeout=60
    ) as loader:
        with caplog.at_level(logging.WARNING, logger="forebay"):
            seen = 0
            for i, batch in enumerate(loader):
                if i == 5:
                    disk.set(stall_ms="forever")
                seen += checked(batch, large_folder)
            assert seen == n
            wait_until(lambda: metrics()["forebay_tier_passed_by"] == 1, "the folder is not left")
            assert sum(checked(batch, large_folder) for batch in loader) == n
        said = [r.getMessage() for r in caplog.records if "cache folder" in r.getMessage()]
        assert len(said) == 1, said
        assert f"the cache folder {cache} has not answered for" in said[0]
        assert "from the source" in said[0]
        assert str(cache) in engine.cache_status
        assert f"the cache folder {cache} has not answered" in loader.report()

        disk.set(stall_ms=0)
        wait_until(lambda: metrics()["forebay_tier_passed_by"] == 0, "the folder is not used again")
        assert engine.cache_status == ""
        before = metrics()
        for _ in range(2):
            assert sum(checked(batch, large_folder) for batch in loader) == n
        after = metrics()
        assert after["forebay_tier_hits_total"] - before["forebay_tier_hits_total"] > n
        assert after["forebay_tier_misses_total"] == 0, "nothing was taken for damaged"
    if shared:
        log = next(runtime.rglob("forebayd.log"))
        assert log.read_text().count("WARNING: the cache folder") == 1
    del loader, engine


@needs_fuse
@pytest.mark.parametrize("shared", [False, True], ids=["engine", "daemon"])
def test_a_loader_over_a_disk_that_hangs_begins_without_copies(
    shared, large_folder, disk, tmp_path, caplog, monkeypatch
):
    if shared:
        runtime = tmp_path / "r"
        runtime.mkdir(mode=0o700)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    cache = disk.path / "cache"
    disk.set(stall_ms="forever")
    make = forebay.SharedEngine if shared else forebay.Engine
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="forebay"):
        engine = make(memory="8M", keep=False, cache_dir=cache)
        with forebay.DataLoader(large_folder.root, 8, engine=engine, timeout=60) as loader:
            assert time.monotonic() - began < 15, "more than the engine's patience"
            for _ in range(2):
                assert sum(checked(batch, large_folder) for batch in loader) == len(large_folder)
            assert "nothing is copied" in loader.report()
    said = [r.getMessage() for r in caplog.records if "cache folder" in r.getMessage()]
    assert len(said) == 1, said
    assert f"the cache folder {cache} has not answered for" in said[0]
    assert "repair its disk" in said[0]
    assert str(cache) in engine.cache_status
    disk.set(stall_ms=0)
    if shared:
        log = next(runtime.rglob("forebayd.log"))
        assert log.read_text().count("WARNING: the cache folder") == 1
    del loader, engine


@needs_fuse
@pytest.mark.skipif(not Cluster.available()[0], reason=f"no test bed: {Cluster.available()[1]}")
def test_a_peer_that_stops_answering_is_left(tmp_path):
    """SIGSTOP: nothing of it comes, and no connection is lost."""
    root = tmp_path / "files"
    make_files(str(root), 400, 20_000, 3)
    oracle = Oracle(str(root), 3)
    logs = [tmp_path / f"batches{rank}" for rank in range(2)]
    tier = oracle.bytes // 2
    specs = {
        rank: Spec(
            root=str(root), batch=8, rank=rank, world=2, seed=3, step_ms=5, log=str(log),
            memory=tier + (12 << 20), memory_tier=tier,
        )
        for rank, log in enumerate(logs)
    }  # fmt: skip
    variables = {"FOREBAY_PEER_SECRET": str(tmp_path / "s"), "FOREBAY_CACHE_DIR": str(tmp_path)}

    def batches() -> list[list]:
        lines = logs[0].read_text().splitlines() if logs[0].exists() else []
        return [json.loads(line) for line in lines if line.endswith("]")]

    with Cluster(2) as cluster:
        everybody = {rank: variables for rank in specs}
        with Ranks(cluster, specs, logs=str(tmp_path), variables=everybody) as ranks:

            def stats() -> dict:
                ranks.ask(0, stats=1)
                return ranks.answer(0)

            for rank in specs:
                ranks.ask(rank, run=1)
            wait_until(lambda: len(batches()) > 30, "training does not start")
            wait_until(
                lambda: stats()["metrics"]["forebay_peer_reads_total"] > 20, "peers are not used"
            )
            ranks.signal(1, signal.SIGSTOP)
            try:
                before = len(batches())
                wait_until(lambda: len(batches()) > before + 100, "training waits for the peer")
                wait_until(lambda: "node 1 at" in stats()["cluster"]["health"], "it is not named")
            finally:
                ranks.signal(1, signal.SIGCONT)
            wait_until(lambda: not stats()["cluster"]["health"], "it is not used again")
    for epoch, number, _, _, crc, samples in batches():
        assert samples == oracle.batches(epoch, 0, 2, 8)[number]
        assert crc == oracle.checksum(samples)
