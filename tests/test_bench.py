"""forebay bench, tiny: every figure is there and the JSON has its form. No time is judged here."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import forebay_bench as bench  # noqa: E402
from forebay_bench import drift, measure, page_cache, run  # noqa: E402
from forebay_testing import Cluster, Etcd, SlowFs  # noqa: E402

_usable, _reason = SlowFs.available()
needs_fuse = pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}")

needs_etcd = pytest.mark.skipif(not Etcd.available()[0], reason=Etcd.available()[1])

_bed, _no_bed = Cluster.available()
needs_cluster = pytest.mark.skipif(not _bed, reason=f"no test bed here: {_no_bed}")

FIGURES = {
    "overhead": {"memory_vs_memcpy", "small_samples_per_s"},
    "epoch": {
        "first_batch_s", "first_cold_vs_limit", "first_cold_vs_torch", "first_saved_batch_s",
        "first_saved_vs_limit", "first_vs_limit", "first_vs_torch", "first_vs_torch_bytes",
        "first_vs_torch_5ms", "first_vs_torch_5ms_bytes", "first_vs_torch_20ms",
        "first_vs_torch_20ms_bytes", "later_source_reads", "later_vs_torch",
        "later_vs_torch_8_workers", "later_vs_torch_cached", "later_vs_step_only",
        "later_stall_share", "batch_p99_vs_median",
    },
    "shards": {
        "shard_source_bytes", "shard_first_vs_limit", "shard_first_vs_limit_20ms",
        "shard_first_batch_s", "shard_first_batch_s_20ms", "shard_first_batch_s_indexed",
        "shard_first_batch_s_20ms_indexed", "shard_first_vs_limit_saved",
        "shard_first_vs_limit_20ms_saved", "shard_first_vs_limit_quarter",
        "shard_first_vs_limit_20ms_quarter", "shard_source_bytes_saved",
        "shard_source_bytes_quarter",
    },
    "accelerate": {
        "accelerate_first_vs_plain", "accelerate_later_vs_plain", "accelerate_first_vs_best",
        "accelerate_later_vs_best",
    },
    "budget": {"peak_vs_budget"},
    "decode": {"decode_vs_best_rival", "crop_vs_full_decode"},
    "accuracy": {"accuracy_difference"},
    "gpu": {"gpu_vs_no_io", "gpu_vs_torch"},
    "placement": {"uncovered_share"},
    "plan": {"plan_s", "plan_bytes_per_sample", "plan_peak_bytes_per_sample"},
    "simulator": {
        "simulated_vs_measured", "simulated_vs_measured_min", "simulated_vs_measured_max",
    },
    "tiers": {
        "tier_efficiency", "source_bytes_vs_bound", "epoch_vs_limit", "epoch_vs_limit_worst",
        "hedged_share", "epoch_cold_vs_limit", "epoch_saved_vs_limit", "copied_share",
        "nvme_fill_cost", "source_bytes_vs_bound_busy",
        "epoch_vs_limit_busy", "epoch_vs_limit_busy_worst", "copied_share_busy",
        "source_bytes_vs_bound_slow_disk", "copied_share_slow_disk",
    },
    "hang": {
        "hang_recovery_s", "hang_rate_vs_source", "hang_peer_recovery_s",
        "hang_peer_rate_vs_source",
    },
    "freshness": {
        "freshness_cost", "freshness_first_batch", "freshness_single_epoch", "statx_cpu_us",
    },
    "places": {
        "place_vs_oracle", "parallel_places", "large_first_batch_vs_pipe",
        "kept_share_small_budget",
    },
    "drift": {"recovery_s"},
    "tune": {
        "tuned_vs_best", "tune_s", "parallelism_vs_best", "buffer_vs_best", "retune_s",
        "retune_s_quarters",
    },
    "control": {"round_ms"},
    "jobs": {
        "source_reads_vs_dataset", "daemon_vs_embedded", "daemon_added_us",
        "syscalls_per_ready_batch",
    },
    "fairness": {
        "share_error", "redistribute_s", "shared_vs_alone", "cluster_share_error",
        "run_share_error", "run_share_error_one_daemon",
    },
    "transparent": {
        "first_vs_plain", "later_vs_plain", "decode_later_vs_plain", "tf_first_vs_plain",
        "tf_later_vs_plain", "tf_first_vs_one_shard", "tf_later_vs_one_shard", "warm_overhead",
        "warm_overhead_median", "warm_overhead_inside", "half_fit_source_share",
        "source_ops_vs_plain", "open_beside_opening_ms",
    },
    "peers": {
        "cluster_source_vs_dataset", "first_cold_vs_limit", "first_saved_vs_limit", "rank_spread",
        "batch_p99_vs_median", "later_vs_torch",
        "later_vs_torch_bytes", "local_share", "peer_vs_ucx_perftest",
        "peer_default_vs_ucx_perftest", "peer_tls_vs_ucx_perftest", "peer_vs_link",
        "peer_tls_vs_link", "locate_ns", "etcd_lookup_us",
    },
    "run_cluster": {"run_source_vs_dataset", "run_later_vs_plain", "mount_source_vs_dataset"},
    "large": {
        "large_source_vs_plain", "large_later_source", "large_first_vs_plain",
        "large_later_vs_plain",
    },
    "mount_large": {"mount_large_source_share"},
}  # fmt: skip

TINY: dict[str, dict[str, Any]] = {
    "overhead": {
        "repeats": 2,
        "large": {"samples": 30, "bytes": 4096, "batch": 8, "epochs": 2},
        "small": {"samples": 300, "bytes": 1024, "batch": 64, "epochs": 2},
    },
    "epoch": {
        "repeats": 2,
        "mean_bytes": 3000,
        "cold": {"files": 70, "threads": [8], "workers": 1},
        "first": {
            "1": {"files": 70, "threads": [4, 8], "workers": [1, 2], "workers_bytes": 2},
            "5": {"files": 20, "threads": [8], "workers": [2], "workers_bytes": 2},
            "20": {"files": 10, "threads": [8], "workers": [2], "workers_bytes": 2},
        },
        "later": {"files": 200, "step_ms": 0.02, "workers": [2], "cached_workers": [1]},
    },
    "shards": {"repeats": 2, "samples": 60, "shards": 3, "mean_bytes": 20_000, "threads": [4]},
    "accelerate": {
        "repeats": 2, "files": 100, "mean_bytes": 3000, "latency_ms": 1, "workers": [1, 2],
        "best_workers": [2],
    },
    "budget": {
        "repeats": 1, "files": 300, "mean_bytes": 40_000, "batch": 16, "budgets": ["8M", "16M"],
    },
    "decode": {
        "repeats": 2, "files": 40, "distinct": 10, "batch": 8, "workers": [1],
        "crop": {"width": 500, "height": 375, "images": 1, "draws": 20, "rounds": 2, "trials": 2},
    },
    "accuracy": {"repeats": 2, "seeds": 2, "train": 256, "val": 100, "batch": 64, "epochs": 1},
    "gpu": {},
    "placement": {"repeats": 2, "samples": 1280, "epochs": 12, "nodes": [2, 64]},
    "plan": {
        "repeats": 2, "samples": 3000, "ranks": 16, "epochs": 5, "trial_epochs": 2,
        "clusters": [{"nodes": 8, "rule": "auto"}, {"nodes": 16, "rule": "hash"}],
    },
    "simulator": {
        "repeats": 2, "files": 200, "mean_bytes": 3000,
        "calibration": {"latency_ms": 1, "files": 20, "threads": 2},
        "setups": [
            {"name": "a", "storage": {"read_ms": 1}, "memory_share": 2, "step_ms": 1},
            {"name": "b", "storage": {"ops": 5000}, "memory_share": 0.5, "step_ms": 0},
        ],
    },
    "tiers": {
        "repeats": 2, "files": 150, "mean_bytes": 20_000, "batch": 16, "latency_ms": 0.5,
        "epochs": 3, "step_ms": 0.05, "percent": [50, 105], "staging_bytes": 8 << 20,
        "threads": [8], "workers": [2], "cache_threads": 4, "fill_repeats": 2,
        "fill_memory_bytes": 16 << 20, "busy_loops": 1, "busy_percent": [105], "busy_repeats": 2,
        "slow_disk_repeats": 2,
    },
    "hang": {
        "repeats": 2, "files": 150, "mean_bytes": 20_000, "batch": 16, "latency_ms": 0.5,
        "memory_bytes": 8 << 20, "source_s": 1, "stall_s": 2, "peer_stall_s": 2, "window_s": 0.2,
    },
    "places": {
        "repeats": 2, "storage": {"open_ms": 0.5, "read_ms": 0.5, "bandwidth_mb": 300},
        "large": {"files": 12, "bytes": 300_000, "batch": 2, "memory": 16 << 20},
        "small_budget": {
            "files": 150, "bytes": 100_000, "batch": 8, "memory": 12 << 20, "epochs": 2,
        },
        "places": {
            "repeats": 2, "files": 60, "bytes": 20_000, "batch": 4, "memory": 64 << 20, "epochs": 1,
            "setups": {"even": {"disk": {"read_ms": 1}, "source": {"read_ms": 1}}},
        },
    },
    "drift": {
        "repeats": 2, "files": 100, "mean_bytes": 20_000, "latency_ms": [0.5, 2],
        "memory_bytes": 16 << 20, "bin_s": 0.05, "settle_s": 0.2, "phase_s": 1.5,
        "trial_files": 50, "threads": [[4], [4, 8]],
    },
    "tune": {
        "repeats": 2, "files": 100, "mean_bytes": 20_000, "latency_ms": [0.5, 2], "speeds": [0],
        "memory_bytes": 16 << 20, "grid": [2, 2], "point_s": 0.1, "settle_s": 0.02, "bin_s": 0.05,
        "tune_s": 0.3, "prisma_s": 0.2, "prisma_ms": [0.5], "change_ms": [0.5, 2],
        "change_speeds": [0],
        "change_settle_s": 0.1, "change_s": 0.3,
    },
    "freshness": {
        "repeats": 2, "files": 100, "mean_bytes": 3000, "batch": 16, "epochs": 2,
        "samples_per_s": 1000, "latency_ms": 0.2, "memory": "16M",
    },
    "control": {"repeats": 2, "stages": 40, "jobs": 3, "warm": 1, "rounds": 3},
    "jobs": {
        "repeats": 2,
        "sharing": {
            "processes": [1, 2], "files": 100, "mean_bytes": 3000, "batch": 16, "epochs": 2,
            "delay": "read_ms=1", "stagger_s": 0.05,
        },
        "cost": {
            "files": 200, "bytes": 3000, "batch": 8, "epochs": 2, "untouched_epochs": 2,
            "burn": 100,
        },
    },
    "fairness": {
        "repeats": 1, "cluster_repeats": 0, "files": 150, "memory": 8 << 20, "bandwidth_mb": 30,
        "alone_s": 0.4, "settle_s": 0.3, "both_s": 0.3, "window_s": 0.3, "idle_s": 0.6,
        "cluster": {
            "repeats": 1, "bandwidth_mb": 30, "settle_s": 1, "both_s": 2, "fall_s": 4,
            "change_s": 1, "setups": [{"nodes": "ab", "falls": 1, "kills": False}],
        },
        "run": {
            "repeats": 1, "files": 600, "workers": 1, "bandwidth_mb": 30, "settle_s": 0.5,
            "windows": 2, "window_s": 0.4,
        },
    },
    "transparent": {
        "repeats": 1, "mean_bytes": 20_000, "parts": ["warm", "half_fit", "raw", "opening"],
        "opening": {"samples": 100_000, "files": 4000, "repeats": 1, "memory_bytes": 256 << 20},
        "raw": {"files": 40, "latency_ms": 2, "workers": [1], "epochs": 2},
        "half_fit": {
            "files": 60, "latency_ms": 0.2, "workers": 2, "epochs": 3, "repeats": 1,
            "ahead_bytes": 100_000,
        },
        "warm": {"files": 4, "bytes": [20_000, 4096], "seconds": 0.01, "processes": 1,
                 "repeats": 2, "pair_seconds": 0.01},
    },
    "peers": {
        "repeats": 1, "files": 240, "mean_bytes": 20_000, "batch": 8, "nodes": [1, 2], "epochs": 3,
        "step_ms": 2, "latency_ms": 1, "workers": [1], "workers_bytes": 1,
        "staging_bytes": 8 << 20,
        "locality": {"batch": 16, "epochs": 2},
        "rate": {
            "files": 100, "bytes": 20_000, "batch": 8, "staging_bytes": 8 << 20, "epochs": 2,
            "limited_epochs": 1, "limit_gbit": 2, "messages": 200, "knobs": {},
        },
        "lookup": {"samples": 1000, "nodes": 4, "groups": 20, "keys": 10, "asked": 20},
    },
    "run_cluster": {
        "repeats": 1, "parts": ["run", "mount"], "nodes": [2], "files": 60, "mean_bytes": 20_000,
        "latency_ms": 1, "workers": 1, "batch": 8, "epochs": 2,
        "mount": {"repeats": 1, "passes": 2},
    },
    # Above 16 MiB, from which on files count as large.
    "large": {
        "repeats": 1, "later": 1, "latency_ms": 0.2,
        "formats": {
            "memmap": {"bytes": 20_000_000, "read_bytes": 131_072, "share": 0.3, "mapped": True},
            "hdf5": {"bytes": 20_000_000, "sample_bytes": 112_640, "share": 0.1},
        },
    },
    "mount_large": {"repeats": 1, "passes": 2, "bytes": 20 << 20, "latency_ms": 0.2},
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tiny workloads, and a scratch folder of the test's own. Its path is short: PyTorch's workers
    pass tensors through sockets below it.
    """
    real = run.load_workload
    monkeypatch.setattr(run, "load_workload", lambda name, mode: {**real(name, mode), **TINY[name]})
    with tempfile.TemporaryDirectory(prefix="fb-", dir="/tmp") as scratch:
        monkeypatch.setattr(tempfile, "tempdir", scratch)
        yield Path(scratch)


def check_cases(cases: list[dict]) -> None:
    assert cases
    for case in cases:
        assert case["name"] and case["unit"]
        assert {"limit", "limit_name", "rivals", "note"} <= case.keys()
        numbers = [case["value"], case["spread"], *case["values"], *case["rivals"].values()]
        assert all(math.isfinite(x) for x in numbers)
        assert min(case["values"]) <= case["value"] <= max(case["values"])
        assert case["limit"] is None or (case["limit"] > 0 and case["limit_name"])
    assert len({case["name"] for case in cases}) == len(cases)


def check_worst(result: dict) -> None:
    """Every figure has its worst repeat beside it."""
    assert result["worst"].keys() == result["figures"].keys()
    for figure, worst in result["worst"].items():
        sign, _ = result["workload"]["targets"][figure]
        value = result["figures"][figure]
        assert worst <= value if sign == ">=" else worst >= value if sign == "<=" else True
        every = [*result["repeats"].get(figure, []), value]
        assert worst in every and not (sign == ">=" and min(every) < worst)


def check_result(result: dict, name: str, mode: str = "default", seed: int = 1) -> None:
    assert (result["bench"], result["mode"], result["seed"]) == (name, mode, seed)
    figures = set(result["figures"])
    if any("cannot be counted here" in note for note in result["notes"]):
        figures.add("syscalls_per_ready_batch")  # no seccomp filter may be made
    if name == "transparent" and "decode" not in result["workload"]["parts"]:
        figures |= {"decode_later_vs_plain"}
        figures |= {name for name in FIGURES["transparent"] if name.startswith("tf_")}
    if name == "peers" and shutil.which("ucx_perftest") is None:
        figures |= {name for name in FIGURES["peers"] if name.endswith("_vs_ucx_perftest")}
    if name == "peers" and any("this Forebay has no TLS" in note for note in result["notes"]):
        figures |= {"peer_tls_vs_ucx_perftest", "peer_tls_vs_link"}
    if name == "peers" and not Etcd.available()[0]:
        figures.add("etcd_lookup_us")
    if name == "fairness" and not Etcd.available()[0]:
        figures |= {"run_share_error", "cluster_share_error"}
    assert figures == FIGURES[name]
    assert all(type(v) in (int, float) and math.isfinite(v) for v in result["figures"].values())
    check_worst(result)
    check_cases(result["cases"])
    for case in result["cases"]:
        assert len(case["values"]) >= result["workload"]["repeats"]
    machine = result["machine"]
    assert machine["cpu"] and machine["cores"] >= 1 and machine["memory_available_bytes"] > 0
    assert {"kernel", "python", "load_1min", "cgroup_bytes"} <= machine.keys()
    assert result["commit"] and result["seconds"] > 0


needs_real_images = pytest.mark.skipif(
    not os.path.isdir(run.load_workload("accuracy", "quick")["folders"][0])
    and "FOREBAY_FASHION_MNIST" not in os.environ
    and importlib.util.find_spec("sklearn") is None,
    reason="neither dataset-fashion-mnist nor scikit-learn is installed",
)
needs_torchvision = pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed"
)
MARKS = {
    "epoch": [needs_fuse],
    "shards": [needs_fuse],
    "accelerate": [needs_fuse],
    "simulator": [needs_fuse],
    "tiers": [needs_fuse],
    "hang": [needs_fuse, needs_cluster],
    "freshness": [needs_fuse],
    "places": [needs_fuse],
    "drift": [needs_fuse],
    "tune": [needs_fuse],
    "control": [needs_etcd],
    "accuracy": [needs_real_images, needs_torchvision],
    "transparent": [needs_fuse],
    "peers": [needs_fuse, needs_cluster],
    "run_cluster": [needs_fuse, needs_cluster],
    "large": [needs_fuse],
    "mount_large": [needs_fuse],
}
BENCHES = [pytest.param(name, marks=MARKS.get(name, [])) for name in run.BENCHES]


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_writes_its_figures(name: str, tiny: Path, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "out.json"
    code = bench.main([name, "--json", str(file), "--seed", "5"])
    result = json.loads(file.read_text())
    check_result(result, name, seed=5)
    assert code == (1 if run.not_met(result) else 0)
    said = capsys.readouterr().out
    assert ("NOT MET" in said) == bool(run.not_met(result))
    for figure in result["figures"]:
        (line,) = (each for each in said.splitlines() if each.split()[:1] == [figure])
        assert "wanted" in line or "reported" in line
    left = [each.name for each in tiny.iterdir()]
    assert [each for each in left if not each.startswith("torchinductor")] == []  # PyTorch's own
    if name == "epoch":
        assert result["figures"]["later_source_reads"] == 0
    if name == "placement":
        assert result["figures"]["uncovered_share"] == 0
        assert min(case["rivals"].get("NoPFS", 1) for case in result["cases"]) > 0
    if name == "plan":
        assert result["figures"]["plan_bytes_per_sample"] < 24
    if name == "tiers":
        assert 0 < result["figures"]["tier_efficiency"] <= 1.01
        assert 0.8 < result["figures"]["source_bytes_vs_bound"] < 3.1  # three epochs of all
        for share in ("copied_share", "copied_share_busy", "copied_share_slow_disk"):
            assert result["figures"][share] == 1
    if name in ("epoch", "accelerate", "tiers"):
        assert any(case["rivals"] for case in result["cases"])


def test_overhead_quick_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = tmp_path / "out.json"
    assert bench.main(["overhead", "--quick", "--json", str(file)]) in (0, 1)
    check_result(json.loads(file.read_text()), "overhead", "quick")
    assert os.listdir(tmp_path) == ["out.json"]


def test_several_benches_in_one_file(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "BENCHES", ("overhead", "budget"))
    file = tmp_path / "all.json"
    assert bench.main(["all", "--json", str(file)]) in (0, 1)
    result = json.loads(file.read_text())
    assert result["figures"].keys() == FIGURES["overhead"] | FIGURES["budget"]
    assert {"machine", "commit", "seed", "mode", "worst"} <= result.keys()
    check_cases(result["cases"])
    for part, name in zip(result["benches"], ("overhead", "budget"), strict=True):
        check_result(part, name)


@pytest.mark.parametrize("mode", ["default", "quick", "full"])
@pytest.mark.parametrize("name", [*run.BENCHES, *run.GPU_BENCHES])
def test_workload_files(name: str, mode: str) -> None:
    work = run.load_workload(name, mode)
    assert work["targets"].keys() == FIGURES[name]
    assert all(sign in (">=", "<=", "=") for sign, _ in work["targets"].values())
    assert work["repeats"] >= (1 if mode == "quick" else 3)
    if name == "gpu" and mode == "default":
        assert work["workers"] == [8, 12, 16] and work["batch"] == 256
    optional = {"workers", "best_workers"}  # else they are looked for
    assert TINY[name].keys() <= work.keys() | optional
    if name == "epoch":
        assert list(work["first"]) == ["1", "5", "20"]
        if mode != "quick":  # PyTorch's workers are tried until more bring nothing
            assert not any("workers" in first for first in work["first"].values())
            assert work["cold"]["files"] == 6000 and work["mean_bytes"] == 112640
    if name == "accelerate":
        assert work["workers"] == [2, 4] and work["latency_ms"] == 5


def test_every_bench_is_registered() -> None:
    for name, about in run.REGISTRY.items():
        targets = run.load_workload(name, "default")["targets"]
        assert about["folders"] and about.get("front", {}).keys() <= targets.keys()
        assert importlib.util.find_spec(f"forebay_bench.{name}")
    assert {"overhead", "peers"} <= set(run.BENCHES) and run.GPU_BENCHES == ("gpu",)


def test_the_data_can_be_kept(tiny: Path) -> None:
    assert bench.main(["overhead", "--keep"]) in (0, 1)
    (kept,) = tiny.iterdir()
    assert len(list(kept.glob("large/*/*.bin"))) == 30


def test_a_bench_that_fails_leaves_nothing_and_says_so(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay_bench import overhead

    monkeypatch.setattr(overhead, "_small", lambda ctx, out: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        bench.main(["overhead", "--json", str(tmp_path / "out.json")])
    assert not (tmp_path / "out.json").exists()
    assert list(tiny.iterdir()) == []


def test_a_wrong_name_is_refused(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        bench.main(["nothing"])
    assert "nothing" in capsys.readouterr().err


def test_the_gpu_bench_wants_a_gpu(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    pytest.importorskip("PIL")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(NotImplementedError, match="no CUDA device: this bench needs one"):
        bench.main(["gpu"])
    assert list(tiny.iterdir()) == []


def test_a_measured_bound_replaces_the_words_of_the_workload(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from forebay_bench import accuracy

    monkeypatch.setattr(
        accuracy,
        "run",
        lambda ctx: measure.Outcome({"accuracy_difference": 0.1}, {"accuracy_difference": 0.2}),
    )
    file = tmp_path / "out.json"
    assert bench.main(["accuracy", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["workload"]["targets"] == {
        "accuracy_difference": ["<=", 0.2]
    }
    assert "wanted <= 0.2: met" in capsys.readouterr().out


def test_photo_like_images_are_the_same_each_time(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    from forebay_bench import decode_data

    sizes = set()
    for copy in ("a", "b"):
        total, quality = decode_data.make_jpegs(str(tmp_path / copy), 12, 6, 112640, 3)
        files = sorted((tmp_path / copy).glob("*/*.jpg"))
        assert len(files) == 12 and total == sum(f.stat().st_size for f in files)
        assert 80_000 < total / 12 < 150_000 and 80 <= quality <= 99
        assert len({f.read_bytes() for f in files}) == 6
        sizes |= {image.open(f).size for f in files}
    pairs = zip(*(sorted((tmp_path / c).glob("*/*.jpg")) for c in "ab"), strict=True)
    assert all(a.read_bytes() == b.read_bytes() for a, b in pairs)
    assert sizes <= set(decode_data.SIZES)


def test_the_commit_is_ours_wherever_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = run.commit()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path)]
    try:
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "other"], check=True)
    except OSError:
        pytest.skip("no git here")
    monkeypatch.chdir(tmp_path)
    assert run.commit().rstrip("+") == here.rstrip("+")


def test_recovery_is_when_the_rate_stays() -> None:
    limit, window = 100.0, 4
    assert drift.recovered_after([99.0] * 12, limit, window) == 0
    assert drift.recovered_after([50.0] * 5 + [95.0] * 8, limit, window) == 5 - 1  # the median's
    assert (
        drift.recovered_after([10.0, 100.0, 10.0, 10.0] * 3 + [99.0] * 20, limit, window) == 12 - 1
    )
    assert drift.recovered_after([200.0] * 4 + [50.0] * 20, limit, window) is None
    assert drift.recovered_after([89.0] * 12, limit, window) is None


@needs_fuse
def test_the_page_cache_has_the_size_of_its_group(tmp_path: Path) -> None:
    from forebay_bench import data

    paths = data.make_files(str(tmp_path / "files"), 200, 100_000, 1, sigma=0.1)
    total = sum(os.path.getsize(p) for p in paths)
    source = {}
    for share in (0.3, 2.0):
        try:
            group = page_cache.MemoryGroup()
        except OSError as error:
            pytest.skip(f"no memory cgroup here: {error}")
        try:
            with SlowFs(tmp_path / "files", cache=True) as mount:
                shown = [str(mount.path / os.path.relpath(p, tmp_path / "files")) for p in paths]
                reader = page_cache.CachedReader(
                    group, int(share * total), paths=shown, largest=200_000, batch=8, threads=4,
                    step_s=0,
                )  # fmt: skip
                try:
                    assert reader.epoch(1)[1] == total
                    mount.reset()
                    assert reader.epoch(2)[1] == total
                    source[share] = mount.stats()["bytes_read"]
                finally:
                    reader.close()
        finally:
            group.remove()
        assert not os.path.exists(group.folder)
    assert source[2.0] == 0
    assert source[0.3] > 0.6 * total


def test_variants_take_turns() -> None:
    turns: list[str] = []

    def variant(name: str, seconds: float) -> Any:
        return lambda: turns.append(name) or seconds

    times = measure.interleave({"a": variant("a", 1.0), "b": variant("b", 2.0)}, 3, lambda _: None)
    assert turns == ["a", "b"] * 3
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert measure.ratio_of_medians([1.0, 9.0, 2.0], [4.0, 4.0, 5.0]) == 2.0
    case = measure.Case("x", "s", [3.0, 1.0, 2.0])
    assert (case.value, case.spread) == (2.0, 1.0)
    assert measure.best_of({8: lambda: 2.0, 16: lambda: 1.0}, lambda _: None) == 16
