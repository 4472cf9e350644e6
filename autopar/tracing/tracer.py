"""`trace`: a model and examples of its inputs become an annotated graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any, Literal

import torch
from torch import fx, nn

from autopar.calls.entries import FORWARD, Entry
from autopar.calls.states import State
from autopar.tracing.attempt import Attempt, Options
from autopar.tracing.calls.free_sizes import FreeSizes, prove
from autopar.tracing.calls.inputs import Inputs, gather
from autopar.tracing.contents.mends import differs_by_mends
from autopar.tracing.errors import NotOneOpError, TraceError, UnknownDataError, UnrolledError, UnsetError, met_stand_in
from autopar.tracing.huggingface import bare_forward, register_caches
from autopar.tracing.leaves.functions import function_around, whole_forward
from autopar.tracing.leaves.which import LeafPolicy, LeafTypes, Predicate
from autopar.tracing.libraries import DataFreePaths
from autopar.tracing.model_state.caches import forget
from autopar.tracing.model_state.carried_states import with_states
from autopar.tracing.model_state.lost_warnings import warn_of_lost
from autopar.tracing.rewriting import bias
from autopar.tracing.traced import Traced
from autopar.user_warnings import warn


def trace(
    model: nn.Module | Callable[..., Any],
    meta_args: Mapping[str, Any],
    concrete_args: Mapping[str, Any] | None = None,
    *,
    bias_addition_split: bool = True,
    remove_inplace: bool = True,
    parameter_dtype: torch.dtype | None = None,
    loss_fn: Callable[..., Any] | None = None,
    without_loss: bool = False,
    same_inputs: bool = False,
    entry: Entry = FORWARD,
    states: Mapping[State, Any] | None = None,
    set_again: Mapping[State, bool | None] | None = None,
    trace_sizes: bool = True,
    device: torch.device | str | None = None,
    leaf_policy: Literal["flat", "layers"] = "flat",
    leaf_types: LeafTypes = (),
    non_leaf_types: Sequence[type[nn.Module]] = (),
    module_leaves: Mapping[type[nn.Module], Predicate] | Predicate | None = None,
    autowrap_functions: Sequence[Callable[..., Any]] = (),
    unsupported: Literal["raise", "leaf"] = "raise",
    trace_act_ckpt: bool = True,
    exporting: bool = False,
    prove_sizes: bool = False,
    max_nodes: int = 40_000,
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None = None,
) -> Traced:
    """Trace `model` on examples.

    `meta_args`: examples by argument name, which stay inputs; real or meta tensors, nested as the model takes them; an
    example wrapped in `known` may be read by the trace. `concrete_args`: values that are fixed. An argument with a
    default that is in neither is fixed to it, unless the default is a tensor, which becomes an input. `loss_fn(output,
    **extra)` is traced as well: its further arguments are inputs too, and the graph's output is the loss. With
    `without_loss`, the call leaves these arguments out. `same_inputs`: examples that are the same tensor are one input
    (default: each is its own). `entry`: what is called, by default the model itself. `states`: examples of attributes
    that carry over between calls; states that are found on the way are taken from the model. `set_again`: what an
    earlier trace has found (`FoundStates.set_again`).

    `parameter_dtype`: floating parameters and inputs have this dtype. `trace_sizes`: sizes that reach an op are nodes,
    else constants. `device`: the device that data-free tensors claim (default: that of the parameters, else of the
    examples, else cpu). Leaves: `leaf_policy` "flat" enters every module, "layers" keeps those of torch.nn as leaves;
    `leaf_types` (types or dotted names) and `module_leaves` (predicates of module and path, for all or by type) add
    leaves, `non_leaf_types` and the bias split enter some. `autowrap_functions` are one node each. With
    `unsupported="leaf"`, the smallest module around what cannot be traced becomes a leaf. `exporting`: libraries are
    told that they are being exported; by default only functions that asked for unknown data are. Past `max_nodes`,
    modules that unroll a loop become leaves, with a warning. `prove_sizes`: trace again at other sizes; dims that prove
    free may then differ between calls. `dynamic_shapes`: for tensor arguments, names of dims that are symbols; a branch
    that depends on one is refused.

    Raises InputError for names and values that do not fit the signature, TraceError with the place in the model for
    what cannot be traced.
    """
    root = model if isinstance(model, nn.Module) else FunctionModule(model)
    register_caches()
    with bare_forward(root):
        inputs = gather(
            root,
            meta_args,
            concrete_args or {},
            loss_fn,
            without_loss=without_loss,
            same_inputs=same_inputs,
            entry=entry,
        )
    options = Options(
        LeafPolicy(
            leaf_policy, leaf_types, non_leaf_types=tuple(non_leaf_types), predicates=module_leaves,
            opened=bias.is_split_layer if bias_addition_split else None, max_nodes=max_nodes,
        ),
        DataFreePaths(always=exporting),
        _device(root, inputs, device),
        bias_addition_split, remove_inplace, parameter_dtype, None if without_loss else loss_fn, trace_sizes,
        trace_act_ckpt, tuple(autowrap_functions), dynamic_shapes or {}, entry=entry,
    )  # fmt: skip
    contained = (TraceError, NotImplementedError) if unsupported == "leaf" else ()
    try:
        traced = with_states(
            root,
            inputs.with_states(states or {}, same_inputs=same_inputs),
            lambda inputs_with_states: trace_until_done(
                root, inputs_with_states, options, contained=contained, functions=unsupported == "leaf"
            ),
            lambda inputs_with_states: _trace_once(root, inputs_with_states, options),
            set_again or {},
        )
    finally:
        forget(options.remaining, root)
    warn_of_lost(root, traced.lost)
    if prove_sizes:
        traced.inputs = replace(traced.inputs, sizes=_free_sizes(root, traced.inputs, options, traced))
    return traced


def _free_sizes(root: nn.Module, inputs: Inputs, options: Options, traced: Traced) -> FreeSizes:
    def graph_of(tensors: Mapping[str, Any]) -> fx.Graph:
        graph = _trace_once(root, inputs.with_examples(tensors), options).graph
        forget(options.remaining, root)
        return graph

    return prove(traced.graph, {v.name: v.example for v in inputs.leaves if not v.known}, graph_of)


def _trace_once(root: nn.Module, inputs: Inputs, options: Options) -> Traced:
    attempt = Attempt(root, inputs, options)
    try:
        return attempt.run()
    finally:
        attempt.calls.release()


def trace_until_done(
    root: nn.Module,
    inputs: Inputs,
    options: Options,
    *,
    contained: tuple[type[Exception], ...],
    functions: bool = False,
) -> Traced:
    """Repeat the trace, from a clean start each time, until it succeeds or nothing more can be done.

    A library function that asked for unknown data takes its data-free path. An error in `contained` makes the smallest
    module around it a leaf; where that is the root, the smallest function, if `functions` may be leaves too. Other
    errors are raised.
    """
    broken: Exception | None = None  # an error that leaves' guessed outputs may have caused
    innermost: dict[str, NotOneOpError] = {}  # by reason: the error of the innermost of nested functions
    attempt: Attempt | None = None
    while True:
        if attempt is not None:
            attempt.calls.release()
        attempt = Attempt(root, inputs, options)
        try:
            traced = attempt.run()
            if traced.assumptions:
                return _mended(root, inputs, options, traced)
            return traced
        except UnrolledError as error:
            warn(f"{error.message}: modules of this type are leaves")
            options.policy.unrolled[error.kind] = error.message
        except UnknownDataError as error:
            if options.paths.offer(error.frames):
                continue
            if not isinstance(error, contained):
                raise
            _become_leaf(attempt, options, error, functions, error)
        except UnsetError:
            raise
        except contained as error:
            _become_leaf(attempt, options, error, functions, _innermost_error(error, innermost))
        except Exception as error:
            policy = options.policy
            if (stand_in_error := met_stand_in(error)) is not None:
                if not contained:
                    raise stand_in_error from error
                _become_leaf(attempt, options, error, functions, stand_in_error)
                continue
            whole = _whole(root, options) if functions and (policy.failed or policy.functions) else None
            if whole is not None and broken is None:
                policy.functions[whole] = _reason(error, attempt, policy)
                broken = error
                continue
            if attempt.recorder.guessed:
                misled = TraceError(_reason(error, attempt, policy))
                _tell_of_leaves(misled, policy)
                raise misled from error
            _tell_of_leaves(error, policy)
            raise


def _innermost_error(error: Exception, innermost: dict[str, NotOneOpError]) -> Exception:
    return innermost.setdefault(error.reason, error) if isinstance(error, NotOneOpError) else error


def _mended(root: nn.Module, inputs: Inputs, options: Options, traced: Traced) -> Traced:
    """The graph that is valid for infinite activations too, if it only adds clamps; else `traced`, with a warning."""
    try:
        mended = _trace_once(root, inputs, replace(options, are_finite=False))
    except Exception:  # the path of an unhealthy step may raise or ask for more data
        mended = traced
    if mended is not traced and differs_by_mends(mended.graph, traced.graph):
        return replace(mended, assumptions=())
    warn(
        f"activations are assumed to be finite at {', '.join(traced.assumptions)}: what the model does otherwise is "
        "left out of the plan"
    )
    return traced


def _become_leaf(attempt: Attempt, options: Options, error: Exception, functions: bool, shown_error: Exception) -> None:
    """Make the innermost module a leaf from now on, or a function where that is the root; or raise `shown_error`."""
    root, policy = attempt.model, options.policy
    reason = error.reason if isinstance(error, NotOneOpError) else f"{type(error).__name__}: {error}"
    if attempt.calls.is_final:
        raise shown_error
    module = attempt.culprit(error)
    if module is not None and module is not root and module not in policy.failed:
        policy.failed.update(dict.fromkeys(_modules_like(root, module), reason))
        return
    function = function_around(error, policy.functions, attempt.called) or _whole(root, options) if functions else None
    if function is None:
        _tell_of_leaves(shown_error, policy)
        raise shown_error
    policy.add_function(function, reason, in_root=module is None or module is root)


def _reason(error: Exception, attempt: Attempt, policy: LeafPolicy) -> str:
    """Why the rest cannot be traced: `error`, unless an earlier leaf's guessed outputs may have caused it."""
    own = f"{type(error).__name__}: {error}"
    for module, fault in attempt.recorder.guessed.items():
        kind = type(module).__name__
        return f"{policy.failed.get(module, fault)}. What {kind} returns is a guess then, which led to {own}"
    return own


def _tell_of_leaves(error: Exception, policy: LeafPolicy) -> None:
    """Add notes to the error: why there are leaves, whose guessed outputs may have caused it."""
    leaves = [(type(module).__name__, why) for module, why in policy.failed.items()]
    leaves += [(function.__name__, why) for function, why in policy.functions.items()]
    for note in dict.fromkeys(f"{name} is a leaf, because {why}" for name, why in leaves if why not in str(error)):
        error.add_note(note)


def _whole(root: nn.Module, options: Options) -> FunctionType | None:
    """The root's own forward as the last candidate for a leaf, unless it was tried already.

    Not after a loop made the graph too long: to learn what it returns would run all its loops, more than once.
    """
    policy = options.policy
    return None if policy.unrolled else whole_forward(options.entry.of(root), policy.functions)


def _modules_like(root: nn.Module, module: nn.Module) -> list[nn.Module]:
    """The module and those at the same place of other layers, which would fail as well, each in its own trace."""
    places = {m: re.sub(r"\d+", "#", path) for path, m in root.named_modules()}
    return [module, *(m for m, place in places.items() if type(m) is type(module) and place == places.get(module))]


class FunctionModule(nn.Module):
    """A bare function as the root of a trace."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.forward = function


def _device(model: nn.Module, inputs: Inputs, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    for tensor in (*model.parameters(), *model.buffers(), *(leaf.example for leaf in inputs.leaves)):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")
