"""Imports torchvision where its compiled operators do not load.

The wheel is built for CUDA; beside a CPU build of torch its transforms, which are Python, work all
the same once the operators that it registers shapes for are declared.
"""

from __future__ import annotations

import torch

_ROI = "Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width"
_OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    f"roi_align({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    f"qroi_align({_ROI}, int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward(Tensor grad) -> Tensor",
    f"ps_roi_align({_ROI}, int sampling_ratio) -> (Tensor, Tensor)",
    "_ps_roi_align_backward(Tensor grad) -> Tensor",
    f"roi_pool({_ROI}) -> (Tensor, Tensor)",
    "_roi_pool_backward(Tensor grad) -> Tensor",
    f"ps_roi_pool({_ROI}) -> (Tensor, Tensor)",
    "_ps_roi_pool_backward(Tensor grad) -> Tensor",
    "deform_conv2d(Tensor input) -> Tensor",
    "_deform_conv2d_backward(Tensor grad) -> Tensor",
)
# Kept for the life of the process: what it declares goes when it does.
_library = None

try:
    import torchvision
except RuntimeError:
    _library = torch.library.Library("torchvision", "DEF")
    for _op in _OPS:
        _library.define(_op)
    import sys

    for _name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
        del sys.modules[_name]
    import torchvision

__all__ = ["torchvision"]
