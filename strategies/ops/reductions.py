"""Reductions, and ops along one dim that need it whole."""

from __future__ import annotations

from torch import fx

from autopar.strategies.arguments import (
    Writer,
    argument,
    dims_of,
    input_shape,
    integers,
    letters,
    op_name,
    output_shapes,
    tensors,
)


def reduction(notes: str, *, factor_notes: str = "", split: bool = True, position: int = 1) -> Writer:
    """A reduction over `dim` (default: all dims). `factor_notes`: the notes on each reduced factor; `split`: whether
    reduced factors can be split.

    `position` is the place of `dim` among the arguments.
    """

    def write(node: fx.Node) -> str:
        rank = len(input_shape(node))
        names = letters(rank)
        name = "axis" if "axis" in node.kwargs else "dim"
        dims = set(dims_of(integers(node, name, position), rank))
        keepdim = len(output_shapes(node)[0]) == rank and rank > 0
        inside = [n if split or i not in dims else f"{n}!" for i, n in enumerate(names)]
        outside = [n if i not in dims else "1" for i, n in enumerate(names) if keepdim or i not in dims]
        extra = [f"{names[i]} {factor_notes}" for i in sorted(dims)] if factor_notes and split else []
        notes_text = ", ".join([*([notes] if notes else []), *extra])
        outputs = ", ".join([" ".join(outside)] * len(output_shapes(node)))
        return f"{' '.join(inside)} -> {outputs}{' | ' + notes_text if notes_text else ''}"

    return write


def extremum(node: fx.Node) -> str | None:
    """`max` and `min`: of two tensors elementwise; of one tensor as a whole or along a dim (values and indices)."""
    if len(tensors(node)) == 2:
        return "..., ... -> ..."
    return reduction("", factor_notes="@extremum whole", split=len(output_shapes(node)) == 1)(node)


def along(position: int = 1, notes: str = "", name: str = "dim", default: int | None = None) -> Writer:
    """A writer for ops along `dim`, which stays whole; all other dims can be split. If no `dim` is given and there is
    no default, all dims are meant."""

    def write(node: fx.Node) -> str:
        rank = len(input_shape(node))
        dims = dims_of(argument(node, name, position, default), rank)
        side = " ".join(f"{n}!" if i in dims else n for i, n in enumerate(letters(rank)))
        return f"{side} -> {side}{' | ' + notes if notes else ''}"

    return write


def log_softmax(node: fx.Node) -> str | None:
    """`dim` can be split: local code reduces the sum of exponentials over ranks, as a loss with split classes needs."""
    names = letters(len(input_shape(node)))
    dim = argument(node, "dim", 1)
    if dim is None or not names:
        return along()(node)
    return f"{' '.join(names)} -> {' '.join(names)} | {names[dim % len(names)]} @log_softmax plain"


def select_along(node: fx.Node) -> str:
    """`topk` and `sort`: the dim stays whole; values and indices have the same dims."""
    rank = len(input_shape(node))
    dim = argument(node, "dim", 2 if op_name(node) == "topk" else 1, -1)
    side = " ".join("_" if i == dim % rank else n for i, n in enumerate(letters(rank))) if rank else ""
    return f"{side} -> {side}, {side}"


def histogram(node: fx.Node) -> str:
    """Counts of parts add up if the bounds are given; otherwise the bounds are the extrema of the whole tensor."""
    has_bounds = argument(node, "min", 2, 0) < argument(node, "max", 3, 0)
    return "... -> _" if has_bounds else "...! -> _"


RULES: dict[str, str | Writer] = {
    "sum": reduction("linear"),
    "mean": reduction("linear", factor_notes="@mean"),
    "amax amin": reduction("", factor_notes="@extremum whole"),
    "max min": extremum,
    "count_nonzero": reduction(""),
    "var std prod all any argmax argmin logsumexp var_mean std_mean": reduction("", split=False),
    "norm linalg_vector_norm": reduction("", split=False, position=2),
    "histc": histogram,
    "softmax softmin": along(),
    "log_softmax": log_softmax,
    "cumsum": along(notes="linear"),
    "cumprod logcumsumexp": along(),
    "flip": along(notes="linear", name="dims"),
    "roll": along(2, notes="linear", name="dims"),
    "topk sort": select_along,
    "normalize": along(2, default=1),
}
