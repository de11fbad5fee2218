"""What a PyTorch loader will read, and in which order, worked out without touching anything.

Used by ``forebay.accelerate`` and by the start-up hook of ``forebay run``. The hook loads this file
alone, without the package: it imports nothing but the standard library, and torch once torch is
there.
"""

from __future__ import annotations

import copy
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

# ---- which file each item reads


def paths_of(dataset: Any) -> list[str] | None:
    """The path that each item of a data set reads, by index; None when it does not say."""
    from torch.utils.data import ConcatDataset, Subset

    if isinstance(dataset, Subset):
        inner = paths_of(dataset.dataset)
        return None if inner is None else [inner[i] for i in dataset.indices]
    if isinstance(dataset, ConcatDataset):
        parts = [paths_of(d) for d in dataset.datasets]
        if any(p is None for p in parts):
            return None
        return [path for part in parts for path in part or []]
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError):
        return None
    attributes = dict(vars(dataset)) if hasattr(dataset, "__dict__") else {}
    # torchvision's names first, then whatever else looks like a list of files.
    names = ["samples", "imgs", *sorted(set(attributes) - {"samples", "imgs"})]
    for name in names:
        found = _as_paths(attributes.get(name), count)
        if found is not None:
            return found
    return None


def _as_paths(value: Any, count: int) -> list[str] | None:
    numpy = sys.modules.get("numpy")  # whoever has an array has it
    kinds = (list, tuple) if numpy is None else (list, tuple, numpy.ndarray)
    if not isinstance(value, kinds) or len(value) != count or count == 0:
        return None

    def path(item: Any) -> str | None:
        if isinstance(item, (tuple, list)) and item:
            item = item[0]
        if isinstance(item, (str, os.PathLike)):
            text = os.fspath(item)
            return text if isinstance(text, str) else None
        return None

    first = path(value[0])
    if first is None or not os.path.exists(first):
        return None
    paths = [path(item) for item in value]
    return None if any(p is None for p in paths) else paths  # type: ignore[return-value]


# ---- in which order


def numbers(drawn: Any) -> list[int]:
    """The indices of a batch that are numbers; samplers may yield whatever their data set takes."""
    if not hasattr(drawn, "__len__") or isinstance(drawn, (str, dict)):
        return []  # an iterator would be empty afterwards
    found = []
    for item in drawn:
        try:
            found.append(operator.index(item))
        except (TypeError, ValueError):
            continue
    return found


class Replay:
    """Passes of a sampler as it will draw them, on a copy: the program's generators do not move."""

    def __init__(self, sampler: Any, keep: int, own: bool) -> None:
        self.sampler = sampler
        """The copy."""
        self.repeats = own
        """Whether further passes depend on nothing but the copy's own state."""
        self._keep = keep

    def draw(self) -> list[int]:
        """The next pass."""
        drawn = [int(i) for i in self.sampler]
        del drawn[len(drawn) // self._keep * self._keep :]
        return drawn


def replay(sampler: Any, batched: bool) -> Replay | None:
    """Of a sampler whose next pass is about to draw its first item; None when it is not known.

    ``batched``: it yields lists of indices.
    """
    from torch.utils.data import (
        BatchSampler,
        DistributedSampler,
        RandomSampler,
        SequentialSampler,
        SubsetRandomSampler,
        WeightedRandomSampler,
    )

    inner, keep = sampler, 1
    if batched:
        if type(sampler) is not BatchSampler:
            return None
        inner = sampler.sampler
        if sampler.drop_last:
            keep = sampler.batch_size
    if (type(inner).__module__, type(inner).__name__) == ("forebay.locality", "LocalitySampler"):
        return Replay(copy.copy(inner), keep, True)
    # Exactly these, as PyTorch has them: another's __iter__ may draw as it likes, and is not to run
    # more often than the program wants.
    if not getattr(type(inner).__iter__, "__module__", "").startswith("torch."):
        return None
    if type(inner) in (SequentialSampler, DistributedSampler):
        return Replay(copy.copy(inner), keep, True)
    if type(inner) not in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler):
        return None
    clone = copy.copy(inner)
    clone.generator = _generator_of(inner, seeded=type(inner) is RandomSampler)
    if clone.generator is None:
        return None
    # Without a generator of its own, the next pass depends on all that draws meanwhile.
    return Replay(clone, keep, inner.generator is not None)


def _generator_of(sampler: Any, seeded: bool) -> Any:
    """A copy of the generator that a sampler is going to draw from."""
    import torch

    if sampler.generator is not None:
        generator = torch.Generator(device=sampler.generator.device)
        generator.set_state(sampler.generator.get_state())
        return generator
    # PyTorch's global one. It is only looked at: other threads may be drawing from it right now.
    if getattr(torch, "get_default_device", lambda: torch.device("cpu"))().type != "cpu":
        return None
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    if seeded:  # RandomSampler takes one number, and makes a generator from it
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    return generator


# What may happen to a sampler between two passes: each does it to the copy; False: it cannot.


def between_passes(known: Replay, stay: bool, apart: bool = False) -> list[Callable[[Any], bool]]:
    """What may happen before the next pass, the likeliest first; nothing: nobody can know.

    ``stay``: the loader's workers do. ``apart``: the loader does not draw from the sampler's
    generator.
    """
    if not known.repeats:
        return []
    if hasattr(known.sampler, "epoch"):
        return [next_epoch, unchanged]
    if apart or not hasattr(known.sampler, "generator"):
        return [unchanged]
    # Workers that stay have their seed.
    return [unchanged, base_seed_drawn] if stay else [base_seed_drawn, unchanged]


def unchanged(sampler: Any) -> bool:
    """Nothing but the passing of time."""
    return True


def next_epoch(sampler: Any) -> bool:
    """set_epoch() with the next number."""
    if not hasattr(sampler, "epoch"):
        return False
    sampler.epoch += 1
    return True


def base_seed_drawn(sampler: Any) -> bool:
    """The loader shares the sampler's generator, and draws its workers' seed from it."""
    import torch

    generator = getattr(sampler, "generator", None)
    if generator is None:
        return False
    torch.empty((), dtype=torch.int64).random_(generator=generator)
    return True
