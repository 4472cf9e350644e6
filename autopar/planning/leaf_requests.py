"""Leaves in a plan: those that the user asked for, and a limit on the FLOPs in the others.

A leaf is one op that runs whole on every rank, unless it is proven to treat each row of the batch independently
(`leaf_splits`). The planner makes leaves of modules whose control flow depends on data. It is an error if leaves that
run whole hold more than `LARGEST_SHARE` of the model's FLOPs, unless the constraint `leaf:PATTERN` accepts them.
PATTERN is matched (`fnmatch`) against module paths, and modules that match become leaves in any case. A method that had
to become a leaf has a path too ("forward", "decoder.unroll"): a matching pattern accepts the leaf, but does not make a
leaf of a method that can be traced.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import fx, nn

from autopar.arguments.near_names import did_you_mean
from autopar.cost.ops.annotation import total_flops
from autopar.errors import InputError, UntraceableError
from autopar.graph import COST, PLACE
from autopar.leaf_calls import LeafCall
from autopar.user_warnings import AutoparWarning, warn

LARGEST_SHARE = 0.1  # of the model's FLOPs, in leaves that run whole and were not asked for
_KIND = "leaf:"


class LeafWarning(AutoparWarning):
    """A module is one op in the plan: it runs whole on every rank, or is sharded only on the batch."""


def split_requests(constraints: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The constraints that ask for leaves, and the others.

    >>> split_requests(["fsdp", "leaf:layers.*.experts"])
    (('leaf:layers.*.experts',), ('fsdp',))
    """
    texts = [text.strip() for text in constraints]
    return (
        tuple(text for text in texts if text.startswith(_KIND)),
        tuple(text for text in texts if not text.startswith(_KIND)),
    )


def asked_for(model: nn.Module, constraints: Iterable[str]) -> Callable[[nn.Module, str], bool] | None:
    """A predicate that tells whether the module at a path shall be a leaf; None where no module is asked for."""
    patterns = list(_patterns(constraints).values())
    if not patterns or not any(_is_asked(path, patterns) for path in _paths(model)):
        return None
    return lambda module, path: _is_asked(path, patterns)


def check_requests(model: nn.Module, graph: fx.Graph, constraints: Iterable[str]) -> None:
    """Raise InputError where a request matches neither a module nor a leaf of the traced graph."""
    patterns = _patterns(constraints)
    if not patterns:
        return
    paths = [*_paths(model), *(node.target.path for node in graph.nodes if isinstance(node.target, LeafCall))]
    for text, pattern in patterns.items():
        if not any(_is_asked(path, [pattern]) for path in paths):
            raise InputError(
                f"constraint '{text}' matches nothing: no module is called '{pattern}', and no function that could "
                "not be traced (write 'leaf:PATTERN', where the pattern is that of module paths)"
                + did_you_mean(pattern, paths)
            )


def is_accepted(call: LeafCall, constraints: Iterable[str]) -> bool:
    """Whether the user asked for a leaf."""
    return _is_asked(call.path, _patterns(constraints).values())


def _paths(model: nn.Module) -> list[str]:
    return [path for path, _ in model.named_modules() if path]


def _patterns(constraints: Iterable[str]) -> dict[str, str]:
    """The path patterns of leaf requests, by the text of the request."""
    return {text: text.removeprefix(_KIND).strip() for text in split_requests(constraints)[0]}


def _is_asked(path: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def warn_of_leaves(graph: fx.Graph, reasons: Mapping[nn.Module, str], constraints: Sequence[str]) -> None:
    """One LeafWarning for each kind of leaves that nobody asked for. `reasons`: why modules could not be traced."""
    paths_by_kind: dict[tuple[str, str, bool], list[str]] = {}
    for node in graph.nodes:
        call = node.target
        if not isinstance(call, LeafCall) or is_accepted(call, constraints):
            continue
        is_module = call.noun == LeafCall.noun
        why = reasons.get(call.module) if is_module else call.reason
        if why is not None:  # otherwise it is a registered leaf
            kind = type(call.module).__name__ if is_module else call.noun
            paths = paths_by_kind.setdefault((kind, why, call.rule is not None), [])
            if not is_module or call.path not in paths:  # a module may be called twice
                paths.append(call.path)
    for (kind, why, split), paths in paths_by_kind.items():
        others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        then = (
            "is one op, which only the batch splits" if split else "cannot be traced and will run whole on every rank"
        )
        warn(f"{paths[0]}{others} ({kind}) {then}: {why}", LeafWarning)


def check_shares(graph: fx.Graph, reasons: Mapping[nn.Module, str], constraints: Iterable[str]) -> None:
    """Raise UntraceableError where leaves that nobody asked for hold too many of an annotated graph's FLOPs.

    `reasons`: why modules could not be traced. Leaves at the same place of repeated layers are counted together. Their
    FLOPs are estimates (see `NodeCost.estimated`).
    """
    calls_by_pattern: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        call = node.target
        if isinstance(call, LeafCall) and call.rule is None and not is_accepted(call, constraints):
            calls_by_pattern[re.sub(r"(?<![^.])\d+(?![^.])", "*", call.path)].append(node)
    total = sum(total_flops(graph)) if calls_by_pattern else 0
    for pattern, nodes in calls_by_pattern.items():
        costs = [node.meta[COST] for node in nodes]
        share = sum(cost.flops_forward + cost.flops_backward for cost in costs) / max(total, 1)
        if share > LARGEST_SHARE:
            call = nodes[0].target
            assert isinstance(call, LeafCall)
            subject = f"{len(nodes)} {call.noun}s '{pattern}'" if len(nodes) > 1 else f"{call.noun} '{call.path}'"
            subject += f" ({type(call.module).__name__})" if call.noun == LeafCall.noun else ""
            reason = (call.reason or reasons.get(call.module, "a registered leaf")).rstrip(".")
            reason += f"; nor can the batch split it: {call.whole}" if call.whole and call.whole not in reason else ""
            raise UntraceableError(
                f"{subject} would run whole on every rank, with about {share:.0%} of the "
                f"model's FLOPs (an estimate), because of this: {reason}. Write it so that it can be traced (where "
                "data decide: mixtures of experts of transformers have experts_implementation='grouped_mm'; or give "
                "the input that decides as a known example, autopar.known), or accept it with "
                f"constraints='{_KIND}{pattern}'",
                where=", ".join(filter(None, [call.path, nodes[0].meta.get(PLACE, "")])),
            )
