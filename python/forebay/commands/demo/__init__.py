"""``forebay demo``: one training run from slow storage, with either loader."""

from .command import run

__all__ = ["run"]
