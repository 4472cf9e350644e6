"""Pure forms of writing in place: targets of nodes in functionalised graphs.

Each copies what it would write into and returns the copy, so values, casts and gradients are those of the
in-place operation itself.
"""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor


def write(base: Tensor, key: Any, value: Any) -> Tensor:
    """`base` after `base[key] = value`.

    >>> write(torch.zeros(3), 0, 5.0)
    tensor([5., 0., 0.])
    """
    result = base.clone()
    result[key] = value
    return result


def write_view(base: Tensor, value: Tensor, view: str, args: Any, kwargs: Any, index: int | None = None) -> Tensor:
    """`base` after its view `base.view_name(*args, **kwargs)` was overwritten by `value`; `index` picks from several.

    >>> write_view(torch.zeros(2, 2), torch.ones(2), "diagonal", (), {}).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    result = base.clone()
    method = getattr(Tensor, view, None) or getattr(torch, view)
    target = method(result, *args, **kwargs)
    (target if index is None else target[index]).copy_(value)
    return result


def apply_inplace(method: str, base: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """`base` after `base.method(*args, **kwargs)`, for methods that have no pure twin.

    >>> apply_inplace("fill_", torch.zeros(2), 3)
    tensor([3., 3.])
    """
    result = base.clone()
    getattr(result, method)(*args, **kwargs)
    return result
