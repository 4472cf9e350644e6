"""Names of stretches of the graph, made of the user's modules and not of positions of nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch import fx

from autopar.graph import SCOPE, output_tensors, target_name


def stretch_name(nodes: Sequence[fx.Node]) -> str:
    """The numbered module that contains all ops of the stretch, or "first to last" of its modules.

    An op that the model's own forward calls has its function's name: "transformer.ln_f to cross_entropy".
    """
    calls = [node for node in nodes if node.op.startswith("call") and output_tensors(node)]
    if not calls:
        return "inputs and parameters"
    shared = _shared([node.meta.get(SCOPE, ()) for node in calls])
    if any(part.isdigit() for part in shared.split(".")):
        return shared
    names = [_name(node) for node in calls]
    around = {outer for name in set(names) for outer in itertools.accumulate(name.split(".")[:-1], "{}.{}".format)}
    leaves = [name for name in names if name not in around]
    return leaves[0] if leaves[0] == leaves[-1] else f"{leaves[0]} to {leaves[-1]}"


def part_name(nodes: Sequence[fx.Node], block: str) -> str:
    """The name of a part of a block, by its first and last op: "transformer.h.0.mlp.act to mlp.c_proj".

    If the block is no single module (two layers with different constraints), the part is named as a stretch.
    """
    if " to " in block:
        return stretch_name(nodes)
    calls = [node for node in nodes if node.op.startswith("call") and output_tensors(node)]
    names = [_within(node, block) for node in (calls[0], calls[-1])]
    return f"{block}.{' to '.join(dict.fromkeys(names))}"


def _within(node: fx.Node, block: str) -> str:
    """An op's name: its module's path within the block, or its function's name if the block itself calls it."""
    path = _name(node)
    return path.removeprefix(f"{block}.") if path != block else target_name(node).rpartition(".")[2]


def _shared(scopes: Iterable[tuple[tuple[str, str], ...]]) -> str:
    """The path of the innermost module that contains all ops; ops of the model's own forward do not count."""
    shared: tuple[tuple[str, str], ...] | None = None
    for scope in scopes:
        if not scope:
            continue
        shared = scope if shared is None else shared
        while scope[: len(shared)] != shared:
            shared = shared[:-1]
    return shared[-1][0] if shared else ""


def _name(node: fx.Node) -> str:
    scope = node.meta.get(SCOPE, ())
    return scope[-1][0] if scope else target_name(node).rpartition(".")[2]
