"""One rank of `test_collectives_and_local_ops.py`; torchrun starts it with the folder for its results.

The second argument n: every n-th of the compiled cases is run, since these take most of the time.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parent))
from local_cases import Case, cases, numbers

from autopar.layout import Layout, take_shard
from autopar.resharding.reshard import steps
from autopar.runtime.communication.collectives import LocalMesh
from autopar.runtime.communication.convert import convert, recipe
from autopar.runtime.local import LocalContext, run_local
from autopar.runtime.lowering.emission import LocalCall, Method
from autopar.runtime.randomness import RandomState, agree_seed

MESHES = {2: [(2,)], 4: [(4,), (2, 2)]}
PAIRS = {
    1: "R to R+; R to S0; R+ to S1@3; S0 to R; S0 to R+; S1 to S1@3; S1@3 to S0; P to R; P to R+; P to S1; S0 to P; "
    "R+ to R; R+ to P; S0 to S2; S2 to R+",
    2: "R,R to R+,R+; S0,S0@2 to R+,S0; S0,S1 to S1,S0; P,S0 to S1,R+; S1,R to S1@3,S0; P,P to S0,R; S0,R+ to P,S1; "
    "R,S1@2 to S1,S0; S2,S2@2 to R+,R+; S2,S2@2 to S0,R+",
}
COMPILER = "aot_eager"  # torch.compile without code generation
SHAPE = (8, 24, 5)  # neither 2 nor 4 ranks divide dim 2


class Counted(TorchDispatchMode):
    """Records collectives as (kind, number of input elements)."""

    KINDS = ("all_reduce", "all_gather_into_tensor_out", "reduce_scatter_tensor", "all_to_all_single")

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name.startswith("_c10d_functional::") and name.split("::")[1] in self.KINDS:
            kind = name.split("::")[1].removesuffix("_into_tensor_out").removesuffix("_tensor").removesuffix("_single")
            self.found[kind, args[0].numel()] += 1
        return func(*args, **(kwargs or {}))


def piece(whole: torch.Tensor, layout: Layout, mesh: LocalMesh) -> torch.Tensor:
    """This rank's part of `whole`; for a partial layout a summand, which is ones on all ranks but the first."""
    summed = [axis for axis, p in enumerate(layout.placements) if p.is_partial]
    if summed:
        first = all(mesh.coordinate[axis] == 0 for axis in summed)
        others = math.prod(mesh.shape[axis] for axis in summed) - 1
        whole = whole - others if first else torch.ones_like(whole)
    return take_shard(whole, layout, mesh.shape, mesh.coordinate).clone()


def whole_of(held: torch.Tensor, layout: Layout, shape: Any, mesh: LocalMesh) -> torch.Tensor:
    everywhere = Layout.replicated(len(mesh.shape))
    return convert(held.detach(), recipe(layout, everywhere, tuple(shape), mesh, needs_grad=False))


def check_conversion(src: Layout, dst: Layout, dtype: torch.dtype, mesh: LocalMesh) -> None:
    """Value, gradient and collectives of one conversion, with small integers, which are exact in every dtype."""
    value = torch.arange(8 * 24 * 5).remainder(61).view(SHAPE).to(dtype)
    gradient = torch.arange(8 * 24 * 5).remainder(37).view(SHAPE).to(dtype)
    held = piece(value, src, mesh).requires_grad_()
    with Counted() as counted:
        got = convert(held, recipe(src, dst, SHAPE, mesh, needs_grad=True))
        got.backward(piece(gradient, dst.gradient(), mesh))
    assert held.grad is not None
    assert torch.equal(whole_of(got, dst.value(), SHAPE, mesh), value), "value"
    assert torch.equal(whole_of(held.grad, src.gradient(), SHAPE, mesh), gradient), "gradient"
    announced: Counter[tuple[str, int]] = Counter()
    for step in steps(src, dst, SHAPE, mesh.shape, needs_grad=True):
        announced.update((m.kind, m.elements) for m in (step.forward, step.backward) if m is not None)
    if not any(mesh.coordinate):  # the announced sizes are those of the first rank, which has the largest shards
        assert counted.found == announced, f"{counted.found} is not {announced}"


def check_compiled(mesh: LocalMesh) -> None:
    """`torch.compile` traces through conversions and local code."""
    layouts = [Layout.parse(text) for text in ("S0", "R+", "S1@3", "P", "S0")]
    state = RandomState(1, torch.device("cpu"))
    recipes = [recipe(a, b, SHAPE, mesh, needs_grad=True) for a, b in itertools.pairwise(layouts)]
    ctx = LocalContext(mesh, layouts[-1:], layouts[-1:], (SHAPE,), (SHAPE,), 3)

    def work(x: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        for step in recipes:
            x = convert(x, step).sin()
        return run_local("dropout", F.dropout, (x, 0.3), {}, ctx, key)

    key = state.next_key()
    start = numbers(*SHAPE).narrow(0, 0, SHAPE[0] // mesh.shape[0])
    found = []
    for run in (work, torch.compile(work, backend=COMPILER, fullgraph=True)):
        x = start.clone().requires_grad_()
        out = run(x, key)
        (out * out).sum().backward()
        found.append((out.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1])


def leaves(value: Any) -> list[torch.Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def check_local(case: Case, mesh: LocalMesh, backend: str | None = None) -> None:
    """Results, gradients and modified buffers of local code equal those of the unsharded op."""
    inputs, outputs = tuple(map(Layout.parse, case.inputs)), tuple(map(Layout.parse, case.outputs))
    trained = [t.is_floating_point() and i not in case.frozen for i, t in enumerate(case.tensors)]
    wholes = tuple(t.clone().requires_grad_(needed) for t, needed in zip(case.tensors, trained, strict=True))
    parts = tuple(
        piece(t.detach(), x, mesh).requires_grad_(t.requires_grad) for t, x in zip(wholes, inputs, strict=True)
    )
    arguments, own_arguments = case.arguments(wholes), case.arguments(parts)
    expected = leaves(case.op(*arguments, **case.kwargs))
    ctx = LocalContext(
        mesh, inputs, outputs, tuple(tuple(t.shape) for t in wholes), tuple(tuple(t.shape) for t in expected), 5
    )

    is_method = getattr(torch.Tensor, case.op.__name__, None) is case.op
    call = LocalCall(case.local, Method(case.op.__name__) if is_method else case.op, ctx)

    def work(arguments: tuple[Any, ...], key: torch.Tensor) -> Any:
        return call(key, arguments, case.kwargs)

    run: Callable[..., Any] = work
    if backend is not None:
        torch.compiler.reset()  # one code object serves many ops
        run = torch.compile(work, backend=backend, fullgraph=True)
    got = leaves(run(own_arguments, torch.tensor(7)))
    for buffer, changed in zip(arguments, own_arguments, strict=True):
        if isinstance(buffer, torch.Tensor) and not any(buffer is whole for whole in wholes):
            torch.testing.assert_close(changed, buffer, rtol=1e-12, atol=1e-12)
    for whole, part, layout in zip(expected, got, outputs, strict=True):
        joined = whole_of(part, layout.value(), whole.shape, mesh)
        torch.testing.assert_close(joined, whole.detach(), rtol=1e-11, atol=1e-11)
    gradients = [numbers(*e.shape) if e.ndim else torch.tensor(1.5, dtype=e.dtype) for e in expected]
    if not any(e.requires_grad for e in expected):
        return
    torch.autograd.backward(expected, gradients)
    torch.autograd.backward(got, [piece(g, x.gradient(), mesh) for g, x in zip(gradients, outputs, strict=True)])
    for whole, part, layout in zip(wholes, parts, inputs, strict=True):
        if whole.requires_grad:
            assert part.grad is not None
            joined = whole_of(part.grad, layout.gradient(), whole.shape, mesh)
            torch.testing.assert_close(joined, whole.grad, rtol=1e-10, atol=1e-10)


def check_masks(mesh: LocalMesh) -> None:
    """Masks are equal under any sharding, differ between nodes and steps, and have the right number of zeros."""
    state = RandomState(agree_seed(mesh.groups, torch.device("cpu")), torch.device("cpu"))
    axes, shape = len(mesh.shape), (8, 8, 64)
    alone = LocalMesh((1,) * axes, (0,) * axes, mesh.groups)
    everywhere = Layout.replicated(axes)
    x = numbers(*shape) + 10
    for op, name in (
        (F.dropout, "dropout"),
        (F.dropout1d, "dropout"),
        (F.scaled_dot_product_attention, "sdpa_dropout"),
    ):
        attention = name == "sdpa_dropout"
        tensors, args = ((x, x * 0.1, x), (None, 0.3, True)) if attention else ((x,), (0.3,))
        key, seen = state.next_key(), []
        for text in ("R", "S0", "S1", "S0@2") if axes == 1 else ("R,R", "S0,S1", "S1,S1@2", "S1@4,R"):
            layout = Layout.parse(text)
            layouts = (layout, *(Layout(tuple(p if p.dim == 0 else everywhere[0] for p in layout.placements)),) * 2)
            for view, lie in ((mesh, layouts), (alone, (everywhere,) * 3)):
                ctx = LocalContext(view, lie, lie[:1], (shape,) * 3, (shape,), 5)
                parts = [piece(t, way, view).requires_grad_() for t, way in zip(tensors, lie, strict=False)]
                out = run_local(name, op, (*parts, *args), {}, ctx, key)
                out.backward(piece(x, lie[0], view))
                held = parts[0].grad
                assert held is not None
                seen.append(tuple(whole_of(t, lie[0], shape, view) for t in (out, held)))
        for other in seen[1:]:
            torch.testing.assert_close(other, seen[0], rtol=1e-12, atol=1e-12)
        if not attention:
            dropped = (seen[0][0] == 0).double().mean().item()
            assert abs(dropped - 0.3) < (0.02 if op is F.dropout else 0.2), dropped
            ctx = LocalContext(alone, (everywhere,), (everywhere,), (shape,), (shape,), 6)
            assert not torch.equal(run_local(name, op, (x, 0.3), {}, ctx, key), seen[0][0]), "another node"
            assert torch.equal(run_local(name, op, (x, 0.3, False), {}, ctx, key), x), "not training"
        ctx = LocalContext(alone, (everywhere,) * 3, (everywhere,), (shape,) * 3, (shape,), 5)
        later = run_local(name, op, (*tensors, *args), {}, ctx, state.next_key())
        assert not torch.equal(later, seen[0][0]), "another step"


def jobs(shape: tuple[int, ...], mesh: LocalMesh, one_of: int) -> Iterator[tuple[str, Callable[[], None]]]:
    for pair in PAIRS[len(shape)].split("; "):
        src, dst = map(Layout.parse, pair.split(" to "))
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            yield f"{pair} {dtype}", partial(check_conversion, src, dst, dtype, mesh)
    for case in cases(shape):
        yield case.name, partial(check_local, case, mesh)
    yield "masks", partial(check_masks, mesh)
    if shape == (2,):
        different = {
            (case.local, case.op if case.local in ("cross_entropy", "log_softmax") else None, len(case.tensors)): case
            for case in reversed([*cases(shape)])
        }
        yield "compiled", partial(check_compiled, mesh)
        for case in [*different.values()][::one_of]:
            yield f"compiled: {case.name}", partial(check_local, case, mesh, COMPILER)


def main(folder: Path, one_of: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found: dict[str, str] = {}
    for shape in MESHES[dist.get_world_size()]:
        torch.manual_seed(dist.get_rank())
        mesh = LocalMesh.of(init_device_mesh("cpu", shape))
        for name, job in jobs(shape, mesh, one_of):
            try:
                job()
                found[f"{shape} {name}"] = ""
            except Exception:
                found[f"{shape} {name}"] = traceback.format_exc(limit=-4)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
