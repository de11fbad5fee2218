"""Libraries that people read data with, unmodified: the same under `forebay run` and through
forebay:// as plain, with the source read once.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
from forebay.slowfs import SlowFs

RUN = [sys.executable, "-m", "forebay.cli", "run", "--quiet"]

DATASETS = """
import datasets

datasets.disable_progress_bars()
table = datasets.load_dataset("parquet", data_files=f"{root}/table/*.parquet", split="train",
                              cache_dir=scratch)
tell(table["label"], table["text"])
streamed = datasets.load_dataset("parquet", data_files=f"{root}/table/*.parquet", split="train",
                                 streaming=True)
for row in streamed:
    tell(row["label"], row["text"])
saved = datasets.load_from_disk(f"{root}/saved")
for i in (3, 0, len(saved) - 1):
    tell(saved[i]["label"], saved[i]["text"])
tell(saved["text"])
"""
ZARR = """
import numpy
import zarr

group = zarr.open_group(f"{root}/group.zarr", mode="r")
tell(sorted(group.array_keys()))
for name in sorted(group.array_keys()):
    field = group[name]
    tell(field.shape, field.dtype, numpy.ascontiguousarray(field[:]).tobytes())
    for i in (5, 0, 17):
        tell(numpy.ascontiguousarray(field[i, 10:60]).tobytes())
"""
TENSORFLOW = """
if root.startswith("forebay:"):
    import forebay.tensorflow
import tensorflow as tf

names = sorted(tf.io.gfile.glob(f"{root}/records/*"))
tell(len(names))
for record in tf.data.TFRecordDataset(names):
    tell(record.numpy())
interleaved = tf.data.TFRecordDataset(names, num_parallel_reads=4)
tell(sorted(record.numpy() for record in interleaved))
files = tf.data.Dataset.list_files(f"{root}/images/*", shuffle=True, seed=1)
for data in files.map(tf.io.read_file, num_parallel_calls=4):
    tell(data.numpy())
"""
# Ends at once: some of them have threads that take their time, or crash, as the process ends.
PROGRAM = """
import hashlib, os, sys
root, scratch = sys.argv[1:]
digest = hashlib.sha256()
def tell(*what):
    for one in what:
        digest.update(one if isinstance(one, bytes) else repr(one).encode())
{}
print(digest.hexdigest(), flush=True)
os._exit(0)
"""
PROGRAMS = {"datasets": DATASETS, "zarr": ZARR, "tensorflow": TENSORFLOW}


def _make_table(data: Path, scratch: Path) -> None:
    import datasets

    datasets.disable_progress_bars()
    rng = numpy.random.default_rng(1)
    rows = {
        "label": rng.integers(0, 1000, 6000).tolist(),
        "text": [rng.bytes(120).hex() for _ in range(6000)],
    }
    whole = datasets.Dataset.from_dict(rows)
    (data / "table").mkdir()
    for i in range(3):
        whole.shard(3, i).to_parquet(data / "table" / f"{i}.parquet")
    whole.save_to_disk(data / "saved")


def _make_group(data: Path, scratch: Path) -> None:
    import zarr

    rng = numpy.random.default_rng(2)
    group = zarr.open_group(data / "group.zarr", mode="w")
    for name, dtype in (("wind", "f4"), ("pressure", "f8")):
        field = group.create_array(name, shape=(24, 80, 64), chunks=(4, 40, 32), dtype=dtype)
        field[:] = rng.standard_normal((24, 80, 64)).astype(dtype)


def _make_records(data: Path, scratch: Path) -> None:
    rng = numpy.random.default_rng(3)
    made = """
import sys
import tensorflow as tf
for i in range(3):
    with tf.io.TFRecordWriter(f"{sys.argv[1]}/records/{i}.tfrecord") as out:
        for n in range(50):
            out.write(bytes([i, n]) * (1000 + 100 * n))
"""
    (data / "records").mkdir()
    subprocess.run([sys.executable, "-c", made, str(data)], check=True, capture_output=True)
    (data / "images").mkdir()
    for i in range(40):
        (data / "images" / f"{i:02}.jpg").write_bytes(rng.bytes(20_000))


MAKERS = {"datasets": _make_table, "zarr": _make_group, "tensorflow": _make_records}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("libraries") / "data"
    folder.mkdir()
    for name, make in MAKERS.items():
        if importlib.util.find_spec(name) is not None:
            make(folder, folder.parent)
    time.sleep(3.2)  # younger files may still be being written
    return folder


@pytest.fixture
def slow(data: Path) -> Iterator[SlowFs]:
    with SlowFs(data, read_ms=0.2) as mount:
        yield mount


def digest(command: list[str], library: str, root: str, scratch: Path, env: dict[str, str]) -> str:
    """What a program has read, and in which order."""
    scratch.mkdir()
    done = subprocess.run(
        [*command, sys.executable, "-c", PROGRAM.format(PROGRAMS[library]), root, str(scratch)],
        capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, "HF_HOME": str(scratch), **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize("library", PROGRAMS)
def test_a_library_reads_the_same(
    library: str, slow: SlowFs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"no {library} here")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    root = str(slow.path)
    plain = digest([], library, root, tmp_path / "plain", {})
    once = slow.stats()["bytes_read"]
    # Twice with one cache: the second run reads nothing of what is in it.
    run = [*RUN, "--cache", str(tmp_path / "cache"), "--source", root, "--"]
    slow.reset()
    assert digest(run, library, root, tmp_path / "run", {}) == plain
    first = slow.stats()["bytes_read"]
    assert digest(run, library, root, tmp_path / "again", {}) == plain
    again = slow.stats()["bytes_read"] - first
    assert first <= once * 1.05
    assert again <= once * 0.05
    place = tmp_path / "x"
    place.mkdir(mode=0o700)
    slow.reset()
    environment = {"XDG_RUNTIME_DIR": str(place), "FOREBAY_CACHE": str(tmp_path / "urls")}
    assert digest([], library, f"forebay://{root}", tmp_path / "url", environment) == plain
    assert slow.stats()["bytes_read"] <= once * 1.05
