"""forebay.DataLoader: what it hands out, what it refuses, what it reports."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import forebay
import numpy as np
import pytest
from data_sets import DataSet, batches_of, check_batch, torch_order, write_tfrecord
from forebay import _forebay

_ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def copy(folder: DataSet, tmp_path: Path) -> DataSet:
    """The folder data set, to be damaged."""
    root = Path(shutil.copytree(folder.root, tmp_path / "copy"))
    return DataSet(root, folder.samples)


def _order(data: DataSet, epoch: int, seed: int = 0, shuffle: bool = True) -> list[int]:
    return torch_order(
        len(data), shuffle=shuffle, seed=seed, epoch=epoch, rank=0, world=1, drop_last=False
    )


# ---- iteration


@pytest.mark.parametrize("name", ["folder", "webdataset", "tfrecord"])
@pytest.mark.parametrize("layout", ["views", "contiguous"])
def test_every_format_and_layout(
    name: str, layout: str, request: pytest.FixtureRequest, engine: forebay.Engine
) -> None:
    data: DataSet = request.getfixturevalue(name)
    loader = forebay.DataLoader(data.root, 7, shuffle=True, seed=4, layout=layout, engine=engine)
    for epoch in range(3):
        expected = list(batches_of(_order(data, epoch, seed=4), 7))
        for index, (batch, samples) in enumerate(zip(loader, expected, strict=True)):
            check_batch(batch, samples, data)
            assert (batch.epoch, batch.index, len(batch)) == (epoch, index, len(samples))
            lengths = [len(data.samples[s].data) for s in samples]
            assert batch.lengths.tolist() == lengths
            assert batch.offsets.tolist() == np.cumsum([0, *lengths]).tolist()
            assert batch.nbytes == sum(lengths)
            whole = b"".join(data.samples[s].data for s in samples)
            assert batch.data.tobytes() == whole
            assert batch.checksum() == forebay.crc32c(np.frombuffer(whole, np.uint8))
            if layout == "contiguous":
                assert batch.contiguous
                for i in range(len(batch)):  # the samples are views of the one piece
                    if lengths[i]:
                        assert np.shares_memory(batch.data, batch[i])


def test_len_set_epoch_and_epochs_that_advance(folder: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(folder.root, 10, shuffle=True, engine=engine)
    assert len(loader) == 7
    assert len(iter(loader)) == 7
    seen = []
    for epoch in (0, 1, 2):
        assert loader.epoch == epoch
        seen.append([i for batch in loader for i in batch.indices.tolist()])
    assert seen == [_order(folder, e) for e in (0, 1, 2)]
    loader.set_epoch(1)
    assert [i for batch in loader for i in batch.indices.tolist()] == seen[1]
    assert loader.epoch == 2
    loader.set_epoch(10**6)
    assert [i for batch in loader for i in batch.indices.tolist()] == _order(folder, 10**6)
    dropping = forebay.DataLoader(folder.root, 10, drop_last=True, engine=engine)
    assert len(dropping) == len(list(dropping)) == 6
    with pytest.raises(forebay.ArgumentError, match="epoch is -1"):
        loader.set_epoch(-1)


def test_an_early_break_starts_the_epoch_over(folder: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=engine)
    for _ in range(3):
        for step, batch in enumerate(loader):
            if step == 2:
                assert batch.indices.tolist() == _order(folder, 0)[16:24]
                break
    assert loader.epoch == 0


def test_a_newer_iterator_ends_the_older(folder: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(folder.root, 8, engine=engine)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(forebay.CancelledError, match="newer iter"):
        next(first)
    assert next(second).indices.tolist() == list(range(8))
    loader.close()
    with pytest.raises(forebay.CancelledError, match="close"):
        next(second)


def test_a_finished_iterator_stays_finished(folder: DataSet, engine: forebay.Engine) -> None:
    iterator = iter(forebay.DataLoader(folder.root, 61, engine=engine))
    assert len(list(iterator)) == 1
    assert next(iterator, None) is None
    assert next(iterator, None) is None


def test_a_known_number_of_epochs(folder: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, epochs=2, engine=engine)
    assert [sum(len(b) for b in loader) for _ in range(2)] == [61, 61]
    with pytest.raises(forebay.ArgumentError, match="epoch 2 is beyond epochs=2"):
        iter(loader)
    late = forebay.DataLoader(folder.root, 8, shuffle=True, epochs=2, engine=engine)
    late.set_epoch(1)
    assert sum(len(b) for b in late) == 61


def test_collate_fn_gets_the_batch(folder: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(
        folder.root, 8, collate_fn=lambda batch: (batch.labels.sum(), len(batch)), engine=engine
    )
    assert list(loader) == [
        (sum(folder.samples[s].label for s in samples), len(samples))
        for samples in batches_of(list(range(61)), 8)
    ]


def test_fields_of_webdataset_samples(webdataset: DataSet, engine: forebay.Engine) -> None:
    for batch in forebay.DataLoader(webdataset.root, 6, shuffle=True, engine=engine):
        for i, sample in enumerate(batch.indices):
            fields = webdataset.samples[sample].fields
            for name, data in fields.items():
                assert batch.field(i, name).tobytes() == data
            assert batch.labels[i] == int(fields["cls"])
        with pytest.raises(KeyError, match=r"no field 'png'; it has: jpg, cls"):
            batch.field(0, "png")


def test_indices_of_a_batch(folder: DataSet, engine: forebay.Engine) -> None:
    batch = next(iter(forebay.DataLoader(folder.root, 5, engine=engine)))
    assert batch[-1].tobytes() == batch[4].tobytes()
    for wrong in (5, -6):
        with pytest.raises(IndexError):
            batch[wrong]
    assert len(list(batch)) == 5


def test_bytes_cannot_be_written(folder: DataSet, engine: forebay.Engine) -> None:
    batch = next(iter(forebay.DataLoader(folder.root, 5, engine=engine)))
    for view in (batch[1], batch.data):
        with pytest.raises(ValueError):
            view[0] = 1


# ---- memory on loan


@pytest.mark.parametrize("layout", ["views", "contiguous"])
def test_batches_stay_valid_while_held(large_folder: DataSet, layout: str) -> None:
    loader = forebay.DataLoader(
        large_folder.root, 4, shuffle=True, layout=layout, engine=forebay.Engine(memory="8M")
    )
    iterator = iter(loader)
    expected = list(batches_of(_order(large_folder, 0), 4))
    held = [next(iterator) for _ in range(3)]
    for _ in range(40):
        next(iterator)
    for batch, samples in zip(held, expected[:3], strict=True):
        check_batch(batch, samples, large_folder)


def test_a_view_keeps_its_memory(large_folder: DataSet) -> None:
    loader = forebay.DataLoader(large_folder.root, 4, engine=forebay.Engine(memory="8M"))
    iterator = iter(loader)
    view = next(iterator)[1]  # the batch itself is gone
    for _ in range(40):
        next(iterator)
    assert view.tobytes() == large_folder.samples[1].data
    loader.close()
    del loader, iterator
    assert view.tobytes() == large_folder.samples[1].data


def test_release_gives_the_memory_back(folder: DataSet, engine: forebay.Engine) -> None:
    batch = next(iter(forebay.DataLoader(folder.root, 5, engine=engine)))
    before = engine.metrics()["forebay_stage_leases"]
    batch.release()
    assert batch.released
    assert engine.metrics()["forebay_stage_leases"] == before - 1
    for use in (lambda: batch[0], lambda: batch.data, batch.checksum):
        with pytest.raises(ValueError, match="released"):
            use()
    batch.release()  # twice is fine
    assert batch.indices.tolist() == [0, 1, 2, 3, 4]


def test_batches_outlive_the_loader(folder: DataSet) -> None:
    loader = forebay.DataLoader(folder.root, 9, memory="64M")
    batches = list(loader)
    loader.close()
    del loader
    for batch, samples in zip(batches, batches_of(list(range(61)), 9), strict=True):
        check_batch(batch, samples, folder)


def test_a_budget_smaller_than_the_data_fails_nothing(large_folder: DataSet) -> None:
    for layout in ("views", "contiguous"):
        engine = forebay.Engine(memory="8M")
        loader = forebay.DataLoader(
            large_folder.root, 16, shuffle=True, layout=layout, engine=engine
        )
        for epoch in range(2):
            for batch, samples in zip(
                loader, batches_of(_order(large_folder, epoch), 16), strict=True
            ):
                check_batch(batch, samples, large_folder)
        metrics = engine.metrics()
        assert metrics["forebay_stage_arena_peak_bytes"] <= engine.budget == 8 << 20
        assert metrics["forebay_source_reads_total"] > len(large_folder)


def test_a_batch_larger_than_the_budget_names_both(large_folder: DataSet) -> None:
    engine = forebay.Engine(memory="8M")
    with pytest.raises(forebay.BudgetError) as caught:
        next(iter(forebay.DataLoader(large_folder.root, 211, engine=engine)))
    numbers = [int(n) for n in re.findall(r"\d+", str(caught.value))]
    assert 8 << 20 in numbers
    assert any(n >= large_folder.total_bytes for n in numbers)
    assert isinstance(caught.value, MemoryError)
    # The engine lives on.
    assert len(next(iter(forebay.DataLoader(large_folder.root, 4, engine=engine)))) == 4


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_large_sample_comes_while_the_batch_before_is_held(tmp_path: Path, shuffle: bool) -> None:
    for i in range(300):
        (tmp_path / f"{i:03}.bin").write_bytes(bytes([i % 256]) * 100_000)
    with open(tmp_path / "large.bin", "wb") as large:
        large.truncate(40_000_000)
    # Its size is known from the start: what was handed out before that may lie in its way.
    catalog = forebay.Catalog.build(str(tmp_path))
    loader = forebay.DataLoader(catalog, 16, shuffle=shuffle, engine=forebay.Engine("64M"))
    for _ in range(2):
        sizes = [len(sample) for batch in loader for sample in batch]
        assert sorted(sizes) == [100_000] * 300 + [40_000_000]


# ---- one engine


def test_loaders_share_one_engine_and_one_budget(large_folder: DataSet, folder: DataSet) -> None:
    train = forebay.DataLoader(large_folder.root, 8, shuffle=True, memory="16M")
    val = forebay.DataLoader(folder.root, 5)
    assert train.engine is val.engine
    assert val.engine.budget == 16 << 20
    same = forebay.DataLoader(folder.root, 5, memory="16M")
    assert same.engine is train.engine
    for epoch in range(2):
        for step, (batch, samples) in enumerate(
            zip(train, batches_of(_order(large_folder, epoch), 8), strict=True)
        ):
            check_batch(batch, samples, large_folder)
            if step % 10 == 5:  # validation in the middle of an epoch
                for other, expected in zip(val, batches_of(list(range(61)), 5), strict=True):
                    check_batch(other, expected, folder)
    assert train.engine.metrics()["forebay_stage_arena_peak_bytes"] <= 16 << 20


def test_loaders_of_one_data_set_share_its_samples(folder: DataSet, engine: forebay.Engine) -> None:
    for seed in range(3):
        loader = forebay.DataLoader(folder.root, 8, shuffle=True, seed=seed, engine=engine)
        assert sum(len(b) for b in loader) == 61
    assert engine.metrics()["forebay_source_reads_total"] == 61


def test_another_budget_in_one_process_is_an_error(folder: DataSet) -> None:
    first = forebay.DataLoader(folder.root, memory="16M")
    with pytest.raises(forebay.ArgumentError, match="memory=32.0 MiB.*16.0 MiB"):
        forebay.DataLoader(folder.root, memory="32M")
    with pytest.raises(forebay.ArgumentError, match="in_flight=3"):
        forebay.DataLoader(folder.root, in_flight=3)
    apart = forebay.DataLoader(folder.root, engine=forebay.Engine(memory="32M"))
    assert apart.engine is not first.engine
    with pytest.raises(forebay.ArgumentError, match="memory= to the engine"):
        forebay.DataLoader(folder.root, memory="32M", engine=first.engine)
    # The next shared engine may have another budget.
    del first, apart
    assert forebay.DataLoader(folder.root, memory="32M").engine.budget == 32 << 20


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (dict(batch_sise=3), TypeError, "batch_sise"),
        (dict(batch_size=0), forebay.ArgumentError, "batch_size is 0"),
        (dict(layout="stacked"), forebay.ArgumentError, "layout is 'stacked'"),
        (dict(format="fodler"), forebay.ArgumentError, "'fodler'"),
        (dict(io="uring"), forebay.ArgumentError, "io is 'uring'"),
        (dict(memory="lots"), forebay.ArgumentError, "memory is 'lots'"),
        (dict(memory="1M"), forebay.ArgumentError, "8.0 MiB"),
        (dict(memory=-1), forebay.ArgumentError, "negative"),
        (dict(seed=-1), forebay.ArgumentError, "seed is -1"),
        (dict(seed=2**64), forebay.ArgumentError, "seed is 18446744073709551616"),
        (dict(epochs=0), forebay.ArgumentError, "epochs is 0"),
        (dict(epochs=-2), forebay.ArgumentError, "epochs is -2"),
        (dict(rank=2, world_size=2), forebay.ArgumentError, "rank 2 of world size 2"),
        (dict(rank=0, world_size=0), forebay.ArgumentError, "world size 0"),
        (dict(extensions=[""]), forebay.ArgumentError, "extensions has ''"),
        (dict(_delay="opens=1"), forebay.ArgumentError, "opens"),
    ],
    ids=lambda v: str(v)[:30] if isinstance(v, dict) else "",
)
def test_wrong_arguments(folder: DataSet, arguments: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        forebay.DataLoader(folder.root, **arguments)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such"
    with pytest.raises(FileNotFoundError, match=str(missing)) as caught:
        forebay.DataLoader(missing)
    assert isinstance(caught.value, forebay.MissingError)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(forebay.MissingError, match=f"{tmp_path} holds no sample"):
        forebay.DataLoader(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").touch()
    with pytest.raises(forebay.MissingError, match=r"\.jpg.*1 sub-folders"):
        forebay.DataLoader(tmp_path, extensions=forebay.IMG_EXTENSIONS)


def test_a_file_of_no_known_format(tmp_path: Path) -> None:
    file = tmp_path / "data.bin"
    file.write_bytes(b"x")
    with pytest.raises(forebay.ArgumentError, match=f"{file}.*neither .tar nor .tfrecord"):
        forebay.DataLoader(file)


# ---- files that changed after indexing

_Damage = Callable[[Path], None]


def _into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _into_loop(path: Path) -> None:
    """Unreadable, also for root."""
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("layout", ["views", "contiguous"])
@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (Path.unlink, forebay.MissingError),
        (lambda p: os.truncate(p, p.stat().st_size - 1), forebay.ChangedError),
        (lambda p: p.write_bytes(p.read_bytes() + b"more"), forebay.ChangedError),
        (_into_folder, forebay.ChangedError),
        (_into_loop, forebay.ForebayError),
    ],
    ids=["gone", "shrunk", "grown", "folder", "loop"],
)
def test_a_damaged_file_is_named_and_reading_goes_on(
    copy: DataSet, engine: forebay.Engine, damage: _Damage, error: type, layout: str
) -> None:
    catalog = forebay.Catalog.build(str(copy.root))
    victim = copy.root / copy.samples[11].name
    assert len(copy.samples[11].data) > 1
    damage(victim)
    loader = forebay.DataLoader(catalog, 8, layout=layout, engine=engine)
    iterator = iter(loader)
    check_batch(next(iterator), list(range(8)), copy)
    for _ in range(2):
        with pytest.raises(error, match=re.escape(str(victim))):
            next(iterator)
    # Repaired, the same batch comes, and then the others.
    if victim.is_dir() and not victim.is_symlink():
        victim.rmdir()
    victim.unlink(missing_ok=True)
    victim.write_bytes(copy.samples[11].data)
    for samples in list(batches_of(list(range(61)), 8))[1:]:
        check_batch(next(iterator), samples, copy)
    assert next(iterator, None) is None


def test_two_loaders_that_wait_for_one_damaged_file(copy: DataSet) -> None:
    engine = forebay.Engine(memory="64M")
    catalog = forebay.Catalog.build(str(copy.root))
    victim = copy.root / copy.samples[0].name
    victim.unlink()
    iterators = [iter(forebay.DataLoader(catalog, 4, engine=engine)) for _ in range(3)]
    for _ in range(3):
        for iterator in iterators:
            with pytest.raises(forebay.MissingError, match=re.escape(str(victim))):
                next(iterator)


def test_a_corrupt_record_names_file_and_offset(tmp_path: Path, engine: forebay.Engine) -> None:
    path = tmp_path / "a.tfrecord"
    payloads = [bytes([i]) * 100 for i in range(10)]
    offsets = write_tfrecord(path, payloads)
    with path.open("r+b") as file:
        file.seek(offsets[6] + 50)
        file.write(b"\xff")
    iterator = iter(forebay.DataLoader(tmp_path, 4, engine=engine))
    assert [b.tobytes() for b in next(iterator)] == payloads[:4]
    with pytest.raises(forebay.CorruptError, match=rf"{path}.*offset {offsets[6]}"):
        next(iterator)
    assert engine.metrics()["forebay_source_errors_total"] >= 1


def test_same_size_other_bytes_are_seen_after_a_restart(copy: DataSet) -> None:
    victim = copy.root / copy.samples[5].name
    first = forebay.DataLoader(copy.root, 61, engine=forebay.Engine(memory="64M"))
    next(iter(first))
    changed = bytes(len(copy.samples[5].data))
    victim.write_bytes(changed)
    second = forebay.DataLoader(copy.root, 61, engine=forebay.Engine(memory="64M"))
    assert next(iter(second))[5].tobytes() == changed


def test_a_timeout_names_what_it_waits_for(folder: DataSet, tmp_path: Path) -> None:
    loader = forebay.DataLoader(
        folder.root,
        4,
        timeout=0.05,
        engine=forebay.Engine(memory="64M"),
        _delay="open_ms=400",
    )
    iterator = iter(loader)
    with pytest.raises(TimeoutError, match=f"0.05 s.*source: {folder.root}/class0") as caught:
        next(iterator)
    assert isinstance(caught.value, forebay.DeadlineError)
    # Nothing is lost by it.
    loader.timeout = 0
    check_batch(next(iterator), [0, 1, 2, 3], folder)


# ---- reports


def test_stats_add_up(folder: DataSet) -> None:
    engine = forebay.Engine(memory="64M")
    loader = forebay.DataLoader(
        folder.root, 8, shuffle=True, engine=engine, _delay="open_ms=2,read_ms=2"
    )
    assert loader.report() == "No epoch has been read yet."
    for _ in range(3):
        for _ in loader:
            pass
    reports = loader.stats()
    assert [r.epoch for r in reports] == [0, 1, 2]
    for report in reports:
        assert (report.batches, report.samples) == (8, 61)
        assert report.bytes == folder.total_bytes
        assert len(report.batch_seconds) == 8
        assert 0 <= report.stall <= report.seconds
        assert report.stall == pytest.approx(sum(report.wait.values()))
        assert 0 <= report.stall_share <= 1
        assert set(report.wait) == {
            "source", "memory", "decode", "plan", "copy", "tier", "share", "peer",
        }  # fmt: skip
        assert report.batch_seconds.sum() <= report.seconds + 1e-3
        assert report.percentile(50) <= report.percentile(99)
    # Every read belongs to the first epoch: with room for all, nothing is read twice.
    assert [r.source_reads for r in reports[1:]] == [0, 0]
    assert [r.source_bytes for r in reports[1:]] == [0, 0]
    assert (reports[0].source_reads, reports[0].source_bytes) == (61, folder.total_bytes)
    metrics = engine.metrics()
    assert metrics["forebay_source_reads_total"] == 61
    assert metrics["forebay_source_read_bytes_total"] == folder.total_bytes
    assert metrics["forebay_stage_samples_total"] == 3 * 61
    assert metrics["forebay_stage_sample_bytes_total"] == 3 * folder.total_bytes
    waited = sum(r.stall for r in reports)
    stalls = sum(v for k, v in metrics.items() if k.startswith("forebay_stall_")) * 1e-9
    assert stalls == pytest.approx(waited, abs=1e-6)


def test_the_report_in_words(folder: DataSet) -> None:
    loader = forebay.DataLoader(
        folder.root, 8, engine=forebay.Engine(memory="64M"), _delay="open_ms=60"
    )
    assert sum(len(b) for b in loader) == 61
    lines = loader.report().splitlines()
    assert re.match(
        r"Epoch 0: 61 samples in \d+\.\d\d s; training waited \d+% of the time, "
        r"\d+% of it for reads from storage \(\d+ reads, .*/s\)\.",
        lines[0],
    )
    assert lines[1].split()[:2] == ["epoch", "time"]
    assert len(lines) == 3 and lines[2].split()[0] == "0"
    for _ in range(2):
        assert sum(len(b) for b in loader) == 61
    assert len(loader.report().splitlines()) == 5


def test_the_report_after_close(folder: DataSet) -> None:
    with forebay.DataLoader(folder.root, 8, memory="64M") as loader:
        assert sum(len(b) for b in loader) == 61
        engine = loader.engine
    report = loader.stats()
    assert [r.samples for r in report] == [61]
    assert loader.report().startswith("Epoch 0: 61 samples")
    # Asking for a report does not open the stream again.
    assert engine.metrics()["forebay_stage_leases"] == 0
    assert loader._feed is None


def test_a_broken_off_epoch_is_reported(folder: DataSet, engine: forebay.Engine) -> None:
    loader = forebay.DataLoader(folder.root, 8, engine=engine)
    for step, _ in enumerate(loader):
        if step == 2:
            break
    assert [(r.epoch, r.batches) for r in loader.stats()] == [(0, 3)]
    assert sum(len(b) for b in loader) == 61
    assert [(r.epoch, r.batches) for r in loader.stats()] == [(0, 3), (0, 8)]


def test_metrics_as_prometheus_text(folder: DataSet, engine: forebay.Engine) -> None:
    assert sum(len(b) for b in forebay.DataLoader(folder.root, 8, engine=engine)) == 61
    values, types = {}, {}
    for line in engine.prometheus().splitlines():
        if match := re.fullmatch(r"# TYPE (\S+) (counter|gauge)", line):
            types[match[1]] = match[2]
        elif not re.fullmatch(r"# HELP \S+ \S.*", line):
            name, value = line.split(" ")
            values[name] = int(value)
    metrics = engine.metrics()
    assert set(values) == set(types) == set(metrics)
    for name, kind in types.items():
        assert re.fullmatch(r"forebay_[a-z0-9]+_[a-z0-9_]+", name)
        assert name.endswith("_total") == (kind == "counter")
    assert values["forebay_stage_samples_total"] == 61


def test_every_metric_is_in_the_documentation(engine: forebay.Engine) -> None:
    document = _ROOT / "docs" / "metrics.md"
    if not document.exists():
        pytest.skip("docs/metrics.md IS NOT WRITTEN YET: no metric is documented")
    text = document.read_text(encoding="utf-8")
    assert [name for name in engine.metrics() if f"`{name}`" not in text] == []


def test_knobs(folder: DataSet, engine: forebay.Engine) -> None:
    knobs = engine.knobs()
    for value, low, high, meaning in knobs.values():
        assert low <= value <= high and meaning
    engine.set_knob("source_reads_in_flight", 2)
    assert engine.knobs()["source_reads_in_flight"][0] == 2
    assert sum(len(b) for b in forebay.DataLoader(folder.root, 8, engine=engine)) == 61
    assert engine.metrics()["forebay_source_in_flight_limit_reads"] == 2
    with pytest.raises(forebay.ArgumentError, match="100000"):
        engine.set_knob("source_reads_in_flight", 100_000)
    with pytest.raises(forebay.ForebayError, match="reads_in_flite"):
        engine.set_knob("reads_in_flite", 1)


def test_mechanisms_have_all_knobs_and_their_documents(engine: forebay.Engine) -> None:
    listed = engine.mechanisms()
    assert {"prefetch", "memory_tier", "cache_folder", "admission", "hedging"} <= set(listed)
    named = [knob for each in listed.values() for knob in each["knobs"]]
    assert sorted(named) == sorted(engine.knobs())
    assert {m for each in listed.values() for m in each["metrics"]} <= set(engine.metrics())
    text = (_ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in [*named, *listed] if f"`{name}`" not in text] == []


def test_knobs_act_together_or_not_at_all(folder: DataSet, engine: forebay.Engine) -> None:
    with pytest.raises(forebay.ArgumentError, match="admit_folder"):
        engine.set_knobs({"admit_memory": 0, "admit_folder": 2})
    assert engine.knobs()["admit_memory"][0] == 1
    engine.set_knobs({"admit_memory": 0, "hedge_one_in": 0})
    for _ in range(2):
        assert sum(len(b) for b in forebay.DataLoader(folder.root, 8, engine=engine)) == 61
    assert engine.metrics()["forebay_stage_kept_bytes"] == 0
    assert engine.metrics()["forebay_source_reads_total"] == 2 * 61


@pytest.mark.parametrize("io", ["threads", "io_uring"])
def test_both_ways_to_read(folder: DataSet, io: str) -> None:
    if io == "io_uring" and (reason := _forebay.features()["io_uring"]):
        pytest.skip(f"no io_uring here: {reason}")
    engine = forebay.Engine(memory="64M", io=io, verify=True)
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=engine)
    for batch, samples in zip(loader, batches_of(_order(folder, 0), 8), strict=True):
        check_batch(batch, samples, folder)


@pytest.mark.parametrize("io", ["threads", "io_uring"])
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_file_that_became_something_else(tmp_path: Path, io: str, kind: str) -> None:
    if io == "io_uring" and (reason := _forebay.features()["io_uring"]):
        pytest.skip(f"no io_uring here: {reason}")
    root = tmp_path / "data"
    root.mkdir()
    for i in range(4):
        (root / f"{i}.bin").write_bytes(bytes([i]) * 100)
    catalog = forebay.Catalog.build(str(root))
    changed = root / "2.bin"
    changed.unlink()
    os.mkfifo(changed) if kind == "fifo" else changed.symlink_to("/dev/zero")
    engine = forebay.Engine(memory="8M", io=io)
    with forebay.DataLoader(catalog, 1, engine=engine, epochs=1, timeout=60) as loader:
        batches = iter(loader)
        assert [len(next(batches)) for _ in range(2)] == [1, 1]
        with pytest.raises(forebay.ChangedError, match=str(changed)):
            next(batches)


def test_nothing_kept_reads_every_epoch(large_folder: DataSet) -> None:
    engine = forebay.Engine(memory="8M", keep=False)
    loader = forebay.DataLoader(large_folder.root, 8, epochs=2, engine=engine)
    assert sum(len(b) for _ in range(2) for b in loader) == 2 * len(large_folder)
    assert engine.metrics()["forebay_source_reads_total"] > 1.5 * len(large_folder)
    assert engine.metrics()["forebay_stage_kept_bytes"] == 0
    reports = loader.stats()
    assert sum(r.source_reads for r in reports) == engine.metrics()["forebay_source_reads_total"]


@pytest.mark.parametrize(
    "wrong",
    [
        dict(batch_size=2**63), dict(batch_size=-(2**70)), dict(batch_size=2.0),
        dict(in_flight=-1), dict(in_flight=2**63), dict(in_flight="many"),
        dict(epochs=2**65), dict(epochs=0), dict(memory=2**64), dict(memory=float("inf")),
        dict(memory=float("nan")), dict(memory=[64]), dict(decode_threads=-1),
        dict(extensions=[1]), dict(extensions=""), dict(extensions=["."]),
        dict(cache_dir="x", cache_bytes="9" * 40 + "T"),
    ],
    ids=str,
)  # fmt: skip
def test_an_argument_out_of_range_is_named(tmp_path, wrong):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "0.bin").write_bytes(b"0")
    arguments = dict(batch_size=1) | wrong
    if "cache_dir" in arguments:
        arguments["cache_dir"] = tmp_path / "cache"
    name = list(wrong)[-1]
    with pytest.raises(forebay.ArgumentError, match=name):
        forebay.DataLoader(tmp_path, **arguments)


def test_engines_name_arguments_out_of_range():
    for wrong in (
        dict(in_flight=-1), dict(max_in_flight=0), dict(max_in_flight=2**63),
        dict(copy_threads=-1), dict(decode_threads=2**40), dict(read_ahead=2**80),
        dict(memory_tier=-1),
    ):  # fmt: skip
        with pytest.raises(forebay.ArgumentError, match=next(iter(wrong))):
            forebay.Engine(**wrong)


def test_one_suffix_may_stand_for_itself(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("0.jpg", "1.png", "2.p", "j", "3.JPG"):
        (tmp_path / "a" / name).write_bytes(b"0")
    for given in ("jpg", ".jpg", [".jpg"]):
        with forebay.DataLoader(tmp_path, 8, extensions=given) as loader:
            assert len(loader.catalog) == 2, given
