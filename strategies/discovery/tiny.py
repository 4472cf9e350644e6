"""A node's call with tiny tensors in place of its own: the same op, numbers of dims and constants, but other sizes.

Sizes that are equal stay equal, since the op may require it. How the others depend on each other is not known, so
several ways of shrinking are tried, from the freest to leaving every size as it is, until the op runs and its outputs
have the shapes that the tiny sizes imply.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from autopar.graph import output_tensors
from autopar.strategies.arguments import tensors, value
from autopar.strategies.examples import callable_of, example

PRIMES = (3, 2, 5, 7, 11, 13, 17, 19)  # a different one for each size, so that sizes are told apart
_MOST_ELEMENTS = 1 << 17  # of one tiny tensor
_COUNTS = 4  # int arguments up to this are taken for dims, counts and flags, and never for sizes


class NotTiny(Exception):
    """Why an op cannot be tried on tiny tensors."""


class Unrepeatable(NotTiny):
    """The op's results differ between equal calls, or their shapes between calls of equal shapes."""


@dataclass(frozen=True)
class Shrinking:
    """One way to make sizes tiny; sizes up to `unchanged` stay as they are.

    `products`: a size that is a small multiple of another one stays this multiple. `ints`: int arguments that equal a
    size are replaced too. `counts`: a size that is a multiple of an int argument stays a multiple of it. `chances`: the
    floating inputs are drawn between 0 and 1, for ops that accept no other numbers.

    >>> Shrinking(1).sizes([8, 512, 1024], ways=2, turn=0)
    {8: 12, 512: 8, 1024: 20}
    >>> Shrinking(8, products=True).sizes([8, 512, 1024], ways=2, turn=0)
    {8: 8, 512: 12, 1024: 24}
    >>> Shrinking(8, counts=True).sizes([8, 512, 768], ways=2, turn=0, int_args=(12,))
    {8: 8, 512: 12, 768: 60}
    """

    unchanged: int
    products: bool = False
    ints: bool = False
    counts: bool = False
    chances: bool = False

    def sizes(self, sizes: Sequence[int], ways: int, turn: int, int_args: Sequence[int] = ()) -> dict[int, int]:
        """The tiny size of each size: 2 * `ways` * a prime, so that the op can still halve a piece.

        `turn`: with which prime to begin. `int_args`: the ints among the arguments.
        """
        tiny = {size: size for size in sizes if size <= self.unchanged}
        primes = (PRIMES[(i + turn) % len(PRIMES)] for i in itertools.count())
        for size in sorted(set(sizes) - tiny.keys()):
            base = next((b for b in sorted(tiny, reverse=True) if size % b == 0 and 2 <= size // b <= 8), None)
            if self.products and base is not None:
                tiny[size] = tiny[base] * (size // base)
                continue
            prime = next(primes)
            while 2 * ways * prime in tiny.values() and prime < max(PRIMES):
                prime = next(primes)
            counts = [n for n in int_args if self.counts and n > _COUNTS and n not in sizes and size % n == 0]
            tiny[size] = math.lcm(2 * ways, *counts) * prime
        return tiny


SHRINKINGS = (
    *(Shrinking(kept, products, ints) for kept in (1, 8) for products in (False, True) for ints in (True, False)),
    *(Shrinking(kept, products, counts=True) for kept in (1, 8) for products in (False, True)),
    Shrinking(1 << 62),
)


@dataclass(frozen=True, eq=False)
class Tiny:
    """A tiny call: its node and tensors, as the executed check takes them, which splits it in `ways` pieces. Compared
    by identity."""

    node: fx.Node
    tensors: list[torch.Tensor]
    ways: int

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs, then of the outputs."""
        return tuple(tuple(t.shape) for t in (*self.tensors, *output_tensors(self.node)))


def shrinking_of(node: fx.Node) -> Shrinking:
    """The first (freest) shrinking with which the op runs; raises NotTiny with the reason if there is none."""
    problem: Exception = NotTiny("it has no tensor inputs")
    raised: list[Shrinking] = []
    for shrinking in itertools.chain(SHRINKINGS if tensors(node) else (), raised):
        try:
            call = tiny(node, shrinking, ways=2, turn=0, seed=1)
            _check_repeatable(call, tiny(node, shrinking, ways=2, turn=0, seed=2))
            _check_outputs(node, call, shrinking)
            return shrinking
        except Unrepeatable:
            raise
        except NotTiny as error:
            problem = problem if shrinking.chances else error
        except Exception as error:  # the op may refuse sizes or numbers with any kind of error
            if shrinking.chances:
                continue
            raised.append(replace(shrinking, chances=True))
            problem = NotTiny(f"it does not run on small tensors ({type(error).__name__}: {str(error)[:200]})")
    raise problem


def tiny(node: fx.Node, shrinking: Shrinking, *, ways: int, turn: int, seed: int) -> Tiny:
    """The op on tiny random tensors; raises what the op raises, or NotTiny if the tensors cannot be made tiny."""
    inputs = tensors(node)
    if any(t.is_complex() for t in inputs):
        raise NotTiny("it reads complex numbers")
    sizes = shrinking.sizes(_sizes(node), ways, turn, _ints(node))
    generator = torch.Generator().manual_seed(seed)
    limit = min((n for n in sizes.values() if n > 1), default=ways) // ways  # smaller indices are valid in every piece
    problem: Exception | None = None
    for dtype in (torch.float64, torch.float32):

        def leaf(item: Any, dtype: torch.dtype = dtype) -> Any:
            if isinstance(item, torch.Tensor):
                shape = [sizes.get(n, n) for n in item.shape]
                if math.prod(shape) > _MOST_ELEMENTS:
                    raise NotTiny("it runs only on tensors that are too large to try")
                if limit < 2 and not item.is_floating_point() and item.dtype != torch.bool:
                    raise NotTiny("its integers could be tried as zeros alone, which tell nothing")
                if shrinking.chances and item.is_floating_point():
                    numbers = 0.1 + 0.8 * torch.rand(shape, generator=generator, dtype=dtype)
                    return numbers.requires_grad_(item.requires_grad)
                return _drawn(item, shape, dtype, limit, generator, positive=seed % 2 == 0)
            if isinstance(item, int) and not isinstance(item, bool):
                return sizes.get(int(item), int(item)) if shrinking.ints and item > _COUNTS else int(item)
            return item

        args, kwargs = pytree.tree_map(leaf, _plain(value((node.args, node.kwargs))))
        target: Any = str(node.target) if node.op == "call_method" else node.target
        try:
            call = Tiny(*example(target, *args, **kwargs), ways)
        except Exception as error:
            problem = problem or error
            continue
        if not call.tensors:
            raise NotTiny("it has no tensor inputs")
        return call
    assert problem is not None
    raise problem


def _sizes(node: fx.Node) -> list[int]:
    return sorted({int(n) for t in tensors(node) for n in t.shape if n > 1})


def _ints(node: fx.Node) -> list[int]:
    leaves = pytree.tree_leaves(_plain(value((node.args, node.kwargs))))
    return [int(leaf) for leaf in leaves if isinstance(leaf, int) and not isinstance(leaf, bool)]


def _plain(arguments: Any) -> Any:
    """Arguments with all containers as ordinary tuples, lists and dicts (`torch.Size` too), for `pytree.tree_map`."""
    if isinstance(arguments, Mapping):
        return {key: _plain(item) for key, item in arguments.items()}
    if isinstance(arguments, list):
        return [_plain(item) for item in arguments]
    if isinstance(arguments, tuple):
        return tuple(_plain(item) for item in arguments)
    return arguments


def _drawn(
    like: torch.Tensor, shape: list[int], dtype: torch.dtype, limit: int, generator: torch.Generator, *, positive: bool
) -> torch.Tensor:
    if like.is_floating_point():
        drawn = torch.rand if positive else torch.randn
        numbers = drawn(shape, generator=generator, dtype=dtype)
        return (numbers + 0.1 if positive else numbers).requires_grad_(like.requires_grad)
    if like.dtype == torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    return torch.randint(0, max(limit, 1), shape, generator=generator).to(like.dtype)


def _check_outputs(node: fx.Node, call: Tiny, shrinking: Shrinking) -> None:
    """Raise NotTiny unless the tiny outputs have as many dims as the node's, and the sizes that the inputs' tiny sizes
    imply."""
    sizes = shrinking.sizes(_sizes(node), 2, 0, _ints(node))
    own, theirs = output_tensors(node), output_tensors(call.node)
    if any(t.is_complex() for t in own):
        raise NotTiny("its results are complex")
    if [t.dim() for t in own] != [t.dim() for t in theirs]:
        raise NotTiny("on small tensors its results have other dims")
    for mine, small in zip(own, theirs, strict=True):
        for length, tiny_length in zip(mine.shape, small.shape, strict=True):
            if (length in sizes and tiny_length != sizes[length]) or (length == 1) != (tiny_length == 1):
                raise NotTiny("how its results' sizes follow from its inputs' is not to be seen")


def _run_again(call: Tiny) -> list[torch.Tensor]:
    """The results of running the call again; Unrepeatable if it draws random numbers or writes into its inputs."""
    leaves = iter([t.detach().clone() for t in call.tensors])
    copies: list[torch.Tensor] = []

    def fill(_: fx.Node) -> torch.Tensor:
        copies.append(next(leaves))
        return copies[-1]

    args, kwargs = fx.node.map_arg((call.node.args, call.node.kwargs), fill)
    versions, state = [t._version for t in copies], torch.get_rng_state()
    function: Callable[..., Any] = callable_of(call.node)
    results = [t for t in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    if not torch.equal(state, torch.get_rng_state()):
        raise Unrepeatable("its results are random")
    if versions != [t._version for t in copies]:
        raise Unrepeatable("it writes into its inputs")
    return results


def _check_repeatable(first: Tiny, second: Tiny) -> None:
    """Raise Unrepeatable unless equal calls have equal results, and the two calls have results of equal shapes."""
    if first.shapes != second.shapes:
        raise Unrepeatable("the shapes of its results depend on data")
    for call in (first, second):
        once, again = _run_again(call), _run_again(call)
        if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(once, again, strict=True)):
            raise Unrepeatable("its results differ from call to call")


def describe(node: fx.Node) -> str:
    """A key of all that a rule depends on: the tensors' kinds of dtype and numbers of dims, which sizes are equal, and
    constants.

    Sizes are numbered in order of appearance, so that one entry serves every batch size.
    """
    numbers: dict[int, int] = {}

    def size(n: int) -> str:
        return "1" if n == 1 else f"n{numbers.setdefault(int(n), len(numbers))}"

    def text(item: Any) -> str:
        if isinstance(item, torch.Tensor):
            kind = "f" if item.is_floating_point() else "b" if item.dtype == torch.bool else "i"
            return f"{kind}{'g' if item.requires_grad else ''}[{' '.join(map(size, item.shape))}]"
        if isinstance(item, Mapping):
            return "{" + ", ".join(f"{key}: {text(entry)}" for key, entry in item.items()) + "}"
        if isinstance(item, (tuple, list)):
            return "(" + ", ".join(map(text, item)) + ")"
        if isinstance(item, int) and not isinstance(item, bool):
            return f"n{numbers[item]}" if item > _COUNTS and item in numbers else str(int(item))
        if isinstance(item, slice):
            return f"slice{text((item.start, item.stop, item.step))}"
        return repr(item)

    arguments = value((node.args, node.kwargs))
    pytree.tree_map_only(torch.Tensor, text, _plain(arguments))  # number the tensors' sizes first: ints may repeat them
    outputs = ", ".join(text(t) for t in output_tensors(node))
    return f"{text(arguments[0])} {text(arguments[1]) if arguments[1] else ''}-> {outputs}"
