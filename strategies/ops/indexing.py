"""Ops that read or write by index along a dim; this dim stays whole."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import (
    Writer,
    argument,
    by_name,
    input_shape,
    is_zero,
    letters,
    op_name,
    output_shapes,
    tensors,
)


def gather(node: fx.Node) -> str:
    """`gather(input, dim, index)`: all dims but `dim` are shared by input and index, if they are equally long in both
    (the index may be shorter)."""
    before, index = input_shape(node, 0), input_shape(node, 1)
    dim = argument(node, "dim", 1) % max(len(before), 1)
    names = [n if i != dim and before[i] == index[i] else "_" for i, n in enumerate(letters(len(before)))]
    last = ["j" if i == dim else n for i, n in enumerate(names)]
    return f"{' '.join(names)}, {' '.join(last)} -> {' '.join(last)} | linear:0"


def take_along(node: fx.Node) -> str | None:
    """`take_along_dim(input, indices, dim)`: as `gather`, but other dims broadcast. Without `dim` the input is
    flattened, and there is no rule."""
    before, index = input_shape(node, 0), input_shape(node, 1)
    dim = argument(node, "dim", 2)
    if dim is None:
        return None
    dim %= len(before)
    names = letters(len(before))

    def side(shape: tuple[int, ...], chosen: str) -> str:
        return " ".join(chosen if i == dim else "1" if shape[i] == 1 else names[i] for i in range(len(names)))

    whole = output_shapes(node)[0]
    return f"{side(before, '_')}, {side(index, 'j')} -> {side(whole, 'j')} | linear:0"


def index_select(node: fx.Node) -> str:
    """`index_select(input, dim, index)`."""
    names = letters(len(input_shape(node)))
    dim = argument(node, "dim", 1) % len(names)
    before = " ".join("_" if i == dim else n for i, n in enumerate(names))
    after = " ".join("j" if i == dim else n for i, n in enumerate(names))
    return f"{before}, j -> {after} | linear:0"


def scatter(node: fx.Node) -> str:
    """`scatter(input, dim, index, source or value)`: splits dims other than `dim` in which index and source are as long
    as the input."""
    before, index, *source = (input_shape(node, i) for i in range(len(tensors(node))))
    dim = argument(node, "dim", 1) % max(len(before), 1)
    splits = [i != dim and all(s[i] == n for s in (index, *source)) for i, n in enumerate(before)]
    side = " ".join(n if splits[i] else "_" for i, n in enumerate(letters(len(before))))
    reduces = argument(node, "reduce", 4) is not None
    value = argument(node, "value", 3, argument(node, "src", 3))
    linear = "" if reduces else "linear:0+2" if source else "linear:0" if is_zero(value) else ""
    return f"{', '.join([side] * (2 + len(source)))} -> {side}{' | ' + linear if linear else ''}"


def index_write(node: fx.Node) -> str:
    """`index_add(input, dim, index, source)` and similar ops: all dims but `dim` can be split."""
    names = letters(len(input_shape(node)))
    dim = argument(node, "dim", 1) % max(len(names), 1)
    side = " ".join("_" if i == dim else n for i, n in enumerate(names))
    if len(tensors(node)) == 2:
        return f"{side}, _ -> {side}"
    return f"{side}, _, {side} -> {side}{' | linear:0+2' if op_name(node) != 'index_reduce' else ''}"


def pad(node: fx.Node) -> str:
    """Padded dims stay whole. Padding by zeros or by copies (reflect, replicate) is linear, by another number
    affine."""
    before, after = input_shape(node), tuple(node.meta["val"].shape)
    names = letters(len(before))
    widths = argument(node, "pad", 1)
    touched = {len(before) - 1 - k // 2 for k, width in enumerate(widths) if width != 0}
    side = " ".join("_" if i in touched else n for i, n in enumerate(names))
    zeros = argument(node, "mode", 2, "constant") != "constant" or not argument(node, "value", 3)
    return f"{side} -> {side} | {'linear' if zeros and len(after) == len(before) else 'affine'}"


def new_tensor(node: fx.Node) -> str:
    """`new_zeros` and similar ops take only dtype and device from their tensor.

    But a dim that is as long as one of that tensor's dims is mostly the same index. It is split with it, so that not
    every rank has to make the whole new tensor.
    """
    before, after = input_shape(node), tuple(node.meta["val"].shape)
    names = letters(len(before))
    unmatched, side = dict(zip(names, before, strict=True)), []
    for dim, length in enumerate(after):
        equal = [name for name, other in unmatched.items() if other == length > 1]
        name = names[dim] if dim < len(names) and names[dim] in equal else next(iter(equal), "_")
        unmatched.pop(name, None)
        side.append(name)
    notes = [f"{name} {'whole idle' if name in unmatched else '@shape'}" for name in names]
    return f"{' '.join(names)} -> {' '.join(side)}{' | ' + ', '.join(notes) if notes else ''}"


def filled(node: fx.Node) -> str:
    """`zeros` and similar ops: each rank makes its part."""
    names = letters(len(node.meta["val"].shape))
    return f"[]? -> {' '.join(names)}{' | ' + ', '.join(f'{n} @shape' for n in names) if names else ''}"  # no input


def searchsorted(node: fx.Node) -> str | None:
    """`searchsorted(sequence, values, sorter)`: one sequence for all values, or one for each row of values."""
    is_single = len(input_shape(node)) == 1
    rows, values = ("n!", "...") if is_single else ("... n!", "... m")
    after = values if len(tensors(node)) > 1 and output_shapes(node)[0] else ""
    return by_name(
        "sequence values", after, sequence=rows, sorted_sequence=rows, values=values, input=values, sorter=rows
    )(node)


def positions(node: fx.Node) -> str:
    """`nonzero_static`: the first nonzero elements of the whole tensor, so that nothing can be split."""
    return f"{' '.join('_' * len(input_shape(node)))} -> _ _"


RULES: dict[str, str | Writer] = {
    "searchsorted": searchsorted,
    "bucketize": by_name("input boundaries", "...", input="...", boundaries="n!"),
    "nonzero_static": positions,
    "gather": gather,
    "take_along_dim": take_along,
    "index_select": index_select,
    "scatter scatter_add scatter_reduce": scatter,
    "index_add index_copy index_fill": index_write,
    "tril triu": "... m! n! -> ... m! n! | linear",
    "pad": pad,
    "new_zeros new_ones new_full new_empty": new_tensor,
    "zeros ones full empty": filled,
}
