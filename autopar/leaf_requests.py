"""Leaves in a plan: those the user asked for, and how much of a model may be in the others.

A leaf is one op that runs whole on every rank, unless it is known to work on each row of the batch alone
(`leaf_splits`). The planner makes leaves of modules whose way depends on data; of those that run whole, more than
`LARGEST_SHARE` of the model's FLOPs is an error, unless the constraint `leaf:PATTERN` asks for it. The pattern is one
of `fnmatch` on module paths, and the modules it matches are leaves in any case.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import fx, nn

from autopar.cost.annotation import total_flops
from autopar.errors import InputError, UntraceableError
from autopar.graph import COST, PLACE
from autopar.leaf_calls import LeafCall

LARGEST_SHARE = 0.1
_KIND = "leaf:"


class LeafWarning(UserWarning):
    """A module is one op in the plan: it runs whole on every rank, or is split on the batch alone."""


def split_requests(constraints: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The constraints that ask for leaves, and the others.

    >>> split_requests(["fsdp", "leaf:layers.*.experts"])
    (('leaf:layers.*.experts',), ('fsdp',))
    """
    found = [text.strip() for text in constraints]
    return (
        tuple(text for text in found if text.startswith(_KIND)),
        tuple(text for text in found if not text.startswith(_KIND)),
    )


def asked_for(model: nn.Module, constraints: Iterable[str]) -> Callable[[nn.Module, str], bool] | None:
    """Whether a module at a path is to be a leaf; None where nothing is asked. InputError where nothing matches."""
    requests, _ = split_requests(constraints)
    patterns = [text.removeprefix(_KIND).strip() for text in requests]
    paths = [path for path, _ in model.named_modules() if path]
    for text, pattern in zip(requests, patterns, strict=True):
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise InputError(
                f"constraint '{text}' matches nothing: no module is called '{pattern}' "
                "(write 'leaf:PATTERN', where the pattern is that of module paths)"
            )
    return (lambda module, path: any(fnmatchcase(path, pattern) for pattern in patterns)) if patterns else None


def reason_told(modules: Sequence[str], kind: str, why: str, *, split: bool) -> str:
    """The warning about modules of one kind that had to be leaves; `split`: they can be split on the batch."""
    others = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    then = "is one op, which only the batch splits" if split else "cannot be traced and will run whole on every rank"
    return f"{modules[0]}{others} ({kind}) {then}: {why}"


def check_shares(graph: fx.Graph, reasons: Mapping[nn.Module, str], constraints: Iterable[str]) -> None:
    """Raise UntraceableError where leaves that nobody asked for hold too much of an annotated graph.

    `reasons`: why modules could not be traced. Leaves in the same place of repeated layers count together.
    Their FLOPs are estimates (see `NodeCost.estimated`).
    """
    patterns = [text.removeprefix(_KIND).strip() for text in split_requests(constraints)[0]]
    alike: dict[str, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        call = node.target
        if not isinstance(call, LeafCall) or call.rule is not None:
            continue
        if not any(fnmatchcase(call.path, pattern) for pattern in patterns):
            alike[re.sub(r"(?<![^.])\d+(?![^.])", "*", call.path)].append(node)
    total = sum(total_flops(graph))
    for pattern, nodes in alike.items():
        costs = [node.meta[COST] for node in nodes]
        share = sum(cost.flops_forward + cost.flops_backward for cost in costs) / max(total, 1)
        if share > LARGEST_SHARE:
            call = nodes[0].target
            assert isinstance(call, LeafCall)
            what = f"{len(nodes)} {call.noun}s '{pattern}'" if len(nodes) > 1 else f"{call.noun} '{call.path}'"
            what += f" ({type(call.module).__name__})" if call.noun == LeafCall.noun else ""
            reason = call.reason or reasons.get(call.module, "a registered leaf")
            reason += f"; nor can the batch split it: {call.whole}" if call.whole and call.whole not in reason else ""
            accepting = "" if call.reason else f", or accept it with constraints='{_KIND}{pattern}'"
            raise UntraceableError(
                f"{what} would run whole on every rank, with about {share:.0%} of the "
                f"model's FLOPs (an estimate), because of this: {reason}. Write "
                "it without branches on data (mixtures of experts of transformers have "
                "experts_implementation='grouped_mm'), give the input that decides as a known example "
                f"(autopar.tracing.known){accepting}",
                where=", ".join(filter(None, [call.path, nodes[0].meta.get(PLACE, "")])),
            )
