"""``forebay simulate``: scenarios, their mistakes, table, JSON and plot."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forebay import cli

simulate = pytest.importorskip("forebay.commands.simulate")

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"

SMALL = """\
title = "small"
[cluster]
nodes = 2
ranks_per_node = 2
[[tiers]]
name = "memory"
bytes = "100M"
mb_per_s = 10000
threads = 4
[staging]
bytes = "64M"
mb_per_s = 10000
threads = 4
[network]
mb_per_s = 1000
[source]
readers = [1, 8]
mb_per_s = [50, 100]
[dataset]
samples = 400
sample_bytes = "1M"
sigma_bytes = "0.2M"
[job]
compute_mb_per_s = 100
preprocess_mb_per_s = 500
batch = 8
epochs = 3
seed = 5
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    file = tmp_path / "small.toml"
    file.write_text(SMALL)
    return file


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["simulate", *(str(a) for a in arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_table_names_every_policy(capsys: pytest.CaptureFixture[str], scenario: Path) -> None:
    code, out, err = call(capsys, scenario)
    assert (code, err) == (0, "")
    for title in ("no-I/O lower bound", "no prefetch", "NoPFS", "Forebay", "MONARCH", "sharding†"):
        assert title in out
    assert "does not read the whole data set" in out
    assert "every access of every epoch simulated" in out


def test_json_is_the_same_every_time(capsys: pytest.CaptureFixture[str], scenario: Path) -> None:
    code, out, _ = call(capsys, scenario, "--json", "-")
    assert code == 0
    document = json.loads(out)
    policies = document["scenarios"][0]["runs"][0]["policies"]
    assert [p["policy"] for p in policies] == simulate.sim_policies()
    by_name = {p["policy"]: p for p in policies}
    assert by_name["lower_bound"]["vs_bound"] == 1
    assert by_name["forebay"]["seconds"] <= by_name["nopfs"]["seconds"]
    assert by_name["naive"]["seconds"] > by_name["staging_buffer"]["seconds"]
    assert by_name["naive"]["source_mb"] == pytest.approx(3 * 400, rel=0.05)
    assert call(capsys, scenario, "--json", "-")[1] == out


def test_node_counts_policies_files(
    capsys: pytest.CaptureFixture[str], scenario: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    scenario.write_text(SMALL.replace("nodes = 2", "nodes = [1, 2, 8]"))
    plot, figures = tmp_path / "a.png", tmp_path / "a.json"
    code, out, err = call(
        capsys, scenario, "--policies", "forebay,nopfs", "--plot", plot, "--json", figures
    )
    assert (code, err) == (0, "")
    assert "Forebay" in out and "DeepIO" not in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    runs = json.loads(figures.read_text())["scenarios"][0]["runs"]
    assert [run["nodes"] for run in runs] == [1, 2, 8]
    assert [p["policy"] for p in runs[0]["policies"]] == ["lower_bound", "forebay", "nopfs"]


def test_epochs_beyond_the_limit_are_named(
    capsys: pytest.CaptureFixture[str], scenario: Path
) -> None:
    scenario.write_text(SMALL.replace("epochs = 3", "epochs = 40\nmax_accesses = 2000"))
    code, out, _ = call(capsys, scenario)
    assert code == 0
    assert "5 of 40 epochs simulated" in out.replace("\n", " ")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("batch = 8", "bach = 8", "job.batch is missing"),
        ("batch = 8", "batch = 8\nbatchs = 8", "job.batchs is not a key; did you mean batch?"),
        ("batch = 8", "batch = 0", "job.batch is 0; it must be a whole number from 1"),
        ("batch = 8", "batch = 1.5", "job.batch is 1.5"),
        ("batch = 8", "batch = true", "job.batch is True"),
        ("epochs = 3", 'epochs = "3"', "job.epochs is '3'"),
        ("seed = 5", "seed = -1", "job.seed is -1"),
        ("nodes = 2", "nodes = []", "cluster.nodes is []"),
        ("nodes = 2", "nodes = 70000", "65535 ranks"),
        ('bytes = "64M"', 'bytes = "64Q"', "staging.bytes"),
        ('bytes = "100M"', "bytes = []", "tiers[0].bytes"),
        ('bytes = "100M"', 'bytes = "100M"\nsize = 1', "tiers[0].size is not a key"),
        ("[50, 100]", "[50]", "source.mb_per_s"),
        ("[1, 8]", "[8, 1]", "readers"),
        ("mb_per_s = 1000\n[source]", "mb_per_s = 0\n[source]", "network.mb_per_s is 0"),
        ("mb_per_s = 1000\n[source]", "mb_per_s = nan\n[source]", "network.mb_per_s is nan"),
        ("[network]", "[netwrok]", "network is missing"),
        ("[job]", "[model]\naccounting = 'x'\n[job]", "model.accounting is 'x'"),
        ('title = "small"', 'policies = ["forbay"]', "did you mean forebay?"),
        ('title = "small"', "title = ", "small.toml: Invalid"),
        ('sample_bytes = "1M"', 'sample_bytes = "5G"', "dataset.sample_bytes"),
    ],
)
def test_mistakes_name_file_and_key(
    capsys: pytest.CaptureFixture[str], scenario: Path, old: str, new: str, words: str
) -> None:
    assert old in SMALL
    scenario.write_text(SMALL.replace(old, new, 1))
    code, out, err = call(capsys, scenario)
    assert (code, out) == (2, "")
    assert words in err
    assert "small.toml" in err
    assert "Traceback" not in err


def test_missing_file_and_wrong_policy(capsys: pytest.CaptureFixture[str], scenario: Path) -> None:
    code, _, err = call(capsys, scenario.parent / "none.toml")
    assert code == 2 and "does not exist" in err
    code, _, err = call(capsys, scenario.parent)
    assert code == 2 and "is a folder" in err
    code, _, err = call(capsys, scenario, "--policies", "nopsf")
    assert code == 2 and "did you mean nopfs?" in err


@pytest.mark.parametrize("file", sorted(SCENARIOS.rglob("*.toml")), ids=lambda p: p.stem)
def test_shipped_scenarios_are_valid(file: Path) -> None:
    assert simulate.load(file).policies[0] == "lower_bound"


@pytest.mark.parametrize("name", ["mnist", "cosmoflow512"])
def test_study(name: str) -> None:
    """NoPFS within 10 % of its published ratio to the bound, and Forebay never slower."""
    scenario = simulate.load(SCENARIOS / "nopfs" / f"{name}.toml")
    policies = simulate.simulate([scenario])[0]["runs"][0]["policies"]
    by_name = {p["policy"]: p for p in policies}
    bound, nopfs = by_name["lower_bound"], by_name["nopfs"]
    assert bound["time"] == pytest.approx(bound["published_time"], rel=0.01)
    assert nopfs["vs_bound"] == pytest.approx(nopfs["published_vs_bound"], rel=0.1)
    assert by_name["forebay"]["seconds"] <= nopfs["seconds"]


def test_peers_read_each_sample_once(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario.write_text(SMALL.replace("nodes = 2", "nodes = [2, 4]"))
    code, out, _ = call(capsys, scenario, "--peers", "--hold", "1.2", "--json", "-")
    assert code == 0
    (result,) = json.loads(out)["scenarios"]
    figures = {(run["nodes"], run["case"]): run for run in result["runs"]}
    assert len(figures) == 6
    for nodes in (2, 4):
        coordinated = figures[nodes, "coordinated"]
        assert coordinated["source_vs_dataset"] == pytest.approx(1)
        assert figures[nodes, "each for itself"]["source_vs_dataset"] > 1.5
        local = figures[nodes, "with locality"]["local_share"]
        assert local > 0.8 > coordinated["local_share"]
    code, out, _ = call(capsys, scenario, "--peers")
    assert code == 0 and "source ÷ data set" in out
    for wrong in (["--hold", "1.2"], ["--peers", "--hold", "-1"], ["--peers", "--plot", "x.png"]):
        code, _, err = call(capsys, scenario, *wrong)
        assert code != 0 and "--peers" in err


def test_a_restart_keeps_what_stays(scenario: Path) -> None:
    from forebay._forebay import SimTier, Simulation, simulate_peers

    job = simulate.load(scenario).make(4)
    job.tiers = [SimTier("memory", 0.4 * job.sample_mb * job.samples, 1000, 1)]
    epochs = simulate_peers(Simulation(job), [(4, 2), (3, 2), (5, 2)])
    reads = [e["source_vs_dataset"] for e in epochs]
    assert [e["nodes"] for e in epochs] == [4, 4, 3, 3, 5, 5]
    assert reads[0] == pytest.approx(1)
    assert reads[1] == 0
    assert 0 < reads[2] + reads[3] < 0.3
    assert reads[4] + reads[5] < 0.05


def test_ctrl_c_stops_at_once(scenario: Path) -> None:
    scenario.write_text(
        SMALL.replace("samples = 400", "samples = 20000000").replace("epochs = 3", "epochs = 5")
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay.cli", "simulate", str(scenario), "--policies", "naive"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "interrupted" in err and "Traceback" not in err
