"""Batches on a GPU: the same numbers as on the processor, in the same order.

Without a GPU these tests are skipped, and pytest's summary says so.
"""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
PIL_Image = pytest.importorskip("PIL.Image")

import forebay  # noqa: E402
from forebay import transforms as T  # noqa: E402
from forebay._internal.device import normalisation  # noqa: E402

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="NO CUDA DEVICE")


@pytest.fixture
def photos(tmp_path):
    rng = np.random.default_rng(0)
    for c in range(2):
        (tmp_path / f"class{c}").mkdir()
        for i in range(21):
            shape = (int(rng.integers(40, 90)), int(rng.integers(40, 90)), 3)
            pixels = rng.integers(0, 256, shape).astype(np.uint8)
            PIL_Image.fromarray(pixels).save(tmp_path / f"class{c}" / f"{i:02}.jpg", quality=90)
    return tmp_path


def _loader(path, ops, **how):
    how.setdefault("shuffle", True)
    return forebay.DataLoader(
        path, 8, seed=7, decode="image", transform=ops, memory="256M", rank=0, world_size=1, **how
    )


def test_the_table_is_what_the_processor_computes():
    ops = [T.RandomResizedCrop(32), T.ToTensor(), T.Normalize(MEAN, STD)]
    kept, table = normalisation(ops)
    assert kept == ops[:1]
    bytes_ = torch.arange(256, dtype=torch.uint8).float().div(255)
    for c in range(3):
        wanted = bytes_.sub(MEAN[c]).div(STD[c])
        assert torch.equal(torch.tensor(table[c]), wanted)
    assert normalisation(ops[:1]) == (ops[:1], None)


def test_a_missing_gpu_is_named(photos):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(forebay.ArgumentError, match="no CUDA device"):
        _loader(photos, [T.CenterCrop(32)], device="cuda")
    with pytest.raises(forebay.ArgumentError, match="'cuda' devices"):
        _loader(photos, [T.CenterCrop(32)], device="meta")


class _Nothing:
    """Stands for a stream, an event or a context: everything is done at once."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def record(self, *_: object) -> None:
        pass

    def wait_event(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: object) -> float:
        return 2.0

    def cudaHostRegister(self, *_: object) -> int:  # noqa: N802
        return 0

    cudaHostUnregister = cudaHostRegister  # noqa: N815


@pytest.fixture
def without_gpu(monkeypatch):
    """The GPU's feed with the processor in the GPU's place: its order, ends and errors."""
    for name in ("Stream", "Event", "current_stream", "stream", "device", "cudart"):
        monkeypatch.setattr(torch.cuda, name, _Nothing)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr("forebay._internal.device._load_kernel", lambda: None)
    monkeypatch.setattr("forebay.loader.check_device", lambda _: torch.device("cpu"))


OPS = [T.RandomResizedCrop(32), T.ToTensor(), T.Normalize(MEAN, STD)]


def _copies(loader):
    return [(images.clone(), labels.clone()) for images, labels in loader]


def _check_equal(got, wanted):
    assert len(got) == len(wanted)
    for (images, labels), (right, right_labels) in zip(got, wanted, strict=True):
        assert torch.equal(images, right) and torch.equal(labels, right_labels)


def test_the_feed_keeps_order_over_epochs_breaks_and_resumes(photos, without_gpu):
    with _loader(photos, OPS, device="fake", epochs=3) as loader:
        assert type(loader._feed).__name__ == "DeviceFeed"
        epochs = [_copies(loader) for _ in range(3)]
        assert [len(e) for e in epochs] == [6, 6, 6]
        assert loader.stats()[0].wait["copy"] >= 2e-3
        with pytest.raises(forebay.ArgumentError, match="beyond epochs"):
            iter(loader)
        loader.set_epoch(1)
        for i, (images, _) in enumerate(loader):
            assert torch.equal(images, epochs[1][i][0])
            if i == 2:
                break
        state = loader.state_dict()
        assert (state["epoch"], state["consumed"]) == (1, 24)
        _check_equal(_copies(loader), epochs[1])  # after a break: from the start
    with _loader(photos, OPS, device="fake") as other:
        other.load_state_dict(state)
        _check_equal(_copies(other), epochs[1][3:])
        _check_equal(_copies(other), epochs[2])


def test_the_feed_gives_what_the_processor_gives(photos, without_gpu, monkeypatch):
    with _loader(photos, OPS, device="fake") as fed:
        got = _copies(fed)
    monkeypatch.setattr("forebay.loader.check_device", lambda _: None)
    with _loader(photos, OPS) as plain:
        _check_equal(got, _copies(plain))


def test_the_feed_raises_an_error_at_its_own_batch(photos, without_gpu):
    names = sorted((photos / "class0").iterdir())
    names[17].write_bytes(b"no image")  # of the third batch
    ops = [T.Resize((32, 32)), T.ToTensor()]
    with _loader(photos, ops, shuffle=False, device="fake") as loader:
        it = iter(loader)
        assert [len(next(it)[1]) for _ in range(2)] == [8, 8]
        for _ in range(2):
            with pytest.raises(forebay.CorruptError, match=names[17].name):
                next(it)
    with _loader(photos, ops, shuffle=False, device="fake", on_error="skip", epochs=2) as loader:
        for _ in range(2):
            assert [len(labels) for _, labels in loader] == [8, 8, 7, 8, 8, 2]


@needs_gpu
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("side", [32, 33])
@pytest.mark.parametrize("kernel", [True, False])
def test_a_gpu_gets_the_processors_numbers(photos, channels_last, dtype, side, kernel):
    ops = [T.RandomResizedCrop(side), T.RandomHorizontalFlip(), T.ToTensor(),
           T.Normalize(MEAN, STD)]  # fmt: skip
    how = dict(dtype=dtype, channels_last=channels_last)
    with _loader(photos, ops, **how) as plain, _loader(photos, ops, device="cuda", **how) as fast:
        if not kernel:
            fast._feed._kernel = None
        for _ in range(2):
            pairs = list(zip([(a.clone(), b.clone()) for a, b in plain], list(fast), strict=True))
            assert len(pairs) == 6
            for (images, labels), (on_gpu, gpu_labels) in pairs:
                assert on_gpu.is_cuda and on_gpu.dtype == images.dtype
                order = torch.channels_last if channels_last else torch.contiguous_format
                assert on_gpu.is_contiguous(memory_format=order)
                assert torch.equal(on_gpu.cpu(), images)
                assert torch.equal(gpu_labels.cpu(), labels)


@needs_gpu
def test_bytes_stay_bytes_on_a_gpu(photos):
    ops = [T.Resize((40, 40))]
    with _loader(photos, ops) as plain, _loader(photos, ops, device="cuda") as fast:
        for (images, _), (on_gpu, _) in zip(plain, fast, strict=True):
            assert on_gpu.dtype == torch.uint8
            assert torch.equal(on_gpu.cpu(), images)


@needs_gpu
def test_breaks_and_resumes_on_a_gpu(photos):
    ops = [T.RandomResizedCrop(32), T.ToTensor()]
    with _loader(photos, ops) as plain, _loader(photos, ops, device="cuda") as fast:
        wanted = [(a.clone(), b.clone()) for a, b in plain]
        for i, _ in enumerate(fast):
            if i == 2:
                break
        state = fast.state_dict()
        assert state["consumed"] == 24
        with _loader(photos, ops, device="cuda") as other:
            other.load_state_dict(state)
            rest = list(other)
        assert len(rest) == len(wanted) - 3
        for (images, _), (on_gpu, _) in zip(wanted[3:], rest, strict=True):
            assert torch.equal(on_gpu.cpu(), images)
        again = list(fast)  # the same epoch from its start
        assert len(again) == len(wanted)
        for (images, _), (on_gpu, _) in zip(wanted, again, strict=True):
            assert torch.equal(on_gpu.cpu(), images)


@needs_gpu
def test_a_corrupt_image_is_raised_at_its_own_batch_on_a_gpu(photos):
    names = sorted((photos / "class0").iterdir())
    names[17].write_bytes(b"no image")  # of the third batch
    ops = [T.Resize((32, 32))]
    how = dict(shuffle=False, device="cuda")
    with _loader(photos, ops, **how) as loader:
        it = iter(loader)
        for _ in range(2):
            images, _ = next(it)
            assert len(images) == 8
        for _ in range(2):
            with pytest.raises(forebay.CorruptError, match=names[17].name):
                next(it)
    with _loader(photos, ops, on_error="skip", epochs=2, **how) as loader:
        assert [len(labels) for _, labels in loader] == [8, 8, 7, 8, 8, 2]
        assert [len(labels) for _, labels in loader] == [8, 8, 7, 8, 8, 2]


@needs_gpu
def test_the_report_knows_copies(photos):
    with _loader(photos, [T.RandomResizedCrop(32), T.ToTensor()], device="cuda") as loader:
        for images, _ in loader:
            images.sum().item()
        assert {"source", "memory", "decode", "copy"} <= set(loader.stats()[0].wait)
