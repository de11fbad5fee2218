"""Who else decodes and augments: the rivals of `bench decode`, each as its users write it.

All end with the same tensor: RandomResizedCrop(224), a flip for half of them, normalised float32.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from .torch_rival import RawFolder

SIDE = 224
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
_MEAN = torch.tensor(MEAN).view(3, 1, 1)
_STD = torch.tensor(STD).view(3, 1, 1)
Box = tuple[int, int, int, int]  # top, left, height, width


# ---- torchvision, also where its CUDA build meets a CPU torch


def torchvision() -> Any:
    """The package. Its CUDA build cannot load its operators beside a CPU torch, and then cannot
    declare shapes for them; declared here, the rest of it imports."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision as package
        except RuntimeError as error:
            if "does not exist" not in str(error):
                raise
            library = torch.library.Library("torchvision", "FRAGMENT")
            for name in ("nms", "qnms"):
                try:
                    library.define(
                        f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                    )
                except RuntimeError:
                    pass  # another module of this process declared it
            globals()["_declared"] = library  # an operator lives as long as its library
            for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
                del sys.modules[name]
            import torchvision as package
        import torchvision.io
        import torchvision.transforms
        import torchvision.transforms.functional  # noqa: F401
    return package


def _symbols(path: str, which: str) -> set[str]:
    lines = subprocess.run(
        ["nm", "-D", which, path], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()
    return {line.split()[-1].split("@")[0] for line in lines if line.split()}


def load_torchvision_decoder() -> str:
    """Makes torchvision.io.decode_jpeg usable; returns how.

    The wheel's image.so is linked to two CUDA libraries of torch, for its GPU decoder. Where torch
    has none, empty ones let its CPU decoder, which needs nothing of them, load as it is."""
    package = torchvision()

    def usable() -> bool:
        try:
            return torch.ops.image.decode_jpeg is not None
        except AttributeError:
            return False

    if usable():
        return "as installed"
    image = os.path.join(os.path.dirname(package.__file__), "image.so")
    missing = sorted(s for s in _symbols(image, "--undefined-only") if "3c104cuda" in s)
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "none.c")
        with open(source, "w") as out:
            out.write("#include <stdlib.h>\n")
            out.writelines(f"void {name}(void) {{ abort(); }}\n" for name in missing)
        for name in ("libc10_cuda.so", "libtorch_cuda.so"):
            path = os.path.join(folder, name)
            what = [source] if name == "libc10_cuda.so" else ["-x", "c", os.devnull]
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-o", path, f"-Wl,-soname,{name}", *what],
                check=True, capture_output=True, timeout=60,
            )  # fmt: skip
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
        torch.ops.load_library(image)
    if not usable():
        raise RuntimeError("torchvision's image library loads, but registers no decode_jpeg")
    return "image.so of the CUDA wheel, its unused CUDA symbols stubbed"


# ---- pieces


def draw_box(width: int, height: int) -> Box:
    """RandomResizedCrop.get_params with its defaults, on torch's generator."""
    area = width * height
    low, high = math.log(3 / 4), math.log(4 / 3)
    for _ in range(10):
        target = area * torch.empty(1).uniform_(0.08, 1.0).item()
        ratio = math.exp(torch.empty(1).uniform_(low, high).item())
        w, h = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < w <= width and 0 < h <= height:
            top = int(torch.randint(0, height - h + 1, ()).item())
            left = int(torch.randint(0, width - w + 1, ()).item())
            return top, left, h, w
    side = min(width, height)
    return (height - side) // 2, (width - side) // 2, side, side


def _normalised(pixels: np.ndarray) -> torch.Tensor:
    """As ToTensor and Normalize."""
    image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).contiguous()
    return image.to(torch.float32).div_(255).sub_(_MEAN).div_(_STD)


class Rival(Dataset):
    """A data set of crops. `crop` alone is what the comparison of images calls."""

    name = ""
    how = ""  # with what it decodes and resizes

    def __init__(self, root: str) -> None:
        self.samples = RawFolder(root).samples

    def __len__(self) -> int:
        return len(self.samples)

    def crop(self, path: str, box: Box) -> np.ndarray:
        """The crop at (224, 224, 3), uint8, before flip and normalisation."""
        raise NotImplementedError


class PilRival(Rival):
    """ImageFolder's own way. torchvision's transforms where they import."""

    name = "PyTorch, PIL"

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.how = "torchvision's transforms"
        try:
            T = torchvision().transforms
            self.transform: Callable | None = T.Compose(
                [T.RandomResizedCrop(SIDE), T.RandomHorizontalFlip(), T.ToTensor(),
                 T.Normalize(MEAN, STD)]
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - whatever keeps it from loading
            self.transform = None
            self.how = f"PIL code of our own: torchvision does not import ({error})"

    def open(self, path: str) -> Image.Image:
        with open(path, "rb") as file:
            return Image.open(file).convert("RGB")

    def cut(self, image: Image.Image, box: Box) -> Image.Image:
        top, left, h, w = box
        part = image.crop((left, top, left + w, top + h))
        return part.resize((SIDE, SIDE), Image.Resampling.BILINEAR)

    def crop(self, path: str, box: Box) -> np.ndarray:
        return np.asarray(self.cut(self.open(path), box))

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[i]
        image = self.open(path)
        if self.transform is not None:
            return self.transform(image), label
        part = self.cut(image, draw_box(*image.size))
        if torch.rand(1) < 0.5:
            part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return _normalised(np.asarray(part)), label


class TorchvisionRival(Rival):
    """torchvision.io.decode_jpeg, and torchvision's transforms on tensors of uint8."""

    name = "PyTorch, torchvision decode_jpeg"

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.how = load_torchvision_decoder()
        package = torchvision()
        self.functional = package.transforms.functional
        T = package.transforms
        self.transform = T.Compose(
            [T.RandomResizedCrop(SIDE, antialias=True), T.RandomHorizontalFlip(),
             T.ConvertImageDtype(torch.float32), T.Normalize(MEAN, STD)]
        )  # fmt: skip

    def decode(self, path: str) -> torch.Tensor:
        with open(path, "rb") as file:
            data = bytearray(file.read())
        # What torchvision.io.decode_jpeg calls, once it has looked whether it loaded it itself.
        return torch.ops.image.decode_jpeg(torch.frombuffer(data, dtype=torch.uint8), 3, False)

    def crop(self, path: str, box: Box) -> np.ndarray:
        cut = self.functional.resized_crop(self.decode(path), *box, [SIDE, SIDE], antialias=True)
        return cut.permute(1, 2, 0).numpy()

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[i]
        return self.transform(self.decode(path)), label


class OpenCvRival(Rival):
    """cv2.imdecode and cv2.resize, as most code with OpenCV: it does not smooth when shrinking."""

    name = "PyTorch, OpenCV, cv2.resize"

    def __init__(self, root: str) -> None:
        super().__init__(root)
        import cv2

        cv2.setNumThreads(0)  # the workers are the parallelism
        self.cv2 = cv2
        self.how = f"OpenCV {cv2.__version__}"

    def decode(self, path: str) -> np.ndarray:
        cv2 = self.cv2
        image = cv2.imdecode(np.fromfile(path, np.uint8), cv2.IMREAD_COLOR)
        return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)

    def cut(self, image: np.ndarray, box: Box) -> np.ndarray:
        top, left, h, w = box
        part = image[top : top + h, left : left + w]
        return self.cv2.resize(part, (SIDE, SIDE), interpolation=self.cv2.INTER_LINEAR)

    def crop(self, path: str, box: Box) -> np.ndarray:
        return self.cut(self.decode(path), box)

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        path, label = self.samples[i]
        image = self.decode(path)
        part = self.cut(image, draw_box(image.shape[1], image.shape[0]))
        if torch.rand(1) < 0.5:
            part = self.cv2.flip(part, 1)
        return _normalised(part), label


class OpenCvPilRival(OpenCvRival):
    """cv2.imdecode with PIL's resize, which gives ImageFolder's image."""

    name = "PyTorch, OpenCV, PIL's resize"

    def cut(self, image: np.ndarray, box: Box) -> np.ndarray:
        top, left, h, w = box
        part = Image.fromarray(np.ascontiguousarray(image[top : top + h, left : left + w]))
        return np.asarray(part.resize((SIDE, SIDE), Image.Resampling.BILINEAR))


class SpdlRival(Rival):
    """SPDL: threads in one process, FFmpeg's decoder and its scaling of the YUV planes."""

    name = "SPDL"

    def __init__(self, root: str) -> None:
        super().__init__(root)
        import spdl.io
        import spdl.pipeline
        from spdl.io import load_image

        self.io, self.pipeline = spdl.io, spdl.pipeline
        load_image(self.samples[0][0])  # fails here where there is no FFmpeg
        self.how = "FFmpeg's decoder and scaler"

    def frames(self, path: str, box: Box | None, flip: bool) -> Any:
        packets = self.io.demux_image(path)
        top, left, h, w = box or draw_box(packets.codec.width, packets.codec.height)
        chain = f"crop={w}:{h}:{left}:{top}:exact=1,scale={SIDE}:{SIDE}:flags=bilinear"
        chain += f"{',hflip' if flip else ''},format=pix_fmts=rgb24"
        return self.io.decode_packets(packets, filter_desc=chain)

    def crop(self, path: str, box: Box) -> np.ndarray:
        return np.array(self.io.to_numpy(self.io.convert_frames(self.frames(path, box, False))))

    def _batch(self, items: list) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = self.io.to_torch(self.io.convert_frames([frames for frames, _ in items]))
        images = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        images = images.div_(255).sub_(_MEAN).div_(_STD)
        return images, torch.tensor([label for _, label in items])

    def loader(self, batch: int, threads: int) -> Iterator:
        def one(i: int) -> tuple[Any, int]:
            path, label = self.samples[i]
            return self.frames(path, None, bool(torch.rand(1) < 0.5)), label

        order = torch.randperm(len(self)).tolist()
        pipeline = (
            self.pipeline.PipelineBuilder().add_source(order).pipe(one, concurrency=threads)
            .aggregate(batch, drop_last=True).pipe(self._batch).add_sink(2)
            .build(num_threads=threads)
        )  # fmt: skip
        with pipeline.auto_stop():
            yield from pipeline.get_iterator(timeout=60)


class TorchRunner:
    """PyTorch's DataLoader over a rival, its workers alive from epoch to epoch."""

    def __init__(self, dataset: Rival, batch: int, workers: int) -> None:
        self.loader = DataLoader(
            dataset, batch_size=batch, shuffle=True, drop_last=True, num_workers=workers,
            persistent_workers=workers > 0, prefetch_factor=2 if workers else None,
        )  # fmt: skip

    def __iter__(self) -> Iterator:
        return iter(self.loader)


class SpdlRunner:
    def __init__(self, dataset: SpdlRival, batch: int, threads: int) -> None:
        self.dataset, self.batch, self.threads = dataset, batch, threads

    def __iter__(self) -> Iterator:
        return self.dataset.loader(self.batch, self.threads)


RIVALS: tuple[type[Rival], ...] = (
    PilRival, TorchvisionRival, OpenCvPilRival, OpenCvRival, SpdlRival,
)  # fmt: skip


def runner(dataset: Rival, batch: int, parallel: int) -> TorchRunner | SpdlRunner:
    if isinstance(dataset, SpdlRival):
        return SpdlRunner(dataset, batch, parallel)
    return TorchRunner(dataset, batch, parallel)


def ffcv() -> str:
    """FFCV converts the data set to files of its own, so it is no rival over the same files."""
    try:
        import ffcv as package
    except ImportError as error:
        return f"FFCV: not measured, it is not installed here ({error})"
    return f"FFCV {package.__version__}: not measured, it reads only files converted to its format"
