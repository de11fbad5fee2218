"""What tests and benchmarks need besides Forebay itself."""

from forebay.slowfs import SlowFs

from forebay_testing.cluster import Cluster
from forebay_testing.etcd import Etcd

__all__ = ["Cluster", "Etcd", "SlowFs"]
