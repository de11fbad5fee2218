"""``forebay plan``: a user's data set, her tiers, and what more of them would buy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forebay import cli

plan = pytest.importorskip("forebay.commands.plan")

MB = 1 << 20
SAMPLES = 300
GIVEN = ["--source-bandwidth", "100M", "--source-latency", "2", "--batch-size", "8"]


@pytest.fixture(autouse=True)
def own_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "index"))


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """300 MiB that take no room: with a source that is given, nothing reads them."""
    root = tmp_path / "data"
    for i in range(SAMPLES):
        file = root / f"class{i % 3}" / f"{i:04d}.bin"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            out.truncate(MB)
    return root


def figures(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert cli.main(["plan", *(str(a) for a in arguments), "--json", "-"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["plan", *(str(a) for a in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("forebay: ")
    return captured.err


def test_one_node_without_nvme(dataset: Path, capsys: Any) -> None:
    got = figures(capsys, dataset, *GIVEN, "--memory", "164M", "--epochs", "5")
    assert (got["samples"], got["bytes"]) == (SAMPLES, SAMPLES * MB)
    assert got["source"] == {
        "bytes_per_s": 100 * MB, "latency_s": 0.002, "measured": False, "note": "as given",
    }  # fmt: skip
    ours, now = got["forebay"], got["today"]
    # The first epoch is bound by the source, later ones by what 100 MiB of memory do not hold.
    assert ours["first_epoch_s"] == pytest.approx(3.0, rel=0.02)
    assert ours["later_epoch_s"] == pytest.approx(2.0, rel=0.12)
    assert ours["source_bytes_per_epoch"] == pytest.approx(200 * MB, rel=0.12)
    assert ours["wait_share"] is None
    # An LRU page cache of the same size has far fewer hits.
    assert now["name"] == "PyTorch, 8 workers"
    assert now["source_bytes_per_epoch"] > 1.1 * ours["source_bytes_per_epoch"]
    assert now["job_s"] > ours["job_s"]


def test_more_room_is_never_slower(dataset: Path, capsys: Any) -> None:
    got = figures(
        capsys, dataset, *GIVEN, "--memory", "80M", "--nvme", "20M", "--nodes", "2",
        "--samples-per-second", "200",
    )  # fmt: skip
    rows = sorted([got["forebay"], *got["more"]], key=lambda r: r["memory_bytes"] + r["nvme_bytes"])
    assert len(rows) >= 5
    for smaller, larger in zip(rows, rows[1:], strict=False):
        assert larger["later_epoch_s"] <= smaller["later_epoch_s"] * 1.001
    assert got["all_fits_nvme_bytes"] > 20 * MB
    fits = next(row for row in got["more"] if "all fits" in row["name"])
    assert fits["nvme_bytes"] == got["all_fits_nvme_bytes"]
    assert fits["source_bytes_per_epoch"] < 0.03 * got["bytes"]
    assert 0 < fits["wait_share"] < got["forebay"]["wait_share"] < 1
    # 150 samples a node at 200 a second.
    assert fits["later_epoch_s"] == pytest.approx(0.75, rel=0.05)
    assert "NVMe a node" in got["recommendation"] or "memory a node" in got["recommendation"]


@pytest.mark.parametrize("memory", ["320M", "500M"])
def test_one_node_with_nvme(dataset: Path, capsys: Any, memory: str) -> None:
    fast = ["--source-bandwidth", "4G", "--source-latency", "0.1"]
    got = figures(capsys, dataset, *fast, "--memory", memory, "--nvme", "100M")
    rows = [got["forebay"], *got["more"]]
    assert any(row["nvme_bytes"] == 0 for row in rows)
    for a in rows:
        for b in rows:
            if a["memory_bytes"] <= b["memory_bytes"] and a["nvme_bytes"] <= b["nvme_bytes"]:
                assert b["later_epoch_s"] <= a["later_epoch_s"] * 1.02, (a["name"], b["name"])
    assert "with 0 B" not in got["recommendation"]


def test_less_is_not_recommended() -> None:
    job = plan.Job(plan.np.ones(1, "u4"), 1, 1, 8 * MB, 8 * MB, 1, 1, 1, 0.0, 1.0, 1.0, 1.0)
    ours = plan.Forecast("Forebay", 8 * MB, 8 * MB, 1.0, 1.0, 10.0, None, 0.0)
    less = plan.Forecast("no NVMe", 8 * MB, 0, 1.0, 1.0, 5.0, None, 0.0)
    assert "buys less than" in plan.recommend(job, ours, ours, [less])


def test_compute_bound_needs_nothing(dataset: Path, capsys: Any) -> None:
    got = figures(
        capsys, dataset, *GIVEN, "--memory", "2G", "--step-ms", "800",
    )  # fmt: skip
    assert got["forebay"]["later_epoch_s"] == pytest.approx(30, rel=0.02)
    assert got["forebay"]["wait_share"] < 0.02
    assert got["all_fits_nvme_bytes"] == 0
    assert "compute is then the limit" in got["recommendation"]


def test_the_source_is_measured(tmp_path: Path, capsys: Any) -> None:
    root = tmp_path / "real"
    root.mkdir()
    for i in range(60):
        (root / f"{i}.bin").write_bytes(b"x" * 20_000)
    got = figures(capsys, root, "--memory", "1G", "--nodes", "2")
    assert got["source"]["measured"] is True
    assert got["source"]["bytes_per_s"] > 0 and got["source"]["latency_s"] > 0
    assert "2 nodes are taken to get 2 times as much" in got["source"]["note"]


def test_words_and_file(dataset: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "plan.json"
    command = ["plan", str(dataset), *GIVEN, "--memory", "128M", "--nvme", "32M", "--nodes", "2"]
    assert cli.main([*command, "--json", str(file)]) == 0
    said = capsys.readouterr().out
    for words in ("300 samples", "The job", "PyTorch, 8 workers", "Forebay", "GPU waits",
                  "What more, or less, would buy", "no NVMe", "all fits"):  # fmt: skip
        assert words in said
    result = json.loads(file.read_text())
    assert " ".join(said.split()).endswith(result["recommendation"])
    listed = {path.name for path in dataset.iterdir()}
    assert listed == {"class0", "class1", "class2"}  # nothing is written beside the data


def test_same_question_same_answer(dataset: Path, capsys: Any) -> None:
    question = [dataset, *GIVEN, "--memory", "100M", "--nvme", "50M", "--nodes", "3"]
    assert figures(capsys, *question) == figures(capsys, *question)


def test_mistakes_are_named(dataset: Path, tmp_path: Path, capsys: Any) -> None:
    assert "does not exist" in complaint(capsys, tmp_path / "nowhere", *GIVEN)
    assert "--memory is '1X'" in complaint(capsys, dataset, *GIVEN, "--memory", "1X")
    assert "at least" in complaint(capsys, dataset, *GIVEN, "--memory", "10M")
    assert "--source-latency" in complaint(capsys, dataset, "--source-latency", "-1")
    assert "--nvme-bandwidth is 0" in complaint(capsys, dataset, *GIVEN, "--nvme-bandwidth", "0")
    assert "give one of them" in complaint(
        capsys, dataset, *GIVEN, "--step-ms", "1", "--samples-per-second", "1"
    )
    assert "--step-ms is -1" in complaint(capsys, dataset, *GIVEN, "--step-ms", "-1")
    nowhere = tmp_path / "no" / "where.json"
    assert f"--json {nowhere}: No such" in complaint(capsys, dataset, *GIVEN, "--json", nowhere)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert str(empty) in complaint(capsys, empty, *GIVEN)


@pytest.mark.parametrize(
    ("size", "rounded"), [(1, 1), (999, 1000), (137.4 * 2**30, 140 * 2**30), (2**40, 2**40)]
)
def test_sizes_to_buy_are_round(size: float, rounded: int) -> None:
    assert plan._round_up(size) >= size
    assert plan._round_up(size) == rounded
