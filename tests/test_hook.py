"""The start-up hook of `forebay run`: it knows the coming order, and changes nothing."""

from __future__ import annotations

import importlib.util
import itertools
import logging
import os
import random
import site
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.utils.data.dataloader as loaders  # noqa: E402
from forebay._internal import hook  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

COUNT = 53
HEADER = struct.Struct("<IHHHHIQQ")


class Recorder:
    """A file service that only listens. `orders[stream]` maps positions to paths."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path)
        self._listener.listen(64)
        self._streams: list[tuple[dict[int, str], list[int]]] = []  # as they came
        self.closed = 0
        self.jobs: set[int] = set()
        self.first: list[str] = []  # what each stream said first: nothing else may be
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            stream = {}, []
            self._streams.append(stream)
            threading.Thread(target=self._serve, args=(connection, *stream), daemon=True).start()

    def _serve(self, connection: socket.socket, order: dict, places: list) -> None:
        names: dict[int, str] = {}
        while True:
            try:
                packet = connection.recv(1 << 18)
            except ConnectionResetError:
                continue  # it left without reading our last answers; what it said is still to come
            if not packet:
                break
            magic, kind, answer, count, job, size, a, _ = HEADER.unpack_from(packet)
            body = packet[HEADER.size :]
            assert (magic, answer, size) == (0x31594246, 0, len(body))
            if kind == 4:
                self.jobs.add(job)
                if not names:
                    self.first.append("order" if order else "place" if places else "names")
                at = 0
                for number in range(a, a + count):
                    (length,) = struct.unpack_from("<H", body, at)
                    names[number] = body[at + 2 : at + 2 + length].decode()
                    at += 2 + length
                assert at == len(body)
            elif kind == 5:
                for position in [p for p in order if p >= a]:
                    del order[position]
                for position, number in enumerate(struct.unpack(f"<{count}I", body), a):
                    order[position] = names[number]
            elif kind == 6:
                places.append(a)
            try:
                connection.send(HEADER.pack(magic, kind, 1, 0, 0, 0, 0, 0))
            except OSError:
                pass
        self.closed += 1

    @property
    def orders(self) -> list[dict[int, str]]:
        return [order for order, _ in self._streams if order]

    @property
    def places(self) -> list[list[int]]:
        return [places for order, places in self._streams if order or places]

    def settle(self) -> None:
        """Everything that was sent has been read; for streams that are closed."""
        deadline = time.monotonic() + 10
        last = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        last.settimeout(10)
        last.connect(self.path)  # those before it are accepted before it
        last.send(HEADER.pack(0x31594246, 0, 0, 0, 0, 0, 0, 0))
        last.recv(100)
        last.close()
        while self.closed < len(self._connections):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def told(self, stream: int = 0) -> list[str]:
        order = self.orders[stream]
        return [order[p] for p in sorted(order)]

    def close(self) -> None:
        """May be called again."""
        if self._listener.fileno() < 0:
            return
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        while self.closed < len(self._connections):
            time.sleep(0.002)
        for connection in self._connections:
            connection.close()


class Files(Dataset):
    """One path an item; all sources of randomness go into the item."""

    def __init__(self, paths: list) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple:
        drawn = torch.rand(()).item(), random.random(), np.random.random()
        return int(i), Path(self.paths[i]).read_bytes(), drawn


class Endless(IterableDataset):
    def __init__(self, paths: list) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


class Unsaid(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> int:
        return i


def as_list(items: list) -> list:
    return items


@pytest.fixture
def data(tmp_path: Path) -> list[str]:
    folder = tmp_path / "data"
    folder.mkdir()
    for i in range(COUNT):
        (folder / f"{i:03d}").write_bytes(b"%d" % i)
    return [str(folder / f"{i:03d}") for i in range(COUNT)]


@pytest.fixture
def service(tmp_path: Path, data: list[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    recorder = Recorder(str(tmp_path / "s"))
    monkeypatch.setenv("FOREBAY_FILES_SOCKET", recorder.path)
    monkeypatch.setenv("FOREBAY_FILES_SOURCES", f"/nowhere:{tmp_path / 'data'}")
    yield recorder
    recorder.close()


class watching:  # noqa: N801 - used as a statement
    """The hook is in force inside."""

    def __enter__(self) -> None:
        self._real = loaders._BaseDataLoaderIter._next_index
        hook.install()
        assert loaders._BaseDataLoaderIter._next_index is not self._real

    def __exit__(self, *_: object) -> None:
        loaders._BaseDataLoaderIter._next_index = self._real
        for known in (hook._readers or {}).values():
            for reader in known.values():
                if reader.on:
                    reader.stream.close()
        hook._readers = None


def seeded(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


WEIGHTS = [1.0 + i % 3 for i in range(COUNT)]
SAMPLERS: dict[str, Callable[[Dataset], dict]] = {
    "sequential": lambda d: dict(batch_size=8),
    "shuffle": lambda d: dict(batch_size=8, shuffle=True),
    "shuffle, generator": lambda d: dict(batch_size=8, shuffle=True, generator=seeded()),
    "drop_last": lambda d: dict(batch_size=8, shuffle=True, generator=seeded(), drop_last=True),
    "random, own generator": lambda d: dict(
        batch_size=8, sampler=RandomSampler(d, generator=seeded())
    ),
    "replacement": lambda d: dict(
        batch_size=8, sampler=RandomSampler(d, replacement=True, num_samples=77)
    ),
    "replacement, generator": lambda d: dict(
        batch_size=8,
        sampler=RandomSampler(d, replacement=True, num_samples=77, generator=seeded()),
    ),
    "more than all": lambda d: dict(batch_size=8, sampler=RandomSampler(d, num_samples=130)),
    "subset": lambda d: dict(batch_size=8, sampler=SubsetRandomSampler(list(range(5, 40)))),
    "subset, generator": lambda d: dict(
        batch_size=8, sampler=SubsetRandomSampler(torch.arange(-20, 20), generator=seeded())
    ),
    "weighted": lambda d: dict(batch_size=8, sampler=WeightedRandomSampler(WEIGHTS, 60)),
    "weighted, generator": lambda d: dict(
        batch_size=8, sampler=WeightedRandomSampler(WEIGHTS, 40, False, generator=seeded())
    ),
    "distributed": lambda d: dict(batch_size=8, sampler=DistributedSampler(d, 3, 1, seed=4)),
    "distributed, no shuffle": lambda d: dict(
        batch_size=8, sampler=DistributedSampler(d, 2, 0, shuffle=False)
    ),
    "one by one": lambda d: dict(batch_size=None, sampler=RandomSampler(d)),
    "batch sampler": lambda d: dict(batch_sampler=BatchSampler(SequentialSampler(d), 8, True)),
}
# The next pass is known while this one runs.
REPEATS = {
    "sequential", "shuffle, generator", "drop_last", "random, own generator",
    "replacement, generator", "subset, generator", "weighted, generator", "distributed",
    "distributed, no shuffle", "batch sampler",
}  # fmt: skip


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def states(*generators: torch.Generator | None) -> list:
    """Where every generator stands."""
    found = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]
    return found + [g.get_state().tolist() for g in generators if g is not None]


def run_epochs(loader: DataLoader, epochs: int) -> tuple[list, list]:
    """Everything that the program can see: batches, and the generators after each epoch."""
    seed_all(11)
    seen = []
    order: list[int] = []
    inner = getattr(loader.sampler, "generator", None)
    for epoch in range(epochs):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            items = batch if isinstance(batch, list) else [batch]
            order += [item[0] for item in items]
            seen.append(items)
            torch.rand(1)  # the program draws, too
        seen.append(states(loader.generator, inner))
    return seen, order


def make(data: list[str], name: str, workers: int, **options: Any) -> DataLoader:
    dataset = Files(data)
    kwargs = {**SAMPLERS[name](dataset), **options}
    return DataLoader(dataset, num_workers=workers, collate_fn=as_list, **kwargs)


def make_one_by_one(data: list[str], name: str, workers: int, **options: Any) -> DataLoader:
    loader = make(data, name, workers, **options)
    if loader.batch_size is None and loader.batch_sampler is None:
        loader.collate_fn = as_is
    return loader


def as_is(item: Any) -> Any:
    return item


@pytest.mark.parametrize("workers", ["0", "2", "kept"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_nothing_changes_and_the_order_is_known(
    data: list[str], service: Recorder, name: str, workers: str
) -> None:
    count = 0 if workers == "0" else 2
    options: dict[str, Any] = {"persistent_workers": True} if workers == "kept" else {}
    epochs = 3 if workers == "0" else 2
    plain, order = run_epochs(make_one_by_one(data, name, count, **options), epochs)
    with watching():
        hooked, hooked_order = run_epochs(make_one_by_one(data, name, count, **options), epochs)
    assert hooked_order == order
    assert hooked == plain
    service.settle()
    told = service.told()
    assert told[: len(order)] == [data[i] for i in order]
    # What comes after the last epoch is told where it can be known.
    assert (len(told) > len(order)) == (name in REPEATS)
    places = service.places[0]
    assert places == sorted(places) and places[-1] == len(order)
    assert service.first == ["names"]
    assert len(service.orders) == 1


@pytest.mark.parametrize("name", sorted(REPEATS))
def test_the_next_epoch_is_told_before_it_begins(
    data: list[str], service: Recorder, name: str
) -> None:
    _, order = run_epochs(make(data, name, 0), 3)
    with watching():
        _, first = run_epochs(make(data, name, 0), 2)
    service.settle()
    # The second guess knows better than the first, where the first was wrong.
    assert service.told() == [data[i] for i in order]
    assert first == order[: len(first)]


def test_sampler_that_never_hears_of_epochs(data: list[str], service: Recorder) -> None:
    loader = make(data, "distributed", 0)
    with watching():
        order = [[i for batch in loader for i, *_ in batch] for _ in range(3)]
    assert order[0] == order[1] == order[2]
    service.settle()
    assert service.told() == [data[i] for i in order[0]] * 4


@pytest.mark.parametrize(("told", "number"), [("7", 7), ("70000", 0), ("x", 0), (None, 0)])
def test_an_order_is_of_the_runs_job(
    data: list[str],
    service: Recorder,
    monkeypatch: pytest.MonkeyPatch,
    told: str | None,
    number: int,
) -> None:
    monkeypatch.delenv("FOREBAY_FILES_JOB", raising=False)
    if told is not None:
        monkeypatch.setenv("FOREBAY_FILES_JOB", told)
    with watching():
        run_epochs(make(data, "distributed", 0), 1)
    service.settle()
    assert service.jobs == {number}


def test_two_loaders_take_turns(data: list[str], service: Recorder) -> None:
    """They share a generator, and each other's draws come between the epochs."""

    def run() -> list:
        seed_all(3)
        shared = seeded(5)
        one = DataLoader(
            Files(data), 8, shuffle=True, generator=shared, num_workers=2, collate_fn=as_list
        )
        two = DataLoader(Files(data[:20]), 4, shuffle=True, generator=shared, collate_fn=as_list)
        seen = []
        for _ in range(2):
            for pair in itertools.zip_longest(one, two):
                seen.append(pair)
            seen.append(states(shared))
        return seen

    plain = run()
    with watching():
        hooked = run()
    assert hooked == plain
    service.settle()
    drawn = [[], []]
    for pair in hooked:
        if isinstance(pair, tuple):
            for k in range(2):
                drawn[k] += [item[0] for item in pair[k] or []]
    for k in range(2):
        assert service.told(k)[: len(drawn[k])] == [data[i] for i in drawn[k]]


def test_one_loader_twice_at_once(data: list[str], service: Recorder) -> None:
    loader = make(data, "shuffle", 0)
    with watching():
        pairs = list(zip(loader, loader, strict=True))
    service.settle()
    for k in range(2):
        assert service.told(k) == [data[item[0]] for pair in pairs for item in pair[k]]


def test_epoch_that_is_left_early(data: list[str], service: Recorder) -> None:
    def run() -> list:
        seed_all(4)
        loader = make(data, "shuffle, generator", 0)
        order = []
        for _ in range(3):
            for n, batch in enumerate(loader):
                order += [i for i, *_ in batch]
                if n == 2:
                    break
        return [order, states(loader.generator)]

    plain = run()
    with watching():
        hooked = run()
    assert hooked == plain
    service.settle()
    # The next one's positions begin where the last one was left.
    assert service.told()[:72] == [data[i] for i in hooked[0]]
    # And the epoch after it is not guessed: a sampler that is left does not draw its last.
    assert len(service.told()) == 48 + COUNT


class Deceiver(Sampler):
    """A sampler of one's own: it is followed."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        return iter([random.randrange(self.count) for _ in range(self.count)])


@pytest.mark.parametrize("workers", [0, 2])
def test_unknown_sampler_is_followed(data: list[str], service: Recorder, workers: int) -> None:
    def run() -> tuple:
        dataset = Files(data)
        return run_epochs(
            DataLoader(
                dataset, 8, sampler=Deceiver(COUNT), num_workers=workers, collate_fn=as_list
            ),
            2,
        )

    plain = run()
    with watching():
        hooked = run()
    assert hooked == plain
    service.settle()
    assert service.told() == [data[i] for i in hooked[1]]


def test_sampler_that_was_patched_runs_once(
    data: list[str], service: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def backwards(self: SequentialSampler) -> Iterator[int]:
        calls.append(1)
        return iter(range(len(self) - 1, -1, -1))

    monkeypatch.setattr(SequentialSampler, "__iter__", backwards)
    with watching():
        order = [i for batch in make(data, "sequential", 0) for i, *_ in batch]
    assert (order, len(calls)) == (list(range(COUNT))[::-1], 1)
    service.settle()
    assert service.told() == data[::-1]


def test_batches_as_a_list(data: list[str], service: Recorder) -> None:
    batches = [[3, 1], [4, 1], [5]]
    with watching():
        seen = [
            [i for i, *_ in b]
            for b in DataLoader(Files(data), batch_sampler=batches, collate_fn=as_list)
        ]
    assert seen == batches
    service.settle()
    assert service.told() == [data[i] for batch in batches for i in batch]


def test_off_at_the_first_difference(
    data: list[str], service: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "forebay")
    generator = seeded()
    dataset = Files(data)

    def run() -> list:
        generator.manual_seed(7)
        sampler = RandomSampler(dataset, replacement=True, num_samples=96, generator=generator)
        order = []
        for batch in (loader := DataLoader(dataset, 8, sampler=sampler, collate_fn=as_list)):
            order += [i for i, *_ in batch]
            torch.rand(1, generator=generator)  # the order is drawn piece by piece: a new one
        order += [i for batch in loader for i, *_ in batch]
        return order

    plain = run()
    with watching():
        hooked = run()
    assert hooked == plain
    service.settle()
    assert service.told()[:32] == [data[i] for i in hooked[:32]]
    lines = [r.message for r in caplog.records if "left alone" in r.message]
    assert len(lines) == 1 and "another order" in lines[0]
    assert len(service.orders) == 1


@pytest.mark.parametrize("dataset", [Endless(["x"] * 10), Unsaid()], ids=["iterable", "unknown"])
def test_what_is_not_covered(data: list[str], service: Recorder, dataset: Dataset) -> None:
    if isinstance(dataset, Endless):
        dataset.paths = data
    with watching():
        assert [len(batch) for batch in DataLoader(dataset, 4)] == [4, 4, 2]
    assert service.orders == []


def test_folders_that_are_not_data_folders(
    data: list[str], service: Recorder, tmp_path: Path
) -> None:
    """Of a data set that lies in two folders, only the data folder's files have positions."""
    (tmp_path / "other").write_bytes(b"x")
    other = Files([str(tmp_path / "other")] * 30)
    both: Dataset = ConcatDataset([other, Subset(Files(data), [9, 8, 7])])
    loader = DataLoader(both, 4, shuffle=True, collate_fn=as_list)
    with watching():
        assert sum(len(batch) for batch in DataLoader(other, 4, collate_fn=as_list)) == 30
        assert sum(len(batch) for batch in loader) == 33
    service.settle()
    assert sorted(service.told()) == data[7:10]
    assert service.places[0][-1] == 3


def test_relative_paths(
    data: list[str], service: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(data[0]).parent.parent)
    for form in ("data/{}", "./data//{}", "data/../data/{}"):
        paths = [form.format(os.path.basename(p)) for p in data]
        with watching():
            assert len(list(DataLoader(Files(paths), 8, collate_fn=as_list))) == 7
    service.settle()
    # ".." is the file service's limit: a link on the way may lead elsewhere.
    assert [service.told(k) for k in range(len(service.orders))] == [data * 2, data * 2]


def test_service_that_dies(data: list[str], service: Recorder) -> None:
    plain = run_epochs(make(data, "shuffle", 2), 2)
    with watching():
        loader = make(data, "shuffle", 2)
        service.close()
        assert run_epochs(loader, 2) == plain
        assert list(DataLoader(Files(data), 60, collate_fn=len)) == [COUNT]


def test_service_that_dies_in_the_middle(data: list[str], service: Recorder) -> None:
    with watching():
        order = []
        for n, batch in enumerate(make(data, "sequential", 2)):
            order += [i for i, *_ in batch]
            if n == 1:
                service.close()
        assert order == list(range(COUNT))
        assert [len(b) for b in make(data, "sequential", 0)][0] == 8


def test_program_that_closes_all_descriptors(data: list[str], service: Recorder) -> None:
    """Whatever gets the stream's number afterwards is not written to."""

    stream = hook._beside("file_stream").Stream(service.path)
    fd = stream._socket.fileno()
    assert fd >= 100  # out of the program's way
    os.close(fd)
    left, right = socket.socketpair()
    os.dup2(left.fileno(), fd)
    with pytest.raises(BrokenPipeError):
        stream.at(3)
    stream.close()
    os.fstat(fd)  # still the program's
    os.close(fd)
    left.close()
    assert right.recv(10) == b""
    right.close()


def test_a_forked_child_has_no_part_in_a_stream(data: list[str], service: Recorder) -> None:

    stream = hook._beside("file_stream").Stream(service.path)
    pid = os.fork()
    if pid == 0:
        try:
            stream.at(1)
        except BrokenPipeError:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    stream.at(2)
    stream.close()
    service.settle()
    assert service.places == [[2]]


def test_many_files_are_told_piece_by_piece(
    data: list[str], service: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "_AHEAD", 16)
    with watching():
        _, order = run_epochs(make(data, "distributed", 0), 4)
    service.settle()
    told = service.told()
    assert told[: len(order)] == [data[i] for i in order]
    assert len(told) - len(order) <= 16


# ---- how it starts


_here = Path(hook.__file__).parents[2]
needs_installed = pytest.mark.skipif(
    str(_here) not in site.getsitepackages() or not (_here / "forebay_hook.pth").exists(),
    reason="the package is on the path, not installed",
)


def python(code: str, env: dict[str, str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@needs_installed
def test_start_costs_nothing_without_the_variable() -> None:
    code = """
        import sys
        print(any(type(f).__name__ == "_Finder" for f in sys.meta_path))
        print(sorted(m for m in sys.modules if "forebay" in m))
    """
    assert python(code, {"FOREBAY_HOOK": ""}) == "False\n[]\n"
    said = python(code, {"FOREBAY_HOOK": "1", "FOREBAY_FILES_SOCKET": "/nowhere"})
    assert said == "True\n['_forebay_hook', '_forebay_start']\n"


SCRIPT = """
import hashlib, multiprocessing, random, sys
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
import torch.utils.data.dataloader as module

class Files(Dataset):
    def __init__(self, paths):
        self.paths = paths
    def __len__(self):
        return len(self.paths)
    def __getitem__(self, i):
        with open(self.paths[i], "rb") as file:
            return int(i), file.read(), torch.rand(()).item(), random.random(), np.random.random()

def as_list(items):
    return items

def main():
    torch.manual_seed(1)
    found = hashlib.sha256()
    paths = sys.argv[2:]
    loader = DataLoader(Files(paths), 8, shuffle=True, num_workers=2, collate_fn=as_list,
                        multiprocessing_context=sys.argv[1])
    for batch in loader:
        found.update(repr(batch).encode())
    found.update(repr(torch.get_rng_state().tolist()).encode())
    assert module.__loader__ is module.__spec__.loader and "_Loader" not in repr(module.__loader__)
    print(found.hexdigest(), hasattr(module._BaseDataLoaderIter._next_index, "_forebay"),
          "forebay" in sys.modules)

if __name__ == "__main__":
    main()
"""


@needs_installed
def test_script_from_start_to_end(data: list[str], service: Recorder, tmp_path: Path) -> None:
    """Workers that are spawned: they start Python, and with it the hook, anew."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    outputs = []
    for value in ("", "1"):
        env = {**os.environ, "FOREBAY_HOOK": value}
        done = subprocess.run(
            [sys.executable, str(script), "spawn", *data],
            capture_output=True, text=True, env=env, timeout=200, check=False,
        )  # fmt: skip
        # Python's own tracker of semaphores may complain at the end, also without the hook.
        said = [line for line in done.stderr.splitlines() if "resource_tracker" not in line]
        assert done.returncode == 0 and not said, done.stderr
        outputs.append(done.stdout.split())
    service.settle()
    (plain, _, _), (hooked, watched, package) = outputs
    assert plain == hooked
    assert (watched, package) == ("True", "False")
    assert len(service.told()) == COUNT


def test_hook_file_needs_no_package() -> None:
    """The three files are loaded alone: they may not import each other or the package."""
    for name in ("hook", "foresight", "file_stream"):
        file = Path(hook.__file__).parent / f"{name}.py"
        assert "from ." not in file.read_text() and "import forebay" not in file.read_text()
        assert importlib.util.spec_from_file_location(name, file) is not None
