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
from forebay.device import normalisation  # noqa: E402

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
    return forebay.DataLoader(
        path, 8, shuffle=True, seed=7, decode="image", transform=ops, memory="256M", rank=0,
        world_size=1, **how,
    )  # fmt: skip


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
def test_the_report_knows_copies(photos):
    with _loader(photos, [T.RandomResizedCrop(32), T.ToTensor()], device="cuda") as loader:
        for images, _ in loader:
            images.sum().item()
        assert set(loader.stats()[0].wait) == {"source", "memory", "decode", "plan", "copy"}
