"""What tests and benchmarks need besides Forebay itself."""

from forebay.testing.slowfs import SlowFs

__all__ = ["SlowFs"]
