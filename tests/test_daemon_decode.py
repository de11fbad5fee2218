"""Decoded batches from the node's daemon, and the way back to a daemon after one has died."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forebay
import numpy as np
import pytest
import test_daemon
import torch
from conftest import forebay_threads
from data_sets import DataSet, check_batch
from forebay import daemon
from forebay import transforms as T
from test_daemon import _LIMIT_S, _await, _daemons, _engine, _orders, _pid
from test_decode_resume import make_pictures

TRANSFORM = [T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.ColorJitter(0.4), T.ToTensor()]
COUNT = 60
run_folder = test_daemon.run_folder


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures"), COUNT, 20, 40, corrupt=True).root


def _loader(root: Path, engine: forebay.Engine, **more) -> forebay.DataLoader:
    return forebay.DataLoader(
        root, 4, shuffle=True, seed=3, engine=engine, decode="image", transform=TRANSFORM,
        on_error="skip", **more,
    )  # fmt: skip


def _epochs(loader: forebay.DataLoader, epochs: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(images.clone(), labels) for _ in range(epochs) for images, labels in loader]


def _same(ours: list, theirs: list) -> None:
    assert len(ours) == len(theirs)
    for (images, labels), (expected, expected_labels) in zip(ours, theirs, strict=True):
        assert torch.equal(images, expected) and torch.equal(labels, expected_labels)


@pytest.fixture(scope="module")
def expected(pictures: Path) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """From an engine of this process."""
    with _loader(pictures, forebay.Engine("64M")) as loader:
        return _epochs(loader, 3)


def test_the_same_tensors_through_the_daemon(
    pictures: Path, run_folder: Path, expected: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    engine = _engine()
    used = engine.metrics()["forebay_stage_arena_used_bytes"]
    with _loader(pictures, engine, decode_threads=1) as loader:
        _same(_epochs(loader, 3), expected)
        metrics = engine.metrics()
        # Each is read once, and nothing is decoded by the daemon.
        assert metrics["forebay_source_reads_total"] == COUNT
        assert metrics.get("forebay_decode_samples_total", 0) == 0
        port = engine.native
        assert engine.client() is not None
        assert port.decoding()["forebay_decode_samples_total"] >= 3 * COUNT
        assert port.decoding()["forebay_decode_threads"] == 1
        # The memory of finished batches counts there.
        batch = 4 * 3 * 16 * 16 * 4
        assert metrics["forebay_stage_arena_used_bytes"] > used + 2 * batch
        stats = loader.stats()
        assert [s.epoch for s in stats] == [0, 1, 2]
        assert stats[0].source_reads == COUNT
    kept = engine.metrics()["forebay_stage_kept_bytes"]
    _await(
        lambda: engine.metrics()["forebay_stage_arena_used_bytes"] <= kept + (1 << 16),
        "memory that was lent",
    )


def test_ranks_share_one_for_decoding_by_default(
    pictures: Path, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    loader = forebay.DataLoader(
        pictures, 4, decode="image", transform=TRANSFORM, on_error="skip", memory="64M"
    )
    assert isinstance(loader.engine, forebay.SharedEngine)
    assert len(list(loader)) > 0
    os.kill(_pid(loader.engine), signal.SIGTERM)  # its default is to linger


def test_arrays(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "set" / "a").mkdir(parents=True)
    for i in range(10):
        np.save(tmp_path / "set" / "a" / f"{i}.npy", np.full((2, 3), i, np.int16))
    loader = forebay.DataLoader(tmp_path / "set", 4, decode="npy", engine=_engine())
    values = [batch[0].numpy() for batch in loader]
    assert [v.shape for v in values] == [(4, 2, 3), (4, 2, 3), (2, 2, 3)]
    assert np.array_equal(np.concatenate(values)[:, 0, 0], np.arange(10))


def test_a_killed_daemon_and_decoded_batches(
    pictures: Path,
    run_folder: Path,
    expected: list,
    by_hand: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = _engine()
    with _loader(pictures, engine) as loader:
        iterator = iter(loader)
        seen = [next(iterator) for _ in range(3)]
        os.kill(_pid(engine), signal.SIGKILL)
        seen += list(iterator) + _epochs(loader, 2)
        _same(seen, expected)
        assert [s.epoch for s in loader.stats()] == [0, 1, 2]
    assert len([r for r in caplog.records if "daemon" in r.message]) == 1


# ---- the way back


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon, "_RETURN_S", (0.2, 0.2, 0.2))


def test_back_to_a_new_daemon(
    folder: DataSet, run_folder: Path, soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    engine = _engine()
    loaders = [forebay.DataLoader(folder.root, 8, shuffle=True, seed=s, engine=engine)
               for s in (0, 1)]  # fmt: skip
    first = _pid(engine)
    iterator = iter(loaders[0])
    held = next(iterator)
    os.kill(first, signal.SIGKILL)
    epoch, at = 0, 1
    until = time.monotonic() + 30
    with caplog.at_level(logging.INFO, "forebay"):
        while True:
            client = engine.client()
            # What was announced before its end is right, and is taken first.
            if client is not None and client.pid != first and at == 3:
                break
            assert time.monotonic() < until
            if at == len(_orders(folder, 8, epoch)):
                assert next(iterator, None) is None
                epoch, at, iterator = epoch + 1, 0, iter(loaders[0])
            check_batch(next(iterator), _orders(folder, 8, epoch)[at], folder)
            at += 1
            time.sleep(0.002)  # stats keep 1,000 epochs
        assert _daemons(run_folder) == [_pid(engine)]
        # The engine of this process has gone, although the second loader has not moved.
        check_batch(held, _orders(folder, 8, 0)[0], folder)
        iterator = held = client = None
        _await(lambda: not forebay_threads(), "an engine that is not used any more")
        for batch, samples in zip(loaders[1], _orders(folder, 8, 0, seed=1), strict=True):
            check_batch(batch, samples, folder)
        lines = [r.levelname for r in caplog.records if "daemon" in r.message]
        assert lines == ["WARNING", "INFO"], caplog.text
        assert sum(s.samples for s in loaders[0].stats()) == epoch * len(folder) + 3 * 8


def test_decoded_batches_come_back(
    pictures: Path, run_folder: Path, expected: list, soon: None
) -> None:
    engine = _engine()
    with _loader(pictures, engine) as loader:
        iterator = iter(loader)
        seen = [next(iterator) for _ in range(3)]
        os.kill(_pid(engine), signal.SIGKILL)
        seen += list(iterator)
        _await(lambda: engine.client() is not None, "no way back")
        seen += _epochs(loader, 2)
        _same(seen, expected)
        assert engine.metrics()["forebay_source_reads_total"] == COUNT


def test_tries_to_come_back_end(
    folder: DataSet,
    run_folder: Path,
    soon: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "forebayd"
    program.symlink_to(daemon.program())
    monkeypatch.setenv("FOREBAYD", str(program))
    engine = _engine()
    program.unlink()
    os.kill(_pid(engine), signal.SIGKILL)
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=engine)
    assert sum(len(batch) for batch in loader) == len(folder)
    _await(lambda: not engine.native.returning, "tries without end")
    assert engine.metrics()["forebay_port_return_tries_total"] == 3 and engine.client() is None
    forebay._forebay.SharedEngine.clear_dead("")


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody comes back but the test."""
    monkeypatch.setattr(daemon, "_RETURN_S", (600.0,) * 3)


def _kill(engine: forebay.SharedEngine, run_folder: Path) -> None:
    os.kill(_pid(engine), signal.SIGKILL)
    _await(lambda: not _daemons(run_folder), "a daemon that was killed")
    engine.metrics()
    assert engine.client() is None


@pytest.mark.parametrize("idle", [False, True])
def test_a_daemon_that_does_not_take_the_stream(
    folder: DataSet, run_folder: Path, by_hand: None, caplog: pytest.LogCaptureFixture, idle: bool
) -> None:
    arenas = lambda: set(re.findall(r"\d+ +/memfd:forebay ", Path("/proc/self/maps").read_text()))
    others = arenas()
    engine = _engine()
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=engine)
    iterator = iter(loader)
    check_batch(next(iterator), _orders(folder, 8, 0)[0], folder)
    theirs = arenas() - others
    _kill(engine, run_folder)
    assert len(theirs) == 1 and not theirs & arenas()  # it does not keep the dead one's memory
    seen = [] if idle else [next(iterator)]
    before = engine.native.engine.identity
    caplog.clear()
    # An engine that lends itself to workers knows its own data sets only.
    other = forebay.Engine("64M")
    server = forebay._forebay.Server(other.native)
    (run_folder / "forebayd.sock").symlink_to(server.path)
    engine.native.come_back()
    for batch, samples in zip([*seen, *iterator], _orders(folder, 8, 0)[1:], strict=True):
        check_batch(batch, samples, folder)
    assert engine.client() is None and not engine.native.returning
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "takes no data sets" in caplog.text
    assert idle or engine.native.engine.identity == before
    (run_folder / "forebayd.sock").unlink()
    server.close()


def test_a_move_counts_the_batch_before_it(
    folder: DataSet, run_folder: Path, by_hand: None
) -> None:
    engine = _engine()
    _kill(engine, run_folder)
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=engine)
    seen = []

    def move() -> None:  # while the loop is between any two batches
        _await(lambda: len(seen) > 1, "no batches")
        assert engine.native.come_back()

    with ThreadPoolExecutor(1) as pool:
        moved = pool.submit(move)
        for batch, samples in zip(loader, _orders(folder, 8, 0), strict=True):
            check_batch(batch, samples, folder)
            seen.append(batch.epoch)
            if len(seen) == 4:
                moved.result(_LIMIT_S)
    for batch, samples in zip(loader, _orders(folder, 8, 1), strict=True):
        check_batch(batch, samples, folder)
    assert engine.client() is not None
    assert [s.samples for s in loader.stats()] == [len(folder)] * 2


def test_the_end_stays_where_it_was(folder: DataSet, run_folder: Path, by_hand: None) -> None:
    engine = _engine()
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, epochs=2, engine=engine)
    assert sum(len(batch) for batch in loader) == len(folder)
    _kill(engine, run_folder)
    for batch, samples in zip(loader, _orders(folder, 8, 1), strict=True):
        check_batch(batch, samples, folder)
    assert loader._feed.take(10.0, (2, 0)).item == "end of stream"


_FIRST_JOB = """
    import sys
    import forebay

    engine = forebay.SharedEngine("64M", linger=0)
    print(engine.client().pid, flush=True)
    sys.stdin.read()
"""


def test_slurm_ends_the_daemon_with_the_job_that_started_it(
    folder: DataSet, run_folder: Path, soon: None, tmp_path: Path
) -> None:
    """A session of its own does not save it: SLURM knows all processes of a job. The second job
    misses nothing, and has a daemon again that is its own child in SLURM's eyes.
    """
    first = test_daemon._start(tmp_path, _FIRST_JOB)
    try:
        assert first.stdout is not None
        pid = int(first.stdout.readline())
        engine = _engine()
        assert _pid(engine) == pid
        loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=engine)
        iterator = iter(loader)
        check_batch(next(iterator), _orders(folder, 8, 0)[0], folder)
        os.kill(pid, signal.SIGTERM)
        first.terminate()
        _await(lambda: pid not in _daemons(run_folder), "a daemon that does not end")
    finally:
        first.kill()
        first.communicate()
    for batch, samples in zip(iterator, _orders(folder, 8, 0)[1:], strict=True):
        check_batch(batch, samples, folder)
    until = time.monotonic() + 30
    for epoch in range(1, 1000):
        for batch, samples in zip(loader, _orders(folder, 8, epoch), strict=True):
            check_batch(batch, samples, folder)
        client = engine.client()
        if client is not None and client.pid != pid:
            break
        assert time.monotonic() < until
        time.sleep(0.02)
    assert _daemons(run_folder) == [_pid(engine)]
