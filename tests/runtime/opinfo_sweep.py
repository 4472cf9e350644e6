"""Each op of PyTorch's own test database, on its own samples, under random plans, compared with eager mode.

`torch.testing._internal` lists some seven hundred functions with samples chosen by torch's developers: sizes that no
mesh divides, empty tensors, dims and arguments in every form.

`python tests/runtime/opinfo_sweep.py [WORD ...]` sweeps the ops whose name contains one of the words, or all.
"""

from __future__ import annotations

import itertools
import random
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent))
from deviation import deviation
from one_op import DTYPES, NO_PARAMETERS, OneOp, database, eager, function_of, samples, sized
from random_plans import random_plan

from autopar.errors import AutoparError
from autopar.ops.random_ops import draws
from autopar.runtime.local import NEEDS_KEY
from autopar.tracing import trace
from autopar.tracing.leaves.tensors import show_leaf_tensors

MESHES = ((2,), (2, 2))
SIZES = {"as they are": {}, "even": {"S": 4, "M": 8, "L": 16}}
SINGLE = (torch.float32, torch.complex64, torch.float16, torch.bfloat16)

SKIPPED = {
    "uninitialised memory": "empty empty_like empty_strided empty_permuted new_empty new_empty_strided",
    "has other elements each time": "resize_ resize_as_",
    "private; the process died behind it, nobody looked why": "_segment_reduce",
    "as many elements as data say, whatever `minlength`": "bincount",
    "gives statistics of other sizes on meta tensors": "native_batch_norm _native_batch_norm_legit",
    "eager mode takes what shapes forbid": "addbmm",  # in place
}


class Outcome(NamedTuple):
    """`kind`: passed, skipped, refused (a clear error), wrong or crashed; `told`: the reason."""

    op: str
    sample: str
    plan: str
    kind: str
    told: str = ""


def swept(
    op: Any, most: int, seeds: int, sizes: str, *, form: str = "function", dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Outcome]:
    """The outcome of each sample under each plan."""
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    for reason, names in SKIPPED.items():
        if op.name in names.split():
            yield Outcome(name, "", "", "skipped", reason)
            return
    function = function_of(op, form)
    if function is None:
        return
    try:
        drawn = list(samples(op, most, dtypes))
    except Exception as error:  # samples for other devices only, or that fail with another S
        yield Outcome(name, "", "", "skipped", f"no samples: {type(error).__name__}")
        return
    for number, sample in drawn:
        for outcome in _of_sample(function, sample, number, seeds):
            yield outcome._replace(op=name, sample=f"{sizes} {number}: {outcome.sample}")


def _of_sample(function: Any, sample: Any, number: int, seeds: int) -> Iterator[Outcome]:
    given = ((sample.input, *sample.args), sample.kwargs)
    if any(isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided for leaf in pytree.tree_leaves(given)):
        yield Outcome("", "", "", "skipped", "sparse")
        return
    yield from _under_plans(
        lambda turn: OneOp(function, given, sample.output_process_fn_grad, turn),
        (number % 3, (number + 1) % 3, (number + 2) % 3, NO_PARAMETERS),
        given,
        seeds,
    )


def modules_swept(most: int, seeds: int) -> Iterator[Outcome]:
    """The same for the database of modules, in training mode."""
    database()
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        torch.manual_seed(0)
        options = {"device": "cpu", "dtype": torch.float64, "requires_grad": False, "training": True}
        try:
            made = list(info.module_inputs_func(info, **options))
        except Exception as error:
            yield Outcome(info.name, "", "", "skipped", f"no samples: {type(error).__name__}")
            continue
        step = max(1, len(made) // most)
        for number, one in enumerate(made[::step]):
            given, built = (tuple(one.forward_input.args), one.forward_input.kwargs), one.constructor_input

            def build(turn: int, kind: Any = info.module_cls, built: Any = built, given: Any = given) -> OneOp:
                torch.manual_seed(0)
                return OneOp(kind(*built.args, **built.kwargs).double(), given, lambda output: output, turn)

            for outcome in _under_plans(build, (NO_PARAMETERS,), given, seeds):
                shown = f"{number}: {built.args} {built.kwargs} {outcome.sample}"
                yield outcome._replace(op=info.name, sample=shown[:400])


def _under_plans(build: Callable[[int], OneOp], turns: Sequence[int], given: Any, seeds: int) -> Iterator[Outcome]:
    shown, told = _shown(given), ""
    for turn in turns:
        try:
            model = build(turn)
            twice = [eager(model) for _ in range(2)]
            break
        except Exception as error:  # torch's own error: not all arguments have gradients
            told = f"eager mode: {type(error).__name__}"
    else:
        yield Outcome("", shown, "", "skipped", told)
        return
    shown = f"{shown} turn {turn}"
    if not model.weights:
        yield Outcome("", shown, "", "skipped", "returns no tensor")
        return
    if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*twice, strict=True)):
        yield Outcome("", shown, "", "skipped", "random")
        return
    try:
        traced = trace(model, model.inputs, unsupported="leaf")
        show_leaf_tensors(traced, None)
    except AutoparError as error:
        yield Outcome("", shown, "", "refused", f"{type(error).__name__}: {error}")
        return
    except Exception as error:
        yield Outcome("", shown, "trace", "crashed", _told(error))
        return
    if any(map(draws, traced.graph.nodes)):
        yield Outcome("", shown, "", "skipped", "random")
        return
    single = any(isinstance(leaf, torch.Tensor) and leaf.dtype in SINGLE for leaf in pytree.tree_leaves(given))
    for mesh, seed in itertools.product(MESHES, range(seeds)):
        drawn = Outcome("", shown, f"{mesh} seed {seed}", "passed")
        model.zero_grad()
        try:
            plan = random_plan(traced.graph, model, mesh, random.Random(seed))
            if any(node.local in NEEDS_KEY for node in plan.nodes):
                yield drawn._replace(kind="skipped", told="random")
                continue
            found = deviation(model, model.inputs, traced, plan)
        except AutoparError as error:
            yield drawn._replace(kind="refused", told=f"{type(error).__name__}: {error}")
        except Exception as error:
            yield drawn._replace(kind="crashed", told=_told(error))
        else:
            if found < (1e-4 if single else 1e-7):
                yield drawn._replace(told="split" if any(any(n.factors) for n in plan.nodes) else "whole")
            else:
                yield drawn._replace(kind="wrong", told=f"{found:.2g}: {_ways(plan)}")


def _ways(plan: Any) -> str:
    return "; ".join(
        f"{n.target}{n.factors}{[str(x) for x in n.inputs]}>{[str(x) for x in n.outputs]}" for n in plan.nodes
    )


def _told(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[-1:-6:-1])
    return f"{type(error).__name__}: {str(error)[:400]} [{where}]"


def _shown(given: Any) -> str:
    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" + ("" if leaf.is_contiguous() else "~")
        return repr(leaf)

    return str(pytree.tree_map(one, given))[:300]


def main() -> None:
    """Sweep in this process; print the failures and the number of outcomes."""
    words, counts = sys.argv[1:], Counter[str]()
    torch.set_num_threads(1)
    ops, module = database()
    for sizes, lengths in SIZES.items():
        with sized(module, lengths):
            for op in ops:
                if not words or any(word in op.name for word in words):
                    for outcome in swept(op, 6, 2, sizes):
                        counts[f"{outcome.kind} {outcome.told}" if outcome.kind == "skipped" else outcome.kind] += 1
                        if outcome.kind in ("wrong", "crashed", "refused"):
                            print(*outcome, sep=" | ", flush=True)
    print(*counts.most_common(), sep="\n")


if __name__ == "__main__":
    main()
