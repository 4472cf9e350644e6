"""Layouts of op results and of parameters by layer: the rows of the trees in the text and HTML reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.layout import Layout, Placement
from autopar.plans import NodePlan, ParameterPlan, Plan
from autopar.report.folding import Line, fold

MEANING = {
    "R": "R replicated",
    "R+": "R+ replicated, its gradient a partial sum",
    "S": "Sd sharded on dim d",
    "@": "Sd@n sharded on dim d within each of n outer parts",
    "P": "P partial sum, not yet reduced",
}
# Ops that only view or copy a tensor: their results' layouts follow from their input's, so reports leave them out.
_VIEWS = {
    *("getitem", "view", "view_as", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "expand", "expand_as"),
    *("transpose", "t", "permute", "movedim", "swapaxes", "split", "chunk", "narrow", "select"),
    *("contiguous", "clone", "detach", "to", "size"),
}
# Words for the factors (indices) of sharding rules by op; in the rules of other ops the letters have no meaning.
_PRODUCT = {"m": "rows", "k": "summed dim", "n": "columns", "b": "batch"}
_CONVOLUTION = {"b": "batch", "i": "input channels", "o": "output channels", "g": "groups"}
_NORM = {"b": "batch", "c": "channels"}
_WORDS = {
    "linear": {"i": "input features", "o": "output features"},
    "embedding": {"v": "vocabulary", "d": "width"},
    "cross_entropy": {"v": "vocabulary", "x": "tokens"},
    "scaled_dot_product_attention": {"b": "batch", "h": "heads", "q": "query positions"},
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "addmm", "outer"), _PRODUCT),
    **{f"conv{t}{n}d": _CONVOLUTION for t in ("", "_transpose") for n in (1, 2, 3)},
    **dict.fromkeys(("batch_norm", "group_norm", "instance_norm"), _NORM),
}


@dataclass(frozen=True)
class Ops:
    """Consecutive ops of a module whose results have equal layouts; `shape` and `factors` are those of the last op."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    layout: Layout
    factors: tuple[str, ...]  # one word per mesh axis; "" if the axis splits nothing that has a word

    def join(self, after: Ops) -> Ops | None:
        if self.layout != after.layout or len(self.shape) != len(after.shape):
            return None
        names = self.names if self.names[-1] == after.names[-1] else self.names + after.names
        return replace(after, names=names)


@dataclass(frozen=True)
class Stored:
    """A parameter as it is stored, and the collectives that move it and its gradient in a step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    storage: Layout
    moved: str


def layout_tree(plan: Plan) -> list[Line[Ops]]:
    """The results of ops that compute tensors from tensors; views, inputs and parameters are left out."""
    return fold([(node.scope, ops) for node in plan.nodes for ops in _ops(node)], Ops.join)


def _ops(node: NodePlan) -> Iterable[Ops]:
    name = node.target.rpartition(".")[2].strip("_")
    if node.inputs and node.outputs and name not in _VIEWS:
        layout = node.outputs[0]
        factors = node.factors if len(node.factors) == len(layout) else ("",) * len(layout)
        words = _WORDS.get(name, {})
        yield Ops((name,), node.shapes[0], layout, tuple(words.get(f.rstrip("0123456789"), "") for f in factors))


def parameter_tree(plan: Plan) -> list[Line[Stored]]:
    moved: defaultdict[str, dict[str, list[str]]] = defaultdict(dict)
    for c in sorted(plan.collectives, key=lambda c: c.axis):
        for name in plan.served(c):
            axes = moved[name].setdefault(c.kind.replace("_", "-"), [])
            if plan.axis_names[c.axis] not in axes:
                axes.append(plan.axis_names[c.axis])
    rows = [(p.name.rpartition(".")[0], _stored(p, moved[p.name])) for p in plan.parameters]
    return fold(rows)


def _stored(parameter: ParameterPlan, moved: dict[str, list[str]]) -> Stored:
    kinds = {kind: f"{kind} {'+'.join(axes)}" for kind, axes in sorted(moved.items())}
    if parameter.regather and "all-gather" in kinds:
        kinds["all-gather"] += " twice"
    dtype = parameter.dtype.removeprefix("torch.") + ("" if parameter.trainable else ", frozen")
    name = parameter.name.rpartition(".")[2]
    return Stored(name, parameter.shape, dtype, parameter.storage, ", ".join(kinds.values()))


def labelled(label: str, names: Sequence[str]) -> str:
    """The text of a module and its ops; of more than four, those in the middle are left out."""
    text = ", ".join(names) if len(names) <= 4 else ", ".join([*names[:2], f"… {len(names) - 3} more …", names[-1]])
    return f"{label} · {text}" if label else f"· {text}"


def show_shape(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def meaning_of(placement: Placement) -> str:
    """The key of `MEANING` that explains a placement."""
    text = str(placement)
    return "@" if "@" in text else text[0] if text[0] in "SP" else text
