"""Helpers of functions that write a node's rule: they read its arguments."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload, OpOverloadPacket  # private, but the types in `torch.ops` have no public name

from autopar.graph import VAL, input_nodes, output_tensors, resolve, target_name, tensor_inputs
from autopar.ops.on_copies import OnCopies

Writer = Callable[[fx.Node], "str | None"]


def op_name(node: fx.Node) -> str:
    """The op's name in the table: that of the torch function, operator or method, without underscores around it.

    "" for functions of other modules than torch and autopar itself: a user's `linear` is not torch's.
    """
    if node.op == "call_method":
        return str(node.target).strip("_")
    if node.op != "call_function":
        return ""
    if isinstance(node.target, (OpOverload, OpOverloadPacket)):
        space, _, name = qualified_name(node).partition("::")
        return name.partition(".")[0].strip("_") if space == "aten" else ""
    module = getattr(node.target, "__module__", None) or "torch"
    name = str(getattr(node.target, "__name__", ""))
    return name.strip("_") if module.split(".")[0] in ("torch", "_operator", "operator", "autopar") else ""


def qualified_name(node: fx.Node) -> str:
    """The op's name among all ops: `mylib::op` of an operator (also of one that writes in place),
    `package.module.function`, or `Tensor.method`."""
    target: Any = node.target
    if isinstance(target, OnCopies) and isinstance(target.call, (OpOverload, OpOverloadPacket)):
        target = target.call
    if isinstance(target, OpOverload):
        overload = "" if target._overloadname == "default" else f".{target._overloadname}"
        return f"{target._schema.name}{overload}"
    if isinstance(target, OpOverloadPacket):
        return target._qualified_op_name
    return target_name(node)


def user_name(node: fx.Node) -> str:
    """The op's name for messages. A write in place has the name of what the user wrote, not of the node that replaces
    it in the graph; a torch function has its public name, not that of the builtin module that defines it."""
    name = op_name(node)
    if name == "apply_inplace":
        return f"Tensor.{node.args[0]}"
    if isinstance(node.target, OnCopies):
        return node.target.title
    if name == "write":
        return "Tensor.__setitem__"
    if name == "write_view":
        view = str(node.args[2])
        return f"a write into what {view if '.' in view else 'Tensor.' + view} returned"
    public = None if isinstance(node.target, str) else torch.overrides.resolve_name(node.target)
    return public or target_name(node)


def value(argument: Any) -> Any:
    """An argument with nodes, also those inside tuples and lists, replaced by their data-free values."""
    return fx.node.map_aggregate(argument, lambda a: a.meta.get(VAL) if isinstance(a, fx.Node) else a)


def argument(node: fx.Node, name: str, position: int, default: Any = None) -> Any:
    """The value of one argument, given by position or by name."""
    if name in node.kwargs:
        return value(node.kwargs[name])
    return value(node.args[position]) if position < len(node.args) else default


def is_zero(number: Any) -> bool:
    """Whether an argument is the number 0. False for tensors, whose contents are not known."""
    return isinstance(number, (int, float)) and number == 0


def integers(node: fx.Node, name: str, position: int) -> tuple[int, ...] | None:
    """An argument that is an int, a sequence of ints, or several positional ints from `position` on."""
    argument_value = argument(node, name, position)
    if isinstance(argument_value, int) and name not in node.kwargs:
        argument_value = [
            value(a) for a in node.args[position:] if isinstance(value(a), int) and not isinstance(a, bool)
        ]
    if argument_value is None:
        return None
    return (int(argument_value),) if isinstance(argument_value, int) else tuple(int(d) for d in argument_value)


def input_shape(node: fx.Node, index: int = 0) -> tuple[int, ...]:
    """The shape of a tensor input."""
    ref = tensor_inputs(node)[index]
    return tuple(output_tensors(ref.node)[ref.index].shape)


def output_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """The shapes of the outputs."""
    return [tuple(t.shape) for t in output_tensors(node)]


def letters(count: int) -> list[str]:
    """Names for the dims of one tensor: a, b, c, ... (x26 and on past the alphabet)."""
    return [string.ascii_lowercase[i] if i < 26 else f"x{i}" for i in range(count)]


def dims_of(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """Dims as non-negative numbers; None and an empty sequence mean every dim."""
    if dims is None:
        return list(range(rank))
    chosen = [dims] if isinstance(dims, int) else list(dims)
    return [int(d) % max(rank, 1) for d in chosen] if chosen else list(range(rank))


def by_name(signature: str, output: str, **operands: str) -> Writer:
    """A writer for an op whose tensor arguments may be given by position or by name, and may be absent.

    `signature` lists the argument names in order; `operands` has the rule text of each tensor argument.
    """
    names = signature.split()

    def write(node: fx.Node) -> str | None:
        arguments = [*zip(names, node.args, strict=False), *node.kwargs.items()]
        texts = []
        for name, operand in arguments:
            if isinstance(operand, fx.Node) and isinstance(operand.meta.get(VAL), torch.Tensor):
                if name not in operands:
                    return None
                texts.append(operands[name])
        return f"{', '.join(texts)} -> {output}"

    return write


def tensors(node: fx.Node) -> list[torch.Tensor]:
    """The data-free tensors that the node reads, in the order of its arguments."""
    return [output_tensors(ref.node)[ref.index] for source in input_nodes(node) for ref in resolve(source)]
