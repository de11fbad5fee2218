"""forebayd: ranks and jobs that share one engine, and what happens when one of them dies."""

from __future__ import annotations

import gc
import itertools
import json
import logging
import os
import pickle
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import forebay
import pytest
from data_sets import DataSet, batches_of, check_batch, torch_order, write_tfrecord
from forebay.cli import main
from forebay.views import daemon_status
from test_peers import _ports as free_ports

_LIMIT_S = 60
needs_ucx = pytest.mark.skipif(
    not Path(forebay._forebay.__file__).with_name("libforebay_ucx.so").exists(),
    reason="built without UCX",
)


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for a daemon of this test's own; it must be gone at the end, and leave nothing."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    where = tmp_path / "forebay"
    before = set(os.listdir("/dev/shm"))
    yield where
    _await(lambda: not where.exists(), f"something is left in {where}")
    # What others make there meanwhile comes and goes.
    left = {name for name in os.listdir("/dev/shm") if "forebay" in name} - before
    _await(lambda: not left & set(os.listdir("/dev/shm")), f"{left} in /dev/shm")
    # Its files go before the process does.
    _await(lambda: not _daemons(where), f"a daemon of {where} goes on")


def _daemons(where: Path) -> list[int]:
    """Processes that serve this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"--folder={where}\0" in (entry / "cmdline").read_text():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _await(condition, complaint: str, limit: float = 15.0) -> None:
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until, complaint
        time.sleep(0.01)


def _engine(**options) -> forebay.SharedEngine:
    return forebay.SharedEngine(**{"memory": "64M", "linger": 0, **options})


def _orders(data: DataSet, size: int, epoch: int, rank=0, world=1, seed=0) -> list[list[int]]:
    order = torch_order(len(data), shuffle=True, seed=seed, epoch=epoch, rank=rank, world=world,
                        drop_last=False)  # fmt: skip
    return list(batches_of(order, size))


def _forebayd(run_folder: Path) -> list[str]:
    """Its command, which needs the folder."""
    program = os.path.join(os.path.dirname(forebay.__file__), "forebayd")
    run_folder.mkdir(mode=0o700, exist_ok=True)
    program = os.environ.get("FOREBAYD") or program
    return [program, f"--folder={run_folder}", "--memory=67108864"]


def _pid(engine: forebay.SharedEngine) -> int:
    client = engine.client()
    assert client is not None
    return client.pid


# ---- the same as in one process


@pytest.mark.parametrize("layout", ["views", "contiguous"])
def test_order_and_bytes(folder: DataSet, run_folder: Path, layout: str) -> None:
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, layout=layout, engine=_engine())
    for epoch in range(3):
        for batch, samples in zip(loader, _orders(folder, 8, epoch), strict=True):
            check_batch(batch, samples, folder)
    reads = loader.engine.metrics()["forebay_source_reads_total"]
    assert reads == len(folder)
    stats = loader.stats()
    assert [s.samples for s in stats[:3]] == [len(folder)] * 3
    assert sum(s.source_reads for s in stats) == len(folder)
    assert "epoch" in loader.report()


def test_resume_seek_and_early_break(folder: DataSet, run_folder: Path) -> None:
    engine = _engine()
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=engine)
    for batch in loader:
        check_batch(batch, _orders(folder, 8, 0)[0], folder)
        break
    iterator = iter(loader)
    for samples in _orders(folder, 8, 0)[:3]:
        check_batch(next(iterator), samples, folder)
    state = loader.state_dict()
    other = forebay.DataLoader(folder.root, 8, shuffle=True, engine=engine)
    other.load_state_dict(state)
    for index, (batch, samples) in enumerate(zip(other, _orders(folder, 8, 0)[3:], strict=True)):
        check_batch(batch, samples, folder)
        assert batch.index == 3 + index
    loader.set_epoch(5)
    for batch, samples in zip(loader, _orders(folder, 8, 5), strict=True):
        check_batch(batch, samples, folder)


def test_batches_outlive_loader_and_release(folder: DataSet, run_folder: Path) -> None:
    loader = forebay.DataLoader(folder.root, 4, shuffle=True, engine=_engine())
    held = list(loader)
    loader.close()
    for batch, samples in zip(held, _orders(folder, 4, 0), strict=True):
        check_batch(batch, samples, folder)
        batch.release()
    metrics = loader.engine.metrics
    _await(lambda: metrics()["forebay_stage_leases"] == 0, "loans that nobody holds")


def test_a_missing_file_keeps_its_name(run_folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    for i in range(8):
        path = root / "a" / f"{i}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([i]) * 100)
    catalog, _, _ = forebay.Catalog.open(str(root))
    (root / "a" / "5.bin").unlink()
    loader = forebay.DataLoader(catalog, 4, engine=_engine())
    iterator = iter(loader)
    assert next(iterator).indices.tolist() == [0, 1, 2, 3]
    with pytest.raises(forebay.MissingError, match="5.bin"):
        next(iterator)
    (root / "a" / "5.bin").write_bytes(bytes([5]) * 100)
    loader.load_state_dict({**loader.state_dict(), "consumed": 4})
    assert next(iter(loader))[1].tobytes() == bytes([5]) * 100


def test_a_forked_child_has_its_own_connection(folder: DataSet, run_folder: Path) -> None:
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=_engine())
    iterator = iter(loader)
    check_batch(next(iterator), _orders(folder, 8, 0)[0], folder)
    child = os.fork()
    if child == 0:
        try:
            for batch, samples in zip(loader, _orders(folder, 8, 0), strict=True):
                check_batch(batch, samples, folder)
            os._exit(0)
        except BaseException:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    for samples in _orders(folder, 8, 0)[1:]:
        check_batch(next(iterator), samples, folder)


_OPENER = """
import sys, time
import forebay
engine = forebay.SharedEngine(memory="2G", linger=0)
catalog = forebay.Catalog.load(sys.argv[1])
print("ready", flush=True)
for _ in sys.stdin:
    begun = time.monotonic()
    loader = forebay.DataLoader(catalog, 64, engine=engine)
    next(iter(loader))
    print(begun, time.monotonic(), flush=True)
"""


def _train_beside(root: Path, huge: Path) -> tuple[float, float]:
    """Seconds that a client took to open the catalog `huge` and to get its first batch, and the
    longest that another one, which trains on `root`, got no batch in that time.
    """
    engine = _engine(memory="2G")
    opener = subprocess.Popen(
        [sys.executable, "-c", _OPENER, str(huge)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert opener.stdin is not None and opener.stdout is not None
    try:
        assert opener.stdout.readline() == "ready\n"
        opener.stdin.write("open\n")
        opener.stdin.flush()
        taken = []
        with forebay.DataLoader(root, 4, engine=engine) as loader:
            while not select.select([opener.stdout], [], [], 0)[0]:
                for batch in loader:
                    batch.release()
                    taken.append(time.monotonic())
        begun, ended = map(float, opener.stdout.readline().split())
    finally:
        opener.communicate(timeout=_LIMIT_S)
    during = [begun, *(at for at in taken if begun < at < ended), ended]
    return ended - begun, max(later - at for at, later in itertools.pairwise(during))


def test_a_huge_data_set_stalls_nobody_else(
    folder: DataSet, run_folder: Path, tmp_path: Path
) -> None:
    """Eight million samples give the engine much to do. If the daemon's own thread did it, the
    other client would wait for most of the time.
    """
    record = tmp_path / "record"
    write_tfrecord(record, [b""])
    (tmp_path / "huge").mkdir()
    with open(tmp_path / "huge" / "a.tfrecord", "wb") as shard:
        for _ in range(80):
            shard.write(record.read_bytes() * 100_000)
    huge = tmp_path / "huge.catalog"
    forebay.Catalog.build(str(tmp_path / "huge")).save(str(huge))
    for _ in range(3):  # a busy machine keeps everybody waiting now and then
        opening, longest = _train_beside(folder.root, huge)
        if longest < opening / 3:
            return
        gc.collect()
        _await(lambda: not run_folder.exists(), "the daemon does not end")
    pytest.fail(f"no batch for {longest:.2f} s of {opening:.2f} s")


def test_a_pickled_engine(run_folder: Path) -> None:
    engine = _engine()
    copy = pickle.loads(pickle.dumps(engine))
    assert _pid(copy) == _pid(engine)


# ---- one daemon for many

_RANK = """
    import json, os, sys, zlib
    import forebay

    loader = forebay.DataLoader(sys.argv[1], 4, shuffle=True, seed=int(sys.argv[2]), memory="64M")
    seen = []
    for epoch in range(2):
        for batch in loader:
            seen.append((batch.indices.tolist(), zlib.crc32(b"".join(b.tobytes() for b in batch))))
    engine = loader.engine
    print(json.dumps(dict(
        kind=type(engine).__name__, seen=seen, pid=engine.client().pid,
        reads=engine.metrics()["forebay_source_reads_total"])), flush=True)
    sys.stdin.read()
"""


def _start(
    tmp_path: Path, text: str, *arguments: object, output: Path | None = None, **variables: object
) -> subprocess.Popen:
    path = tmp_path / "script.py"
    if not path.exists():  # another process may be reading it
        path.write_text(textwrap.dedent(text))
    with open(output or os.devnull, "wb") as file:
        return subprocess.Popen(
            [sys.executable, str(path), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if output is None else file,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **{k: str(v) for k, v in variables.items()}},
        )


def _crc(data: DataSet, samples: list[int]) -> int:
    import zlib

    return zlib.crc32(b"".join(data.samples[i].data for i in samples))


def test_ranks_of_a_node_share_one_by_default(
    folder: DataSet, run_folder: Path, tmp_path: Path
) -> None:
    ranks = [
        _start(tmp_path, _RANK, folder.root, 3, RANK=r, WORLD_SIZE=2, LOCAL_WORLD_SIZE=2)
        for r in range(2)
    ]
    said = []
    for process in ranks:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate(timeout=_LIMIT_S)[1]
        said.append(json.loads(line))
    assert said[0]["kind"] == said[1]["kind"] == "SharedEngine"
    assert said[0]["pid"] == said[1]["pid"]
    for rank, one in enumerate(said):
        expected = [s for e in (0, 1) for s in _orders(folder, 4, e, rank, 2, seed=3)]
        assert [s for s, _ in one["seen"]] == expected
        assert all(crc == _crc(folder, s) for s, crc in one["seen"])
    # Whoever looked last has seen all reads: each sample once.
    assert max(one["reads"] for one in said) == len(folder)
    os.kill(said[0]["pid"], signal.SIGTERM)  # their default is to linger
    for process in ranks:
        _, errors = process.communicate(timeout=_LIMIT_S)
        assert (process.returncode, errors) == (0, "")


def test_a_single_process_keeps_its_own(folder: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(forebay.DataLoader(folder.root, 4, memory="64M").engine) is forebay.Engine
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("FOREBAY_DAEMON", "off")
    assert type(forebay.DataLoader(folder.root, 4, memory="64M").engine) is forebay.Engine


def test_the_first_ones_settings_hold(run_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = _engine()
    with caplog.at_level(logging.WARNING, "forebay"):
        second = _engine(memory="128M")
    assert first.budget == second.budget == 64 << 20
    assert len(caplog.records) == 1 and "memory=" in caplog.text and "64" in caplog.text


def test_wrong_settings_are_the_callers_error(run_folder: Path) -> None:
    with pytest.raises(forebay.ArgumentError, match="memory"):
        _engine(memory=1000)


def test_knobs_are_set_all_or_none(run_folder: Path) -> None:
    engine = _engine()
    engine.set_knobs({"source_reads_in_flight": 7, "daemon_linger_seconds": 0})
    assert engine.knobs()["source_reads_in_flight"][0] == 7
    with pytest.raises(forebay.ArgumentError, match="linger"):
        engine.set_knobs({"source_reads_in_flight": 9, "daemon_linger_seconds": -1})
    assert engine.knobs()["source_reads_in_flight"][0] == 7


# ---- deaths


def test_knobs_are_set_while_the_process_comes_back() -> None:
    set_to: dict[str, int] = {}

    class Client:
        def set_knobs(self, names: list[str], values: list[int]) -> None:
            set_to.update(zip(names, values, strict=True))

    class Port:
        """Alone when it is asked for the daemon, and not when it is asked for the engine."""

        engine = None
        answers = [None, Client()]

        @property
        def daemon(self) -> Client | None:
            return self.answers.pop(0)

    engine = forebay.SharedEngine.__new__(forebay.SharedEngine)
    engine._pid, engine._port = os.getpid(), Port()
    engine.set_knobs({"hedge_one_in": 7})
    assert set_to == {"hedge_one_in": 7}


def test_a_killed_daemon_costs_one_line(
    folder: DataSet,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("forebay.daemon._RETURN_S", (600.0,))  # on a slow machine, too
    engine = _engine()
    loaders = [forebay.DataLoader(folder.root, 8, shuffle=True, seed=s, engine=engine)
               for s in (0, 1)]  # fmt: skip
    iterators = [iter(loader) for loader in loaders]
    held = [next(i) for i in iterators]
    os.kill(_pid(engine), signal.SIGKILL)
    with caplog.at_level(logging.WARNING, "forebay"):
        for seed, (loader, iterator) in enumerate(zip(loaders, iterators, strict=True)):
            for batch, samples in zip(iterator, _orders(folder, 8, 0, seed=seed)[1:], strict=True):
                check_batch(batch, samples, folder)
            for batch, samples in zip(loader, _orders(folder, 8, 1, seed=seed), strict=True):
                check_batch(batch, samples, folder)
            check_batch(held[seed], _orders(folder, 8, 0, seed=seed)[0], folder)
            assert [s.samples for s in loader.stats()] == [len(folder)] * 2
    assert len(caplog.records) == 1 and "daemon" in caplog.text
    assert not run_folder.exists()  # what the dead one left is cleared
    assert engine.metrics()["forebay_port_failovers_total"] == 1
    assert "\nforebay_port_failovers_total 1\n" in engine.prometheus()


def test_a_daemon_that_cannot_start_costs_one_line(
    folder: DataSet,
    run_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FOREBAYD", "/nonexistent/forebayd")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")  # a share of the memory that no engine can do with
    with caplog.at_level(logging.WARNING, "forebay"):
        loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=_engine())
        for batch, samples in zip(loader, _orders(folder, 8, 0), strict=True):
            check_batch(batch, samples, folder)
    assert len(caplog.records) == 1 and "nonexistent" in caplog.text
    forebay._forebay.SharedEngine.clear_dead("")


def test_a_pipeline_ends_with_its_program(
    folder: DataSet, run_folder: Path, tmp_path: Path
) -> None:
    """``python train.py | tee log`` does not wait for the daemon."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        import forebay
        loader = forebay.DataLoader(sys.argv[1], 4, engine=forebay.SharedEngine("64M", linger=30))
        print(sum(len(batch) for batch in loader), loader.engine.client().pid)
    """)
    )
    start = time.monotonic()
    done = subprocess.run(
        ["/bin/sh", "-c", f"{sys.executable} {script} {folder.root} 2>&1 | tee {tmp_path}/log"],
        capture_output=True, text=True, timeout=_LIMIT_S,
    )  # fmt: skip
    took = time.monotonic() - start
    count, pid = done.stdout.split()
    assert int(count) == len(folder)
    assert took < 30
    assert _daemons(run_folder) == [int(pid)]  # it lingers, and nobody waited for it
    os.kill(int(pid), signal.SIGTERM)


def test_ctrl_c_is_the_programs_and_not_the_daemons(
    folder: DataSet, run_folder: Path, tmp_path: Path
) -> None:
    script = """
        import sys
        import forebay
        loader = forebay.DataLoader(
            sys.argv[1], 4, engine=forebay.SharedEngine("64M", linger=1), _delay="open_ms=60000")
        iterator = iter(loader)
        try:
            print("waiting", flush=True)
            next(iterator)
        except KeyboardInterrupt:
            print(loader.engine.client().connected, flush=True)
    """
    process = _start(tmp_path, script, folder.root)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("waiting")
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=_LIMIT_S / 3)
    finally:
        process.kill()
    assert (out, errors, process.returncode) == ("True\n", "", 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_ends_it_and_nothing_is_left(
    folder: DataSet, run_folder: Path, tmp_path: Path, number: int
) -> None:
    """The fixture sees to its folder and /dev/shm; here: that it was no crash."""
    daemon = subprocess.Popen([*_forebayd(run_folder), "--linger=600"])
    try:
        _await(lambda: main(["status"]) == 0, "it does not serve")
        daemon.send_signal(number)
        assert daemon.wait(_LIMIT_S) == 0
    finally:
        daemon.kill()
        daemon.wait()


@needs_ucx
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_a_signal_ends_it_with_ucx(
    folder: DataSet, run_folder: Path, tmp_path: Path, number: int
) -> None:
    """UCX has threads, memory and handlers of signals of its own. The log says whom it trusts."""
    ports = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    daemon = subprocess.Popen(
        [*_forebayd(run_folder), "--linger=600", f"--peers={ports}"],
        stderr=subprocess.PIPE, text=True,
        env={**os.environ, "FOREBAY_NODE": "0", "FOREBAY_PEER_TRANSPORT": "ucx",
             "FOREBAY_PEER_SECRET": str(tmp_path / "secret")},
    )  # fmt: skip
    try:
        _await(lambda: main(["status"]) == 0, "it does not serve")
        maps = Path(f"/proc/{daemon.pid}/maps").read_text()
        assert "libforebay_ucx.so" in maps
        shared = set(re.findall("/dev/shm/[^ \n]+", maps))
        daemon.send_signal(number)
        _, said = daemon.communicate(timeout=_LIMIT_S)
        assert daemon.returncode == 0, said
    finally:
        daemon.kill()
        daemon.communicate()
    trust = "UCX writes to this process's memory for whoever reaches its ports"
    assert f"{trust}, so only the job's nodes may reach them" in said
    assert [path for path in shared if os.path.exists(path)] == []


@pytest.mark.parametrize("kind", ["foreign", "all"])
def test_a_cache_folder_that_others_can_write_to_is_an_error(
    folder: DataSet, run_folder: Path, tmp_path: Path, kind: str
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    if kind == "all":
        cache.chmod(0o777)
    elif os.geteuid() == 0:
        os.chown(cache, 65534, 65534)
    else:
        pytest.skip("NOT TESTED: only root can make a folder of another user")
    remedy = "chmod go-w" if kind == "all" else "chown"
    with pytest.raises(forebay.AccessError, match=f"{cache}.*{remedy}"):
        _engine(cache_dir=cache)
    for option in ("cache_dir", "files"):
        command = [*_forebayd(run_folder), f"--{option}={cache}", f"--source={folder.root}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S)
        assert done.returncode != 0 and str(cache) in done.stderr and remedy in done.stderr
    assert os.listdir(cache) == []


# ---- seeing it


def test_status(folder: DataSet, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 1
    assert "No forebayd runs" in capsys.readouterr().out
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, seed=9, engine=_engine())
    next(iter(loader))
    assert main(["status", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["datasets"][0]["samples"] == len(folder)
    ours = [c for c in said["clients"] if c["streams"]]
    assert len(ours) == 1 and ours[0]["pid"] == os.getpid()
    assert ours[0]["streams"][0]["seed"] == 9
    assert main(["status"]) == 0
    page = capsys.readouterr().out
    for word in (str(folder.root), f"{len(folder)} samples", "daemon_linger_seconds", "64.0 MiB"):
        assert word in page
    ours[0]["pid"] = 1
    assert "seed 9" in daemon_status.describe({**said, "clients": ours}, "x")
    assert main(["status", "--prometheus"]) == 0
    assert "\nforebay_daemon_clients 2\n" in capsys.readouterr().out


def test_metrics_over_http(run_folder: Path) -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    engine = _engine(metrics_port=port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "\nforebay_daemon_clients 1\n" in answer.read().decode()
    assert engine.client() is not None
