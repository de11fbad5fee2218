"""The examples run as their users run them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("PIL")

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TRAIN = EXAMPLES / "imagenet" / "train.py"


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


# ---- the small ones, each on a folder of pictures


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made("images", tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _made("tfrecords", tmp_path_factory.mktemp("shards"))


def _made(kind: str, where: Path) -> Path:
    spec = importlib.util.spec_from_file_location("make_data", EXAMPLES / "make_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return Path(getattr(module, kind)(str(where), 96))


def _needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def _environment(tmp_path: Path, **more: str) -> dict[str, str]:
    tests = Path(__file__).resolve().parent
    path = os.pathsep.join(
        p for p in (str(tests / "shims"), str(tests), os.environ.get("PYTHONPATH")) if p
    )
    return {
        **os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path,
        "XDG_RUNTIME_DIR": str(tmp_path), "TF_CPP_MIN_LOG_LEVEL": "2", **more,
    }  # fmt: skip


def _said(command: list, environment: dict[str, str], cwd: Path) -> list[str]:
    """What an example printed; it must have trained."""
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "going on without" not in done.stderr and "unchanged" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    losses = [
        float(line.split("loss")[1].split()[0])
        for line in lines
        if line.startswith("epoch ") and "loss" in line
    ]
    assert len(losses) == 2 and losses[1] < losses[0], done.stdout + done.stderr
    return lines


def test_pytorch_imagefolder(tmp_path: Path, pictures: Path) -> None:
    command = [sys.executable, EXAMPLES / "pytorch_imagefolder.py", pictures, "--epochs", "2"]
    said = _said(command, _environment(tmp_path), tmp_path)
    # The reads of the first epoch are all that there are.
    table = [line.split() for line in said[-2:]]
    assert [row[6] for row in table] == ["96", "0"], said
    # Without the line, under `forebay run`: the same numbers.
    run_it = [sys.executable, "-m", "forebay.cli", "run", "--source", pictures, "--"]
    environment = _environment(tmp_path, TMPDIR=str(tmp_path))
    plain = _said([*run_it, *command, "--plain"], environment, tmp_path)
    assert [line.split()[:4] for line in plain] == [line.split()[:4] for line in said[:2]]


def test_lightning(tmp_path: Path, pictures: Path) -> None:
    _needs("lightning")
    command = [sys.executable, EXAMPLES / "lightning_fit.py", pictures, "--epochs", "2"]
    said = _said(command, _environment(tmp_path), tmp_path)
    assert [line.split()[6] for line in said[-2:]] == ["96", "0"], said


def test_torchrun(tmp_path: Path, pictures: Path) -> None:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        EXAMPLES / "torchrun_ddp.py", pictures, "--epochs", "2", "--workers", "1",
    ]  # fmt: skip
    said = _said(command, _environment(tmp_path), tmp_path)
    assert said[-2].split()[6] == "96", said  # of both ranks


_SRUN = """#!/bin/bash
# Two tasks of one node, as srun starts them.
for task in 0 1; do
  SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""


def test_slurm(tmp_path: Path, pictures: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(_SRUN)
    (tools / "scontrol").write_text("#!/bin/bash\necho 127.0.0.1\n")
    (tools / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = _environment(
        tmp_path, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}", SLURM_JOB_ID=str(os.getpid()),
        SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", SLURM_JOB_NODELIST="here",
        SLURM_SUBMIT_DIR=str(ROOT),
    )  # fmt: skip
    subprocess.run(["bash", "-n", EXAMPLES / "slurm.sh"], check=True)
    command = ["bash", EXAMPLES / "slurm.sh", pictures, "--epochs", "2", "--workers", "1"]
    said = _said(command, environment, tmp_path)
    assert said[-2].split()[6] == "96", said


def test_grain(tmp_path: Path, pictures: Path) -> None:
    _needs("grain")
    command = [sys.executable, EXAMPLES / "jax_grain.py", pictures, "--epochs", "2"]
    own = os.environ.get("PYTHONPATH", "")  # without torch: its workers are started anew
    _said(command, _environment(tmp_path, PYTHONPATH=own), tmp_path)


def test_tensorflow(tmp_path: Path, shards: Path) -> None:
    _needs("tensorflow")
    command = [sys.executable, EXAMPLES / "tensorflow_train.py", shards, "--epochs", "2"]
    own = os.environ.get("PYTHONPATH", "")
    _said(command, _environment(tmp_path, PYTHONPATH=own, TMPDIR=str(tmp_path)), tmp_path)
