"""Every rule of the table, split every way it allows, against the op unsplit: values and gradients."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.strategies.check import check, example
from autopar.tracing.functional import write

MESHES = [(2,), (3,), (2, 2)]


def x(*shape: int) -> Tensor:
    """A tensor that wants its gradient."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def const(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def single(*shape: int) -> Tensor:
    """In float32, for kernels that know no float64."""
    return torch.randn(*shape, requires_grad=True)


def positive(*shape: int) -> Tensor:
    return (torch.rand(*shape, dtype=torch.float64) + 0.5).requires_grad_()


def ids(limit: int, *shape: int) -> Tensor:
    return torch.randint(0, limit, shape)


def mask(*shape: int) -> Tensor:
    return torch.rand(*shape) > 0.4


def labels(limit: int, *shape: int) -> Tensor:
    """Labels of which some are ignored, unevenly over the batch."""
    found = torch.randint(0, limit, shape)
    found.view(-1)[:3] = -100
    return found


def weights(rows: int, width: int, hidden: int, *, layers: int = 1, directions: int = 1) -> list[Tensor]:
    """Those of a recurrent layer with so many `rows`: hidden units times gates."""
    return [
        tensor
        for layer in range(layers)
        for _ in range(directions)
        for tensor in (x(rows, width if layer == 0 else hidden * directions), x(rows, hidden), x(rows), x(rows))
    ]


def lstm(*, layers: int, batch_first: bool, bidirectional: bool = False) -> tuple[Any, ...]:
    directions = 1 + bidirectional
    states = (x(layers * directions, 6, 2), x(layers * directions, 6, 2))
    own = weights(8, 4, 2, layers=layers, directions=directions)
    given = x(6, 3, 4) if batch_first else x(3, 6, 4)
    return (torch._VF.lstm, given, states, own, True, layers, 0.0, True, bidirectional, batch_first)


sdpa = F.scaled_dot_product_attention
mha = F.multi_head_attention_forward

CASES: dict[str, list[tuple[Any, ...]]] = {
    "matrix": [
        (F.linear, x(6, 4, 12), x(12, 12)),
        (F.linear, x(6, 12), x(12, 12), None),
        (F.linear, x(6, 12), x(12, 12), x(12)),
        (torch.matmul, x(6, 12), x(12, 4)),
        (torch.matmul, x(6, 4, 6, 12), x(4, 12, 6)),
        (torch.matmul, x(6, 1, 6, 12), x(4, 12, 6)),
        (torch.matmul, x(12), x(6, 12, 4)),
        (torch.matmul, x(4, 6, 12), x(12)),
        (torch.matmul, x(12), x(12)),
        (operator.matmul, x(6, 12), x(12, 4)),
        ("bmm", x(6, 4, 12), x(6, 12, 4)),
        (torch.mm, x(6, 12), x(12, 4)),
        (torch.mv, x(6, 12), x(12)),
        (torch.outer, x(6), x(12)),
        (torch.einsum, "bhqe,bhke->bhqk", x(6, 4, 3, 6), x(6, 4, 5, 6)),
        (torch.einsum, "bi, oi -> bo", x(6, 4), x(12, 4)),
        (torch.einsum, "bi,oi", x(6, 4), x(12, 4)),
        (torch.einsum, "...ij,...jk->...ik", x(6, 4, 3, 6), x(4, 6, 12)),
        (torch.einsum, "...ij,jk", x(6, 4, 6), x(6, 12)),
        (torch.einsum, "bii->bi", x(6, 4, 4)),
        (torch.einsum, "b...,b...->b", x(6, 4, 3), x(6, 4, 3)),
        (torch._grouped_mm, single(12, 48), single(6, 48, 48), {"offs": torch.tensor([2, 2, 4, 7, 9, 12]).int()}),
        (torch.linalg.solve_triangular, x(6, 4, 4), x(6, 4, 12), {"upper": False, "unitriangular": True}),
    ],
    "elementwise": [
        (operator.add, x(6, 4, 12), x(12)),
        (operator.add, x(6, 1, 12), x(4, 1)),
        (torch.add, x(6, 12), const(6, 12)),
        (torch.add, x(6, 12), 2.0),
        (operator.sub, 1.0, x(6, 12)),
        (torch.sub, x(6, 12), x(6, 12)),
        (operator.mul, x(6, 12), x(12)),
        (operator.mul, 3.0, x(6, 12)),
        (operator.mul, x(6, 1, 4), const(12, 1)),
        (operator.truediv, x(6, 12), positive(6, 1)),
        (operator.truediv, x(6, 12), 4.0),
        (operator.truediv, 4.0, positive(6, 12)),
        (torch.div, x(6, 12), positive(12), {"rounding_mode": "floor"}),
        (operator.pow, x(6, 12), 2),
        (operator.neg, x(6, 12)),
        (F.gelu, x(6, 12), {"approximate": "tanh"}),
        (F.relu, x(6, 12)),
        (F.silu, x(6, 12)),
        (torch.tanh, x(6, 12)),
        (torch.rsqrt, positive(6, 12)),
        (torch.clamp, x(6, 12), {"min": 0.0}),
        (torch.where, mask(6, 12), x(6, 12), x(12)),
        (torch.where, mask(6, 1), x(6, 12), 0.0),
        (torch.where, mask(6, 1), 0, x(6, 12)),
        (torch.where, mask(6, 1), 1.0, x(6, 12)),
        ("masked_fill", x(6, 12), mask(6, 12), 0.0),
        ("masked_fill", x(6, 12), mask(12), -1e9),
        ("to", x(6, 12), torch.float64),
        ("double", x(6, 12)),
        ("type_as", x(6, 12), const(4)),
        ("contiguous", x(6, 12)),
        ("clone", x(6, 12)),
        ("detach", x(6, 12)),
        (torch.maximum, x(6, 12), x(6, 12)),
        (operator.eq, ids(3, 6, 12), 0),
        (operator.and_, mask(6, 12), mask(6, 12)),
        (F.dropout, x(6, 12), 0.5, True),
        (F.dropout, x(6, 12), 0.5, False),
        (F.glu, x(6, 24)),
        (F.glu, x(6, 12, 4), 1),
        (F.logsigmoid, x(6, 12)),
        (F.one_hot, ids(4, 6, 12), 4),
        (torch.view_as_complex, x(6, 12, 2)),
        (torch.view_as_real, torch.view_as_complex(const(6, 12, 2)).requires_grad_()),
        ("masked_scatter", x(6, 4, 2), mask(6, 4, 1), x(24, 2)),
        ("masked_scatter", x(6, 4), mask(4), x(30)),
        (torch.zeros_like, x(6, 12)),
        (torch.lerp, x(6, 12), x(6, 12), 0.3),
    ],
    "reductions": [
        (torch.sum, x(6, 4, 12)),
        ("sum", x(6, 4, 12), -1),
        ("sum", x(6, 4, 12), {"dim": (0, 2), "keepdim": True}),
        ("mean", x(6, 4, 12), -1, True),
        ("mean", x(6, 4, 12), {"dim": (1,)}),
        (torch.mean, x(6, 12)),
        (torch.amax, x(6, 12), 0),
        (torch.max, x(6, 12)),
        (torch.min, x(6, 12)),
        (torch.max, x(6, 12), 1),
        (torch.max, x(6, 12), x(12)),
        (torch.var, x(6, 12), 0),
        (torch.mean, x(6, 12), {"axis": -1, "keepdim": True}),
        (torch.linalg.vector_norm, x(6, 4, 12), {"ord": 2, "dim": (1,), "keepdim": True}),
        (torch.histc, const(12, 6), {"bins": 5, "min": -1, "max": 1}),
        (torch.histc, const(12), 5),
        (torch.fft.fft, x(6, 4, 12)),
        (torch.fft.fftn, x(6, 4, 12), {"dim": (1, 2)}),
        (torch.fft.rfft, x(6, 4, 12), None, 1),
        (torch.fft.irfft2, torch.view_as_complex(const(6, 4, 5, 2)).requires_grad_()),
        (torch.norm, x(6, 12), 2, 1),
        (torch.argmax, x(6, 12), -1),
        (F.softmax, x(6, 4, 12), -1),
        ("softmax", x(6, 12), 0),
        (F.log_softmax, x(6, 12), {"dim": -1, "dtype": torch.float64}),
        ("cumsum", x(6, 12), 1),
        (torch.flip, x(6, 12), (1,)),
        (torch.roll, x(6, 12), 2, 1),
        (torch.roll, x(6, 12), 2),
        (torch.topk, x(6, 12), 3),
        (torch.sort, x(6, 12), 0),
        (F.normalize, x(6, 12)),
        (F.normalize, x(6, 4, 12), 2.0, -1),
    ],
    "views": [
        ("view", x(6, 4, 12), 24, 12),
        ("view", x(24, 12), (6, 4, 12)),
        ("view", x(6, 4, 12), 6, 4, -1, 3),
        ("reshape", x(6, 2, 36), 6, 2, 3, 4, 3),
        ("reshape", x(6, 4), 8, 3),
        ("reshape", x(6, 1, 4), (1, 24)),
        ("reshape_as", x(6, 2, 12), const(6, 24)),
        ("view_as", x(6, 24), const(6, 2, 12)),
        (torch.flatten, x(6, 4, 3, 2), 1),
        ("flatten", x(6, 4)),
        ("unflatten", x(6, 12), 1, (3, 4)),
        ("unsqueeze", x(6, 12), 1),
        ("squeeze", x(6, 1, 12), 1),
        ("permute", x(6, 4, 12), 2, 0, 1),
        (torch.permute, x(6, 4, 12), (2, 0, 1)),
        ("transpose", x(6, 4, 12), 1, -1),
        ("t", x(6, 12)),
        (torch.movedim, x(6, 4, 12), 0, 2),
        ("expand", x(6, 1, 12), 6, 4, 12),
        ("expand", x(1, 1, 12), 6, -1, -1),
        ("expand", x(12), 6, 12),
        ("expand_as", x(6, 1), const(6, 12)),
        ("repeat", x(6, 4), 2, 3, 1),
        (torch.repeat_interleave, x(6, 4), 3, 1),
    ],
    "pieces": [
        ("split", x(6, 12), 4, 1),
        ("split", x(6, 4, 36), 12, {"dim": 2}),
        (torch.split, x(6, 24), [12, 6, 6], -1),
        (torch.split, x(6, 24), [12, 7, 5], -1),
        ("chunk", x(6, 4, 24), 2, {"dim": -1}),
        ("unbind", x(6, 3, 4), 1),
        (torch.cat, [x(6, 4), x(6, 12)], {"dim": 1}),
        (torch.cat, (x(6, 6), x(6, 6)), -1),
        (torch.cat, [x(6, 4), x(6, 5)], 1),
        (torch.stack, [x(6, 4), x(6, 4)], {"dim": -1}),
        ("select", x(6, 4, 12), 1, 2),
        ("narrow", x(6, 12), 1, 6, 6),
        (operator.getitem, x(6, 4, 12), (slice(None), 0)),
        (operator.getitem, x(6, 4, 12), (Ellipsis, slice(None, 6))),
        (operator.getitem, x(6, 4, 12), (Ellipsis, slice(6, None))),
        (operator.getitem, x(6, 4, 12), (Ellipsis, slice(1, None, 2))),
        (operator.getitem, x(6, 4, 12), (slice(None), None, slice(1, 3))),
        (operator.getitem, x(6, 4, 12), (slice(None), slice(0, 4), 3)),
        (operator.getitem, x(12, 6), ids(12, 4)),
        (operator.getitem, x(6, 12, 4), (slice(None), ids(12, 6))),
        (operator.getitem, x(6, 4, 12), (ids(6, 2), slice(None), ids(12, 2))),
        (operator.getitem, x(6, 4, 12), (ids(6, 3, 1), ids(4, 4))),
        (operator.getitem, x(6, 4, 12), (0, slice(None), ids(12, 2))),
        (operator.getitem, x(6, 4, 12), (Ellipsis, [-2], slice(None))),
        (write, x(6, 4, 12), (Ellipsis, 0), x(4)),
        (write, x(6, 4, 12), (slice(None), slice(1, None)), x(3, 12)),
        (write, x(6, 12), (slice(None), slice(0, 6)), 1.0),
        (write, x(6, 4, 12), mask(6, 4), x(12)),
        (write, x(6, 4, 12), mask(6), 0.0),
        (write, x(6, 4, 12), (mask(6, 4),), x(1)),
        (torch.index_put, x(12, 6), (ids(12, 4),), x(4, 6)),
        ("index_put", x(12, 6, 4), (torch.tensor([0, 3, 5]),), x(6, 4)),
        (torch.index_put, x(12, 6), (ids(12, 4), ids(6, 4)), x(4), {"accumulate": True}),
    ],
    "indexing": [
        (torch.gather, x(6, 12), 1, ids(12, 6, 4)),
        ("gather", x(6, 12), -1, ids(12, 4, 4)),
        (torch.index_select, x(6, 12), 1, ids(12, 4)),
        (torch.scatter, x(6, 12), 1, ids(12, 6, 1), 0.0),
        ("scatter", x(6, 12), 1, ids(12, 6, 1), 1.0),
        (torch.scatter, x(6, 12), 1, torch.stack([torch.randperm(12)[:4] for _ in range(6)]), x(6, 4)),
        (torch.scatter_add, x(6, 12), 0, ids(6, 4, 12), x(4, 12)),
        (torch.scatter_reduce, x(6, 12), 0, ids(6, 4, 12), x(4, 12), "amax"),
        (torch.index_add, x(6, 12), 1, ids(12, 4), x(6, 4)),
        (torch.index_copy, x(6, 12), 0, torch.tensor([0, 3]), x(2, 12)),
        (torch.index_fill, x(6, 12), 0, torch.tensor([0, 3]), 2.0),
        (torch.tril, x(6, 4, 4)),
        (F.pad, x(6, 4), (0, 1)),
        (F.pad, x(6, 4), (0, 1), {"value": 3.0}),
        (F.pad, ids(5, 6, 4), (0, 1), {"value": -100}),
        ("new_zeros", x(6, 12), (3, 4)),
    ],
    "layers": [
        (F.layer_norm, x(6, 4, 12), (12,), x(12), x(12), 1e-5),
        (F.layer_norm, x(6, 4, 12), (4, 12)),
        (F.layer_norm, x(6, 12), (12,), {"bias": x(12), "weight": x(12)}),
        (F.rms_norm, x(6, 4, 12), (12,), x(12)),
        (F.group_norm, x(6, 4, 3), 2, x(4), x(4)),
        (F.embedding, ids(12, 6, 4), x(12, 6)),
        (F.embedding, ids(12, 6, 4), x(12, 6), 3),
        (F.embedding, ids(12, 6, 4), x(12, 6), {"scale_grad_by_freq": True}),
        (torch.conv2d, x(6, 4, 5, 5), x(12, 4, 3, 3), None, 1, 1),
        (torch.conv2d, x(6, 4, 5, 5), x(12, 2, 3, 3), None, 1, 1, 1, 2),
        (torch.conv2d, x(2, 12, 5, 5), x(24, 1, 3, 3), {"groups": 12}),
        (torch.conv1d, x(6, 4, 5), x(12, 4, 3), x(12)),
        (torch.conv3d, x(2, 4, 3, 3, 3), x(6, 4, 2, 2, 2)),
        (torch.conv_transpose2d, x(6, 4, 3, 3), x(4, 6, 3, 3)),
        (torch.conv_transpose2d, x(6, 4, 3, 3), x(4, 3, 3, 3), None, 1, 0, 0, 2),
        (F.batch_norm, x(6, 4, 3, 3), const(4), positive(4).detach(), x(4), x(4), True),
        (F.batch_norm, x(6, 4, 3, 3), const(4), positive(4).detach(), x(4), x(4), False),
        (F.batch_norm, x(6, 4), None, None, None, None, True),
        (F.max_pool2d, x(6, 4, 6, 6), 3, 2, 1),
        (F.avg_pool2d, x(6, 4, 6, 6), 2),
        (F.adaptive_avg_pool2d, x(6, 4, 6, 6), 1),
        (F.interpolate, x(6, 4, 3, 3), {"size": (6, 6), "mode": "bilinear", "align_corners": False}),
        (F.grid_sample, x(6, 4, 5, 5), (x(6, 6, 2, 2) / 2).detach().requires_grad_(), {"align_corners": False}),
        lstm(layers=2, batch_first=True),
        lstm(layers=1, batch_first=False, bidirectional=True),
        (torch._VF.gru, x(6, 3, 4), x(1, 6, 2), weights(6, 4, 2), True, 1, 0.0, True, False, True),
        (torch._VF.rnn_tanh, x(3, 6, 4), x(1, 6, 2), weights(2, 4, 2), True, 1, 0.0, True, False, False),
    ],
    "attention": [
        (sdpa, x(6, 4, 6, 2), x(6, 4, 12, 2), x(6, 4, 12, 2)),
        (sdpa, x(2, 12, 6, 2), x(2, 6, 6, 2), x(2, 6, 6, 2), {"is_causal": True, "enable_gqa": True}),
        (sdpa, x(2, 4, 6, 2), x(2, 4, 6, 2), x(2, 4, 6, 2), {"is_causal": True}),
        (sdpa, x(6, 4, 6, 2), x(6, 4, 12, 2), x(6, 4, 12, 2), x(1, 4, 6, 12)),
        (sdpa, x(6, 4, 6, 2), x(6, 4, 12, 2), x(6, 4, 12, 2), {"attn_mask": mask(6, 12), "scale": 0.3}),
        (sdpa, x(6, 4, 6, 2), x(6, 4, 6, 2), x(6, 4, 6, 2), {"attn_mask": mask(6, 1, 1, 6)}),
        (sdpa, x(6, 6, 2), x(6, 6, 2), x(6, 6, 4)),
        (sdpa, x(6, 4, 6, 2), x(6, 4, 6, 2), x(6, 4, 6, 2), {"dropout_p": 0.3}),
    ],
    "whole attention": [
        (mha, x(3, 6, 4), x(5, 6, 4), x(5, 6, 4), 4, 2, x(12, 4), x(12), None, None, False, 0.0, x(4, 4), x(4)),
        (
            *(
                mha,
                x(3, 6, 4),
                x(3, 6, 4),
                x(3, 6, 4),
                4,
                2,
                x(12, 4),
                x(12),
                None,
                None,
                False,
                0.1,
                x(4, 4),
                x(4),
                False,
            ),
            {"need_weights": False, "attn_mask": const(12, 3, 3), "key_padding_mask": const(6, 3)},
        ),
    ],
    "losses": [
        (F.cross_entropy, x(12, 6), labels(6, 12)),
        (F.cross_entropy, x(12, 6), labels(6, 12), {"reduction": "sum"}),
        (F.cross_entropy, x(12, 6), labels(6, 12), {"reduction": "none"}),
        (F.cross_entropy, x(12, 6), labels(6, 12), positive(6).detach()),
        (F.cross_entropy, x(12, 6), labels(6, 12), {"label_smoothing": 0.1}),
        (F.cross_entropy, x(6, 12, 4), labels(12, 6, 4)),
        (F.cross_entropy, x(12, 6), const(12, 6).softmax(-1)),
        (F.nll_loss, x(12, 6), labels(6, 12)),
        (F.nll_loss, x(6, 12, 4), labels(12, 6, 4), {"reduction": "sum"}),
        (F.nll_loss, x(12, 6), labels(6, 12), positive(6).detach()),
        (F.kl_div, x(6, 12), positive(6, 12), {"reduction": "batchmean"}),
        (F.kl_div, x(6, 12), positive(6, 12), {"reduction": "sum", "log_target": True}),
        (F.ctc_loss, x(12, 6, 5), ids(4, 6, 3) + 1, torch.full((6,), 12), torch.tensor([3, 2, 1, 3, 2, 3])),
        (F.ctc_loss, x(12, 6, 5), ids(4, 6, 3) + 1, torch.full((6,), 12), torch.full((6,), 3), 0, "sum"),
        (F.mse_loss, x(6, 12), const(6, 12)),
        (F.mse_loss, x(6, 12), x(6, 12), {"reduction": "sum"}),
        (F.l1_loss, x(6, 12), x(6, 12), {"reduction": "none"}),
        (F.binary_cross_entropy_with_logits, x(6, 12), torch.rand(6, 12, dtype=torch.float64)),
    ],
}


def _name(case: tuple[Any, ...]) -> str:
    def text(part: Any) -> str:
        if isinstance(part, Tensor):
            return "x".join(map(str, part.shape))
        if isinstance(part, (list, tuple)):
            return "(" + ",".join(map(text, part)) + ")"
        return getattr(part, "__name__", str(part))

    return " ".join(map(text, case))


ALL = [pytest.param(case, id=f"{family} {_name(case)}") for family, cases in CASES.items() for case in cases]


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
@pytest.mark.parametrize("case", ALL)
def test_split_equals_whole(case: tuple[Any, ...], mesh_shape: tuple[int, ...], ranks: Any) -> None:
    target, *args = case
    kwargs = args.pop() if isinstance(args[-1], dict) else {}
    node, tensors = example(target, *args, **kwargs)
    assert check(node, tensors, mesh_shape, ranks=ranks, most=60) >= 1
