"""Decoding and augmenting on the processor: Forebay beside what else turns JPEGs into batches.

Everybody reads the same files from the page cache and ends with the same normalised tensors. Only
rivals whose crops are ImageFolder's, pixel for pixel within rounding, count for the comparison.
"""

from __future__ import annotations

import io
import os
import statistics
from collections.abc import Callable, Iterable
from functools import partial

import forebay
import numpy as np
from forebay import _forebay
from forebay.engine import Engine

from .decode_data import SIZES, encode, make_jpegs, photo
from .measure import Case, Outcome, best_of, interleave, timed
from .run import Context

_MEGABYTE = 1 << 20


def _epoch(batches: Iterable, expected: int) -> float:
    """Seconds of an epoch. Each batch is looked at: its form, and a sample of its numbers."""
    from .decode_rivals import SIDE

    got = 0

    def run() -> None:
        nonlocal got
        for images, labels in batches:
            if tuple(images.shape[1:]) != (3, SIDE, SIDE) or len(labels) != len(images):
                raise RuntimeError(f"a batch has the shape {tuple(images.shape)}")
            level = float(images[:, :, ::16, ::16].float().mean())
            if not -2.5 < level < 2.7:
                raise RuntimeError(f"a batch's mean is {level}: these are no normalised images")
            got += len(images)

    seconds = timed(run)
    if got != expected:
        raise RuntimeError(f"{got} of {expected} images were delivered")
    return seconds


class Forebay:
    """forebay.DataLoader over the files; a new engine each time, so that it reads them too."""

    def __init__(self, ctx: Context, root: str, total: int) -> None:
        self.ctx = ctx
        self.catalog = _forebay.Catalog.build(root)
        self.memory = 2 * total + 512 * _MEGABYTE

    def epoch(self, expected: int) -> float:
        from forebay import transforms as T

        from .decode_rivals import MEAN, SIDE, STD

        batch = self.ctx.workload["batch"]
        engine = Engine(memory=self.memory)

        def run() -> None:
            with forebay.DataLoader(
                self.catalog, batch, shuffle=True, seed=self.ctx.seed, drop_last=True, epochs=1,
                rank=0, world_size=1, engine=engine, decode="image",
                transform=[T.RandomResizedCrop(SIDE), T.RandomHorizontalFlip(), T.ToTensor(),
                           T.Normalize(MEAN, STD)],
            ) as loader:  # fmt: skip
                _epoch(loader, expected)

        return timed(run)

    def difference(self, paths: list[str]) -> float:
        """Mean difference from PIL, in levels of 255, of whole images resized to 224 x 224."""
        from forebay import transforms as T
        from PIL import Image

        from .decode_rivals import SIDE

        with forebay.DataLoader(
            self.catalog, len(paths), epochs=1, rank=0, world_size=1,
            engine=Engine(memory=self.memory), decode="image",
            transform=[T.Resize((SIDE, SIDE)), T.ToTensor()],
        ) as loader:  # fmt: skip
            images = next(iter(loader))[0].permute(0, 2, 3, 1).numpy() * 255
        sums = []
        for path, ours in zip(paths, images, strict=True):
            theirs = Image.open(path).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            sums.append(float(np.abs(ours - np.asarray(theirs, np.float32)).mean()))
        return statistics.mean(sums)


def _difference(rival, reference, paths: list[str]) -> float:
    """Mean difference of crops from ImageFolder's, in levels of 255."""
    sums = []
    boxes = ((20, 30, 300, 320), (3, 5, 111, 97), (40, 10, 260, 300))
    for i, path in enumerate(paths):
        box = boxes[i % len(boxes)]
        theirs = reference.crop(path, box).astype(np.float32)
        sums.append(float(np.abs(rival.crop(path, box).astype(np.float32) - theirs).mean()))
    return statistics.mean(sums)


def _at_its_best(ctx: Context, rival, expected: int) -> tuple[int, Iterable]:
    """The rival with the number of workers that was fastest in one epoch, and that number."""
    from .decode_rivals import runner

    runners = {n: runner(rival, ctx.workload["batch"], n) for n in ctx.workload["workers"]}

    def trial(each: Iterable) -> float:
        _epoch(each, expected)  # starts the workers
        return _epoch(each, expected)

    best = best_of({n: partial(trial, r) for n, r in runners.items()}, ctx.say)
    return best, runners[best]


def _throughput(ctx: Context, out: Outcome) -> None:
    from .decode_rivals import RIVALS, PilRival, ffcv

    work = ctx.workload
    root = os.path.join(ctx.scratch, "images")
    total, quality = make_jpegs(
        root, work["files"], work["distinct"], work["mean_bytes"], ctx.seed, say=ctx.say
    )
    expected = work["files"] // work["batch"] * work["batch"]
    reference = PilRival(root)
    paths = [path for path, _ in reference.samples[:6]]
    ours = Forebay(ctx, root, total)
    levels = ours.difference(paths)
    if levels > work["same_image_levels"]:
        raise RuntimeError(f"Forebay's images are {levels:.2f} of 255 from PIL's on average")

    variants: dict[str, Callable[[], float]] = {"forebay": partial(ours.epoch, expected)}
    about: dict[str, tuple[bool, str]] = {}
    for kind in RIVALS:
        try:
            rival = kind(root)
            apart = _difference(rival, reference, paths)
            same = apart <= work["same_image_levels"]
            ctx.say(f"{kind.name}: looking for its best number of workers")
            best, chosen = _at_its_best(ctx, rival, expected)
        except Exception as error:  # noqa: BLE001 - a rival that does not run is a result too
            out.notes.append(f"{kind.name}: not measured ({type(error).__name__}: {error})")
            ctx.say(out.notes[-1])
            continue
        name = f"{kind.name}, {best} {'threads' if kind.name == 'SPDL' else 'workers'}"
        about[name] = (
            same,
            f"{rival.how}; {'the same image' if same else 'NOT the same image'}: "
            f"{apart:.2f} of 255 from PIL's on average",
        )
        variants[name] = partial(_epoch, chosen, expected)
    out.notes.append(ffcv())

    times = interleave(variants, ctx.repeats, ctx.say)
    rates = {name: [expected / t for t in values] for name, values in times.items()}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    comparable = [name for name, (same, _) in about.items() if same]
    if not comparable:
        raise RuntimeError(f"no rival that gives the same image runs here: {out.notes}")
    best_rival = max(comparable, key=lambda name: medians[name])
    out.speedup("decode_vs_best_rival", times["forebay"], times[best_rival])
    out.cases.append(
        Case("decode and augment, Forebay", "images/s", rates["forebay"],
             rivals={name: medians[name] for name in about},
             note=f"{work['files']} files of {total / work['files'] / 1024:.0f} KiB (quality "
             f"{quality}), first epoch of a new engine; {levels:.2f} of 255 from PIL's on average; "
             f"best rival: {best_rival}")
    )  # fmt: skip
    for name, (_, note) in about.items():
        out.cases.append(Case(f"decode and augment, {name}", "images/s", rates[name], note=note))


def _seconds(function: Callable[[bytes], object], data: bytes, repeats: int) -> list[float]:
    return [timed(partial(function, data)) for _ in range(repeats)]


def _whole_decoders() -> dict[str, Callable[..., list[float]]]:
    """Every libjpeg-turbo there is here, decoding to RGB with its defaults, on this thread."""
    from PIL import Image

    found: dict[str, Callable[..., list[float]]] = {
        "libjpeg-turbo of this build": _forebay.full_decode_seconds,
        "libjpeg-turbo in PIL": partial(_seconds, lambda d: Image.open(io.BytesIO(d)).load()),
    }
    try:
        import cv2

        cv2.setNumThreads(0)
        found["libjpeg-turbo in OpenCV"] = partial(
            _seconds, lambda d: cv2.imdecode(np.frombuffer(d, np.uint8), cv2.IMREAD_COLOR)
        )
    except ImportError:
        pass
    try:
        import simplejpeg

        found["libjpeg-turbo in simplejpeg"] = partial(
            _seconds,
            lambda d: simplejpeg.decode_jpeg(d, "RGB", fastdct=False, fastupsample=False),
        )
    except ImportError:
        pass
    return found


def _crop(ctx: Context, out: Outcome) -> None:
    """A crop, resized, beside the whole image merely decoded: one thread, in turns."""
    from forebay import transforms as T

    from .decode_rivals import SIDE

    work = ctx.workload["crop"]
    size = (work["width"], work["height"])
    if size not in SIZES:
        raise RuntimeError(f"no image of {size} is made")
    quality, numbers = 95, iter(range(1 << 20))
    images: list[bytes] = []
    while len(images) < work["images"]:
        pixels = photo(ctx.seed + 1, next(numbers))
        if pixels.shape[:2] == size[::-1]:
            images.append(encode(pixels, quality))
    decoders = _whole_decoders()
    trials: dict[str, float] = {}
    for name, decoder in decoders.items():
        try:
            trials[name] = statistics.median(decoder(images[0], work["trials"]))
        except Exception as error:  # noqa: BLE001 - built without it
            out.notes.append(f"{name}: not measured ({error})")
    baseline = min(trials, key=lambda name: trials[name])
    full = decoders[baseline]
    per_round = work["draws"] // work["rounds"]
    crops: list[float] = []
    wholes: list[float] = []
    ratios = []
    for i in range(work["rounds"]):
        data = images[i % len(images)]
        spec = T.export([T.RandomResizedCrop(SIDE)])
        ours = _forebay.crop_decode_seconds(
            np.frombuffer(data, np.uint8), spec, per_round, ctx.seed + i
        )
        theirs = full(data, per_round)
        crops += ours
        wholes += theirs
        ratios.append(statistics.mean(ours) / statistics.mean(theirs))
        ctx.say(f"crop / whole: {ratios[-1]:.3f} ({i + 1}/{work['rounds']})")
    out.figures["crop_vs_full_decode"] = statistics.mean(crops) / statistics.mean(wholes)
    out.repeats["crop_vs_full_decode"] = ratios
    kib = statistics.mean(len(data) for data in images) / 1024
    out.cases.append(
        Case("crop to 224 x 224 / whole image decoded", "ratio", ratios, limit=1.0,
             limit_name=f"{baseline} decoding it whole",
             note=f"{size[0]} x {size[1]}, {kib:.0f} KiB; means of {len(crops)} draws: "
             f"{statistics.mean(crops) * 1e3:.3f} ms for the crop and its resize, "
             f"{statistics.mean(wholes) * 1e3:.3f} ms for {baseline}, the fastest of "
             + ", ".join(f"{name} ({seconds * 1e3:.3f} ms)" for name, seconds in trials.items()))
    )  # fmt: skip


def run(ctx: Context) -> Outcome:
    out = Outcome()
    _crop(ctx, out)
    _throughput(ctx, out)
    return out
