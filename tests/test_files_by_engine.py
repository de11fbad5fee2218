"""The tests of the unmodified way in once more, with the engine of forebayd as who reads and keeps
(FOREBAY_FILES_ENGINE=1, docs/decisions/0039-files-by-the-engine.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", ["test_files", "test_fsspec", "test_run", "test_mount"])
def test_by_the_engine(name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="fbe") as folder:  # short: sockets lie below it
        done = subprocess.run(
            [
                sys.executable, "-m", "pytest", str(HERE / f"{name}.py"), "-q", "-x",
                "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder}/t",
            ],
            env={
                **{k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")},
                "FOREBAY_FILES_ENGINE": "1",
            },
            cwd=HERE.parent, capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
