"""Guards that notice: a figure that falls, a result that is old, a bench that is told to end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import forebay_bench as bench  # noqa: E402
from forebay.slowfs import SlowFs  # noqa: E402
from forebay_bench import check, ending, measure, run, torch_rival, tune  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
_usable, _reason = SlowFs.available()
needs_fuse = pytest.mark.skipif(not _usable, reason=f"no mount here: {_reason}")


# ---- NOT MET


@pytest.mark.parametrize(("value", "code"), [(0.9, 0), (0.7, 1)])
def test_a_figure_that_is_not_met_is_an_exit_code(
    value: float, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    from forebay_bench import overhead

    found = measure.Outcome({"memory_vs_memcpy": value, "small_samples_per_s": 2e6})
    monkeypatch.setattr(overhead, "run", lambda ctx: found)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert bench.main(["overhead"]) == code
    assert ("NOT MET: memory_vs_memcpy (overhead)" in capsys.readouterr().out) == bool(code)


def test_the_worst_repeat_is_the_worst_for_what_is_wanted() -> None:
    out = measure.Outcome()
    assert out.speedup("faster", [1.0, 2.0, 1.0], [4.0, 4.0, 6.0]) == 4.0
    assert out.median("smaller", [3.0, 1.0, 2.0]) == 2.0
    assert measure.worst_of(out.repeats["faster"], ">=", 2) == 2.0
    assert measure.worst_of(out.repeats["smaller"], "<=", None) == 3.0
    assert measure.worst_of([1.0, 0.5, 1.1], "=", 1.0) == 0.5
    assert measure.is_met(5.0, "<=", None) and not measure.is_met(5.0, "<=", 4.0)


def test_the_worst_set_up_is_the_figure() -> None:
    out = measure.Outcome()
    for ours, theirs in (([1.0, 1.0], [4.0, 6.0]), ([2.0, 1.0], [4.0, 2.0]), ([1.0], [9.0])):
        out.worst_speedup("faster", ours, theirs)
    assert out.figures["faster"] == 2.0 and sorted(out.repeats["faster"]) == [2, 2, 4, 6, 9]
    for values in ([1.0, 1.5], [3.0, 2.0, 9.0], [0.5]):
        out.worst_median("smaller", values)
    assert out.figures["smaller"] == 3.0
    assert measure.worst_of(out.repeats["smaller"], "<=", 1.0) == 9.0


# ---- PyTorch at its best


def test_workers_are_doubled_until_two_larger_numbers_bring_nothing() -> None:
    asked: list[int] = []

    def trial(count: int) -> float:
        asked.append(count)
        return {2: 9.0, 4: 5.0, 8: 4.0, 16: 3.99, 32: 4.5}[count]

    assert torch_rival.best_workers(trial, lambda _: None) == 16
    assert asked == [2, 4, 8, 16, 32]
    assert torch_rival.best_workers(trial, lambda _: None, counts=[2, 4]) == 4


def test_pytorchs_best_delivers_every_byte_through_persistent_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay_bench.data import make_files

    paths = make_files(str(tmp_path / "files"), 21, 3000, 1)
    with tempfile.TemporaryDirectory(prefix="fb-", dir="/tmp") as short:
        monkeypatch.setattr(tempfile, "tempdir", short)
        for kind in (torch_rival.TensorFolder, torch_rival.OpenedFolder):
            loader, sampler = torch_rival.best_loader(kind(str(tmp_path / "files")), 4, 2, 1)
            try:
                for epoch in range(2):
                    sampler.set_epoch(epoch)
                    got = [bytes(x.numpy()) for b in loader for x in torch_rival.samples_of(b)]
                    assert sorted(got) == sorted(Path(path).read_bytes() for path in paths)
            finally:
                torch_rival.stop_workers(loader)


def test_the_search_finds_the_grids_best_point() -> None:
    reads, buffers = [1, 2, 4, 8, 16], [10, 20, 40, 80]

    def rate(n: int, size: int) -> float:
        return min(n / 4, size / 20, 1.0)

    whole = {(n, size): rate(n, size) for n in reads for size in buffers}
    found = tune.search(reads, buffers, rate)
    assert len(found) < len(whole)
    assert tune.best_point(found) == tune.best_point(whole) == tune.Best(4, 20, 1.0)


# ---- make bench-check

ABOUT = {"workload": {}, "bounds": {"speed": [">=", 2, 6], "reads": ["=", 0, 0]}}


def judged(*runs: dict[str, float]) -> dict[str, str]:
    left = list(runs)
    found = check.judge("x", ABOUT, lambda _: (left.pop(0), "it broke"))
    assert not left
    return {each.name: each.outcome for each in found}


def test_a_lost_factor_is_noticed() -> None:
    good = {"speed": 5.0, "reads": 0.0}
    assert judged(good) == dict.fromkeys(("x.runs", "x.speed", "x.reads"), "passed")
    # Once may be the machine.
    assert judged({**good, "speed": 1.0}, good)["x.speed"] == "passed"
    found = judged({**good, "speed": 1.0}, {**good, "speed": 1.5})
    assert (found["x.speed"], found["x.reads"]) == ("failed", "passed")
    # A figure that is not there has not been met.
    assert judged({"speed": 5.0}, {"speed": 5.0})["x.reads"] == "failed"
    assert judged({}, {}) == {"x.runs": "failed"}


def test_a_bench_that_lacks_something_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.NEEDS, "fuse", lambda: (False, "no mount here"))
    (found,) = check.judge("x", {**ABOUT, "needs": ["fuse"]}, lambda _: ({}, ""))
    assert (found.name, found.outcome, found.message) == ("x.runs", "skipped", "no mount here")


def test_a_broken_bench_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """The whole way: a bound that nothing meets, and a bench that does not run."""
    real = check._read
    table = {"overhead": real("check.json")["overhead"]}
    table["overhead"]["bounds"] = {"memory_vs_memcpy": [">=", 1e6, 1]}
    monkeypatch.setattr(check, "_read", lambda name: table)
    report = tmp_path / "bench-check.xml"
    assert check.main(["--junit", str(report)]) == 1
    assert "FAIL  overhead.memory_vs_memcpy" in capsys.readouterr().out
    said = check_ran(tmp_path, "bench-check", "bench overhead\n")
    assert said.returncode == 1 and "overhead.memory_vs_memcpy failed" in said.stdout
    table["nothing"] = table.pop("overhead")
    assert check.main(["--junit", str(report)]) == 1
    assert "FAIL  nothing.runs" in capsys.readouterr().out
    assert check_ran(tmp_path, "bench-check", "bench overhead\n").returncode == 1


def test_the_bounds_are_wide_and_every_check_is_expected() -> None:
    table = run._read("check.json")
    assert list(table) == [
        "overhead", "epoch", "accelerate", "decode", "tiers", "hang", "jobs", "transparent",
        "peers",
    ]  # fmt: skip
    expected = (ROOT / "tests/expected_suites.txt").read_text().splitlines()
    for name, about in table.items():
        assert f"bench {name}" in expected
        work = run.load_workload(name, "check")
        wanted = run.load_workload(name, "default")["targets"]
        assert about["bounds"].keys() <= wanted.keys()
        assert set(about.get("needs", [])) <= check.NEEDS.keys()
        for figure, (sign, bound, typical) in about["bounds"].items():
            assert sign == wanted[figure][0] and work["targets"][figure] == [sign, bound]
            assert measure.is_met(typical, sign, bound)


# ---- tests that were skipped


def check_ran(folder: Path, report: str, expected: str, **variables: str) -> Any:
    (folder / "expected.txt").write_text(expected)
    command = [sys.executable, str(ROOT / "scripts/check_ran.py"), str(folder), report]
    env = {k: v for k, v in os.environ.items() if k != "FOREBAY_STRICT_SKIPS"} | variables
    return subprocess.run(
        [*command, "--expected", str(folder / "expected.txt")], env=env, text=True,
        capture_output=True, check=False,
    )  # fmt: skip


def test_an_unexpected_skip_fails(tmp_path: Path) -> None:
    found = [check.Finding("epoch.runs", "skipped", "no mount here"),
             check.Finding("overhead.runs", "passed", "")]  # fmt: skip
    check.write_junit(str(tmp_path / "bench-check.xml"), found)
    said = check_ran(tmp_path, "bench-check", "bench overhead\n")
    assert said.returncode == 1
    assert "SKIPPED  bench-check: epoch.runs no mount here" in said.stdout
    assert check_ran(tmp_path, "bench-check", "may-skip epoch.*\n").returncode == 0
    assert check_ran(tmp_path, "bench-check", "", FOREBAY_STRICT_SKIPS="0").returncode == 0


# ---- old results


class Repository:
    """A checkout with one bench and its result."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.write("bench/forebay_bench/benches.json", json.dumps(
            {"x": {"folders": ["src/x"], "front": {"speed": "how fast"}}}))  # fmt: skip
        marks = "before\n<!-- results -->\n<!-- /results -->\nafter\n"
        self.write("README.md", marks)
        self.write("docs/results/README.md", marks)
        self.write("src/x/x.cc", "0")
        self.git("init", "-q")
        self.commit()

    def git(self, *arguments: str) -> str:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        done = subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def commit(self, count: int = 1, file: str = "src/x/x.cc") -> str:
        for _ in range(count):
            path = self.folder / file
            self.write(file, (path.read_text() if path.exists() else "") + "+")
            self.git("add", "-A")
            self.git("commit", "-q", "-m", "more")
        return self.git("rev-parse", "HEAD")

    def result(self, commit: str, bench: str = "x", **more: Any) -> None:
        self.write(f"docs/results/{bench}.json", json.dumps({
            "bench": bench, "mode": "default", "commit": commit, "seconds": 1.0,
            "machine": {"cores": 2, "cpu": "c", "load_1min": 0.0},
            "workload": {"targets": {"speed": [">=", 2]}}, "figures": {"speed": 3.0},
            "worst": {"speed": 2.5}, **more}))  # fmt: skip

    def run(self, *arguments: str, **variables: str) -> Any:
        command = [sys.executable, str(ROOT / "scripts/update_results.py"), "--root"]
        env = {k: v for k, v in os.environ.items() if k != "FOREBAY_RESULTS_AGE"} | variables
        return subprocess.run(
            [*command, str(self.folder), *arguments], env=env, capture_output=True, text=True,
            check=False,
        )  # fmt: skip


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    if shutil.which("git") is None:
        pytest.skip("no git here")
    return Repository(tmp_path / "repository")


def test_an_old_result_must_be_marked(repository: Repository) -> None:
    repository.result(repository.git("rev-parse", "HEAD"))
    assert repository.run().returncode == 0
    readme = repository.folder / "README.md"
    assert "| how fast | `speed` | ≥ 2 | 3 | 2.500 |" in readme.read_text()
    assert repository.run("--check").returncode == 0
    repository.commit(60, "src/other/y.cc")  # of no concern
    repository.commit(40)
    assert repository.run("--check").returncode == 0
    repository.commit()
    said = repository.run("--check")
    assert said.returncode == 1
    assert "README.md: the result of x is old (41 commits since" in said.stderr
    assert repository.run().returncode == 0
    assert "| 3 *old* |" in readme.read_text()
    assert repository.run("--check").returncode == 0
    # A number that was changed by hand, in one place or the other.
    for page in (readme, repository.folder / "docs/results/README.md"):
        before = page.read_text()
        page.write_text(before.replace("| 3 *old* |", "| 9 *old* |"))
        assert repository.run("--check").returncode == 1
        page.write_text(before)


def test_a_result_of_a_changed_tree_or_of_nowhere_is_old(repository: Repository) -> None:
    for commit, why in ((repository.git("rev-parse", "HEAD") + "+", "the tree had changes"),
                        ("0" * 40, "is not in the history"),
                        ("unknown", "is not in the history")):  # fmt: skip
        repository.result(commit)
        said = repository.run("--check")
        assert said.returncode == 1 and why in said.stderr
        assert repository.run().returncode == 0
        assert "*old*" in (repository.folder / "README.md").read_text()
        assert repository.run("--check").returncode == 0


def test_the_simulators_page_has_the_figures_of_its_result(repository: Repository) -> None:
    folders = {"folders": ["src/x"]}
    repository.write("bench/forebay_bench/benches.json", json.dumps({"simulator": folders}))
    repository.write("docs/simulator.md", "<!-- results -->\n<!-- /results -->\n")
    cases = [{"name": "simulated / measured: slow", "value": 1.0158},
             {"name": "measured: slow", "value": 7.0}]  # fmt: skip
    repository.result(repository.git("rev-parse", "HEAD"), "simulator", cases=cases)
    assert repository.run("--check").returncode == 1
    assert repository.run().returncode == 0
    assert repository.run("--check").returncode == 0
    page = (repository.folder / "docs/simulator.md").read_text()
    assert "| slow | 1.016 |" in page and "7" not in page


def test_documents_do_not_make_a_tree_dirty(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of one bench is there when the next one runs."""
    monkeypatch.delenv("FOREBAY_COMMIT", raising=False)
    repository.write("bench/forebay_bench/run.py", "")
    commit = repository.commit()
    monkeypatch.setattr(run, "__file__", str(repository.folder / "bench/forebay_bench/run.py"))
    repository.result(commit)
    assert repository.run().returncode == 0
    assert run.commit() == commit
    repository.write("src/x/x.cc", "other")
    assert run.commit() == commit + "+"


def test_results_are_one_file_a_bench_and_whole(repository: Repository) -> None:
    assert "docs/results/x.json is missing" in repository.run("--check").stderr
    repository.result(repository.git("rev-parse", "HEAD"))
    assert repository.run().returncode == 0
    result = repository.folder / "docs/results/x.json"
    other = result.with_name("x_other_run.json")
    other.write_text(result.read_text())
    assert "x_other_run.json: a result of x; one file a bench" in repository.run("--check").stderr
    other.unlink()
    result.write_text(result.read_text().replace('"default"', '"quick"'))
    assert "a quick run" in repository.run("--check").stderr


def test_without_history_the_age_is_not_guessed(repository: Repository, tmp_path: Path) -> None:
    repository.result(repository.git("rev-parse", "HEAD"))
    assert repository.run().returncode == 0
    repository.commit(3)
    shallow = tmp_path / "shallow"
    url = f"file://{repository.folder}"
    subprocess.run(["git", "clone", "-q", "--depth", "1", url, str(shallow)], check=True)
    clone = Repository.__new__(Repository)
    clone.folder = shallow
    said = clone.run("--check")
    assert said.returncode == 1 and "git fetch --unshallow" in said.stderr
    assert clone.run("--check", FOREBAY_RESULTS_AGE="unchecked").returncode == 0
    clone.git("fetch", "-q", "--unshallow")
    assert clone.run("--check").returncode == 0
    # A copy without git: the numbers are still compared.
    shutil.rmtree(shallow / ".git")
    said = clone.run("--check")
    assert said.returncode == 0 and "age of results is not judged here" in said.stdout
    readme = shallow / "README.md"
    readme.write_text(readme.read_text().replace("| 3 |", "| 9 |"))
    assert clone.run("--check").returncode == 1


# ---- a bench that is told to end


def mounts(below: str) -> list[str]:
    with open("/proc/self/mounts") as file:
        return [line.split()[1] for line in file if line.split()[1].startswith(below)]


@pytest.fixture
def place() -> Iterator[str]:
    """The temporary folder of a bench; whatever happens, nothing stays of it."""
    folder = tempfile.mkdtemp(prefix="fb-", dir="/tmp")
    try:
        yield folder
    finally:
        for mount in mounts(folder):
            subprocess.run(["umount", "-l", mount], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def left_in(place: str) -> list[str]:
    """All but the file by which Python tries whether a folder is good for temporary files: whoever
    is ended just then leaves it, as a child did twice.
    """

    def is_probe(path: Path) -> bool:
        return len(path.name) == 8 and path.is_file() and path.read_bytes() in (b"", b"blat")

    return [path.name for path in Path(place).iterdir() if not is_probe(path)]


# What it says when mounts, workers and daemons are there.
BUSY = {
    "epoch": "looking for the best number of PyTorch workers",
    "transparent": "half fit, plain",
    "jobs": "1 processes",
}


@pytest.mark.parametrize("name", [
    pytest.param("epoch", marks=needs_fuse), pytest.param("transparent", marks=needs_fuse), "jobs",
])  # fmt: skip
def test_a_bench_that_is_terminated_leaves_nothing(name: str, place: str) -> None:
    mark = f"test-{os.getpid()}-{name}"
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay.cli", "bench", name, "--check"],
        env={**os.environ, "TMPDIR": place, "FOREBAY_TEST_MARK": mark}, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        said = ""
        for line in process.stderr:
            said += line
            if BUSY[name] in line:
                break
        assert BUSY[name] in said, said
        time.sleep(0.5)
        if name != "jobs":
            assert mounts(place)
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
        assert process.wait(60) == 128 + signal.SIGTERM
        assert mounts(place) == []
        assert left_in(place) == []
        assert marked(mark) == []
    finally:
        process.kill()
        process.wait()
        for pid in marked(mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass


def marked(mark: str) -> list[int]:
    """The processes that have our mark in their environment."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"FOREBAY_TEST_MARK={mark}".encode() in Path(f"/proc/{name}/environ").read_bytes():
                found.append(int(name))
        except OSError:
            pass
    return found


def test_a_scratch_folder_in_which_a_daemon_still_writes_goes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from forebay_bench import overhead

    found = measure.Outcome({"memory_vs_memcpy": 1.0, "small_samples_per_s": 2e6})
    real, overtaken = shutil.rmtree, iter(range(3))

    def remove(folder: str, ignore_errors: bool = False) -> None:
        real(folder, ignore_errors=ignore_errors)
        if next(overtaken, None) is not None:  # a daemon makes a file meanwhile
            os.mkdir(folder)
            Path(folder, "late").touch()

    monkeypatch.setattr(overhead, "run", lambda ctx: found)
    monkeypatch.setattr(run.shutil, "rmtree", remove)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert bench.main(["overhead"]) == 0
    assert os.listdir(tmp_path) == []


def test_what_was_there_before_is_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with ending.cleans_up():
        assert signal.getsignal(signal.SIGTERM) is not before
        child = subprocess.Popen(["sleep", "60"])
        with pytest.raises(ending.Terminated), ending.cleans_up():
            os.kill(os.getpid(), signal.SIGTERM)
        assert child.wait(10) != 0
    assert signal.getsignal(signal.SIGTERM) is before
    assert "FOREBAY_BENCH_RUN" not in os.environ


# ---- tests that failed beside others


def junit(path: Path, cases: dict[str, str]) -> None:
    """Of C++ tests; each with what it said where it failed, or nothing."""
    rows = "".join(
        f'<testcase name="{name}" status="{"fail" if said else "run"}">'
        + (f'<failure message=""/><system-out>{said}</system-out>' if said else "")
        + "</testcase>"
        for name, said in cases.items()
    )
    path.write_text(f"<testsuite>{rows}</testsuite>")


def second_try(folder: Path, **variables: str) -> Any:
    command = [sys.executable, str(ROOT / "scripts/second_try.py"), str(folder), "cpp-dev"]
    return subprocess.run(
        command, env={**os.environ, **variables}, text=True, capture_output=True, check=False
    )


def test_a_test_that_passes_alone_is_named(tmp_path: Path) -> None:
    junit(tmp_path / "cpp-dev.xml", {"A.late": "10 s were over", "A.fine": "", "B.fine": ""})
    assert second_try(tmp_path).stdout == "^(A\\.late)$\n"
    assert second_try(tmp_path, FOREBAY_SECOND_TRY="0").returncode == 1
    assert check_ran(tmp_path, "cpp-dev", "").returncode == 1, "nobody has tried again"
    junit(tmp_path / "again-cpp-dev.xml", {"A.late": ""})
    said = check_ran(tmp_path, "cpp-dev", "")
    assert "UNSTEADY  cpp-dev: A.late" in said.stdout
    assert "A.late failed" not in said.stdout
    junit(tmp_path / "again-cpp-dev.xml", {"A.late": "10 s were over"})
    assert "A.late failed" in check_ran(tmp_path, "cpp-dev", "").stdout


@pytest.mark.parametrize("said", [
    "WARNING: ThreadSanitizer: data race", "x.cc:3: runtime error: shift", "***Exception: SEGFAULT",
    "assert -11 == 0",
])  # fmt: skip
def test_what_may_not_happen_is_not_tried_again(tmp_path: Path, said: str) -> None:
    junit(tmp_path / "cpp-dev.xml", {"A.late": said, "A.fine": ""})
    found = second_try(tmp_path)
    assert found.returncode == 1 and not found.stdout


def test_many_unsteady_tests_are_a_failure(tmp_path: Path) -> None:
    late = {f"A.late{i}": "10 s were over" for i in range(4)}
    junit(tmp_path / "cpp-dev.xml", late)
    assert second_try(tmp_path).returncode == 1
    junit(tmp_path / "again-cpp-dev.xml", dict.fromkeys(late, ""))
    said = check_ran(tmp_path, "cpp-dev", "")
    assert said.returncode == 1 and "4 tests passed only at their second try" in said.stdout
