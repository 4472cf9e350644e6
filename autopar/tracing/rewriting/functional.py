"""Pure forms of in-place writes: targets of nodes in functionalised graphs.

Each copies its base, writes into the copy and returns it, so that values, casts and gradients are those of the in-place
operation itself.
"""

from __future__ import annotations

import operator
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
    """`base` after its view `base.view_name(*args, **kwargs)` was overwritten by `value`; `index` selects a view.

    `view` is the name of a method or function, or of an operator ("aten.diagonal.default"), as seen below vmap.

    >>> write_view(torch.zeros(2, 2), torch.ones(2), "diagonal", (), {}).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    result = base.clone(memory_format=torch.contiguous_format) if "as_strided" in view else base.clone()
    method = (
        operator.attrgetter(view)(torch.ops) if "." in view else getattr(Tensor, view, None) or getattr(torch, view)
    )
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


def cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any) -> Any:
    """`true_fn(*operands)` where `pred` holds, else `false_fn(*operands)`."""
    return true_fn(*operands) if bool(pred) else false_fn(*operands)


def scan(body: Any, carries: Any, inputs: Any, additional: Any, *, dim: int = 0, reverse: bool = False) -> Any:
    """`body(*carries, *slices, *additional)` along `dim` of the inputs: the last carries, then the stacked outputs.

    >>> scan(lambda c, x: (c + x, c * x), (torch.zeros(()),), (torch.arange(3.0),), ())
    (tensor(3.), tensor([0., 0., 2.]))
    """
    steps = range(inputs[0].shape[dim])
    outputs: list[Any] = []
    for step in reversed(steps) if reverse else steps:
        values = body(*carries, *(v.select(dim, step) for v in inputs), *additional)
        carries = tuple(values[: len(carries)])
        outputs.append(values[len(carries) :])
    outs = zip(*(reversed(outputs) if reverse else outputs), strict=True)
    return (*carries, *(torch.stack(values) for values in outs))
