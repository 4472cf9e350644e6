"""Views and other ops that only rearrange elements; their factors follow from the shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count, pairwise

from torch import fx

from autopar.ops.strided_dims import dims_passed
from autopar.strategies.arguments import Writer, argument, input_shape, integers, letters, op_name, output_shapes


def regroup(before: Sequence[int], after: Sequence[int]) -> str:
    """The rule of a view from shape `before` to shape `after`, both in row-major order.

    >>> regroup((2, 5, 24), (2, 5, 3, 8)), regroup((6, 4), (8, 3))
    ('a b (c=3 d=8) -> a b c d', '(a=2 _) _ -> (a=2 _) _')
    """
    names = count()
    sides: tuple[list[str], list[str]] = ([], [])
    i = j = 0
    while i < len(before) or j < len(after):
        if i < len(before) and before[i] == 1:
            sides[0].append("1")
            i += 1
        elif j < len(after) and after[j] == 1:
            sides[1].append("1")
            j += 1
        else:
            left, right = i + 1, j + 1
            while math.prod(before[i:left]) != math.prod(after[j:right]):
                if math.prod(before[i:left]) < math.prod(after[j:right]):
                    left += 1
                else:
                    right += 1
            group = _group(before[i:left], after[j:right], names)
            sides[0].extend(group[0])
            sides[1].extend(group[1])
            i, j = left, right
    return " -> ".join(map(" ".join, sides))


def _group(before: Sequence[int], after: Sequence[int], names: count[int]) -> tuple[list[str], list[str]]:
    """The text of dims with equal products on both sides: cut into common factors if each cut divides the next one;
    otherwise only the greatest common divisor of the outermost dims is a factor."""
    cuts = sorted({math.prod(side[:k]) for side in (before, after) for k in range(1, len(side) + 1)})
    if any(b % a for a, b in pairwise(cuts)):
        common = math.gcd(before[0], after[0])
        first = f"({_name(next(names))}={common} _)" if common > 1 else "_"
        return [first] + ["_"] * (len(before) - 1), [first] + ["_"] * (len(after) - 1)
    atoms = [(start, end, _name(next(names))) for start, end in zip([1, *cuts], cuts, strict=False) if end > start]

    def side(dims: Sequence[int]) -> list[str]:
        written, start = [], 1
        for length in dims:
            terms = [(a, b, n) for a, b, n in atoms if start <= a and b <= start * length]
            texts = [n if len(terms) == 1 else f"{n}={b // a}" for a, b, n in terms]
            written.append(f"({' '.join(texts)})" if len(texts) > 1 else texts[0] if texts else "1")
            start *= length
        return written

    return side(before), side(after)


def _name(number: int) -> str:
    return letters(number + 1)[number]


def view(notes: str) -> Writer:
    """A writer for ops that keep the order of the elements and change the shape."""

    def write(node: fx.Node) -> str | None:
        before, after = input_shape(node), output_shapes(node)[0]
        if math.prod(before) != math.prod(after) or 0 in before:
            return None  # `view(dtype)` changes the number of elements; in an empty tensor no factor is known
        text = regroup(before, after)
        if op_name(node) in ("view_as", "reshape_as"):  # the second tensor gives the shape alone
            sides = text.partition(" -> ")
            return f"{sides[0]}, {'_ ' * len(after)}-> {sides[2]} | linear:0 @shape"
        return f"{text} | {notes}"

    return write


def permute(node: fx.Node) -> str:
    """Puts the dims in another order."""
    names = letters(len(input_shape(node)))
    order = integers(node, "dims", 1)
    assert order is not None
    return _reorder(names, [names[d] for d in order])


def transpose(first: str, second: str) -> Writer:
    """A writer for ops that swap two dims; `first` and `second` are the arguments' names."""

    def write(node: fx.Node) -> str:
        names = letters(len(input_shape(node)))
        a, b = argument(node, first, 1), argument(node, second, 2)
        after = list(names)
        if names:
            after[a], after[b] = names[b], names[a]
        return _reorder(names, after)

    return write


def reverse(last: bool) -> Writer:
    """`.T` and `t()` reverse all dims; `.mT`, `.mH` and `adjoint` swap the last two."""

    def write(node: fx.Node) -> str:
        names = letters(len(input_shape(node)))
        return _reorder(names, [*names[:-2], *names[:-3:-1]] if last else names[::-1])

    return write


def movedim(node: fx.Node) -> str:
    """Moves some dims; the others keep their order."""
    rank = len(input_shape(node))
    names = letters(rank)
    source = [d % rank for d in _list(argument(node, "source", 1))]
    target = [d % rank for d in _list(argument(node, "destination", 2))]
    rest = iter(n for i, n in enumerate(names) if i not in source)
    return _reorder(names, [names[source[target.index(i)]] if i in target else next(rest) for i in range(rank)])


def _list(dims: int | Sequence[int]) -> list[int]:
    return [dims] if isinstance(dims, int) else list(dims)


def _reorder(before: Sequence[str], after: Sequence[str]) -> str:
    return f"{' '.join(before)} -> {' '.join(after)} | linear"


def expand(node: fx.Node) -> str:
    """Expands dims of length one, and adds dims in front."""
    before, after = input_shape(node), output_shapes(node)[0]
    names = letters(len(after))
    shared = names[len(after) - len(before) :]
    text = [n if length > 1 else "1" for n, length in zip(shared, before, strict=True)]
    if op_name(node) == "expand_as":  # the second tensor gives the shape alone
        return f"{' '.join(text)}, {' '.join(names)} -> {' '.join(names)} | linear:0"
    return f"{' '.join(text)} -> {' '.join(names)} | linear @shape"


def diagonal(node: fx.Node) -> str:
    """`diagonal(input, offset, dim1, dim2)`: the two dims, which stay whole, become one, the last."""
    rank = len(input_shape(node))
    along = {argument(node, "dim1", 2, 0) % rank, argument(node, "dim2", 3, 1) % rank}
    names = letters(rank)
    before = ["_" if i in along else name for i, name in enumerate(names)]
    return _reorder(before, [*(name for i, name in enumerate(names) if i not in along), "_"])


def place_back(node: fx.Node) -> str:
    """`slice_backward(grad, input_sizes, dim, ...)` and `select_backward`: puts the gradient into zeros along `dim`,
    where forward has read."""
    after = output_shapes(node)[0]
    dim = argument(node, "dim", 2) % len(after)
    names = ["_" if i == dim else name for i, name in enumerate(letters(len(after)))]
    before = [name for i, name in enumerate(names) if i != dim or op_name(node) == "slice_backward"]
    return f"{_reorder(before, names)} @shape"


def repeat(node: fx.Node) -> str:
    """`repeat` copies each dim several times; the copies are the outer digit."""
    before, after = input_shape(node), output_shapes(node)[0]
    names = letters(len(before))
    new = len(after) - len(before)
    inside = [n if length > 1 else "1" for n, length in zip(names, before, strict=True)]
    outside = ["_"] * new
    for name, length, whole in zip(names, before, after[new:], strict=True):
        outside.append("_" if length == 1 else name if length == whole else f"(_ {name})")
    return f"{' '.join(inside)} -> {' '.join(outside)} | linear"


def repeat_interleave(node: fx.Node) -> str | None:
    """Copies each element several times; the copies are the inner digit. Only if `repeats` is a number and `dim` is
    given."""
    dim, times = argument(node, "dim", 2), argument(node, "repeats", 1)
    if dim is None or not isinstance(times, int):
        return None
    names = letters(len(input_shape(node)))
    after = list(names)
    after[dim] = f"({names[dim]} _)"
    size = argument(node, "output_size", 3)  # must be made smaller for a shard
    return f"{_reorder(names, after)}{f', {names[dim]} @shape' if size is not None else ''}"


def strided(node: fx.Node) -> str:
    """`as_strided` of a tensor that is contiguous in the trace: split along dims that it leaves as they are."""
    before, after = input_shape(node), output_shapes(node)[0]
    size, stride = (argument(node, name, place) for name, place in (("size", 1), ("stride", 2)))
    passed = dims_passed(before, size, stride, argument(node, "storage_offset", 3) or 0)
    sides = ["_"] * len(before), ["_"] * len(after)
    for name, (dim, place) in zip(letters(len(passed)), passed, strict=True):
        sides[0][dim] = sides[1][place] = name
    return f"{' '.join(sides[0])} -> {' '.join(sides[1])} | linear @strided always"


RULES: dict[str, str | Writer] = {
    "view reshape unflatten view_as reshape_as": view("linear @shape"),
    "flatten squeeze unsqueeze ravel": view("linear"),
    "permute": permute,
    "transpose": transpose("dim0", "dim1"),
    "swapaxes": transpose("axis0", "axis1"),
    "swapdims": transpose("dim0", "dim1"),
    "t T": reverse(last=False),
    "mT adjoint": reverse(last=True),
    "movedim moveaxis": movedim,
    "expand broadcast_to expand_as": expand,
    "diagonal": diagonal,
    "repeat tile": repeat,
    "repeat_interleave": repeat_interleave,
    "as_strided as_strided_copy": strided,
}

OPERATORS: dict[str, str | Writer] = {"slice_backward select_backward": place_back}
