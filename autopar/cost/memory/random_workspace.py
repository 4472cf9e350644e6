"""Bytes of ops that draw random numbers, as the runtime's own code for them allocates (`autopar.runtime.local`).

A number is a hash of its element's global index: `bits` mixes two int32 tensors with a number for each element, and the
index without its last dim has one of its own. What follows depends on the op.

- Dropout: of the bits a mask is made, with one byte per element (PyTorch's own on CPUs has the input's dtype), and then
  the scaled input, beside the mask and the result.
- Attention with dropout, where no fused kernel draws: scores, mask, weights, scaled weights and those that are left are
  there at once; backward keeps the mask, the weights and those that are left, and queries, keys and values, or copies.
- Uniform and normal numbers are computed in float64.
"""

from __future__ import annotations

import math

from torch import fx

from autopar.graph import COST, TensorRef, output_tensors, target_name, tensor_inputs, tensor_of
from autopar.ops.random_ops import BY_COUNTER, drawn_name
from autopar.strategies.strategy import Strategy

_BITS = 8  # bytes per element while bits are mixed
_INDEX = 4  # bytes per element of the index without its last dim
_UNIFORM, _NORMAL = 24, 48  # bytes per element: three float64 tensors; a normal number is made of two uniform ones


def materialises_mask(node: fx.Node, strategy: Strategy) -> bool:
    """Whether dropout in an op makes a mask; fused attention draws random numbers as it goes."""
    return strategy.local == "dropout" or (
        strategy.local == "sdpa_dropout" and node.meta[COST].saved_internal_bytes >= _mask_elements(node)
    )


def dropout_workspace_bytes(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...], *, backward: bool) -> int:
    """Bytes of temporaries on a device of an op that makes a mask."""
    mask, source, cost = _mask_elements(node), tensor_of(tensor_inputs(node)[0]), node.meta[COST]
    attends = strategy.local == "sdpa_dropout"
    scores = mask * source.element_size() if attends else 0
    if backward:
        return round((scores or cost.workspace_backward_bytes) * strategy.work)
    bits = _BITS * mask + _INDEX * mask // max(1, _last_length(node))
    kept = _kept_of_mask_bytes(node, strategy) if cost.saved_internal_bytes else 0
    most = round((max(scores + bits, (4 * scores if attends else 2 * source.nbytes) + mask) - kept) * strategy.work)
    result = tensor_of(TensorRef(node, 0))  # is there only later, as the copy of values
    later = math.prod(strategy.outputs[0].local_shape(tuple(result.shape), mesh_shape)) * result.element_size()
    later += _copied_bytes(node, strategy, mesh_shape, 2) if attends and cost.saved_internal_bytes else 0
    return max(most - later, round(scores * strategy.work))


def dropout_kept_bytes(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...]) -> int:
    """Bytes on a device that an op which makes a mask keeps for backward beside inputs and outputs: the mask and, in
    attention, weights, and copies of queries, keys and values."""
    places = range(3 if strategy.local == "sdpa_dropout" else 0)
    copied = sum(_copied_bytes(node, strategy, mesh_shape, place) for place in places)
    return round(_kept_of_mask_bytes(node, strategy) * strategy.work) + copied


def also_saved(node: fx.Node) -> tuple[int, ...]:
    """The inputs that an op saves under the runtime's code beside those that PyTorch's saves: of attention that makes a
    mask, queries, keys and values, of which PyTorch saves scaled ones."""
    cost, name = node.meta[COST], target_name(node)
    makes_mask = name.endswith(".scaled_dot_product_attention") and cost.saved_internal_bytes >= _mask_elements(node)
    return tuple(place for place in range(3) if not _is_copied(node, place)) if makes_mask else ()


def _copied_bytes(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...], place: int) -> int:
    """Bytes on a device of the copy of queries (place 0), keys or values that attention's products read, if any: keys
    and values are repeated where several heads read them."""
    if not _is_copied(node, place):
        return 0
    query, tensor = (tensor_of(tensor_inputs(node)[at]) for at in (0, place))
    local = math.prod(strategy.inputs[place].local_shape(tuple(tensor.shape), mesh_shape)) * tensor.element_size()
    return local * query.shape[-3] // tensor.shape[-3] if tensor.dim() > 2 else local


def _is_copied(node: fx.Node, place: int) -> bool:
    """Whether a batched product reads a copy: where the dims before the matrices' cannot be merged."""
    query, tensor = (tensor_of(tensor_inputs(node)[at]) for at in (0, place))
    dims = range(tensor.dim() - 3)
    merge = all(tensor.stride(d) == tensor.stride(d + 1) * tensor.shape[d + 1] for d in dims if tensor.shape[d] > 1)
    return not merge or tensor.shape[:-2] != query.shape[:-2]


def _kept_of_mask_bytes(node: fx.Node, strategy: Strategy) -> int:
    """Bytes, unsharded, of the mask and of the weights in attention before and after it."""
    weights = 2 * tensor_of(tensor_inputs(node)[0]).element_size() if strategy.local == "sdpa_dropout" else 0
    return _mask_elements(node) * (1 + weights)


def drawn_workspace_bytes(node: fx.Node, strategy: Strategy, mesh_shape: tuple[int, ...]) -> int:
    """Bytes of temporaries on a device of an op whose numbers come from a counter; 0 for other ops."""
    in_place = drawn_name(node.target) == "apply_inplace"
    name = drawn_name(node.args[0] if in_place else node.target)
    if name not in BY_COUNTER or (name == "normal" and not in_place) or not output_tensors(node):
        return 0
    result = tensor_of(TensorRef(node, 0))
    each = _NORMAL if name in ("randn", "randn_like", "normal") else _UNIFORM
    elements = math.prod(strategy.outputs[0].local_shape(tuple(result.shape), mesh_shape))
    return elements * (each * (1 + result.is_complex()) - result.element_size())


def _mask_elements(node: fx.Node) -> int:
    """The number of random draws of dropout: one per element, per channel, or per query and key."""
    shape = tuple(tensor_of(tensor_inputs(node)[0]).shape)
    name = target_name(node).rpartition(".")[2]
    if name.startswith("dropout"):
        return math.prod(shape[: len(shape) - int(name[-2]) if name != "dropout" else None])
    return math.prod(shape[:-1]) * tensor_of(tensor_inputs(node)[1]).shape[-2]


def _last_length(node: fx.Node) -> int:
    """The length of the last dim of the index over which dropout draws."""
    shape = tuple(tensor_of(tensor_inputs(node)[0]).shape)
    name = target_name(node).rpartition(".")[2]
    if not name.startswith("dropout"):
        return int(tensor_of(tensor_inputs(node)[1]).shape[-2])
    drawn = shape[: len(shape) - int(name[-2])] if name != "dropout" else shape
    return drawn[-1] if drawn else 1
