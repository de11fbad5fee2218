"""The first epoch over shards: listing and reading together read each byte once."""

from __future__ import annotations

from pathlib import Path

import forebay
import pytest
from data_sets import DataSet, batches_of, check_batch, make_tfrecord, make_webdataset, torch_order
from forebay.slowfs import SlowFs

_usable, _reason = SlowFs.available()
needs_fuse = pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No saved catalog."""
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "catalogs"))


def _shards(kind: str, root: Path) -> DataSet:
    if kind == "tar":
        return make_webdataset(root, shards=6, per_shard=60)
    return make_tfrecord(root, shards=6, per_shard=60)


def _check_epoch(loader: forebay.DataLoader, data: DataSet, epoch: int) -> None:
    order = torch_order(
        len(data), shuffle=True, seed=3, epoch=epoch, rank=0, world=1, drop_last=False
    )
    for batch, expected in zip(loader, batches_of(order, 16), strict=True):
        check_batch(batch, expected, data)


@needs_fuse
@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
@pytest.mark.parametrize("read_ms", [0, 3])
def test_listing_and_first_epoch_read_each_byte_once(
    kind: str, read_ms: int, tmp_path: Path, fresh: None
) -> None:
    data = _shards(kind, tmp_path / "train")
    total = sum(p.stat().st_size for p in data.root.iterdir())
    with SlowFs(data.root, read_ms=read_ms, open_ms=read_ms) as slow:
        seen = DataSet(slow.path, data.samples)
        with forebay.DataLoader(
            str(slow.path), 16, shuffle=True, seed=3, engine=forebay.Engine(memory="64M")
        ) as loader:
            loader.engine.set_knob("hedge_one_in", 0)  # reads are counted
            for epoch in range(2):
                _check_epoch(loader, seen, epoch)
        # Samples are a few KiB here, so headers are a larger part than in real shards.
        assert slow.stats()["bytes_read"] <= 1.25 * total


@needs_fuse
@pytest.mark.parametrize("kind", ["tar", "tfrecord"])
def test_a_budget_for_a_part_gives_the_same_samples(kind: str, tmp_path: Path, fresh: None) -> None:
    data = _shards(kind, tmp_path / "train")
    with forebay.DataLoader(
        str(data.root), 16, shuffle=True, seed=3, engine=forebay.Engine(memory="8M")
    ) as loader:
        for epoch in range(2):
            _check_epoch(loader, data, epoch)


def test_a_second_loader_over_the_same_shards_leaves_no_memory_behind(
    tmp_path: Path, fresh: None
) -> None:
    data = _shards("tar", tmp_path / "train")
    engine = forebay.Engine(memory="64M")
    first = forebay.DataLoader(str(data.root), 16, shuffle=True, seed=3, engine=engine)
    _check_epoch(first, data, 0)
    used = engine.metrics()["forebay_stage_arena_used_bytes"]
    (tmp_path / "catalogs").rename(tmp_path / "gone")  # so that the second scans again
    second = forebay.DataLoader(str(data.root), 16, shuffle=True, seed=3, engine=engine)
    _check_epoch(second, data, 0)
    second.close()
    assert engine.metrics()["forebay_stage_arena_used_bytes"] <= used


def test_a_damaged_record_is_told_of_though_the_scan_has_read_it(
    tmp_path: Path, fresh: None
) -> None:
    data = make_tfrecord(tmp_path / "train")
    shard = next(iter(sorted(data.root.iterdir())))
    damaged = bytearray(shard.read_bytes())
    sample = max(data.samples[:21], key=lambda s: len(s.data))
    offset = int(sample.name.split("@")[1])
    damaged[offset + 50] ^= 1
    shard.write_bytes(damaged)
    with (
        forebay.DataLoader(str(data.root), 16, engine=forebay.Engine(memory="64M")) as loader,
        pytest.raises(forebay.CorruptError, match=shard.name),
    ):
        for _ in loader:
            pass


@pytest.mark.parametrize("right", [True, False])
def test_an_index_beside_the_shards_changes_no_sample(
    right: bool, tmp_path: Path, fresh: None
) -> None:
    data = _shards("tfrecord", tmp_path / "train")
    for shard in list(data.root.iterdir()):
        lines, at, size = [], 0, shard.stat().st_size
        content = shard.read_bytes()
        while at < size:
            bytes_ = 16 + int.from_bytes(content[at : at + 8], "little")
            lines.append(f"{at if right else at * 2 + 3} {bytes_}\n")
            at += bytes_
        shard.with_name(shard.name + ".idx").write_text("".join(lines))
    with forebay.DataLoader(
        str(data.root), 16, shuffle=True, seed=3, engine=forebay.Engine(memory="64M")
    ) as loader:
        _check_epoch(loader, data, 0)
