"""``forebay://`` for fsspec: pandas, Hugging Face datasets, PyArrow and zarr read through Forebay.

>>> pandas.read_parquet("forebay:///data/train.parquet")

Files are opened from local copies, which the file service makes when they are first asked for;
listings and attributes come from the source. It is for reading: what would change the source is
refused, and is done at the path itself.
"""

from __future__ import annotations

import errno
import os
import shutil
from typing import Any

from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from fsspec.utils import isfilelike

from ._internal import url


def _refuse(self: Any, path: Any, *_: Any, **__: Any) -> Any:
    raise OSError(
        errno.EROFS,
        "forebay:// is for reading; write to the path itself, without forebay://",
        path if isinstance(path, str) else None,
    )


class ForebayFileSystem(LocalFileSystem):
    """The machine's files, by absolute path: ``forebay:///data/train``."""

    protocol = "forebay"
    local_file = False  # who asks for the source's own path would read it past us

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        # Always absolute: some, such as Hugging Face's streaming, lose the third slash.
        if isinstance(path, str) and path.startswith("forebay://"):
            path = "/" + path.removeprefix("forebay://").lstrip("/")
        return super()._strip_protocol(path)

    @property
    def fsid(self) -> str:
        return "forebay"

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any
    ) -> Any:
        if mode != "rb":
            _refuse(self, path)
        return _File(self._strip_protocol(path), mode, fs=self, **kwargs)

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        with self.open(path, "rb") as file:
            size = file.size
            first, last, _ = slice(start, end).indices(size)
            file.seek(first)
            return file.read(max(0, last - first))

    def get_file(self, path1: str, path2: Any, callback: Any = None, **kwargs: Any) -> None:
        if self.isdir(path1):
            os.makedirs(path2, exist_ok=True)
            return
        with self.open(path1, "rb") as file:
            if isfilelike(path2):
                shutil.copyfileobj(file, path2)
                return
            with open(path2, "wb") as out:
                shutil.copyfileobj(file, out)

    mkdir = makedirs = rmdir = cp_file = mv = link = symlink = _refuse
    rm_file = rm = touch = chmod = _refuse

    def put_file(self, path1: str, path2: str, *_: Any, **__: Any) -> None:
        _refuse(self, path2)


class _File(LocalFileOpener):
    """A file opened for reading: of its copy where there is one."""

    f: Any

    def _open(self) -> None:
        if self.f is None or self.f.closed:
            self.f = url.open_file(self.path)
            self.size = os.fstat(self.f.fileno()).st_size
            if self.compression:
                from fsspec.compression import compr

                self.f = compr[self.compression](self.f, mode="rb")
