"""Which of CPython's own tests are run with and without Forebay, and by which Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Some seconds altogether: these run in every make test.
SHORT = [
    "test_fileio", "test_file", "test_bufio", "test_mmap", "test_shutil", "test_glob",
    "test_genericpath", "test_posixpath", "test_stat", "test_fcntl",
    "test_fileinput", "test_univnewlines", "test_largefile", "test_gzip",
    "test_dbm_dumb", "test_pathlib", "test_os",
]  # fmt: skip
# These mostly wait, so they are run beside each other; in every make test, too.
WAITING = [
    "test_multiprocessing_fork", "test_subprocess", "test_io", "test_zipfile", "test_tarfile",
]  # fmt: skip
# Of those, what copies a file of 2.5 GB: make soak.
SLOW = ["test.test_largefile.TestCopyfile.*", "test.test_largefile.TestSocketSendfile.*"]
# With these it takes minutes: make soak.
LONG = [
    "test_tempfile", "test_lzma", "test_import", "test_posix", "test_multiprocessing_spawn",
    "test_bz2", "test_sqlite3", "test_select", "test_poll", "test_signal", "test_dbm",
    "test_mailbox", "test_filecmp",
    "test_linecache", "test_netrc", "test_zipimport", "test_runpy", "test_py_compile",
    "test_compileall", "test_configparser", "test_csv", "test_pickle", "test_shelve", "test_fork1",
    "test_wait3", "test_wait4", "test_popen", "test_pty", "test_concurrent_futures",
    "test_threading", "test_codecs", "test_array", "test_hashlib", "test_logging",
    "test_source_encoding", "test_cmd_line", "test_cmd_line_script", "test_venv", "test_site",
    "test_importlib", "test_eintr", "test_selectors", "test_asyncio",
]  # fmt: skip


def find() -> tuple[str | None, Path]:
    """A Python that has its own tests, and the folder of its library. Debian's first: its package
    has them all.
    """
    for python in ("/usr/bin/python3.11", getattr(sys, "_base_executable", sys.executable)):
        if not os.access(python, os.X_OK):
            continue
        asked = subprocess.run(
            [python, "-c", "import os, test.test_fileio; print(os.path.dirname(os.__file__))"],
            capture_output=True,
            text=True,
            check=False,
        )
        if asked.returncode == 0:
            return python, Path(asked.stdout.strip())
    return None, Path()


def there(tests: list[str], library: Path) -> list[str]:
    """Those of the tests that this Python has: some installations lack a few."""
    folder = library / "test"
    return [t for t in tests if (folder / f"{t}.py").exists() or (folder / t).is_dir()]
