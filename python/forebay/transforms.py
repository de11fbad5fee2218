"""Image transforms that run in C++, with torchvision's names, arguments and results.

Each class describes one step; nothing here touches a pixel. A list of them goes to the C++ core,
which decodes, transforms and batches without Python. Results are bit for bit those of torchvision
on PIL images, given the same random parameters; the parameters come from Forebay's own generator,
keyed by seed, epoch and sample, so that they are the same at any number of threads and nodes.

`transforms_from` translates a torchvision `Compose` as far as it goes.
"""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any, ClassVar

from ._errors import ArgumentError

__all__ = [
    "CenterCrop", "ColorJitter", "Compose", "Grayscale", "Normalize", "RandAugment", "RandomCrop",
    "RandomGrayscale", "RandomHorizontalFlip", "RandomResizedCrop", "RandomVerticalFlip", "Resize",
    "ToTensor", "Transform", "Translation", "export", "transforms_from",
]  # fmt: skip

Exported = tuple[str, dict[str, Any]]

# PIL's numbers, which are also those of the C++ enum.
_INTERPOLATIONS = {
    "nearest": 0, "lanczos": 1, "bilinear": 2, "bicubic": 3, "box": 4, "hamming": 5,
}  # fmt: skip


def _interpolation(value: Any, what: str) -> int:
    """A name, PIL's number, or torchvision's InterpolationMode (an enum of names)."""
    name = getattr(value, "value", value)
    if isinstance(name, str) and name.lower() in _INTERPOLATIONS:
        return _INTERPOLATIONS[name.lower()]
    if isinstance(name, int) and not isinstance(name, bool) and name in _INTERPOLATIONS.values():
        return name
    raise ArgumentError(
        f"{what}: interpolation must be one of {', '.join(_INTERPOLATIONS)}, got {value!r}"
    )


def _interpolation_name(number: int) -> str:
    return next(name for name, n in _INTERPOLATIONS.items() if n == number)


@functools.cache
def _pass_order() -> str:
    """Which pass of a resize comes first, as in the Pillow installed here, else the newest one.

    Pillow 13 takes columns first where that is less work, which shows in the last bit. The choice
    is written into each exported transform, so that it is the same wherever that one runs.
    """
    try:
        major = int(importlib.metadata.version("pillow").split(".")[0])
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return "pillow13"
    return "pillow13" if major >= 13 else "rows_first"


def _int(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Number) or value != int(value):  # type: ignore[call-overload]
        raise ArgumentError(f"{what} must be a whole number, got {value!r}")
    return int(value)  # type: ignore[call-overload]


def _positive(value: Any, what: str) -> int:
    number = _int(value, what)
    if number < 1:
        raise ArgumentError(f"{what} must be 1 or more, got {value!r}")
    return number


def _size(value: Any, what: str) -> tuple[int, int]:
    """(height, width) of an int, or of one or two ints."""
    if isinstance(value, Number):
        value = (value, value)
    if isinstance(value, Sequence) and len(value) == 1:
        value = (value[0], value[0])
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ArgumentError(f"{what}: size must be an int or (height, width), got {value!r}")
    return _positive(value[0], f"{what}: size"), _positive(value[1], f"{what}: size")


def _pair(value: Any, what: str) -> tuple[float, float]:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ArgumentError(f"{what} must be (min, max), got {value!r}")
    low, high = float(value[0]), float(value[1])
    if not low <= high:
        raise ArgumentError(f"{what} must be (min, max) with min <= max, got {value!r}")
    return low, high


def _probability(value: Any, what: str) -> float:
    if not isinstance(value, Number) or not 0 <= float(value) <= 1:  # type: ignore[arg-type]
        raise ArgumentError(f"{what}: p must be from 0 to 1, got {value!r}")
    return float(value)  # type: ignore[arg-type]


def _fill(value: Any, what: str) -> tuple[int, int, int]:
    if value is None:
        value = 0
    if isinstance(value, Number):
        value = (value,)
    if not isinstance(value, Sequence) or len(value) not in (1, 3):
        raise ArgumentError(f"{what}: fill must be a number or three of them, got {value!r}")
    levels = [int(v) for v in value] * (3 if len(value) == 1 else 1)
    if not all(0 <= v <= 255 for v in levels):
        raise ArgumentError(f"{what}: fill must be from 0 to 255, got {value!r}")
    return levels[0], levels[1], levels[2]


class Transform:
    """One step. `parameters` are those of the C++ op of the same name."""

    parameters: dict[str, Any]

    @property
    def name(self) -> str:
        return type(self).__name__

    def export(self) -> Exported:
        return self.name, dict(self.parameters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transform) and self.export() == other.export()

    def __hash__(self) -> int:
        return hash((self.name, repr(sorted(self.parameters.items()))))

    def __repr__(self) -> str:
        shown = dict(self.parameters)
        shown.pop("pass_order", None)
        if "height" in shown:
            height, width = shown.pop("height"), shown.pop("width")
            shown = {"size": (height, width) if width else height, **shown}
        if "interpolation" in shown:
            shown["interpolation"] = _interpolation_name(shown["interpolation"])
        return f"{self.name}({', '.join(f'{k}={v}' for k, v in shown.items())})"


class RandomResizedCrop(Transform):
    """A crop of random area and aspect ratio, resized to `size`."""

    def __init__(
        self,
        size: int | Sequence[int],
        scale: Sequence[float] = (0.08, 1.0),
        ratio: Sequence[float] = (3.0 / 4.0, 4.0 / 3.0),
        interpolation: Any = "bilinear",
        antialias: bool | None = True,
    ) -> None:
        del antialias  # On PIL images torchvision always does.
        height, width = _size(size, self.name)
        scale_range = _pair(scale, f"{self.name}: scale")
        ratio_range = _pair(ratio, f"{self.name}: ratio")
        if scale_range[0] < 0 or scale_range[1] == 0 or ratio_range[0] <= 0:
            raise ArgumentError(f"{self.name}: scale and ratio must be positive")
        self.parameters = {
            "height": height,
            "width": width,
            "scale": scale_range,
            "ratio": ratio_range,
            "interpolation": _interpolation(interpolation, self.name),
            "pass_order": _pass_order(),
        }


class Resize(Transform):
    """To (height, width), or, with one number, the shorter edge to it."""

    def __init__(
        self,
        size: int | Sequence[int],
        interpolation: Any = "bilinear",
        max_size: int | None = None,
        antialias: bool | None = True,
    ) -> None:
        del antialias  # On PIL images torchvision always does.
        if isinstance(size, Sequence) and len(size) == 1:
            size = size[0]
        if isinstance(size, Number):
            height, width = _positive(size, f"{self.name}: size"), 0
        else:
            height, width = _size(size, self.name)
        limit = 0 if max_size is None else _positive(max_size, f"{self.name}: max_size")
        if limit and (width or limit <= height):
            raise ArgumentError(
                f"{self.name}: max_size={max_size} goes with a size of one number, "
                "and must be greater than it"
            )
        self.parameters = {
            "height": height,
            "width": width,
            "max_size": limit,
            "interpolation": _interpolation(interpolation, self.name),
            "pass_order": _pass_order(),
        }


class CenterCrop(Transform):
    """The middle; a smaller image is padded with black."""

    def __init__(self, size: int | Sequence[int]) -> None:
        height, width = _size(size, self.name)
        self.parameters = {"height": height, "width": width}


class RandomCrop(Transform):
    """A crop at a random place, after padding each border with `fill`."""

    def __init__(
        self,
        size: int | Sequence[int],
        padding: int | Sequence[int] | None = None,
        pad_if_needed: bool = False,
        fill: Any = 0,
        padding_mode: str = "constant",
    ) -> None:
        if padding_mode != "constant":
            raise ArgumentError(
                f"{self.name}: padding_mode must be 'constant' here, got {padding_mode!r}"
            )
        height, width = _size(size, self.name)
        borders: Sequence[int] = (0,) if padding is None else padding  # type: ignore[assignment]
        if isinstance(borders, Number):
            borders = (borders,)  # type: ignore[assignment]
        if len(borders) not in (1, 2, 4):
            raise ArgumentError(f"{self.name}: padding must be 1, 2 or 4 ints, got {padding!r}")
        ltrb = [_int(b, f"{self.name}: padding") for b in borders]
        if min(ltrb) < 0:
            raise ArgumentError(f"{self.name}: padding must not be negative, got {padding!r}")
        ltrb = (ltrb * 4)[:4]  # left, top, right, bottom
        self.parameters = {
            "height": height,
            "width": width,
            "padding": tuple(ltrb),
            "pad_if_needed": bool(pad_if_needed),
            "fill": _fill(fill, self.name),
        }


class _WithProbability(Transform):
    _default: ClassVar[float] = 0.5

    def __init__(self, p: float | None = None) -> None:
        self.parameters = {"p": _probability(self._default if p is None else p, self.name)}


class RandomHorizontalFlip(_WithProbability):
    """Left to right, with probability p."""


class RandomVerticalFlip(_WithProbability):
    """Upside down, with probability p."""


class RandomGrayscale(_WithProbability):
    """To three equal channels, with probability p."""

    _default = 0.1


class Grayscale(Transform):
    """To three equal channels."""

    def __init__(self, num_output_channels: int = 3) -> None:
        if num_output_channels != 3:
            raise ArgumentError(f"{self.name}: only num_output_channels=3 is supported")
        self.parameters = {}


class ColorJitter(Transform):
    """Brightness, contrast, saturation and hue by random factors, in a random order."""

    def __init__(
        self,
        brightness: float | Sequence[float] = 0,
        contrast: float | Sequence[float] = 0,
        saturation: float | Sequence[float] = 0,
        hue: float | Sequence[float] = 0,
    ) -> None:
        self.parameters = {
            "brightness": self._range(brightness, "brightness"),
            "contrast": self._range(contrast, "contrast"),
            "saturation": self._range(saturation, "saturation"),
            "hue": self._range(hue, "hue", center=0.0, bounds=(-0.5, 0.5)),
        }

    def _range(
        self,
        value: Any,
        what: str,
        center: float = 1.0,
        bounds: tuple[float, float] = (0.0, math.inf),
    ) -> tuple[float, float] | None:
        if value is None:
            return None
        what = f"{self.name}: {what}"
        if isinstance(value, Number):
            spread = float(value)  # type: ignore[arg-type]
            if spread < 0:
                raise ArgumentError(f"{what} must not be negative, got {value!r}")
            low, high = center - spread, center + spread
            if center:
                low = max(low, 0.0)
        else:
            low, high = _pair(value, what)
        if not bounds[0] <= low <= high <= bounds[1]:
            raise ArgumentError(f"{what} must lie within {bounds}, got {value!r}")
        return None if low == high == center else (low, high)


class RandAugment(Transform):
    """`num_ops` random operations of one magnitude (Cubuk et al., 2019)."""

    def __init__(
        self,
        num_ops: int = 2,
        magnitude: int = 9,
        num_magnitude_bins: int = 31,
        interpolation: Any = "nearest",
        fill: Any = None,
    ) -> None:
        bins = _positive(num_magnitude_bins, f"{self.name}: num_magnitude_bins")
        level = _int(magnitude, f"{self.name}: magnitude")
        if not 0 <= level < bins or bins < 2:
            raise ArgumentError(
                f"{self.name}: magnitude {magnitude} must be from 0 to num_magnitude_bins - 1"
            )
        mode = _interpolation(interpolation, self.name)
        if mode not in (0, 2, 3):
            raise ArgumentError(f"{self.name}: interpolation must be nearest, bilinear or bicubic")
        self.parameters = {
            "num_ops": _int(num_ops, f"{self.name}: num_ops"),
            "magnitude": level,
            "num_magnitude_bins": bins,
            "interpolation": mode,
            "fill": _fill(fill, self.name),
        }


class ToTensor(Transform):
    """To floats from 0 to 1. Without it the output is uint8.

    `multiply`: by 1 / 255, as v2's ToDtype does, and not divided by 255; the last bit differs.
    """

    def __init__(self, multiply: bool = False) -> None:
        self.parameters = {"multiply": True} if multiply else {}


class Normalize(Transform):
    """(x - mean) / std of each channel; stands after ToTensor."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        del inplace
        self.parameters = {"mean": self._channels(mean, "mean"), "std": self._channels(std, "std")}
        if 0 in self.parameters["std"]:
            raise ArgumentError(f"{self.name}: std must not be 0, got {std!r}")

    def _channels(self, values: Any, what: str) -> tuple[float, ...]:
        if isinstance(values, Number):
            values = (values,)
        numbers = tuple(float(v) for v in values)
        if len(numbers) == 1:
            numbers *= 3
        if len(numbers) != 3:
            raise ArgumentError(f"{self.name}: {what} must hold three numbers, got {values!r}")
        return numbers


class Compose:
    """Transforms one after the other."""

    def __init__(self, transforms: Iterable[Transform]) -> None:
        self.transforms = list(transforms)
        for t in self.transforms:
            if not isinstance(t, Transform):
                raise ArgumentError(
                    f"Compose takes forebay.transforms, got {t!r}; transforms_from() translates "
                    "torchvision's"
                )

    def export(self) -> list[Exported]:
        return [t.export() for t in self.transforms]

    def __repr__(self) -> str:
        return "\n".join(["Compose(", *(f"    {t}" for t in self.transforms), ")"])


def export(transforms: Compose | Iterable[Transform]) -> list[Exported]:
    """What the C++ core takes: a list of (name, {parameter: value})."""
    if not isinstance(transforms, Compose):
        transforms = Compose(transforms)
    return transforms.export()


@dataclass
class Translation:
    """What `transforms_from` made of a pipeline: `native` runs in C++, then `python` on samples.

    Unpacks as (native, python); prints as an account of both.
    """

    native: list[Transform]
    python: list[Callable[[Any], Any]]
    reason: str = ""  # why the first of `python` stays there
    notes: list[str] = field(default_factory=list)
    tensors: bool = False  # `python` takes bytes as tensors, after ToImage or PILToTensor

    def __iter__(self) -> Any:
        return iter((self.native, self.python))

    def export(self) -> list[Exported]:
        return export(self.native)

    def __str__(self) -> str:
        lines = ["in C++:", *([f"  {t}" for t in self.native] or ["  (nothing)"])]
        if self.python:
            lines += ["in Python:", *(f"  {_title(t)}" for t in self.python)]
            lines.append(f"because {self.reason}; what follows it stays with it")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _title(transform: Any) -> str:
    return repr(transform).split("\n")[0]


def transforms_from(pipeline: Any) -> Translation:
    """Translates torchvision transforms (v1 or v2: a Compose, a list, or one) as far as they go.

    torchvision itself is not imported: its classes are known by their names. The first transform
    that C++ does not have, and all after it, stay in Python, and take what C++ hands them: a PIL
    image, a uint8 CHW tensor after ToImage or PILToTensor, a float CHW tensor after ToTensor.
    """
    flat = list(_flatten(pipeline))
    native: list[Transform] = []
    notes: list[str] = []
    tensors = False
    i = 0
    while i < len(flat):
        step = flat[i]
        try:
            made = _translate(step, native, notes)
            if made is not None:
                _check_place(made, native)
        except (ArgumentError, AttributeError) as error:
            return Translation(native, flat[i:], f"{_class_name(step)}: {error}", notes, tensors)
        if made is not None:
            native.append(made)
        tensors = tensors or _class_name(step) in ("ToImage", "PILToTensor")
        i += 1
    return Translation(native, [], "", notes, tensors)


def _flatten(pipeline: Any) -> Iterable[Any]:
    inner = getattr(pipeline, "transforms", None)
    if isinstance(pipeline, Compose) or (_class_name(pipeline) == "Compose" and inner is not None):
        pipeline = inner
    if isinstance(pipeline, (list, tuple)):
        for step in pipeline:
            yield from _flatten(step)
    elif type(pipeline).__module__.startswith("torch.nn") and _class_name(pipeline) == "Sequential":
        for step in pipeline:
            yield from _flatten(step)
    else:
        yield pipeline


def _class_name(step: Any) -> str:
    return type(step).__name__


def _check_place(made: Transform, native: list[Transform]) -> None:
    tensor = any(isinstance(t, ToTensor) for t in native)
    if isinstance(made, Normalize) and not tensor:
        raise ArgumentError("stands before ToTensor")
    flip = isinstance(made, (RandomHorizontalFlip, RandomVerticalFlip))
    if tensor and not flip and not isinstance(made, (Normalize, ToTensor)):
        raise ArgumentError("works on a tensor, after ToTensor")
    if tensor and isinstance(made, ToTensor):
        raise ArgumentError("a second ToTensor")


def _translate(step: Any, native: list[Transform], notes: list[str]) -> Transform | None:
    """The native transform, or None when nothing needs doing; ArgumentError when it cannot."""
    if isinstance(step, Transform):
        return step
    module = type(step).__module__
    if not module.startswith("torchvision.transforms"):
        raise ArgumentError("is not one of torchvision's transforms")
    name = _class_name(step)
    if name in (
        "ToImage",
        "PILToTensor",
        "ConvertImageDtype",
        "ToDtype",
        "Identity",
        "ToPureTensor",
    ):
        return _translate_conversion(step, name, native, notes)
    make = _MAKERS.get(name)
    if make is None:
        raise ArgumentError("has no counterpart in C++")
    return make(step)


def _translate_conversion(
    step: Any, name: str, native: list[Transform], notes: list[str]
) -> Transform | None:
    if name in ("Identity", "ToPureTensor"):
        return None
    tensor = any(isinstance(t, ToTensor) for t in native)
    if name in ("ToImage", "PILToTensor"):
        if tensor:
            raise ArgumentError("stands after ToTensor")
        notes.append(
            f"{name} is the layout of the output here; crops and colours after it have PIL's "
            "bits, which may differ by one level from those on tensors"
        )
        return None
    dtype = str(getattr(step, "dtype", ""))
    scale = name == "ConvertImageDtype" or getattr(step, "scale", False)
    v2 = type(step).__module__.startswith("torchvision.transforms.v2")
    if dtype == "torch.uint8" and not tensor:
        return None
    if dtype != "torch.float32" or not scale:
        raise ArgumentError("only scaling to torch.float32 has a counterpart in C++")
    return None if tensor else ToTensor(multiply=v2)


def _jitter_range(value: Any) -> Any:
    return 0 if value is None else value


def _resize_size(step: Any) -> Any:
    if step.size is None:
        raise ArgumentError("size=None has no counterpart in C++")
    return step.size


def _padding(step: Any) -> Any:
    padding = step.padding
    if isinstance(padding, Sequence) and not any(padding):
        return None
    return padding


def _v2_fill(step: Any) -> Any:
    # v2 keeps a dict from the kind of input to the fill.
    fill = step.fill
    if isinstance(fill, dict):
        if len(set(map(repr, fill.values()))) > 1:
            raise ArgumentError("a fill for each kind of input has no counterpart in C++")
        fill = next(iter(fill.values()), 0)
    return fill


_MAKERS: dict[str, Callable[[Any], Transform]] = {
    "RandomResizedCrop": lambda s: RandomResizedCrop(s.size, s.scale, s.ratio, s.interpolation),
    "Resize": lambda s: Resize(_resize_size(s), s.interpolation, s.max_size),
    "CenterCrop": lambda s: CenterCrop(s.size),
    "RandomCrop": lambda s: RandomCrop(
        s.size, _padding(s), s.pad_if_needed, _v2_fill(s), s.padding_mode
    ),
    "RandomHorizontalFlip": lambda s: RandomHorizontalFlip(s.p),
    "RandomVerticalFlip": lambda s: RandomVerticalFlip(s.p),
    "ColorJitter": lambda s: ColorJitter(
        _jitter_range(s.brightness), _jitter_range(s.contrast),
        _jitter_range(s.saturation), _jitter_range(s.hue),
    ),
    "Grayscale": lambda s: Grayscale(s.num_output_channels),
    "RandomGrayscale": lambda s: RandomGrayscale(s.p),
    "RandAugment": lambda s: RandAugment(
        s.num_ops, s.magnitude, s.num_magnitude_bins, s.interpolation, _v2_fill(s)
    ),
    "ToTensor": lambda s: ToTensor(),
    "Normalize": lambda s: Normalize(list(s.mean), list(s.std)),
}  # fmt: skip
