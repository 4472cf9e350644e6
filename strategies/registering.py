"""Rules that users register for their own ops; each is tested by running the op before it is accepted."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import RuleError
from autopar.graph import output_tensors
from autopar.ops.on_copies import OnCopies
from autopar.strategies.arguments import qualified_name
from autopar.strategies.bind import bind
from autopar.strategies.check import check
from autopar.strategies.examples import example
from autopar.strategies.rule import Dots, Operand, ShardingRule
from autopar.strategies.table import REGISTERED

_SIZES = (4, 8, 12, 20, 28, 44)  # lengths given to the factors in turn: all divisible by 2 and 4, the tested splits


def register_rule(
    op: str | Callable[..., Any],
    rule: str,
    *,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Shard an op as `rule` says (the language is described in `autopar.strategies.rule`), before any other rule.

    `op` is an operator (`"mylib::op"`, or `torch.ops.mylib.op`), an autograd function's class, or the qualified name of
    a function that is one node of the graph (`"package.module.function"`). If an operator writes into arguments, the
    rule's outputs are first these arguments, as written, and then what it returns.

    The rule is tested on small tensors: the op sharded in every way that it allows must equal the whole op, forward and
    backward. `op(*args, **kwargs)` is run if they are given (float64, on the CPU, with sizes that 2 and 4 divide);
    else, for operators whose arguments are tensors or have defaults, tensors are made from the rule. A rule of an op
    that cannot run on the CPU is not tested.

    Raises RuleError if the rule is malformed, does not fit the op, or is wrong; it names the sharding that failed.

    >>> register_rule("aten::hardswish", "... -> ...")
    >>> rows = torch.arange(8.0).view(2, 4)
    >>> register_rule("aten::cummax", "... d -> ... d, ... d", args=(rows, 1))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    autopar.errors.RuleError: aten.cummax.default, rule '... d -> ... d, ... d', split as d: ... output 1 is off by 2...
    >>> del REGISTERED["aten::hardswish"]
    """
    parsed = ShardingRule.parse(rule)
    name, target = _resolved(op)
    if args is not None or kwargs is not None:
        calls = [(tuple(args or ()), dict(kwargs or {}))]
    else:
        calls = list(_example_calls(parsed, target)) if isinstance(target, torch._ops.OpOverload) else []
    _check(_returning(target), rule, parsed, calls, must_run=args is not None or kwargs is not None)
    REGISTERED[name] = rule


def _resolved(op: str | Callable[..., Any]) -> tuple[str, Any]:
    """The op's key in `REGISTERED`, and the callable that runs it (None: it is not known)."""
    if isinstance(op, str) and "::" in op:
        space, _, name = op.partition("::")
        name, _, overload = name.partition(".")
        try:
            packet = getattr(getattr(torch.ops, space), name)
            return op, getattr(packet, overload or "default")
        except AttributeError as error:
            raise RuleError(f"there is no operator '{op}': register its rule after the operator itself") from error
    if isinstance(op, str):
        module, _, attribute = op.rpartition(".")
        try:
            return op, getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError):
            return op, None  # for example a name inside a class
    if isinstance(op, type) and issubclass(op, torch.autograd.Function):
        return f"{op.__module__}.{op.__qualname__}", op.apply
    graph = torch.fx.Graph()
    name = qualified_name(graph.call_function(op))
    return name, getattr(op, "default", op)


def _returning(target: Any) -> Any:
    """The functional form, as in traced graphs, of an operator that writes into arguments: it returns the written
    tensors too."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return target
    written = [
        [i] for i, a in enumerate(target._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    return OnCopies(target, written)


def _example_calls(rule: ShardingRule, target: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Example calls whose tensors fit the rule: first all floating, then with every subset of them as integers."""
    schema = target._schema.arguments
    places = [i for i, a in enumerate(schema) if "Tensor" in str(a.type) and not a.has_default_value()]
    others = [a.name for i, a in enumerate(schema) if i not in places and not a.has_default_value()]
    operands = [operand for operand in rule.inputs if not operand.kind]
    if others or len(operands) != len(places) or places != list(range(len(places))):
        return
    sizes = dict(zip(_names(rule), itertools.cycle(_SIZES), strict=False))
    shapes = [_shape(operand, sizes) for operand in operands]
    for integers in itertools.product((False, True), repeat=len(shapes)):
        generator = torch.Generator().manual_seed(0)

        def tensor(shape: list[int], integer: bool, generator: torch.Generator = generator) -> torch.Tensor:
            if integer:
                return torch.randint(0, 2, shape, generator=generator)
            return (torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1).requires_grad_()

        yield tuple(tensor(s, i) for s, i in zip(shapes, integers, strict=True)), {}


def _names(rule: ShardingRule) -> list[str]:
    dims = [dim for operand in (*rule.inputs, *rule.outputs) for dim in operand.dims if not isinstance(dim, Dots)]
    return list(dict.fromkeys(term.name for dim in dims for term in dim.terms))


def _shape(operand: Operand, sizes: Mapping[str, int]) -> list[int]:
    shape = []
    for dim in operand.dims:
        if isinstance(dim, Dots):
            shape.append(_SIZES[0])
            continue
        length = 1
        for term in dim.terms:
            length *= term.size or sizes[term.name]
        shape.append(length)
    return shape


def _check(
    target: Any,
    text: str,
    rule: ShardingRule,
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
    *,
    must_run: bool,
) -> None:
    """Check the rule on the first example call that the unsplit op accepts."""
    for args, kwargs in calls:
        try:
            node, tensors = example(target, *args, **kwargs)
        except Exception as error:
            if must_run:
                raise RuleError(f"rule '{text}': the op does not run on what it is given: {error}") from error
            continue
        shapes = [tuple(t.shape) for t in tensors]
        outputs = [tuple(t.shape) for t in output_tensors(node)]
        bound = bind(rule, shapes, outputs)
        for mesh in ((2,), (2, 2)):
            try:
                check(node, tensors, mesh, bound=bound)
            except RuleError:
                raise
            except Exception as error:  # the op itself refuses a piece, with any kind of error
                raise RuleError(f"rule '{text}': split {mesh[0]} ways, {target} raises {error}") from error
        return
