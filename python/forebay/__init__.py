"""Forebay keeps every sample in memory before the training step asks for it.

>>> loader = forebay.DataLoader("/data/train", batch_size=64, shuffle=True)
>>> for batch in loader:
...     step(batch)                                  # batch[i], batch.labels, batch.data
>>> print(loader.report())

or, for images, decoded and augmented in C++:

>>> from forebay import transforms as T
>>> loader = forebay.DataLoader("/data/train", batch_size=256, shuffle=True, decode="image",
...                             transform=[T.RandomResizedCrop(224), T.ToTensor()])
>>> for images, labels in loader:
...     step(images, labels)

or, for an existing PyTorch DataLoader, one line:

>>> loader = forebay.accelerate(loader)
"""

from . import transforms
from ._errors import (
    AccessError,
    ArgumentError,
    BudgetError,
    CancelledError,
    ChangedError,
    CorruptError,
    DeadlineError,
    ForebayError,
    InternalError,
    MissingError,
    StorageError,
    UnsupportedError,
)
from ._forebay import Batch, Catalog, DecodedBatch, crc32c
from .accelerate import accelerate
from .accelerate import open_through as open  # noqa: A004 - forebay.open is the point
from .daemon import SharedEngine
from .engine import Engine
from .loader import DataLoader
from .locality import LocalitySampler
from .views.report import EpochReport

__version__ = "0.1.0"

IMG_EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp",
)  # fmt: skip
"""torchvision's image suffixes: ``DataLoader(path, extensions=forebay.IMG_EXTENSIONS)``."""

__all__ = [
    "IMG_EXTENSIONS",
    "AccessError",
    "ArgumentError",
    "Batch",
    "BudgetError",
    "CancelledError",
    "Catalog",
    "ChangedError",
    "CorruptError",
    "DataLoader",
    "DeadlineError",
    "DecodedBatch",
    "Engine",
    "EpochReport",
    "ForebayError",
    "InternalError",
    "LocalitySampler",
    "MissingError",
    "SharedEngine",
    "StorageError",
    "UnsupportedError",
    "accelerate",
    "crc32c",
    "open",
    "transforms",
]
