"""CPython's own tests have the same results with and without Forebay: files, and processes."""

from __future__ import annotations

import os
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transparent import cpython
from transparent.under import LIBRARY, SERVICE, FileService, plain_environment, run

# What depends on the machine's mood gets another try, both ways.
TRIES = 3

pytestmark = pytest.mark.skipif(
    not (os.access(SERVICE, os.X_OK) and LIBRARY.exists()),
    reason="this build has no forebayd or no libforebay_posix.so",
)


def outcomes(
    python: str,
    tests: list[str],
    folder: Path,
    environment: dict[str, str],
    at_once: int,
    ignored: Sequence[str],
) -> dict[str, str]:
    """Result of each test by name. They work in `folder`, and keep their files there."""
    folder.mkdir()
    report = folder.parent / f"{folder.name}.xml"
    how = [f"-j{at_once}"] if at_once > 1 else []
    how += [word for name in ignored for word in ("-i", name)]
    done = run(
        [
            python,
            "-m",
            "test",
            "--tempdir",
            str(folder),
            "--junit-xml",
            str(report),
            *how,
            *tests,
        ],
        environment | {"TMPDIR": str(folder)},
        folder,
        timeout=3000,
    )
    assert report.exists(), done.stdout.decode()[-3000:] + done.stderr.decode()[-3000:]
    found = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case} & {"error", "failure", "skipped"}
        found[case.get("name", "")] = " ".join(sorted(kinds)) or "passed"
    shutil.rmtree(folder, ignore_errors=True)
    return found


def check_cpython(
    tests: list[str],
    tmp_path: Path,
    young_ms: int,
    at_once: int = 1,
    ignored: Sequence[str] = (),
) -> None:
    python, library = cpython.find()
    if python is None:
        pytest.skip("no Python here has its own tests (package libpython3.11-testsuite)")
    tests = cpython.there(tests, library)
    data = tmp_path / "data"
    data.mkdir()
    plain: dict[str, str] = {}
    served: dict[str, str] = {}
    again = tests
    with (
        FileService([data, library], young_ms=young_ms) as service,
        ThreadPoolExecutor(1) as meanwhile,
    ):
        for i in range(TRIES):
            without = meanwhile.submit(
                outcomes,
                python,
                again,
                data / f"plain{i}",
                plain_environment(),
                at_once,
                ignored,
            )
            served |= outcomes(
                python, again, data / f"served{i}", service.environment(), at_once, ignored
            )
            plain |= without.result()
            different = {n for n in plain.keys() | served.keys() if plain.get(n) != served.get(n)}
            again = sorted({".".join(name.split(".")[1:2]) for name in different} & set(tests))
            if not again:
                break
        assert service.copies() > len(tests)
    assert not {n: (plain.get(n), served.get(n)) for n in different}
    assert len(plain) > 5 * len(tests)
    assert sum(result == "passed" for result in plain.values()) > len(plain) / 2
    # Each of them was run.
    assert {".".join(name.split(".")[1:2]) for name in plain} >= set(tests)


def test_files(tmp_path: Path) -> None:
    check_cpython(cpython.SHORT, tmp_path, young_ms=0, ignored=cpython.SLOW)


def test_processes_and_archives(tmp_path: Path) -> None:
    check_cpython(cpython.WAITING, tmp_path, young_ms=0, at_once=len(cpython.WAITING))


if "FOREBAY_SOAK" in os.environ:  # takes many minutes: make soak

    @pytest.mark.seeds
    @pytest.mark.parametrize("young_ms", [0, 3000])
    def test_all_of_files(tmp_path: Path, young_ms: int) -> None:
        check_cpython(cpython.SHORT + cpython.WAITING + cpython.LONG, tmp_path, young_ms)
