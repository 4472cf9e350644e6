"""A model's parameters and buffers as planning holds them, without data, and bytes of those that no op reads."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import fx, nn

from autopar.layout import Layout


def parameters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters under all of their names, on the meta device; a tied parameter is one tensor.

    Planning's objects form reference cycles, which Python frees only at its next cycle collection; until then they must
    not keep whole parameters alive that shards have replaced.
    """
    return _without_data(model.named_parameters(remove_duplicate=False))


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers, likewise."""
    return _without_data(model.named_buffers(remove_duplicate=False))


def _without_data(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    made: dict[int, torch.Tensor] = {}
    return {
        name: made.setdefault(id(tensor), tensor.detach().to("meta").requires_grad_(tensor.requires_grad))
        for name, tensor in named
    }


def unread_bytes(
    graph: fx.Graph,
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    pinned: Mapping[str, Layout],
    mesh_shape: tuple[int, ...],
) -> int:
    """One rank's bytes of the parameters and buffers that the graph does not read; a tied one counts once.

    `dtype`: that of stored floating-point parameters; None: each its own. What is not `pinned` is stored whole.
    """
    read = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    whole = Layout.replicated(len(mesh_shape))
    size = sum(buffer.numel() * buffer.dtype.itemsize for buffer in _unread(buffers, read).values())
    for name, parameter in _unread(parameters, read).items():
        shape = pinned.get(name, whole).local_shape(tuple(parameter.shape), mesh_shape)
        stored = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        size += math.prod(shape) * stored.itemsize
    return size


def named_once(tensors: Mapping[str, torch.Tensor]) -> list[tuple[list[str], torch.Tensor]]:
    """Each tensor with all of its names."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return [(some, tensors[some[0]]) for some in names.values()]


def _unread(tensors: Mapping[str, torch.Tensor], read: Collection[str]) -> dict[str, torch.Tensor]:
    """The tensors that are read under none of their names, by the first of these."""
    known = {id(tensor) for name, tensor in tensors.items() if name in read}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in known:
            known.add(id(tensor))
            found[name] = tensor
    return found
