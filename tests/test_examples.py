"""The examples run as their users run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")

ROOT = Path(__file__).resolve().parent.parent
TRAIN = ROOT / "examples" / "imagenet" / "train.py"


def run(*arguments: object, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(TRAIN), *(str(a) for a in arguments)],
        cwd=cwd, capture_output=True, text=True, timeout=240,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_imagenet_demo_trains_validates_and_reports(tmp_path: Path) -> None:
    said = run("--demo", cwd=tmp_path)
    assert "step 30/30" in said and "images/s" in said
    assert "epoch 2  validation accuracy" in said
    assert said.strip().splitlines()[-1]  # the loader's report
    assert (tmp_path / "checkpoint.pt").exists()


def test_imagenet_goes_on_inside_an_epoch(tmp_path: Path) -> None:
    first = run("--demo", "--max-steps", 14, cwd=tmp_path)
    assert "step 10/30" in first and "step 15/30" not in first
    second = run("--demo", "--resume", "checkpoint.pt", cwd=tmp_path)
    assert "resumed from checkpoint.pt: epoch 1, step 14" in second
    assert "step 15/30" in second and "step 30/30" in second
    assert "step 10/30" not in second and "epoch 0 " not in second


def test_imagenet_needs_a_folder(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(TRAIN)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--demo" in done.stderr
