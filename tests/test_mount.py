"""`forebay mount`: a real mount, real processes, and nothing left behind."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forebay.commands.mount import mounted_kind
from forebay.slowfs import SlowFs
from transparent.table import PASSED_BY, table_of

_usable, _reason = SlowFs.available()
pytestmark = pytest.mark.skipif(not _usable, reason=f"nothing can be mounted here: {_reason}")

FOREBAY = [sys.executable, "-m", "forebay.cli"]
Mount = Callable[..., Path]


def forebay(*words: object, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*FOREBAY, *map(str, words)], capture_output=True, text=True, timeout=120, check=False,
        **more,  # type: ignore[call-overload]
    )  # fmt: skip


def processes(*words: str) -> list[int]:
    """Those whose command line has all the words."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if line and all(word in line for word in words):
            found.append(int(entry.name))
    return found


def gone(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    """Whether what the condition finds goes in time."""
    end = time.monotonic() + seconds
    while condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def served_by(mountpoint: Path) -> int:
    return int(os.getxattr(mountpoint, "user.forebay.mount"))


def digest(folder: Path) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for base, folders, files in os.walk(folder):
        for name in folders + files:
            path = Path(base, name)
            st = path.lstat()
            what: object = os.readlink(path) if path.is_symlink() else None
            if path.is_file() and not path.is_symlink():
                what = path.read_bytes()
            size = 0 if path.is_dir() else st.st_size
            shown = (st.st_mode, st.st_uid, st.st_mtime_ns, st.st_ino, st.st_nlink, size)
            found.append((str(path.relative_to(folder)), *shown, what))
    return sorted(found, key=lambda line: str(line[0]))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mount") / "source"
    rng = random.Random(1)
    for i in range(30):
        path = folder / f"class{i % 3}" / f"{i:03}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(rng.randbytes(rng.choice([0, 10, 4096, 30_000, 200_000])))
    (folder / "large.bin").write_bytes(rng.randbytes(20 << 20))
    (folder / "link").symlink_to("class0/000.bin")
    (folder / "link_folder").symlink_to("class1")
    os.link(folder / "class0" / "003.bin", folder / "twin")
    time.sleep(3.2)  # files that were just written are not copied
    return folder


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    mounted: list[Path] = []

    def make(source: Path, *options: object) -> Path:
        mountpoint = tmp_path / f"mount{len(mounted)}"
        mountpoint.mkdir()
        done = forebay("mount", source, mountpoint, *options)
        assert (done.returncode, done.stderr) == (0, ""), done
        mounted.append(mountpoint)
        return mountpoint

    yield make
    for mountpoint in mounted:
        if mounted_kind(mountpoint):
            assert forebay("unmount", "--lazy", mountpoint).returncode == 0
        assert not mounted_kind(mountpoint)
    assert gone(lambda: processes("forebay-mount", str(tmp_path)))


def test_the_same_as_the_source_until_it_is_unmounted(source: Path, mount: Mount) -> None:
    shown = mount(source)
    for _ in range(2):
        assert digest(shown) == digest(source)
    assert os.path.realpath(shown / "link") == str(shown / "class0/000.bin")
    assert os.statvfs(shown).f_blocks == os.statvfs(source).f_blocks
    for change in (
        lambda: (shown / "new").write_bytes(b""),
        lambda: (shown / "twin").write_bytes(b"x"),
        lambda: (shown / "twin").unlink(),
        lambda: (shown / "twin").chmod(0o600),
        lambda: (shown / "class0").rename(shown / "other"),
    ):
        with pytest.raises(OSError) as refused:
            change()
        assert refused.value.errno == errno.EROFS
    with pytest.raises(FileNotFoundError):
        (shown / "nothing").read_bytes()
    environment = Path(f"/proc/{served_by(shown)}/environ").read_bytes().split(b"\0")
    cache = next(v for v in environment if v.startswith(b"FOREBAY_FILES_CACHE=")).split(b"=", 1)[1]
    assert os.path.isdir(cache)
    done = forebay("unmount", shown)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not mounted_kind(shown) and list(shown.iterdir()) == []
    assert not processes("forebay-mount", str(shown))
    # The service stays some seconds for the next one; then its folder goes, too.
    assert gone(lambda: os.path.isdir(cache))


def test_a_second_mount_reads_from_copies(source: Path, mount: Mount, tmp_path: Path) -> None:
    expected = [line[-1] for line in digest(source)]
    cache = tmp_path / "cache"
    with SlowFs(source, read_ms=1) as slow:
        first = mount(slow.path, "--cache", cache)
        assert [line[-1] for line in digest(first)] == expected
        assert forebay("unmount", first).returncode == 0
        before = slow.stats()["bytes_read"]
        second = mount(slow.path, "--cache", cache)
        assert [line[-1] for line in digest(second)] == expected
        # Those with several names are not copied.
        twin = (source / "twin").stat().st_size
        assert slow.stats()["bytes_read"] - before <= 2 * twin
        assert forebay("unmount", second).returncode == 0


def test_a_block_of_a_large_file_is_one_request_of_the_source(
    source: Path, mount: Mount, tmp_path: Path
) -> None:
    """A buffer that does not begin on a page would cost two."""
    with SlowFs(source) as slow:
        shown = mount(slow.path, "--cache", tmp_path / "cache")
        before = slow.stats()["read"]
        assert (shown / "large.bin").read_bytes() == (source / "large.bin").read_bytes()
        assert 20 <= slow.stats()["read"] - before <= 24  # else 40
        assert forebay("unmount", shown).returncode == 0


def test_a_file_larger_than_the_cache_is_kept_in_part(
    source: Path, mount: Mount, tmp_path: Path
) -> None:
    size, piece = 20 << 20, 128 << 10
    data = (source / "large.bin").read_bytes()
    with SlowFs(source) as slow:
        shown = mount(slow.path, "--cache", tmp_path / "cache", "--cache-size", "10M")
        read = []
        for number in range(3):
            places = list(range(0, size, piece))
            random.Random(number).shuffle(places)
            before = slow.stats()["bytes_read"]
            fd = os.open(shown / "large.bin", os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            for at in places:
                assert os.pread(fd, piece, at) == data[at : at + piece]
            os.close(fd)
            read.append(slow.stats()["bytes_read"] - before)
        assert read[0] <= 1.6 * size and read[2] <= 0.6 * size, read
        assert forebay("unmount", shown).returncode == 0


def test_goes_on_without_its_service_and_shows_the_sources_errors(
    source: Path, mount: Mount, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    slow = SlowFs(source)
    try:
        shown = mount(slow.path, "--cache", cache)
        names = sorted(p.relative_to(source) for p in source.rglob("*.bin"))
        for name in names[:10]:
            assert (shown / name).read_bytes() == (source / name).read_bytes()
        (service,) = processes("forebayd", str(cache))
        os.kill(service, signal.SIGKILL)
        for name in names:
            assert (shown / name).read_bytes() == (source / name).read_bytes()
    finally:
        slow.close()
    with pytest.raises(OSError) as gone:
        (shown / "class0" / "never_seen").read_bytes()
    assert gone.value.errno == errno.ENOENT
    with pytest.raises(OSError) as gone:
        list((shown / "class2").iterdir())
    assert gone.value.errno == errno.ENOENT


@pytest.mark.skipif(os.geteuid() != 0, reason="copies are not written to by others than root")
def test_an_open_copy_is_read_at_the_source_while_its_disk_hangs(
    source: Path, mount: Mount, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test takes the place of the service's watch, and writes other bytes into the copy."""
    runtime = tmp_path / "r"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    cache = tmp_path / "cache"
    path = max(source.rglob("class*/*.bin"), key=lambda p: p.stat().st_size)
    name, expected = path.relative_to(source), path.read_bytes()
    first = mount(source, "--cache", cache)
    assert (first / name).read_bytes() == expected  # makes the copy
    assert forebay("unmount", first).returncode == 0
    shown = mount(source, "--cache", cache)  # the kernel has nothing of it
    fd = os.open(shown / name, os.O_RDONLY)
    folder = Path(f"/proc/{served_by(shown)}/fd")
    links = [os.readlink(link) for link in folder.iterdir() if link.is_symlink()]
    (copy,) = [Path(link) for link in links if "/copies/" in link]
    (service,) = processes("forebayd", str(cache))
    table = table_of(next(runtime.rglob("files-*.sock")))
    os.kill(service, signal.SIGSTOP)
    try:
        with open(copy, "r+b") as garbled:
            garbled.write(bytes(len(expected)))
        table[PASSED_BY] = 1
        assert os.pread(fd, 4096, 0) == expected[:4096]
        table[PASSED_BY] = 0
    finally:
        os.kill(service, signal.SIGCONT)
        os.close(fd)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_foreground(number: int, source: Path, tmp_path: Path) -> None:
    mountpoint = tmp_path / "mount"
    mountpoint.mkdir()
    process = subprocess.Popen([*FOREBAY, "mount", str(source), str(mountpoint), "--foreground"])
    try:
        end = time.monotonic() + 30
        while not mounted_kind(mountpoint):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.02)
        assert (mountpoint / "twin").read_bytes() == (source / "twin").read_bytes()
        process.send_signal(number)
        assert process.wait(30) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert not mounted_kind(mountpoint)
    assert not processes("forebay-mount", str(tmp_path))


def test_a_killed_mount_is_cleaned_up(source: Path, mount: Mount) -> None:
    shown = mount(source)
    os.kill(served_by(shown), signal.SIGKILL)
    assert gone(lambda: processes("forebay-mount", str(shown)))
    again = forebay("mount", source, shown)
    assert again.returncode == 2 and "forebay unmount" in again.stderr
    assert forebay("unmount", shown).returncode == 0
    assert list(shown.iterdir()) == []


def test_a_busy_mount_says_so(source: Path, mount: Mount) -> None:
    shown = mount(source)
    with open(shown / "large.bin", "rb"):
        done = forebay("unmount", shown)
        assert done.returncode == 1 and "--lazy" in done.stderr
    assert forebay("unmount", shown).returncode == 0


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_static_program(source: Path, mount: Mount, tmp_path: Path) -> None:
    """What nothing can be preloaded into."""
    code = tmp_path / "cat.c"
    code.write_text(
        "#include <fcntl.h>\n#include <unistd.h>\n"
        "int main(int c, char** v) { char b[9999]; ssize_t n; int f = open(v[c - 1], O_RDONLY);\n"
        "while ((n = read(f, b, sizeof b)) > 0) if (write(1, b, n) != n) return 1; return n != 0; }"
    )
    if subprocess.run(["cc", "-static", "-o", tmp_path / "cat", code], check=False).returncode:
        pytest.skip("static programs cannot be linked here")
    shown = mount(source)
    for name in ("large.bin", "class1/001.bin"):
        done = subprocess.run([tmp_path / "cat", shown / name], capture_output=True, check=True)
        assert done.stdout == (source / name).read_bytes()


def test_wrong_use_is_told(tmp_path: Path) -> None:
    source = tmp_path / "source"
    inside = source / "inside"
    inside.mkdir(parents=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    for words, says in (
        (("mount", source, tmp_path / "none"), "mkdir -p"),
        (("mount", tmp_path / "none", outside), "does not exist"),
        (("mount", source, inside), "outside of the source"),
        (("mount", source, outside, "--cache-size", "much"), "--cache-size"),
        (("unmount", outside), "nothing is mounted"),
        (("unmount", tmp_path / "none"), "no such folder"),
        (("unmount", "/proc"), "not Forebay's"),
    ):
        done = forebay(*words)
        assert done.returncode == 2 and says in done.stderr, done
        assert "Traceback" not in done.stderr
    done = forebay("mount", source, outside, env=os.environ | {"FOREBAY_MOUNT": "/none"})
    assert done.returncode in (1, 2) and "libfuse3-dev" in done.stderr
