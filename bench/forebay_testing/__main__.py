"""python -m forebay_testing: a cluster of network namespaces, by hand."""

import sys

from .cluster import main

sys.exit(main())
