"""Batches on a GPU: copied on a side stream one batch ahead, as bytes, and normalised there."""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import transforms
from .._errors import ArgumentError, CancelledError, ForebayError
from .feeds import At, Course, Decoding, Held

_log = logging.getLogger("forebay")
_AHEAD = 1  # batches under way to the GPU beside the one handed out


def normalisation(ops: Sequence[Any]) -> tuple[list[Any], list[list[float]] | None]:
    """What stays on the processor, and a table of 3 x 256 numbers for what the GPU does.

    ToTensor and Normalize at the end of the list map each byte of a channel to one number, so a
    table gives exactly what the processor would. No table: the bytes are wanted as they are.
    """
    import numpy as np

    kept = list(ops)
    tail: list[Any] = []
    while kept and isinstance(kept[-1], (transforms.ToTensor, transforms.Normalize)):
        tail.insert(0, kept.pop())
    if not any(isinstance(op, transforms.ToTensor) for op in tail):
        return list(ops), None
    table = np.tile(np.arange(256, dtype=np.float32), (3, 1))
    for op in tail:
        if isinstance(op, transforms.ToTensor):
            table = table / np.float32(255)
        else:
            mean = np.asarray(op.parameters["mean"], np.float32).reshape(-1, 1)
            std = np.asarray(op.parameters["std"], np.float32).reshape(-1, 1)
            table = (table - mean) / std
    return kept, table.astype(np.float32).tolist()


class DeviceFeed:
    """``(images, labels)`` on a GPU, each handed out once its copy is in order on the stream that
    the caller computes on; the caller never synchronises.
    """

    def __init__(
        self,
        open_feed: Callable[[Decoding], Any],
        decoding: Decoding,
        device: Any,
        arguments: dict,
    ) -> None:
        """``open_feed`` makes a feed of batches decoded so, of a stream with these arguments."""
        import torch

        self._torch = torch
        self.device = torch.device(device)
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        kept, table = normalisation(decoding.transform)
        self._dtype = getattr(torch, decoding.dtype)
        self._channels_last = decoding.channels_last
        self._table = None
        if table is not None:
            self._table = torch.tensor(table, dtype=torch.float32, device=self.device)
        # Bytes of whole pixels over the bus: what a GPU writes best, and a quarter of the floats.
        inner = replace(decoding, transform=kept, dtype="uint8", channels_last=True)
        self._feed = open_feed(inner)
        self._kernel = _load_kernel()
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream()
        self._course = Course(arguments)
        self._queue: deque[_Sent] = deque()  # handed out last, under way or arrived, in order
        self._closed = False
        self._copying: deque[Any] = deque()  # (event, batch): memory a copy still reads
        self._waits: deque[Any] = deque()  # (caller got there, copy was done)
        self._pinned: dict[int, int] = {}
        self._unpinnable = False

    # ---- the loader's side

    def take(self, wait: float, at: At) -> Held | None:
        """As ``NativeFeed.take``."""
        queue = self._queue
        self._pass(at)
        if not queue and not self._enqueue(wait, at):
            return None
        first = queue[0]
        self._look_ahead()
        if isinstance(first.item, str):
            return first
        torch = self._torch
        current = torch.cuda.current_stream(self.device)
        reached = torch.cuda.Event(enable_timing=True)
        reached.record(current)
        current.wait_event(first.done)
        first.item.images.record_stream(current)
        first.item.labels.record_stream(current)
        if not first.charged:
            first.charged = True
            self._waits.append((reached, first.done))
        self._charge()
        return first

    def stand(self, at: At) -> None:
        """As ``NativeFeed.stand``."""
        self._pass(at)
        if not self._queue:
            self._drain()
            self._feed.stand(at)

    def _pass(self, at: At) -> None:
        """Drops what lies before a place, and was handed out or is not wanted any more."""
        queue = self._queue
        while queue and (queue[0].at != at or queue[0].item is None):
            queue.popleft()

    def seek(self, at: At) -> None:
        """As ``NativeFeed.seek``."""
        self._queue.clear()
        self._drain()
        self._feed.seek(at)

    def stats(self) -> list[dict]:
        self._charge()
        return self._feed.stats()

    def files_changed(self) -> tuple[int, str]:
        return self._feed.files_changed()

    def waiting_for(self) -> str:
        return self._feed.waiting_for()

    def close(self) -> None:
        self._closed = True
        self._queue.clear()
        self._drain()
        self._unpin()
        self._feed.close()

    # ---- the GPU's side

    def _look_ahead(self) -> None:
        """Sends on their way what is finished, also beyond the end of an epoch."""
        queue = self._queue
        while (
            sum(not isinstance(sent.item, str) for sent in queue if sent is not queue[0]) < _AHEAD
        ):
            if queue[-1].item == "end of stream":
                return
            try:
                if not self._enqueue(0.0, queue[-1].after):
                    return
            except ForebayError:
                return  # a corrupt sample is reported again at its batch, a failed read tried again

    def _enqueue(self, wait: float, at: At) -> bool:
        """Sends what comes at a place on its way; false when it is not there within `wait` seconds.

        Where that fails or is interrupted, the feed below still holds it, and the next call tries
        again.
        """
        while self._copying and self._copying[0][0].query():
            self._copying.popleft()
        held = self._feed.take(wait, at)
        if held is None:
            return False
        if self._closed:
            raise CancelledError("the loader was closed")
        took = held.item
        sent = _Sent(at, self._course.after(at, took))
        if isinstance(took, str):
            sent.item = took
            self._queue.append(sent)
            return True
        torch = self._torch
        self._pin()
        source = took.torch()
        labels = torch.from_numpy(took.labels)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            pixels = source.to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            images = self._normalise(pixels)
            on_device = labels.to(self.device, non_blocking=True)
            done = torch.cuda.Event(enable_timing=True)
            done.record()
        self._copying.append((copied, took))
        sent.item = DeviceBatch(images, on_device, took.batches)
        sent.done = done
        self._queue.append(sent)
        held.item = None  # the copy keeps its memory for as long as it reads
        return True

    def _normalise(self, pixels: Any) -> Any:
        torch = self._torch
        n, height, width, _ = pixels.shape
        view = pixels.permute(0, 3, 1, 2)
        order = torch.channels_last if self._channels_last else torch.contiguous_format
        if self._table is None:
            return view if self._channels_last else view.contiguous()
        if self._kernel is None:
            # The table's own arithmetic, in the same order: the same bits.
            channels = torch.arange(3, device=pixels.device).view(1, 3, 1, 1)
            return self._table[channels, view.int()].to(self._dtype, memory_format=order)
        out = torch.empty(
            (n, 3, height, width), dtype=self._dtype, device=pixels.device, memory_format=order
        )
        code = self._kernel.forebay_cuda_normalize(
            ctypes.c_void_p(pixels.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_void_p(self._table.data_ptr()),
            ctypes.c_uint64(n),
            ctypes.c_uint64(height * width),
            ctypes.c_int({torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}[self._dtype]),
            ctypes.c_int(1 if self._channels_last else 0),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if code != 0:
            raise RuntimeError(f"the normalisation kernel failed with CUDA error {code}")
        return out

    def _pin(self) -> None:
        """Registers the memory of finished batches with CUDA, each piece once: copies from it run
        beside the computation.
        """
        if self._unpinnable:
            return
        for address, size in self._feed.native.slabs:
            if address in self._pinned:
                continue
            code = self._torch.cuda.cudart().cudaHostRegister(address, size, 0)
            if int(code) != 0:
                _log.warning("forebay: CUDA cannot pin the batches (%s): copies are slower", code)
                self._unpinnable = True
                return
            self._pinned[address] = size

    def _unpin(self) -> None:
        """Before the pipeline gives the memory back."""
        while self._copying:
            self._copying.popleft()[0].synchronize()
        cudart = self._torch.cuda.cudart()
        for address in self._pinned:
            cudart.cudaHostUnregister(address)
        self._pinned.clear()

    def _drain(self) -> None:
        while self._copying:
            self._copying.popleft()[0].synchronize()
        self._stream.synchronize()  # a copy that was interrupted

    def _charge(self) -> None:
        """Counts how long the GPU stood still for copies that were not done."""
        while self._waits and self._waits[0][0].query() and self._waits[0][1].query():
            reached, done = self._waits.popleft()
            late = reached.elapsed_time(done) * 1e-3
            if late > 0:
                self._feed.native.charge_copy(late)


class _Sent(Held):
    """What is on its way to the GPU, or there."""

    __slots__ = ("after", "charged", "done")

    def __init__(self, at: At, after: At) -> None:
        super().__init__(at)
        self.after = after
        self.done: Any = None  # an event
        self.charged = False


class DeviceBatch:
    """What the loader turns into ``(images, labels)``."""

    def __init__(self, images: Any, labels: Any, batches: int) -> None:
        self.images = images
        self.labels = labels
        self.batches = batches


def check_device(device: Any) -> Any:
    """The torch device, or None for the processor; a clear error where there is no such GPU."""
    if device is None:
        return None
    try:
        import torch
    except ImportError:
        raise ArgumentError(f"device={device!r} needs PyTorch, which is not installed") from None
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        raise ArgumentError(
            f"device is {device!r}; it takes 'cuda', 'cuda:1' and so on, or 'cpu'"
        ) from None
    if chosen.type == "cpu":
        return None
    if chosen.type != "cuda":
        raise ArgumentError(f"device is {device!r}; batches go to 'cuda' devices, or stay on 'cpu'")
    if not torch.cuda.is_available():
        raise ArgumentError(f"device={device!r}, but PyTorch sees no CUDA device here")
    return chosen


def _load_kernel() -> Any:
    """The compiled CUDA part, or None: PyTorch's own operations do the same, in more passes."""
    path = Path(__file__).parent.parent / "lib" / "libforebay_cuda.so"
    if not path.exists():
        return None
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        _log.warning("forebay: %s does not load (%s); using PyTorch's operations", path, error)
        return None
