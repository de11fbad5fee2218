"""Transforms in C++ against PIL and torchvision, bit for bit.

The C++ core says what it drew for a sample (transform_params); torchvision's functional operations
then do the same to a PIL image, and the results must be equal.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from forebay import _forebay
from forebay import transforms as T
from forebay._errors import ArgumentError
from PIL import Image

torchvision = pytest.importorskip("torchvision_cpu").torchvision
F = torchvision.transforms.functional
TV = torchvision.transforms

apply_op = torchvision.transforms.autoaugment._apply_op
AFFINE = {
    "shear_x": "ShearX", "shear_y": "ShearY", "translate_x": "TranslateX",
    "translate_y": "TranslateY", "rotate": "Rotate",
}  # fmt: skip

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZED = [T.ToTensor(), T.Normalize(MEAN, STD)]
SIZES = [
    (1, 1), (1, 37), (41, 1), (2, 3), (5, 300), (300, 4), (31, 31), (32, 32), (64, 48), (97, 223),
    (224, 224), (256, 341), (375, 500), (500, 375), (20, 700),
]  # fmt: skip


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    """Noise, ramps and flat parts, with all the values from 0 to 255."""
    rng = np.random.default_rng((seed, width, height))
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    kind = seed % 3
    if kind == 1:
        ramp = np.linspace(0, 255, width * height).reshape(height, width, 1)
        image = (ramp * 0.7 + image * 0.3).astype(np.uint8)
    elif kind == 2:
        image[: height // 2] = rng.integers(0, 256, 3)
        image[:, : width // 3] = np.where(image[:, : width // 3] > 127, 255, 0)
    return image


def pil_steps(image: Image.Image, steps: list[dict]) -> Image.Image:
    """Applies drawn steps with torchvision and PIL."""
    for step in steps:
        kind = step["step"]
        if kind == "crop":
            image = _pil_crop(image, step)
        elif kind == "resize":
            size = [step["height"], step["width"]]
            image = F.resize(image, size, _modes()[step["interpolation"]])
        elif kind == "flip_x":
            image = F.hflip(image)
        elif kind == "flip_y":
            image = F.vflip(image)
        elif kind == "gray":
            image = F.to_grayscale(image, 3)
        elif kind in AFFINE:
            mode, fill = _modes()[step["interpolation"]], step["fill"]
            image = apply_op(image, AFFINE[kind], step["factor"], mode, fill)
        elif kind == "posterize":
            image = F.posterize(image, int(step["factor"]))
        elif kind == "solarize":
            image = F.solarize(image, step["factor"])
        elif kind in ("autocontrast", "equalize"):
            image = getattr(F, kind)(image)
        else:
            image = getattr(F, f"adjust_{kind}")(image, step["factor"])
    return image


def _modes() -> dict[int, TV.InterpolationMode]:
    return {T._INTERPOLATIONS[m.value]: m for m in TV.InterpolationMode if "exact" not in m.value}


def _pil_crop(image: Image.Image, step: dict) -> Image.Image:
    x, y, w, h = step["x"], step["y"], step["width"], step["height"]
    left, top = max(-x, 0), max(-y, 0)
    right, bottom = max(x + w - image.width, 0), max(y + h - image.height, 0)
    image = F.pad(image, [left, top, right, bottom], step["fill"])
    return F.crop(image, y + top, x + left, h, w)


def expected(rgb: np.ndarray, spec: list, sample: int, **key: int) -> Image.Image:
    height, width = rgb.shape[:2]
    steps = _forebay.transform_params(spec, width, height, sample=sample, **key)
    return pil_steps(Image.fromarray(rgb), steps)


def check(rgb: np.ndarray, transforms: list[T.Transform], samples: int = 3) -> None:
    """uint8 HWC and float32 CHW, normalised, equal torchvision's."""
    for sample in range(samples):
        spec = T.export(transforms)
        want = np.asarray(expected(rgb, spec, sample, seed=5, epoch=2))
        got = _forebay.apply_transforms(rgb, spec, 5, 2, sample, "uint8", "hwc")
        where = f"{transforms} on {rgb.shape[1]}x{rgb.shape[0]}, sample {sample}"
        assert got.shape == want.shape, where
        np.testing.assert_array_equal(got, want, err_msg=where)
        tensor = F.normalize(F.to_tensor(Image.fromarray(want)), MEAN, STD)
        spec = T.export([*transforms, *NORMALIZED])
        got = _forebay.apply_transforms(rgb, spec, 5, 2, sample)
        np.testing.assert_array_equal(got, tensor.numpy(), err_msg=where)


@pytest.mark.parametrize(
    "interpolation", ["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
)
def test_resize_equals_pil(interpolation: str) -> None:
    targets = [(1, 1), (3, 224), (224, 224), (65, 33), (256, 7), (96, 300)]
    for i, size in enumerate(SIZES):
        for target in targets:
            check(picture(*size, seed=i), [T.Resize(target, interpolation)], samples=1)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_random_resized_crop_equals_torchvision(interpolation: str) -> None:
    for i, size in enumerate(SIZES):
        for target in (224, (31, 64)):
            check(
                picture(*size, seed=i),
                [
                    T.RandomResizedCrop(target, interpolation=interpolation),
                    T.RandomHorizontalFlip(),
                ],
                samples=4,
            )


def test_resize_and_center_crop_equal_torchvision() -> None:
    for i, (width, height) in enumerate(SIZES):
        rgb = picture(width, height, seed=i)
        if max(width, height) > 40 * min(width, height):
            continue
        for edge, crop in ((256, 224), (64, (50, 80)), (33, 33), (40, 64)):
            spec = T.export([T.Resize(edge), T.CenterCrop(crop)])
            got = _forebay.apply_transforms(rgb, spec, dtype="uint8", layout="hwc")
            reference = TV.Compose([TV.Resize(edge), TV.CenterCrop(crop)])
            np.testing.assert_array_equal(got, np.asarray(reference(Image.fromarray(rgb))))


def test_resize_max_size_equals_torchvision() -> None:
    for width, height in ((300, 100), (100, 300), (333, 77), (50, 50)):
        rgb = picture(width, height)
        spec = T.export([T.Resize(64, max_size=100), T.CenterCrop(96)])
        got = _forebay.apply_transforms(rgb, spec, dtype="uint8", layout="hwc")
        reference = TV.Compose([TV.Resize(64, max_size=100), TV.CenterCrop(96)])
        np.testing.assert_array_equal(got, np.asarray(reference(Image.fromarray(rgb))))


def test_center_crop_pads_as_torchvision() -> None:
    for i, (width, height) in enumerate(SIZES):
        rgb = picture(width, height, seed=i)
        for crop in (1, 2, 31, 32, (33, 64), (225, 30)):
            got = _forebay.apply_transforms(
                rgb, T.export([T.CenterCrop(crop)]), dtype="uint8", layout="hwc"
            )
            np.testing.assert_array_equal(
                got, np.asarray(TV.CenterCrop(crop)(Image.fromarray(rgb)))
            )


@pytest.mark.parametrize("padding", [None, 4, (3, 7), (1, 2, 3, 4)])
def test_random_crop_equals_torchvision(padding: object) -> None:
    for size in ((32, 32), (40, 33), (32, 50), (8, 9), (1, 1)):
        transforms = [
            T.RandomCrop(32, padding=padding, pad_if_needed=True, fill=(9, 8, 7)),
            T.RandomHorizontalFlip(),
            T.RandomVerticalFlip(),
        ]
        check(picture(*size), transforms, samples=6)


def test_random_crop_reaches_every_place() -> None:
    spec = T.export([T.RandomCrop(32, padding=4)])
    places = {
        (s["x"], s["y"])
        for sample in range(3000)
        for s in _forebay.transform_params(spec, 32, 32, sample=sample)
    }
    assert places == {(x, y) for x in range(-4, 5) for y in range(-4, 5)}


@pytest.mark.parametrize("jitter", [
    {"brightness": 0.4}, {"contrast": 0.8}, {"saturation": 0.9}, {"hue": 0.5}, {"hue": (0.1, 0.1)},
    {"brightness": (0, 3)}, {"contrast": (0, 4)}, {"saturation": (0, 5)},
    {"brightness": 0.4, "contrast": 0.4, "saturation": 0.4, "hue": 0.1},
])  # fmt: skip
def test_color_jitter_equals_torchvision(jitter: dict) -> None:
    for i, size in enumerate([(64, 64), (37, 41), (1, 1), (130, 90)]):
        check(picture(*size, seed=i), [T.ColorJitter(**jitter), T.CenterCrop(48)], samples=12)


def test_every_hue_and_saturation_of_every_color() -> None:
    """All of a coarse cube of colours, and a dense plane of it."""
    axis = np.array([0, 1, 2, 3, 7, 30, 64, 100, 127, 128, 129, 200, 253, 254, 255], np.uint8)
    coarse = np.stack(np.meshgrid(axis, axis, axis), -1).reshape(45, 75, 3)
    red, green = np.meshgrid(np.arange(256), np.arange(256))
    dense = np.stack([red, green, (red * 7 + green * 3) % 256], -1).astype(np.uint8)
    for rgb in (coarse, dense):
        size = rgb.shape[:2]
        for factor in np.linspace(-0.5, 0.5, 21):
            check(rgb, [T.ColorJitter(hue=(factor, factor)), T.CenterCrop(size)], samples=1)
        for factor in (0.0, 0.25, 0.999, 1.0, 1.001, 1.7, 3.0):
            for name in ("brightness", "contrast", "saturation"):
                check(
                    rgb, [T.ColorJitter(**{name: (factor, factor + 1e-9)}), T.CenterCrop(size)], 1
                )


def test_grayscale_equals_torchvision() -> None:
    for transform in (T.Grayscale(3), T.RandomGrayscale(0.5)):
        check(picture(60, 50), [transform, T.CenterCrop(40)], samples=8)


@pytest.mark.seeds
def test_random_order_of_ops(seed: int) -> None:
    """Any order that torchvision accepts."""
    rng = np.random.default_rng(seed)
    rgb = picture(int(rng.integers(1, 200)), int(rng.integers(1, 200)), seed)
    pool = [
        T.RandomResizedCrop(int(rng.integers(1, 90)), interpolation="bicubic"),
        T.RandomResizedCrop((50, 70), scale=(0.5, 1.0)),
        T.Resize((int(rng.integers(1, 120)), int(rng.integers(1, 120)))),
        T.Resize((20, 90), "nearest"),
        T.CenterCrop((30, 100)),
        T.RandomCrop(40, padding=5, pad_if_needed=True, fill=200),
        T.RandomHorizontalFlip(0.7),
        T.RandomVerticalFlip(0.7),
        T.ColorJitter(0.3, 0.3, 0.3, 0.2),
        T.RandomGrayscale(0.3),
        T.RandAugment(3, 12, fill=77),
    ]
    for _ in range(4):
        chosen = [pool[i] for i in rng.integers(0, len(pool), rng.integers(1, 8))]
        check(rgb, [*chosen, T.Resize((33, 47))], samples=2)
        check(rgb, [T.Resize((60, 61)), *chosen, T.CenterCrop((28, 31))], samples=2)


@pytest.mark.parametrize("interpolation", ["nearest", "bilinear", "bicubic"])
def test_rand_augment_equals_torchvision(interpolation: str) -> None:
    for i, (width, height) in enumerate([(64, 48), (37, 81), (224, 224), (1, 1), (2, 5), (3, 3)]):
        for magnitude in (0, 1, 9, 15, 16, 30):
            chosen = T.RandAugment(2, magnitude, interpolation=interpolation, fill=(1, 2, 3))
            rgb = picture(width, height, seed=i)
            check(rgb, [chosen, T.CenterCrop((height, width))], samples=8 if width > 99 else 24)


@pytest.mark.parametrize("bins", [2, 10, 11, 31])
def test_rand_augment_draws_from_torchvisions_space(bins: int) -> None:
    """Every op with torchvision's magnitude and both signs.

    torch.linspace rounds by the width of the processor's vectors, hence six digits.
    """
    names = {v: k for k, v in AFFINE.items()} | {
        "Brightness": "brightness", "Color": "saturation", "Contrast": "contrast",
        "Sharpness": "sharpness", "Posterize": "posterize", "Solarize": "solarize",
        "AutoContrast": "autocontrast", "Equalize": "equalize",
    }  # fmt: skip
    for magnitude in range(bins):
        space = TV.RandAugment(num_magnitude_bins=bins)._augmentation_space(bins, (90, 130))
        want = set()
        for name, (values, signed) in space.items():
            if name == "Identity" or (name == "Rotate" and magnitude == 0):
                continue
            value = float(values[magnitude].item()) if values.ndim > 0 else 0.0
            offset = 1.0 if name in ("Brightness", "Color", "Contrast", "Sharpness") else 0.0
            for sign in (1, -1) if signed else (1,):
                want.add((names[name], f"{offset + sign * value:.6g}"))
        spec = T.export([T.RandAugment(1, magnitude, bins), T.CenterCrop(8)])
        drawn = [_forebay.transform_params(spec, 130, 90, sample=i)[0] for i in range(800)]
        got = {(d["step"], f"{d['factor'] + 0.0:.6g}") for d in drawn if d["step"] != "crop"}
        assert got == {(name, "0" if value == "-0" else value) for name, value in want}


def test_flips_may_follow_to_tensor() -> None:
    rgb = picture(50, 40)
    for sample in range(4):
        spec = T.export([T.CenterCrop(32), T.ToTensor(), T.RandomHorizontalFlip(), *NORMALIZED[1:]])
        want = F.normalize(F.to_tensor(expected(rgb, spec, sample)), MEAN, STD)
        np.testing.assert_array_equal(
            _forebay.apply_transforms(rgb, spec, sample=sample), want.numpy()
        )


@pytest.mark.parametrize("flip", [0.0, 1.0])
@pytest.mark.parametrize("width", [1, 7, 16, 33, 64, 224])
def test_types_and_layouts(width: int, flip: float) -> None:
    rgb = picture(width, 40)
    geometry = [T.RandomHorizontalFlip(flip), T.CenterCrop((40, width))]
    spec = T.export([*geometry, *NORMALIZED])
    tensor = F.normalize(F.to_tensor(expected(rgb, spec, 0)), MEAN, STD)
    raw = np.asarray(expected(rgb, spec, 0))
    for layout, order in (("chw", (0, 1, 2)), ("hwc", (1, 2, 0))):
        want = tensor.permute(order).contiguous()
        for dtype, torch_type in (("float32", torch.float32), ("float16", torch.float16)):
            got = _forebay.apply_transforms(rgb, spec, dtype=dtype, layout=layout)
            np.testing.assert_array_equal(got, want.to(torch_type).numpy())
        got = _forebay.apply_transforms(rgb, spec, dtype="bfloat16", layout=layout)
        bits = want.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(got, bits)
        got = _forebay.apply_transforms(rgb, T.export(geometry), dtype="uint8", layout=layout)
        np.testing.assert_array_equal(got, raw if layout == "hwc" else raw.transpose(2, 0, 1))


def test_to_tensor_alone_and_odd_normalize_equal_torch() -> None:
    values = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    for mean, std in ((0.0, 1.0), (0.5, 0.5), (0.1307, 0.3081), (-3.7, 1e-3), (1e3, 7e4)):
        transforms = [T.CenterCrop(16), T.ToTensor(), T.Normalize([mean] * 3, [std] * 3)]
        got = _forebay.apply_transforms(values, T.export(transforms))
        want = F.normalize(F.to_tensor(Image.fromarray(values)), [mean] * 3, [std] * 3)
        np.testing.assert_array_equal(got, want.numpy())


def test_draws_depend_on_the_key_alone() -> None:
    spec = T.export([T.RandomResizedCrop(64), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4)])
    params = lambda **key: _forebay.transform_params(spec, 300, 200, **key)
    base = params(seed=1, epoch=2, sample=3)
    assert base == params(seed=1, epoch=2, sample=3)
    assert base != params(seed=2, epoch=2, sample=3)
    assert base != params(seed=1, epoch=3, sample=3)
    assert base != params(seed=1, epoch=2, sample=4)


def test_an_added_op_leaves_the_draws_of_others() -> None:
    one = T.export([T.RandomResizedCrop(64), T.RandomHorizontalFlip()])
    two = T.export([T.RandomResizedCrop(64), T.ColorJitter(0.4), T.RandomHorizontalFlip()])
    for sample in range(50):
        a = _forebay.transform_params(one, 300, 200, sample=sample)
        b = _forebay.transform_params(two, 300, 200, sample=sample)
        assert [s["step"] for s in a] == [s["step"] for s in b if s["step"] != "brightness"]
        assert a[:2] == b[:2]


def test_crops_are_distributed_as_torchvision() -> None:
    """Quantiles of area and ratio, and the mean place, of many crops of both."""
    width, height, n = 500, 375, 6000
    spec = T.export([T.RandomResizedCrop(224)])
    ours = [_forebay.transform_params(spec, width, height, sample=i)[0] for i in range(n)]
    ours = np.array([[s["y"], s["x"], s["height"], s["width"]] for s in ours], float)
    torch.manual_seed(0)
    image = Image.new("RGB", (width, height))
    get = lambda: TV.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
    theirs = np.array([get() for _ in range(n)], float)
    area = lambda c: c[:, 2] * c[:, 3] / (width * height)
    ratio = lambda c: np.log(c[:, 3] / c[:, 2])
    quantiles = np.linspace(0.05, 0.95, 10)
    for what, bound in ((area, 0.03), (ratio, 0.03)):
        gap = np.quantile(what(ours), quantiles) - np.quantile(what(theirs), quantiles)
        assert np.abs(gap).max() < bound
    assert np.abs(ours.mean(0) - theirs.mean(0)).max() < 0.03 * width
    flips = T.export([T.RandomHorizontalFlip(0.3), T.CenterCrop(8)])
    count = sum(len(_forebay.transform_params(flips, 8, 8, sample=i)) - 1 for i in range(n))
    assert abs(count / n - 0.3) < 4 * math.sqrt(0.3 * 0.7 / n)


def test_extreme_ratios_fall_back_to_the_center() -> None:
    for width, height in ((2000, 10), (10, 2000), (1, 400)):
        image = Image.new("RGB", (width, height))
        steps = _forebay.transform_params(T.export([T.RandomResizedCrop(8)]), width, height)
        crop = steps[0]
        torch.manual_seed(0)
        y, x, h, w = TV.RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3])
        assert (crop["width"], crop["height"]) == (w, h)
        assert (crop["x"], crop["y"]) == (x, y)


def test_shrunken_decode_keeps_the_crop() -> None:
    """fast=True: the same crop of an image decoded at a half to an eighth of its size."""
    y, x = np.mgrid[0:800, 0:1200]
    smooth = np.stack(
        [x / 1200 * 255, y / 800 * 255, 127 + 100 * np.sin(x / 90) * np.cos(y / 70)], -1
    )
    rgb = np.rint(smooth).astype(np.uint8)
    spec = T.export([T.RandomResizedCrop(64, scale=(0.3, 1.0)), T.RandomHorizontalFlip()])
    shrinks = set()
    for sample in range(20):
        best = _forebay.best_shrink(spec, 1200, 800, sample=sample, dtype="uint8")
        crop = _forebay.transform_params(spec, 1200, 800, sample=sample)[0]
        assert crop["width"] >= 64 * best and crop["height"] >= 64 * best
        shrinks.add(best)
        small = np.asarray(Image.fromarray(rgb).reduce(best))
        full = _forebay.apply_transforms(rgb, spec, sample=sample, dtype="uint8")
        fast = _forebay.apply_transforms(
            small, spec, sample=sample, dtype="uint8", full_width=1200, full_height=800
        )
        assert np.abs(full.astype(int) - fast).max() <= 4
    assert len(shrinks) > 1


def test_errors_name_the_remedy() -> None:
    rgb = picture(20, 20)
    with pytest.raises(ArgumentError, match="CenterCrop"):
        _forebay.apply_transforms(rgb, T.export([T.Resize(16), T.ToTensor()]))
    with pytest.raises(ArgumentError, match="pad_if_needed"):
        _forebay.apply_transforms(rgb, T.export([T.RandomCrop(32)]), dtype="uint8")
    with pytest.raises(ArgumentError, match="ToTensor"):
        _forebay.apply_transforms(rgb, T.export([T.CenterCrop(8)]), dtype="float32")
    with pytest.raises(ArgumentError, match="before"):
        _forebay.apply_transforms(rgb, T.export([T.CenterCrop(8), *NORMALIZED[1:]]))
    with pytest.raises(ArgumentError, match="NoSuchOp"):
        _forebay.apply_transforms(rgb, [("NoSuchOp", {})])
    with pytest.raises(ArgumentError, match="size"):
        T.RandomResizedCrop("big")
    with pytest.raises(ArgumentError, match="max_size"):
        T.Resize(64, max_size=10)
    with pytest.raises(ArgumentError, match="hue"):
        T.ColorJitter(hue=0.7)
    with pytest.raises(ArgumentError, match="std"):
        T.Normalize([0, 0, 0], [1, 0, 1])
    with pytest.raises(ArgumentError, match="p must"):
        T.RandomHorizontalFlip(1.5)


def test_translation_of_torchvision_compose() -> None:
    pipeline = TV.Compose([
        TV.RandomResizedCrop(224, interpolation=TV.InterpolationMode.BICUBIC),
        TV.RandomHorizontalFlip(0.25), TV.ColorJitter(0.1, 0.2, 0.3, 0.1), TV.RandAugment(),
        TV.ToTensor(), TV.Normalize(MEAN, STD),
    ])  # fmt: skip
    native, python = transforms = T.transforms_from(pipeline)
    assert python == []
    assert native == [
        T.RandomResizedCrop(224, interpolation="bicubic"), T.RandomHorizontalFlip(0.25),
        T.ColorJitter(0.1, 0.2, 0.3, 0.1), T.RandAugment(), T.ToTensor(), T.Normalize(MEAN, STD),
    ]  # fmt: skip
    assert "in Python" not in str(transforms)
    native, python = T.transforms_from(TV.Compose([TV.Resize(256), TV.CenterCrop(224)]))
    assert native == [T.Resize(256), T.CenterCrop(224)] and python == []


def test_translation_leaves_the_rest_in_python() -> None:
    erase = TV.RandomErasing()
    double = TV.Lambda(lambda x: x * 2)
    pipeline = TV.Compose(
        [TV.Resize((8, 8)), TV.ToTensor(), double, TV.RandomHorizontalFlip(), erase]
    )
    account = T.transforms_from(pipeline)
    assert account.native == [T.Resize((8, 8)), T.ToTensor()]
    assert account.python[0] is double and len(account.python) == 3
    assert "Lambda" in str(account) and "Resize" in str(account)
    for step in (TV.Grayscale(1), TV.RandomCrop(8, padding=2, padding_mode="reflect"), TV.Pad(3)):
        assert T.transforms_from(TV.Compose([step])).python == [step]
    after = T.transforms_from(TV.Compose([TV.CenterCrop(8), TV.ToTensor(), TV.ColorJitter(0.5)]))
    assert len(after.python) == 1 and "after ToTensor" in str(after)


def test_translation_of_v2() -> None:
    import torchvision.transforms.v2 as v2

    pipeline = v2.Compose([
        v2.RandomResizedCrop(size=(96, 64), antialias=True), v2.RandomHorizontalFlip(p=0.5),
        v2.RandomCrop(48, padding=4, fill=3), v2.ColorJitter(brightness=0.5), v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean=list(MEAN), std=list(STD)),
    ])  # fmt: skip
    account = T.transforms_from(pipeline)
    assert account.python == [], str(account)
    assert account.native == [
        T.RandomResizedCrop((96, 64)), T.RandomHorizontalFlip(), T.RandomCrop(48, 4, fill=3),
        T.ColorJitter(0.5), T.ToTensor(multiply=True), T.Normalize(MEAN, STD),
    ]  # fmt: skip
    rgb = picture(50, 40)
    tail = v2.Compose(pipeline.transforms[-3:])
    spec = account.export()
    for dtype in (np.float32, np.float16):
        want = tail(expected(rgb, spec, 1)).numpy().astype(dtype)
        got = _forebay.apply_transforms(rgb, spec, sample=1, dtype=np.dtype(dtype).name)
        np.testing.assert_array_equal(got, want)


def test_repr_reads_as_the_call() -> None:
    assert repr(T.Resize(256)).startswith("Resize(size=256")
    assert "interpolation=bicubic" in repr(T.RandomResizedCrop(224, interpolation=3))
    assert repr(T.Compose([T.ToTensor()])) == "Compose(\n    ToTensor()\n)"
