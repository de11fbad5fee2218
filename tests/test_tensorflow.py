"""forebay:// for TensorFlow: the plugin, and what it was built to."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("tensorflow is not installed", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent


def run(script: str, *arguments: object, where: Path) -> None:
    """In a process of its own: TensorFlow's threads stay in the one that imports it."""
    environment = {
        **os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "XDG_RUNTIME_DIR": str(where),
        "FOREBAY_CACHE": str(where / "cache"), "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *(str(a) for a in arguments)],
        env=environment, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_interface_is_that_of_the_installed_tensorflow() -> None:
    spec = importlib.util.find_spec("tensorflow")
    assert spec is not None and spec.origin is not None
    header = Path(spec.origin).parent / "include"
    subprocess.run(
        ["c++", "-std=c++20", "-fsyntax-only", "-Wno-invalid-offsetof", "-I", ROOT, "-I", header,
         ROOT / "tests" / "tensorflow_abi.cc"],
        check=True, timeout=120,
    )  # fmt: skip


def test_the_plugin(tmp_path: Path) -> None:
    place = tmp_path / "service"
    place.mkdir(mode=0o700)
    script = """
        import os, sys
        from pathlib import Path
        root = Path(sys.argv[1])
        import functools
        import tensorflow as tf
        import forebay.files
        start = forebay.files.Service.start
        forebay.files.Service.start = functools.partial(start, young_ms=0, linger=1)
        import forebay.tensorflow
        from forebay._internal import url
        records = [os.urandom(1000 + 50 * i) for i in range(40)]
        big = [os.urandom(1 << 20) for _ in range(20)]  # more than is copied at once
        (root / "sub").mkdir()
        (root / "sub" / "x.txt").write_text("hello")
        (root / "empty").write_text("")
        for name, lot in (("a.tfrecord", records), ("b.tfrecord", big)):
            with tf.io.TFRecordWriter(str(root / name)) as out:
                for record in lot:
                    out.write(record)
        os.utime(root / "a.tfrecord", (1e9, 1e9))
        u = f"forebay://{root}"
        for _ in range(2):
            for name, lot in (("a.tfrecord", records), ("b.tfrecord", big)):
                assert [x.numpy() for x in tf.data.TFRecordDataset(f"{u}/{name}")] == lot
        both = tf.data.TFRecordDataset([f"{u}/a.tfrecord", f"{u}/b.tfrecord"],
                                       num_parallel_reads=2)
        assert sorted(x.numpy() for x in both) == sorted(records + big)
        copies = os.path.join(url._service.view, "copies")
        assert len([n for n in os.listdir(copies) if not n.endswith(".part")]) == 2, \\
            os.listdir(copies)

        gfile = tf.io.gfile
        assert sorted(gfile.listdir(u)) == ["a.tfrecord", "b.tfrecord", "empty", "sub"]
        assert gfile.glob(f"{u}/*/*.txt") == [f"{u}/sub/x.txt"]
        assert gfile.exists(u) and gfile.isdir(f"{u}/sub") and not gfile.isdir(f"{u}/empty")
        assert not gfile.exists(f"{u}/none")
        st = gfile.stat(f"{u}/a.tfrecord")
        assert st.length == (root / "a.tfrecord").stat().st_size and st.mtime_nsec == 10**18
        assert gfile.GFile(f"{u}/sub/x.txt").read() == "hello"
        assert gfile.GFile(f"{u}/empty").read() == ""
        assert tf.io.read_file(f"{u}/sub/x.txt").numpy() == b"hello"
        with gfile.GFile(f"{u}/sub/x.txt", "rb") as file:
            file.seek(3)
            assert file.read(100) == b"lo"
        gfile.copy(f"{u}/sub/x.txt", str(root / "out"))
        assert (root / "out").read_text() == "hello"

        def refused(error, call):
            try:
                call()
            except error as said:
                return str(said)
            raise AssertionError("it was not refused")

        errors = tf.errors
        assert "none" in refused(errors.NotFoundError, gfile.GFile(f"{u}/none").read)
        refused(errors.NotFoundError, lambda: gfile.listdir(f"{u}/none"))
        refused(errors.FailedPreconditionError, gfile.GFile(f"{u}/sub").read)
        for change in (
            lambda: gfile.GFile(f"{u}/new", "w").write("x"),
            lambda: gfile.remove(f"{u}/a.tfrecord"),
            lambda: gfile.rename(f"{u}/a.tfrecord", f"{u}/c"),
            lambda: gfile.mkdir(f"{u}/new"),
        ):
            assert "does not support" in refused(errors.UnimplementedError, change)
        assert (root / "a.tfrecord").exists() and not (root / "new").exists()

        # All of it was read once, and a file that changes is read as it is.
        status = url._service.status()
        once = sum((root / n).stat().st_size for n in ("a.tfrecord", "b.tfrecord", "sub/x.txt"))
        assert status["metrics"]["forebay_source_read_bytes_total"] == once
        (root / "sub" / "x.txt").write_text("other")
        assert tf.io.read_file(f"{u}/sub/x.txt").numpy() == b"other"
        os.kill(status["pid"], 9)
        for name, lot in (("a.tfrecord", records), ("b.tfrecord", big)):
            assert [x.numpy() for x in tf.data.TFRecordDataset(f"{u}/{name}")] == lot
    """
    data = tmp_path / "data"
    data.mkdir()
    run(script, data, where=place)
