"""Real pictures without a download: Fashion-MNIST of a Debian package, or scikit-learn's digits."""

from __future__ import annotations

import gzip
import os

import numpy as np


def _idx(path: str) -> np.ndarray:
    """An IDX file: two zero bytes, type, rank, sizes (big-endian), then uint8 values."""
    with gzip.open(path, "rb") as file:
        data = file.read()
    rank = data[3]
    if data[:3] != b"\0\0\x08":
        raise RuntimeError(f"{path} is no IDX file of bytes")
    shape = np.frombuffer(data, ">u4", rank, 4).astype(int)
    return np.frombuffer(data, np.uint8, int(shape.prod()), 4 + 4 * rank).reshape(shape)


def real_images(folders: list[str]) -> tuple[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """(what they are, {"train", "val"} -> (images (n, h, w) of uint8, labels))."""
    given = os.environ.get("FOREBAY_FASHION_MNIST")
    for folder in [given] if given else folders:
        if os.path.isdir(folder):
            return "Fashion-MNIST", {
                part: (_idx(os.path.join(folder, f"{name}-images-idx3-ubyte.gz")),
                       _idx(os.path.join(folder, f"{name}-labels-idx1-ubyte.gz")))
                for part, name in (("train", "train"), ("val", "t10k"))
            }  # fmt: skip
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise RuntimeError(
            "no real images here: install Debian's dataset-fashion-mnist (looked in "
            f"{given or ', '.join(folders)}; FOREBAY_FASHION_MNIST names another folder), or "
            "scikit-learn"
        ) from None
    digits = load_digits()
    images = (digits.images * (255 / 16)).round().astype(np.uint8)
    labels = digits.target.astype(np.uint8)
    val = np.arange(len(images)) % 4 == 3
    return "scikit-learn's digits", {
        "train": (images[~val], labels[~val]),
        "val": (images[val], labels[val]),
    }


def write_jpegs(root: str, images: np.ndarray, labels: np.ndarray, side: int) -> None:
    """Colour JPEGs of side x side in class folders, as ImageFolder wants them."""
    from PIL import Image

    for label in np.unique(labels):
        os.makedirs(os.path.join(root, f"class{label:02d}"), exist_ok=True)
    for i, (pixels, label) in enumerate(zip(images, labels, strict=True)):
        image = Image.fromarray(pixels).resize((side, side), Image.Resampling.BICUBIC)
        path = os.path.join(root, f"class{label:02d}", f"{i:06d}.jpg")
        image.convert("RGB").save(path, quality=92, subsampling="4:2:0")
