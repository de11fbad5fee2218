"""On the path of the examples' processes: torchvision loads beside a CPU build of torch."""

import torchvision_cpu  # noqa: F401
