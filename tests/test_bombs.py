"""Images that are small in a file and huge in memory: the budget holds, and memory comes back."""

from __future__ import annotations

import struct
import subprocess
import sys
import textwrap
import zlib
from pathlib import Path

import forebay
import numpy as np
import pytest
from forebay import _forebay
from forebay import transforms as T
from PIL import Image

SMALL = [T.Resize((8, 8)), T.ToTensor()]


def webp(width: int, height: int) -> bytes:
    """One colour, lossless: 28 bytes, whatever the size."""
    bits = 0x2F | (width - 1) << 8 | (height - 1) << 22
    at = 8 + 14 + 14 + 1 + 3  # no alpha, version 0
    at += 3  # no transform, no colour cache, one set of codes
    for _ in range(5):  # each code has one symbol, 0
        bits |= 1 << at
        at += 4
    data = bits.to_bytes(8, "little")
    chunk = b"VP8L" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", 4 + len(chunk)) + b"WEBP" + chunk


def png(width: int, height: int, interlaced: bool) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2),
              (0, 1, 1, 2)] if interlaced else [(0, 0, 1, 1)]  # fmt: skip
    rows = 0
    for x, y, dx, dy in passes:
        columns = -(-(width - x) // dx)
        rows += -(-(height - y) // dy) * (1 + -(-columns // 8))
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, int(interlaced))
    data = zlib.compress(bytes(rows), 9)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def jpeg(width: int, height: int, progressive: bool, padding: int = 0) -> bytes:
    """A small picture whose header says another size."""
    import io

    out = io.BytesIO()
    Image.fromarray(np.full((16, 16, 3), 90, np.uint8)).save(out, "JPEG", progressive=progressive)
    data = bytearray(out.getvalue())
    at = data.index(b"\xff\xc2" if progressive else b"\xff\xc0")
    data[at + 5 : at + 9] = struct.pack(">HH", height, width)
    return bytes(data) + bytes(padding)


def folder(at: Path, bomb: bytes, suffix: str) -> Path:
    root = at / "data"
    (root / "a").mkdir(parents=True)
    for i in range(6):
        Image.fromarray(np.full((16, 16, 3), 40 * i, np.uint8)).save(root / "a" / f"{i}.png")
    (root / "a" / f"3{suffix}").write_bytes(bomb)
    return root


def needs_webp() -> None:
    if "WebP" not in _forebay.image_formats():
        pytest.skip("this build has no libwebp")


BEYOND = {
    "webp": lambda: webp(16383, 16383),
    "png": lambda: png(16384, 12000, False),
    "interlaced": lambda: png(16384, 12000, True),
    "jpeg": lambda: jpeg(65500, 65500, False),
    "progressive": lambda: jpeg(65500, 65500, True),
    "jpeg below the limit of 2**28": lambda: jpeg(16000, 16000, False),
}


@pytest.mark.parametrize("kind", BEYOND)
def test_more_than_max_pixels_is_corrupt_and_can_be_skipped(tmp_path, kind):
    if kind == "webp":
        needs_webp()
    root = folder(tmp_path, BEYOND[kind](), ".bomb")
    with forebay.DataLoader(root, 7, decode="image", transform=SMALL, memory="64M") as loader:
        with pytest.raises(forebay.CorruptError, match=r"3\.bomb.*(max_pixels|65500)"):
            list(loader)
    with forebay.DataLoader(
        root, 7, decode="image", transform=SMALL, memory="64M", on_error="skip"
    ) as loader:
        assert [len(labels) for _, labels in loader] == [6]


def test_max_pixels_is_the_users(tmp_path):
    root = folder(tmp_path, png(64, 64, False), ".bomb")
    with forebay.DataLoader(root, 7, decode="image", transform=SMALL, max_pixels=64 * 64) as loader:
        assert [len(labels) for _, labels in loader] == [7]
    with forebay.DataLoader(
        root, 7, decode="image", transform=SMALL, max_pixels=64 * 64 - 1, on_error="skip"
    ) as loader:
        assert [len(labels) for _, labels in loader] == [6]
    for wrong in (0, -1, 1 << 29, 1.5, "many"):
        with pytest.raises(forebay.ArgumentError, match="max_pixels"):
            forebay.DataLoader(root, 7, decode="image", transform=SMALL, max_pixels=wrong)
    with pytest.raises(forebay.ArgumentError, match="max_pixels"):
        forebay.DataLoader(root, 7, max_pixels=100)


def test_a_short_progressive_jpeg_is_corrupt_not_too_large(tmp_path):
    root = folder(tmp_path, jpeg(12000, 12000, True), ".jpg")
    with forebay.DataLoader(
        root, 7, decode="image", transform=SMALL, memory="64M", on_error="skip"
    ) as loader:
        assert [len(labels) for _, labels in loader] == [6]


# Resident memory is the process's: each case has one of its own.
MEASURED = """
import sys
import forebay
from forebay import transforms as T

def kib(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1])

root, memory, before = sys.argv[1:4]
transform = [eval("T." + t) for t in sys.argv[4].split(";")]
with forebay.DataLoader(before, 6, decode="image", transform=transform, memory=memory) as warm:
    list(warm)
start = kib("RssAnon")
open("/proc/self/clear_refs", "w").write("5")
result = "decoded"
how = dict(decode="image", transform=transform, memory=memory)
with forebay.DataLoader(root, 7, epochs=3, **how) as loader:
    try:
        for epoch in range(3):
            assert [len(labels) for _, labels in loader] == [7]
    except forebay.BudgetError as error:
        result = str(error)
    peak = kib("VmHWM")
    print(peak - start, kib("RssAnon") - start, result)
"""


def measure(tmp_path: Path, bomb: bytes, memory: str, transform: str) -> tuple[int, int, str]:
    """MiB at the peak, MiB kept, and what came of it."""
    root = folder(tmp_path, bomb, ".bomb")
    before = folder(tmp_path / "before", png(8, 8, False), ".png")
    out = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURED), root, memory, before, transform],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    peak, kept, result = out.split(maxsplit=2)
    return int(peak) >> 10, int(kept) >> 10, result.strip()


BOMBS = {
    "webp": (lambda: webp(12000, 12000), "Resize((8, 8))"),
    "interlaced png": (lambda: png(12000, 12000, True), "Resize((8, 8))"),
    "progressive jpeg": (lambda: jpeg(12000, 12000, True, 1 << 20), "Resize((8, 8))"),
    # A strip that a resize makes huge, before an op that needs the whole image.
    "strip": (lambda: png(1, 100000, False), "Resize(64);ColorJitter(0.5);CenterCrop(8)"),
    # Rows of 16 million pixels: libpng's own, and the coefficients of the resize.
    "wide": (lambda: png((1 << 24) - 1, 4, False), "Resize((8, 8))"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_what_the_budget_cannot_hold_is_a_budget_error(tmp_path, kind):
    if kind == "webp":
        needs_webp()
    made, transform = BOMBS[kind]
    peak, kept, result = measure(tmp_path, made(), "64M", transform)
    assert "3.bomb" in result and "memory=" in result and "max_pixels=" in result, result
    assert peak < 160 and kept < 96, (peak, kept)


@pytest.mark.parametrize("kind", ["webp", "interlaced png"])
def test_what_a_large_image_took_is_given_back(tmp_path, kind):
    if kind == "webp":
        needs_webp()
    bomb = webp(4000, 4000) if kind == "webp" else png(4000, 4000, True)
    peak, kept, result = measure(tmp_path, bomb, "256M", "Resize((8, 8))")
    assert result == "decoded"
    assert peak < 400, peak
    assert kept < 48, kept


def test_threads_with_large_images_wait_for_each_other(tmp_path):
    """One fits the budget, two do not: each has its turn."""
    root = tmp_path / "data" / "a"
    root.mkdir(parents=True)
    for i in range(12):
        (root / f"{i:02}.png").write_bytes(png(3000, 3000, True))
    with forebay.DataLoader(
        root.parent, 4, decode="image", transform=SMALL, memory="64M"
    ) as loader:
        for _ in range(2):
            assert [len(labels) for _, labels in loader] == [4, 4, 4]
