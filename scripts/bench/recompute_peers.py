"""Two other systems that choose what to recompute, as `scripts/bench/recompute.py` runs them.

AutoSAC (`torch.distributed._tools`): an estimator of each module's trade-off, an integer program that chooses modules
and how much of each to drop, and a policy by op for `torch.utils.checkpoint`. Here it uses the prices of ops by which
all three systems are compared, in place of its roofline model, which needs a GPU. It needs pwlf and scipy, which the
requirements do not contain.

The partitioner of torch.compile: min-cut with `activation_memory_budget`, under AOTAutograd without a compiler.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Callable, Iterator
from typing import Any

import recompute_models
import torch
from recompute_models import Measured, op_seconds
from torch import nn
from torch._functorch import config
from torch._functorch.aot_autograd import aot_module
from torch._functorch.compilers import nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.ilp_utils import (
    Graph,
    aggregate_stats,
    get_peak_memory_runtime_baseline,
    parse_module_info,
)
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.runtime_estimator import RuntimeEstimator
from torch.distributed._tools.sac_estimator import OPS_TO_ALWAYS_SKIP, SACEstimator, SACStats
from torch.distributed._tools.sac_ilp import get_optimal_checkpointing_policy_per_module, sac_milp
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

FRACTIONS = [i / 10 for i in range(11)]


def partitioned(build: Callable[[], nn.Module], budget: float) -> Measured:
    """Measure a step under AOTAutograd; `budget`: the partitioner's `activation_memory_budget`, 0 to 1."""
    model = build()
    run = aot_module(model, fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition)
    with config.patch(activation_memory_budget=budget):
        return Measured(model, run)


# -- AutoSAC ----------------------------------------------------------------------------------------------------------


def _priced(func: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """Run an op; returns its result and its price in milliseconds."""
    out = func(*args, **(kwargs or {}))
    return out, 1e3 * op_seconds(func, args, kwargs or {}, out)


class AutoSAC:
    """AutoSAC for one model: estimates once, then plans for each budget."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.build = build
        with FakeTensorMode(), contextlib.redirect_stdout(io.StringIO()):
            model = build()
            x = recompute_models.example()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step() -> None:
                model(x).backward()
                optimizer.zero_grad()

            tracker = MemTracker()
            tracker.track_external(model, optimizer)
            with tracker:
                step()
                tracker.reset_mod_stats()
                step()
            runtime = RuntimeEstimator()
            runtime._estimate = _priced
            runtime._estimate_mode_type = "given prices"
            with runtime:
                step()
            self.estimator = SACEstimator()
            self.estimator._estimate_runtime = _priced
            with self.estimator:
                loss = model(x)
            loss.backward()
            info = aggregate_stats(model, tracker, runtime, self.estimator, torch.device("cpu"))
        self.graph: Graph = parse_module_info(info)
        self.most_bytes = get_peak_memory_runtime_baseline(self.graph)[0]

    def measured(self, fraction: float) -> Measured | None:
        """Measure a step with `fraction` of the estimated peak as budget; None if it finds no plan."""
        decisions, _, peak = sac_milp(self.graph, fraction * self.most_bytes / 2**30)
        if peak < 0:
            return None
        model = self.build()
        root = type(model).__name__
        for name, dropped in decisions.items():
            module = model if name == root else model.get_submodule(name.removeprefix(f"{root}."))
            keeps = get_optimal_checkpointing_policy_per_module(self.estimator.sac_mod_stats[name], 1 - dropped)
            _checkpoint(module, keeps, self.estimator.sac_mod_stats[name])
        return Measured(model, model)


def _checkpoint(module: nn.Module, keeps: list[int], stats: SACStats) -> None:
    """Checkpoint a module's forward under a policy that says for each op, in order, whether its result is saved."""
    forward = module.forward

    def policies() -> Any:
        numbers = {False: iter(range(len(keeps))), True: iter(range(len(keeps)))}

        def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            if func in OPS_TO_ALWAYS_SKIP:
                return CheckpointPolicy.PREFER_RECOMPUTE
            number = next(numbers[context.is_recompute])
            if stats.func_names[number] != func._overloadpacket.__name__:
                raise AssertionError(f"op {number} is {func}, the estimate was of {stats.func_names[number]}")
            return CheckpointPolicy.MUST_SAVE if keeps[number] else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    module.forward = functools.partial(checkpoint, forward, use_reentrant=False, context_fn=policies)


# -- sweeps -----------------------------------------------------------------------------------------------------------


def sweep_partitioner(build: Callable[[], nn.Module]) -> Iterator[Measured]:
    for fraction in FRACTIONS:
        yield partitioned(build, fraction)


def sweep_autosac(build: Callable[[], nn.Module]) -> Iterator[Measured]:
    logging.getLogger("torch.distributed._tools.sac_ilp").setLevel(logging.CRITICAL)
    planner = AutoSAC(build)
    for fraction in FRACTIONS:
        found = planner.measured(fraction) if fraction else None
        if found is not None:
            yield found
