"""Schemes as an expert would choose by hand: roles of mesh axes, and presets, which give every axis a role.

======  ============================================================  ===================================
role    the axis                                                      options
======  ============================================================  ===================================
"dp"    splits the batch; parameters are read whole, stored freely
"ddp"   splits the batch; parameters are stored whole
"fsdp"  splits the batch; parameters are stored in shards             zero=3 (gathered again in backward),
                                                                      2 or 1 (kept until then)
"tp"    splits weights, which are read as shards, and not the batch   sequence=whole, split (between layers)
======  ============================================================  ===================================

==========  ==============================  =========================
preset      axes                            options
==========  ==============================  =========================
"ddp"       all "ddp"                       recompute
"fsdp"      all "fsdp"                      zero, recompute
"tp"        last "tp"; the others "ddp"     sequence, recompute
"fsdp+tp"   last "tp"; the others "fsdp"    zero, sequence, recompute
"hsdp"      first "ddp", the others "fsdp"  zero, recompute
==========  ==============================  =========================

Example: `fsdp+tp(zero=2, sequence=split, recompute=selective)`. recompute is never, selective (a part of each block) or
full, for all blocks; without it the planner decides. ZeRO-1 and ZeRO-2 are the same here: gradients are always reduced
into the shards that the optimizer updates. `sequence`: whether activations between tensor-parallel layers, such as
those of norms, are whole on the axis (Megatron-LM, 1909.08053) or split along the sequence (2205.05198). Norms inside
such a layer, such as those of queries and keys, run on the heads that a device has, and their gradients are summed.

A role restricts an op to the strategies that it asks for only if the op has one of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from autopar.cost.memory.formulas import StepMemory
from autopar.errors import InputError
from autopar.graph import BIAS_OF, tensor_of
from autopar.solver.constraints.restricted import RECOMPUTE, Recompute, Restricted
from autopar.strategies.strategy import Strategy

Test = Callable[[Strategy], bool]

PRESETS = ("ddp", "fsdp", "tp", "fsdp+tp", "hsdp")
ROLES = ("dp", "ddp", "fsdp", "tp")
_AXIS = "axis"
_OPTIONS: dict[str, tuple[str, ...]] = {"zero": ("1", "2", "3"), "sequence": ("whole", "split"), "recompute": RECOMPUTE}
_TAKES = {
    "dp": (), "ddp": (), "fsdp": ("zero",), "tp": ("sequence",), "fsdp+tp": ("zero", "sequence"), "hsdp": ("zero",)
}  # fmt: skip
_FORM = re.compile(r"([a-z+0-9]+)\s*(?:\(([^()]*)\))?")


class AxesError(InputError):
    """A preset needs a mesh with more axes."""


@dataclass(frozen=True)
class Role:
    """What a mesh axis is for. `storage` (of parameters) and `zero` apply if it splits the batch, `sequence` if it
    splits weights."""

    kind: Literal["batch", "weights"]
    storage: Literal["any", "whole", "sharded"] = "any"
    zero: int = 3
    sequence: Literal["whole", "split"] = "whole"


@dataclass(frozen=True)
class Scheme:
    """Roles by mesh axis, and the recompute that is asked of all blocks, if any."""

    roles: Mapping[int, Role]
    recompute: Recompute | None = None


def is_preset(text: str) -> bool:
    """Whether a constraint begins with the name of a preset.

    >>> is_preset("fsdp(zero=2)"), is_preset("axis:dp = fsdp")
    (True, False)
    """
    return text.partition("(")[0].strip() in PRESETS


def is_scheme(text: str) -> bool:
    """Whether a constraint is a preset or the role of an axis."""
    return is_preset(text) or text.partition(":")[0].strip() == _AXIS


def check_preset(text: str) -> None:
    """Raises InputError if the options of a preset are malformed; the mesh does not matter."""
    _read(text, text, PRESETS, ("recompute",))


def scheme_of(texts: Sequence[str], mesh_shape: Sequence[int], axis_names: Sequence[str]) -> Scheme:
    """The scheme that constraints (a preset, or roles of axes) state together.

    Raises InputError for a constraint that is malformed, and for two that give the same axis a role.
    """
    roles: dict[int, Role] = {}
    texts_by_axis: dict[int, str] = {}
    recompute: Recompute | None = None
    for text in texts:
        if is_preset(text):
            roles_of_text, recompute_of_text = _preset(text, len(mesh_shape))
            recompute = recompute_of_text or recompute
        else:
            roles_of_text = _axis(text, axis_names)
        for axis, role in roles_of_text.items():
            if texts_by_axis.get(axis, text) != text:
                name = axis_names[axis]
                raise InputError(
                    f"constraints '{texts_by_axis[axis]}' and '{text}' both give axis '{name}' a role: keep one"
                )
            roles[axis], texts_by_axis[axis] = role, text
    return Scheme(roles, recompute)


def _preset(text: str, axes: int) -> tuple[dict[int, Role], Recompute | None]:
    name, options = _read(text, text, PRESETS, ("recompute",))
    if name in ("fsdp+tp", "hsdp") and axes < 2:
        raise AxesError(f"constraint '{text}' needs a mesh of two axes or more, this one has {axes}")
    whole, sharded, last = _role("ddp", options), _role("fsdp", options), _role("tp", options)
    batch = whole if name in ("ddp", "tp") else sharded
    roles = [batch] * axes
    if "tp" in name:
        roles[-1] = last
    if name == "hsdp":
        roles[0] = whole
    return dict(enumerate(roles)), options.get("recompute")


def _axis(text: str, axis_names: Sequence[str]) -> dict[int, Role]:
    if sign := re.search(r"!=|~|==", text):
        raise InputError(
            f"constraint '{text}': a role is given with = alone, not with {sign[0]}; write 'axis:NAME = role' with one "
            f"of {', '.join(ROLES)}, or forbid layouts by name, as in 'param:* != S0'"
        )
    head, equals, role = (part.strip() for part in text.partition("="))
    name = head.partition(":")[2].strip()
    if not equals:
        raise InputError(f"constraint '{text}': write 'axis:NAME = role' with a role of {', '.join(ROLES)}")
    names = [*axis_names, *map(str, range(len(axis_names)))]
    if name not in names:
        raise InputError(f"constraint '{text}' matches nothing: the mesh's axes are called {', '.join(names)}")
    return {names.index(name) % len(axis_names): _role(*_read(text, role, ROLES))}


def _read(text: str, role: str, names: Sequence[str], common: Sequence[str] = ()) -> tuple[str, dict[str, Any]]:
    """The name and options of `name(option=value, ...)`; the options in `common` are allowed with every name."""
    match = _FORM.fullmatch(role.strip())
    if match is None or match[1] not in names:
        raise InputError(f"constraint '{text}': '{role.strip()}' is none of {', '.join(names)}")
    allowed = (*_TAKES[match[1]], *common)
    options = {}
    for part in filter(None, (part.strip() for part in (match[2] or "").split(","))):
        option, _, value = (piece.strip() for piece in part.partition("="))
        if option not in allowed or value not in _OPTIONS[option]:
            can = "; ".join(f"{name}={' or '.join(_OPTIONS[name])}" for name in allowed) or "none"
            raise InputError(f"constraint '{text}': '{part}' is no option of '{match[1]}', which takes: {can}")
        if option in options:
            raise InputError(f"constraint '{text}' gives '{option}' twice: give it once")
        options[option] = value
    return match[1], options


def _role(name: str, options: Mapping[str, Any]) -> Role:
    if name == "tp":
        return Role("weights", sequence=options.get("sequence", "whole"))
    if name == "fsdp":
        return Role("batch", "sharded", int(options.get("zero", 3)))
    return Role("batch", "whole" if name == "ddp" else "any")


# -- strategies that roles leave --------------------------------------------------------------------------------------


def arrange(restricted: Restricted, memory: StepMemory, scheme: Scheme) -> Restricted:
    """Restrict the strategies to those in which the mesh axes have their roles."""
    if not scheme.roles:
        return restricted
    batch = {axis: role for axis, role in scheme.roles.items() if role.kind == "batch"}
    tensor = {axis: role for axis, role in scheme.roles.items() if role.kind == "weights"}
    sharded = {axis: role for axis, role in batch.items() if role.storage == "sharded"}
    whole = [axis for axis, role in batch.items() if role.storage == "whole"]
    decided = len(scheme.roles) == len(memory.mesh_shape) and all(role.storage != "any" for role in batch.values())
    strategies, regather = dict(restricted.strategies), dict(restricted.regather)
    for node, options in restricted.strategies.items():
        if memory.is_parameter(node):
            strategies[node] = _stored(options, list(sharded), whole)
            if sharded or decided:
                regather[node] = any(role.zero == 3 for role in sharded.values())
            continue
        inputs = [i for i, ref in enumerate(memory.inputs[node]) if memory.is_parameter(ref.node)]
        if not inputs or node.op == "output":
            continue
        wide = [i for i in inputs if tensor_of(memory.inputs[node][i]).dim() > 1]
        others = {i: tensor_of(ref).dim() for i, ref in enumerate(memory.inputs[node]) if i not in inputs}
        for axis in batch:
            options = _preferred(options, _splits_batch(axis, inputs, others), _whole(axis, inputs))
        for axis, role in tensor.items():
            between = _sums_nothing(axis, inputs)
            if role.sequence == "split":
                split = _splits_sequence(axis, inputs, others)
                between = _either(between, split) if BIAS_OF in node.meta else split
            elif BIAS_OF not in node.meta:
                heads = {i: rank for i, rank in others.items() if rank > 3}  # batch, sequence, head, features
                between = _either(between, _splits_sequence(axis, inputs, heads))
            options = _preferred(options, _splits_weights(axis, wide, inputs), between, _sums_nothing(axis, inputs))
        strategies[node] = options
    arranged = replace(restricted, strategies=strategies, regather=regather)
    return (
        arranged
        if scheme.recompute is None
        else arranged.recomputing(dict.fromkeys(memory.graph.nodes), scheme.recompute)
    )


def _preferred(options: Sequence[Strategy], *tests: Test) -> Sequence[Strategy]:
    """The strategies that pass the first test which any strategy passes; all if none passes any."""
    for test in tests:
        passing = tuple(s for s in options if test(s))
        if passing:
            return passing
    return options


def _either(first: Test, second: Test) -> Test:
    return lambda s: first(s) or second(s)


def _splits_batch(axis: int, inputs: Sequence[int], others: Mapping[int, int]) -> Test:
    """Data parallel: activations (`others`: their ranks by input) are split on dim 0, parameters are read whole."""
    split = [i for i, rank in others.items() if rank]

    def test(s: Strategy) -> bool:
        whole = all(s.inputs[i][axis].is_replicated for i in inputs)
        return whole and any(s.inputs[i][axis].dim == 0 for i in split)

    return test


def _whole(axis: int, inputs: Sequence[int]) -> Test:
    """The test that parameters are read whole."""
    return lambda s: all(s.inputs[i][axis].is_replicated for i in inputs)


def _sums_nothing(axis: int, inputs: Sequence[int]) -> Test:
    """The test that no parameter's gradient is summed over the axis: a bias is whole, or sharded as the tensor that it
    is added to."""
    return lambda s: not any(s.inputs[i][axis].partial_grad for i in inputs)


def _splits_weights(axis: int, wide: Sequence[int], inputs: Sequence[int]) -> Test:
    """Tensor parallel: matrices (`wide`) are read as shards, and no parameter's gradient is summed over the axis."""
    sums_nothing = _sums_nothing(axis, inputs)
    return lambda s: bool(wide) and sums_nothing(s) and all(s.inputs[i][axis].is_sharded for i in wide)


def _splits_sequence(axis: int, inputs: Sequence[int], others: Mapping[int, int]) -> Test:
    """Sequence parallel: an activation is split neither on the last dim (features) nor, if it has more than two dims,
    on the first (batch); parameters are read whole."""

    def test(s: Strategy) -> bool:
        whole = all(s.inputs[i][axis].is_replicated for i in inputs)
        return whole and any(
            s.inputs[i][axis].is_sharded and (0 if rank > 2 else -1) < s.inputs[i][axis].dim < rank - 1
            for i, rank in others.items()
        )

    return test


def _stored(options: Sequence[Strategy], sharded: Sequence[int], whole: Sequence[int]) -> Sequence[Strategy]:
    """Storage: sharded over as many axes of `sharded` as possible, whole over those of `whole`, free over the others.

    On a tensor-parallel axis, the cheapest storage is the layout in which the parameter is read.
    """
    options = tuple(s for s in options if not any(s.outputs[0][a].is_sharded for a in whole))
    for count in range(len(sharded), 0, -1):
        passing = tuple(s for s in options if sum(s.outputs[0][a].is_sharded for a in sharded) >= count)
        if passing:
            return passing
    return options
