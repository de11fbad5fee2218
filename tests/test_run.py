"""forebay run: output, exit code and signals are the program's own; its files come from copies."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import forebay
import pytest
from forebay import cli
from forebay._errors import ArgumentError, MissingError
from forebay.commands import run as run_command

RUN = [sys.executable, "-m", "forebay.cli", "run"]
try:
    run_command.library()
    _missing = ""
except MissingError as error:
    _missing = str(error)
needs_library = pytest.mark.skipif(bool(_missing), reason=_missing)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder that is old enough to be copied: files younger than three seconds may still be
    being written.
    """
    folder = tmp_path_factory.mktemp("old") / "data"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.bin").write_bytes(bytes([i]) * 5000)
    (folder / "more").mkdir()
    (folder / "more" / "written.bin").write_bytes(b"old")
    time.sleep(3.2)
    return folder


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where copies go, unless --cache says otherwise."""
    folder = tmp_path / "local"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    return folder


def wait_until_empty(folder: Path) -> None:
    """The service removes its folder a moment after its last client has left."""
    deadline = time.monotonic() + 20
    while os.listdir(folder):
        assert time.monotonic() < deadline, os.listdir(folder)
        time.sleep(0.05)


def run(*arguments: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*RUN, *arguments], capture_output=True, text=True, timeout=60, check=False, **options
    )  # type: ignore[call-overload]


WHERE = """
import os, sys
for path in sys.argv[1:]:
    fd = os.open(path, os.O_RDONLY)
    print(os.path.realpath(f"/proc/self/fd/{fd}"), len(os.read(fd, 100000)))
"""


@needs_library
def test_files_come_from_copies(old: Path, local: Path) -> None:
    done = run("--source", str(old), "--", sys.executable, "-c", WHERE, str(old / "1.bin"))
    path, size = done.stdout.split()
    assert (done.returncode, size) == (0, "5000")
    assert path.startswith(str(local / "forebay-")) and "/copies/" in path
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("forebay: 1 files copied to local disk")
    wait_until_empty(local)


@needs_library
def test_a_name_that_does_not_exist_is_no_failure(old: Path, local: Path) -> None:
    done = run("--source", str(old), "--", "sh", "-c", f"cat {old}/none {old}/none/1 {old}/1.bin")
    assert (done.returncode, len(done.stdout)) == (1, 5000)
    said = done.stderr.splitlines()[-1]
    assert said.startswith("forebay: 1 files copied to local disk")
    assert "failed" not in said and "left to the source" not in said
    wait_until_empty(local)


@needs_library
def test_data_folder_behind_a_link(old: Path, local: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(old)
    link = str(tmp_path / "link")
    # Found among the arguments; the program may use either name.
    done = run("--", sys.executable, "-c", WHERE, f"{link}/1.bin", f"{old}/2.bin", cwd=link)
    assert "no data folder" in done.stderr and done.returncode == 2
    code = "import sys; sys.argv.pop(1);" + WHERE.strip().replace("import os, sys", "import os")
    done = run("--", sys.executable, "-c", code, link, f"{link}/1.bin", f"{old}/2.bin")
    assert done.returncode == 0
    assert f"from the command's arguments: {link}, {old}" in done.stderr
    for line in done.stdout.splitlines():
        assert line.startswith(str(local))


@needs_library
@pytest.mark.parametrize("how", ["where it stands", "above", "below", "variable", "beside"])
def test_data_reached_through_a_link_from_outside(
    old: Path, local: Path, tmp_path: Path, how: str
) -> None:
    program = tmp_path / "program"
    program.mkdir()
    script = program / "train.py"
    script.write_text(WHERE)
    link, env, cwd, inside = tmp_path / "link", dict(os.environ), tmp_path, ""
    if how == "above":
        link.symlink_to(old.parent)
        inside = f"{old.name}/"
    elif how == "beside":
        link = program / "link"
        link.symlink_to(old)
        cwd = local
    else:
        link.symlink_to(old)
    if how == "variable":
        env["DATA"] = str(link)
        cwd = local
    path = f"{link}/{inside}1.bin" if how != "where it stands" else "link/1.bin"
    source = str(old.parent if how == "below" else old)
    done = run("--source", source, "--", sys.executable, str(script), path, cwd=cwd, env=env)
    assert (done.returncode, done.stdout.split()[1]) == (0, "5000"), done.stderr
    assert "/copies/" in done.stdout, done.stdout
    assert "forebay: 1 files copied to local disk" in done.stderr
    wait_until_empty(local)


def test_links_elsewhere_are_no_sources(old: Path, tmp_path: Path) -> None:
    from forebay.commands.run import linked_sources

    (tmp_path / "other").symlink_to("/usr")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "data").symlink_to(old)
    (tmp_path / "again").symlink_to(tmp_path / "data")
    given = [str(tmp_path / name) for name in ("other", "gone", "data", "again")]
    assert linked_sources([str(old)], ["python", *given]) == given[2:]


@needs_library
def test_cache_that_stays(old: Path, local: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for expected in ("8 files copied", "0 files copied"):
        done = run(
            "--source", str(old), "--cache", str(cache), "--cache-size", "1M", "--",
            "sh", "-c", f"cat {old}/*.bin | sha256sum",
        )  # fmt: skip
        wanted = hashlib.sha256(b"".join(bytes([i]) * 5000 for i in range(8))).hexdigest()
        assert (done.returncode, done.stdout.split()[0]) == (0, wanted)
        assert expected in done.stderr
    assert len(os.listdir(cache / "run" / "copies")) == 8


@needs_library
def test_a_cache_among_the_data_is_refused(old: Path, local: Path) -> None:
    done = run("--cache", str(old / "sub"), "--source", str(old), "--", "true")
    assert done.returncode != 0
    assert "lies in the data folder" in done.stderr and "--cache" in done.stderr
    assert not (old / "sub").exists()


READING = """
import os, sys
for folder, _, names in os.walk(sys.argv[1]):
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            sys.stdout.write(f"{name} {sum(file.read())} ")
"""


@needs_library
def test_what_others_have_copied_is_not_read_again(local: Path, tmp_path: Path) -> None:
    """`forebay cache warm`, a loader and a run share copies, in both directions."""
    data, cache = tmp_path / "data", str(tmp_path / "cache")
    data.mkdir()
    for i in range(20):
        (data / f"{i}.bin").write_bytes(bytes([1]) * (8000 + i))  # small ones share a file
    time.sleep(3.2)
    program = [sys.executable, "-c", READING, str(data)]
    command = ["--cache", cache, "--source", str(data), "--", *program]
    plain = subprocess.run(program, capture_output=True, text=True, check=True)
    assert cli.main(["cache", "warm", cache, str(data)]) == 0
    done = run(*command)
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    assert "0 B read from the source in 0 reads" in done.stderr
    # A file that changes is one new copy, for the loader, too.
    (data / "3.bin").write_bytes(bytes([1]) * 4000)
    time.sleep(3.2)
    done = run(*command)
    assert "3.bin 4000 " in done.stdout
    assert "read from the source in 1 reads" in done.stderr
    assert cli.main(["index", "--rebuild", str(data)]) == 0
    with forebay.DataLoader(data, 1, cache_dir=cache, memory="64M", epochs=1) as loader:
        sums = {int(batch[0].sum()) for batch in loader}
        assert loader.engine.metrics()["forebay_source_reads_total"] == 0
    assert sums == {4000, *(8000 + i for i in range(20) if i != 3)}


@needs_library
def test_a_cache_that_is_removed_is_made_anew(old: Path, local: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        # The service of the run before still waits for others.
        done = run("--source", str(old), "--cache", str(cache), "--", "cat", str(old / "1.bin"))
        assert (done.returncode, len(done.stdout)) == (0, 5000)
        assert "forebay: 1 files copied to local disk" in done.stderr
        assert len(os.listdir(cache / "run" / "copies")) == 1
        shutil.rmtree(cache)


@needs_library
@pytest.mark.parametrize("kind", ["foreign", "group", "all"])
def test_a_cache_that_others_can_write_to_is_not_used(old: Path, tmp_path: Path, kind: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    if kind != "foreign":
        cache.chmod(0o770 if kind == "group" else 0o777)
    elif os.geteuid() == 0:
        os.chown(cache, 65534, 65534)
    else:
        pytest.skip("NOT TESTED: only root can make a folder of another user")
    done = run("--source", str(old), "--cache", str(cache), "--", "cat", str(old / "1.bin"))
    assert (done.returncode, done.stdout) == (0, "\1" * 5000)
    assert "running without Forebay: " in done.stderr and str(cache) in done.stderr
    assert ("chown" if kind == "foreign" else f"chmod go-w {cache}") in done.stderr
    assert os.listdir(cache) == []


@needs_library
def test_quiet(old: Path, local: Path) -> None:
    done = run("--quiet", "--source", str(old), "cat", str(old / "3.bin"))
    assert (done.returncode, done.stderr, len(done.stdout)) == (0, "", 5000)


def test_exit_codes(old: Path, local: Path) -> None:
    assert run("--source", str(old), "--", "sh", "-c", "exit 7").returncode == 7
    assert run("--source", str(old), "--", "sh", "-c", "kill -TERM $$").returncode == 143
    gone = run("--source", str(old), "--", "no-such-program")
    assert gone.returncode == 127 and "no-such-program: no such program" in gone.stderr
    (local / "plain").write_text("x")
    refused = run("--source", str(old), "--", str(local / "plain"))
    assert refused.returncode == 126 and "Permission denied" in refused.stderr
    (local / "plain").unlink()


def test_what_users_get_wrong(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    cases = {
        (): "no command to run\ntry: forebay run --source",
        ("--source", "/no/such", "--", "true"): "/no/such: there is no such folder",
        ("--source", str(old / "1.bin"), "--", "true"): "is not a folder; give the folder",
        ("--source", "/", "--", "true"): "not the whole machine",
        ("--", "echo", "it's"): "try: forebay run --source /path/to/data -- echo 'it'\"'\"'s'",
        ("--source", str(old), "--cache-size", "much", "--", "true"): "--cache-size is 'much'",
        ("--sauce", "x", "--", "true"): "try: forebay run --help",
    }
    monkeypatch.chdir(tmp_path)
    for arguments, text in cases.items():
        assert cli.main(["run", *arguments]) == 2, arguments
        said = capfd.readouterr()
        assert said.out == "" and text in said.err, said.err


def test_folders_among_the_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here" / "out").mkdir(parents=True)
    (tmp_path / "train").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = run_command.found_sources
    assert found(["python", "t.py", "../train", "--out=out"]) == ["../train", "out"]
    # Not what the program itself stands in, and not the program.
    assert found(["../train", ".", "..", "/", str(tmp_path)]) == []
    sources, guessed = run_command.sources_of([], ["x", "../train"])
    assert (sources, guessed) == ([str(tmp_path / "train")], True)
    with pytest.raises(ArgumentError):
        run_command.as_source("/")


def test_program_runs_when_the_service_cannot(old: Path, local: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    env = {**os.environ, "FOREBAY_POSIX_LIBRARY": "/no/such.so"}
    done = run("--source", str(old), "--", "echo", "fine", env=env)
    assert (done.returncode, done.stdout) == (0, "fine\n")
    assert done.stderr.startswith("forebay: running without Forebay: ")
    assert done.stderr.count("\n") == 1
    env = {**os.environ, "FOREBAY_FILESD": "/no/such", "FOREBAYD": "/no/such"}
    done = run("--source", str(old), "--", "echo", "fine", env=env)
    assert (done.returncode, done.stdout) == (0, "fine\n")
    assert done.stderr.startswith("forebay: running without Forebay: ")
    done = run("--source", str(old), "--cache", str(tmp_path / "file"), "--", "echo", "fine")
    assert (done.returncode, done.stdout) == (0, "fine\n")
    assert str(tmp_path / "file") in done.stderr


KILLING = """
import os, signal, sys
def read(name):
    with open(os.path.join(sys.argv[1], name), "rb") as file:
        return len(file.read())
print(read("1.bin"))
view = os.environ["FOREBAY_FILES_CACHE"].encode()
folders = (b"=" + view, b"=" + os.path.dirname(view))
for pid in filter(str.isdigit, os.listdir("/proc")):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\\0")
    except OSError:
        continue
    if words[0].endswith(sys.argv[2].encode()) and any(w.endswith(folders) for w in words[1:]):
        os.kill(int(pid), signal.SIGKILL)
print(read("1.bin"), read("2.bin"))
sys.exit(6)
"""


UNWATCHED = """
import os, subprocess, sys
path = sys.argv[1]
def look():
    fd = os.open(path, os.O_RDONLY)
    return "/copies/" in os.path.realpath(f"/proc/self/fd/{fd}"), os.read(fd, 9)
print(look())
write = ["/bin/sh", "-c", 'printf other > "$0"', path]
subprocess.run(write, env={"PATH": "/usr/bin:/bin"}, check=True)
print(look(), os.stat(path).st_size)
path = os.path.join(os.path.dirname(os.path.dirname(path)), "1.bin")
print(look()[0])
"""


@needs_library
def test_what_a_program_without_the_library_writes_is_seen(old: Path, local: Path) -> None:
    path = str(old / "more" / "written.bin")
    done = run("--source", str(old), "--", sys.executable, "-c", UNWATCHED, path)
    assert done.stdout.splitlines() == ["(True, b'old')", "(False, b'other') 5", "True"]
    wait_until_empty(local)


ELSEWHERE = """
import os, subprocess, sys
os.chdir(sys.argv[1])
subprocess.run(["true"], cwd="/usr", check=True)
fd = os.open("1.bin", os.O_RDONLY)
print("/copies/" in os.path.realpath(f"/proc/self/fd/{fd}"))
"""


PLAIN = """
#include <stdio.h>
#include <stdlib.h>
int main(int argc, char** argv) {
  FILE* file = fopen(argv[1], "rb");
  const char* preload = getenv("LD_PRELOAD");
  printf("%d %s\\n", file == NULL ? -1 : fgetc(file), preload == NULL ? "none" : preload);
  if (file != NULL) fclose(file);
  return argc;
}
"""


def built(folder: Path, *options: str) -> str:
    """A program that reads a file."""
    program = folder / "program"
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no compiler is here")
    (folder / "program.cc").write_text(PLAIN)
    subprocess.run(
        [compiler, *options, "-o", str(program), str(folder / "program.cc")],
        check=True,
    )
    return str(program)


@needs_library
@pytest.mark.parametrize("kind", ["asan", "musl"])
def test_a_program_that_the_library_does_not_fit_runs_plain(
    kind: str, old: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASAN_OPTIONS", "detect_leaks=0")
    if kind == "asan":
        program = built(tmp_path, "-fsanitize=address")
    else:
        # As good as musl's, as far as its name goes.
        (loader,) = glob.glob("/lib64/ld-linux-*.so.*") + glob.glob("/lib/ld-linux-aarch64.so.1")
        (tmp_path / "ld-musl-x86_64.so.1").symlink_to(loader)
        program = built(tmp_path, f"-Wl,--dynamic-linker={tmp_path}/ld-musl-x86_64.so.1")
    path = str(old / "3.bin")
    done = run("--source", str(old), "--", program, path)
    assert (done.returncode, done.stdout) == (2, "3 none\n"), done.stderr
    assert done.stderr.startswith("forebay: WARNING: running without Forebay: ")
    assert done.stderr.count("\n") == 1
    # Started by one that it fits: by exec, by a search, and as a script's interpreter.
    (tmp_path / "script").write_text(f"#!{program}\n")
    (tmp_path / "script").chmod(0o755)
    code = """
import os, subprocess, sys
os.environ["PATH"] = os.path.dirname(sys.argv[1]) + ":" + os.environ["PATH"]
for command in ([sys.argv[1], sys.argv[2]], ["program", sys.argv[2]]):
    for close in (True, False):
        print(subprocess.run(command, close_fds=close).returncode, flush=True)
print(os.spawnvp(os.P_WAIT, "program", ["program", sys.argv[2]]), flush=True)
print(subprocess.run([sys.argv[3], sys.argv[2]]).returncode, flush=True)
print("/copies/" in os.path.realpath(f"/proc/self/fd/{os.open(sys.argv[2], 0)}"))
"""
    done = run(
        "--source", str(old), "--", sys.executable, "-c", code, program, path,
        str(tmp_path / "script"),
    )  # fmt: skip
    # The script's own name is its interpreter's first argument.
    expected = ["3 none", "2"] * 5 + [f"{ord('#')} none", "3", "True"]
    assert done.stdout.splitlines() == expected, done.stderr
    assert "forebay: WARNING: 6 programs ran without Forebay" in done.stderr
    wait_until_empty(local)


def test_a_sanitizer_that_is_preloaded_stays_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_command.why_not(["sh"]) == ""
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libasan.so.8")
    assert "libasan.so.8" in run_command.why_not(["sh"])


@needs_library
def test_the_folder_of_a_child_is_its_own(old: Path, local: Path) -> None:
    done = run("--source", str(old), "--", sys.executable, "-c", ELSEWHERE, str(old))
    assert done.stdout == "True\n"
    wait_until_empty(local)


@needs_library
def test_another_mount_namespace_has_files_of_its_own(
    old: Path, local: Path, tmp_path: Path
) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    other = tmp_path / "other"
    other.mkdir()
    (other / "1.bin").write_text("another")
    script = (
        'cat "$0"/1.bin | head -c 1; unshare -m sh -c \'mount --bind "$1" "$0"; cat "$0"/1.bin\''
    )
    script += ' "$0" "$1"'
    done = run("--source", str(old), "--", "sh", "-c", script, str(old), str(other))
    assert done.stdout == "\1another", done.stderr
    wait_until_empty(local)


@needs_library
def test_service_that_is_killed(
    old: Path, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    done = run("--source", str(old), "--", sys.executable, "-c", KILLING, str(old), "forebayd")
    assert (done.returncode, done.stdout) == (6, "5000\n5000 5000\n")
    assert done.stderr.startswith("forebay: the file service did not last to the end")
    assert os.listdir(local) == []
    assert not list(runtime.rglob("files-*"))


TELLING = """
import os, signal, sys, time
def told(number, frame):
    os.write(1, signal.Signals(number).name.encode() + b"\\n")
    if number != signal.SIGUSR1:
        sys.exit(5)
for name in ("SIGINT", "SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), told)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_program(old: Path, local: Path, number: signal.Signals) -> None:
    command = [*RUN, "--source", str(old), "--", sys.executable, "-c", TELLING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        # Each comes while we are at the one before: it may reach any of our threads.
        for _ in range(200):
            process.send_signal(signal.SIGUSR1)
            assert process.stdout.readline() == "SIGUSR1\n"
        process.send_signal(number)
        assert process.stdout.read() == f"{number.name}\n"  # once
        assert process.wait(30) == 5
    wait_until_empty(local)


def test_environment_of_the_program(
    old: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if _missing:
        pytest.skip(_missing)
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    other = "libnone.so.0"
    monkeypatch.setattr(run_command, "library", lambda: "/lib/ours.so")
    monkeypatch.setenv("LD_PRELOAD", f"/lib/ours.so {other}")
    env = run_command.environment({"A": "b"}, hook=True)
    assert (env["LD_PRELOAD"], env["A"]) == (f"/lib/ours.so:{other}", "b")
    assert env["FOREBAY_HOOK"] == "1"
    assert "FOREBAY_HOOK" not in run_command.environment({}, hook=False)
    monkeypatch.delenv("LD_PRELOAD")
    for options, hook in (((), "1"), (("--no-hook",), None)):
        done = run("--source", str(old), *options, "--", sys.executable, "-S", "-c", code)
        told = json.loads(done.stdout)
        assert told.get("FOREBAY_HOOK") == hook
        assert told["FOREBAY_FILES_SOURCES"] == str(old)
        assert told["LD_PRELOAD"].endswith(run_command.LIBRARY)


EPOCHS = """
import sys, zlib
import torch
from torch.utils.data import DataLoader, Dataset

class Files(Dataset):
    def __init__(self, root):
        self.paths = [f"{root}/{i}.bin" for i in range(8)]
    def __len__(self):
        return 8
    def __getitem__(self, i):
        with open(self.paths[i], "rb") as file:
            return zlib.crc32(file.read())

torch.manual_seed(1)
loader = DataLoader(Files(sys.argv[1]), 2, shuffle=True, num_workers=int(sys.argv[2]))
print([batch.tolist() for _ in range(3) for batch in loader], torch.rand(1).item())
"""


@needs_library
def test_unmodified_training_is_the_same(old: Path, local: Path) -> None:
    pytest.importorskip("torch")
    program = [sys.executable, "-c", EPOCHS, str(old), "2"]
    plain = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    done = run("--source", str(old), "--", *program)
    assert (done.returncode, done.stdout) == (0, plain.stdout)
    # All eight were read once, though only two workers asked, and three epochs were read.
    assert "8 files copied" in done.stderr and "in 8 reads" in done.stderr
