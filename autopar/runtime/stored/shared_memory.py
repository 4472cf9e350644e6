"""Separate parameters that share memory, as after `a.weight.data = b.weight.data`."""

from __future__ import annotations

import torch
from torch import nn

from autopar.errors import InputError
from autopar.graph import storage_of


def refuse_shared_memory(model: nn.Module) -> None:
    """Raise InputError if trained parameters share elements: a step on one would change the other, whereas in a plan
    each rank has separate shards of both. Parameters side by side in one storage share none."""
    by_storage: dict[int | None, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():  # tied parameters are one, and come once
        if parameter.numel() and parameter.layout == torch.strided and not parameter.is_meta:  # told when filled
            by_storage.setdefault(storage_of(parameter), []).append((name, parameter))
    for several in by_storage.values():
        under_way: list[tuple[str, nn.Parameter]] = []  # begin before the next one, not ended yet
        for name, current in sorted(several, key=lambda pair: _span(pair[1])):
            under_way = [pair for pair in under_way if _span(pair[1])[1] > _span(current)[0]]
            for other_name, other in under_way:
                if (current.requires_grad or other.requires_grad) and _overlap(current, other):
                    raise InputError(
                        f"the parameters '{other_name}' and '{name}' share memory (`a.data = b.data` does this), and "
                        "would no longer do so once they are sharded: let them be one parameter "
                        f"(model.{other_name} = model.{name}), or give each its own (`data = data.clone()`)"
                    )
            under_way.append((name, current))


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors on one storage share an element."""
    (start, end), (second_start, second_end) = map(_span, (first, second))
    if start >= second_end or second_start >= end:
        return False
    if first.dtype != second.dtype:
        return True
    if first.is_contiguous() and second.is_contiguous():
        return True
    touched = torch.zeros(max(end, second_end) // first.element_size(), dtype=torch.bool, device="cpu")
    touched.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return bool(touched.as_strided(second.shape, second.stride(), second.storage_offset()).any())


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of bytes from a tensor's first element to the end of its last."""
    last: int = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    size, start = tensor.element_size(), int(tensor.storage_offset())
    return start * size, (start + last + 1) * size
