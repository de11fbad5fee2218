"""ResNet-50 on one GPU: how near to a training without any I/O each loader comes.

One model, compiled once, one data set, one run; the contestants take turns. The clock starts when
the first batches are consumed, so neither the start of workers nor that of threads counts.
"""

from __future__ import annotations

import os
import statistics
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

import forebay
import torch
from forebay._errors import UnsupportedError

from .decode_data import make_jpegs
from .decode_rivals import MEAN, SIDE, STD
from .measure import Case, Outcome
from .run import Context

_NO_IO, _FOREBAY = "no I/O", "Forebay"
_DEVICE = "cuda"


class Trainer:
    """The model and its step, compiled for one form of input."""

    def __init__(self, work: dict[str, Any]) -> None:
        import torchvision.models

        torch.backends.cudnn.benchmark = True
        self.batch = int(work["batch"])
        model = torchvision.models.resnet50().to(_DEVICE, memory_format=torch.channels_last)
        self.plain = model
        self.model = torch.compile(model) if work["compile"] else model
        self.optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        self.loss = torch.nn.CrossEntropyLoss()

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(_DEVICE, torch.bfloat16):
            loss = self.loss(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def run(self, batches: Iterable, steps: int, skip: int) -> float:
        """Images/s over `steps` steps that follow the first `skip`."""
        taken = 0
        start = 0.0
        for images, labels in batches:
            images = images.to(_DEVICE, non_blocking=True)
            images = images.contiguous(memory_format=torch.channels_last)
            labels = labels.to(_DEVICE, non_blocking=True)
            if tuple(images.shape) != (self.batch, 3, SIDE, SIDE):
                raise RuntimeError(f"a batch has the shape {tuple(images.shape)}")
            self.step(images, labels)
            taken += 1
            if taken == skip:
                torch.cuda.synchronize()
                start = time.perf_counter()
            if taken == skip + steps:
                break  # the clock stops before the loader is torn down
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        if isinstance(batches, Generator):
            batches.close()
        if taken != skip + steps:
            raise RuntimeError(f"{taken} of {skip + steps} batches were delivered")
        return steps * self.batch / seconds


def _sampler(dataset: Any, samples: int) -> Any:
    """Permutations one after the other, without a pause between epochs."""
    return torch.utils.data.RandomSampler(dataset, num_samples=samples)


def _prefetch(work: dict[str, Any], workers: int, out: Outcome) -> int:
    """prefetch_factor, less where /dev/shm, through which workers hand batches over, is small."""
    room = os.statvfs("/dev/shm")
    batch_bytes = int(work["batch"]) * 3 * SIDE * SIDE * 4
    fits = int(room.f_bavail * room.f_frsize * 0.8 / (batch_bytes * workers))
    wanted = int(work["prefetch_factor"])
    if fits < wanted:
        out.notes.append(f"/dev/shm holds {max(1, fits)} batches a worker of {workers}, so that is "
                         f"prefetch_factor in place of {wanted}")  # fmt: skip
    return max(1, min(wanted, fits))


class TorchFolder:
    """(b) ImageFolder and DataLoader, as PyTorch's ImageNet example has them."""

    def __init__(self, root: str, work: dict[str, Any], out: Outcome) -> None:
        import torchvision.datasets
        import torchvision.transforms as T

        self.work, self.out = work, out
        self.dataset = torchvision.datasets.ImageFolder(
            root,
            T.Compose([T.RandomResizedCrop(SIDE), T.RandomHorizontalFlip(), T.ToTensor(),
                       T.Normalize(MEAN, STD)]),
        )  # fmt: skip

    def loader(self, workers: int, batches: int) -> Iterable:
        work = self.work
        return torch.utils.data.DataLoader(
            self.dataset, work["batch"], sampler=_sampler(self.dataset, batches * work["batch"]),
            drop_last=True, num_workers=workers, pin_memory=True, persistent_workers=True,
            prefetch_factor=_prefetch(work, workers, self.out),
        )  # fmt: skip


class Bytes(torch.utils.data.Dataset):
    def __init__(self, samples: list[tuple[str, int]]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[i]
        with open(path, "rb") as file:
            return torch.frombuffer(bytearray(file.read()), dtype=torch.uint8), label


def _lists(items: list) -> tuple[list, torch.Tensor]:
    return [data for data, _ in items], torch.tensor([label for _, label in items])


class TorchGpuDecode:
    """(c) Workers read files; torchvision's decode_jpeg and transforms run on the GPU."""

    def __init__(self, samples: list[tuple[str, int]], work: dict[str, Any]) -> None:
        self.work = work
        self.dataset = Bytes(samples)
        self.mean = torch.tensor(MEAN, device=_DEVICE).view(3, 1, 1)
        self.std = torch.tensor(STD, device=_DEVICE).view(3, 1, 1)

    def loader(self, workers: int, batches: int) -> Iterable:
        work = self.work
        loader = torch.utils.data.DataLoader(
            self.dataset, work["batch"], sampler=_sampler(self.dataset, batches * work["batch"]),
            drop_last=True, num_workers=workers, persistent_workers=True, collate_fn=_lists,
            prefetch_factor=2,
        )  # fmt: skip
        return _Mapped(loader, self.augment)

    def augment(self, batch: tuple[list, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        import torchvision.transforms as T
        import torchvision.transforms.functional as F
        from torchvision.io import ImageReadMode, decode_jpeg

        files, labels = batch
        crops = []
        for image in decode_jpeg(files, mode=ImageReadMode.RGB, device=_DEVICE):
            box = T.RandomResizedCrop.get_params(image, (0.08, 1.0), (3 / 4, 4 / 3))
            crop = F.resized_crop(image, *box, [SIDE, SIDE], antialias=True)
            crops.append(F.hflip(crop) if torch.rand(1) < 0.5 else crop)
        images = torch.stack(crops).float().div_(255).sub_(self.mean).div_(self.std)
        return images, labels


class _Mapped:
    def __init__(self, inner: Iterable, function: Callable) -> None:
        self.inner, self.function = inner, function

    def __iter__(self) -> Iterator:
        return map(self.function, self.inner)


class Forebay:
    """(d) forebay.DataLoader; each round has a new engine, which keeps the files it read."""

    def __init__(self, ctx: Context, root: str) -> None:
        from forebay import transforms as T

        self.ctx, self.root, self.work = ctx, root, ctx.workload
        self.random = [T.RandomResizedCrop(SIDE), T.RandomHorizontalFlip()]
        self.whole = [*self.random, T.ToTensor(), T.Normalize(MEAN, STD)]
        self.report = ""

    def _loader(self, transform: list, **how: Any) -> forebay.DataLoader:
        return forebay.DataLoader(
            self.root, self.work["batch"], shuffle=True, seed=self.ctx.seed, drop_last=True,
            rank=0, world_size=1, memory=self.work["memory"], decode="image", transform=transform,
            progress=False, **how,
        )  # fmt: skip

    def batches(self, count: int) -> Iterator:
        """`count` batches, over as many epochs as they take."""
        with self._loader(self.whole, channels_last=True, device=_DEVICE) as loader:
            try:
                yield from _first(loader, count)
            finally:
                self.report = loader.report()

    def decode_only(self, threads: int, steps: int, skip: int) -> float:
        """Images/s of the processor alone: crops as uint8 in main memory."""
        with self._loader(self.random, decode_threads=threads) as loader:
            start = 0.0
            for i, _ in enumerate(_first(loader, skip + steps)):
                if i == skip - 1:
                    start = time.perf_counter()
            return steps * self.work["batch"] / (time.perf_counter() - start)


def _first(loader: Any, count: int) -> Iterator:
    while count > 0:
        before = count
        for batch in loader:
            yield batch
            count -= 1
            if count == 0:
                return
        if count == before:
            raise RuntimeError("the loader gave no batch")


class Parts:
    """Runs parts one by one: a failure becomes a note, and what there is goes into the JSON."""

    def __init__(self, ctx: Context, out: Outcome) -> None:
        self.ctx, self.out = ctx, out
        self.start = time.monotonic()

    def left(self) -> float:
        return self.ctx.workload["deadline_s"] - (time.monotonic() - self.start)

    def try_part(self, name: str, function: Callable[[], Any]) -> Any:
        if self.left() < 0:
            self.note(f"{name}: left out, the bench's {self.ctx.workload['deadline_s']} s are over")
            return None
        start = time.monotonic()
        try:
            found = function()
        except Exception as error:  # noqa: BLE001 - the rest is worth measuring without it
            traceback.print_exc()
            last = (str(error).strip() or "no message").splitlines()[-1]
            self.note(f"{name}: FAILED ({type(error).__name__}: {last[:300]})")
            return None
        shown = f"{found:.0f}" if isinstance(found, float) else "done"
        self.ctx.say(f"{name}: {shown} (took {time.monotonic() - start:.1f} s)")
        return found

    def note(self, text: str) -> None:
        self.out.notes.append(text)
        self.ctx.say(text)
        self.ctx.save(self.out)


def _conclude(out: Outcome, rates: dict[str, list[float]]) -> None:
    """Figures and cases from the rates so far."""
    out.cases = [case for case in out.cases if not case.name.startswith("ResNet-50")]
    medians = {name: statistics.median(values) for name, values in rates.items() if values}
    rivals = {k: v for k, v in medians.items() if k not in (_NO_IO, _FOREBAY)}
    for name, values in rates.items():
        if values:
            case = Case(f"ResNet-50, {name}", "images/s", values)
            if _NO_IO in medians and name != _NO_IO:
                case.limit, case.limit_name = medians[_NO_IO], _NO_IO
            if name == _FOREBAY:
                case.rivals = rivals
            out.cases.append(case)
    if _FOREBAY in medians and _NO_IO in medians:
        out.figures["gpu_vs_no_io"] = medians[_FOREBAY] / medians[_NO_IO]
        out.repeats["gpu_vs_no_io"] = [rate / medians[_NO_IO] for rate in rates[_FOREBAY]]
    if _FOREBAY in medians and rivals:
        out.figures["gpu_vs_torch"] = medians[_FOREBAY] / max(rivals.values())
        out.repeats["gpu_vs_torch"] = [rate / max(rivals.values()) for rate in rates[_FOREBAY]]


def run(ctx: Context) -> Outcome:
    if not torch.cuda.is_available():
        raise UnsupportedError("no CUDA device: this bench needs one")
    out = Outcome()
    parts = Parts(ctx, out)
    work = ctx.workload
    batch, skip, steps = work["batch"], work["skip"], work["steps"]
    root = os.path.join(ctx.scratch, "images")
    cores = len(os.sched_getaffinity(0))
    ctx.say(f"making {work['files']} files of {work['distinct']} images with {cores} processes")
    total, quality = make_jpegs(
        root, work["files"], work["distinct"], work["mean_bytes"], ctx.seed,
        processes=cores, say=ctx.say,
    )  # fmt: skip
    parts.note(
        f"{torch.cuda.get_device_name()}, {cores} cores, torch {torch.__version__}; {work['files']}"
        f" files of {total / work['files'] / 1024:.0f} KiB (quality {quality}), {work['distinct']} "
        f"distinct, made in {time.monotonic() - parts.start:.0f} s"
    )

    trainer = Trainer(work)
    resident = (
        torch.randn(batch, 3, SIDE, SIDE).to(_DEVICE, memory_format=torch.channels_last),
        torch.randint(0, 1000, (batch,), device=_DEVICE),
    )

    def no_io() -> float:
        return trainer.run((resident for _ in range(steps + 5)), steps, 5)

    def waves(workers: int, batches: int) -> int:
        """At least `batches`: workers make a batch each, so these come by the number of them."""
        return -(-batches // workers) * workers

    def trial(folder: TorchFolder, workers: int) -> float:
        short = waves(workers, work["trial_steps"])
        return trainer.run(folder.loader(workers, short + workers), short, workers)

    def warm_up() -> float:
        return trainer.run((resident for _ in range(15)), 5, 10)

    start = time.monotonic()
    if parts.try_part("compiling and warming up", warm_up) is None:
        trainer.model = trainer.plain
        warm_up()
        parts.note("the model is NOT compiled")
    parts.note(f"compiling and warming up took {time.monotonic() - start:.0f} s")

    ours = parts.try_part("Forebay's loader", lambda: Forebay(ctx, root))
    folder = parts.try_part("ImageFolder", lambda: TorchFolder(root, work, out))
    contestants: dict[str, Callable[[], float]] = {_NO_IO: no_io}
    rates: dict[str, list[float]] = {_NO_IO: []}
    if ours:
        contestants[_FOREBAY] = lambda: trainer.run(ours.batches(steps + skip), steps, skip)
    if folder:
        trials: dict[int, float] = {}
        for workers in work["workers"]:
            name = f"PyTorch with {workers} workers, trial"
            rate = parts.try_part(name, partial(trial, folder, workers))
            if rate:
                trials[workers] = rate
        if trials:
            workers = max(trials, key=lambda n: trials[n])
            ahead = workers * work["prefetch_factor"] + 4
            loader = folder.loader(workers, steps + ahead)
            contestants[f"PyTorch, {workers} workers"] = lambda: trainer.run(loader, steps, ahead)
            parts.note("PyTorch's trials, images/s: "
                       + ", ".join(f"{n} workers {r:.0f}" for n, r in trials.items()))  # fmt: skip
        on_gpu = TorchGpuDecode(folder.dataset.samples, work)
        # It is slow, and has little of a head start: fewer steps do.
        gpu_steps, gpu_skip = work["gpu_decode_steps"], 2 * work["reading_workers"] + 2
        gpu_loader = on_gpu.loader(work["reading_workers"], gpu_steps + gpu_skip)
        contestants["PyTorch, decode_jpeg on the GPU"] = lambda: trainer.run(
            gpu_loader, gpu_steps, gpu_skip
        )

    for i in range(ctx.repeats):
        for name, contest in list(contestants.items()):
            rate = parts.try_part(f"{name} ({i + 1}/{ctx.repeats})", contest)
            if rate is None:
                if parts.left() > 0:
                    del contestants[name]
                continue
            rates.setdefault(name, []).append(rate)
            _conclude(out, rates)
            ctx.save(out)

    if ours:
        if ours.report:
            parts.note(f"Forebay's report of the last round: {ours.report}")
        for threads in work["decode_threads"]:
            values = [
                parts.try_part(
                    f"Forebay's decoding alone, {threads} threads",
                    partial(ours.decode_only, threads, work["decode_steps"], 12),
                )
            ]
            if values[0]:
                out.cases.append(
                    Case(f"decode only, {threads} threads", "images/s", values,
                         note="crops of uint8 in main memory, no GPU; one measurement")
                )  # fmt: skip
                ctx.save(out)
    out.notes.append(f"everything took {time.monotonic() - parts.start:.0f} s")
    return out
