"""Products: the contracted factor leaves a partial sum."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import Writer, input_shape, tensors, value


def matmul(node: fx.Node) -> str:
    """As `torch.matmul`: a 1-D operand is a vector, dims before the last two broadcast."""
    left, right = (len(input_shape(node, i)) for i in (0, 1))
    if left == 1 or right == 1:
        first, second = "k" if left == 1 else "... m k", "k" if right == 1 else "... k n"
        return f"{first}, {second} -> {'' if left == right == 1 else '... n' if left == 1 else '... m'}"
    return "... m k, ... k n -> ... m n"


def linear(node: fx.Node) -> str:
    """A bias that was not split off would be added once a rank to a partial sum."""
    return "... i, o i -> ... o" if len(tensors(node)) == 2 else "... i!, o i!, o -> ... o"


def einsum(node: fx.Node) -> str | None:
    """The equation is the rule."""
    equation = value(node.args[0])
    if not isinstance(equation, str):
        return None
    equation = equation.replace(" ", "").replace(".", "")
    inputs, arrow, output = equation.partition("->")
    if not arrow:
        output = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    if "..." in value(node.args[0]) or any(len(set(part)) < len(part) for part in [*inputs.split(","), output]):
        return None
    return f"{', '.join(' '.join(part) for part in inputs.split(','))} -> {' '.join(output)}"


RULES: dict[str, str | Writer] = {
    "linear": linear,
    "matmul rmatmul": matmul,
    "mm": "m k, k n -> m n",
    "bmm": "b m k, b k n -> b m n",
    "mv": "m k, k -> m",
    "dot": "k, k -> ",
    "outer": "m, n -> m n",
    "addmm": "_ _, m k!, k! n -> m n",
    "einsum": einsum,
}
