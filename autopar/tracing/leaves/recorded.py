"""Recording a leaf's call: one node, whose outputs are found by running the leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from autopar.graph import TRIAL_FLOPS
from autopar.tracing.leaves import opaque
from autopar.tracing.leaves import which as leaves
from autopar.tracing.leaves.effects import Effects
from autopar.tracing.leaves.written_around import shares
from autopar.tracing.recorder import Recorder


def record_leaf(
    recorder: Recorder, module: nn.Module, path: str, call: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Record a leaf's call as one node; raises EffectError if it does more than return a result."""
    rule = leaves.rule_of(module)
    trial_flops = 0

    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal trial_flops
        if rule is not None:
            return rule(module, *args, **kwargs)
        recorder.in_leaf, effects = True, Effects(args, kwargs, module.parameters())
        try:
            outputs = call(module, *args, **kwargs)
        except Exception:  # a leaf may raise anything on data-free tensors
            outputs, trial_flops = opaque.outputs_of(
                module,
                path,
                recorder.attributes,
                args,
                kwargs,
                guessed=recorder.guessed,
                nodes=recorder.nodes,
                sharing=recorder.sharing,
            )
        finally:
            recorder.in_leaf = False
        effects.check()
        if shares(outputs, args, kwargs, list(module.buffers())):
            recorder.sharing.add(module)
        return outputs

    result = recorder.record_call(path, run, args, kwargs, op="call_module")
    if trial_flops:
        next(n for n in reversed(recorder.graph.nodes) if n.op == "call_module").meta[TRIAL_FLOPS] = trial_flops
    return result
