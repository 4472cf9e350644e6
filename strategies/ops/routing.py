"""Mixtures of experts, each one op: split on tokens and, where the experts' form is known, on experts, on both, or
within an expert."""

from __future__ import annotations

from typing import Any

from torch import fx

from autopar.strategies.arguments import Writer


def experts(node: fx.Node) -> str | None:
    """`experts(hidden, index, weights, *parameters)`; see `leaves.experts` for the shapes.

    Split on experts, each rank computes those of all tokens that are routed to its experts, and the results are partial
    sums. Split on tokens and experts at once, tokens are sent to the ranks of their experts, and results back. Split
    within an expert is only possible without a bias of the second product, which every rank would add.
    """
    target: Any = node.target
    names, options = target.names, target.options
    inner = "f!" if "down_proj_bias" in names else "f"
    wide = f"(c=2! {inner})" if options["is_concatenated"] else f"({inner} c=2!)"
    first = wide if options["has_gate"] else inner
    operands = ["t d!", "t k!", "t k!"]
    for name in names:
        dims = [first, "d!"] if name in ("gate_up_proj", "up_proj") else ["d!", inner] if name == "down_proj" else None
        if dims is not None:
            operands.append(" ".join(["e", *(dims[::-1] if options["is_transposed"] else dims)]))
        else:
            operands.append("e d!" if name == "down_proj_bias" else f"e {first}")
    return f"{', '.join(operands)} -> t d! | e @experts plain, t+e @experts_exchanged"


def routed(node: fx.Node) -> str | None:
    """`routed(hidden, routes, weights, *parameters)`; see `leaves.routed`. It is split on tokens only."""
    target: Any = node.target
    code = "routed_drawn" if target.draws else "routed"
    operands = []
    for number, operand in enumerate(node.args):
        rank = operand.meta["val"].ndim if isinstance(operand, fx.Node) else 0
        dims = [f"d{number}x{dim}!" for dim in range(rank)]
        if number < 3:
            dims[0] = "t"
        operands.append(" ".join(dims))
    return f"{', '.join(operands)} -> t {operands[0].split()[1]} | plain, t @{code}"


RULES: dict[str, str | Writer] = {"experts": experts, "routed": routed}
