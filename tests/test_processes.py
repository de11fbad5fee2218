"""Fork, spawn, threads, signals and the end of the process."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import forebay
import pytest
from conftest import forebay_threads
from data_sets import DataSet, batches_of, check_batch, torch_order

_LIMIT_S = 60  # for anything that should take a second or two
_STALLED = "open_ms=60000"


def _in_child(function: Callable[[], None]) -> None:
    """Runs the function in a forked child; its exception becomes this test's."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(_LIMIT_S)
        try:
            function()
        except BaseException:
            os.write(write, traceback.format_exc().encode()[-4000:])
            os._exit(1)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, said


def _script(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text))
    # Python from 3.12 on warns of any fork of a process with threads.
    return [sys.executable, "-W", "ignore::DeprecationWarning", str(path)]


def _run(tmp_path: Path, text: str, *arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*_script(tmp_path, text), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )


def _clean(result: subprocess.CompletedProcess, code: int = 0) -> str:
    assert (result.returncode, result.stderr) == (code, ""), result
    return result.stdout


def _batches(data: DataSet, size: int, epoch: int = 0) -> list[list[int]]:
    order = torch_order(
        len(data), shuffle=True, seed=0, epoch=epoch, rank=0, world=1, drop_last=False
    )
    return list(batches_of(order, size))


# ---- fork


@pytest.mark.parametrize("layout", ["views", "contiguous"])
def test_fork_while_iterating(folder: DataSet, layout: str) -> None:
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, layout=layout, memory="64M")
    expected = _batches(folder, 8)
    iterator = iter(loader)
    check_batch(next(iterator), expected[0], folder)
    held = next(iterator)

    def child() -> None:
        # The iterator is the parent's; the loader works, with an engine of the child's own.
        with pytest.raises(forebay.CancelledError):
            next(iterator)
        check_batch(held, expected[1], folder)
        for epoch in (0, 1):
            for batch, samples in zip(loader, _batches(folder, 8, epoch), strict=True):
                check_batch(batch, samples, folder)
        other = forebay.DataLoader(folder.root, 8, shuffle=True)
        check_batch(next(iter(other)), expected[0], folder)

    for _ in range(2):
        _in_child(child)
    check_batch(held, expected[1], folder)
    for samples in expected[2:]:
        check_batch(next(iterator), samples, folder)
    assert next(iterator, None) is None


def test_fork_of_a_loader_nobody_has_used(folder: DataSet) -> None:
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, memory="64M")

    def child() -> None:
        check_batch(next(iter(loader)), _batches(folder, 8)[0], folder)

    _in_child(child)
    check_batch(next(iter(loader)), _batches(folder, 8)[0], folder)


def test_fork_while_reads_are_under_way(folder: DataSet) -> None:
    loader = forebay.DataLoader(
        folder.root, 8, shuffle=True, memory="64M", _delay="open_ms=20,read_ms=20"
    )

    def child() -> None:
        for batch, samples in zip(loader, _batches(folder, 8), strict=True):
            check_batch(batch, samples, folder)

    _in_child(child)
    for batch, samples in zip(loader, _batches(folder, 8), strict=True):
        check_batch(batch, samples, folder)


def test_a_child_continues_where_the_parent_stood(folder: DataSet) -> None:
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, memory="64M")
    next(iter(loader))
    state = loader.state_dict()

    def child() -> None:
        loader.load_state_dict(state)
        check_batch(next(iter(loader)), _batches(folder, 8)[1], folder)

    _in_child(child)


def test_children_that_fork(folder: DataSet) -> None:
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, memory="64M")

    def child() -> None:
        check_batch(next(iter(loader)), _batches(folder, 8)[0], folder)
        _in_child(lambda: check_batch(next(iter(loader)), _batches(folder, 8)[0], folder))
        check_batch(next(iter(loader)), _batches(folder, 8)[0], folder)

    _in_child(child)


# ---- other processes

_WORKERS = """
    import multiprocessing, sys, zlib
    import forebay

    def work(loader, queue):
        crcs = []
        for batch in loader:
            crcs.append((batch.indices.tolist(), zlib.crc32(batch.data.tobytes())))
        queue.put((loader.batch_size, crcs))

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        options = dict(shuffle=True, memory="64M")
        loaders = [forebay.DataLoader(sys.argv[2], size, **options) for size in (7, 9)]
        queue = context.Queue()
        workers = [context.Process(target=work, args=(loader, queue)) for loader in loaders]
        for worker in workers:
            worker.start()
        theirs = dict(queue.get(timeout=50) for _ in workers)
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
        for loader in loaders:
            work(loader, queue)
        ours = dict(queue.get(timeout=50) for _ in workers)
        assert ours == theirs and sum(len(i) for i, _ in ours[7]) == 61
        print("same")
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_workers(folder: DataSet, tmp_path: Path, method: str) -> None:
    assert _clean(_run(tmp_path, _WORKERS, method, folder.root)) == "same\n"


def test_a_pickled_loader(folder: DataSet) -> None:
    loader = forebay.DataLoader(
        folder.root, 8, shuffle=True, seed=3, rank=1, world_size=2, drop_last=True, memory="64M"
    )
    next(iter(loader))
    copy = pickle.loads(pickle.dumps(loader))
    assert copy.engine.budget == loader.engine.budget
    assert len(copy) == len(loader)
    assert (copy.rank, copy.world_size, copy.seed, copy.epoch) == (1, 2, 3, 0)
    for ours, theirs in zip(copy, loader, strict=True):
        assert ours.indices.tolist() == theirs.indices.tolist()
        assert ours.data.tobytes() == theirs.data.tobytes()
    with pytest.raises(TypeError, match="Catalog"):
        pickle.dumps(forebay.DataLoader(loader.catalog, 8))


def test_a_pickled_loader_resumes(folder: DataSet) -> None:
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, memory="64M")
    next(iter(loader))
    loader.load_state_dict(loader.state_dict())
    copy = pickle.loads(pickle.dumps(loader))
    check_batch(next(iter(copy)), _batches(folder, 8)[1], folder)


def test_pickled_loaders_of_one_engine_share_one(folder: DataSet) -> None:
    train = forebay.DataLoader(folder.root, 8, memory="64M")
    val = forebay.DataLoader(folder.root, 4)
    one, other = pickle.loads(pickle.dumps((train, val)))
    assert one.engine is other.engine


# ---- threads


def test_threads_consume_one_engine(folder: DataSet, large_folder: DataSet) -> None:
    engine = forebay.Engine(memory="32M")
    errors: list[str] = []

    def consume(data: DataSet, size: int, layout: str) -> None:
        try:
            loader = forebay.DataLoader(data.root, size, shuffle=True, layout=layout, engine=engine)
            for epoch in range(3):
                for batch, samples in zip(loader, _batches(data, size, epoch), strict=True):
                    check_batch(batch, samples, data)
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [
        threading.Thread(target=consume, args=arguments)
        for arguments in [
            (folder, 8, "views"),
            (large_folder, 5, "contiguous"),
            (large_folder, 16, "views"),
            (folder, 3, "contiguous"),
        ]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_LIMIT_S)
        assert not thread.is_alive()
    assert errors == []


def test_a_loader_is_closed_while_a_thread_waits(folder: DataSet) -> None:
    loader = forebay.DataLoader(folder.root, 8, memory="64M", _delay="open_ms=300")
    iterator = iter(loader)
    ended = []

    def wait() -> None:
        try:
            next(iterator)
        except forebay.CancelledError as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while engine_waits(loader) == 0 and thread.is_alive():
        pass
    loader.close()
    thread.join(_LIMIT_S)
    assert ended == ["the stream was closed"]


def engine_waits(loader: forebay.DataLoader) -> int:
    metrics = loader.engine.metrics()
    return sum(value for name, value in metrics.items() if name.startswith("forebay_stall_"))


def test_the_gil_is_free_while_a_batch_is_awaited(folder: DataSet) -> None:
    loader = forebay.DataLoader(folder.root, 8, memory="64M", _delay="open_ms=300")
    iterator = iter(loader)
    steps = 0
    waiting, done = threading.Event(), threading.Event()

    def count() -> None:
        nonlocal steps
        waiting.wait()
        while not done.wait(0.001):
            steps += 1

    thread = threading.Thread(target=count)
    thread.start()
    waiting.set()
    check_batch(next(iterator), list(range(8)), folder)
    seen = steps
    done.set()
    thread.join()
    # Held for the whole wait, it would let the other thread run once or not at all.
    assert seen >= 3


# ---- signals and the end of the process


def test_ctrl_c_while_a_batch_is_awaited(folder: DataSet, tmp_path: Path) -> None:
    script = """
        import sys
        import forebay

        loader = forebay.DataLoader(sys.argv[1], 4, memory="64M", _delay=sys.argv[2])
        iterator = iter(loader)
        try:
            print("waiting", flush=True)
            next(iterator)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
    """
    process = subprocess.Popen(
        [*_script(tmp_path, script), str(folder.root), _STALLED],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=_LIMIT_S / 3)  # the read would take a minute
    finally:
        process.kill()
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)


def test_ctrl_c_and_the_loop_goes_on(folder: DataSet, tmp_path: Path) -> None:
    """A handler that returns does not disturb the wait."""
    script = """
        import signal, sys, threading, os
        import forebay

        seen = []
        signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
        loader = forebay.DataLoader(sys.argv[1], 4, memory="64M", _delay="open_ms=400")
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        batch = next(iter(loader))
        timer.join()
        print(len(seen), batch.indices.tolist())
    """
    assert _clean(_run(tmp_path, script, folder.root)) == "1 [0, 1, 2, 3]\n"


_ENDINGS = {
    "break": """
        for batch in loader:
            break
    """,
    "exit": """
        for batch in loader:
            sys.exit(0)
    """,
    "held": """
        held = list(loader)
    """,
    "iterator": """
        iterator = iter(loader)
        next(iterator)
    """,
    "view": """
        view = next(iter(loader))[0]
        del loader
    """,
    "unused": "",
    "cycle": """
        loader.me = loader
        loader.batch = next(iter(loader))
    """,
    "thread": """
        import threading
        def consume():
            for batch in loader:
                pass
        thread = threading.Thread(target=consume)
        thread.start()
        thread.join()
    """,
    "fork": """
        import os
        next(iter(loader))
        if os.fork() == 0:
            next(iter(loader))
            sys.exit(0)
        assert os.wait()[1] == 0
    """,
    "atexit": """
        import atexit
        atexit.register(lambda: next(iter(loader)))
    """,
}


@pytest.mark.parametrize(
    ("ending", "layout"),
    [(ending, "views") for ending in _ENDINGS] + [("break", "contiguous"), ("held", "contiguous")],
)
def test_the_process_ends_quietly(
    folder: DataSet, tmp_path: Path, ending: str, layout: str
) -> None:
    script = textwrap.dedent("""
        import sys
        import forebay
        loader = forebay.DataLoader(sys.argv[1], 4, shuffle=True, memory="64M", layout=sys.argv[2])
    """) + textwrap.dedent(_ENDINGS[ending])  # fmt: skip
    assert _clean(_run(tmp_path, script, folder.root, layout)) == ""


def test_the_process_ends_with_reads_in_flight(folder: DataSet, tmp_path: Path) -> None:
    script = """
        import sys
        import forebay
        loader = forebay.DataLoader(sys.argv[1], 4, memory="64M", _delay=sys.argv[2], timeout=0.1)
        try:
            next(iter(loader))
        except TimeoutError:
            print("late")
    """
    assert _clean(_run(tmp_path, script, folder.root, _STALLED)) == "late\n"


def test_a_daemon_thread_waits_when_the_interpreter_ends(folder: DataSet, tmp_path: Path) -> None:
    """It used to be unwound out of a destructor, which aborted the process."""
    script = """
        import atexit, sys, threading, time
        import forebay
        loader = forebay.DataLoader(sys.argv[1], 4, memory="64M", _delay=sys.argv[2])
        threading.Thread(target=lambda: next(iter(loader)), daemon=True).start()
        time.sleep(0.3)
        class Slow:                          # keeps the interpreter's end going for a while
            def __del__(self):
                time.sleep(0.3)
        sys.modules["slow"] = Slow()
        print("end")
    """
    assert _clean(_run(tmp_path, script, folder.root, _STALLED)) == "end\n"


@pytest.mark.parametrize("mode", ["views", "decode", "daemon"])
def test_daemon_threads_are_inside_next_when_the_interpreter_ends(
    folder: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Wherever they are: waiting, taking the GIL back, or making tensors."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if mode == "decode":
        image = pytest.importorskip("PIL.Image")
        for i in range(16):
            (tmp_path / "images" / "a").mkdir(parents=True, exist_ok=True)
            image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / "images" / "a" / f"{i}.png")
    root = tmp_path / "images" if mode == "decode" else folder.root
    script = """
        import sys, threading, time
        import forebay
        shared = sys.argv[2] == "daemon"
        engine = forebay.SharedEngine("64M", linger=0) if shared else forebay.Engine("64M")
        crop = [forebay.transforms.CenterCrop(8)]
        how = dict(decode="image", transform=crop) if sys.argv[2] == "decode" else {}
        if how:
            import torch
        loaders = [forebay.DataLoader(sys.argv[1], 4, engine=engine, **how) for _ in range(3)]
        started = threading.Semaphore(0)
        def consume(loader):
            while True:
                for batch in loader:
                    started.release()
        for loader in loaders:
            threading.Thread(target=consume, args=(loader,), daemon=True).start()
        for _ in range(30):
            started.acquire()
        time.sleep(float(sys.argv[3]))
        print("end")
    """
    rounds = 6 if mode == "decode" else 12  # importing PyTorch takes its time
    for i in range(rounds):
        assert _clean(_run(tmp_path, script, root, mode, i * 0.0084 / rounds)) == "end\n"
    until = time.monotonic() + _LIMIT_S
    while (tmp_path / "forebay").exists():  # the daemon's
        assert time.monotonic() < until
        time.sleep(0.02)


def test_daemon_threads_take_the_gil_back_as_the_interpreter_ends(
    folder: DataSet, tmp_path: Path
) -> None:
    """They have their batches and wait for the GIL, which others hold meanwhile. Such a thread was
    taken for one that stays in next(), got out, and was unwound inside PyTorch: an abort. Children
    of a process that has imported PyTorch, which takes its time.
    """
    pytest.importorskip("torch")
    script = """
        import atexit, os, sys, threading, time
        import torch
        import forebay
        for _ in range(24):
            child = os.fork()
            if child == 0:
                break
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert code == 0, code
        else:
            print("end")
            sys.exit()
        torch.set_num_threads(1)
        engine = forebay.Engine("64M", keep=False)
        how = dict(engine=engine, _delay="open_ms=5")
        loaders = [forebay.DataLoader(sys.argv[1], 1, **how) for _ in range(8)]
        started = threading.Semaphore(0)
        ending = []
        def consume(loader):
            while True:
                for batch in loader:
                    started.release()
                    for _ in range(5 if ending else 0):
                        torch.ones(1000).sum()        # gives the GIL up
        def hold():
            while True:
                time.sleep(0.001)
                sum(range(200_000 if ending else 0))  # does not
        for loader in loaders:
            threading.Thread(target=consume, args=(loader,), daemon=True).start()
        for _ in range(4):
            threading.Thread(target=hold, daemon=True).start()
        for _ in range(50):
            started.acquire()
        # Run in the reverse order, before the loader's own, and without giving the GIL up.
        atexit.register(ending.append, True)
        atexit.register(sum, range(1_000_000))
    """
    assert _clean(_run(tmp_path, script, folder.root)) == "end\n"


def test_an_exception_in_the_loop_is_the_users(folder: DataSet, tmp_path: Path) -> None:
    script = """
        import sys
        import forebay
        for batch in forebay.DataLoader(sys.argv[1], 4, memory="64M"):
            raise SystemExit(7)
    """
    _clean(_run(tmp_path, script, folder.root), code=7)


def test_a_killed_process_leaves_nothing(folder: DataSet, tmp_path: Path) -> None:
    script = """
        import os, signal, sys
        import forebay
        loader = forebay.DataLoader(sys.argv[1], 4, memory="64M")
        next(iter(loader))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    before = set(os.listdir("/dev/shm"))
    _clean(_run(tmp_path, script, folder.root), code=-signal.SIGKILL)
    assert not [n for n in set(os.listdir("/dev/shm")) - before if "forebay" in n]


# ---- rank and world size

_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS"),
    "openmpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "pmi": ("PMI_RANK", "PMI_SIZE"),
    "mvapich": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
}


@pytest.mark.parametrize("launcher", list(_LAUNCHERS))
def test_rank_and_world_size_from_the_launcher(
    folder: DataSet, engine: forebay.Engine, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    rank, world = _LAUNCHERS[launcher]
    monkeypatch.setenv(rank, "2")
    assert forebay.DataLoader(folder.root, engine=engine).world_size == 1  # both or none
    monkeypatch.setenv(world, "4")
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, engine=engine)
    assert (loader.rank, loader.world_size) == (2, 4)
    order = torch_order(61, shuffle=True, seed=0, epoch=0, rank=2, world=4, drop_last=False)
    check_batch(next(iter(loader)), order[:8], folder)
    explicit = forebay.DataLoader(folder.root, rank=0, world_size=1, engine=engine)
    assert (explicit.rank, explicit.world_size) == (0, 1)
    monkeypatch.setenv(rank, "two")
    with pytest.raises(forebay.ArgumentError, match=f"{rank}='two'"):
        forebay.DataLoader(folder.root, engine=engine)


def test_torchrun_is_believed_before_slurm(
    folder: DataSet, engine: forebay.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_PROCID": 0, "SLURM_NTASKS": 1, "RANK": 5, "WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    loader = forebay.DataLoader(folder.root, engine=engine)
    assert (loader.rank, loader.world_size) == (5, 8)


# ---- what goes with the last loader


def test_the_engine_goes_with_its_loaders(folder: DataSet, wait_until: Callable) -> None:
    train = forebay.DataLoader(folder.root, 8, memory="64M", layout="contiguous")
    val = forebay.DataLoader(folder.root, 4)
    engine = train.engine.native
    for loader in (train, val):
        assert sum(len(batch) for batch in loader) == 61
    assert engine.metrics()["forebay_stage_samples_total"] == 122
    names = set(forebay_threads())
    assert names == {"forebay-loop", "forebay-plan", "forebay-copy", "forebay-io"}
    del train, loader
    assert forebay_threads()  # the other still needs it
    del val, engine
    gc.collect()
    wait_until(lambda: not forebay_threads())
    assert "memfd:forebay" not in Path("/proc/self/maps").read_text()


def test_a_held_batch_keeps_its_engine(folder: DataSet, wait_until: Callable) -> None:
    batch = next(iter(forebay.DataLoader(folder.root, 8, memory="64M")))
    gc.collect()
    check_batch(batch, list(range(8)), folder)
    del batch
    gc.collect()
    wait_until(lambda: not forebay_threads())


def test_many_loaders_one_after_the_other_leak_nothing(folder: DataSet) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    next(iter(forebay.DataLoader(folder.root, 8, memory="64M")))
    gc.collect()
    before = descriptors()
    for _ in range(20):
        next(iter(forebay.DataLoader(folder.root, 8, memory="64M")))
    gc.collect()
    assert descriptors() <= before + 1
    assert not forebay_threads()
