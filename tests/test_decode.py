"""Decoded batches: the sampler's order, PIL's pixels, torchvision's transforms."""

from __future__ import annotations

import io
import logging
import random
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import threading
import time
import zlib
from pathlib import Path

import forebay
import numpy as np
import pytest
import torch
from data_sets import torch_order as full_torch_order
from data_sets import write_tar
from forebay import _forebay
from forebay import transforms as T
from PIL import Image, JpegImagePlugin
from test_transforms import pil_steps
from torchvision_cpu import torchvision

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRAIN = [
    T.RandomResizedCrop(48), T.RandomHorizontalFlip(), T.ColorJitter(0.3, 0.3, 0.3, 0.1),
    T.ToTensor(), T.Normalize(MEAN, STD),
]  # fmt: skip
MODES = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


def photo(rng: np.random.Generator, width: int, height: int, channels: int = 3) -> np.ndarray:
    """Smooth shapes and some noise, as photographs have them."""
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    planes = []
    for _ in range(channels):
        a, b, c, d = rng.uniform(1, 12, 4)
        plane = 128 + 80 * np.sin(a * x + b * y) * np.cos(c * x - d * y)
        planes.append(plane + rng.normal(0, 12, (height, width)))
    return np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)


def encode(pixels: np.ndarray, mode: str, form: str, **how) -> bytes:
    image = Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[:, :, 0])
    if mode:
        image = image.convert(mode)
    out = io.BytesIO()
    image.save(out, form, **how)
    return out.getvalue()


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    """Three classes of JPEG, PNG and WebP files of many kinds."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(1)
    formats = ["jpg", "jpg", "png", "webp"] if "WebP" in _forebay.image_formats() else ["jpg"]
    for i in range(61):
        folder = root / f"class{i % 3}"
        folder.mkdir(exist_ok=True)
        form = formats[i % len(formats)]
        pixels = photo(rng, int(rng.integers(30, 120)), int(rng.integers(30, 120)))
        how = {"quality": int(rng.integers(60, 98))} if form != "png" else {}
        (folder / f"{i:03}.{form}").write_bytes(encode(pixels, "", MODES[form], **how))
    return root


def torch_order(size: int, *, seed: int, epoch: int, rank: int = 0, world: int = 1) -> list[int]:
    return full_torch_order(
        size, shuffle=True, seed=seed, epoch=epoch, rank=rank, world=world, drop_last=False
    )


def paths_of(root: Path) -> list[Path]:
    return [p for c in sorted(root.iterdir()) for p in sorted(c.iterdir())]


def pil_sample(path: Path, ops: list, seed: int, epoch: int, sample: int) -> torch.Tensor:
    """What torchvision makes of the file with the parameters that C++ drew."""
    image = Image.open(path).convert("RGB")
    steps = _forebay.transform_params(
        T.export(ops), image.width, image.height, seed=seed, epoch=epoch, sample=sample
    )
    tensor = torchvision.transforms.functional.to_tensor(pil_steps(image, steps))
    return torchvision.transforms.functional.normalize(tensor, MEAN, STD)


def loader(root: Path, **how) -> forebay.DataLoader:
    how = {"shuffle": True, "seed": 5, "memory": "128M", "decode": "image", "rank": 0,
           "world_size": 1, "transform": TRAIN, **how}  # fmt: skip
    return forebay.DataLoader(root, how.pop("batch_size", 8), **how)


# ---- pixels


JPEGS = [
    ("RGB", {"quality": 92, "subsampling": 0}),
    ("RGB", {"quality": 75, "subsampling": 1}),
    ("RGB", {"quality": 85, "subsampling": 2}),
    ("RGB", {"quality": 98, "subsampling": 2, "optimize": True}),
    ("RGB", {"quality": 80, "progressive": True}),
    ("RGB", {"quality": 95, "progressive": True, "subsampling": 0}),
    ("RGB", {"quality": 30, "restart_marker_rows": 1}),
    ("L", {"quality": 90}),
    ("L", {"quality": 50, "progressive": True}),
    ("CMYK", {"quality": 90}),
]  # fmt: skip


@pytest.mark.parametrize(("mode", "how"), JPEGS)
def test_jpeg_is_pils_bit_for_bit(mode, how):
    rng = np.random.default_rng(2)
    for width, height in [(1, 1), (7, 9), (8, 8), (17, 33), (100, 75), (129, 240), (16, 500)]:
        data = encode(photo(rng, width, height), mode, "JPEG", **how)
        wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        file = np.frombuffer(data, np.uint8)
        assert np.array_equal(_forebay.decode_image(file), wanted)
        for _ in range(10):
            x, y = int(rng.integers(0, width)), int(rng.integers(0, height))
            w, h = int(rng.integers(1, width - x + 1)), int(rng.integers(1, height - y + 1))
            part = _forebay.decode_image(file, rect=(x, y, w, h))
            assert np.array_equal(part, wanted[y : y + h, x : x + w])


def test_exif_orientation_is_left_alone_as_torchvision_does():
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated
    pixels = photo(np.random.default_rng(3), 40, 30)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "JPEG", exif=exif)
    wanted = np.asarray(Image.open(io.BytesIO(out.getvalue())).convert("RGB"))
    got = _forebay.decode_image(np.frombuffer(out.getvalue(), np.uint8))
    assert got.shape == (30, 40, 3)
    assert np.array_equal(got, wanted)


def test_stray_bytes_between_markers_are_skipped_as_pil_does():
    data = encode(photo(np.random.default_rng(3), 40, 30), "RGB", "JPEG")
    for marker in (b"\xff\xdb", b"\xff\xc0", b"\xff\xc4", b"\xff\xda"):
        at = data.index(marker)
        stray = data[:at] + b"\x00\x17\x42" + data[at:]
        wanted = np.asarray(Image.open(io.BytesIO(stray)).convert("RGB"))
        assert np.array_equal(_forebay.decode_image(np.frombuffer(stray, np.uint8)), wanted)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
def test_png_is_pils_bit_for_bit(mode):
    if "PNG" not in _forebay.image_formats():
        pytest.skip("this build has no libpng")
    rng = np.random.default_rng(4)
    for width, height in [(1, 1), (7, 9), (64, 33)]:
        data = encode(photo(rng, width, height), mode, "PNG")
        wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
        assert np.array_equal(_forebay.decode_image(np.frombuffer(data, np.uint8)), wanted)


@pytest.mark.parametrize("how", [{"quality": 80}, {"lossless": True}, {"alpha": True}])
def test_webp_is_pils_bit_for_bit(how):
    if "WebP" not in _forebay.image_formats():
        pytest.skip("this build has no libwebp")
    rng = np.random.default_rng(5)
    mode = "RGBA" if how.pop("alpha", False) else "RGB"
    data = encode(photo(rng, 50, 37), mode, "WEBP", **how)
    wanted = np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)
    got = _forebay.decode_image(np.frombuffer(data, np.uint8)).astype(int)
    # Pillow brings a libwebp of its own, whose rounding may be another version's.
    assert np.abs(got - wanted).max() <= 1


@pytest.mark.parametrize("shrink", [2, 4, 8])
def test_a_shrunken_decode_is_near_libjpegs(shrink):
    rng = np.random.default_rng(6)
    for sampling in (0, 2):
        data = encode(photo(rng, 160, 96), "RGB", "JPEG", quality=92, subsampling=sampling)
        image = Image.open(io.BytesIO(data))
        assert isinstance(image, JpegImagePlugin.JpegImageFile)
        image.draft("RGB", (160 // shrink, 96 // shrink))
        wanted = np.asarray(image.convert("RGB")).astype(int)
        got = _forebay.decode_image(np.frombuffer(data, np.uint8), shrink=shrink).astype(int)
        assert got.shape == wanted.shape
        assert np.abs(got - wanted).max() <= 2


# ---- order and transforms


@pytest.mark.parametrize("channels_last", [False, True])
def test_epochs_are_torchvisions_in_the_samplers_order(photos, channels_last):
    paths = paths_of(photos)
    with loader(photos, channels_last=channels_last) as batches:
        assert len(batches) == 8
        for epoch in range(2):
            order = torch_order(len(paths), seed=5, epoch=epoch)
            seen = 0
            for images, labels in batches:
                assert images.dtype == torch.float32 and images.shape[1:] == (3, 48, 48)
                layout = torch.channels_last if channels_last else torch.contiguous_format
                assert images.is_contiguous(memory_format=layout)
                for image, label in zip(images, labels, strict=True):
                    sample = order[seen]
                    assert int(label) == int(paths[sample].parent.name[-1])
                    assert torch.equal(image, pil_sample(paths[sample], TRAIN, 5, epoch, sample))
                    seen += 1
            assert seen == len(paths)


def test_threads_ranks_and_resumes_change_no_bit(photos):
    with loader(photos, decode_threads=1) as one:
        wanted = torch.cat([images.clone() for images, _ in one])
    order = torch_order(61, seed=5, epoch=0)
    place = {sample: i for i, sample in enumerate(order)}
    for world in (2, 4):
        with loader(photos, batch_size=8 // world, world_size=world, rank=0) as first:
            for i, _ in enumerate(first):
                if i == 2:
                    break
            state = first.state_dict()
        for rank in range(world):
            with loader(photos, batch_size=8 // world, world_size=world, rank=rank) as part:
                part.load_state_dict(state)
                mine = torch_order(61, seed=5, epoch=0, rank=rank, world=world)
                mine = mine[3 * (8 // world) :]
                got = torch.cat([images.clone() for images, _ in part])
                assert torch.equal(got, torch.stack([wanted[place[s]] for s in mine]))


def test_breaking_off_starts_the_epoch_over(photos):
    with loader(photos) as batches:
        first = [images.clone() for images, _ in batches]
        batches.set_epoch(0)
        for i, (images, _) in enumerate(batches):
            assert torch.equal(images, first[i])
            if i == 3:
                break
        again = [images.clone() for images, _ in batches]
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_validation_with_resize_and_center_crop(photos):
    ops = [T.Resize(56), T.CenterCrop(48), T.ToTensor(), T.Normalize(MEAN, STD)]
    torchvisions = torchvision.transforms.Compose([
        torchvision.transforms.Resize(56), torchvision.transforms.CenterCrop(48),
        torchvision.transforms.ToTensor(), torchvision.transforms.Normalize(MEAN, STD),
    ])  # fmt: skip
    with loader(photos, transform=ops, shuffle=False) as batches:
        got = torch.cat([images.clone() for images, _ in batches])
    wanted = [torchvisions(Image.open(p).convert("RGB")) for p in paths_of(photos)]
    assert torch.equal(got, torch.stack(wanted))
    with loader(photos, transform=torchvisions, shuffle=False) as batches:
        assert torch.equal(torch.cat([images.clone() for images, _ in batches]), got)


def test_what_has_no_counterpart_runs_in_python(photos):
    tv = torchvision.transforms
    ops = tv.Compose([tv.Resize((48, 48)), tv.ToTensor(), tv.Lambda(lambda x: 1 - x)])
    with loader(photos, transform=ops, shuffle=False) as batches:
        got = torch.cat([images for images, _ in batches])
    wanted = torch.stack([ops(Image.open(p).convert("RGB")) for p in paths_of(photos)])
    assert torch.equal(got, wanted)
    solarize = tv.Compose([tv.Resize((48, 48)), tv.RandomSolarize(128, p=1.0), tv.ToTensor()])
    with loader(photos, transform=solarize, shuffle=False) as batches:
        got = torch.cat([images for images, _ in batches])
    wanted = torch.stack([solarize(Image.open(p).convert("RGB")) for p in paths_of(photos)])
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves_are_the_rounded_numbers(photos, dtype):
    with loader(photos) as whole, loader(photos, dtype=dtype) as half:
        for (a, _), (b, _) in zip(whole, half, strict=True):
            assert b.dtype == getattr(torch, dtype)
            assert torch.equal(a.to(b.dtype), b)


def test_bytes_without_to_tensor_and_collate_fn(photos):
    def collate(batch):
        return batch.numpy().copy(), list(batch.paths), batch.indices.copy(), batch.epoch

    with loader(photos, transform=TRAIN[:3], collate_fn=collate, batch_size=16) as batches:
        order = torch_order(61, seed=5, epoch=0)
        seen: list[int] = []
        for pixels, names, indices, epoch in batches:
            assert pixels.dtype == np.uint8 and pixels.shape[1:] == (3, 48, 48) and epoch == 0
            assert len(names) == len(indices) == len(pixels)
            assert all((photos / name).exists() for name in names)
            seen += list(indices)
        assert seen == order


def test_fast_decoding_is_near_the_full_one(tmp_path):
    rng = np.random.default_rng(8)
    (tmp_path / "a").mkdir()
    for i in range(6):
        data = encode(photo(rng, 640, 480), "RGB", "JPEG", quality=92)
        (tmp_path / "a" / f"{i}.jpg").write_bytes(data)
    ops = [T.RandomResizedCrop(64, scale=(0.5, 1.0)), T.ToTensor()]
    with (
        loader(tmp_path, transform=ops) as full,
        loader(tmp_path, transform=ops, fast=True) as fast,
    ):
        for (a, _), (b, _) in zip(full, fast, strict=True):
            difference = (a - b).abs()
            assert 0 < difference.max() and difference.mean() < 0.02


def test_webdataset_images_and_labels(tmp_path, photos):
    paths = [p for p in paths_of(photos) if p.suffix == ".jpg"]
    with tarfile.open(tmp_path / "shard-000.tar", "w") as tar:
        for i, path in enumerate(paths):
            for suffix, data in (("cls", str(i * 3).encode()), ("jpg", path.read_bytes())):
                info = tarfile.TarInfo(f"{i:04}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    with loader(tmp_path) as batches:
        order = torch_order(len(paths), seed=5, epoch=0)
        seen = 0
        for images, labels in batches:
            for image, label in zip(images, labels, strict=True):
                sample = order[seen]
                assert int(label) == sample * 3
                assert torch.equal(image, pil_sample(paths[sample], TRAIN, 5, 0, sample))
                seen += 1
        assert seen == len(paths)


# ---- arrays


@pytest.mark.parametrize("dtype", ["<f4", "|u1", "<i8", "<f2"])
def test_npy_arrays(tmp_path, dtype):
    rng = np.random.default_rng(9)
    wanted = []
    for i in range(21):
        folder = tmp_path / f"class{i // 11}"
        folder.mkdir(exist_ok=True)
        wanted.append(rng.integers(0, 100, (3, 5, 2)).astype(dtype))
        np.save(folder / f"{i:02}.npy", wanted[-1])
    with loader(tmp_path, decode="npy", transform=None, shuffle=False) as batches:
        got = torch.cat([arrays.clone() for arrays, _ in batches])
    assert torch.equal(got, torch.from_numpy(np.stack(wanted)))


def npz_folder(root: Path, third: str = "") -> Path:
    (root / "only").mkdir(parents=True)
    for i in range(9):
        arrays = {"image": np.full((2, 2), i, np.float32), "mask": np.zeros(3)}
        save = np.savez
        if i == 3 and third == "compressed":
            save = np.savez_compressed
        elif i == 3 and third == "larger":
            arrays["image"] = np.zeros((4, 2), np.float32)
        save(root / "only" / f"{i}.npz", **arrays)
    return root


def test_npz_members(tmp_path):
    root = npz_folder(tmp_path / "good")
    with loader(root, decode="npz:image", transform=None, shuffle=False) as batches:
        got = torch.cat([arrays.clone() for arrays, _ in batches])
    assert got.shape == (9, 2, 2) and [int(a[0, 0]) for a in got] == list(range(9))
    with pytest.raises(forebay.ArgumentError, match="image, mask"):
        loader(root, decode="npz", transform=None)


@pytest.mark.parametrize(
    ("third", "message"),
    [("compressed", r"3\.npz: .*compressed"), ("larger", r"3\.npz: .*one type and shape")],
)
def test_npz_that_cannot_be_read_is_named(tmp_path, third, message):
    root = npz_folder(tmp_path / "bad", third)
    with (
        loader(root, decode="npz:image", transform=None, shuffle=False) as batches,
        pytest.raises(forebay.ForebayError, match=message),
    ):
        list(batches)


# ---- what goes wrong


def broken_copy(photos: Path, to: Path) -> list[Path]:
    """The photos with three broken ones: cut off, no image at all, and empty."""
    shutil.copytree(photos, to)
    broken = [p for p in paths_of(to) if p.suffix == ".jpg"][:3]
    broken[0].write_bytes(broken[0].read_bytes()[:300])
    broken[1].write_bytes(b"this is not an image")
    broken[2].write_bytes(b"")
    return broken


def test_a_corrupt_image_is_named(photos, tmp_path):
    broken = broken_copy(photos, tmp_path / "copy")
    with loader(tmp_path / "copy", shuffle=False, batch_size=61) as batches:
        for _ in range(2):  # and once more: the stream stays there
            with pytest.raises(forebay.CorruptError, match=broken[0].name):
                next(iter(batches))


def test_corrupt_images_are_skipped_and_counted(photos, tmp_path, caplog):
    broken = broken_copy(photos, tmp_path / "copy")
    paths = paths_of(tmp_path / "copy")
    with loader(tmp_path / "copy", on_error="skip", epochs=1, batch_size=1) as batches:
        with caplog.at_level(logging.WARNING, logger="forebay"):
            got = [(images.clone(), labels.clone()) for images, labels in batches]
        order = torch_order(len(paths), seed=5, epoch=0)
        kept = [s for s in order if paths[s] not in broken]
        assert len(got) == len(kept)
        for (images, _), sample in zip(got, kept, strict=True):
            assert torch.equal(images[0], pil_sample(paths[sample], TRAIN, 5, 0, sample))
        assert batches.engine.metrics()["forebay_decode_skipped_samples_total"] == 3
        assert "corrupt samples skipped: 3" in caplog.text
        assert batches.state_dict()["epoch"] == 1


def test_positions_count_batches_that_were_skipped_whole(photos, tmp_path):
    broken = broken_copy(photos, tmp_path / "copy")
    first = [paths_of(tmp_path / "copy").index(p) for p in broken]
    with loader(tmp_path / "copy", on_error="skip", shuffle=False, batch_size=1) as batches:
        for _, (_, labels) in zip(range(4), batches, strict=False):
            assert len(labels) == 1
        consumed = batches.state_dict()["consumed"]
        assert consumed == 4 + sum(1 for f in first if f < consumed)
        wanted = [s for s in range(61) if s not in first][4]
        with loader(tmp_path / "copy", on_error="skip", shuffle=False, batch_size=1,
                    collate_fn=lambda b: int(b.indices[0])) as other:  # fmt: skip
            other.load_state_dict(batches.state_dict())
            assert next(iter(other)) == wanted


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"decode": "video"}, "'image', 'npy'"),
        ({"decode": "npy:x"}, "'image', 'npy'"),
        ({"decode": "npy"}, "are for images"),
        ({"on_error": "ignore"}, "'raise' or 'skip'"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"dtype": "uint8"}, "ToTensor makes numbers"),
        ({"transform": [T.CenterCrop(8)], "dtype": "float32"}, "needs ToTensor"),
        ({"transform": [T.Resize(8)]}, "CenterCrop"),
        ({"layout": "contiguous"}, "layout="),
        ({"decode": True}, "'image', 'npy'"),
        ({"decode": None}, "needs decode="),
        ({"decode": None, "transform": None, "on_error": "skip"}, "on_error= needs decode="),
        ({"decode": None, "transform": None, "dtype": "float16"}, "dtype= needs decode="),
        ({"device": "cdua"}, "it takes 'cuda'"),
        ({"batch_size": 2.5}, "whole number"),
        ({"batch_size": "many"}, "whole number"),
        ({"transform": [T.CenterCrop]}, "CenterCrop is a class"),
        ({"transform": [T.CenterCrop(8), 3]}, "3 is no transform"),
        (
            {"transform": [T.CenterCrop(8), T.Normalize([0.5] * 3, [0.5] * 3)]},
            "Normalize.* before ToTensor",
        ),
        (
            {"transform": [lambda image: image, torchvision.transforms.CenterCrop(8)]},
            "different sizes.* run in Python on finished batches",
        ),
        ({"decode": None, "transform": None, "device": "cuda"}, "CUDA|needs decode"),
        ({"batch_size": 61, "transform": [T.CenterCrop(2000)]}, "raise memory="),
        ({"decode_threads": 100_000}, "decode_threads"),
    ],
)
def test_wrong_arguments_are_explained(photos, how, message):
    with pytest.raises(forebay.ForebayError, match=message):
        loader(photos, **how)


@pytest.mark.parametrize("before", ["PILToTensor", "ToImage", ""])
def test_python_transforms_get_what_torchvision_would_hand_them(photos, before):
    import torchvision.transforms.v2 as v2

    got = []

    def look(image):
        got.append(image)
        return v2.functional.to_image(image).float()

    tensors = [getattr(v2, before)()] if before else []
    steps = v2.Compose([v2.CenterCrop(8), *tensors, v2.Lambda(look)])
    with loader(photos, transform=steps, shuffle=False, epochs=1) as batches:
        images, _ = next(iter(batches))
    with loader(photos, transform=[T.CenterCrop(8)], shuffle=False, epochs=1) as batches:
        bytes_of, _ = next(iter(batches))
    kind = torch.Tensor if before else Image.Image
    assert all(isinstance(image, kind) for image in got) and len(got) == 8
    assert torch.equal(images, bytes_of.float())


def test_holding_every_batch_ends_in_a_clear_error_or_fits(photos):
    held = []
    with loader(photos, batch_size=4, memory="128M") as batches:
        held = list(batches)  # 16 batches of 110 KB: they fit
    assert len(held) == 16
    assert torch.isfinite(held[0][0]).all()


def test_the_report_tells_decoding_from_reading(photos):
    with loader(photos) as batches:
        for _ in range(2):
            for _ in batches:
                pass
        reports = batches.stats()
        assert [r.epoch for r in reports] == [0, 1]
        assert all(r.samples == 61 and r.batches == 8 for r in reports)
        assert reports[0].source_reads + reports[1].source_reads == 61
        assert set(reports[0].wait) == {
            "source", "memory", "decode", "plan", "copy", "tier", "share", "peer",
        }  # fmt: skip
        assert "decode" in batches.report() or "never" in batches.report()
        metrics = batches.engine.metrics()
        assert metrics["forebay_decode_samples_total"] >= 122
        assert "decode_threads" in batches.engine.knobs()


def test_training_and_validation_share_budget_and_threads(photos):
    train = loader(photos)
    valid = loader(photos, transform=[T.Resize((48, 48)), T.ToTensor()], shuffle=False, memory=None)
    assert train.engine is valid.engine
    for _ in range(2):
        assert sum(len(labels) for _, labels in train) == 61
        assert sum(len(labels) for _, labels in valid) == 61
    train.close()
    valid.close()


def test_random_jpegs_with_flipped_bytes_never_end_the_process():
    """Errors or pixels, for any bytes."""
    rng = random.Random(11)
    good = [
        encode(photo(np.random.default_rng(i), 60, 44), mode, "JPEG", **how)
        for i, (mode, how) in enumerate(JPEGS)
    ]
    outcomes = set()
    for _ in range(1500):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(2, len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(4, len(data)) :]
        try:
            _forebay.decode_image(np.frombuffer(bytes(data), np.uint8))
            outcomes.add("pixels")
        except forebay.ForebayError:
            outcomes.add("error")
    assert outcomes == {"pixels", "error"}


def test_a_header_that_promises_a_huge_image_costs_no_memory():
    data = bytearray(encode(photo(np.random.default_rng(0), 16, 16), "RGB", "JPEG"))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = struct.pack(">HH", 65500, 65500)
    with pytest.raises(forebay.ForebayError, match="pixels"):
        _forebay.decode_image(np.frombuffer(bytes(data), np.uint8))


# ---- what goes wrong in the middle


def test_webdataset_arrays(tmp_path):
    samples = [
        (f"{i:04}", {"cls": b"%d" % i, "npy": npy_bytes(np.full((2, 3), i, np.float32))})
        for i in range(10)
    ]
    write_tar(tmp_path / "shard-0.tar", samples)
    with forebay.DataLoader(tmp_path, 4, decode="npy", memory="64M") as batches:
        got = [(data[:, 1, 2].tolist(), labels.tolist()) for data, labels in batches]
    assert got == [([n * 1.0 for n in range(b, min(b + 4, 10))],) * 2 for b in (0, 4, 8)]


def npy_bytes(array: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def test_the_type_of_arrays_is_that_of_the_first_good_one(tmp_path):
    for i in range(6):
        data = npy_bytes(np.full(3, i, np.int64))
        (tmp_path / f"{i}.npy").write_bytes(data if i not in (0, 1, 4) else data[:50])
    with forebay.DataLoader(tmp_path, 2, decode="npy", memory="64M", on_error="skip") as batches:
        assert [data[:, 0].tolist() for data, _ in batches] == [[2, 3], [5]]
    with pytest.raises(forebay.CorruptError, match="0.npy"):
        forebay.DataLoader(tmp_path, 2, decode="npy", memory="64M")


def test_numbers_that_no_tensor_holds_are_refused(tmp_path):
    np.save(tmp_path / "0.npy", np.zeros(3, np.longdouble))
    with pytest.raises(forebay.UnsupportedError, match="plain little-endian"):
        forebay.DataLoader(tmp_path, 2, decode="npy", memory="64M")


def test_only_what_was_handed_out_counts_as_skipped(photos, tmp_path, caplog):
    broken_copy(photos, tmp_path / "copy")
    with loader(tmp_path / "copy", on_error="skip") as batches:
        with caplog.at_level(logging.WARNING, logger="forebay"):
            for _ in range(2):
                caplog.clear()
                for _ in batches:
                    pass
                assert "corrupt samples skipped: 3" in caplog.text
            caplog.clear()
    assert caplog.text == ""


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan")])
def test_timeouts_are_numbers_of_seconds(photos, timeout):
    with pytest.raises(forebay.ArgumentError, match="timeout"):
        loader(photos, timeout=timeout)


def test_epochs_without_a_full_batch_are_empty(photos):
    with loader(photos, batch_size=100, drop_last=True) as batches:
        assert [list(batches) for _ in range(20)] == [[]] * 20
        assert batches.epoch == 20


def test_one_batch_of_everything(photos):
    with loader(photos, batch_size=1 << 30) as batches:
        for _ in range(2):
            assert [len(labels) for _, labels in batches] == [61]


def test_a_read_that_failed_is_tried_again(photos, tmp_path):
    shutil.copytree(photos, tmp_path / "copy")
    path = paths_of(tmp_path / "copy")[3]
    with loader(tmp_path / "copy", shuffle=False) as batches:
        wanted = [images.clone() for images, _ in batches]
    catalog = batches.catalog
    path.rename(tmp_path / "gone")
    engine = forebay.Engine(memory="32M")
    with loader(catalog, shuffle=False, memory=None, engine=engine) as batches:
        for _ in range(2):
            with pytest.raises(forebay.MissingError, match=path.name):
                next(iter(batches))
        (tmp_path / "gone").rename(path)
        got = [images.clone() for images, _ in batches]
    assert len(got) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_several_threads_close_while_one_iterates(photos):
    for _ in range(20):
        batches = loader(photos, batch_size=1)
        ended = []

        def consume(batches=batches, ended=ended):
            try:
                it = iter(batches)
                while True:
                    if next(it, None) is None:
                        it = iter(batches)
            except forebay.CancelledError as error:
                ended.append(error)

        threads = [threading.Thread(target=consume)]
        threads += [threading.Thread(target=batches.close) for _ in range(3)]
        threads[0].start()
        time.sleep(0.005)
        for thread in threads[1:]:
            thread.start()
        for thread in threads[1:]:
            thread.join(20)
        # A consumer that begins anew after the close opens the loader again: close that one too.
        until = time.monotonic() + 20
        while threads[0].is_alive() and time.monotonic() < until:
            batches.close()
            threads[0].join(0.05)
        assert not threads[0].is_alive() and len(ended) == 1


def test_a_closed_loaders_memory_is_free_while_batch_and_iterator_are_held(photos):
    engine = forebay.Engine(memory="48M")
    how = dict(memory=None, engine=engine, transform=[T.CenterCrop(500)])
    first = loader(photos, batch_size=8, **how)  # 6 MB a batch
    it = iter(first)
    held = [next(it) for _ in range(3)]
    first.close()
    copy = held[0][0].clone()
    del held[1:]
    with loader(photos, batch_size=16, **how) as second:  # 12 MB a batch
        assert sum(len(labels) for _, labels in second) == 61
    assert torch.equal(held[0][0], copy)
    with pytest.raises(forebay.CancelledError):
        next(it)


def test_no_memory_is_no_corrupt_image(tmp_path):
    """A child whose address space is small meets a picture that its budget could hold."""
    (tmp_path / "a").mkdir()

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", 12000, 12000, 8, 2, 0, 0, 1)  # interlaced: decoded whole
    data = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    (tmp_path / "a" / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + data)
    program = f"""
import resource, forebay
from forebay import transforms as T
engine = forebay.Engine("768M")
how = dict(decode="image", transform=[T.CenterCrop(8)], engine=engine, on_error="skip")
with forebay.DataLoader({str(tmp_path)!r}, 1, epochs=1, **how) as batches:
    assert list(batches) == []
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
with forebay.DataLoader({str(tmp_path)!r}, 1, **how) as batches:
    try:
        list(batches)
    except forebay.ForebayError as error:
        assert "out of memory" in str(error), error
    else:
        raise AssertionError("skipped")
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---- the end of the process

_HELD = """
import sys
import forebay
from forebay import transforms as T

loader = forebay.DataLoader(
    sys.argv[1], 4, decode="image", transform=[T.RandomResizedCrop(16), T.ToTensor()],
    memory="64M", shuffle=True,
)
if sys.argv[2] != "unused":
    it = iter(loader)
    batch = next(it)
print("ready", flush=True)
while sys.argv[2] == "running":
    for images, labels in loader:
        pass
"""


@pytest.mark.parametrize("how", ["unused", "held"])
def test_a_program_that_still_holds_its_loader_ends(photos, tmp_path, how):
    script = tmp_path / "held.py"
    script.write_text(_HELD)
    done = subprocess.run(
        [sys.executable, script, photos, how], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ready\n"


def test_ctrl_c_ends_a_program_that_decodes(photos, tmp_path):
    script = tmp_path / "running.py"
    script.write_text(_HELD)
    with subprocess.Popen(
        [sys.executable, script, photos, "running"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in said
