"""Programs see the same with and without Forebay: CPython's own tests, tools of every day, threads
and forks, programs that write, and faults in the middle. docs/transparent_list.md is the list.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import seed_count
from forebay.slowfs import SlowFs
from transparent.under import LIBRARY, SERVICE, FileService, plain_environment, run

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "transparent"
PYTHON = sys.executable
FEW_SEEDS = pytest.mark.parametrize("number", range(max(1, seed_count() // 4)))

pytestmark = pytest.mark.skipif(
    not (os.access(SERVICE, os.X_OK) and LIBRARY.exists()),
    reason="this build has no forebayd or no libforebay_posix.so",
)


# ---- tools


def make_tree(folder: Path) -> None:
    """A source tree as people have them: text, a git repository, a data base, links, odd names."""
    root = HERE.parent
    folder.mkdir()
    shutil.copytree(root / "src" / "base", folder / "base")
    shutil.copytree(root / "src" / "core", folder / "deep" / "er" / "core")
    rng = random.Random(1)
    (folder / "empty").touch()
    (folder / "with space and \u00e4").write_bytes(b"name")
    (folder / "large.bin").write_bytes(rng.randbytes(18 << 20))
    (folder / "run.sh").write_text('#!/bin/sh\necho it runs "$@"\n')
    (folder / "run.sh").chmod(0o755)
    (folder / "twin_a").write_bytes(rng.randbytes(5000))
    os.link(folder / "twin_a", folder / "twin_b")
    (folder / "link").symlink_to("base/rng.cc")
    (folder / "link_folder").symlink_to("deep/er")
    (folder / "link_nowhere").symlink_to("gone")
    with open(folder / "holes", "wb") as holes:
        holes.truncate(1 << 20)
        holes.seek(500_000)
        holes.write(b"in the middle")
    shell = plain_environment() | {
        "GIT_AUTHOR_DATE": "2001-01-01T00:00:00Z",
        "GIT_COMMITTER_DATE": "2001-01-01T00:00:00Z",
    }
    script = """
    git init -q repo && cd repo && git config user.email a@b && git config user.name n
    git config gc.auto 0
    cp -r ../base . && git add . && git commit -qm one
    cp -r ../deep . && git add . && git commit -qm two && git branch other
    rm base/rng.cc && echo more >> base/clock.h && git commit -qam three
    git repack -qad
    cp ../empty new && git add new && git commit -qm four
    cd .. && sqlite3 data.db "create table t(a integer primary key, b text);
      with recursive n(i) as (select 1 union all select i+1 from n where i < 3000)
      insert into t select i, hex(i * 7919) from n; create index i on t(b);"
    """
    done = run(["sh", "-ec", script], shell, folder)
    assert done.returncode == 0, done.stderr.decode()
    for base, folders, files in os.walk(folder):
        for name in files + folders:
            os.utime(os.path.join(base, name), (10**9, 10**9), follow_symlinks=False)
    run(["git", "-C", str(folder / "repo"), "status"], shell)  # its index knows the times


# Read the tree; all run in its folder, $OUT is an empty folder outside of it.
READERS = {
    "sha256sum": "find . -type f -print0 | sort -z | xargs -0 sha256sum",
    "tar": "tar cf - --sort=name . | sha256sum",
    "tar_file": "tar cf $OUT/x.tar base && tar tvf $OUT/x.tar && tar df $OUT/x.tar",
    "cp": "cp -a . $OUT/copy && diff -r --no-dereference . $OUT/copy && cd $OUT/copy && "
    "find . ! -name . -printf '%p %s %m %T@ %n %y %l\\n' | sort",
    "cp_one": "cp base/rng.h $OUT && cp -v --preserve=all twin_a twin_b run.sh holes $OUT && "
    "cd $OUT && stat -c '%n %s %a %h %Y' twin_a twin_b run.sh holes && stat -c '%n %s %a' rng.h",
    "find": "find . -printf '%p %s %m %T@ %C@ %i %n %U %G %y %l %b %D\\n' | sort",
    "stat": "find . -print0 | sort -z | xargs -0 stat -c '%n %A %a %b %B %d %D %f %g %h %i %N %o "
    "%s %t %T %u %w %Y %Z'",
    "stat_links": "stat -L -c '%n %i %s %h %F' link link_folder link_folder/core/placement.h; "
    "readlink -f link link_folder/../er; stat link_nowhere/x",
    "ls": "ls -laRi --time-style=full-iso",
    "du": "du -ab . | sort",
    "grep": "grep -rn 'namespace' . | sort",
    "wc": "wc */*.cc; cat base/*.h | md5sum; head -c 100 large.bin | od -c; tail -n 3 base/rng.cc",
    "diff": "cp -r base $OUT/base && echo x >> $OUT/base/rng.h; diff -r base $OUT/base; "
    "cmp large.bin base/rng.h; cmp large.bin large.bin && echo same",
    "dd": "dd if=large.bin bs=1M skip=3 count=5 iflag=fullblock status=none | md5sum; "
    "dd if=large.bin of=$OUT/part bs=64k status=none && cmp large.bin $OUT/part",
    "tests": "[ -r empty ] && [ ! -s empty ] && [ -x run.sh ] && [ ! -x twin_a ] && "
    "[ twin_a -ef twin_b ] && [ ! base/rng.h -ef base/rng.cc ] && [ -h link ] && "
    "[ ! -e link_nowhere ] && ./run.sh a b && sh run.sh c && sh < run.sh",
    "python": f"{PYTHON} -c \"import sys, zipfile, io; "
    "print(sum(map(len, open('base/rng.cc')))); "
    "print(sum(open('large.bin', 'rb').read()[::1000]))\"",
    "sort": "sort base/*.cc | uniq -c | sort -rn | head -50; awk 'END {print NR}' base/*.cc",
    "gzip": "gzip -nc large.bin | md5sum; xz -T1 -0 -c base/rng.cc | md5sum; split -b 3M large.bin "
    "$OUT/p. && cat $OUT/p.* | cmp - large.bin",
    "git_log": "cd repo && git log --stat && git show HEAD~1 | md5sum && git fsck --full",
    "git_status": "cd repo && git status && git diff HEAD~2 --stat && git ls-files -s",
    "git_clone": "git clone -q --no-hardlinks repo $OUT/c && cd $OUT/c && git log --oneline && "
    "git status --short && find . -name .git -prune -o -type f -print0 | sort -z | "
    "xargs -0 sha256sum && git checkout -q origin/other && git status --short",
    "sqlite": "sqlite3 -readonly data.db 'pragma integrity_check; select count(*), sum(a), "
    "max(b) from t; select a from t where b = hex(7919*5)'; sqlite3 data.db .dump | md5sum",
    "sqlite_plain": "sqlite3 data.db 'select count(*), sum(a) from t where b > 5'",
    "missing": "cat gone; cat base; ls nothing; cat base/rng.h/x; cat link_nowhere; "
    "cat link_folder/core/none",
}  # fmt: skip

# Change the tree.
WRITERS = {
    "shell": "echo new > fresh && cat fresh && echo more >> base/rng.h && tail -1 base/rng.h && "
    "mv base/rng.cc base/moved && cat base/moved | md5sum; cat base/rng.cc; rm twin_a; "
    "stat -c '%h %s' twin_b; cat twin_b | md5sum; ln -s fresh alias && cat alias; "
    "mv deep deeper && cat deeper/er/core/*.h | md5sum; cat deep/er/core/*.h; "
    "ln base/clock.h hard && stat -c %h base/clock.h hard && echo end >> hard && "
    "tail -1 base/clock.h",
    "replace": "cat base/owned.h | md5sum; cp base/status.h base/tmp; mv base/tmp base/owned.h && "
    "cmp base/owned.h base/status.h && sed -i s/forebay/lake/ base/status.h && "
    "md5sum base/status.h base/owned.h && truncate -s 100 large.bin && md5sum large.bin && "
    "touch -d @5 empty && stat -c %Y empty && chmod 600 run.sh && stat -c %a run.sh && "
    "dd if=/dev/zero of=twin_b bs=1 count=10 seek=3 conv=notrunc status=none && md5sum twin_b",
    "unpack": "tar cf - base | (mkdir x && cd x && tar xf -) && diff -r base x/base && "
    "cp -a base y && diff -r x/base y && rm -r x && mv y x && ls x && find x -type f | sort | "
    "xargs md5sum",
    "git": "cd repo && git checkout -q other && git status --short && cat base/rng.cc | md5sum; "
    "git checkout -q - && git checkout -q -b third && echo line >> base/status.h && git stash -q "
    "&& git status --short && git stash pop -q && git commit -qam five && git log --oneline && "
    "git merge -q other -m merged; git status --short; git reset -q --hard HEAD~1 && "
    "git gc -q --prune=now && git fsck && git log --oneline | wc -l && "
    "git clone -q . ../other && cd ../other && git log --oneline && git status",
    "sqlite": "sqlite3 data.db \"pragma journal_mode=wal; insert into t values(9999, 'x'); select "
    "count(*) from t; pragma wal_checkpoint(full); pragma journal_mode=delete; delete from t "
    "where a < 100; vacuum; select count(*), sum(a) from t; pragma integrity_check\" && "
    "sqlite3 -readonly data.db 'select count(*), sum(a), max(b) from t'",
}  # fmt: skip


def said(command: str, cwd: Path, environment: dict[str, str], out: Path) -> tuple[object, ...]:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    environment = environment | {
        "OUT": str(out),
        "GIT_AUTHOR_DATE": "2002-01-01T00:00:00Z",
        "GIT_COMMITTER_DATE": "2002-01-01T00:00:00Z",
        "GIT_CONFIG_NOSYSTEM": "1",
        "HOME": str(out),
    }
    done = run(["sh", "-c", command], environment, cwd)
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode()


needs_tools = pytest.mark.skipif(
    not all(map(shutil.which, ("git", "sqlite3", "tar", "xz"))), reason="git, sqlite3 or xz missing"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "tree"
    make_tree(folder)
    return folder


@needs_tools
def test_tools_that_read(tree: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    different = {}
    with FileService([tree]) as service:
        for name, command in READERS.items():
            expected = said(command, tree, plain_environment(), out)
            for turn in ("first", "second"):
                found = said(command, tree, service.environment(), out)
                if found != expected:
                    different[f"{name}, the {turn} time"] = (expected, found)
        assert service.copies() > 20
    assert not different


@needs_tools
@pytest.mark.parametrize("name", WRITERS)
def test_tools_that_write(name: str, tree: Path, tmp_path: Path) -> None:
    listing = (
        "find . -path ./repo/.git -prune -o -path ./other/.git -prune -o -type f -print0 | sort -z "
        "| xargs -0 sha256sum; find . -name .git -prune -o -printf '%p %m %y %l\\n' | sort"
    )
    data = tmp_path / "data"
    found = []
    for forebay_serves in (False, True):
        shutil.rmtree(data, ignore_errors=True)
        run(["cp", "-a", str(tree), str(data)], plain_environment())
        run(["git", "-C", str(data / "repo"), "status"], plain_environment())
        if not forebay_serves:
            found.append(said(WRITERS[name], data, plain_environment(), tmp_path / "out"))
        else:
            with FileService([data]) as service:
                environment = service.environment()
                run(["sh", "-c", "find . -type f | xargs cat"], environment, data)
                assert service.copies() > 20
                found.append(said(WRITERS[name], data, environment, tmp_path / "out"))
                under = said(listing, data, environment, tmp_path / "out")
        after = said(listing, data, plain_environment(), tmp_path / "out")
        found[-1] = (*found[-1], *after)
    assert found[0] == found[1]
    assert under == after


# ---- threads and forks


def data_folder(folder: Path, files: int, seed: int, most: int = 200_000) -> Path:
    rng = random.Random(seed)
    for i in range(files):
        path = folder / f"class{i % 3}" / f"{i:04}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.choice([0, 10, 4096, 30_000, most])))
    return folder


def test_sixteen_threads_and_forks(tmp_path: Path) -> None:
    data = data_folder(tmp_path / "data", 40, 3)
    (data / "large.bin").write_bytes(random.Random(4).randbytes(3 << 20))
    command = [PYTHON, str(PROGRAMS / "checksums.py"), str(data)]
    plain = run(command, plain_environment())
    assert plain.returncode == 0 and plain.stdout.count(b"\n") == 41
    with FileService([data], partial_bytes=1 << 20) as service:
        for _ in range(2):
            served = run(command, service.environment())
            assert (served.returncode, served.stdout, served.stderr) == (0, plain.stdout, b"")
        assert service.copies() >= 41


# ---- programs that write


def fuzz(root: Path, seed: int, calls: int, environment: dict[str, str]) -> list[str]:
    program = [PYTHON, str(PROGRAMS / "posix_fuzz.py"), str(root), str(seed)]
    shutil.rmtree(root, ignore_errors=True)
    Path(f"{root}_outside").unlink(missing_ok=True)
    root.mkdir()
    assert run([*program, "0"], plain_environment()).returncode == 0
    done = run([*program, str(calls)], environment, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().splitlines()


@pytest.mark.seeds
@FEW_SEEDS
def test_random_calls(number: int, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    plain = fuzz(root, number, 300, plain_environment())
    assert len(plain) > 150
    with FileService([root]) as service:
        served = fuzz(root, number, 300, service.environment())
        assert service.opens() > 0
    for number, (expected, found) in enumerate(zip(plain, served, strict=False)):
        if expected != found and number == len(plain) - 1:
            ends = [json.loads(expected), json.loads(found)]
            assert ends[0] == ends[1]
        assert expected == found, f"call {number}, after {plain[max(0, number - 5) : number]}"
    assert len(plain) == len(served)


# ---- faults


@pytest.mark.seeds
@pytest.mark.parametrize("number", range(seed_count()))
def test_program_or_service_killed(number: int, tmp_path: Path) -> None:
    """Either dies at any time: who is left, and who comes next, reads what is there."""
    rng = random.Random(number)
    data = data_folder(tmp_path / "data", 30, number)
    command = [PYTHON, str(PROGRAMS / "checksums.py"), str(data), "2", "1"]
    plain = run([*command[:3], "1"], plain_environment())
    with FileService([data], partial_bytes=100_000) as service:
        program = subprocess.Popen(
            command, env=service.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        time.sleep(rng.uniform(0, 0.4))
        kills_program = number % 2 == 0
        if kills_program:
            os.killpg(program.pid, signal.SIGKILL)
        else:
            service.kill()
        out, err = program.communicate(timeout=100)
        if not kills_program:
            assert (program.returncode, err) == (0, b"")
            assert out == plain.stdout
        served = run([*command[:3], "1"], service.environment())
        assert (served.returncode, served.stdout, served.stderr) == (0, plain.stdout, b"")


if "FOREBAY_SOAK" in os.environ:

    @pytest.mark.seeds
    def test_service_stopped(tmp_path: Path) -> None:
        """It costs a program one wait, not one a file."""
        data = data_folder(tmp_path / "data", 30, 7)
        command = "find . -type f | sort | xargs cat | md5sum"
        plain = run(["sh", "-c", command], plain_environment(), data)
        with FileService([data]) as service:
            os.kill(service.pid, signal.SIGSTOP)
            try:
                started = time.monotonic()
                served = run(["sh", "-c", command], service.environment(), data)
                assert (served.stdout, served.stderr) == (plain.stdout, b"")
                assert time.monotonic() - started < 25
            finally:
                os.kill(service.pid, signal.SIGCONT)


@pytest.mark.parametrize("cache_bytes", [1, 400_000])
def test_tier_full(cache_bytes: int, tmp_path: Path) -> None:
    data = data_folder(tmp_path / "data", 40, 5)
    (data / "large.bin").write_bytes(random.Random(4).randbytes(3 << 20))
    command = [PYTHON, str(PROGRAMS / "checksums.py"), str(data)]
    plain = run(command, plain_environment())
    with FileService([data], cache_bytes=cache_bytes, partial_bytes=1 << 20) as service:
        for _ in range(2):
            served = run(command, service.environment())
            assert (served.returncode, served.stdout, served.stderr) == (0, plain.stdout, b"")
        copies = service.cache / "copies"

        def held() -> int:
            total = 0
            for path in copies.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    total += 0 if path.is_symlink() else path.lstat().st_size
            return total

        until = time.monotonic() + 10  # what is removed is not waited for
        while held() > cache_bytes and time.monotonic() < until:
            time.sleep(0.01)
        assert held() <= cache_bytes


def test_disk_full(tmp_path: Path) -> None:
    """The cache's own disk is full, though the limit would allow more."""
    data = data_folder(tmp_path / "data", 40, 5)
    (data / "large.bin").write_bytes(random.Random(4).randbytes(3 << 20))
    command = [PYTHON, str(PROGRAMS / "checksums.py"), str(data)]
    plain = run(command, plain_environment())
    disk = tmp_path / "disk"
    disk.mkdir()
    if run(
        ["mount", "-t", "tmpfs", "-o", "size=3M", "forebay-test", str(disk)], plain_environment()
    ).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        try:
            service = FileService(
                [data], cache=disk / "cache", cache_bytes=1 << 30, partial_bytes=1 << 20
            )
        except RuntimeError as error:
            pytest.skip(f"tmpfs has no extended attributes of users here: {error}")
        with service:
            for _ in range(2):
                served = run(command, service.environment())
                assert (served.returncode, served.stdout, served.stderr) == (0, plain.stdout, b"")
            assert service.metric("forebay_files_full_total") > 0
    finally:
        run(["umount", "-l", str(disk)], plain_environment())


_usable, _reason = SlowFs.available()


@pytest.mark.skipif(not _usable, reason=f"needs slowfs: {_reason}")
def test_source_unmounted(tmp_path: Path) -> None:
    """What has no copy gives the source's error, what has one its bytes; and nothing else."""
    data = data_folder(tmp_path / "data", 40, 6)
    (data / "large.bin").write_bytes(random.Random(4).randbytes(3 << 20))
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    slow = SlowFs(data, mountpoint, read_ms=2, cache=True)  # else it cannot be mapped
    try:
        command = [PYTHON, str(PROGRAMS / "checksums.py"), str(mountpoint), "3", "5"]
        expected = {}
        for line in run([*command[:2], str(data)], plain_environment()).stdout.splitlines():
            name, value = line.decode().rsplit(" ", 1)
            expected[name] = value
        with FileService([mountpoint], partial_bytes=1 << 20) as service:
            program = subprocess.Popen(
                command, env=service.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            time.sleep(0.6)
            run(["fusermount3", "-u", "-z", str(mountpoint)], plain_environment())
            out, err = program.communicate(timeout=100)
            assert (program.returncode, err) == (0, b"")
            for line in out.decode().splitlines():
                name, *values = line.split(" ")
                for value in " ".join(values).replace("errno ", "errno_").split(" "):
                    assert value in (expected[name], "errno_2", "errno_107"), line
    finally:
        slow.close()
