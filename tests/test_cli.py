"""The command line as a newcomer meets it: real processes, exit codes, words."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from importlib import metadata
from pathlib import Path

import forebay
import pytest
from forebay import _forebay, cli
from forebay.commands import doctor


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for label in ("cat", "dog"):
        folder = tmp_path / "data" / label
        folder.mkdir(parents=True)
        for i in range(30):
            (folder / f"{i:03}.bin").write_bytes(bytes([i]) * (1000 + 10 * i))
    return tmp_path / "data"


def forebay_command(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forebay.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    for command in ("demo", "doctor", "index", "bench"):
        assert f"\n  {command} " in out
    assert "examples:" in out


@pytest.mark.parametrize("command", ["index", "doctor", "demo"])
def test_help_of_a_command_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert f"forebay {command}" in out
    assert "examples:" in out
    assert "--no-fuse" not in out
    assert call(capsys, "help", command) == (0, out, "")


def test_the_package_has_no_benches_and_no_test_code() -> None:
    files = [str(file) for file in metadata.files("forebay") or []]
    assert "forebay/cli.py" in files
    assert [file for file in files if re.search("bench|testing|open_loop", file)] == []


def test_bench_without_the_source_tree_says_where_benches_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "forebay_bench", None)
    code, out, err = call(capsys, "bench", "epoch")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert "come with the source tree" in err and "make bench NAME=epoch" in err


def test_commands_of_the_package_need_nothing_beside_it() -> None:
    code = (
        "import sys; sys.modules['forebay_bench'] = sys.modules['forebay_testing'] = None; "
        "import forebay.cli, forebay.commands.demo.command, forebay.commands.doctor"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_from_a_process() -> None:
    done = forebay_command("--version")
    assert done.returncode == 0
    assert done.stdout.startswith(f"forebay {forebay.__version__}")
    assert done.stderr == ""


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys)
    assert code == 2
    assert "commands:" in out


def test_mistyped_command_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "docter")
    assert code == 2
    assert "'docter'" in err and "forebay doctor" in err
    assert len(err.splitlines()) <= 2


def test_a_path_for_a_command_is_explained(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    code, _, err = call(capsys, data)
    assert code == 2
    assert f"forebay doctor {data}" in err


@pytest.mark.parametrize(
    ("command", "options"), [("index", []), ("index", ["--verify"]), ("doctor", [])]
)
def test_mistyped_path(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, options: list[str]
) -> None:
    code, out, err = call(capsys, command, tmp_path / "dta", *options)
    assert code == 2
    assert str(tmp_path / "dta") in err and "does not exist" in err
    assert len(err.splitlines()) <= 2
    assert "Traceback" not in err and out == ""


def test_bad_options_exit_2(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    assert call(capsys, "index", data, "--format", "zip")[0] == 2
    assert call(capsys, "doctor", data, "--workers", "0")[0] == 2
    assert call(capsys, "doctor", data, "--memory", "much")[0] == 2
    assert call(capsys, "demo", "--files", "x")[0] == 2
    code, _, err = call(capsys, "index", data, "--extensions", "jpg")
    assert code == 2
    assert ".jpg" in err


def test_index_says_what_it_found_and_where_it_saved_it(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> None:
    code, out, _ = call(capsys, "index", data)
    assert code == 0
    assert "60 samples" in out and "2 classes" in out and "listed in" in out
    assert str(tmp_path / "cache") in out
    assert "up to date" in call(capsys, "index", data)[1]
    assert "listed in" in call(capsys, "index", data, "--rebuild")[1]


def test_index_saves_where_the_loader_looks(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    (data / "cat" / "photo.JPG").write_bytes(b"x")
    assert call(capsys, "index", data, "--extensions", "JPG,png")[0] == 0
    catalog, rebuilt, _ = forebay.Catalog.open(str(data), "", [".jpg", ".png"])
    assert not rebuilt
    assert len(catalog) == 1


def test_index_into_a_named_file(
    capsys: pytest.CaptureFixture[str], data: Path, tmp_path: Path
) -> None:
    file = tmp_path / "my.catalog"
    assert call(capsys, "index", data, "-o", file)[0] == 0
    assert len(forebay.Catalog.load(str(file))) == 60
    assert not (tmp_path / "cache").exists()
    other = tmp_path / "other"
    other.mkdir()
    (other / "a").write_bytes(b"a")
    code, _, err = call(capsys, "index", other, "-o", file, "--verify")
    assert code == 2
    assert str(file) in err and str(data) in err


def test_verify_finds_what_changed(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    assert call(capsys, "index", data, "--verify")[0] == 0
    os.truncate(data / "cat" / "007.bin", 10)
    (data / "dog" / "009.bin").unlink()
    code, out, _ = call(capsys, "index", data, "--verify")
    assert code == 1
    assert "2 problems" in out
    assert f"{data / 'cat' / '007.bin'} has 10 bytes" in out
    assert f"{data / 'dog' / '009.bin'} is gone" in out
    assert "--rebuild" in out
    assert call(capsys, "index", data, "--rebuild", "--verify")[0] == 0


def test_verify_sees_a_new_file(capsys: pytest.CaptureFixture[str], data: Path) -> None:
    assert call(capsys, "index", data)[0] == 0
    (data / "dog" / "new.bin").write_bytes(b"new")
    code, out, _ = call(capsys, "index", data, "--verify")
    assert code == 1
    assert str(data / "dog") in out


def test_truncated_tar(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    shard = folder / "a.tar"
    with tarfile.open(shard, "w") as tar:
        for i in range(8):
            info = tarfile.TarInfo(f"{i:03}.bin")
            info.size = 3000
            tar.addfile(info, io.BytesIO(bytes(3000)))
    code, out, _ = call(capsys, "index", folder, "--verify")
    assert code == 0
    assert "8 samples" in out
    os.truncate(shard, 9000)
    code, out, _ = call(capsys, "index", folder, "--verify")
    assert code == 1
    assert str(shard) in out
    code, _, err = call(capsys, "index", folder, "--rebuild")
    assert code == 1
    assert str(shard) in err and "Traceback" not in err


def test_verify_of_one_shard(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w") as tar:
        info = tarfile.TarInfo("0.bin")
        info.size = 100
        tar.addfile(info, io.BytesIO(bytes(100)))
    assert call(capsys, "index", shard)[0] == 0
    assert call(capsys, "index", shard, "--verify")[0] == 0


def test_doctor_without_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "doctor")
    assert code == 0
    for word in ("cores", "memory", "cgroup", "budget", "PyTorch", "io_uring", "FUSE", "UCX",
                 "etcd", "libjpeg", "libcurl"):  # fmt: skip
        assert word in out


def test_doctor_measures_the_transport() -> None:
    for kind, said in (("tcp", r"tcp$"), ("tls", r"tls 1\.3, OpenSSL 3")):
        link = doctor.measure_transport(kind, 4096, 200)
        assert re.match(said, link.transport)
        assert link.bytes == 4096 and link.bytes_per_s > 0 and link.round_trip_s > 0
    parts = {part.name: part for part in doctor.parts()}
    assert parts["peers"].state == parts["TLS of peers"].state == "works", parts


def test_doctor_measures_ucx() -> None:
    if not Path(_forebay.__file__).with_name("libforebay_ucx.so").exists():
        pytest.skip("built without UCX")
    assert Path(_forebay.__file__).with_name("libforebay_ucx_first.so").exists()
    link = doctor.measure_transport("ucx", 4096, 200)
    assert re.match(r"ucx \d+\.\d+\.\d+ \(\w", link.transport)
    assert link.bytes == 4096 and link.bytes_per_s > 0 and link.round_trip_s > 0
    part = next(p for p in doctor.parts() if p.name == "UCX")
    assert part.state == "works" and "/s" in part.detail, part


def test_doctor_says_why_there_is_no_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path(_forebay.__file__).with_name("libforebay_ucx.so").exists():
        pytest.skip("built without UCX")
    monkeypatch.setenv("FOREBAY_UCX_LIBRARY", "/nonexistent/libforebay_ucx.so")
    part = next(p for p in doctor.parts() if p.name == "UCX")
    assert part.state == "missing" and "libucx0" in part.detail, part


@pytest.mark.parametrize("memory", [None, "20K"])
def test_doctor_on_a_small_folder(
    capsys: pytest.CaptureFixture[str], data: Path, memory: str | None
) -> None:
    options = ["--memory", memory] if memory else []
    code, out, err = call(capsys, "doctor", data, "--workers", "6", *options)
    assert code == 0, err
    assert "60 samples" in out
    assert "PyTorch with 6 workers" in out
    assert "Forebay, first epoch" in out and "Forebay, later epochs" in out
    assert f"forebay.DataLoader({str(data)!r}" in out
    assert ("from storage meanwhile" in out) == (memory is not None)


def test_doctor_on_one_file_and_on_shards(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "only.bin").write_bytes(b"only")
    assert call(capsys, "doctor", folder)[0] == 0
    shard = tmp_path / "shards" / "a.tar"
    shard.parent.mkdir()
    with tarfile.open(shard, "w") as tar:
        for i in range(40):
            info = tarfile.TarInfo(f"{i:03}.bin")
            info.size = 3000
            tar.addfile(info, io.BytesIO(bytes(3000)))
    code, out, _ = call(capsys, "doctor", shard.parent)
    assert code == 0
    assert "40 samples" in out


def test_doctor_says_when_files_are_empty(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "empty_files"
    folder.mkdir()
    for i in range(5):
        (folder / str(i)).touch()
    assert call(capsys, "doctor", folder)[0] == 0


def test_interrupt_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "forebay.cli",
            "demo",
            "--no-fuse",
            "--files",
            "5000",
            "--out",
            str(tmp_path),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    end = time.monotonic() + 30
    while not list(tmp_path.glob("forebay-demo-*/data/*/*")) and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in err and "Traceback" not in err
    assert not list(tmp_path.glob("forebay-demo-*"))


def test_closed_pipe_is_no_traceback() -> None:
    done = subprocess.run(
        f"{sys.executable} -m forebay.cli doctor | head -1",
        shell=True, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", [["policy", "set"], ["policy", "check"], ["tune", "replay"]], ids=" ".join
)
def test_a_mistyped_file_is_named_with_a_remedy(words, tmp_path, capsys) -> None:
    path = str(tmp_path / "mistyped")
    assert cli.main([*words, path]) != 0
    said = capsys.readouterr().err
    assert path in said and ";" in said and "Errno" not in said
