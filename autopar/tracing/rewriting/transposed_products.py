"""Products with a transposed parameter, `x @ weight.T`, are rewritten as the linear layers that they are, bit for bit.

A product saves its operands for backward. A linear layer saves the parameter, which exists anyway or is gathered again;
a transposed parameter would count as a further saved tensor.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from autopar.graph import VAL, target_name

_PRODUCTS = frozenset({torch.matmul, torch.mm, operator.matmul, "matmul", "mm", "__matmul__"})
_TURNS = frozenset({"t", "transpose", "permute", "swapaxes", "swapdims", "movedim", "moveaxis", "adjoint"})


def as_linear_layers(graph: fx.Graph) -> None:
    """Rewrite a graph's products whose second factor is a transposed parameter or buffer with two dims."""
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and node.target in _PRODUCTS and len(node.args) == 2:
            weight = _turned(node.args[1])
            if weight is not None and isinstance(node.args[0], fx.Node) and not node.kwargs:
                node.op, node.target = "call_function", torch.nn.functional.linear
                node.args = node.args[0], weight


def _turned(factor: object) -> fx.Node | None:
    """The parameter or buffer that a node is the transpose of."""
    if not isinstance(factor, fx.Node) or target_name(factor).rpartition(".")[2] not in _TURNS:
        return None
    source = factor.args[0] if factor.args else None
    if not isinstance(source, fx.Node) or source.op != "get_attr" or len(factor.all_input_nodes) != 1:
        return None
    turned, plain = factor.meta.get(VAL), source.meta.get(VAL)
    if not isinstance(turned, torch.Tensor) or not isinstance(plain, torch.Tensor) or plain.dim() != 2:
        return None
    is_transpose = (turned.shape, turned.stride()) == (plain.shape[::-1], plain.stride()[::-1])
    return source if is_transpose and plain.dtype == turned.dtype and not plain.is_complex() else None
