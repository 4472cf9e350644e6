"""Python versions of torchvision's operators, in case its compiled extension cannot be loaded (another device's build).

Three are needed: importing the package refers to `nms` and `qnms`, and detection models use `roi_align`. They have the
schemas of the compiled operators.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util

import numpy as np
import torch

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
)
_declared: list[torch.library.Library] = []  # kept alive: a Library removes its schemas when it is freed


def declare_torchvision_operators() -> None:
    """Make torchvision, and so timm and transformers, importable without its compiled extension."""
    if _declared or importlib.util.find_spec("torchvision") is None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    _declared.append(library)
    for schema in _SCHEMAS[:2]:
        with contextlib.suppress(RuntimeError):  # the compiled extension is loaded and has declared it
            library.define(schema)
    extension = importlib.import_module("torchvision.extension")
    if extension._has_ops():
        return
    extension._has_ops = lambda: True  # type: ignore[attr-defined]  # asserted before an operator is called
    library.define(_SCHEMAS[2])
    library.impl("nms", _best_boxes, "CPU")
    library.impl("roi_align", _cut_out, "CompositeImplicitAutograd")


def _best_boxes(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Non-maximum suppression: indices, best first, of boxes that overlap no better kept box by over `threshold`."""
    corners, order = boxes.detach().double().numpy(), scores.argsort(descending=True, stable=True).numpy()
    low, high, kept = corners[:, :2], corners[:, 2:], []
    areas = (high - low).prod(1)
    while order.size:
        best, order = order[0], order[1:]
        kept.append(int(best))
        sides = np.minimum(high[best], high[order]) - np.maximum(low[best], low[order])
        shared = sides.clip(0).prod(1)
        order = order[shared <= threshold * (areas[best] + areas[order] - shared)]
    return torch.tensor(kept, dtype=torch.int64)


def _cut_out(
    features: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, ratio: int, aligned: bool
) -> torch.Tensor:
    """`roi_align`: features (batch, channels, y, x) under rois (boxes, 5) -> (boxes, channels, height, width)."""
    if features.device.type == "meta":
        return features.sum((0, 2, 3)).view(1, -1, 1, 1).repeat(rois.shape[0], 1, height, width)
    cut: torch.Tensor = importlib.import_module("torchvision.ops.roi_align")._roi_align(
        features, rois, scale, height, width, ratio, aligned
    )
    return cut
