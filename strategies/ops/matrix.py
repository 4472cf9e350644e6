"""Products: splitting the contracted factor leaves a partial sum, and a partial operand gives a partial product.

An adapter, a low-rank product `B (A x)` beside a frozen one, can use the latter: with `A x` partial, its result is
partial too, is added to the partial sum of the frozen product, and both are reduced at once.
"""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import Writer, argument, input_shape, tensors, value

EACH = " | linear:0 linear:1"


def matmul(node: fx.Node) -> str:
    """As `torch.matmul`: a 1-D operand is a vector, and dims before the last two are broadcast."""
    left, right = (len(input_shape(node, i)) for i in (0, 1))
    if left == 1 or right == 1:
        first, second = "k" if left == 1 else "... m k", "k" if right == 1 else "... k n"
        return f"{first}, {second} -> {'' if left == right == 1 else '... n' if left == 1 else '... m'}{EACH}"
    return f"... m k, ... k n -> ... m n{EACH}"


def linear(node: fx.Node) -> str:
    """With a bias that is still in the op, the contracted factor stays whole: every rank would add the bias to its
    partial sum."""
    return f"... i, o i -> ... o{EACH}" if len(tensors(node)) == 2 else "... i!, o i!, o -> ... o"


def einsum(node: fx.Node) -> str | None:
    """The equation is the rule; an index that occurs twice in one operand (a diagonal) stays whole."""
    equation = value(node.args[0])
    if not isinstance(equation, str):
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        once = sorted(c for c in set(inputs) - set(",.") if inputs.count(c) == 1)
        output = ("..." if "..." in inputs else "") + "".join(once)
    parts = [*inputs.split(","), output]
    diagonal = {c for part in parts for c in part if c != "." and part.count(c) > 1}

    def side(part: str) -> str:
        before, dots, after = part.partition("...")
        return " ".join(
            ["_" if c in diagonal else c for c in before]
            + [dots] * bool(dots)
            + ["_" if c in diagonal else c for c in after]
        )

    each = " ".join(f"linear:{i}" for i in range(len(parts) - 1))
    return f"{', '.join(map(side, parts[:-1]))} -> {side(output)} | {each}"


def grouped_product(node: fx.Node) -> str | None:
    """`grouped_mm(rows, weights, offs)`: consecutive groups of rows, each multiplied by its own weight.

    The offsets count all rows, so the rows stay whole; `routing.experts` is the op that can split them.
    """
    shapes = [t.dim() for t in tensors(node)]
    return "_ k, _ k n, _ -> _ n" if shapes == [2, 3, 1] else None


def triangular(node: fx.Node) -> str | None:
    """`solve_triangular(A, B)`: the columns of B, one solution each, can be split."""
    return "... _ _, ... _ n -> ... _ n | linear:1" if argument(node, "left", 3, True) else None


def kron(node: fx.Node) -> str:
    """A dim of the result merges one of the left operand (outer) and one of the right (inner), aligned at the last
    dim."""
    left, right = ([f"{side}{i}" for i in range(len(input_shape(node, k)))] for k, side in enumerate("ab"))
    rank = max(len(left), len(right))
    pairs = zip([""] * (rank - len(left)) + left, [""] * (rank - len(right)) + right, strict=True)
    merged = (f"({outer} {inner})" if outer and inner else outer or inner for outer, inner in pairs)
    return f"{' '.join(left)}, {' '.join(right)} -> {' '.join(merged)}{EACH}"


RULES: dict[str, str | Writer] = {
    "linear": linear,
    "matmul": matmul,
    "mm": f"m k, k n -> m n{EACH}",
    "bmm": f"b m k, b k n -> b m n{EACH}",
    "mv": f"m k, k -> m{EACH}",
    "dot": f"k, k -> {EACH}",
    "outer": f"m, n -> m n{EACH}",
    "einsum": einsum,
    "kron": kron,
    "cdist": "... m d!, ... n d! -> ... m n",
    "grouped_mm": grouped_product,
    "linalg_solve_triangular": triangular,
    "linalg_cholesky": "... _ _ -> ... _ _",  # discovery cannot find it: a random matrix is not positive definite
}
