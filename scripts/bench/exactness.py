"""Checks over many architectures that training on four ranks gives the same numbers as in one process.

    torchrun --standalone --nproc-per-node 4 scripts/bench/exactness.py --out rows.jsonl           # all architectures
    torchrun --standalone --nproc-per-node 4 scripts/bench/exactness.py --models llama,t5 --kinds random
    torchrun --standalone --nproc-per-node 4 scripts/bench/exactness.py --dropout                   # bit for bit

Without `--dropout`: the small architectures of tests/runtime in float64 (the models' own casts to float32 promoted),
50 steps of AdamW with four micro-batches each, clipped gradients, warm-up and a cosine schedule; each micro-batch has
different data. There are three kinds of plans: the best one on cheap links over four ranks ("unconstrained"), the best
one with fsdp and tp on 2 x 2 ("forced"), and a random one on 2 x 2, which is slow and only runs if `--kinds` names it.
By default, architectures alternate between the first two kinds. `loss` is the largest difference of a loss;
`parameters` is that of a parameter or buffer after the last step, relative to the tensor's largest element.

With `--dropout`: float32, dropout 0.1, two runs from one seed. `losses differ` and `parameters differ` count losses,
and tensors after the last step, that are not bitwise equal in both runs. `replicas differ` counts parameters of which
ranks hold different copies, checked every twenty steps.

Rows that `--out` already holds are not run again. The exit status is 1 if a row fails its check.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from autopar import autoparallelize
from autopar.plans import NodePlan, Plan
from autopar.report.tables import table
from autopar.runtime.application import apply
from autopar.runtime.ranks.agreement import from_rank_zero
from autopar.tracing import trace

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "equality"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "runtime"))
from architecture_plans import EXACT, KINDS, mesh_shape, plan_of, promote
from exact_training import MICRO_BATCHES, state_of, train
from promotion import Promotion
from small_architectures import MODELS, built, picture, text

DROPPED: dict[str, Callable[[], tuple[str, dict[str, torch.Tensor]]]] = {
    "gpt2": lambda: ("GPT2LMHeadModel", text()),
    "bert": lambda: ("BertForMaskedLM", text()),
    "vit": lambda: ("ViTForImageClassification", picture()),
}
CPU = torch.device("cpu")


# -- without dropout: beside one process -------------------------------------------------------------------------------


def beside_one_process(name: str, kind: str, steps: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Train one architecture on the mesh and in one process; the largest differences, on rank 0 alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries
        with Promotion():
            model, inputs = MODELS[name]()
            traced = trace(model, inputs)
            promote(traced.graph)  # planned calls run the graph, so they do not need the mode

            def make() -> str:
                plan = plan_of(kind, name, model, traced)
                return dataclasses.replace(plan, micro_batches=MICRO_BATCHES).to_json()

            plan = Plan.from_json(from_rank_zero(make, CPU))
            apply(model, traced, plan, mesh, replan=_no_replan)
        losses = train(model, inputs, steps)
        state = state_of(model)
        if dist.get_rank() != 0:
            return {}
        with Promotion():
            alone, inputs = MODELS[name]()
            expected = train(alone, inputs, steps)
    pairs = [(state[key], value) for key, value in alone.state_dict().items()]
    split = sum(not p.storage.is_replicated for p in plan.parameters)
    return {
        "loss": max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, expected, strict=True)),
        "parameters": max(_relative(found, right) for found, right in pairs),
        "fell": losses[0] - losses[-1],
        "split ops": f"{sum(map(_is_split, plan.nodes))} of {len(plan.nodes)}",
        "split parameters": f"{split} of {len(plan.parameters)}",
    }


def _is_split(node: NodePlan) -> bool:
    return any(p.is_sharded for layout in node.outputs for p in layout.placements)


def _relative(found: torch.Tensor, right: torch.Tensor) -> float:
    if found.shape != right.shape:
        raise AssertionError(f"shapes differ: {tuple(found.shape)} and {tuple(right.shape)}")
    if not right.numel():
        return 0.0
    return ((found.double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1e-3)).item()


def _no_replan(*_: Any) -> Any:
    raise AssertionError("every call is alike")


# -- with dropout: beside itself ---------------------------------------------------------------------------------------


def beside_itself(name: str, kind: str, steps: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Two runs from one seed, and the replicas of each parameter, must be bitwise equal; counts of differences."""
    differing = 0

    def look(step: int) -> None:
        nonlocal differing
        if (step + 1) % 20 == 0:
            differing += differing_copies(model, mesh)

    runs = []
    for _ in range(2):
        architecture, inputs = DROPPED[name]()
        model = with_dropout(built(architecture)).float()
        inputs = {key: v.float() if v.is_floating_point() else v for key, v in inputs.items()}
        torch.manual_seed(0)
        constraints = "ddp" if mesh.ndim == 1 else "fsdp+tp"
        autoparallelize(model, inputs, mesh, constraints=constraints, micro_batches=MICRO_BATCHES, time_limit=20)
        runs.append((train(model, inputs, steps, look), state_of(model)))
    (losses, state), (again, state_again) = runs
    return {
        "losses differ": sum(a != b for a, b in zip(losses, again, strict=True)),
        "parameters differ": sum(not torch.equal(state[key], state_again[key]) for key in state),
        "replicas differ": differing,
        "fell": losses[0] - losses[-1],
    }


def with_dropout(model: nn.Module) -> nn.Module:
    """Set every dropout probability of the model to 0.1, including those of attention."""
    for module in model.modules():
        for attribute, value in list(vars(module).items()):
            if "drop" in attribute and isinstance(value, float):
                setattr(module, attribute, 0.1)
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model


def differing_copies(model: nn.Module, mesh: DeviceMesh) -> int:
    """Number of local tensors that are not bitwise equal on ranks that hold replicas; equal on all ranks."""
    count = torch.zeros((), dtype=torch.int64)
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        bits = parameter.to_local().detach().contiguous().view(torch.uint8).long().flatten()
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Replicate):
                highest, lowest = bits.clone(), bits.clone()
                dist.all_reduce(highest, dist.ReduceOp.MAX, group=mesh.get_group(axis))
                dist.all_reduce(lowest, dist.ReduceOp.MIN, group=mesh.get_group(axis))
                count += int(not torch.equal(highest, lowest))
    dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)


# -- the run -----------------------------------------------------------------------------------------------------------


def kinds_in_turn(names: Sequence[str], chosen: str) -> list[tuple[str, str]]:
    if chosen != "in-turn":
        return [(name, kind) for kind in chosen.split(",") for name in names]
    return [(name, KINDS[list(MODELS).index(name) % 2]) for name in names]


def is_right(row: dict[str, Any]) -> bool:
    if "error" in row:
        return False
    if "loss" in row:
        return row["loss"] < EXACT and row["parameters"] < EXACT and row["fell"] == row["fell"]
    return not (row["losses differ"] or row["parameters differ"] or row["replicas differ"])


def report(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of the table of results."""
    columns = [key for row in rows for key in row if key != "error"]
    head = list(dict.fromkeys(columns))
    cells = [
        [_cell(row.get(key, row["error"] if "error" in row and key == "loss" else "")) for key in head] for row in rows
    ]
    return table(cells, "<<" + ">" * (len(head) - 2), head=head, indent=0)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if abs(value) < 1e-2 else f"{value:.3f}"
    return str(value)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", help="names, with commas between; default: all")
    parser.add_argument(
        "--kinds", default="in-turn", help=f"some of {', '.join(KINDS)}; default: the first two in turn"
    )
    parser.add_argument("--dropout", action="store_true", help="bit for bit, with dropout")
    parser.add_argument("--steps", type=int, help="default: 50, and 200 with --dropout")
    parser.add_argument("--out", type=Path, help="a file of JSON lines, which a later call goes on with")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # hints on norms over two axes
    dist.init_process_group("gloo", timeout=timedelta(minutes=30))
    shapes: list[tuple[int, ...]] = [(4,), (2, 2)]
    meshes = {shape: init_device_mesh("cpu", shape) for shape in shapes}
    names = options.models.split(",") if options.models else list(DROPPED if options.dropout else MODELS)
    if options.dropout:
        jobs = [(name, kind) for kind in ("ddp", "fsdp+tp") for name in names]
    else:
        jobs = kinds_in_turn(names, options.kinds)
    steps = options.steps or (200 if options.dropout else 50)
    lines = options.out.read_text().splitlines() if options.out and options.out.exists() else []
    rows = [json.loads(line) for line in lines]
    done = {(row["model"], row["plan"]) for row in rows}
    for name, kind in (job for job in jobs if job not in done):
        row = compared(name, kind, steps, meshes, dropout=options.dropout)
        dist.barrier()
        rows.append(row)
        if dist.get_rank() == 0:
            print(json.dumps(row), file=sys.stderr, flush=True)
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    if dist.get_rank() == 0:
        print(*report(rows), sep="\n")
    wrong = [row for row in rows if not is_right(row)] if dist.get_rank() == 0 else []
    dist.destroy_process_group()
    return bool(wrong)


def compared(
    name: str, kind: str, steps: int, meshes: Mapping[tuple[int, ...], DeviceMesh], *, dropout: bool
) -> dict[str, Any]:
    """The row of one model under one kind of plan; an error is its result."""
    start = time.process_time()
    try:
        if dropout:
            result = beside_itself(name, kind, steps, meshes[(4,) if kind == "ddp" else (2, 2)])
        else:
            result = beside_one_process(name, kind, steps, meshes[mesh_shape(kind)])
    except Exception as error:
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"[:200]}
    return {"model": name, "plan": kind, "steps": steps, **result, "cpu s": round(time.process_time() - start)}


if __name__ == "__main__":
    sys.exit(main())
