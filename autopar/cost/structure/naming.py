"""What a stretch of the graph is called: by the user's modules, not by positions of nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from torch import fx

from autopar.graph import SCOPE, output_tensors, target_name


def stretch_name(nodes: Sequence[fx.Node]) -> str:
    """The numbered block that holds all ops of the stretch, or "first to last" of its modules.

    An op that the model's own forward calls stands with its function's name: "transformer.ln_f to cross_entropy".
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
    """A part of a block by its first and last op: "transformer.h.0.mlp.act to mlp.c_proj".

    Where the block is no module of its own (two layers of which constraints ask different things) it stands by itself.
    """
    if " to " in block:
        return stretch_name(nodes)
    calls = [node for node in nodes if node.op.startswith("call") and output_tensors(node)]
    names = [_within(node, block) for node in (calls[0], calls[-1])]
    return f"{block}.{' to '.join(dict.fromkeys(names))}"


def _within(node: fx.Node, block: str) -> str:
    """An op by its module's path in the block; one that the block itself calls by its function."""
    path = _name(node)
    return path.removeprefix(f"{block}.") if path != block else target_name(node).rpartition(".")[2]


def _shared(scopes: Iterable[tuple[tuple[str, str], ...]]) -> str:
    """The deepest module around all ops; those of the model's own forward do not count."""
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
