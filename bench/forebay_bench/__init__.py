"""`forebay bench`: named workloads, rivals measured in the same run, JSON out."""

from .run import main

__all__ = ["main"]
