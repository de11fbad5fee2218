"""Libraries that open files in C, in a loader's workers, under `forebay run`: the preload gives
them copies, and the source is read once. With accelerate(), too, which does not see such reads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from forebay.slowfs import SlowFs  # noqa: E402
from PIL import Image  # noqa: E402
from test_run import local, needs_library, run  # noqa: E402, F401 - a fixture

_usable, _reason = SlowFs.available()
needs_fuse = pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}")
COUNT = 12


def write_image(path: Path, i: int) -> None:
    pixels = np.random.default_rng(i).integers(0, 256, (40 + i, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, "PNG")


def write_h5(path: Path, i: int) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file["x"] = np.arange(i * 1000, dtype=np.int32).reshape(-1, 10)


# How a library is asked for, what its files are, and how it reads one.
READERS: dict[str, tuple[str, Callable[[Path, int], None], str]] = {
    "cv2": (
        "import cv2",
        write_image,
        "cv2.imread(path).tobytes()",
    ),
    "torchvision.io": (
        "import torch, torchvision.io as io; torch.ops.image.read_file",
        write_image,
        "io.read_image(path).numpy().tobytes()",
    ),
    "h5py": (
        "import h5py",
        write_h5,
        "h5py.File(path, 'r')['x'][:].tobytes()",
    ),
}

SCRIPT = """
import hashlib, json, os, sys
{asked}
import torch
from torch.utils.data import DataLoader, Dataset

class Files(Dataset):
    def __init__(self, folder):
        self.paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))
                      if name.endswith(".dat")]
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, i):
        path = self.paths[i]
        return i, hashlib.sha256({read}).hexdigest()

def as_list(items):
    return items

def main():
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(Files(sys.argv[2]), 4, shuffle=True, generator=generator, num_workers=2,
                        collate_fn=as_list)
    if sys.argv[1] == "accelerated":
        import forebay
        loader = forebay.accelerate(loader, memory="64M")
    print(json.dumps([[item for batch in loader for item in batch] for _ in range(3)]))

if __name__ == "__main__":
    main()
"""


@dataclass
class Trained:
    """A script, its data, and what it says of each pass without Forebay."""

    script: Path
    data: Path
    passes: list


@pytest.fixture(scope="module", params=READERS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    library = request.param
    tmp_path = tmp_path_factory.mktemp(library)
    asked, write, read = READERS[library]
    found = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=60, check=False
    )
    if found.returncode != 0:
        pytest.skip(f"no {library} here: {found.stderr.strip()[-200:]}")
    data = tmp_path / "data"
    data.mkdir()
    for i in range(1, COUNT + 1):
        write(data / f"{i:02}.dat", i)
    time.sleep(3.2)  # younger files may still be being written
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT).format(asked=asked, read=read))
    plain = subprocess.run(
        [sys.executable, str(script), "unmodified", str(data)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert plain.returncode == 0, plain.stderr
    passes = json.loads(plain.stdout)
    assert [sorted(i for i, _ in items) for items in passes] == [list(range(COUNT))] * 3
    return Trained(script, data, passes)


@needs_library
@needs_fuse
@pytest.mark.parametrize("how", ["unmodified", "accelerated"])
def test_reads_of_c_libraries_come_from_copies(
    trained: Trained,
    how: str,
    local: Path,  # noqa: F811
) -> None:
    size = sum(path.stat().st_size for path in trained.data.iterdir())
    with SlowFs(trained.data) as slow:
        done = run(
            "--source", str(slow.path), "--", sys.executable, str(trained.script), how,
            str(slow.path),
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == trained.passes
        assert f"{COUNT} files copied" in done.stderr
        # Three epochs, of two workers and perhaps an engine: each byte of the source once.
        assert slow.stats()["bytes_read"] == size
