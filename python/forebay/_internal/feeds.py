"""Where a loader's batches come from: stored bytes, decoded samples, or tensors on a GPU.

A feed is asked for what comes at a place, ``take(wait, at)``, and answers the same until it is
asked for another place: the loader decides when a batch counts as delivered. So an exception, also
one that a signal handler raises between any two instructions, loses no batch and doubles none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _forebay
from .._errors import ArgumentError, CorruptError
from ..engine import Engine
from .units import whole_number

if TYPE_CHECKING:
    from .. import transforms as tr

_log = logging.getLogger("forebay")

KINDS = ("image", "npy", "npz")
_LOOKED_AT = 100  # samples, for one whose type and shape can be read
MAX_PIXELS = 178_956_970
"""Where PIL raises DecompressionBombError."""
_MOST_PIXELS = 1 << 28
DTYPES = ("uint8", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Decoding:
    """How samples are decoded: the loader's arguments, checked."""

    kind: str
    array_name: str = ""
    transform: Sequence[tr.Transform] = ()
    rest: Sequence[Callable] = ()
    """What follows in Python, for each sample."""
    rest_reason: str = ""
    rest_tensors: bool = False
    """Whether ``rest`` takes bytes as tensors; else as PIL images."""
    dtype: str = "float32"
    channels_last: bool = False
    fast: bool = False
    skip: bool = False
    max_pixels: int = MAX_PIXELS

    @staticmethod
    def of(
        decode: str,
        transform: Any,
        *,
        dtype: str | None,
        channels_last: bool,
        fast: bool,
        on_error: str,
        max_pixels: int | None = None,
    ) -> Decoding:
        from .. import transforms

        kind, _, name = decode.partition(":") if isinstance(decode, str) else ("", "", "")
        if kind not in KINDS or (name and kind != "npz"):
            raise ArgumentError(
                f"decode is {decode!r}; it takes 'image', 'npy', 'npz' or 'npz:NAME'"
            )
        if on_error not in ("raise", "skip"):
            raise ArgumentError(f"on_error is {on_error!r}; it takes 'raise' or 'skip'")
        skip = on_error == "skip"
        if kind != "image":
            given = (transform, dtype, max_pixels) != (None, None, None)
            if given or channels_last or fast:
                raise ArgumentError(
                    "transform=, dtype=, channels_last=, fast= and max_pixels= are for images; "
                    f"decode={decode!r} hands arrays out as they are stored"
                )
            return Decoding(kind=kind, array_name=name, skip=skip)
        chosen = transforms.transforms_from(transform if transform is not None else [])
        if chosen.python:
            _check_rest(chosen)
            _log.info("forebay: %s", chosen)
        tensor = any(isinstance(op, transforms.ToTensor) for op in chosen.native)
        dtype = dtype or ("float32" if tensor else "uint8")
        dtype = str(dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ArgumentError(f"dtype is {dtype!r}; it takes one of {', '.join(DTYPES)}")
        if tensor and dtype == "uint8":
            raise ArgumentError("dtype is 'uint8', but ToTensor makes numbers from 0 to 1")
        if not tensor and dtype != "uint8":
            raise ArgumentError(f"dtype is {dtype!r}, which needs ToTensor() among the transforms")
        return Decoding(
            kind=kind,
            transform=chosen.native,
            rest=chosen.python,
            rest_reason=chosen.reason,
            rest_tensors=chosen.tensors,
            dtype=dtype,
            channels_last=channels_last,
            fast=fast,
            skip=skip,
            max_pixels=whole_number(
                "max_pixels", MAX_PIXELS if max_pixels is None else max_pixels, 1, _MOST_PIXELS
            ),
        )

    def pipeline_arguments(self) -> dict[str, Any]:
        """For ``_forebay.Pipeline``, in the sampler's absence."""
        return dict(
            kind="image",
            transform=[op.export() for op in self.transform],
            dtype=self.dtype,
            layout="hwc" if self.channels_last else "chw",
            fast=self.fast,
            skip=self.skip,
            max_pixels=self.max_pixels,
        )


At = tuple[int, int]
"""An epoch, and how many of its samples, of all ranks, come before."""


class Held:
    """What comes at a place: a batch, or a mark such as "end of epoch"; None: not taken yet, or
    handed out.
    """

    __slots__ = ("at", "item")

    def __init__(self, at: At) -> None:
        self.at = at
        self.item: Any = None


class Course:
    """The places of a stream."""

    def __init__(self, arguments: dict) -> None:
        self._step = arguments["batch_size"] * arguments["world"]
        self._total = _forebay.epoch_total(
            arguments["size"], arguments["world"], arguments["sampler_drop_last"]
        )

    def after(self, at: At, item: Any) -> At:
        """Where one stands behind what comes at a place."""
        epoch, position = at
        if isinstance(item, str):
            return epoch + 1, 0
        # The last batch may be short; padding makes the ranks' shares equal, so all stand alike.
        return epoch, min(self._total, position + self._step * getattr(item, "batches", 1))


class NativeFeed:
    """What the feeds of C++ streams share.

    The stream stands behind what is held, or, where nothing is, at ``_place``. This holds between
    any two instructions: C++ takes a batch and puts it into the ``Held`` in one step.
    """

    native: Any

    def __init__(self, engine: Engine, arguments: dict) -> None:
        self._engine = engine
        self._course = Course(arguments)
        self._place: At | None = (arguments["first_epoch"], arguments["first_position"])
        self._held = Held(self._place)

    def take(self, wait: float, at: At) -> Held | None:
        """What comes at a place; None when it is not there within ``wait`` seconds."""
        held = self._held
        if held.item is None or held.at != at:
            self.stand(at)
            held = self._held = Held(at)
            self._take(wait, held)
            if held.item is None:
                return None
        self._place = self._course.after(at, held.item)
        return held

    def stand(self, at: At) -> None:
        """Moves the stream to a place, if it is not there."""
        held = self._held
        if held.item is not None:
            if held.at == at:
                return
            self._place = self._course.after(held.at, held.item)
            held.item = None
        if self._place != at:
            self.seek(at)

    def seek(self, at: At) -> None:
        """Starts afresh at a place."""
        self._place = None
        self._held.item = None
        self._seek(*at)
        self._place = at

    def _take(self, wait: float, held: Held) -> None:
        raise NotImplementedError

    def _seek(self, epoch: int, position: int) -> None:
        raise NotImplementedError


class StreamFeed(NativeFeed):
    """Batches as they are stored."""

    def __init__(self, engine: Engine, dataset: int, arguments: dict, contiguous: bool) -> None:
        super().__init__(engine, arguments)
        self.native = engine.native
        self._dataset: int | None = dataset  # is this feed's to close
        try:
            self.stream = self.native.open_stream(
                _forebay.StreamOptions(dataset, contiguous=contiguous, **arguments)
            )
        except BaseException:
            self.native.close_dataset(dataset)
            raise
        engine.tell_changes()

    def _take(self, wait: float, held: Held) -> None:
        try:
            self.native.take(self.stream, wait, held)
        finally:
            self._engine.tell_changes()

    def _seek(self, epoch: int, position: int) -> None:
        self.native.seek(self.stream, epoch, position)
        self._engine.tell_changes()

    def stats(self) -> list[dict]:
        return self.native.stats(self.stream)

    def files_changed(self) -> tuple[int, str]:
        return self.native.files_changed(self.stream)

    def waiting_for(self) -> str:
        return self.native.waiting_for(self.stream)

    def close(self) -> None:
        self.native.close_stream(self.stream)
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            self.native.close_dataset(dataset)


class PipelineFeed(NativeFeed):
    """Decoded batches: ``_forebay.DecodedBatch``."""

    def __init__(
        self,
        engine: Engine,
        dataset: int,
        arguments: dict,
        decoding: Decoding,
        catalog: _forebay.Catalog | None = None,
    ) -> None:
        """``catalog`` is needed for arrays only."""
        super().__init__(engine, arguments)
        self._owner = engine.native
        self._dataset: int | None = dataset  # is this feed's to close
        try:
            self._start(engine, dataset, arguments, decoding, catalog)
        except BaseException:
            self._owner.close_dataset(dataset)
            raise
        self._skipped = 0
        engine.tell_changes()

    def _start(
        self,
        engine: Engine,
        dataset: int,
        arguments: dict,
        decoding: Decoding,
        catalog: _forebay.Catalog | None,
    ) -> None:
        if decoding.kind == "image":
            more = decoding.pipeline_arguments()
        else:
            assert catalog is not None
            dtype, shape = _array_type(engine, dataset, catalog, decoding)
            more = dict(
                kind="array",
                array_name=decoding.array_name,
                dtype=dtype,
                shape=shape,
                skip=decoding.skip,
            )
        try:
            self.native = _forebay.Pipeline(
                engine.native, _forebay.StreamOptions(dataset, **arguments), **more
            )
        except ArgumentError as error:
            if not decoding.rest or "different sizes" not in str(error):
                raise
            raise ArgumentError(
                f"{error}. Only transforms that run in C++ count; {decoding.rest_reason}, so it "
                "and all after it run in Python on finished batches. Put the one that fixes the "
                "size before it"
            ) from None

    def _take(self, wait: float, held: Held) -> None:
        try:
            self.native.take(wait, held)
        finally:
            self._engine.tell_changes()
        if isinstance(held.item, str):
            self._tell_skipped()

    def _tell_skipped(self) -> None:
        skipped = self.native.skipped
        if skipped > self._skipped:
            _log.warning(
                "forebay: corrupt samples skipped: %d; the last one: %s",
                skipped - self._skipped,
                self.native.last_skipped,
            )
            self._skipped = skipped

    def _seek(self, epoch: int, position: int) -> None:
        self.native.seek(epoch, position)
        self._engine.tell_changes()

    def stats(self) -> list[dict]:
        return self.native.stats()

    def files_changed(self) -> tuple[int, str]:
        return self.native.files_changed()

    def waiting_for(self) -> str:
        return self.native.waiting_for()

    def close(self) -> None:
        self._tell_skipped()
        self.native.stop()
        dataset, self._dataset = self._dataset, None
        if dataset is not None:
            self._owner.close_dataset(dataset)


def _check_rest(chosen: tr.Translation) -> None:
    """What stays in Python must be able to run there."""
    from .. import transforms

    for op in chosen.python:
        if isinstance(op, type):
            raise ArgumentError(f"transform: {op.__name__} is a class; write {op.__name__}(...)")
        if isinstance(op, transforms.Transform):
            raise ArgumentError(
                f"transform: {op} runs in C++ only, and cannot stand there ({chosen.reason}); "
                "put it elsewhere, or use torchvision's"
            )
        if not callable(op):
            raise ArgumentError(f"transform: {op!r} is no transform and cannot be called")


def _array_type(
    engine: Engine, dataset: int, catalog: _forebay.Catalog, decoding: Decoding
) -> tuple[str, list[int]]:
    """Type and shape of the data set's arrays, from its first sample; from the first good one
    where corrupt ones are skipped.
    """
    if len(catalog) == 0:
        return "<f4", []
    last = min(len(catalog), _LOOKED_AT) - 1 if decoding.skip else 0
    for sample in range(last):
        try:
            return _array_info(engine, dataset, catalog, sample, decoding.array_name)
        except CorruptError:
            continue
    return _array_info(engine, dataset, catalog, last, decoding.array_name)


def _array_info(
    engine: Engine, dataset: int, catalog: _forebay.Catalog, sample: int, name: str
) -> tuple[str, list[int]]:
    native = engine.native
    stream = native.open_stream(_forebay.StreamOptions(dataset, 1, itemised=True, declared=True))
    try:
        native.declare(stream, 0, np.array([sample], np.uint32), last=True)
        batch = native.fetch(stream, sample, 60.0)
        if batch is None:
            raise ArgumentError("the first sample could not be read within a minute")
        path = batch.paths[0]
        stored = batch[0]
        for member, offset, length in catalog.fields(sample):  # of a WebDataset
            if member.endswith(("npy", "npz")):
                stored = stored[offset : offset + length]
                break
        try:
            return _forebay.array_info(stored, name)
        except Exception as error:
            raise type(error)(f"{path}: {error}") from None
    finally:
        native.close_stream(stream)


def _torch(batch: _forebay.DecodedBatch) -> Any:
    """All samples as one PyTorch tensor: a view, no copy."""
    from torch.utils.dlpack import from_dlpack

    return from_dlpack(batch.dlpack())


setattr(_forebay.DecodedBatch, "torch", _torch)  # noqa: B010 - as a method of that class


def finish(batch: _forebay.DecodedBatch, decoding: Decoding) -> tuple[Any, Any]:
    """``(images, labels)`` as PyTorch tensors; as NumPy arrays where there is no PyTorch."""
    try:
        import torch
    except ImportError:
        if decoding.rest:
            raise
        data = batch.numpy()
        if decoding.kind == "image" and decoding.channels_last:
            data = np.moveaxis(data, -1, 1)
        return data, batch.labels
    data = _torch(batch)
    if decoding.kind == "image" and decoding.channels_last:
        data = data.permute(0, 3, 1, 2)
    if decoding.rest:
        data = _apply_rest(data, decoding)
    return data, torch.from_numpy(batch.labels)


def _apply_rest(data: Any, decoding: Decoding) -> Any:
    from torch.utils.data import default_collate

    samples = []
    for image in data:
        value: Any = image
        if decoding.dtype == "uint8" and not decoding.rest_tensors:
            from PIL import Image

            value = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
        for op in decoding.rest:
            value = op(value)
        samples.append(value)
    return default_collate(samples)
