"""A real training, with PyTorch's loader and with Forebay's: the accuracy must be the same.

For each seed both start from the same weights and see the same order; the random crops and colours
are each pipeline's own, so the results differ as two runs of one pipeline do.
"""

from __future__ import annotations

import importlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable

import forebay
import numpy as np
import torch
from forebay.engine import Engine
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from .accuracy_data import real_images, write_jpegs
from .decode_rivals import torchvision
from .measure import Case, Outcome
from .run import Context

_MEAN, _STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def _training(T, side: int) -> list:
    return [
        T.RandomResizedCrop(side, scale=(0.5, 1.0)), T.RandomHorizontalFlip(),
        T.ColorJitter(brightness=0.3, contrast=0.3, saturation=0.2), T.ToTensor(),
        T.Normalize(_MEAN, _STD),
    ]  # fmt: skip


def _validation(T, side: int) -> list:
    return [T.Resize((side, side)), T.ToTensor(), T.Normalize(_MEAN, _STD)]


def _model(classes: int) -> nn.Module:
    def block(inside: int, outside: int, stride: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside),
                nn.ReLU(inplace=True)]  # fmt: skip

    return nn.Sequential(
        *block(3, 24, 2), *block(24, 48, 2), *block(48, 96, 1), *block(96, 96, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, classes),
    )  # fmt: skip


def _accuracy(model: nn.Module, batches: Iterable) -> float:
    model.eval()
    right = seen = 0
    with torch.no_grad():
        for images, labels in batches:
            right += int((model(images).argmax(1) == torch.as_tensor(labels)).sum())
            seen += len(images)
    return right / seen


class TorchPipeline:
    """ImageFolder, torchvision's transforms, PyTorch's DataLoader."""

    name = "PyTorch, PIL"

    def __init__(self, ctx: Context, root: str) -> None:
        self.work = ctx.workload
        T, side = torchvision().transforms, self.work["crop"]
        folder = importlib.import_module("torchvision.datasets").ImageFolder
        self.train = folder(os.path.join(root, "train"), T.Compose(_training(T, side)))
        self.val = folder(os.path.join(root, "val"), T.Compose(_validation(T, side)))

    def epochs(self, seed: int) -> Callable[[int], Iterable]:
        sampler: DistributedSampler = DistributedSampler(
            self.train, num_replicas=1, rank=0, shuffle=True, seed=seed
        )
        loader = DataLoader(
            self.train, self.work["batch"], sampler=sampler, drop_last=True, num_workers=2,
            persistent_workers=True,
        )  # fmt: skip

        def epoch(number: int) -> Iterable:
            sampler.set_epoch(number)
            return loader

        return epoch

    def validation(self) -> Iterable:
        return DataLoader(self.val, 250, num_workers=2)


class ForebayPipeline:
    """forebay.DataLoader over the same folders, with the same transforms under its names."""

    name = "Forebay"

    def __init__(self, ctx: Context, root: str) -> None:
        from forebay import transforms as T

        self.work, self.root, self.T = ctx.workload, root, T
        self.engine = Engine(memory="256M")

    def _loader(self, part: str, batch: int, transform: list, **how) -> forebay.DataLoader:
        return forebay.DataLoader(
            os.path.join(self.root, part), batch, rank=0, world_size=1, engine=self.engine,
            decode="image", transform=transform, progress=False, **how,
        )  # fmt: skip

    def epochs(self, seed: int) -> Callable[[int], Iterable]:
        loader = self._loader(
            "train", self.work["batch"], _training(self.T, self.work["crop"]), shuffle=True,
            seed=seed, drop_last=True, epochs=self.work["epochs"],
        )  # fmt: skip

        def epoch(number: int) -> Iterable:
            loader.set_epoch(number)
            return loader

        return epoch

    def validation(self) -> Iterable:
        return self._loader("val", 250, _validation(self.T, self.work["crop"]), epochs=1)


def _train(pipeline: TorchPipeline | ForebayPipeline, seed: int, classes: int) -> float:
    work = pipeline.work
    torch.manual_seed(seed)
    model = _model(classes)
    epoch = pipeline.epochs(seed)
    steps = work["train"] // work["batch"] * work["epochs"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, work["learning_rate"], steps)
    loss_of = nn.CrossEntropyLoss()
    taken = 0
    for number in range(work["epochs"]):
        model.train()
        for images, labels in epoch(number):
            loss = loss_of(model(images), torch.as_tensor(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            taken += 1
    if taken != steps:
        raise RuntimeError(f"{pipeline.name} gave {taken} of {steps} batches")
    return _accuracy(model, pipeline.validation())


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    what, parts = real_images(work["folders"])
    root = os.path.join(ctx.scratch, "images")
    rng = np.random.default_rng(ctx.seed)
    for part in ("train", "val"):
        images, labels = parts[part]
        work[part] = min(work[part], len(images))
        chosen = rng.permutation(len(images))[: work[part]]
        ctx.say(f"writing {work[part]} of {len(images)} images of {what} ({part})")
        write_jpegs(os.path.join(root, part), images[chosen], labels[chosen], work["side"])
    classes = len(np.unique(parts["train"][1]))
    pipelines: list[TorchPipeline | ForebayPipeline] = [
        TorchPipeline(ctx, root), ForebayPipeline(ctx, root),
    ]  # fmt: skip
    found: dict[str, list[float]] = {p.name: [] for p in pipelines}
    seconds: dict[str, list[float]] = {p.name: [] for p in pipelines}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the loaders have the other core
    try:
        for seed in range(work["seeds"]):
            for pipeline in pipelines:
                start = time.monotonic()
                found[pipeline.name].append(_train(pipeline, ctx.seed + seed, classes))
                seconds[pipeline.name].append(time.monotonic() - start)
                ctx.say(
                    f"{pipeline.name}, seed {ctx.seed + seed}: {found[pipeline.name][-1]:.4f} in "
                    f"{seconds[pipeline.name][-1]:.1f} s"
                )
    finally:
        torch.set_num_threads(threads)
    theirs, ours = found.values()
    out.figures["accuracy_difference"] = abs(statistics.mean(ours) - statistics.mean(theirs))
    # Single seeds differ by chance, both ways: the bound is about the means.
    out.repeats["accuracy_difference"] = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    # Two standard errors of the difference of the two means.
    errors = [statistics.variance(values) / len(values) for values in (ours, theirs)]
    out.bounds["accuracy_difference"] = 2 * math.sqrt(sum(errors))
    for pipeline, rival in zip(pipelines, reversed(pipelines), strict=True):
        values = found[pipeline.name]
        out.cases.append(
            Case(f"validation accuracy, {pipeline.name}", "share", values,
                 rivals={rival.name: statistics.median(found[rival.name])},
                 note=f"{len(values)} seeds: mean {statistics.mean(values):.4f}, deviation "
                 f"{statistics.stdev(values):.4f}; a run took "
                 f"{statistics.median(seconds[pipeline.name]):.1f} s")
        )  # fmt: skip
    out.notes.append(
        f"{what}, {work['train']} images to train on and {work['val']} to validate with, JPEGs of "
        f"{work['side']} x {work['side']}, {work['epochs']} epochs"
    )
    return out
