"""Random small models: a few dozen kinds of ops, applied to a pool of tensors, then a loss.

The seed determines all, so a failing one can be replayed: `python tests/runtime/fuzzing.py SEED`.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

SIZES = (4, 6, 8, 12)
VOCABULARIES = (8, 10, 11, 13)  # ids are below 8; no mesh divides some of these sizes
_MOST_ELEMENTS = 3000
Draw = random.Random
Tensor = torch.Tensor
Run = Callable[..., Any]


class Step(NamedTuple):
    """One op: a function of tensors of the pool (by index) and of parameters (by name)."""

    run: Run
    operands: tuple[int, ...]
    parameters: tuple[str, ...]


class Fuzzed(nn.Module):
    """`forward(x, ids)`: runs the drawn steps, then makes a loss of all results that no step reads."""

    def __init__(self, seed: int, length: int = 14) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.steps: list[Step] = []
        self.generator = torch.Generator().manual_seed(seed)
        self.inputs = self._examples(draw)
        pool = list(self.inputs.values())
        tries = 0
        while len(self.steps) < length and tries < 20 * length:
            tries += 1
            made = draw.choice(OPS)(self, draw, pool)
            if made is None:
                continue
            result = self._run(made, pool)
            if result.numel() <= _MOST_ELEMENTS and result.dim() <= 5 and result.numel():
                self.steps.append(made)
                pool.append(result)
        used = {i for step in self.steps for i in step.operands}
        self.ends = [i for i in range(2, len(pool)) if i not in used]
        needed = {name for step in self.steps for name in step.parameters}
        for name in [n for n, _ in self.named_parameters()]:
            if name not in needed:
                delattr(self, name)

    def _examples(self, draw: Draw) -> dict[str, Tensor]:
        batch, length, width = draw.choice((4, 8)), draw.choice(SIZES), draw.choice((8, 12))
        x = torch.randn(batch, length, width, dtype=torch.float64, generator=self.generator)
        ids = torch.randint(0, 8, (batch, length), generator=self.generator)
        return {"x": x, "ids": ids}

    def parameter(self, *shape: int) -> str:
        """Register a new random parameter; returns its name."""
        name = f"p{len(self._parameters)}"
        made = torch.randn(*shape, dtype=torch.float64, generator=self.generator) / math.sqrt(max(shape))
        self.register_parameter(name, nn.Parameter(made, requires_grad=len(self._parameters) % 7 != 3))
        return name

    def _run(self, step: Step, pool: Sequence[Tensor]) -> Tensor:
        given = [*(pool[i] for i in step.operands), *(getattr(self, name) for name in step.parameters)]
        result: Tensor = step.run(*given)
        return result

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        pool = [x, ids]
        for step in self.steps:
            pool.append(self._run(step, pool))
        losses = [torch.tanh(pool[i]).square().mean() for i in self.ends]
        return torch.stack(losses).sum()


# -- the ops: each draws suitable operands, or returns None -----------------------------------------------------------


def floating(draw: Draw, pool: Sequence[Tensor], least: int = 1, most: int = 5) -> int | None:
    """The index of a floating tensor with `least` to `most` dims; later ones are likelier."""
    fitting = [i for i, t in enumerate(pool) if t.is_floating_point() and least <= t.dim() <= most]
    return max(draw.choices(fitting, k=2)) if fitting else None


def one(least: int, make: Callable[[Fuzzed, Draw, Tensor], tuple[Run, tuple[str, ...]] | None]) -> Any:
    """Makes an op of one tensor."""

    def op(model: Fuzzed, draw: Draw, pool: Sequence[Tensor]) -> Step | None:
        index = floating(draw, pool, least)
        made = None if index is None else make(model, draw, pool[index])
        return None if made is None or index is None else Step(made[0], (index,), made[1])

    return op


def _dim(draw: Draw, tensor: Tensor) -> int:
    return draw.randrange(tensor.dim()) - draw.choice((0, tensor.dim()))


def _linear(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]]:
    out = draw.choice((*SIZES, 24, 10))
    names = [model.parameter(out, x.shape[-1])] + ([model.parameter(out)] if draw.random() < 0.5 else [])
    return F.linear, tuple(names)


def _elementwise(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]]:
    functions: list[Run] = [F.gelu, F.silu, torch.tanh, torch.sigmoid, torch.neg, torch.cos, F.relu, lambda t: t * 2.0]
    functions += [lambda t: t + 1.5, lambda t: 1.0 - t, lambda t: t.float().double(), lambda t: t.clone(), torch.square]
    return draw.choice(functions), ()


def _scaled(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]]:
    return draw.choice((torch.mul, torch.add, torch.sub, torch.maximum)), (model.parameter(x.shape[-1]),)


def _norm(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]]:
    width = x.shape[-1]
    if draw.random() < 0.5:
        return (lambda t, w: F.rms_norm(t, (width,), w)), (model.parameter(width),)
    return (lambda t, w, b: F.layer_norm(t, (width,), w, b)), (model.parameter(width), model.parameter(width))


def _softmax(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]]:
    dim = _dim(draw, x)
    return draw.choice((lambda t: F.softmax(t, dim), lambda t: F.log_softmax(t, dim), lambda t: t.cumsum(dim))), ()


def _reduce(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]]:
    dim, keep = _dim(draw, x), draw.random() < 0.5
    runs: list[Run] = [lambda t: t.sum(dim, keep), lambda t: t.mean(dim, keep), lambda t: t.amax(dim, keep)]
    runs += [lambda t: t.var(dim, keepdim=keep), lambda t: t.logsumexp(dim, keep)]
    runs += [lambda t: torch.linalg.vector_norm(t + 0.1, dim=dim, keepdim=keep)]
    return draw.choice(runs), ()


def _permute(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]]:
    order = draw.sample(range(x.dim()), x.dim())
    a, b = _dim(draw, x), _dim(draw, x)
    return draw.choice((lambda t: t.permute(order), lambda t: t.transpose(a, b), lambda t: t.unsqueeze(a))), ()


def _split_dim(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]] | None:
    dim = draw.randrange(x.dim())
    parts = [n for n in (2, 3, 4, 6) if x.shape[dim] % n == 0 and x.shape[dim] > n]
    if not parts:
        return None
    count = draw.choice(parts)
    shape = (*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
    return draw.choice((lambda t: t.reshape(shape), lambda t: t.unflatten(dim, (count, -1)))), ()


def _merge_dims(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]]:
    dim = draw.randrange(x.dim() - 1)
    return (lambda t: t.flatten(dim, dim + 1)), ()


def _piece(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]] | None:
    dim = draw.randrange(x.dim())
    length = x.shape[dim]
    if length < 4 or length % 2:
        return None
    half, which, index = length // 2, draw.randrange(2), draw.randrange(length)
    cut = [slice(None)] * x.dim()
    cut[dim] = draw.choice((slice(None, half), slice(half, None), slice(None, None, 2), slice(1, length - 1)))
    return draw.choice(
        (lambda t: t.chunk(2, dim)[which], lambda t: t.split(half, dim)[which], lambda t: t[tuple(cut)],
         lambda t: t.select(dim, index), lambda t: t.narrow(dim, half, half), lambda t: t.unbind(dim)[which])
    ), ()  # fmt: skip


def _move(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]]:
    dim = _dim(draw, x)
    copies = [1] * x.dim()
    copies[dim] = 2
    runs: list[Run] = [lambda t: t.flip(dim), lambda t: t.roll(1, dim), lambda t: F.pad(t, (1, 1))]
    runs += [lambda t: t.repeat(copies), lambda t: t.repeat_interleave(2, dim)]
    runs += [lambda t: t.topk(min(2, t.shape[dim]), dim).values, lambda t: t.sort(dim).values]
    return draw.choice(runs), ()


def _conv(model: Fuzzed, draw: Draw, x: Tensor) -> tuple[Run, tuple[str, ...]] | None:
    if x.dim() != 3:
        return None
    out = draw.choice((4, 6, 8))
    bias = (model.parameter(out),) if draw.random() < 0.5 else ()
    return (lambda t, w, *b: F.conv1d(t, w, *b, padding=1)), (model.parameter(out, x.shape[1], 3), *bias)


def _attention(model: Fuzzed, draw: Draw, pool: Sequence[Tensor]) -> Step | None:
    index = floating(draw, pool, 4, 4)
    if index is None:
        return None
    causal = draw.random() < 0.5
    return Step(lambda t: F.scaled_dot_product_attention(t, t, t, is_causal=causal), (index,), ())


def _pair(model: Fuzzed, draw: Draw, pool: Sequence[Tensor]) -> Step | None:
    """A binary op on two tensors of equal shape."""
    a = floating(draw, pool)
    if a is None:
        return None
    same = [i for i, t in enumerate(pool) if t.is_floating_point() and t.shape == pool[a].shape]
    b, dim = draw.choice(same), _dim(draw, pool[a])
    runs: list[Run] = [torch.add, torch.sub, torch.mul, lambda s, t: torch.cat((s, t), dim), torch.minimum]
    runs += [
        lambda s, t: torch.stack((s, t), dim),
        lambda s, t: torch.where(s > 0, s, t),
        lambda s, t: s / (2 + t.square()),
    ]
    if pool[a].dim() >= 2:
        runs += [lambda s, t: s @ t.transpose(-1, -2), lambda s, t: torch.einsum("...ij,...ij->...i", s, t)]
    return Step(draw.choice(runs), (a, b), ())


def _broadcast(model: Fuzzed, draw: Draw, pool: Sequence[Tensor]) -> Step | None:
    """A binary op on two tensors that broadcast."""
    a, b = floating(draw, pool), floating(draw, pool)
    if a is None or b is None:
        return None
    try:
        torch.broadcast_shapes(pool[a].shape, pool[b].shape)
    except RuntimeError:
        return None
    return Step(draw.choice((torch.add, torch.mul)), (a, b), ())


def _embedding(model: Fuzzed, draw: Draw, pool: Sequence[Tensor]) -> Step:
    return Step(F.embedding, (1,), (model.parameter(draw.choice(VOCABULARIES), draw.choice(SIZES)),))


def _rows(model: Fuzzed, draw: Draw, pool: Sequence[Tensor]) -> Step | None:
    """A lookup by index along a dim that is long enough."""
    index = floating(draw, pool, 2)
    if index is None or pool[index].shape[0] < 8:
        return None
    return Step(draw.choice((lambda ids, t: t[ids], lambda ids, t: t.index_select(0, ids[0]))), (1, index), ())


def _loss(model: Fuzzed, draw: Draw, pool: Sequence[Tensor]) -> Step | None:
    """Cross-entropy with the ids as targets and logits from a product, or a composition of its parts."""
    index = floating(draw, pool, 3, 3)
    if index is None or pool[index].shape[:2] != pool[1].shape:
        return None
    reduction, ignored = draw.choice(("mean", "sum", "none")), draw.choice((-100, 3))

    def run(ids: Tensor, x: Tensor, head: Tensor) -> Tensor:
        return F.cross_entropy((x @ head).flatten(0, 1), ids.flatten(), ignore_index=ignored, reduction=reduction)

    def by_logarithms(ids: Tensor, x: Tensor, head: Tensor) -> Tensor:
        scores = (x @ head).flatten(0, 1).log_softmax(-1)
        return F.nll_loss(scores, ids.flatten(), ignore_index=ignored, reduction=reduction)

    head = model.parameter(pool[index].shape[-1], draw.choice(VOCABULARIES))
    return Step(draw.choice((run, run, by_logarithms)), (1, index), (head,))


OPS: tuple[Callable[[Fuzzed, Draw, Sequence[Tensor]], Step | None], ...] = (
    *(one(1, _linear),) * 4,
    *(one(1, _elementwise),) * 2,
    one(1, _scaled),
    one(1, _norm),
    one(1, _softmax),
    one(2, _reduce),
    *(one(2, _permute),) * 2,
    *(one(1, _split_dim),) * 2,
    *(one(2, _merge_dims),) * 2,
    *(one(1, _piece),) * 2,
    one(1, _move),
    one(3, _conv),
    _attention,
    _attention,
    _pair,
    _pair,
    _broadcast,
    _embedding,
    _rows,
    _loss,
)


if __name__ == "__main__":
    from test_fuzz import deviation

    for seed in map(int, sys.argv[1:]):
        print(seed, deviation(seed))
