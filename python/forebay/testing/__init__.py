"""What tests and benchmarks need besides Forebay itself."""

from forebay.testing.cluster import Cluster
from forebay.testing.etcd import Etcd
from forebay.testing.slowfs import SlowFs

__all__ = ["Cluster", "Etcd", "SlowFs"]
