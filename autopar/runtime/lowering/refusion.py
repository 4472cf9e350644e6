"""Fuses split bias additions with their product again, where the product is not a partial sum.

The trace splits `linear(x, w, b)` into a product and an addition, so that the bias is added only once to a partial sum.
Where the plan needs no conversion between the two, the fused op is faster and does not save the product for backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from autopar.graph import AUTOCAST, BIAS_OF, TensorRef, input_nodes, tensor_inputs, tensor_of
from autopar.layout import Layout
from autopar.plans import NodePlan


@dataclass(frozen=True)
class Fused:
    """One op for a product and its bias addition; `inputs` are the wanted layouts of the tensors in `arguments`."""

    product: fx.Node
    target: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    inputs: tuple[Layout, ...]


def _convolution(function: Callable[..., Any]) -> Callable[..., Any]:
    """The trace shows the bias as (channels, 1, ...); the fused op takes it as (channels,)."""

    def convolution(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, *arguments: Any, **options: Any
    ) -> torch.Tensor:
        return function(x, weight, bias.flatten(), *arguments, **options)

    convolution.__name__ = convolution.__qualname__ = f"{function.__name__}_with_bias"
    return convolution


_BIAS_LAST: dict[Any, Callable[..., Any]] = {functional.linear: functional.linear}
for _function in (
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
):
    _BIAS_LAST[_function] = _convolution(_function)
_BIAS_FIRST: dict[Any, Callable[..., Any]] = {torch.mm: torch.addmm, torch.bmm: torch.baddbmm}


def find_fusions(
    nodes: Sequence[fx.Node],
    plans: Mapping[fx.Node, NodePlan],
    segment_of: Mapping[fx.Node, int],
    beyond_replay: AbstractSet[fx.Node] = frozenset(),
) -> dict[fx.Node, Fused]:
    """The additions that can be fused with their product again.

    Those `beyond_replay` are left out: a replay stops at their product, and would gather their bias for nothing.
    """
    fusions: dict[fx.Node, Fused] = {}
    for addition in nodes:
        product = addition.meta.get(BIAS_OF)
        if product is None or addition not in plans or product not in plans:
            continue
        fused = _fused(addition, product, plans[addition], plans[product])
        if (
            fused is not None
            and addition not in beyond_replay
            and list(product.users) == [addition]
            and segment_of.get(addition) == segment_of.get(product)
        ):
            fusions[addition] = fused
    return fusions


def _fused(addition: fx.Node, product: fx.Node, add: NodePlan, multiply: NodePlan) -> Fused | None:
    refs = tensor_inputs(addition)
    product_ref = TensorRef(product, 0)
    if len(refs) != 2 or product_ref not in refs or add.local or multiply.local or addition.meta.get(AUTOCAST):
        return None
    at = refs.index(product_ref)
    bias, source = refs[1 - at], list(input_nodes(addition))[1 - at]  # a node that may have several results
    if multiply.outputs[0].is_partial or not multiply.outputs[0] == add.inputs[at] == add.outputs[0]:
        return None
    if len({tensor_of(ref).dtype for ref in (product_ref, bias, TensorRef(addition, 0))}) != 1:
        return None
    if product.target in _BIAS_LAST and len(product.args) > 1:
        arguments = (*product.args[:2], source, *product.args[3:])
        inputs = (*multiply.inputs, add.inputs[1 - at])
        return Fused(product, _BIAS_LAST[product.target], (arguments, dict(product.kwargs)), inputs)
    if product.target in _BIAS_FIRST and len(product.args) == 2:
        inputs = (add.inputs[1 - at], *multiply.inputs)
        return Fused(product, _BIAS_FIRST[product.target], ((source, *product.args), dict(product.kwargs)), inputs)
    return None
