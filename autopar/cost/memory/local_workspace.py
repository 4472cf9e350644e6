"""Bytes that ops have on a device beside inputs and outputs, saved or temporary: as measured for the op or, where the
runtime replaces a sharded op by code of its own (`autopar.runtime.local`), as that code allocates them.

- Classes of logits sharded: `class_sums` makes only one gradient of the logits' size, in float32 at least; PyTorch's
  ops make a second one, that of the logarithms.
- Causal attention with queries sharded: halves of the queries are sent between ranks, and results are joined.
- Experts sharded: a rank has room for every route; where each expert is split, inputs and results of a route are whole.
- Batch normalisation with statistics over several ranks: computed, with the gradient, in float32 at least.
- Embeddings with rows sharded: a rank keeps its ids, with those of other ranks left out, and a mask of these.
- Dropout and other ops that draw random numbers: see `cost.memory.random_workspace`.
"""

from __future__ import annotations

import math

import torch
from torch import fx
from torch.nn import functional as F

from autopar.cost.memory.random_workspace import (
    drawn_workspace_bytes,
    dropout_kept_bytes,
    dropout_workspace_bytes,
    materialises_mask,
)
from autopar.graph import COST, target_name, tensor_inputs, tensor_of
from autopar.strategies.strategy import Strategy

_PARAMETER_OF_EXPERTS = 3  # the place, among the inputs of experts, of the first parameter with experts as dim 0
_WIDE = torch.float32
_NUMBERS_A_ROW = 8  # temporaries per row of logits: sums of exponentials, values and places of labels, their gradients


def workspace_bytes(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...], *, backward: bool) -> int:
    """Bytes of an op's temporaries that live at once on a device, in forward or `backward`."""
    cost = node.meta.get(COST)
    if cost is None:
        return 0
    if _splits_classes(node, strategy, mesh_shape):
        return _of_classes(node, strategy, mesh_shape)
    if strategy.local == "sdpa_causal" and cost.work is not None and cost.work.attention:
        return _of_halves(node, strategy, mesh_shape, backward=backward)
    if strategy.local == "batch_norm" and tensor_of(tensor_inputs(node)[0]).element_size() < _WIDE.itemsize:
        return _of_batch(node, strategy, mesh_shape, backward=backward)
    if materialises_mask(node, strategy):
        return dropout_workspace_bytes(node, strategy, mesh_shape, backward=backward)
    whole = cost.workspace_backward_bytes if backward else cost.workspace_forward_bytes
    drawn = 0 if backward or strategy.local not in ("", "drawn") else drawn_workspace_bytes(node, strategy, mesh_shape)
    return max(drawn, round(whole * _part(strategy, mesh_shape)))


def kept_bytes(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...], internal_bytes: int) -> int:
    """Bytes that an op keeps for backward on a device beside inputs and outputs; `internal_bytes`: those of the
    unsharded op, and of an embedding those that it keeps if rows are sharded.

    A saved copy of an input is sharded as that input is, which may be whole although the op's work is split.
    """
    cost, copies, found = node.meta[COST], 0, 0
    if not internal_bytes:
        return 0
    if materialises_mask(node, strategy):
        return dropout_kept_bytes(node, strategy, mesh_shape)
    if node.target is F.embedding:
        local = strategy.inputs[0].local_shape(tuple(tensor_of(tensor_inputs(node)[0]).shape), mesh_shape)
        return _row_bytes(node) * math.prod(local) if strategy.local == "embedding_vocab" else 0
    for place, size in cost.saved_copies:
        whole = tuple(tensor_of(tensor_inputs(node)[place]).shape)
        local = math.prod(strategy.inputs[place].local_shape(whole, mesh_shape))
        copies, found = copies + size, found + size * local // max(1, math.prod(whole))
    routes = _of_routes(node, strategy, mesh_shape) if target_name(node).endswith(".experts.experts") else 0
    return found + round((internal_bytes - copies) * _part(strategy, mesh_shape)) + routes


def of_sharded_rows_bytes(node: fx.Node) -> int:
    """Bytes that an embedding keeps of its ids if its rows are sharded (`autopar.runtime.local.vocabulary`); 0 of any
    other op."""
    if node.target is not F.embedding or 0 not in node.meta[COST].saved[0]:
        return 0
    return _row_bytes(node) * tensor_of(tensor_inputs(node)[0]).numel()


def _row_bytes(node: fx.Node) -> int:
    return tensor_of(tensor_inputs(node)[0]).element_size() + 1


def _of_routes(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...]) -> int:
    """Bytes that experts keep for each route and that are not split even where each expert is: the rows that its matrix
    products read, for the gradient of its weights, and its results, for the gradient of the routes' weights. Each is as
    wide as a token."""
    cut = zip(strategy.inputs[_PARAMETER_OF_EXPERTS].placements, mesh_shape, strict=True)
    ranks = math.prod(size for p, size in cut if p.is_sharded and p.dim > 0)
    hidden, routes, weights, parameter = (tensor_of(ref) for ref in tensor_inputs(node)[: _PARAMETER_OF_EXPERTS + 1])
    width = math.prod(strategy.inputs[0].local_shape(tuple(hidden.shape), mesh_shape)) * hidden.element_size()
    kept = width * routes.shape[1] * (weights.requires_grad + parameter.requires_grad)
    return kept - kept // ranks


def _part(strategy: Strategy, mesh_shape: tuple[int, ...]) -> float:
    """The fraction of an op's bytes beside inputs and outputs that is on one device."""
    if strategy.local != "experts":
        return strategy.work
    cut = zip(strategy.inputs[_PARAMETER_OF_EXPERTS].placements, mesh_shape, strict=True)
    return strategy.work * math.prod(size for p, size in cut if p.is_sharded and p.dim == 0)


def _splits_classes(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...]) -> bool:
    if strategy.local == "log_softmax":
        return True
    if strategy.local != "cross_entropy" or node.target is not F.cross_entropy:
        return False  # for `nll_loss` each rank computes what the op itself does
    classes = _class_dim(node)
    placements = zip(strategy.inputs[0].placements, mesh_shape, strict=True)
    return any(size > 1 and p.is_sharded and p.dim == classes for p, size in placements)


def _class_dim(node: fx.Node) -> int:
    return 1 if tensor_of(tensor_inputs(node)[0]).dim() > 1 else 0


def _of_classes(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...]) -> int:
    """What is computed in float32 from logits of half precision before it is rounded, and some numbers per row."""
    logits = tensor_of(tensor_inputs(node)[0])
    wide = torch.promote_types(logits.dtype, torch.float32)
    local = strategy.inputs[0].local_shape(tuple(logits.shape), mesh_shape)
    values = math.prod(local) * wide.itemsize if wide != logits.dtype else 0
    if strategy.local == "log_softmax":
        return values
    rows = math.prod(length for dim, length in enumerate(local) if dim != _class_dim(node))
    return values + _NUMBERS_A_ROW * rows * wide.itemsize


def _of_batch(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...], *, backward: bool) -> int:
    """Float32 copies of half-precision tensors: in forward of the input, freed when the result is made; in backward of
    the gradient."""
    x = tensor_of(tensor_inputs(node)[0])
    local = strategy.inputs[0].local_shape(tuple(x.shape), mesh_shape)
    return math.prod(local) * (_WIDE.itemsize - (0 if backward else x.element_size()))


def _of_halves(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...], *, backward: bool) -> int:
    """Temporaries of `autopar.runtime.local.causal`, for half of the queries and, in backward, for the keys before
    them.

    In forward: the queries received, their results for each of two parts of the keys, and the sum of these. In
    backward: the gradients, queries and results received, beside two gradients of queries and those of keys and values,
    or beside what is sent.
    """
    query, key = (tensor_of(ref) for ref in tensor_inputs(node)[:2])
    local = strategy.inputs[0].local_shape(tuple(query.shape), mesh_shape)
    half = math.prod(local[:-2]) * (local[-2] // 2) * local[-1] * query.element_size()
    if not backward:
        statistics = 3 * math.prod(local[:-1]) * max(4, query.element_size())
        return (4 if query.element_size() >= 4 else 6) * half + statistics
    keys = math.prod(strategy.inputs[1].local_shape(tuple(key.shape), mesh_shape)) * key.element_size()
    before = keys - keys // key.shape[-2] * (local[-2] // 2)
    return max(6 * half, 5 * half + 2 * before)
