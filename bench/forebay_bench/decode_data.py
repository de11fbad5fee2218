"""JPEG files that cost a decoder what photographs cost: made from a seed, so nothing is fetched.

A photograph's power spectrum falls as 1/f^2; these images have such spectra, over shapes with hard
edges and colours of their own, and sizes and bytes as ImageNet's (500 x 375, about 110 KiB, 4:2:0).
"""

from __future__ import annotations

import io
import multiprocessing
import os
from collections.abc import Callable, Sequence

import numpy as np

_SIDE = 512
SIZES = ((500, 375), (500, 375), (500, 375), (375, 500), (500, 333), (480, 360), (500, 400))


def _falling_spectrum(rng: np.random.Generator, exponent: float) -> np.ndarray:
    """Two independent fields (real and imaginary part) of mean 0, deviation 1."""
    frequency = np.fft.fftfreq(_SIDE).astype(np.float32)
    radius = np.hypot(frequency[:, None], frequency[None, :])
    radius[0, 0] = np.inf
    white = rng.standard_normal((2, _SIDE, _SIDE), dtype=np.float32)
    field = np.fft.ifft2((white[0] + 1j * white[1]) * radius**-exponent).astype(np.complex64)
    return field / field.real.std()


def photo(seed: int, number: int) -> np.ndarray:
    """One image, (height, width, 3) of uint8; the same for the same arguments."""
    from PIL import Image, ImageDraw

    rng = np.random.default_rng((seed, number))
    width, height = SIZES[int(rng.integers(len(SIZES)))]
    field = _falling_spectrum(rng, float(rng.uniform(0.95, 1.35)))[:height, :width]
    scene = Image.new("RGB", (width, height), tuple(int(v) for v in rng.integers(60, 200, 3)))
    draw = ImageDraw.Draw(scene)
    for _ in range(int(rng.integers(6, 16))):
        colour = tuple(int(v) for v in rng.integers(20, 236, 3))
        centre = rng.uniform((0, 0), (width, height))
        extent = rng.uniform(20, 160, 2)
        if rng.random() < 0.5:
            draw.ellipse((*(centre - extent), *(centre + extent)), fill=colour)
        else:
            turns = np.sort(rng.uniform(0, 2 * np.pi, int(rng.integers(3, 7))))
            corners = centre + extent * np.stack((np.cos(turns), np.sin(turns)), axis=1)
            draw.polygon([(float(x), float(y)) for x, y in corners], fill=colour)
    texture = float(rng.uniform(18, 34))
    grain = rng.standard_normal((height, width), dtype=np.float32) * rng.uniform(5, 11)
    light = field.real * texture + grain
    tint = field.imag * (texture * 0.35)
    pixels = np.asarray(scene, dtype=np.float32) + light[..., None]
    pixels += tint[..., None] * np.array([1.0, -0.2, -0.8], np.float32)
    return pixels.clip(0, 255).astype(np.uint8)


def encode(pixels: np.ndarray, quality: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", quality=quality, subsampling="4:2:0")
    return out.getvalue()


def quality_for(mean_bytes: int, seed: int, *, samples: int = 12) -> int:
    """The JPEG quality at which the images come nearest to `mean_bytes` on average."""
    images = [photo(seed, i) for i in range(samples)]
    low, high = 50, 99
    apart: dict[int, float] = {}
    while low < high:
        middle = (low + high) // 2
        bytes_there = sum(len(encode(p, middle)) for p in images) / samples
        apart[middle] = abs(bytes_there - mean_bytes)
        if bytes_there < mean_bytes:
            low = middle + 1
        else:
            high = middle
    return min(apart, key=lambda quality: apart[quality])


def _write(job: tuple[int, int, int, Sequence[str]]) -> int:
    seed, number, quality, paths = job
    data = encode(photo(seed, number), quality)
    for path in paths:
        with open(path, "wb") as out:
            out.write(data)
    return len(data)


def make_jpegs(
    root: str, count: int, distinct: int, mean_bytes: int, seed: int, *, classes: int = 10,
    processes: int = 1, say: Callable[[str], None] = lambda _: None,
) -> tuple[int, int]:  # fmt: skip
    """`count` files in class folders, of `distinct` images each written several times.

    Returns (bytes of all files, the JPEG quality)."""
    distinct = min(distinct, count)
    for c in range(classes):
        os.makedirs(os.path.join(root, f"class{c:02d}"), exist_ok=True)
    paths = [os.path.join(root, f"class{i % classes:02d}", f"{i:06d}.jpg") for i in range(count)]
    quality = quality_for(mean_bytes, seed)
    jobs = [(seed, i, quality, paths[i::distinct]) for i in range(distinct)]
    total = 0

    def collect(sizes) -> None:
        nonlocal total
        for done, size in enumerate(sizes, 1):
            total += size * len(jobs[done - 1][3])
            if done % max(1, distinct // 4) == 0:
                say(f"made {done} of {distinct} images (quality {quality})")

    if processes > 1:
        # Fresh processes: the caller may hold CUDA, threads or an engine.
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            collect(pool.imap(_write, jobs, chunksize=8))
    else:
        collect(map(_write, jobs))
    return total, quality
