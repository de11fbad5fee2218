"""The tuner in a real engine: its knobs, its metrics, and a log that replays."""

from __future__ import annotations

from pathlib import Path

import forebay
import pytest
from forebay import ArgumentError, cli
from forebay_bench.tune import Best, best_point, grid

COUNT, SIZE = 200, 5000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    root.mkdir()
    for i in range(COUNT):
        (root / f"{i:04d}.bin").write_bytes(bytes([i % 251]) * SIZE)
    return root


def run_epochs(folder: Path, engine: forebay.Engine, epochs: int = 2) -> list[int]:
    loader = forebay.DataLoader(folder, 8, shuffle=True, seed=1, engine=engine)
    seen: list[int] = []
    with loader:
        for _ in range(epochs):
            for batch in loader:
                seen += [int(i) for i in batch.indices]
    return seen


def test_a_recorded_log_replays_to_the_same_decisions(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "tuner.log"
    engine = forebay.Engine(memory="32M", keep=False, tuner_log=log)
    seen = run_epochs(folder, engine, 60)
    assert len(seen) == 60 * COUNT
    del engine
    assert cli.main(["tune", "replay", str(log)]) == 0
    said = capsys.readouterr().out
    assert "no decisions differ" in said
    assert cli.main(["tune", "replay", str(log), "--policy", "prisma"]) == 0
    assert "   1 reads" in capsys.readouterr().out
    # A decision that was not the policy's is found.
    lines = log.read_text().splitlines()
    words = lines[-1].split(" ")
    words[19] = "7"  # the reads that were decided
    log.write_text("\n".join([*lines[:-1], " ".join(words)]) + "\n")
    assert cli.main(["tune", "replay", str(log)]) == 1
    assert "1 decisions differ" in capsys.readouterr().out


def test_a_log_of_something_else_is_wrong_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.log"
    other.write_text("hello\n")
    assert cli.main(["tune", "replay", str(other)]) == 2
    assert "line 1 is not of a tuner's log" in capsys.readouterr().err
    assert cli.main(["tune", "replay", str(tmp_path / "none")]) in (1, 2)


@pytest.mark.parametrize("layout", ["views", "contiguous"])
def test_the_smallest_limits_feed_every_batch(folder: Path, layout: str) -> None:
    engine = forebay.Engine(memory="32M", keep=False, in_flight=1, read_ahead=1)
    loader = forebay.DataLoader(folder, 8, shuffle=True, seed=1, engine=engine, layout=layout)
    with loader:
        seen = [int(i) for batch in loader for i in batch.indices]
    assert sorted(seen) == list(range(COUNT))
    metrics = engine.metrics()
    assert metrics["forebay_source_in_flight_limit_reads"] == 1
    assert metrics["forebay_read_ahead_limit_bytes"] == 1


def test_knobs_take_over_and_give_back(folder: Path) -> None:
    engine = forebay.Engine(memory="32M", keep=False)
    engine.set_knobs({"source_reads_in_flight": 3, "read_ahead_bytes": 100_000})
    assert len(run_epochs(folder, engine)) == 2 * COUNT
    metrics = engine.metrics()
    assert metrics["forebay_source_in_flight_limit_reads"] == 3
    assert metrics["forebay_read_ahead_limit_bytes"] == 100_000
    engine.set_knobs({"source_reads_in_flight": 0, "read_ahead_bytes": 0, "tuner_on": 0})
    assert len(run_epochs(folder, engine)) == 2 * COUNT
    assert engine.metrics()["forebay_source_in_flight_limit_reads"] > 0


def test_wrong_options_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="forebay or prisma"):
        forebay.Engine(memory="16M", tuner="magic")
    with pytest.raises(forebay.ForebayError, match="nowhere"):
        forebay.Engine(memory="16M", tuner_log=tmp_path / "nowhere" / "log")


def test_the_best_point_is_the_smallest_that_does() -> None:
    rates = {(1, 1): 50.0, (1, 2): 60.0, (2, 1): 97.0, (2, 2): 98.5, (2, 4): 99.0, (4, 1): 100.0}
    assert best_point(rates) == Best(2, 2, 98.5)
    reads, buffers = grid(1000, 0.04, 1e5, 8, [5, 4], 256)
    assert reads == [10, 20, 40, 80, 160]
    assert buffers[0] == 1_400_000 and buffers[3] == 8 * buffers[0]
    assert grid(1000, 0.0004, 1e5, 8, [3, 2], 256) == ([1, 2, 4], [800_000, 1_600_000])
