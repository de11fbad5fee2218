"""The GPU's feed when something goes wrong in the middle: no batch is lost, none comes twice."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("PIL.Image")

from test_device import (  # noqa: E402
    OPS,
    _check_equal,
    _copies,
    _loader,
    photos,  # noqa: F401 - a fixture
    without_gpu,  # noqa: F401 - a fixture
)


@pytest.mark.parametrize("fault", [KeyboardInterrupt, RuntimeError])
def test_a_fault_on_the_way_to_the_gpu_loses_no_batch(photos, without_gpu, fault):  # noqa: F811
    with _loader(photos, OPS, device="fake") as whole:
        wanted = [_copies(whole) for _ in range(2)]
    for at in range(8):
        with _loader(photos, OPS, device="fake") as loader:
            calls = 0
            normalise = loader._feed._normalise

            def faulty(pixels, at=at, normalise=normalise):
                nonlocal calls
                calls += 1
                if calls == at + 1:
                    raise fault("once")
                return normalise(pixels)

            loader._feed._normalise = faulty
            raised = 0
            for epoch in wanted:
                it = iter(loader)
                got = []
                while True:
                    try:
                        images, labels = next(it)
                    except StopIteration:
                        break
                    except fault:
                        raised += 1
                        continue
                    got.append((images.clone(), labels.clone()))
                _check_equal(got, epoch)
            assert raised == 1


def test_memory_is_unregistered_before_it_is_given_back(
    photos,  # noqa: F811
    without_gpu,  # noqa: F811
    monkeypatch,
):
    with _loader(photos, OPS, device="fake") as loader:
        next(iter(loader))
        feed = loader._feed
        native = feed._feed.native
        seen = []
        with monkeypatch.context() as patch:
            patch.setattr(
                torch.cuda.cudart,
                "cudaHostUnregister",
                lambda _, address: seen.append(address in [a for a, _ in native.slabs]),
            )
            loader.close()
        assert seen and all(seen)
        assert native.slabs == []
