"""What a traced call has returned, and what it has changed in the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from autopar.calls.states import State
from autopar.tracing.model_state.changed_state import ChangedAttributes
from autopar.tracing.model_state.plain_reads import PlainReads


@dataclass
class CallOutcome:
    """What a traced call has returned, and what it has changed in the model.

    `reads`: the plain values that forward has read. `states`: attributes that are inputs of the call. `output`: the
    arguments of the graph's output node: what forward returned, then what it set on modules; `out_spec` and `set_spec`
    rebuild these. `numbers`: the places of unknown numbers in `output`. `leaves`: modules whose own code runs at each
    call. `unread`: states, by their arguments, that forward has not read. `left_beside`: lines that store tensors
    elsewhere.
    """

    reads: PlainReads
    states: tuple[State, ...]
    changed: ChangedAttributes
    out_spec: pytree.TreeSpec
    set_spec: pytree.TreeSpec
    output: tuple[Any, ...]
    numbers: frozenset[int]
    leaves: list[nn.Module]
    unread: set[str]
    left_beside: tuple[str, ...]
