"""What is replaced or switched while a model is traced, and restored afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from autopar.python.one_process import one_process
from autopar.python.replaced import overrides_active
from autopar.tracing import huggingface
from autopar.tracing.contents import numbers_of_math
from autopar.tracing.contents.asserting import unvalidated
from autopar.tracing.contents.extremes import extremes_computed
from autopar.tracing.contents.unknown import checks_noted
from autopar.tracing.leaves.compiled import compiled_functions
from autopar.tracing.leaves.control_flow import bodies_recorded
from autopar.tracing.leaves.custom_functions import custom_functions, one_node_functions
from autopar.tracing.leaves.experts import experts_as_one
from autopar.tracing.leaves.flex import flex_attention_recorded
from autopar.tracing.leaves.functions import function_leaves
from autopar.tracing.leaves.scripted import scripted_functions
from autopar.tracing.model_state.caches import library_caches_empty, namespaces_restored
from autopar.tracing.model_state.own_containers import containers_restored
from autopar.tracing.set_order import sets_in_order
from autopar.tracing.torch_functions.batch_norms import batch_norms_traceable
from autopar.tracing.torch_functions.fused_layers import fused_layers_off
from autopar.tracing.torch_functions.inference import inference_as_no_grad
from autopar.tracing.torch_functions.legacy_constructors import legacy_constructors_recorded
from autopar.tracing.torch_functions.regions import checkpoint_regions
from autopar.tracing.torch_functions.transforms import transformed_bodies

if TYPE_CHECKING:
    from autopar.tracing.attempt import Attempt


@contextlib.contextmanager
def tracing_environment(attempt: Attempt) -> Iterator[None]:
    """While inside, calls of the attempt's model are recorded; at the end, all that was replaced is as before."""
    model, options, recorder = attempt.model, attempt.options, attempt.recorder
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
        stack.enter_context(inference_as_no_grad())
        stack.enter_context(one_process(recorder.where))
        stack.enter_context(huggingface.prepared(model))
        stack.enter_context(sets_in_order(model))
        stack.enter_context(library_caches_empty())
        stack.enter_context(namespaces_restored(model))
        stack.enter_context(containers_restored(model.modules()))
        stack.enter_context(attempt.attributes.swapped())
        stack.enter_context(checkpoint_regions(recorder, tagged=options.trace_act_ckpt))
        stack.enter_context(custom_functions(recorder))
        stack.enter_context(compiled_functions(recorder))
        stack.enter_context(scripted_functions(recorder))
        stack.enter_context(legacy_constructors_recorded(recorder))
        stack.enter_context(flex_attention_recorded(recorder))
        stack.enter_context(one_node_functions(recorder, options.one_node))
        stack.enter_context(function_leaves(recorder, model, options.policy, attempt.called))
        stack.enter_context(experts_as_one(recorder))
        stack.enter_context(numbers_of_math.recorded())
        stack.enter_context(bodies_recorded(recorder))
        stack.enter_context(transformed_bodies(recorder))
        stack.enter_context(checks_noted(recorder))
        stack.enter_context(extremes_computed(recorder))
        stack.enter_context(unvalidated())
        stack.enter_context(batch_norms_traceable())
        stack.enter_context(fused_layers_off())
        stack.enter_context(overrides_active())
        stack.enter_context(options.paths.offered())
        stack.enter_context(attempt.calls.followed())
        stack.enter_context(recorder)
        yield
