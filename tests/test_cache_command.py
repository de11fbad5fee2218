"""``forebay cache``: real processes over folders that real jobs filled."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import forebay
import pytest
from test_run import needs_library, run


def cache_command(*arguments: object, answer: str | None = None) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "forebay.cli", "cache", *map(str, arguments)],
        capture_output=True, text=True, timeout=120, check=False, input=answer,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def warm(folder, tmp_path: Path) -> Path:
    code, text = cache_command("warm", tmp_path / "cache", folder.root, "--size", "1G")
    assert code == 0, text
    assert f"61 of 61 samples in {tmp_path / 'cache'}" in text
    return tmp_path / "cache"


def damage(cache: Path) -> None:
    (segment,) = cache.rglob("*.seg")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)


def test_warm_then_train_without_the_source(folder, warm):
    with forebay.DataLoader(folder.root, 4, memory="8M", cache_dir=warm, epochs=1) as loader:
        for batch in loader:
            batch.release()
        assert loader.engine.metrics()["forebay_source_reads_total"] == 0


def test_warm_with_little_memory_or_room(large_folder, tmp_path):
    code, text = cache_command("warm", tmp_path / "a", large_folder.root, "--memory", "8M")
    assert code == 0, text
    assert "211 of 211 samples" in text
    code, text = cache_command("warm", tmp_path / "b", large_folder.root, "--size", "4M")
    assert code == 0, text
    assert "raise --size" in text


def test_ls(folder, warm):
    code, text = cache_command("ls", warm)
    assert code == 0, text
    lines = text.splitlines()
    assert lines[0] == str(warm)
    assert lines[2].split()[:2] == [str(folder.root), "61"]
    assert lines[2].endswith("just now")
    assert "61 samples" in lines[3]
    assert "of 1.0 GiB" in lines[3]
    assert "nobody now" in lines[4]


def test_ls_names_the_writer(warm):
    engine = forebay.Engine(memory="8M", cache_dir=warm)
    code, text = cache_command("ls", warm)
    assert code == 0, text
    assert f"process {os.getpid()} on " in text
    del engine


def test_verify(warm):
    assert cache_command("verify", warm)[0] == 0
    damage(warm)
    code, text = cache_command("verify", warm, "--dry-run")
    assert code == 1
    assert "1 damaged copy left" in text
    code, text = cache_command("verify", warm)
    assert code == 1
    assert "1 damaged copy removed" in text
    code, text = cache_command("verify", warm)
    assert code == 0
    assert "60 samples" in text


def test_clear_asks_first(folder, warm):
    code, text = cache_command("clear", warm)
    assert code == 2
    assert "--yes" in text
    code, text = cache_command("clear", warm, "--dataset", "/elsewhere", "--yes")
    assert code == 2
    assert str(folder.root) in text
    code, text = cache_command("clear", warm, "--dataset", folder.root, "--yes")
    assert code == 0, text
    assert "61 samples" in text
    assert not list(warm.rglob("*.seg"))
    assert "0 samples" in cache_command("ls", warm)[1]


def test_clear_everything(warm):
    code, text = cache_command("clear", warm, "--yes")
    assert code == 0, text
    assert not list(warm.rglob("*.seg"))


def test_a_writer_is_not_disturbed(warm):
    engine = forebay.Engine(memory="8M", cache_dir=warm)
    for command in (("clear", warm, "--yes"), ("verify", warm)):
        code, text = cache_command(*command)
        assert code == 1
        assert f"process {os.getpid()} on " in text
    assert cache_command("verify", warm, "--dry-run")[0] == 0
    del engine


def test_an_older_format(warm):
    (warm / "index.log").write_bytes(b"something else")
    for command in ("ls", "verify"):
        code, text = cache_command(command, warm)
        assert code == 2
        assert f"forebay cache clear {warm}" in text
    assert cache_command("clear", warm, "--yes")[0] == 0
    assert cache_command("ls", warm)[0] == 0


@pytest.mark.parametrize("command", ["ls", "verify", "clear"])
def test_folders_that_are_no_cache(command, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "none", tmp_path / "mine.txt"):
        code, text = cache_command(command, path)
        assert code == 2
        assert str(path) in text
        assert "cache_dir=" in text
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_help():
    for arguments in (["--help"], ["ls", "--help"], ["warm", "--help"], ["clear", "--help"]):
        code, text = cache_command(*arguments)
        assert code == 0
        assert "cache_dir=" in text
    assert cache_command()[0] == 2
    assert cache_command("fill")[0] == 2


@needs_library
def test_ls_counts_a_file_that_changed_once(tmp_path: Path):
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    for i in range(5):
        (data / f"{i}.bin").write_bytes(bytes([i]) * 20_000)
    for version in range(2):
        (data / "0.bin").write_bytes(bytes([version]) * (10_000 + version))
        time.sleep(3.2)  # younger files may still be being written
        done = run(
            "--source", str(data), "--cache", str(cache), "--cache-size", "1M", "--",
            "sh", "-c", f"cat {data}/*.bin | wc -c",
        )  # fmt: skip
        assert done.stdout.strip() == str(90_000 + version), done.stderr
        # One daemon drops what it knows to have changed; the next does not know.
        end = time.monotonic() + 30
        while "written by: nobody now" not in (text := cache_command("ls", cache)[1]):
            assert time.monotonic() < end, text
            time.sleep(0.2)
    lines = text.splitlines()
    assert lines[2].split()[:2] == [str(data), "5"]
    assert lines[3].startswith("  5 samples, ")
    assert lines[4] == "  and 1 former version of files that changed, 9.8 KiB"
