"""Ops that cut or join along a dim: split, chunk, unbind, slices; cat, stack.

If all cuts of a dim are at multiples of a unit, the dim is read as `(count unit)`, and the unit can be split, as a
strided shard, in the whole and in every piece. So the output of a fused qkv projection and its three pieces are sharded
on heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.strategies.arguments import Writer, argument, input_shape, is_zero, letters, output_shapes, tensors, value


def split(notes: str) -> Writer:
    """A writer for ops that cut `dim` into pieces of equal or different lengths."""

    def write(node: fx.Node) -> str:
        whole, pieces = input_shape(node), output_shapes(node)
        dim = argument(node, "dim", 2, 0) % len(whole)
        lengths = [piece[dim] for piece in pieces]
        unit = math.gcd(*lengths)
        names = letters(len(whole))
        before = _units(names, dim, unit, whole[dim])
        return f"{before} -> {', '.join(_units(names, dim, unit, length) for length in lengths)} | {notes}"

    return write


def cat(node: fx.Node) -> str:
    """Operands one after the other along `dim`; torch skips empty ones, which may be 1-D (an empty cache at first)."""
    parts, whole = [tuple(t.shape) for t in tensors(node)], output_shapes(node)[0]
    dim = argument(node, "dim", 1, argument(node, "axis", 1, 0)) % len(whole)
    full = [i for i, part in enumerate(parts) if 0 not in part]
    unit = math.gcd(*(parts[i][dim] for i in full))
    names = letters(len(whole))
    before = []
    for i, part in enumerate(parts):
        if i in full:
            before.append(_units(names, dim, unit, part[dim]))
        else:  # an empty operand; if its dims are those of the others, it has their layout and needs no conversion
            before.append(_hidden(names, dim) if len(part) == len(whole) else " ".join("_" * len(part)))
    together = "+".join(map(str, full))
    return f"{', '.join(before)} -> {_units(names, dim, unit, whole[dim])}{f' | linear:{together}' if full else ''}"


def _units(names: Sequence[str], dim: int, unit: int, length: int) -> str:
    """The text of the dims `names`, with dim `dim` as units (`(_ name=unit)`)."""
    cut = names[dim] if length == unit else f"(_ {names[dim]}={unit})"
    return " ".join(cut if i == dim else n for i, n in enumerate(names)) if unit > 1 else _hidden(names, dim)


def _hidden(names: Sequence[str], dim: int) -> str:
    return " ".join("_" if i == dim else n for i, n in enumerate(names))


def stack(node: fx.Node) -> str:
    """Joins operands along a new dim, which stays whole."""
    parts, whole = tensors(node), output_shapes(node)[0]
    names = letters(parts[0].dim())
    dim = argument(node, "dim", 1, 0) % len(whole)
    side = " ".join(names)
    return f"{', '.join([side] * len(parts))} -> {' '.join([*names[:dim], '_', *names[dim:]])} | linear"


def unbind(node: fx.Node) -> str:
    """One output for each index of a dim, which stays whole."""
    names = letters(len(input_shape(node)))
    dim = argument(node, "dim", 1, 0) % len(names)
    rest = " ".join(n for i, n in enumerate(names) if i != dim)
    return f"{_hidden(names, dim)} -> {', '.join([rest] * len(output_shapes(node)))} | linear"


def select(node: fx.Node) -> str:
    """Takes one index of a dim, which stays whole."""
    names = letters(len(input_shape(node)))
    dim = argument(node, "dim", 1) % len(names)
    return f"{_hidden(names, dim)} -> {' '.join(n for i, n in enumerate(names) if i != dim)} | linear"


def narrow(node: fx.Node) -> str:
    """Takes a range of indices of a dim; a start that is not a known number leaves every dim whole."""
    shape = input_shape(node)
    names = letters(len(shape))
    dim, start = argument(node, "dim", 1) % len(shape), argument(node, "start", 2)
    if not isinstance(start, int):
        return f"{' '.join('_' * len(shape))} -> {' '.join('_' * len(shape))}"
    before, after = _slice(names[dim], shape[dim], start % max(shape[dim], 1), output_shapes(node)[0][dim], 1)
    sides = [" ".join(cut if i == dim else n for i, n in enumerate(names)) for cut in (before, after)]
    return f"{' -> '.join(sides)} | linear @slice"


def _slice(name: str, length: int, start: int, elements: int, step: int) -> tuple[str, str]:
    """The text of a dim before and after the slice `start::step` of `elements` elements."""
    if elements == length and step == 1:
        return name, name
    if step > 1:
        whole_steps = length % step == 0 and start < step and elements == length // step
        return (f"({name}={elements} _)", name) if whole_steps else ("_", "_")
    unit = math.gcd(start, elements, length)
    if unit < 2:
        return "_", "_"
    return f"(_ {name}={unit})", name if elements == unit else f"(_ {name}={unit})"


def windows(node: fx.Node) -> str:
    """`Tensor.unfold(dim, size, step)`: windows of a dim; the elements of a window become the last dim.

    `F.unfold(input, kernel)`: blocks of images as columns. The spatial dims stay whole; channels are the outer digit of
    the dim of a column's elements.
    """
    rank = len(input_shape(node))
    names = letters(rank)
    if node.op != "call_method":
        return f"{'b ' if rank == 4 else ''}c _ _ -> {'b ' if rank == 4 else ''}(c _) _ | linear"
    dim = argument(node, "dimension", 1) % max(rank, 1)
    side = " ".join("_" if i == dim else n for i, n in enumerate(names))
    return f"{side} -> {side} _ | linear"


def fold(node: fx.Node) -> str:
    """`F.fold(input, output_size, kernel)`: sums blocks into images, the reverse of `windows`."""
    batch = "b " if len(input_shape(node)) == 3 else ""
    return f"{batch}(c _) _ -> {batch}c _ _ | linear"


def getitem(node: fx.Node) -> str | None:
    """`tensor[key]`: numbers, slices, None and ellipsis cut; integer tensors look up, and their dims go where torch
    puts them."""
    indexed = _indexed(input_shape(node), node.args[1])
    if indexed is None:
        return None
    before, after, lookups = indexed
    cut = any("(" in dim for dim in before)
    texts = ", ".join(map(" ".join, [before, *lookups]))
    return f"{texts} -> {' '.join(after)} | {'linear:0' if lookups else 'linear'}{' @slice' if cut else ''}"


def write(node: fx.Node) -> str | None:
    """`base` after `base[key] = value`, in functionalised graphs. Dims that the key takes whole can be split, in the
    base, the value and the result.

    Tensors in the key stay whole: pieces of them would be written into copies of the whole base on several ranks, and
    these copies could not be joined. Jointly linear in base and value, or in the base if zero is written.
    """
    mask = node.args[1][0] if isinstance(node.args[1], (tuple, list)) and len(node.args[1]) == 1 else node.args[1]
    if _is_tensor(mask) and value(mask).dtype == torch.bool:
        return _masked_write(node, value(mask).dim())
    indexed = _indexed(input_shape(node), node.args[1])
    if indexed is None:
        return None
    before, after, lookups = indexed
    before = ["_" if "(" in dim else dim for dim in before]
    texts = [before, *(["_"] * len(dims) for dims in lookups)]
    if _is_tensor(node.args[2]):
        rank = value(node.args[2]).dim()
        texts.append(["_" if "(" in dim or dim not in before else dim for dim in after][len(after) - rank :])
    return f"{', '.join(map(' '.join, texts))} -> {' '.join(before)}{_written(node, len(texts) - 1)}"


def _written(node: fx.Node, last: int) -> str:
    """The note on a write's linearity; `last`: the number of the value among the tensors, if it is a tensor."""
    if _is_tensor(node.args[2]):
        return f" | linear:0+{last}"
    return " | linear:0" if is_zero(node.args[2]) else ""


def _masked_write(node: fx.Node, masked: int) -> str | None:
    """`base[mask] = value`: the mask's dims can be split too if the value does not run along them; else no rule."""
    names = letters(len(input_shape(node)))
    texts = [names, names[:masked]]
    if _is_tensor(node.args[2]):
        shape = tuple(value(node.args[2]).shape)
        if len(shape) > len(names) - masked:
            return None
        texts.append(names[len(names) - len(shape) :])
    return f"{', '.join(map(' '.join, texts))} -> {' '.join(names)}{_written(node, len(texts) - 1)}"


def index_put(node: fx.Node) -> str | None:
    """`index_put(input, indices, values)`: splits the dims after the indexed ones; jointly linear in input and
    values."""
    indices = argument(node, "indices", 1)
    if any(i.dtype == torch.bool for i in indices):
        return None
    names = ["_" if i < len(indices) else n for i, n in enumerate(letters(len(input_shape(node))))]
    looked_up = max(i.dim() for i in indices)
    shape = tensors(node)[-1].dim()
    values = [*["_"] * looked_up, *names[len(indices) :]]
    texts = [names, *(["_"] * i.dim() for i in indices), values[len(values) - shape :]]
    return f"{', '.join(map(' '.join, texts))} -> {' '.join(names)} | linear:0+{len(texts) - 1}"


def _indexed(shape: Sequence[int], key: Any) -> tuple[list[str], list[str], list[list[str]]] | None:
    """The dims of a tensor, those of `tensor[key]`, and those of the tensors in the key.

    A mask whose contents are known when the model is traced (the result has a shape then) looks up one dim, as the
    numbers of its true elements would. None for a key that is not supported, as a mask beside other numbers.
    """
    index: list[Any] = list(key) if isinstance(key, (tuple, list)) else [key]
    index = [i if _is_tensor(i) else value(i) for i in index]
    listed = [i for i in index if isinstance(i, (list, tuple))]
    masks = [i for i in index if _is_tensor(i) and value(i).dtype == torch.bool]
    if any(isinstance(i, bool) for i in index) or (masks and not all(i in masks[:1] or _keeps(i) for i in index)):
        return None
    if len(listed) > 1 or (listed and (any(map(_is_tensor, index)) or not all(type(j) is int for j in listed[0]))):
        return None
    spans = [value(i).dim() if i in masks else i is not None and i is not Ellipsis for i in index]
    used = sum(spans)
    index = [j for i in index for j in ([slice(None)] * (len(shape) - used) if i is Ellipsis else [i])]
    index += [slice(None)] * (len(shape) - sum(value(i).dim() if i in masks else i is not None for i in index))
    shapes = [tuple(value(i).shape) for i in index if _is_tensor(i)]
    looked_up = ["_"] if listed or masks else [f"i{k}" for k in range(max(map(len, shapes), default=0))]
    names = iter(zip(letters(len(shape)), shape, strict=True))
    before: list[str] = []
    after: list[str] = []
    places: list[int] = []
    for i in index:
        if i is None:
            after.append("1")
            continue
        name, length = next(names)
        if i in masks:
            before += ["_"] * value(i).dim()
            for _ in range(value(i).dim() - 1):
                next(names)
            places.append(len(after))
        elif isinstance(i, slice):
            start, stop, step = i.indices(length)
            cut, uncut = _slice(name, length, start, len(range(start, stop, step)), step)
            before.append(cut)
            after.append(uncut)
        else:
            before.append("_")
            places += [] if isinstance(i, int) else [len(after)]
    if places:  # as in torch: the looked-up dims go to the front if another dim lies between the indexed ones
        position = places[0] if len(set(places)) == 1 else 0
        after[position:position] = looked_up
    if masks:
        return before, after, [["_"] * value(masks[0]).dim()]
    return before, after, [looked_up[len(looked_up) - len(s) :] for s in shapes]


def _keeps(item: Any) -> bool:
    """Whether an item of a key looks nothing up."""
    return item is None or item is Ellipsis or isinstance(item, slice)


def _is_tensor(item: Any) -> bool:
    return isinstance(item, fx.Node) and isinstance(value(item), torch.Tensor)


RULES: dict[str, str | Writer] = {
    "split split_with_sizes": split("linear @split"),
    "chunk tensor_split": split("linear"),
    "unbind": unbind,
    "cat concat concatenate": cat,
    "stack": stack,
    "select": select,
    "narrow": narrow,
    "unfold": windows,
    "fold": fold,
    "getitem": getitem,
    "write": write,
    "index_put": index_put,
}
